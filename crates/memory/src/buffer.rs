//! Scattered memory that an operation owns while the kernel may read or write it.
//!
//! An [`IoBuf`] is a cheap handle (a count without atomics: it stays on its reactor's thread) to a list of memory
//! segments. An operation in flight holds a handle. So the list, and the memory that it keeps alive, stays until the
//! kernel is done: dropping a future or a queue drops only *its* handle. Engines hold one for each request they have
//! given to the kernel. A [`Window`] is a part of a buffer; splitting a request makes windows, never copies.

mod granted;
mod window;

pub use window::{MemoryLost, Window};

use crate::pool::PooledPages;
use crate::{AlignedBuf, BufferGrant, Mapping, OutOfMemory, PoolRc, room_for};
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// A run of memory, laid out as the kernel's `struct iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Segment(libc::iovec);

impl Segment {
    /// Makes a segment of `length_bytes` at `ptr`. It promises nothing about the memory before it is listed in an
    /// [`IoBuf`].
    #[must_use]
    #[inline]
    pub fn new(ptr: NonNull<u8>, length_bytes: usize) -> Self {
        Self(libc::iovec { iov_base: ptr.as_ptr().cast(), iov_len: length_bytes })
    }

    /// Returns where the segment starts.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.0.iov_len
    }

    /// Returns it in the kernel's form.
    #[must_use]
    pub fn as_iovec(&self) -> libc::iovec {
        self.0
    }

    pub(crate) fn slice(&self, skip_bytes: usize, length_bytes: usize) -> Self {
        debug_assert!(skip_bytes + length_bytes <= self.0.iov_len);
        Self(libc::iovec { iov_base: self.as_ptr().wrapping_add(skip_bytes).cast(), iov_len: length_bytes })
    }
}

/// The things that a buffer keeps alive as long as it lives.
#[derive(Default)]
enum Kept {
    /// The segments' memory is kept mapped by its owner.
    #[default]
    Nothing,
    Whole(AlignedBuf),
    /// Memory from the pool, with its part of a budget.
    FromPool(#[allow(dead_code)] PooledPages, #[allow(dead_code)] BufferGrant),
    /// Memory from the pool, a piece for each segment.
    InPieces(#[allow(dead_code)] Vec<PooledPages>),
    /// The buffers whose memory a gathered list names.
    Parts(#[allow(dead_code)] Vec<Window>),
    /// The mapping that the segments lie in, and a value to drop with the last handle.
    Mapped(#[allow(dead_code)] Arc<Mapping>, #[allow(dead_code)] Box<dyn Any>),
}

#[derive(Default)]
struct Inner {
    /// The list of a buffer that is made with one segment: it needs no vector.
    single: Option<Segment>,
    /// The list if `single` is `None`.
    segments: Vec<Segment>,
    length_bytes: usize,
    kept: Kept,
    /// The list was refilled before, so it keeps nothing but its segments.
    refilled: bool,
}

room_for!(Inner, "buffer's list of segments");

impl Inner {
    fn segments(&self) -> &[Segment] {
        self.single.as_ref().map_or(&self.segments, std::slice::from_ref)
    }

    fn in_one(start: NonNull<u8>, length_bytes: usize) -> Self {
        let single = (length_bytes > 0).then(|| Segment::new(start, length_bytes));
        Self { single, length_bytes, ..Self::default() }
    }
}

/// A handle to a list of segments. See the module's documentation.
#[derive(Clone, Default)]
pub struct IoBuf {
    inner: PoolRc<Inner>,
}

impl IoBuf {
    /// Makes an empty list, to be filled with [`IoBuf::refill`].
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// Makes a buffer of owned, zeroed, page-aligned memory in one segment.
    #[must_use]
    pub fn zeroed(length_bytes: usize) -> Self {
        Self::from_aligned(AlignedBuf::zeroed(length_bytes))
    }

    /// Makes a buffer of owned memory in one segment.
    #[must_use]
    pub fn from_aligned(buf: AlignedBuf) -> Self {
        let inner = Inner::in_one(buf.as_non_null(), buf.len());
        Self { inner: PoolRc::new(Inner { kept: Kept::Whole(buf), ..inner }) }
    }

    /// As [`IoBuf::zeroed`], with an error if there is no memory.
    pub fn try_zeroed(length_bytes: usize) -> Result<Self, OutOfMemory> {
        AlignedBuf::try_zeroed(length_bytes).map(Self::from_aligned)
    }

    /// Makes a buffer of page-aligned memory in one segment, from the pool, with its old contents. Up to a mebibyte,
    /// nothing is allocated once the pool is warm. Guests' requests take theirs from a [`BufferGrant`] instead.
    pub fn from_pool(length_bytes: usize) -> Result<Self, OutOfMemory> {
        Self::from_pool_with(length_bytes, BufferGrant::default())
    }

    /// As [`IoBuf::from_pool`], but a long buffer is made of pieces of a mebibyte. So its memory is used again, too.
    /// Otherwise each one would be mapped, touched page by page and unmapped, which keeps a reactor for milliseconds.
    pub fn from_pool_in_pieces(length_bytes: usize) -> Result<Self, OutOfMemory> {
        if length_bytes <= PooledPages::LONGEST_BYTES {
            return Self::from_pool(length_bytes);
        }
        let count = length_bytes.div_ceil(PooledPages::LONGEST_BYTES);
        let (mut segments, mut pieces) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut left = length_bytes;
        while left > 0 {
            let length = left.min(PooledPages::LONGEST_BYTES);
            let (pages, start) = PooledPages::take(length)?;
            segments.push(Segment::new(start, length));
            pieces.push(pages);
            left -= length;
        }
        Ok(Self {
            inner: PoolRc::new(Inner { segments, length_bytes, kept: Kept::InPieces(pieces), ..Inner::default() }),
        })
    }

    /// As [`IoBuf::from_pool`]; the buffer keeps `grant`.
    pub(crate) fn from_pool_with(length_bytes: usize, grant: BufferGrant) -> Result<Self, OutOfMemory> {
        let (pages, start) = PooledPages::take(length_bytes)?;
        let inner = Inner::in_one(start, length_bytes);
        Ok(Self { inner: PoolRc::new(Inner { kept: Kept::FromPool(pages, grant), ..inner }) })
    }

    /// Takes the memory back out, if this is the only handle and the buffer owns its memory.
    pub fn into_aligned(self) -> Result<AlignedBuf, Self> {
        match PoolRc::try_unwrap(self.inner) {
            Ok(mut inner) => match std::mem::take(&mut inner.kept) {
                Kept::Whole(buf) => Ok(buf),
                kept => Err(Self { inner: PoolRc::new(Inner { kept, ..inner }) }),
            },
            Err(inner) => Err(Self { inner }),
        }
    }

    /// Makes a list of parts of other buffers, in order, without copying. The parts' buffers live as long as the
    /// result. It allocates, so it is for slow paths (padding a guest's write up to a whole cluster).
    #[must_use]
    pub fn gather(parts: Vec<Window>) -> Self {
        let mut segments = Vec::new();
        for part in &parts {
            part.for_each_segment(|segment| segments.push(segment));
        }
        let length_bytes = parts.iter().map(Window::length_bytes).sum();
        Self { inner: PoolRc::new(Inner { segments, length_bytes, kept: Kept::Parts(parts), ..Inner::default() }) }
    }

    /// Replaces the list in place by parts of other buffers, in order, and keeps its capacity. The parts' buffers live
    /// until the next change. Changes nothing and returns false while another handle exists.
    pub fn regather(&mut self, parts: impl Iterator<Item = Window>) -> bool {
        let Some(inner) = PoolRc::get_mut(&mut self.inner) else {
            return false;
        };
        let mut segments = std::mem::take(&mut inner.segments);
        let mut kept = match std::mem::take(&mut inner.kept) {
            Kept::Parts(parts) => parts,
            _ => Vec::new(),
        };
        segments.clear();
        kept.clear();
        let mut length_bytes = 0;
        for part in parts {
            part.for_each_segment(|segment| segments.push(segment));
            length_bytes += part.length_bytes();
            kept.push(part);
        }
        *inner = Inner { segments, length_bytes, kept: Kept::Parts(kept), ..Inner::default() };
        true
    }

    /// Makes a buffer of a part of a shared mapping, in one segment; `None` if it does not lie inside. The buffer keeps
    /// the mapping. `keep`, such as an allocator's claim on the range, is dropped with its last handle.
    #[must_use]
    pub fn in_mapping(
        mapping: &Arc<Mapping>,
        skip_bytes: usize,
        length_bytes: usize,
        keep: Box<dyn Any>,
    ) -> Option<Self> {
        let end = skip_bytes.checked_add(length_bytes)?;
        if end > mapping.length_bytes() {
            return None;
        }
        let start = NonNull::new(mapping.as_ptr().as_ptr().wrapping_add(skip_bytes))?;
        let kept = Kept::Mapped(Arc::clone(mapping), keep);
        Some(Self { inner: PoolRc::new(Inner { kept, ..Inner::in_one(start, length_bytes) }) })
    }

    /// Replaces the list in place, and keeps its capacity. A front end calls this for each request, on the context of
    /// the descriptor head. Changes nothing and returns false while another handle exists: the kernel may still use the
    /// old list.
    ///
    /// # Safety
    /// Every segment must stay mapped, readable and writable, for as long as any handle to this list holds it.
    #[inline]
    pub unsafe fn refill(&mut self, segments: impl Iterator<Item = Segment>) -> bool {
        let Some(inner) = PoolRc::get_mut(&mut self.inner) else {
            return false;
        };
        if !inner.refilled {
            let room = std::mem::take(&mut inner.segments);
            *inner = Inner { segments: room, refilled: true, ..Inner::default() };
        }
        inner.segments.clear();
        inner.length_bytes = 0;
        for segment in segments {
            inner.length_bytes += segment.length_bytes();
            inner.segments.push(segment);
        }
        true
    }

    /// Whether this is the only handle, so that [`IoBuf::refill`] works and nothing is in flight.
    #[must_use]
    #[inline]
    pub fn is_unique(&self) -> bool {
        PoolRc::strong_count(&self.inner) == 1
    }

    /// Returns the sum of the segments' lengths.
    #[must_use]
    #[inline]
    pub fn length_bytes(&self) -> usize {
        self.inner.length_bytes
    }

    /// Returns the segments, in order.
    #[must_use]
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        self.inner.segments()
    }

    /// Returns the whole buffer as a window.
    #[must_use]
    #[inline]
    pub fn whole(&self) -> Window {
        Window { buf: self.clone(), offset: 0, length_bytes: self.length_bytes() }
    }
}

impl std::fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuf({} bytes, {} segments)", self.length_bytes(), self.segments().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn pattern(length: usize) -> AlignedBuf {
        let mut buf = AlignedBuf::zeroed(length);
        for (index, byte) in buf.iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        buf
    }

    #[test]
    fn a_list_is_gathered_anew_in_place_and_lets_its_parts_go() {
        let (first, second) = (IoBuf::zeroed(32), IoBuf::zeroed(32));
        first.whole().fill(1);
        second.whole().fill(2);
        let mut list = IoBuf::empty();
        assert!(list.regather([second.whole().slice(0, 2), first.whole().slice(30, 2)].into_iter()));
        let whole = list.whole();
        assert_eq!(whole.to_vec(), [2, 2, 1, 1]);
        assert!(!list.regather(std::iter::empty()), "another handle uses the list");
        drop(whole);
        assert!(!first.is_unique() && list.regather(std::iter::once(first.whole().slice(0, 1))));
        assert_eq!((list.whole().to_vec(), second.is_unique()), (vec![1], true));
        assert!(list.regather(std::iter::empty()) && first.is_unique() && list.length_bytes() == 0);
    }

    #[test]
    fn gathered_parts_read_in_order_and_stay_alive() {
        let whole = {
            let first = IoBuf::from_aligned(pattern(64)).whole();
            let second = IoBuf::zeroed(32).whole();
            IoBuf::gather(vec![second.slice(0, 16), first.slice(8, 24), second.slice(16, 16)]).whole()
        };
        let bytes = whole.to_vec();
        assert_eq!(&bytes[16..40], &pattern(64)[8..32]);
        assert!(bytes[..16].iter().chain(&bytes[40..]).all(|byte| *byte == 0));
        let middle = whole.slice(12, 8);
        drop(whole);
        assert_eq!(middle.to_vec(), [0, 0, 0, 0, 8, 9, 10, 11]);
        assert_eq!(middle.segment_count(), 2);
        assert!(middle.single_segment().is_none());
    }

    #[test]
    fn a_part_of_a_mapping_keeps_it_and_drops_its_claim_last() {
        let (_fd, mapping) = Mapping::anonymous_file(c"part", 8192).unwrap();
        let (mapping, claim) = (Arc::new(mapping), Rc::new(()));
        let part = IoBuf::in_mapping(&mapping, 4096, 4096, Box::new(Rc::clone(&claim))).unwrap();
        assert!(IoBuf::in_mapping(&mapping, 4096, 4097, Box::new(())).is_none());
        assert!(IoBuf::in_mapping(&mapping, usize::MAX, 2, Box::new(())).is_none());
        drop(mapping);
        let window = part.whole().slice(1, 2);
        drop(part);
        window.fill(9);
        assert_eq!((window.to_vec(), Rc::strong_count(&claim)), (vec![9, 9], 2));
        drop(window);
        assert_eq!(Rc::strong_count(&claim), 1);
    }

    #[test]
    fn a_list_in_flight_is_not_refilled() {
        let mut buf = IoBuf::zeroed(16);
        let in_flight = buf.whole();
        // SAFETY: an empty list names no memory.
        assert!(!unsafe { buf.refill(std::iter::empty()) });
        drop(in_flight);
        // SAFETY: as above.
        assert!(unsafe { buf.refill(std::iter::empty()) });
        assert_eq!(buf.length_bytes(), 0);
    }
}
