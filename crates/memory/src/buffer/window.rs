//! A part of a buffer, and the copies into it and out of it.
//!
//! The bytes may be shared with a guest that changes them at any time, so they are copied in or out, not borrowed as
//! slices. The exception is memory of the pool with one handle ([`Window::own_parts`]).

use super::{IoBuf, Kept, Segment};
use crate::fault;
use std::cell::Cell;
use thiserror::Error;

/// The peer has shrunk its memory, or it was cut off ([`crate::GuestMemory::fence`]). Copies of it may be zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the guest's memory was taken away")]
pub struct MemoryLost;

/// A part of an [`IoBuf`]: the memory of one operation.
#[derive(Clone, Debug)]
pub struct Window {
    pub(super) buf: IoBuf,
    pub(super) offset: usize,
    pub(super) length_bytes: usize,
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

    /// Fails if the memory was taken away. Whoever copied it asks before the copy is stored: a write that was given up
    /// must not store zeros.
    pub fn check(&self) -> Result<(), MemoryLost> {
        let mut lost = false;
        if fault::any_is_lost() {
            self.for_each_segment(|segment| lost |= fault::is_lost(segment.as_ptr().addr()));
        }
        if lost { Err(MemoryLost) } else { Ok(()) }
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

    /// Borrows the bytes if they lie in memory of the pool, and this is the only handle to it: then neither a guest nor
    /// the kernel changes them. Gives them in order, a part for each segment.
    pub fn own_parts(&mut self) -> Option<impl Iterator<Item = &[u8]>> {
        let is_of_pool = matches!(self.buf.inner.kept, Kept::FromPool(..) | Kept::InPieces(_));
        if !is_of_pool || !self.buf.is_unique() {
            return None;
        }
        let (mut skip, mut left) = (self.offset, self.length_bytes);
        Some(self.buf.segments().iter().filter_map(move |segment| {
            let start = skip.min(segment.length_bytes());
            let length = left.min(segment.length_bytes() - start);
            (skip, left) = (skip - start, left - length);
            // SAFETY: the pool's pages are valid, and were zeroed when they were allocated. Whoever reads or writes them
            // has a handle. This is the only one, and as it is borrowed exclusively, no other is made meanwhile.
            (length > 0).then(|| unsafe { std::slice::from_raw_parts(segment.slice(start, length).as_ptr(), length) })
        }))
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
            unsafe { crate::words::look_at_words(from, count, &mut look) }
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
    use crate::AlignedBuf;

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
    fn only_whoever_has_memory_of_the_pool_alone_borrows_its_bytes() {
        let mut window = IoBuf::from_pool(100).unwrap().whole();
        window.fill(3);
        let mut part = window.slice(10, 5);
        assert!(window.own_parts().is_none() && part.own_parts().is_none(), "two handles");
        drop(window);
        assert_eq!(part.own_parts().unwrap().collect::<Vec<_>>(), [&[3; 5]]);
        assert!(IoBuf::gather(vec![part]).whole().own_parts().is_none(), "of another buffer");
    }

    #[test]
    fn a_long_buffer_of_the_pool_is_one_of_pieces_and_gives_its_bytes_in_order() {
        const PIECE: usize = 1 << 20;
        let length = 2 * PIECE + 1000;
        let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        let mut window = IoBuf::from_pool_in_pieces(length).unwrap().whole();
        assert_eq!((window.segment_count(), window.length_bytes()), (3, length));
        let mut starts_at_pages = true;
        window.for_each_segment(|segment| starts_at_pages &= segment.as_ptr().addr().is_multiple_of(crate::PAGE_BYTES));
        assert!(starts_at_pages && window.copy_from_slice(0, &bytes) == length);
        assert!(window.own_parts().unwrap().flatten().eq(&bytes));
        for range in [0..1, PIECE - 3..PIECE, PIECE - 3..2 * PIECE + 5, 2 * PIECE..length, PIECE..PIECE] {
            let mut part = window.slice(range.start, range.len());
            drop(window);
            assert!(part.own_parts().unwrap().flatten().eq(&bytes[range]));
            window = part.into_buf().whole();
        }
        assert_eq!(IoBuf::from_pool_in_pieces(PIECE).unwrap().segments().len(), 1);
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
    fn zero_probe_sees_a_byte_past_the_first_chunk() {
        let window = IoBuf::zeroed(PROBE_BYTES * 3).whole();
        assert!(window.is_zero());
        window.copy_from_slice(PROBE_BYTES * 3 - 1, &[1]);
        assert!(!window.is_zero());
    }
}
