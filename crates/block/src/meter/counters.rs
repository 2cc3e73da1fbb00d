//! The counters of a queue.

use super::counter::Counter;
use super::stopwatch::Latency;
use std::sync::{Arc, OnceLock};

/// The counters of one queue. They live as long as its device.
#[derive(Debug, Default)]
pub struct RingCounters {
    /// See [`RingStats`] for this and those that follow.
    pub requests: Counter,
    /// Turns in which requests were taken.
    pub batches: Counter,
    /// Notifications sent to the guest.
    pub notifications: Counter,
    /// Batches of completions for which the guest wanted no notification.
    pub notifications_avoided: Counter,
    /// Requests that ended with an error.
    pub failed: Counter,
    /// Times that the queue stopped.
    pub faults: Counter,
    /// Requests that the storage failed, for other reasons than its space.
    pub io_errors: Counter,
    /// Requests that the storage had no space for.
    pub no_space: Counter,
    /// Times that the guest's memory could not be registered.
    pub unregistered: Counter,
    /// Made when the latencies are first asked for, as when the queue runs for the first time.
    latency: OnceLock<Arc<Latency>>,
}

/// The counts of a queue since its device was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingStats {
    /// Requests taken.
    pub requests: u64,
    /// Turns in which requests were taken.
    pub batches: u64,
    /// Notifications sent to the guest.
    pub notifications: u64,
    /// Batches of completions for which the guest wanted no notification.
    pub notifications_avoided: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Times that the queue stopped because the guest broke its rules, or named addresses outside the memory that it
    /// shares.
    pub faults: u64,
    /// Requests that the storage failed, for other reasons than its space.
    pub io_errors: u64,
    /// Requests that the storage had no space for.
    pub no_space: u64,
    /// No count: for how long the queue's own flush has been in flight, in nanoseconds; zero if it is not.
    pub own_flush_ns: u64,
}

impl RingCounters {
    /// Returns how long the queue's requests take.
    #[must_use]
    pub fn latency(&self) -> Arc<Latency> {
        Arc::clone(self.latency.get_or_init(Arc::default))
    }

    /// Returns the latencies; `None` if the queue has never run.
    #[must_use]
    pub fn latency_if_any(&self) -> Option<&Latency> {
        self.latency.get().map(Arc::as_ref)
    }

    /// Returns a copy of the counters.
    #[must_use]
    pub fn snapshot(&self) -> RingStats {
        RingStats {
            requests: self.requests.get(),
            batches: self.batches.get(),
            notifications: self.notifications.get(),
            notifications_avoided: self.notifications_avoided.get(),
            failed: self.failed.get(),
            faults: self.faults.get(),
            io_errors: self.io_errors.get(),
            no_space: self.no_space.get(),
            own_flush_ns: self.latency_if_any().map_or(0, Latency::own_flush_ns),
        }
    }
}

impl RingStats {
    /// Adds the other queue's counts.
    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in [
            (&mut self.requests, other.requests),
            (&mut self.batches, other.batches),
            (&mut self.notifications, other.notifications),
            (&mut self.notifications_avoided, other.notifications_avoided),
            (&mut self.failed, other.failed),
            (&mut self.faults, other.faults),
            (&mut self.io_errors, other.io_errors),
            (&mut self.no_space, other.no_space),
        ] {
            *sum = sum.wrapping_add(more);
        }
        self.own_flush_ns = self.own_flush_ns.max(other.own_flush_ns);
    }
}
