//! Writes that the server has acknowledged and no flush has covered.
//!
//! If the server goes, it may have lost these writes. So they are repeated in the same order before anything else, and
//! the next flush covers them.
//!
//! Durable writes are not kept. They remove older writes to the same place: repeating those would overwrite the newer
//! data.

use crate::calls::{Payload, Wish};
use memory::to_usize;
use std::collections::VecDeque;
use std::ops::Range;

/// With more bytes than this, the thread sends a flush of its own. With twice as many, writes wait for it.
const BYTES_MAX: usize = 32 << 20;
/// Bytes that an entry takes beside its data.
const ENTRY_BYTES: usize = 128;

/// A change of the disk.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Data(Payload),
    Zeroes { length_bytes: u64, may_unmap: bool },
}

impl Change {
    fn held_bytes(&self) -> usize {
        match self {
            // Each part of a buffer keeps the whole buffer.
            Self::Data(data) => data.held_bytes().saturating_add(ENTRY_BYTES),
            Self::Zeroes { .. } => ENTRY_BYTES,
        }
    }

    fn length_bytes(&self) -> u64 {
        match self {
            Self::Data(data) => data.len() as u64,
            Self::Zeroes { length_bytes, .. } => *length_bytes,
        }
    }
}

/// Returns the most bytes that a wish adds here at its end.
pub(crate) fn kept_bytes(wish: &Wish) -> usize {
    match wish {
        Wish::Write { data, fua: false } => data.held_bytes().saturating_add(ENTRY_BYTES),
        // A durable write may cut an older entry in two.
        Wish::Write { fua: true, .. } | Wish::Zero { .. } => ENTRY_BYTES,
        _ => 0,
    }
}

/// A change, and where it begins.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Parts of one change share the number.
    number: u64,
    pub(crate) offset: u64,
    pub(crate) change: Change,
}

impl Entry {
    fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.change.length_bytes())
    }

    fn overlaps(&self, other: &Range<u64>) -> bool {
        let own = self.range();
        own.start < other.end && other.start < own.end
    }

    /// Returns the part inside a range; `None` if nothing is.
    fn inside(&self, range: Range<u64>) -> Option<Self> {
        let own = self.range();
        let (start, end) = (own.start.max(range.start), own.end.min(range.end));
        let length_bytes = end.checked_sub(start).filter(|length| *length > 0)?;
        let change = match &self.change {
            Change::Data(data) => {
                let at = |place: u64| to_usize(place.saturating_sub(own.start));
                Change::Data(data.part(at(start)..at(end)))
            }
            Change::Zeroes { may_unmap, .. } => Change::Zeroes { length_bytes, may_unmap: *may_unmap },
        };
        Some(Self { number: self.number, offset: start, change })
    }
}

#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    entries: VecDeque<Entry>,
    next_number: u64,
    held_bytes: usize,
}

impl Unflushed {
    pub(crate) fn add(&mut self, offset: u64, change: Change) {
        let entry = Entry { number: self.next_number, offset, change };
        self.next_number = self.next_number.saturating_add(1);
        self.push(entry);
    }

    fn push(&mut self, entry: Entry) {
        self.held_bytes = self.held_bytes.saturating_add(entry.change.held_bytes());
        self.entries.push_back(entry);
    }

    /// Returns the first number that a flush beginning now does not cover.
    pub(crate) fn mark(&self) -> u64 {
        self.next_number
    }

    /// Drops the entries before `mark`, which a flush has made durable.
    pub(crate) fn forget_before(&mut self, mark: u64) {
        while self.entries.front().is_some_and(|entry| entry.number < mark)
            && let Some(entry) = self.entries.pop_front()
        {
            self.held_bytes = self.held_bytes.saturating_sub(entry.change.held_bytes());
        }
    }

    /// Drops older writes to the range of a durable write that has ended: they must not be repeated over it.
    pub(crate) fn forget_range(&mut self, offset: u64, length_bytes: u64) {
        let range = offset..offset.saturating_add(length_bytes);
        if !self.entries.iter().any(|entry| entry.overlaps(&range)) {
            return;
        }
        let entries = std::mem::take(&mut self.entries);
        self.held_bytes = 0;
        for entry in entries {
            if entry.overlaps(&range) {
                let parts = [entry.inside(0..range.start), entry.inside(range.end..u64::MAX)];
                parts.into_iter().flatten().for_each(|part| self.push(part));
            } else {
                self.push(entry);
            }
        }
    }

    pub(crate) fn is_too_much(&self) -> bool {
        self.held_bytes > BYTES_MAX
    }

    /// Whether more than twice [`BYTES_MAX`] would be held with `more_bytes` more.
    pub(crate) fn is_full_with(&self, more_bytes: usize) -> bool {
        self.held_bytes.saturating_add(more_bytes) > BYTES_MAX.saturating_mul(2)
    }

    pub(crate) fn get(&self, index: usize) -> Option<&Entry> {
        self.entries.get(index)
    }

    pub(crate) fn clear(&mut self) {
        self.forget_before(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::PooledBuf;

    #[test]
    fn a_flush_lets_go_what_ended_before_it_began() {
        let mut unflushed = Unflushed::default();
        let zeroes = |length_bytes| Change::Zeroes { length_bytes, may_unmap: true };
        unflushed.add(0, zeroes(1));
        unflushed.add(1, zeroes(2));
        let mark = unflushed.mark();
        unflushed.add(2, zeroes(3));
        unflushed.forget_before(mark);
        assert_eq!(unflushed.get(0).map(|entry| entry.offset), Some(2));
        assert!(unflushed.get(1).is_none());
        // An older flush that ends later has nothing to let go.
        unflushed.forget_before(1);
        assert!(unflushed.get(0).is_some());
        unflushed.add(3, Change::Data(Payload::new(PooledBuf::take(BYTES_MAX).unwrap())));
        assert!(unflushed.is_too_much());
        unflushed.forget_before(unflushed.mark());
        assert!(!unflushed.is_too_much() && unflushed.held_bytes == 0);
    }

    #[test]
    fn what_a_durable_write_covers_is_cut_out_and_marks_stay() {
        let mut unflushed = Unflushed::default();
        let bytes: Vec<u8> = (0..8).collect();
        let ranges = |unflushed: &Unflushed| -> Vec<_> { unflushed.entries.iter().map(Entry::range).collect() };
        unflushed.add(10, Change::Data(Payload::new(PooledBuf::copy_of(&bytes).unwrap())));
        unflushed.add(0, Change::Zeroes { length_bytes: 20, may_unmap: true });
        let mark = unflushed.mark();
        unflushed.add(14, Change::Zeroes { length_bytes: 2, may_unmap: true });
        unflushed.forget_range(20, 5);
        unflushed.forget_range(13, 3);
        assert_eq!(ranges(&unflushed), [10..13, 16..18, 0..13, 16..20]);
        let data = |index: usize| match &unflushed.get(index).unwrap().change {
            Change::Data(data) => data.to_vec(),
            Change::Zeroes { .. } => Vec::new(),
        };
        assert_eq!((data(0), data(1)), (vec![0, 1, 2], vec![6, 7]));
        // A part of a part.
        unflushed.forget_range(17, 1);
        assert_eq!(ranges(&unflushed), [10..13, 16..17, 0..13, 16..17, 18..20]);
        // A flush that began before forgets no entry that came later, though there are others now.
        unflushed.add(30, Change::Zeroes { length_bytes: 1, may_unmap: true });
        unflushed.forget_before(mark);
        assert_eq!((unflushed.get(0).map(Entry::range), unflushed.entries.len()), (Some(30..31), 1));
        unflushed.forget_before(unflushed.mark());
        assert_eq!(unflushed.held_bytes, 0);
    }
}
