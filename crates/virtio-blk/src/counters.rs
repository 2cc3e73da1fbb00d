//! What a queue counts. One thread writes, any may read: plain loads and stores, no locked instruction.

use crate::latency::Latency;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`.
    pub fn add(&self, count: usize) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(count as u64);
        self.0.store(sum, Ordering::Relaxed);
    }

    /// Adds one, and gives the count if it has doubled since it was last given. What a guest causes is logged then, so
    /// that it cannot fill the log.
    pub fn add_to_log(&self) -> Option<u64> {
        self.add(1);
        Some(self.get()).filter(|count| count.is_power_of_two())
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of one queue, for as long as its device lives.
#[derive(Debug, Default)]
pub(crate) struct RingCounters {
    pub(crate) requests: Counter,
    pub(crate) batches: Counter,
    pub(crate) notifications: Counter,
    pub(crate) notifications_avoided: Counter,
    pub(crate) failed: Counter,
    pub(crate) faults: Counter,
    /// Requests that the storage failed, and those of them for which there was no space.
    pub(crate) io_errors: Counter,
    pub(crate) no_space: Counter,
    /// Times that the guest's memory could not be registered.
    pub(crate) unregistered: Counter,
    /// Made when the queue runs for the first time.
    latency: OnceLock<Arc<Latency>>,
}

/// What a queue has done since its device was made.
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
    /// Times that the queue stopped because the guest broke its rules, or led out of the memory that it shares.
    pub faults: u64,
    /// Requests that the storage failed, for other reasons than its space.
    pub io_errors: u64,
    /// Requests that the storage had no space for.
    pub no_space: u64,
}

impl RingCounters {
    pub(crate) fn latency(&self) -> Arc<Latency> {
        Arc::clone(self.latency.get_or_init(Arc::default))
    }

    /// Nothing where the queue has never run.
    pub(crate) fn latency_if_any(&self) -> Option<&Latency> {
        self.latency.get().map(Arc::as_ref)
    }

    pub(crate) fn snapshot(&self) -> RingStats {
        RingStats {
            requests: self.requests.get(),
            batches: self.batches.get(),
            notifications: self.notifications.get(),
            notifications_avoided: self.notifications_avoided.get(),
            failed: self.failed.get(),
            faults: self.faults.get(),
            io_errors: self.io_errors.get(),
            no_space: self.no_space.get(),
        }
    }
}
