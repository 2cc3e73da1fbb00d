//! Exclusive use of a range of offsets by one task at a time, across threads.
//!
//! Used where two slow operations on the same place must not mix: read-modify-write of a block finer than the file's
//! alignment, allocation of the same cluster. The number of ranges held at once is small (slow operations in flight).

use crate::WaitList;
use crate::sync::{Mutex, PoisonError};
use std::ops::Range;

/// Room for this many ranges, from the beginning.
const ROOM: usize = 64;

/// Ranges held now.
#[derive(Debug, Default)]
pub struct RangeLocks {
    held: Mutex<Vec<Range<u64>>>,
    freed: WaitList,
}

impl RangeLocks {
    /// Waits until nobody holds a byte of `range`, then holds it until the guard is dropped. To hold several ranges at
    /// once, a task takes one range that covers them: taking them one by one can deadlock.
    pub async fn lock(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.freed.until(|| self.try_lock(range.clone())).await
    }

    /// Holds `range` if nobody holds a byte of it.
    pub fn try_lock(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.iter().any(|other| other.start < range.end && range.start < other.end) {
            return None;
        }
        if held.capacity() == 0 {
            held.reserve_exact(ROOM);
        }
        held.push(range.clone());
        Some(RangeGuard { locks: self, range })
    }
}

/// Holds a range; lets it go when dropped, wherever that happens.
#[derive(Debug)]
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = held.iter().position(|range| *range == self.range) {
            held.swap_remove(index);
        }
        drop(held);
        self.locks.freed.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_exclude_each_other_and_touching_ones_do_not() {
        let locks = RangeLocks::default();
        let first = locks.try_lock(0..10).unwrap();
        assert!(locks.try_lock(9..20).is_none());
        let second = locks.try_lock(10..20).unwrap();
        drop(first);
        assert!(locks.try_lock(5..11).is_none());
        drop(second);
        assert!(locks.try_lock(5..11).is_some());
    }
}
