//! Limits how often guests' queries make us read the storage's wear.

use std::time::{Duration, Instant};

/// The least time between two reads of the storage's wear. A guest may ask at any rate, and each read costs its
/// session's thread time and a call to the device.
const WEAR_PAUSE: Duration = Duration::from_secs(1);

/// The time at which the wear was read last.
pub(crate) struct Pace(Instant);

impl From<Instant> for Pace {
    fn from(read_at: Instant) -> Self {
        Self(read_at)
    }
}

impl Pace {
    /// Returns the time until the wear may be read again.
    pub(crate) fn pause_left(&self, now: Instant) -> Duration {
        WEAR_PAUSE.saturating_sub(now.saturating_duration_since(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_asks_all_the_time_has_the_wear_read_once_a_second() {
        let begun = Instant::now();
        let (mut pace, mut reads) = (Pace::from(begun), 0);
        for asked in 1..=10_000 {
            let now = begun + Duration::from_millis(asked);
            if pace.pause_left(now).is_zero() {
                (pace, reads) = (Pace::from(now), reads + 1);
            }
        }
        assert_eq!(reads, 10);
        assert_eq!(Pace::from(begun).pause_left(begun), WEAR_PAUSE);
    }
}
