//! Keeps logs short if a peer or a guest can cause an event again and again: the first is logged, then each by which
//! their number has doubled.

use std::sync::atomic::{AtomicU64, Ordering};

/// The log's target for what a command waits for: one that logs hardly anything else logs this.
pub const WAITING: &str = "ringdisk::waiting";

/// Counts one kind of event, on any thread.
#[derive(Debug, Default)]
pub struct LogLimit(AtomicU64);

impl LogLimit {
    /// Makes a limit that has counted nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts one more event. Returns their number if this one is to be logged.
    pub fn admit(&self) -> Option<u64> {
        if_logged(self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }
}

/// Returns the number of events if the latest of them is to be logged.
pub(crate) fn if_logged(count: u64) -> Option<u64> {
    Some(count).filter(|count| count.is_power_of_two())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_thousand_events_the_first_is_logged_and_each_that_doubles_their_number() {
        let limit = LogLimit::new();
        let logged: Vec<u64> = (0..1000).filter_map(|_| limit.admit()).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]);
    }
}
