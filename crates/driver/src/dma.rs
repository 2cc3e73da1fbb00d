//! Memory shared with the device, handed out as buffers.

use block::{Error, ErrorKind, Result};
use memory::{IoBuf, Mapping, PAGE_BYTES};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The free part of the shared memory. It is used on slow paths only.
#[derive(Debug)]
pub(crate) struct DmaPool {
    mapping: Arc<Mapping>,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// Free ranges, sorted by address and merged.
    ranges: Vec<Range<usize>>,
    /// Requests whose queue was dropped while the device had them. It may still write to their memory.
    orphans: usize,
    /// Ranges given back while there were orphans. They are not handed out before the orphans are done.
    quarantine: Vec<Range<usize>>,
}

/// A buffer's claim on its range, given back with the last handle to the buffer.
struct Claim {
    pool: Arc<DmaPool>,
    range: Range<usize>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut free = self.pool.lock();
        match free.orphans {
            0 => free.give_back(self.range.clone()),
            _ => free.quarantine.push(self.range.clone()),
        }
    }
}

impl Free {
    fn give_back(&mut self, range: Range<usize>) {
        let at = self.ranges.partition_point(|other| other.start < range.start);
        self.ranges.insert(at, range);
        self.ranges.dedup_by(|next, previous| {
            let touches = previous.end == next.start;
            if touches {
                previous.end = next.end;
            }
            touches
        });
    }

    fn take(&mut self, length_bytes: usize) -> Option<Range<usize>> {
        let at = self.ranges.iter().position(|range| range.len() >= length_bytes)?;
        let range = self.ranges.get_mut(at)?;
        let taken = range.start..range.start + length_bytes;
        range.start = taken.end;
        if range.start == range.end {
            self.ranges.remove(at);
        }
        Some(taken)
    }
}

impl DmaPool {
    /// Makes a pool of `range` of the mapping, in pages.
    pub(crate) fn new(mapping: Arc<Mapping>, range: Range<usize>) -> Arc<Self> {
        let free = Free { ranges: vec![range], ..Free::default() };
        Arc::new(Self { mapping, free: Mutex::new(free) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a page-aligned buffer, with its old contents.
    pub(crate) fn alloc(self: &Arc<Self>, length_bytes: usize) -> Result<IoBuf> {
        let none = || {
            let what = format!("no {length_bytes} bytes of shared memory left: give the driver more memory_bytes");
            Error::new(ErrorKind::BadOption, what)
        };
        let rounded = length_bytes.checked_next_multiple_of(PAGE_BYTES).ok_or_else(none)?;
        if rounded == 0 {
            return Ok(IoBuf::empty());
        }
        let range = self.lock().take(rounded).ok_or_else(none)?;
        let claim = Claim { pool: Arc::clone(self), range: range.clone() };
        IoBuf::in_mapping(&self.mapping, range.start, length_bytes, Box::new(claim)).ok_or_else(none)
    }

    /// Notes that `count` requests outlive their queue.
    pub(crate) fn add_orphans(&self, count: usize) {
        self.lock().orphans += count;
    }

    /// Notes that an orphan is done.
    pub(crate) fn orphan_done(&self) {
        let mut free = self.lock();
        free.orphans = free.orphans.saturating_sub(1);
        if free.orphans == 0 {
            for range in std::mem::take(&mut free.quarantine) {
                free.give_back(range);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pages: usize) -> Arc<DmaPool> {
        let (_, mapping) = Mapping::anonymous_file(c"dma", pages * PAGE_BYTES).unwrap();
        DmaPool::new(Arc::new(mapping), 0..pages * PAGE_BYTES)
    }

    #[test]
    fn what_is_dropped_can_be_had_again_as_a_whole() {
        let pool = pool(4);
        let parts: Vec<_> = (0..4).map(|_| pool.alloc(4000).unwrap()).collect();
        assert!(pool.alloc(1).is_err());
        let [a, b, c, d] = parts.try_into().unwrap();
        drop((c, a, d));
        assert!(pool.alloc(3 * PAGE_BYTES).is_err(), "the second page is still taken");
        drop(b);
        assert_eq!(pool.alloc(4 * PAGE_BYTES).unwrap().length_bytes(), 4 * PAGE_BYTES);
    }

    #[test]
    fn memory_that_the_device_may_still_write_is_given_to_nobody() {
        let pool = pool(1);
        let buffer = pool.alloc(1).unwrap();
        pool.add_orphans(2);
        drop(buffer);
        assert!(pool.alloc(1).is_err());
        pool.orphan_done();
        assert!(pool.alloc(1).is_err());
        pool.orphan_done();
        assert!(pool.alloc(1).is_ok());
    }
}
