//! The state that all threads of a pool share: the stacks of magazines, and the present and wanted number of contexts.

use super::magazine::Magazine;
use super::stack::{Rules, Sound, Stacks};
// The standard library's atomics even under the model checker: safety does not depend on these numbers, and exploring
// them would drown the schedules that matter.
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Fewest and most contexts that threads trade at once.
const MIN_BATCH: u64 = 4;
pub(super) const MAX_BATCH: usize = 64;
/// Other threads may hold one part in this many of the peak in flight idle while one thread finds nothing (but see
/// [`Depot::stretched_length`]).
const SLACK_SHARE: u64 = 20;
/// A thread's list is two batches at most.
pub(super) const LIST_BATCHES: u64 = 2;

/// The counters, which are written only when threads trade.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counters {
    created: AtomicU64,
    freed: AtomicU64,
    /// Sum over all threads of the contexts that each had outstanding at its last exchange. It may be off by a list's
    /// length for each thread.
    in_flight: AtomicI64,
    peak: AtomicU64,
    /// The peak of the current decay period, and of the one before.
    period_peak: AtomicU64,
    last_period_peak: AtomicU64,
    /// Threads that have a list.
    threads: AtomicUsize,
}

/// A snapshot of a pool's counters. Created, freed and total are exact. The number in flight is as of each thread's
/// last exchange, so it may be off by the length of the threads' lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Contexts ever created.
    pub created: u64,
    /// Contexts given back to the allocator.
    pub freed: u64,
    /// Contexts that exist: in flight, in a thread's list or waiting in a batch.
    pub total: u64,
    /// Contexts in use.
    pub in_flight: u64,
    /// The most that were in use at once.
    pub peak_in_flight: u64,
    /// Bytes of one context.
    pub context_bytes: u64,
}

/// The shared part of a pool.
pub(super) struct Depot<T, R = Sound> {
    stacks: Stacks<T, R>,
    counters: Counters,
}

impl<T, R: Rules> Depot<T, R> {
    pub(super) fn new(slots: u16) -> Self {
        Self { stacks: Stacks::new(slots), counters: Counters::default() }
    }

    /// As [`Stacks::take`].
    pub(super) fn take(&self, magazine: &mut Magazine<T>) -> bool {
        self.stacks.take(magazine)
    }

    /// Leaves a magazine for other threads. Returns surplus contexts, and those for which there is no room. The caller
    /// counts them with [`Depot::note_freed`], and drops them when it holds no borrow, since destructors may use the
    /// pool.
    #[must_use]
    pub(super) fn give(&self, magazine: &mut Magazine<T>) -> Magazine<T> {
        let needed = self.surplus() < magazine.len() as u64;
        if needed && self.stacks.give(magazine) {
            return Magazine::new();
        }
        std::mem::take(magazine)
    }

    /// Takes a batch that the recent load does not need.
    #[must_use]
    pub(super) fn take_surplus(&self) -> Option<Magazine<T>> {
        (self.surplus() > 0).then(|| self.take_any())?
    }

    /// Takes any batch.
    pub(super) fn take_any(&self) -> Option<Magazine<T>> {
        let mut magazine = Magazine::new();
        self.stacks.take(&mut magazine).then_some(magazine)
    }

    /// Returns the present number of contexts in a batch. While one thread finds nothing, the lists of all others may
    /// hold idle contexts. So all lists together get a fixed share of the peak.
    pub(super) fn batch_length(&self) -> usize {
        self.batch_for(self.recent_peak()) as usize
    }

    /// Returns how many contexts to create besides the one that a thread needs and did not find: together they make a
    /// batch. Otherwise a schedule could empty the list and the stack again and again at the same load, with one
    /// creation each time. Without other threads no context can be idle elsewhere.
    pub(super) fn spares_length(&self) -> usize {
        if self.threads() > 1 { self.batch_length() - 1 } else { 0 }
    }

    /// Returns the length of a magazine for a thread that alternates between freeing and taking: `stretch` times the
    /// ordinary length. But its list holds at most half of the thread's fair share of the peak, or all of the peak if
    /// there is one thread.
    pub(super) fn stretched_length(&self, stretch: usize) -> usize {
        let threads = self.threads();
        let share = self.recent_peak() / if threads > 1 { 4 * threads } else { 2 };
        let batch = self.batch_length();
        (batch * stretch).min(share as usize).clamp(batch, MAX_BATCH)
    }

    fn batch_for(&self, peak: u64) -> u64 {
        let others = self.threads().saturating_sub(1).max(1);
        (peak / (SLACK_SHARE * LIST_BATCHES * others)).clamp(MIN_BATCH, MAX_BATCH as u64)
    }

    /// Returns the number of contexts that the recent peaks do not explain.
    fn surplus(&self) -> u64 {
        self.surplus_over(self.recent_peak())
    }

    /// Returns the surplus over `peak`. Twice the room of all lists is no surplus, because the peak is not known more
    /// exactly. Freeing contexts that will be needed again is worse than keeping them.
    fn surplus_over(&self, peak: u64) -> u64 {
        let lists = self.threads() * LIST_BATCHES * self.batch_for(peak);
        self.total().saturating_sub(peak + 2 * lists)
    }

    /// Returns the surplus after the peaks are forgotten, if the load stays as it is.
    pub(super) fn coming_surplus(&self) -> u64 {
        self.surplus_over(self.in_flight())
    }

    fn threads(&self) -> u64 {
        self.counters.threads.load(Relaxed) as u64
    }

    fn total(&self) -> u64 {
        // `freed` is read first: freed contexts were created before, so the difference is never negative.
        let freed = self.counters.freed.load(Relaxed);
        self.counters.created.load(Relaxed).saturating_sub(freed)
    }

    fn in_flight(&self) -> u64 {
        self.counters.in_flight.load(Relaxed).max(0) as u64
    }

    fn recent_peak(&self) -> u64 {
        self.counters.period_peak.load(Relaxed).max(self.counters.last_period_peak.load(Relaxed))
    }

    /// Notes that a thread got its list.
    pub(super) fn join(&self) {
        self.counters.threads.fetch_add(1, Relaxed);
    }

    /// Notes that a thread's list is gone.
    pub(super) fn leave(&self) {
        self.counters.threads.fetch_sub(1, Relaxed);
    }

    pub(super) fn note_created(&self, count: usize) {
        self.counters.created.fetch_add(count as u64, Relaxed);
    }

    pub(super) fn note_freed(&self, count: usize) {
        self.counters.freed.fetch_add(count as u64, Relaxed);
    }

    /// Notes that a thread has `change` more outstanding than it last reported.
    pub(super) fn note_in_flight(&self, change: i64) {
        let now = self.counters.in_flight.fetch_add(change, Relaxed) + change;
        let now = now.max(0) as u64;
        for peak in [&self.counters.period_peak, &self.counters.peak] {
            if peak.load(Relaxed) < now {
                peak.fetch_max(now, Relaxed);
            }
        }
    }

    /// Ends a decay period: the peak of the one before last no longer counts.
    pub(super) fn end_period(&self) {
        let peak = self.counters.period_peak.swap(self.in_flight(), Relaxed);
        self.counters.last_period_peak.store(peak, Relaxed);
    }

    pub(super) fn stats(&self) -> PoolStats {
        let total = self.total();
        let freed = self.counters.freed.load(Relaxed);
        PoolStats {
            created: self.counters.created.load(Relaxed),
            freed,
            total,
            in_flight: self.in_flight().min(total),
            peak_in_flight: self.counters.peak.load(Relaxed),
            context_bytes: size_of::<T>() as u64,
        }
    }
}
