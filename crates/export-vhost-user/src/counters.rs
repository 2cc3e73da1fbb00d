//! What a ring counts. One thread writes, any may read: plain loads and stores, no locked instruction.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: usize) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(count as u64);
        self.0.store(sum, Ordering::Relaxed);
    }

    /// Adds one, and gives the count if that has doubled since it was last given: what a guest causes is logged then, so
    /// that it cannot fill the log.
    pub(crate) fn add_to_log(&self) -> Option<u64> {
        self.add(1);
        Some(self.get()).filter(|count| count.is_power_of_two())
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of one ring, over all sessions.
#[derive(Debug, Default)]
pub(crate) struct RingCounters {
    pub(crate) requests: Counter,
    pub(crate) batches: Counter,
    pub(crate) notifications: Counter,
    pub(crate) notifications_avoided: Counter,
    pub(crate) failed: Counter,
    pub(crate) faults: Counter,
    /// Times that it could not start. The session's thread counts these.
    pub(crate) failed_starts: Counter,
    /// Times that its memory could not be registered.
    pub(crate) unregistered: Counter,
}

/// What a ring has done since the export began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStats {
    /// Requests taken.
    pub requests: u64,
    /// Turns in which requests were taken.
    pub batches: u64,
    /// Notifications sent to the guest.
    pub notifications: u64,
    /// Batches of completions that the guest did not want to be told of.
    pub notifications_avoided: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Times that the ring stopped because the guest broke its rules, or led out of the memory that it shares.
    pub faults: u64,
}

impl RingCounters {
    pub(crate) fn snapshot(&self) -> RingStats {
        RingStats {
            requests: self.requests.get(),
            batches: self.batches.get(),
            notifications: self.notifications.get(),
            notifications_avoided: self.notifications_avoided.get(),
            failed: self.failed.get(),
            faults: self.faults.get(),
        }
    }
}
