//! Reactors' threads: for jobs on images, and for the load generator.

use block::ReactorHandle;
use engine::{Reactor, ReactorConfig, ReactorThread};
use std::sync::Arc;

/// More threads than this do not make a copy faster.
const REACTORS_MAX: usize = 4;
/// How much a thread may copy at once. No ring waits for these threads, so it is the largest transfer of an image
/// command.
const INLINE_BYTES: usize = 4 << 20;

/// Reactor threads, one for each processor, up to `REACTORS_MAX`.
pub(crate) struct Reactors(Vec<ReactorThread>);

impl Reactors {
    pub(crate) fn start(name: &str) -> anyhow::Result<Self> {
        Self::start_some(name, std::thread::available_parallelism().map_or(1, usize::from).min(REACTORS_MAX))
    }

    pub(crate) fn start_some(name: &str, count: usize) -> anyhow::Result<Self> {
        let name = |index| format!("{name}-{index}");
        let config = |index| {
            ReactorConfig::default().with(|config| {
                config.name = name(index);
                config.inline_bytes = INLINE_BYTES;
            })
        };
        let threads = (0..count).map(|index| Reactor::spawn(config(index)));
        Ok(Self(threads.collect::<Result<_, _>>()?))
    }

    pub(crate) fn handles(&self) -> Vec<Arc<dyn ReactorHandle>> {
        self.0.iter().map(ReactorThread::handle).collect()
    }

    pub(crate) fn stop(self) -> anyhow::Result<()> {
        self.0.into_iter().try_for_each(|thread| Ok(thread.stop()?))
    }
}

/// Starts reactor threads for load generators.
pub(crate) fn load_threads(name: &str, count: usize) -> anyhow::Result<Vec<ReactorThread>> {
    let config = |index| ReactorConfig::default().with(|config| config.name = format!("{name}-{index}"));
    (0..count).map(|index| Ok(Reactor::spawn(config(index))?)).collect()
}
