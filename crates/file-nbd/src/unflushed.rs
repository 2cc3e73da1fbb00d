//! What the server has acknowledged and no flush has covered.
//!
//! A server that went may have lost it. So when the connection is there again it is written once more, in the same order,
//! before anything else. Then the next flush means what a flush has to mean.

use memory::AlignedBuf;
use std::collections::VecDeque;
use std::sync::Arc;

/// Beyond this the connection's thread flushes by itself.
const BYTES_MAX: usize = 32 << 20;
/// What remembering costs beside the data.
const ENTRY_BYTES: usize = 128;

/// A change of the disk.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Data(Arc<AlignedBuf>),
    Zeroes { length_bytes: u64, may_unmap: bool },
}

impl Change {
    fn held_bytes(&self) -> usize {
        match self {
            Self::Data(data) => data.len().saturating_add(ENTRY_BYTES),
            Self::Zeroes { .. } => ENTRY_BYTES,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    entries: VecDeque<(u64, Change)>,
    /// The number of the first entry.
    first: u64,
    held_bytes: usize,
}

impl Unflushed {
    pub(crate) fn add(&mut self, offset: u64, change: Change) {
        self.held_bytes = self.held_bytes.saturating_add(change.held_bytes());
        self.entries.push_back((offset, change));
    }

    /// A flush that begins at this moment covers all entries before this number.
    pub(crate) fn mark(&self) -> u64 {
        self.first.saturating_add(self.entries.len() as u64)
    }

    /// A flush has ended well.
    pub(crate) fn forget_before(&mut self, mark: u64) {
        while self.first < mark
            && let Some((_, change)) = self.entries.pop_front()
        {
            self.first = self.first.saturating_add(1);
            self.held_bytes = self.held_bytes.saturating_sub(change.held_bytes());
        }
    }

    pub(crate) fn is_too_much(&self) -> bool {
        self.held_bytes > BYTES_MAX
    }

    pub(crate) fn get(&self, index: usize) -> Option<&(u64, Change)> {
        self.entries.get(index)
    }

    pub(crate) fn clear(&mut self) {
        self.forget_before(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_lets_go_what_ended_before_it_began() {
        let mut unflushed = Unflushed::default();
        let zeroes = |length_bytes| Change::Zeroes { length_bytes, may_unmap: true };
        unflushed.add(0, zeroes(1));
        unflushed.add(1, zeroes(2));
        let mark = unflushed.mark();
        unflushed.add(2, zeroes(3));
        unflushed.forget_before(mark);
        assert_eq!(unflushed.get(0).map(|(offset, _)| *offset), Some(2));
        assert!(unflushed.get(1).is_none());
        // An older flush that ends later has nothing to let go.
        unflushed.forget_before(1);
        assert!(unflushed.get(0).is_some());
        unflushed.add(3, Change::Data(Arc::new(AlignedBuf::zeroed(BYTES_MAX))));
        assert!(unflushed.is_too_much());
        unflushed.forget_before(unflushed.mark());
        assert!(!unflushed.is_too_much() && unflushed.held_bytes == 0);
    }
}
