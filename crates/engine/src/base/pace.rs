//! When reactors and workers spin, and when they sleep.

use std::time::{Duration, Instant};

/// Decides when an idle reactor stops spinning.
///
/// Spinning pays if work comes within the limit. The length of a sleep says little, because it contains the time for
/// waking up, on both sides of a ring. So the reactor spins while spinning finds work more often than not. Then it
/// sleeps without spinning a number of times, and tries again. A reactor that is never woken never tries.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: Duration,
    /// Catches less weighted misses. At zero, spinning does not pay.
    score: u32,
    /// Sleeps until spinning is tried again; zero while it is on.
    sleeps_left: u32,
    idle_since: Option<Instant>,
}

/// The highest score. A catch adds one.
const SCORE_MAX: u32 = 16;
/// What a miss takes from the score.
const MISS: u32 = 2;
/// The score at the start of a try: two misses end it.
const SCORE_AT_TRY: u32 = 4;
const SLEEPS_BETWEEN_TRIES: u32 = 256;

impl Pace {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, score: SCORE_AT_TRY, sleeps_left: 0, idle_since: None }
    }

    /// Notes a turn with work.
    pub(crate) fn busy(&mut self) {
        if self.idle_since.take().is_some() && self.sleeps_left == 0 {
            self.score = (self.score + 1).min(SCORE_MAX);
        }
    }

    /// Notes a turn without work. Returns whether it is time to sleep.
    pub(crate) fn is_time_to_sleep(&mut self, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        self.sleeps_left > 0 || now.saturating_duration_since(since) >= self.limit
    }

    /// Notes that the reactor has slept.
    pub(crate) fn slept(&mut self) {
        self.idle_since = None;
        if self.sleeps_left > 0 {
            self.sleeps_left -= 1;
            if self.sleeps_left == 0 {
                self.score = SCORE_AT_TRY;
            }
        } else {
            self.score = self.score.saturating_sub(MISS);
            if self.score == 0 {
                self.sleeps_left = SLEEPS_BETWEEN_TRIES;
            }
        }
    }
}

/// A pace for the storage and one for the guest. A reactor waits for the storage after it gave requests to an engine,
/// and for the guest after it completed some. One of them may be too slow for spinning while the other is quick.
#[derive(Debug)]
pub(crate) struct Paces {
    storage: Pace,
    guest: Pace,
    waits_for_storage: bool,
}

impl Paces {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { storage: Pace::new(limit), guest: Pace::new(limit), waits_for_storage: false }
    }

    fn current(&mut self) -> &mut Pace {
        if self.waits_for_storage { &mut self.storage } else { &mut self.guest }
    }

    /// Notes a turn with work. `submitted` says whether an engine was given requests.
    pub(crate) fn busy(&mut self, submitted: bool) {
        self.current().busy();
        self.waits_for_storage = submitted;
    }

    /// Notes a turn without work. Returns whether it is time to sleep.
    pub(crate) fn is_time_to_sleep(&mut self, now: Instant) -> bool {
        self.current().is_time_to_sleep(now)
    }

    /// Notes that the reactor has slept.
    pub(crate) fn slept(&mut self) {
        self.current().slept();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Idles until `pace` would sleep or `work_after` has passed; returns whether it slept.
    fn idles(pace: &mut Pace, work_after: Duration) -> bool {
        let start = Instant::now();
        let mut waited = Duration::ZERO;
        while waited < work_after {
            if pace.is_time_to_sleep(start + waited) {
                pace.slept();
                return true;
            }
            waited += Duration::from_micros(1);
        }
        pace.busy();
        false
    }

    #[test]
    fn it_spins_while_that_catches_work_and_tries_again_now_and_then() {
        let limit = Duration::from_micros(64);
        let mut pace = Pace::new(limit);
        assert!((0..1000).all(|_| !idles(&mut pace, limit / 2)), "work comes in time, again and again");
        assert!((0..100).all(|_| idles(&mut pace, limit * 2)), "work never comes in time");
        assert!(pace.is_time_to_sleep(Instant::now()), "so it does not spin at all");
        let slept = (0..1000).filter(|_| idles(&mut pace, limit / 2)).count();
        assert!((100..300).contains(&slept), "{slept} sleeps before the next try found out that it pays again");
    }

    #[test]
    fn now_and_then_a_miss_does_not_end_the_spinning() {
        let limit = Duration::from_micros(64);
        let mut pace = Pace::new(limit);
        for round in 0..1000 {
            let late = round % 4 == 0;
            assert_eq!(idles(&mut pace, if late { limit * 2 } else { limit / 2 }), late);
        }
    }

    #[test]
    fn a_slow_storage_does_not_end_the_spinning_for_a_quick_guest() {
        let limit = Duration::from_micros(64);
        let mut paces = Paces::new(limit);
        for round in 0..1000 {
            paces.busy(true);
            assert!(idles(paces.current(), limit * 2));
            paces.busy(false);
            assert!(!idles(paces.current(), limit / 2), "the guest answers in time, round {round}");
        }
        assert!(paces.storage.sleeps_left > 0, "nor does the guest keep it spinning for the storage");
    }

    #[test]
    fn a_limit_of_zero_never_spins() {
        let mut pace = Pace::new(Duration::ZERO);
        pace.slept();
        assert!(pace.is_time_to_sleep(Instant::now()));
    }
}
