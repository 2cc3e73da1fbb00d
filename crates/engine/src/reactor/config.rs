//! The settings of a reactor.

/// The default of [`ReactorConfig::poll_max_us`]. A single request to a fast disk takes 50 to 100 us, a batch of thirty
/// about 250. So spinning catches the former and not the latter, which would gain little for twice the processor time.
const POLL_MAX_US: u32 = 100;

/// The configuration of a reactor.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReactorConfig {
    /// The name in logs and metrics, and of the thread.
    pub name: String,
    /// The longest time that an idle reactor spins before it sleeps, in microseconds; the reactor adapts below this.
    /// Zero never spins. Its workers do not spin longer either.
    pub poll_max_us: u32,
    /// The processor that the reactor is bound to, if any.
    pub cpu: Option<usize>,
    /// The longest transfer, in bytes, that the reactor itself carries out on a file in memory. Longer ones go to a
    /// worker, so that rings need not wait. A reactor without rings loses by that.
    pub inline_bytes: usize,
    /// Whether a turn that has submitted requests also looks for completions. If false, only turns without new requests
    /// do; for measurements.
    pub harvest_after_submit: bool,
}

impl Default for ReactorConfig {
    fn default() -> Self {
        Self {
            name: "reactor".into(),
            poll_max_us: POLL_MAX_US,
            cpu: None,
            inline_bytes: 128 << 10,
            harvest_after_submit: true,
        }
    }
}

impl ReactorConfig {
    /// Changes some fields: `ReactorConfig::default().with(|config| config.cpu = Some(2))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
