//! All pools of the process, for statistics and for threads that have time to give memory back.

use super::PoolStats;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pool's functions, without its type.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) name: &'static str,
    pub(super) stats: fn() -> PoolStats,
    /// Gives back the surplus. Returns how many bytes will be surplus later.
    pub(super) maintain: fn() -> u64,
    /// Forgets the peaks, and gives back the resulting surplus.
    pub(super) trim: fn(),
}

/// A sleeping thread does not wake up for less surplus than this. The surplus stays until there is work again.
const WORTH_WAKING_BYTES: u64 = 1 << 20;

static ENTRIES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn entries() -> MutexGuard<'static, Vec<Entry>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a pool when it is first used.
pub(super) fn add(entry: Entry) {
    entries().push(entry);
}

/// Returns the entry at `index`. The list is not locked while a caller uses the entry, because making a pool takes the
/// lock.
fn get(index: usize) -> Option<Entry> {
    entries().get(index).copied()
}

/// Returns the name and the counters of every pool that this process has used.
#[must_use]
pub fn pools() -> Vec<(&'static str, PoolStats)> {
    (0..).map_while(get).map(|entry| (entry.name, (entry.stats)())).collect()
}

/// Forgets the load and gives back everything that is idle. For when the load is known to be over. Other threads give
/// their idle contexts back at their next [`maintain_pools`], or when they end.
pub fn trim_pools() {
    (0..).map_while(get).for_each(|entry| (entry.trim)());
}

/// Calls [`Pool::maintain`](super::Pool::maintain) for every pool. Returns true if much memory will be surplus once the
/// peaks are forgotten. A thread that is about to sleep should then call this again after a
/// [`DECAY_PERIOD`](super::DECAY_PERIOD).
pub fn maintain_pools() -> bool {
    let bytes = (0..).map_while(get).map(|entry| (entry.maintain)()).sum::<u64>();
    bytes >= WORTH_WAKING_BYTES
}
