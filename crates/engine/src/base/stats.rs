//! A reactor's counters. Only its thread writes them; any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter. Only the reactor's thread adds, so no atomic read-modify-write is needed.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Sets a count that is kept elsewhere.
    pub(crate) fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Harvests of more completions than this are counted as if they had this many.
const LONGEST_HARVEST: usize = 512;

/// Harvests, counted by their number of completions.
#[derive(Debug)]
pub(crate) struct HarvestLengths(Box<[Counter]>);

impl Default for HarvestLengths {
    fn default() -> Self {
        Self((0..=LONGEST_HARVEST).map(|_| Counter::default()).collect())
    }
}

impl HarvestLengths {
    fn add(&self, length: usize) {
        if let Some(counter) = self.0.get(length.min(LONGEST_HARVEST)) {
            counter.add(1);
        }
    }

    pub(crate) fn snapshot(&self) -> Vec<u64> {
        self.0.iter().map(Counter::get).collect()
    }
}

/// Counters of one reactor.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) turns: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) yields: Counter,
    pub(crate) system_calls: Counter,
    pub(crate) worker_calls: Counter,
    pub(crate) requests: Counter,
    pub(crate) completions: Counter,
    pub(crate) harvests: Counter,
    pub(crate) fixed: Counter,
    pub(crate) harvest_lengths: HarvestLengths,
}

/// The counts of a reactor since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReactorStats {
    /// Turns of its loop.
    pub turns: u64,
    /// The number of sleeps.
    pub sleeps: u64,
    /// Times it had nothing to do while requests were in flight, and gave up its processor before it looked again.
    pub yields: u64,
    /// System calls made to submit requests or to fetch completions.
    pub system_calls: u64,
    /// Calls that its workers made: one for each group of requests that one call carries out or begins, and one for
    /// each other part of a request.
    pub worker_calls: u64,
    /// Requests given to engines.
    pub requests: u64,
    /// Requests that ended.
    pub completions: u64,
    /// Harvests that found at least one completion.
    pub harvests: u64,
    /// System calls whose memory was registered.
    pub fixed: u64,
}

impl Counters {
    /// Counts a harvest of `count` completions.
    pub(crate) fn harvested(&self, count: usize) {
        if count > 0 {
            self.harvests.add(1);
            self.harvest_lengths.add(count);
        }
    }

    pub(crate) fn snapshot(&self) -> ReactorStats {
        ReactorStats {
            turns: self.turns.get(),
            sleeps: self.sleeps.get(),
            yields: self.yields.get(),
            system_calls: self.system_calls.get(),
            worker_calls: self.worker_calls.get(),
            requests: self.requests.get(),
            completions: self.completions.get(),
            harvests: self.harvests.get(),
            fixed: self.fixed.get(),
        }
    }
}
