//! Scattered memory that an operation owns while the kernel may read or write it.
//!
//! An [`IoBuf`] is a cheap handle (a count without atomics: it stays on its reactor's thread) to a list of memory
//! segments. An operation in flight holds a handle. So the list, and what it keeps alive, stays until the kernel is
//! done: dropping a future or a queue drops only *its* handle. Engines hold one for each request they have given to the
//! kernel. A [`Window`] is a part of a buffer; splitting a request makes windows, never copies.
//!
//! The bytes may be shared with a guest that changes them at any time, so they are only ever copied in or out, never
//! borrowed as slices.

use crate::pool::PooledPages;
use crate::{AlignedBuf, BufferGrant, Mapping, OutOfMemory, PoolRc, room_for};
use std::any::Any;
use std::cell::Cell;
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

/// What a buffer keeps alive as long as it lives.
#[derive(Default)]
enum Kept {
    /// The segments' memory is kept mapped by its owner.
    #[default]
    Nothing,
    Whole(AlignedBuf),
    /// Memory from the pool, with its part of a budget.
    FromPool(#[allow(dead_code)] PooledPages, #[allow(dead_code)] BufferGrant),
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

/// A part of an [`IoBuf`]: what one operation reads into or writes from.
#[derive(Clone, Debug)]
pub struct Window {
    buf: IoBuf,
    offset: usize,
    length_bytes: usize,
}

impl Window {
    /// Makes an empty window, for operations without data.
    #[must_use]
    pub fn empty() -> Self {
        IoBuf::empty().whole()
    }

    /// Returns the number of bytes in the window.
    #[must_use]
    #[inline]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Whether it holds no byte.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length_bytes == 0
    }

    /// Returns a part of this window.
    ///
    /// # Panics
    /// Panics if the part does not lie inside. Callers compute it from the window's own length.
    #[must_use]
    pub fn slice(&self, skip_bytes: usize, length_bytes: usize) -> Self {
        let inside = skip_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.length_bytes);
        assert!(inside, "slice {skip_bytes}+{length_bytes} of a window of {} bytes", self.length_bytes);
        Self { buf: self.buf.clone(), offset: self.offset + skip_bytes, length_bytes }
    }

    /// Returns the buffer's segments if the window covers all of them, so that an engine can pass the list as it is.
    #[must_use]
    #[inline]
    pub fn whole_segments(&self) -> Option<&[Segment]> {
        (self.offset == 0 && self.length_bytes == self.buf.length_bytes()).then(|| self.buf.segments())
    }

    /// Returns the one segment that the window lies in, cut to the window; `None` if it spans several or is empty.
    #[must_use]
    #[inline]
    pub fn single_segment(&self) -> Option<Segment> {
        let mut skip = self.offset;
        for segment in self.buf.segments() {
            if skip < segment.length_bytes() {
                let fits = self.length_bytes <= segment.length_bytes() - skip && self.length_bytes > 0;
                return fits.then(|| segment.slice(skip, self.length_bytes));
            }
            skip -= segment.length_bytes();
        }
        None
    }

    /// Calls `visit` with each segment, cut to the window, in order.
    #[inline]
    pub fn for_each_segment(&self, mut visit: impl FnMut(Segment)) {
        let mut skip = self.offset;
        let mut left = self.length_bytes;
        for segment in self.buf.segments() {
            if left == 0 {
                break;
            }
            if skip >= segment.length_bytes() {
                skip -= segment.length_bytes();
                continue;
            }
            let take = left.min(segment.length_bytes() - skip);
            visit(segment.slice(skip, take));
            skip = 0;
            left -= take;
        }
    }

    /// Returns the number of segments in the window.
    #[must_use]
    pub fn segment_count(&self) -> usize {
        let mut count = 0;
        self.for_each_segment(|_| count += 1);
        count
    }

    /// Whether every segment's address and length is a multiple of `alignment_bytes` (a power of two).
    #[must_use]
    pub fn is_aligned(&self, alignment_bytes: usize) -> bool {
        if alignment_bytes <= 1 {
            return true;
        }
        let mask = alignment_bytes - 1;
        let mut aligned = true;
        self.for_each_segment(|segment| aligned &= (segment.as_ptr().addr() | segment.length_bytes()) & mask == 0);
        aligned
    }

    /// Copies bytes of the window, from `skip_bytes` on, into `target`. Returns how many.
    pub fn copy_to_slice(&self, skip_bytes: usize, target: &mut [u8]) -> usize {
        let length = target.len().min(self.length_bytes.saturating_sub(skip_bytes));
        let done = Cell::new(0);
        self.slice(skip_bytes.min(self.length_bytes), length).for_each_segment(|segment| {
            let part = &mut target[done.get()..done.get() + segment.length_bytes()];
            // SAFETY: the segment is mapped memory (see `IoBuf::refill`) and cannot overlap `part`, which is borrowed
            // exclusively; a guest that writes at the same time changes only the values copied.
            unsafe { std::ptr::copy_nonoverlapping(segment.as_ptr(), part.as_mut_ptr(), part.len()) }
            done.set(done.get() + segment.length_bytes());
        });
        done.get()
    }

    /// Copies `source` into the window from `skip_bytes` on. Returns how many bytes fitted.
    pub fn copy_from_slice(&self, skip_bytes: usize, source: &[u8]) -> usize {
        let length = source.len().min(self.length_bytes.saturating_sub(skip_bytes));
        let done = Cell::new(0);
        self.slice(skip_bytes.min(self.length_bytes), length).for_each_segment(|segment| {
            let part = &source[done.get()..done.get() + segment.length_bytes()];
            // SAFETY: as in `copy_to_slice`, with the directions exchanged.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), segment.as_ptr(), part.len()) }
            done.set(done.get() + segment.length_bytes());
        });
        done.get()
    }

    /// Copies `source`, from its beginning, into the window from `skip_bytes` on. Returns how many bytes fitted. The
    /// two windows may overlap in memory; each segment is copied as by a move.
    pub fn copy_from(&self, skip_bytes: usize, source: &Self) -> usize {
        let mut done = 0;
        source.for_each_segment(|from| {
            let left = self.length_bytes.saturating_sub(skip_bytes + done);
            let length = left.min(from.length_bytes());
            let copied = Cell::new(0);
            self.slice((skip_bytes + done).min(self.length_bytes), length).for_each_segment(|to| {
                // SAFETY: both segments are mapped memory (see `IoBuf::refill`); `copy` allows them to overlap.
                unsafe {
                    std::ptr::copy(from.as_ptr().wrapping_add(copied.get()), to.as_ptr(), to.length_bytes());
                }
                copied.set(copied.get() + to.length_bytes());
            });
            done += copied.get();
        });
        done
    }

    /// Copies this window's bytes to the start of `target`. Returns how many fitted. If the two windows overlap in
    /// memory, any mixture of their bytes arrives.
    pub fn copy_to(&self, target: &Self) -> usize {
        let count = self.length_bytes.min(target.length_bytes);
        let mut done = 0;
        self.slice(0, count).for_each_segment(|from| {
            let mut copied = 0;
            target.slice(done, from.length_bytes()).for_each_segment(|to| {
                let source = from.as_ptr().wrapping_add(copied);
                // SAFETY: both segments are mapped memory (see `IoBuf::refill`), `to` is not longer than what is left
                // of `from`, and `copy` allows them to overlap.
                unsafe { std::ptr::copy(source, to.as_ptr(), to.length_bytes()) }
                copied += to.length_bytes();
            });
            done += from.length_bytes();
        });
        done
    }

    /// Sets every byte of the window to `byte`.
    pub fn fill(&self, byte: u8) {
        self.for_each_segment(|segment| {
            // SAFETY: the segment is mapped, writable memory (see `IoBuf::refill`).
            unsafe { std::ptr::write_bytes(segment.as_ptr(), byte, segment.length_bytes()) }
        });
    }

    /// Puts a word of 8 bytes, little-endian, into each place of the window, where `word` gives each by its number. The
    /// rest of a segment that is no whole word stays as it is.
    pub fn put_words(&self, mut word: impl FnMut(usize) -> u64) {
        let mut first = 0;
        self.for_each_segment(|segment| {
            let (to, count) = (segment.as_ptr().cast::<u64>(), segment.length_bytes() / size_of::<u64>());
            for number in 0..count {
                let word = word(first + number).to_le();
                // SAFETY: as in `fill`: the word lies in the segment. Its place need not be aligned.
                unsafe { to.wrapping_add(number).write_unaligned(word) }
            }
            first += count;
        });
    }

    /// Looks at each word of 8 bytes, little-endian, where it lies. Skips the rest of a segment that is no whole word.
    pub fn for_each_word(&self, mut look: impl FnMut(u64)) {
        self.for_each_segment(|segment| {
            let (from, count) = (segment.as_ptr().cast_const(), segment.length_bytes() / size_of::<u64>());
            // SAFETY: the words lie in the segment, which is mapped memory (see `IoBuf::refill`).
            unsafe { crate::mapped_range::look_at_words(from, count, &mut look) }
        });
    }

    /// Whether every byte is zero, at the moment of the call: a guest may change the bytes.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        let mut chunk = [0u8; PROBE_BYTES];
        let mut skip = 0;
        while skip < self.length_bytes {
            let got = self.copy_to_slice(skip, &mut chunk);
            if chunk[..got].iter().any(|byte| *byte != 0) {
                return false;
            }
            skip += got;
        }
        true
    }

    /// Copies the bytes into a vector, for metadata and tests.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length_bytes];
        self.copy_to_slice(0, &mut bytes);
        bytes
    }

    /// Drops the window and returns the buffer it was made from.
    #[must_use]
    pub fn into_buf(self) -> IoBuf {
        self.buf
    }
}

const PROBE_BYTES: usize = 512;

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
    fn a_window_reads_back_what_was_copied_in() {
        let window = IoBuf::zeroed(1000).whole().slice(100, 300);
        assert_eq!(window.copy_from_slice(10, &[7; 400]), 290);
        let bytes = window.into_buf().whole().to_vec();
        assert!(bytes[..110].iter().all(|byte| *byte == 0));
        assert!(bytes[110..400].iter().all(|byte| *byte == 7));
        assert!(bytes[400..].iter().all(|byte| *byte == 0));
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
    fn windows_copy_into_each_other_across_segment_borders() {
        let source = IoBuf::from_aligned(pattern(64)).whole();
        let scattered = IoBuf::gather(vec![source.slice(40, 24), source.slice(0, 40)]).whole();
        let (low, high) = (IoBuf::zeroed(30).whole(), IoBuf::zeroed(70).whole());
        let target = IoBuf::gather(vec![low, high]).whole();
        assert_eq!(target.copy_from(10, &scattered), 64);
        let bytes = target.to_vec();
        assert_eq!((&bytes[10..34], &bytes[34..74]), (&pattern(64)[40..], &pattern(64)[..40]));
        assert_eq!(target.copy_from(90, &scattered), 10, "what does not fit is left out");
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
    fn copying_between_lists_that_are_cut_differently_keeps_the_order() {
        let source = IoBuf::from_aligned(pattern(100)).whole();
        let from = IoBuf::gather(vec![source.slice(0, 7), source.slice(7, 50), source.slice(57, 43)]).whole();
        let parts = IoBuf::zeroed(120).whole();
        let to = IoBuf::gather(vec![parts.slice(60, 60), parts.slice(0, 30)]).whole();
        assert_eq!(from.slice(1, 99).copy_to(&to), 90);
        assert_eq!(to.to_vec(), &pattern(100)[1..91]);
        assert_eq!(parts.slice(30, 30).to_vec(), [0; 30]);
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

    #[test]
    fn zero_probe_sees_a_byte_past_the_first_chunk() {
        let window = IoBuf::zeroed(PROBE_BYTES * 3).whole();
        assert!(window.is_zero());
        window.copy_from_slice(PROBE_BYTES * 3 - 1, &[1]);
        assert!(!window.is_zero());
    }
}
