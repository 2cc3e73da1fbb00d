//! How fast a copy has been lately, and how long it is going to take.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The least time between two notes.
const STEP: Duration = Duration::from_millis(500);
/// The most notes: about the last ten seconds count.
const NOTES_MAX: usize = 20;
/// After a shorter time, there is no rate yet.
const SHORTEST: Duration = Duration::from_millis(200);

#[derive(Debug, Default)]
pub(super) struct RecentRate {
    /// When how many bytes were done, the oldest first.
    notes: VecDeque<(Instant, u64)>,
}

impl RecentRate {
    /// Notes that so many bytes are done in all.
    pub(super) fn note(&mut self, now: Instant, done_bytes: u64) {
        if self.notes.back().is_some_and(|(last, _)| now.saturating_duration_since(*last) < STEP) {
            return;
        }
        if self.notes.len() >= NOTES_MAX {
            self.notes.pop_front();
        }
        self.notes.push_back((now, done_bytes));
    }

    /// Forgets the notes, because the copy has rested.
    pub(super) fn forget(&mut self) {
        self.notes.clear();
    }

    /// How long the rest takes at the recent rate; `None` if there is none.
    pub(super) fn time_for(&self, now: Instant, done_bytes: u64, left_bytes: u64) -> Option<Duration> {
        let (since, before_bytes) = self.notes.front()?;
        let (elapsed, bytes) = (now.saturating_duration_since(*since), done_bytes.saturating_sub(*before_bytes));
        if elapsed < SHORTEST || bytes == 0 {
            return None;
        }
        Duration::try_from_secs_f64(elapsed.as_secs_f64() * (left_bytes as f64 / bytes as f64)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_as_much_took_lately() {
        let (begin, mut rate) = (Instant::now(), RecentRate::default());
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(rate.time_for(at(0), 0, 100), None, "nothing is known");
        rate.note(at(0), 0);
        assert_eq!(rate.time_for(at(100), 10, 100), None, "too early");
        assert_eq!(rate.time_for(at(1000), 0, 100), None, "nothing was done");
        assert_eq!(rate.time_for(at(1000), 50, 100), Some(Duration::from_secs(2)));
        // Slow for a minute, and then fast: what was long ago does not count.
        (1..=60).for_each(|second| rate.note(at(second * 1000), 50 + second));
        (61..=90).for_each(|second| rate.note(at(second * 1000), (second - 60) * 1000));
        assert_eq!(rate.time_for(at(91_000), 31_000, 10_000), Some(Duration::from_secs(10)));
        // It hangs: the answer becomes longer.
        assert!(rate.time_for(at(120_000), 31_000, 10_000) > Some(Duration::from_secs(20)));
        rate.forget();
        assert_eq!(rate.time_for(at(121_000), 31_000, 10_000), None);
    }
}
