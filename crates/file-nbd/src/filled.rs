//! The bytes of a read that have arrived.
//!
//! A server may answer a read in chunks of any order. Each byte has to come exactly once: if chunks overlapped, their
//! lengths could add up to the read's although bytes are missing. Those bytes would be what the memory held before.

use std::ops::Range;

/// The most ranges that lie apart from those before them. If a server sends more, the connection ends.
const APART_MAX: usize = 1024;

/// Usually chunks come in order, and `until` suffices.
#[derive(Debug, Default)]
pub(crate) struct Filled {
    /// All bytes before this one are here.
    until: usize,
    /// Arrived ranges behind `until`, in order.
    apart: Vec<Range<usize>>,
}

impl Filled {
    /// Adds a range that is not empty. Returns false if a part of it is here already, or if too many ranges lie apart.
    pub(crate) fn add(&mut self, range: Range<usize>) -> bool {
        if range.start < self.until {
            return false;
        }
        let next = self.apart.partition_point(|other| other.start < range.start);
        let before = next.checked_sub(1).and_then(|index| self.apart.get(index));
        let is_free = before.is_none_or(|before| before.end <= range.start)
            && self.apart.get(next).is_none_or(|after| range.end <= after.start);
        if !is_free {
            return false;
        }
        if range.start > self.until {
            if self.apart.len() >= APART_MAX {
                return false;
            }
            self.apart.insert(next, range);
            return true;
        }
        self.until = range.end;
        let joined = self.apart.iter().take_while(|other| {
            let follows = other.start == self.until;
            if follows {
                self.until = other.end;
            }
            follows
        });
        let joined = joined.count();
        self.apart.drain(..joined);
        true
    }

    /// Whether the first `length` bytes are here.
    pub(crate) fn has_all(&self, length: usize) -> bool {
        self.until >= length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_in_any_order_add_up_and_none_comes_twice() {
        let mut filled = Filled::default();
        for range in [4..6, 0..2, 8..10, 2..4] {
            assert!(filled.add(range.clone()), "{range:?}");
            assert!(!filled.has_all(10));
        }
        for range in [5..7, 7..9, 0..1, 3..5, 6..9, 9..10] {
            assert!(!filled.add(range.clone()), "{range:?}");
        }
        assert!(filled.has_all(6) && !filled.has_all(7));
        assert!(filled.add(6..8) && filled.has_all(10) && filled.apart.is_empty());
    }

    #[test]
    fn only_so_many_ranges_lie_apart() {
        let mut filled = Filled::default();
        let taken = (1..usize::MAX).take_while(|number| filled.add(number * 2..number * 2 + 1)).count();
        assert_eq!(taken, APART_MAX);
        assert!(filled.add(0..2) && filled.has_all(3));
    }
}
