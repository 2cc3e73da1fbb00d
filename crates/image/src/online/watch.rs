//! Watches, slows down and stops copies and other long changes of running disks.

use super::recent_rate::RecentRate;
use crate::chain::give_up::GiveUp;
use crate::file_name::FileName;
use block::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Watches, slows down and stops a copy that goes on for long. Shared by the one who copies and by those who look.
///
/// The total is the disk's size, plus what guests write meanwhile and so has to be copied again. Both figures only
/// rise, and are equal when all is copied.
#[derive(Debug, Default)]
pub struct CopyWatch {
    is_cancelled: AtomicBool,
    is_decided: AtomicBool,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    left_bytes: AtomicU64,
    rounds: AtomicU64,
    longest_stall_us: AtomicU64,
    throttled_us: AtomicU64,
    is_late: AtomicBool,
    begun: OnceLock<Instant>,
    outcome: Mutex<Vec<String>>,
    waits_for: Mutex<Option<String>>,
    pace: Mutex<Pace>,
    rate: Mutex<RecentRate>,
    /// The pace has changed, or the copy is cancelled.
    changed: Condvar,
    give_up: Option<Arc<GiveUp>>,
}

#[derive(Debug, Default)]
struct Pace {
    is_paused: bool,
    bytes_per_second: Option<u64>,
    /// When the rate allows the next bytes.
    paid_at: Option<Instant>,
    aim: Aim,
}

/// What a copy has to keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Aim {
    /// It has to be done in this time.
    pub within: Option<Duration>,
    /// The most time by which the copy may delay a guest's request.
    pub stall: Option<Duration>,
}

/// How a copy of a disk that is written to comes to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CopyRounds {
    /// Passes over what was left, including the one under way.
    pub rounds: u64,
    /// What is left of this pass.
    pub left_bytes: u64,
    /// The longest delay of a guest's request because of the copy.
    pub longest_stall: Duration,
    /// The sum of the waits that guests' requests were given so that the copy gets ahead.
    pub throttled: Duration,
    /// It takes longer than the time that was set.
    pub is_late: bool,
}

impl CopyWatch {
    /// Asks for the end of the copy. It stops between two pieces, or not at all if its last piece has begun.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.change(|_| ());
    }

    /// Returns a watch whose copy ends even if its storage hangs: see [`CopyWatch::give_up`].
    #[must_use]
    pub fn that_can_give_up() -> Self {
        Self { give_up: Some(Arc::default()), ..Self::default() }
    }

    /// Cancels, and waits no longer for storage that hangs: reads, and all calls to the target of a copy, end with
    /// errors. The copy waits for writes to layers of the disk, but guests that wrote to both sides do not.
    pub fn give_up(&self) {
        self.cancel();
        if let Some(give_up) = &self.give_up {
            give_up.give_up();
        }
    }

    pub(super) fn given_up_by(&self) -> Option<&Arc<GiveUp>> {
        self.give_up.as_ref()
    }

    /// Whether it is too late to end the copy: a record of the disk may already name the result.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.is_decided.load(Ordering::Acquire)
    }

    pub(super) fn set_decided(&self, is_decided: bool) {
        self.is_decided.store(is_decided, Ordering::Release);
    }

    /// Whether somebody has asked for the end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Stops the copy between two pieces until [`CopyWatch::resume`].
    pub fn pause(&self) {
        self.change(|pace| pace.is_paused = true);
    }

    /// Lets a paused copy go on.
    pub fn resume(&self) {
        self.lock_rate().forget();
        self.change(|pace| pace.is_paused = false);
    }

    /// Whether the copy is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).is_paused
    }

    /// Sets the most bytes that are moved in a second while guests go on; 0 lifts the limit.
    pub fn set_rate(&self, bytes_per_second: u64) {
        self.change(|pace| {
            pace.bytes_per_second = Some(bytes_per_second).filter(|rate| *rate > 0);
            pace.paid_at = None;
        });
    }

    fn change(&self, change: impl FnOnce(&mut Pace)) {
        change(&mut self.pace.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Bytes looked at; never more than the total that is asked for afterwards.
    #[must_use]
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Acquire)
    }

    /// Bytes to look at, as far as known.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    /// How long the rest takes at the rate of the last seconds; `None` if that is unknown. Further writes of guests are
    /// not foreseen.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        if self.is_paused() || self.is_cancelled() {
            return None;
        }
        let done_bytes = self.done_bytes();
        let left_bytes = self.total_bytes().saturating_sub(done_bytes);
        self.lock_rate().time_for(Instant::now(), done_bytes, left_bytes)
    }

    fn lock_rate(&self) -> MutexGuard<'_, RecentRate> {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to the result, in words for people.
    pub fn add_outcome(&self, outcome: String) {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
    }

    /// Notes that a layer has gone, and that its file keeps its space. That is no failure: the disk does not need it.
    pub(super) fn keeps_space(&self, file: &FileName, error: &Error) {
        tracing::warn!("'{file}' is no layer of its disk any more, and keeps its space: {error}");
        self.add_outcome(format!(
            "'{file}' is no longer needed, but keeps its space: remove it, or run 'ringdisk check -r leaks' on it ({error})"
        ));
    }

    /// Says, in words for people, what it waits for that somebody may have to put right.
    pub(super) fn waits_for(&self, what: Option<String>) {
        *self.waits_for.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    /// Returns the result, if there is more to say than that it is done, and what it waits for.
    #[must_use]
    pub fn outcome(&self) -> Option<String> {
        let mut said = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone();
        said.extend(self.waits_for.lock().unwrap_or_else(PoisonError::into_inner).clone());
        Some(said.join("; ")).filter(|said| !said.is_empty())
    }

    /// Sets what the copy has to keep to.
    pub fn set_aim(&self, aim: Aim) {
        self.change(|pace| pace.aim = aim);
    }

    fn aim(&self) -> Aim {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).aim
    }

    /// Returns how the copy comes to its end.
    #[must_use]
    pub fn rounds(&self) -> CopyRounds {
        let micros = |count: &AtomicU64| Duration::from_micros(count.load(Ordering::Relaxed));
        CopyRounds {
            rounds: self.rounds.load(Ordering::Relaxed),
            left_bytes: self.left_bytes.load(Ordering::Relaxed),
            longest_stall: micros(&self.longest_stall_us),
            throttled: micros(&self.throttled_us),
            is_late: self.is_late.load(Ordering::Relaxed),
        }
    }

    /// Notes that a pass over so many bytes begins.
    pub(super) fn round(&self, bytes: u64) {
        self.begun.get_or_init(Instant::now);
        self.more(bytes);
        self.lock_rate().note(Instant::now(), self.done_bytes());
        self.left(bytes);
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn left(&self, bytes: u64) {
        self.left_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Notes that so many bytes of a pass are left to the next one, which counts them again.
    pub(super) fn again(&self, bytes: u64) {
        self.done(bytes);
    }

    pub(super) fn note_hold(&self, hold: Duration) {
        self.longest_stall_us.fetch_max(micros(hold), Ordering::Relaxed);
    }

    pub(super) fn note_waits(&self, throttled: Duration, longest: Duration) {
        self.throttled_us.fetch_max(micros(throttled), Ordering::Relaxed);
        self.note_hold(longest);
    }

    fn elapsed(&self) -> Duration {
        self.begun.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Whether the rounds have to end, because the time would not be enough for the rest of this one and as much again.
    pub(super) fn has_to_hurry(&self, left_bytes: u64) -> bool {
        let (Some(within), elapsed) = (self.aim().within, self.elapsed()) else { return false };
        if elapsed.saturating_mul(20) < within {
            return false;
        }
        let rest = time_for(left_bytes, self.done_bytes(), elapsed);
        elapsed.saturating_add(rest.saturating_mul(2)) > within
    }

    /// Returns how long each write has to wait so that the rest is copied in time. `done_bytes` were copied since
    /// `since`, while each write waited for `delay`.
    pub(super) fn delay_for(&self, left_bytes: u64, done_bytes: u64, since: Instant, delay: Duration) -> Duration {
        let Aim { within: Some(within), stall } = self.aim() else { return Duration::ZERO };
        let most = stall.map_or(DELAY_MAX, |stall| part(stall, 2).clamp(DELAY_MIN, DELAY_MAX));
        let elapsed = self.elapsed();
        let rest = time_for(left_bytes, done_bytes, since.elapsed());
        let end = elapsed.saturating_add(rest.saturating_add(part(rest, 4)));
        if elapsed > within && left_bytes > 0 {
            self.is_late.store(true, Ordering::Relaxed);
        }
        match end > within {
            true => delay.saturating_mul(2).clamp(DELAY_MIN, most),
            false if delay <= DELAY_MIN => Duration::ZERO,
            false => part(delay, 2),
        }
    }

    /// Returns how large a piece may be while guests wait for it and `at_once` pieces are copied: at most `most_bytes`.
    pub(super) fn piece_bytes(&self, most_bytes: u64, at_once: usize) -> u64 {
        let Some(stall) = self.aim().stall else { return most_bytes };
        let rate = self.done_bytes() as f64 / self.elapsed().as_secs_f64().max(0.001);
        let bytes = (rate * stall.as_secs_f64() / 4.0 / at_once.max(1) as f64) as u64;
        bytes.clamp(PIECE_BYTES_MIN, most_bytes.max(PIECE_BYTES_MIN)).next_multiple_of(PIECE_BYTES_MIN).min(most_bytes)
    }

    pub(super) fn more(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn done(&self, bytes: u64) {
        // Whoever sees this sees the total that it is part of.
        let before_bytes = self.done_bytes.fetch_add(bytes, Ordering::Release);
        self.lock_rate().note(Instant::now(), before_bytes.saturating_add(bytes));
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.is_cancelled.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Cancelled, "cancelled: the disk keeps its layers")),
        }
    }

    /// Whether [`CopyWatch::pace`] may have to wait: the copy is paused, or its rate has a limit.
    pub(super) fn has_to_wait(&self) -> bool {
        let pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        pace.is_paused || pace.bytes_per_second.is_some()
    }

    /// Waits while the copy is paused, and until its rate allows so many bytes.
    pub(super) fn pace(&self, bytes: u64) {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rate) = pace.bytes_per_second {
            let now = Instant::now();
            let from = pace.paid_at.filter(|paid_at| *paid_at > now).unwrap_or(now);
            let takes = Duration::from_secs_f64((bytes as f64 / rate as f64).min(3600.0));
            pace.paid_at = from.checked_add(takes);
        }
        while !self.is_cancelled.load(Ordering::Relaxed) {
            let left = pace.paid_at.map_or(Duration::ZERO, |paid_at| paid_at.saturating_duration_since(Instant::now()));
            if !pace.is_paused && left.is_zero() {
                return;
            }
            let longest = if pace.is_paused { Duration::from_secs(3600) } else { left };
            pace = self.changed.wait_timeout(pace, longest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The shortest time that a write is made to wait.
const DELAY_MIN: Duration = Duration::from_millis(1);
/// The longest time, unless [`Aim::stall`] sets one.
const DELAY_MAX: Duration = Duration::from_millis(25);
/// A piece that guests wait for is not smaller than this.
const PIECE_BYTES_MIN: u64 = 64 << 10;

fn part(duration: Duration, parts: u32) -> Duration {
    duration.checked_div(parts).unwrap_or(duration)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// How long `left_bytes` take if `done_bytes` took `elapsed`.
fn time_for(left_bytes: u64, done_bytes: u64, elapsed: Duration) -> Duration {
    let seconds = left_bytes as f64 / done_bytes.max(1) as f64 * elapsed.as_secs_f64();
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_copy_waits_until_it_is_resumed_or_cancelled() {
        let watch = Arc::new(CopyWatch::default());
        for end in [CopyWatch::resume, CopyWatch::cancel] {
            watch.pause();
            let its = Arc::clone(&watch);
            let copy = std::thread::spawn(move || its.pace(1));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!copy.is_finished());
            end(&watch);
            copy.join().unwrap();
        }
    }

    #[test]
    fn the_time_left_is_known_once_something_was_done_and_not_while_it_rests() {
        let watch = CopyWatch::default();
        assert_eq!(watch.time_left(), None);
        watch.round(1000);
        std::thread::sleep(Duration::from_millis(250));
        assert_eq!(watch.time_left(), None, "nothing was done");
        watch.done(500);
        assert!(watch.time_left() >= Some(Duration::from_millis(250)));
        watch.pause();
        assert_eq!(watch.time_left(), None);
        watch.resume();
        assert_eq!(watch.time_left(), None, "the rest does not count");
    }

    #[test]
    fn a_limit_makes_a_copy_wait_and_can_be_lifted() {
        let watch = Arc::new(CopyWatch::default());
        watch.set_rate(1 << 20);
        let begun = Instant::now();
        watch.pace(1 << 18);
        assert!(begun.elapsed() >= Duration::from_millis(249));
        watch.set_rate(1);
        let its = Arc::clone(&watch);
        let copy = std::thread::spawn(move || its.pace(1 << 20));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!copy.is_finished());
        watch.set_rate(0);
        copy.join().unwrap();
    }
}
