//! How whoever changes a running disk is watched, slowed down and stopped.

use block::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Watches, slows down and stops a copy that goes on for long. Shared by the one who copies and by those who look.
///
/// The total is the disk's size, plus what guests write meanwhile and so has to be copied again. Both figures only rise,
/// and are equal when all is copied.
#[derive(Debug, Default)]
pub struct CopyWatch {
    is_cancelled: AtomicBool,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    pace: Mutex<Pace>,
    /// The pace has changed, or the copy is cancelled.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Pace {
    is_paused: bool,
    bytes_per_second: Option<u64>,
    /// When what was moved so far is paid for.
    paid_at: Option<Instant>,
}

impl CopyWatch {
    /// Asks for the end of the copy. It stops between two pieces, or not at all if its last piece has begun.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.change(|_| ());
    }

    /// Whether somebody has asked for the end.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }

    /// Stops the copy between two pieces until [`CopyWatch::resume`]. While guests are held, it is not stopped.
    pub fn pause(&self) {
        self.change(|pace| pace.is_paused = true);
    }

    /// Goes on.
    pub fn resume(&self) {
        self.change(|pace| pace.is_paused = false);
    }

    /// Whether it is to wait.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).is_paused
    }

    /// The most bytes that are moved in a second while guests go on; 0 lifts the limit.
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

    pub(super) fn more(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn done(&self, bytes: u64) {
        // Whoever sees this sees the total that it is part of.
        self.done_bytes.fetch_add(bytes, Ordering::Release);
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.is_cancelled.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Cancelled, "cancelled: the disk keeps its layers")),
        }
    }

    /// Waits as long as the copy is paused, and until so many bytes are paid for. Not to be called while guests are held.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

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
