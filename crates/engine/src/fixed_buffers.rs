//! Memory that is registered with a ring: the kernel keeps its pages at hand, so that a request need not look them up.
//!
//! A guest's memory is registered piece by piece, one a turn, so that nobody waits long for it; until a piece is
//! registered, or where that fails, requests name their memory the plain way. Registered pages stay in memory, and stay
//! the same pages, until they are given back: a guest that returns memory to its host and takes it back (a balloon) would
//! find other pages there than the kernel writes to. That is why somebody has to ask for it.

use crate::inflight::Buffers;
use crate::uring::Uring;
use block::{Poller, PollerId};
use memory::GuestMemory;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The most bytes registered at a time.
const PIECE_BYTES: usize = 64 << 20;
/// Places in a ring's table: the kernel's own limit.
pub(crate) const SLOTS: u16 = 1 << 14;

/// One registered piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: usize,
    end: usize,
    slot: u16,
}

/// What is registered with one ring, by address.
#[derive(Debug, Default)]
pub(crate) struct FixedBuffers {
    /// In order of their addresses.
    pieces: Vec<Piece>,
    /// Whether the ring has its (empty) table.
    has_table: bool,
    free: Vec<u16>,
    /// Where the last one was found.
    hint: Cell<usize>,
}

impl FixedBuffers {
    /// The piece that all of `buffers` lie in; vectors where the kernel takes them.
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

    /// A place for one more; the first time, `make_table` gives the ring its table.
    pub(crate) fn take_slot(&mut self, make_table: impl FnOnce() -> io::Result<()>) -> io::Result<u16> {
        if !self.has_table {
            make_table()?;
            self.has_table = true;
            self.free = (0..SLOTS).rev().collect();
        }
        self.free.pop().ok_or_else(|| io::Error::other("the ring's table of buffers is full"))
    }

    /// The place was not used after all, or is free again.
    pub(crate) fn free_slot(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// The piece is registered.
    pub(crate) fn add(&mut self, address: usize, length_bytes: usize, slot: u16) {
        let index = self.pieces.partition_point(|piece| piece.start < address);
        self.pieces.insert(index, Piece { start: address, end: address + length_bytes, slot });
    }

    /// The piece is not used any more; returns whether it was.
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

/// A guest's memory on one reactor: registered with its rings for as long as somebody holds this.
pub(crate) struct Registered {
    memory: Arc<GuestMemory>,
    rings: Vec<Rc<Uring>>,
    /// By index into `rings`.
    slots: RefCell<Vec<(usize, u16)>>,
}

impl Registered {
    pub(crate) fn new(memory: Arc<GuestMemory>, rings: Vec<Rc<Uring>>) -> Rc<Self> {
        Rc::new(Self { memory, rings, slots: RefCell::default() })
    }

    pub(crate) fn is_of(&self, memory: &Arc<GuestMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// All pieces in order, as the rings are to have them.
    fn pieces(&self) -> Vec<(usize, *mut u8, usize)> {
        let mut pieces = Vec::new();
        for region in self.memory.regions() {
            let (start, length_bytes) = region.host_range();
            for skip in (0..length_bytes).step_by(PIECE_BYTES) {
                let ptr = start.as_ptr().wrapping_add(skip);
                let piece = PIECE_BYTES.min(length_bytes - skip);
                pieces.extend((0..self.rings.len()).map(|ring| (ring, ptr, piece)));
            }
        }
        pieces
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for (ring, slot) in self.slots.take() {
            self.rings[ring].unregister_buffer(slot);
        }
    }
}

/// Registers one piece a turn, then goes.
pub(crate) struct Registrar {
    registered: Weak<Registered>,
    pieces: std::vec::IntoIter<(usize, *mut u8, usize)>,
    done_bytes: usize,
    /// How it leaves its reactor's round.
    remove: Box<dyn Fn(PollerId)>,
    id: Option<PollerId>,
}

impl Registrar {
    pub(crate) fn new(registered: &Rc<Registered>, remove: Box<dyn Fn(PollerId)>) -> Self {
        let pieces = registered.pieces().into_iter();
        Self { registered: Rc::downgrade(registered), pieces, done_bytes: 0, remove, id: None }
    }

    pub(crate) fn set_id(&mut self, id: PollerId) {
        self.id = Some(id);
    }

    /// Registers the next piece; returns false when there is no more to do.
    fn step(&mut self) -> bool {
        let Some(registered) = self.registered.upgrade() else { return false };
        let Some((ring, ptr, length_bytes)) = self.pieces.next() else {
            tracing::info!("fixed-buffers=on: {} MiB of guest memory are registered", self.done_bytes >> 20);
            return false;
        };
        match registered.rings[ring].register_buffer(ptr, length_bytes) {
            Ok(slot) => {
                registered.slots.borrow_mut().push((ring, slot));
                self.done_bytes += length_bytes;
                true
            }
            Err(error) => {
                let hint = match error.raw_os_error() {
                    Some(libc::ENOMEM) => " (the limit of locked memory, ulimit -l, is used up)",
                    Some(libc::EOPNOTSUPP) => " (the kernel registers anonymous, shared and huge memory only)",
                    Some(libc::EINVAL) => " (Linux 5.19 is needed)",
                    _ => "",
                };
                let done_mib = self.done_bytes >> 20;
                tracing::warn!(
                    "fixed-buffers=on: guest memory cannot be registered{hint}: {error}; {done_mib} MiB are, the rest \
                     is served without"
                );
                false
            }
        }
    }
}

impl Poller for Registrar {
    fn poll(&mut self) -> bool {
        let more = self.step();
        if !more && let Some(id) = self.id.take() {
            (self.remove)(id);
        }
        more
    }

    fn arm(&mut self) -> bool {
        self.id.is_some()
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
