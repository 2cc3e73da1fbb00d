//! Limits of a disk's rate, and the time at which each lets the next unit through.

/// What was not used during this time may be made up for. This covers late wake-ups, so that the rate is kept. Shared
/// hosts wake a thread up to 15 ms late; with 1 ms of slack the rate fell by 2% there.
pub(super) const SLACK_NS: u64 = 20_000_000;
/// What may be made up for after a pause, in which nobody asked for anything. A second after it must not have more
/// requests than others.
const SLACK_OF_A_PAUSE_NS: u64 = 1_000_000;
pub(super) const NANOS: u64 = 1_000_000_000;

/// One limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rate {
    /// Units a second; `None` for no limit.
    pub per_second: Option<u64>,
    /// Units that may pass at once after a time without any.
    pub burst: u64,
}

impl Rate {
    /// Returns a limit without bursts.
    #[must_use]
    pub fn of(per_second: u64) -> Self {
        Self { per_second: Some(per_second), burst: 0 }
    }
}

/// The limits of reads, of writes, or of both together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Rates {
    /// Requests.
    pub requests: Rate,
    /// Bytes of data.
    pub bytes: Rate,
}

/// The limits of a disk or of a group of disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ThrottleLimits {
    /// Reads and writes together. Discards and zeroing count as writes without data.
    pub total: Rates,
    /// Reads.
    pub reads: Rates,
    /// Writes.
    pub writes: Rates,
}

impl ThrottleLimits {
    /// Changes some of the limits: `ThrottleLimits::default().with(|limits| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// One limit, and the time at which it lets the next unit through.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bucket {
    rate: Rate,
    next_ns: u64,
}

impl Bucket {
    pub(super) fn cost_ns(&self, units: u64) -> u64 {
        let Some(per_second) = self.rate.per_second else { return 0 };
        let nanos = u128::from(units).saturating_mul(u128::from(NANOS)).div_ceil(u128::from(per_second.max(1)));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    /// Returns the time from which a request may pass.
    pub(super) fn opens_ns(&self) -> u64 {
        if self.rate.per_second.is_some() { self.next_ns } else { 0 }
    }

    pub(super) fn charge(&mut self, now_ns: u64, units: u64) {
        let slack_ns = SLACK_NS.max(self.cost_ns(self.rate.burst));
        self.next_ns = self.next_ns.max(now_ns.saturating_sub(slack_ns)).saturating_add(self.cost_ns(units));
    }

    /// Forgets what was not used during a pause, but for a burst that the user allows.
    pub(super) fn forget_pause(&mut self, now_ns: u64) {
        let slack_ns = SLACK_OF_A_PAUSE_NS.max(self.cost_ns(self.rate.burst));
        self.next_ns = self.next_ns.max(now_ns.saturating_sub(slack_ns));
    }

    /// Sets a new limit. Past use counts as if the new limit had applied, so that neither a burst nor a long wait
    /// follows.
    pub(super) fn set(&mut self, now_ns: u64, rate: Rate) {
        self.rate = rate;
        let one_ns = self.cost_ns(1);
        self.next_ns = self.next_ns.clamp(now_ns, now_ns.saturating_add(one_ns));
    }
}
