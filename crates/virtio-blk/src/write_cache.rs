//! The guest's cache type: with write-back, completed writes may still be lost; with write-through, they are durable.
//!
//! The type belongs to one device. Devices over the same disk have types of their own.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use virtio::blk::features as f;

/// The cache type of a device, and the settings of its guest.
#[derive(Debug)]
pub(crate) struct WriteCache {
    /// Completed writes may be lost without a flush. If false, every write is durable anyway.
    volatile: bool,
    /// The features that the driver chose.
    acked: AtomicU64,
    /// The value of the `writeback` byte: true is write-back.
    write_back: AtomicBool,
    /// The byte that the guest wrote last. It outlives resets: monitors (QEMU) show later drivers their own copy, which
    /// a reset does not change.
    last_word: AtomicBool,
    /// The guest was there before this program, and has not yet shown, by a flush or by the byte, how it uses the
    /// cache.
    unknown_guest: AtomicBool,
    /// Queues ran here, so the guest is not one that another program served before.
    settled: AtomicBool,
    /// Each write must be durable before it completes.
    write_through: AtomicBool,
    /// The number of times that the cache has switched to durable writes. Writes before the last switch may be volatile
    /// until a flush has ended that began after it. Each queue sends that flush for itself. A volatile cache begins with
    /// one: a process that was killed may have left writes that only the host's cache has.
    begun: AtomicU32,
    /// The last value of `begun` for which some queue's flush has ended well.
    flushed: AtomicU32,
}

impl WriteCache {
    /// Makes a cache that is volatile or not, and begins as write-back or not.
    pub(crate) fn new(volatile: bool, write_back: bool) -> Self {
        Self {
            volatile,
            acked: AtomicU64::new(0),
            write_back: AtomicBool::new(write_back),
            last_word: AtomicBool::new(write_back),
            unknown_guest: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            // If it stays write-through, that is no switch: the flush of the beginning is enough.
            write_through: AtomicBool::new(volatile),
            begun: AtomicU32::new(u32::from(volatile)),
            flushed: AtomicU32::new(0),
        }
    }

    /// Whether there is anything to flush, and so a choice to offer.
    pub(crate) fn is_volatile(&self) -> bool {
        self.volatile
    }

    /// Whether the `writeback` byte shows write-back.
    pub(crate) fn is_write_back(&self) -> bool {
        self.write_back.load(Ordering::Relaxed)
    }

    /// Whether a write must be durable before it completes.
    #[inline]
    pub(crate) fn write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed) || self.unknown_guest.load(Ordering::Relaxed)
    }

    /// Notes a write of the guest to the `writeback` byte.
    pub(crate) fn set_write_back(&self, write_back: bool) {
        self.write_back.store(write_back, Ordering::Relaxed);
        self.last_word.store(write_back, Ordering::Relaxed);
        self.guest_is_known();
        self.apply();
    }

    /// Returns how often the cache has switched to durable writes. The guest then relies on all earlier writes, of all
    /// queues. So each durable write of a queue takes a flush along until the queue has ended one that it began after
    /// the last switch.
    #[inline]
    pub(crate) fn begun(&self) -> u32 {
        self.begun.load(Ordering::Acquire)
    }

    /// Returns the last value of [`WriteCache::begun`] for which earlier writes, of all queues, are durable.
    pub(crate) fn flushed(&self) -> u32 {
        self.flushed.load(Ordering::Acquire)
    }

    /// Notes that a flush has ended which began when [`WriteCache::begun`] was `begun`.
    pub(crate) fn has_flushed(&self, begun: u32) {
        self.flushed.fetch_max(begun, Ordering::AcqRel);
    }

    /// Sets the cache's type after a negotiation (either type is allowed, 5.2.5): as the guest left it. But a guest
    /// that may choose and cannot flush begins with write-through (5.2.5.2).
    pub(crate) fn negotiated(&self, acked: u64) {
        self.acked.store(acked, Ordering::Relaxed);
        let cannot_flush = acked & (f::CONFIG_WCE | f::FLUSH) == f::CONFIG_WCE;
        self.write_back.store(!cannot_flush && self.last_word.load(Ordering::Relaxed), Ordering::Relaxed);
        self.apply();
    }

    /// Notes that a queue goes on at a position that this program never reached. Another program served this guest
    /// before, and the guest may have chosen write-through there. Monitors do not repeat that, so writes are durable
    /// until the guest shows what it expects.
    pub(crate) fn taken_over(&self) {
        let may_choose = self.acked.load(Ordering::Relaxed) & f::CONFIG_WCE != 0;
        if may_choose && self.volatile && !self.settled.load(Ordering::Relaxed) {
            self.begun.fetch_add(1, Ordering::Release);
            self.unknown_guest.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that from here on queues go on where this program left them.
    pub(crate) fn settle(&self) {
        self.settled.store(true, Ordering::Relaxed);
    }

    /// Notes that the guest flushes: so it expects write-back, or relies on nothing.
    #[inline]
    pub(crate) fn guest_flushes(&self) {
        if self.unknown_guest.load(Ordering::Relaxed) {
            self.guest_is_known();
        }
    }

    fn guest_is_known(&self) {
        self.settle();
        self.unknown_guest.store(false, Ordering::Relaxed);
    }

    /// Decides from the negotiated features whether each write is durable. A guest with CONFIG_WCE chooses in the
    /// configuration space. One with FLUSH alone sends flushes, and one with neither cannot flush (5.2.6.2).
    fn apply(&self) {
        let acked = self.acked.load(Ordering::Relaxed);
        let write_back = match acked & f::CONFIG_WCE != 0 {
            true => self.is_write_back(),
            false => acked & f::FLUSH != 0,
        };
        let write_through = self.volatile && !write_back;
        if write_through && !self.write_through.load(Ordering::Relaxed) {
            self.begun.fetch_add(1, Ordering::Release);
        }
        self.write_through.store(write_through, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: u64 = f::FLUSH | f::CONFIG_WCE;

    #[test]
    fn a_guest_that_cannot_flush_gets_durable_writes() {
        let cache = WriteCache::new(true, true);
        let through = |acked| {
            cache.negotiated(acked);
            cache.write_through()
        };
        assert!(through(f::VERSION_1));
        assert!(!through(f::FLUSH));
        assert!(!through(BOTH));
        cache.set_write_back(false);
        assert!(cache.write_through());
        assert!(through(BOTH), "it holds also for the next driver");
        assert!(!through(f::FLUSH), "without CONFIG_WCE the byte says nothing");
        cache.set_write_back(true);
        assert!(!through(BOTH));
        assert!(through(f::CONFIG_WCE) && !cache.is_write_back(), "it could choose, but not flush");
        assert!(!through(BOTH) && cache.is_write_back(), "the next driver can");
        let durable = WriteCache::new(false, false);
        durable.negotiated(0);
        assert!(!durable.write_through() && durable.begun() == durable.flushed(), "it has nothing to flush");
    }

    #[test]
    fn a_cache_may_begin_write_through_and_be_switched() {
        let cache = WriteCache::new(true, false);
        cache.negotiated(BOTH);
        assert!(cache.write_through() && !cache.is_write_back());
        cache.set_write_back(true);
        assert!(!cache.write_through());
        cache.negotiated(f::FLUSH);
        assert!(!cache.write_through(), "a guest that cannot read the byte flushes itself");
    }

    #[test]
    fn a_guest_from_before_gets_durable_writes_until_it_shows_what_it_expects() {
        let taken_over = |acked| {
            let cache = WriteCache::new(true, true);
            cache.negotiated(acked);
            cache.taken_over();
            cache
        };
        assert!(taken_over(BOTH).write_through());
        assert!(!taken_over(f::FLUSH).write_through(), "it could not choose, and flushes");
        let flushed = taken_over(BOTH);
        flushed.guest_flushes();
        flushed.taken_over();
        assert!(!flushed.write_through());
        let told = taken_over(BOTH);
        told.set_write_back(true);
        assert!(!told.write_through());
        told.set_write_back(false);
        told.guest_flushes();
        assert!(told.write_through(), "what it said holds, whatever it sends");
        let stopped = WriteCache::new(true, true);
        stopped.negotiated(BOTH);
        stopped.settle();
        stopped.taken_over();
        assert!(!stopped.write_through(), "the queue was ours");
    }
}
