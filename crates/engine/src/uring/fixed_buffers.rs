//! The memory that is registered with a ring, by address. The kernel holds its pages, so that a request need not look
//! them up.

use crate::base::call::Buffers;
use std::cell::Cell;
use std::io;

/// Places in a ring's table: the kernel's own limit.
pub(crate) const SLOTS: u16 = 1 << 14;

/// A registered piece of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: usize,
    end: usize,
    slot: u16,
}

/// The pieces that are registered with one ring.
#[derive(Debug, Default)]
pub(crate) struct FixedBuffers {
    /// Sorted by address.
    pieces: Vec<Piece>,
    /// Whether the ring has its (empty) table.
    has_table: bool,
    free: Vec<u16>,
    /// Where the last piece was found.
    hint: Cell<usize>,
}

impl FixedBuffers {
    /// Returns the slot of the piece that all of `buffers` lie in. `vectors` says whether the kernel takes vectors.
    #[inline]
    pub(crate) fn slot_of(&self, buffers: Buffers, vectors: bool) -> Option<u16> {
        if self.pieces.is_empty() {
            return None;
        }
        match buffers {
            Buffers::Single { ptr, length_bytes } => Some(self.piece_of(ptr.addr(), length_bytes)?.slot),
            Buffers::Vector { ptr, count } if vectors && count > 0 => {
                // SAFETY: the slab's list of segments has `count` entries and is not changed meanwhile.
                let iovecs = unsafe { std::slice::from_raw_parts(ptr, count) };
                let (first, others) = iovecs.split_first()?;
                let piece = self.piece_of(first.iov_base.addr(), first.iov_len)?;
                let inside = |iovec: &libc::iovec| piece.holds(iovec.iov_base.addr(), iovec.iov_len);
                others.iter().all(inside).then_some(piece.slot)
            }
            Buffers::Vector { .. } => None,
        }
    }

    fn piece_of(&self, address: usize, length_bytes: usize) -> Option<Piece> {
        if let Some(piece) = self.pieces.get(self.hint.get())
            && piece.holds(address, length_bytes)
        {
            return Some(*piece);
        }
        let index = self.pieces.partition_point(|piece| piece.end <= address);
        let piece = self.pieces.get(index)?;
        self.hint.set(index);
        piece.holds(address, length_bytes).then_some(*piece)
    }

    /// Takes a slot for one more piece. The first time, `make_table` gives the ring its table.
    pub(crate) fn take_slot(&mut self, make_table: impl FnOnce() -> io::Result<()>) -> io::Result<u16> {
        if !self.has_table {
            make_table()?;
            self.has_table = true;
            self.free = (0..SLOTS).rev().collect();
        }
        self.free.pop().ok_or_else(|| io::Error::other("the ring's table of buffers is full"))
    }

    /// Gives back a slot that was not used after all, or is free again.
    pub(crate) fn free_slot(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Adds a piece that was registered.
    pub(crate) fn add(&mut self, address: usize, length_bytes: usize, slot: u16) {
        let index = self.pieces.partition_point(|piece| piece.start < address);
        self.pieces.insert(index, Piece { start: address, end: address + length_bytes, slot });
    }

    /// Removes a piece, so that no request uses it any more. Returns whether it was there.
    pub(crate) fn forget(&mut self, slot: u16) -> bool {
        let before = self.pieces.len();
        self.pieces.retain(|piece| piece.slot != slot);
        self.pieces.len() < before
    }
}

impl Piece {
    #[inline]
    fn holds(&self, address: usize, length_bytes: usize) -> bool {
        self.start <= address && address.checked_add(length_bytes).is_some_and(|end| end <= self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn single(address: usize, length_bytes: usize) -> Buffers {
        Buffers::Single { ptr: std::ptr::without_provenance_mut(address), length_bytes }
    }

    #[test]
    fn only_what_lies_in_one_piece_has_its_slot() {
        let mut fixed = FixedBuffers::default();
        assert_eq!(fixed.slot_of(single(0x1000, 1), true), None);
        let slots: Vec<u16> = (0..3).map(|_| fixed.take_slot(|| Ok(())).unwrap()).collect();
        fixed.add(0x9000, 0x1000, slots[0]);
        fixed.add(0x1000, 0x1000, slots[1]);
        fixed.add(0x2000, 0x1000, slots[2]);
        for (address, length, slot) in [
            (0x1000, 0x1000, Some(1)),
            (0x2fff, 1, Some(2)),
            (0x1fff, 2, None),
            (0x3000, 1, None),
            (0x9fff, 1, Some(0)),
            (0xa000, 1, None),
            (0xfff, 2, None),
            (usize::MAX, 2, None),
        ] {
            let slot: Option<usize> = slot;
            assert_eq!(fixed.slot_of(single(address, length), true), slot.map(|at| slots[at]), "{address:#x}");
        }
        let iovec = |address: usize| libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: 16 };
        let of = |list: &[libc::iovec], vectors| {
            fixed.slot_of(Buffers::Vector { ptr: list.as_ptr(), count: list.len() }, vectors)
        };
        assert_eq!(of(&[iovec(0x1000), iovec(0x1800)], true), Some(slots[1]));
        assert_eq!(of(&[iovec(0x1000), iovec(0x1800)], false), None, "the kernel has no such operation");
        assert_eq!(of(&[iovec(0x1000), iovec(0x2800)], true), None, "two pieces");
        assert!(fixed.forget(slots[1]) && !fixed.forget(slots[1]));
        assert_eq!(fixed.slot_of(single(0x1000, 16), true), None);
        assert_eq!(fixed.slot_of(single(0x2000, 16), true), Some(slots[2]));
    }
}
