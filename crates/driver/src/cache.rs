//! The device's cache type: whether completed writes can be lost. It may be switched while requests are in flight.
//!
//! It is all in one word, so a request can see later whether anything has changed since it was sent.

use std::sync::atomic::{AtomicU64, Ordering};

/// Completed writes may be lost until a flush.
const VOLATILE: u64 = 1;
/// Earlier writes could be lost, and no flush has covered them since: switching does not make them durable (5.2.5.1).
const OWED: u64 = 2;
/// One switch: the bits from here up count switches.
const SWITCH: u64 = 4;

/// The cache type of a device.
#[derive(Debug)]
pub(crate) struct CacheType(AtomicU64);

/// The cache type at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CacheMoment(u64);

impl CacheMoment {
    pub(crate) fn is_volatile(self) -> bool {
        self.0 & VOLATILE != 0
    }

    /// Whether a flush has anything to do.
    pub(crate) fn needs_flush(self) -> bool {
        self.0 & (VOLATILE | OWED) != 0
    }

    /// Whether data that were sent at this moment and have ended by `now` may be lost.
    pub(crate) fn may_lose(self, now: Self) -> bool {
        let switches = |moment: Self| moment.0 / SWITCH;
        self.is_volatile() || switches(self) != switches(now)
    }
}

impl CacheType {
    pub(crate) fn new(volatile: bool) -> Self {
        Self(AtomicU64::new(if volatile { VOLATILE } else { 0 }))
    }

    #[inline]
    pub(crate) fn now(&self) -> CacheMoment {
        CacheMoment(self.0.load(Ordering::Acquire))
    }

    /// Notes that the device was switched, or is just about to become volatile. Returns whether that is new.
    pub(crate) fn switch(&self, volatile: bool) -> bool {
        let switched = |word: u64| {
            let was = word & VOLATILE != 0;
            let owed = if was && !volatile { OWED } else { word & OWED };
            let next = (word & !(VOLATILE | OWED)).wrapping_add(SWITCH) | owed | u64::from(volatile);
            (was != volatile).then_some(next)
        };
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, switched).is_ok()
    }

    /// Notes that a flush has succeeded that was sent at `moment`, with nothing else in flight.
    pub(crate) fn flushed(&self, moment: CacheMoment) {
        if moment.0 & (VOLATILE | OWED) == OWED {
            // If it was switched since, another flush is owed.
            let _ = self.0.compare_exchange(moment.0, moment.0 & !OWED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_before_a_switch_to_write_through_is_owed_one_flush() {
        let cache = CacheType::new(true);
        assert!(cache.switch(false) && !cache.switch(false));
        let moment = cache.now();
        assert!(!moment.is_volatile() && moment.needs_flush());
        cache.flushed(moment);
        assert!(!cache.now().needs_flush());
        assert!(!CacheType::new(false).now().needs_flush(), "nothing was ever volatile");
    }

    #[test]
    fn a_flush_that_was_overtaken_by_a_switch_settles_nothing() {
        let cache = CacheType::new(true);
        cache.switch(false);
        let early = cache.now();
        cache.switch(true);
        cache.switch(false);
        cache.flushed(early);
        assert!(cache.now().needs_flush());
    }

    #[test]
    fn data_may_be_lost_if_the_cache_was_volatile_at_any_time_meanwhile() {
        let cache = CacheType::new(false);
        let sent = cache.now();
        assert!(!sent.may_lose(cache.now()));
        cache.switch(true);
        cache.switch(false);
        assert!(sent.may_lose(cache.now()), "it was, in between");
        let sent = CacheType::new(true);
        assert!(sent.now().may_lose(sent.now()));
    }
}
