//! A counter. One thread writes and any may read, so plain loads and stores suffice, without a locked instruction.

use crate::log_limit::if_logged;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`.
    #[inline]
    pub fn add(&self, count: usize) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(count as u64);
        self.0.store(sum, Ordering::Relaxed);
    }

    /// Adds one. Returns the count if this event is to be logged, as [`crate::LogLimit`] decides.
    pub fn add_to_log(&self) -> Option<u64> {
        self.add(1);
        if_logged(self.get())
    }

    /// Returns the count.
    #[inline]
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
