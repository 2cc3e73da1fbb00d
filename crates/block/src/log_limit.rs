//! Limits the logging of events that a guest or a peer can repeat at will: the first is logged, and then each time that
//! their number has doubled.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter of one kind of event.
#[derive(Debug, Default)]
pub struct LogLimit(AtomicU64);

impl LogLimit {
    /// Makes a counter of no events.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts one event. Returns the number if it is to be logged.
    pub fn admit(&self) -> Option<u64> {
        let count = self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        Some(count).filter(|count| count.is_power_of_two())
    }
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
