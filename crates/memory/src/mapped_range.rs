//! A part of a file of our own, mapped into memory.

use crate::words::look_at_words;
use crate::{Mapping, Window};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use thiserror::Error;

/// A page of a mapped file could not be read: the file became shorter, or its storage failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a page of a mapped file could not be had: the file has become shorter, or its storage failed")]
pub struct MappingLost;

/// A part of a mapping, for any thread. It keeps the mapping.
///
/// Others may change the bytes at any time, so they are only copied in and out. A lost page is an error, never a
/// signal. But if the file was cut within a page, the rest of that page reads as zeros.
#[derive(Debug, Clone)]
pub struct MappedRange {
    mapping: Arc<Mapping>,
    skip_bytes: usize,
    length_bytes: usize,
}

impl MappedRange {
    /// Makes a range of a part of `mapping`; `None` if it does not lie inside.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, skip_bytes: usize, length_bytes: usize) -> Option<Self> {
        let end = skip_bytes.checked_add(length_bytes)?;
        (end <= mapping.length_bytes()).then(|| Self { mapping: Arc::clone(mapping), skip_bytes, length_bytes })
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Fails if a page of the mapping was lost. Then the bytes that were read are not valid.
    pub fn check(&self) -> Result<(), MappingLost> {
        // The poison mark is read after the bytes.
        fence(Ordering::Acquire);
        if self.mapping.is_poisoned() { Err(MappingLost) } else { Ok(()) }
    }

    /// Copies bytes from `skip_bytes` on.
    ///
    /// # Panics
    /// Panics if they do not lie inside. Callers compute them from the range's own length.
    pub fn copy_to_slice(&self, skip_bytes: usize, target: &mut [u8]) -> Result<(), MappingLost> {
        let from = self.at(skip_bytes, target.len());
        // SAFETY: the bytes lie in the mapping, which this keeps, and `target` is borrowed exclusively. A concurrent
        // writer changes only the values copied. A lost page is covered with zeros (see `fault`).
        unsafe { std::ptr::copy_nonoverlapping(from, target.as_mut_ptr(), target.len()) }
        self.check()
    }

    /// Copies `length_bytes` from `skip_bytes` on to the start of `target`, which may be a guest's memory.
    ///
    /// # Panics
    /// Panics if they do not lie inside, or `target` is shorter.
    pub fn copy_to(&self, skip_bytes: usize, length_bytes: usize, target: &Window) -> Result<(), MappingLost> {
        let mut from = self.at(skip_bytes, length_bytes);
        target.slice(0, length_bytes).for_each_segment(|segment| {
            // SAFETY: as in `copy_to_slice`. The segment is mapped, writable memory (see `IoBuf::refill`), and may be of
            // the same mapping.
            unsafe { std::ptr::copy(from, segment.as_ptr(), segment.length_bytes()) }
            from = from.wrapping_add(segment.length_bytes());
        });
        self.check()
    }

    /// Copies `source` into the range from `skip_bytes` on.
    ///
    /// # Panics
    /// Panics if the bytes do not fit inside, or the mapping is for reading only.
    pub fn copy_from_slice(&self, skip_bytes: usize, source: &[u8]) -> Result<(), MappingLost> {
        let to = self.writable_at(skip_bytes, source.len());
        // SAFETY: as in `copy_to_slice`, with the directions exchanged; the mapping is for writing.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len()) }
        self.check()
    }

    /// Copies `source` into the range from `skip_bytes` on.
    ///
    /// # Panics
    /// As [`Self::copy_from_slice`].
    pub fn copy_from(&self, skip_bytes: usize, source: &Window) -> Result<(), MappingLost> {
        let mut to = self.writable_at(skip_bytes, source.length_bytes());
        source.for_each_segment(|segment| {
            // SAFETY: as in `copy_to`, with the directions exchanged; the mapping is for writing.
            unsafe { std::ptr::copy(segment.as_ptr().cast_const(), to, segment.length_bytes()) }
            to = to.wrapping_add(segment.length_bytes());
        });
        self.check()
    }

    /// Sets `length_bytes` from `skip_bytes` on to `byte`.
    ///
    /// # Panics
    /// As [`Self::copy_from_slice`].
    pub fn fill(&self, skip_bytes: usize, length_bytes: usize, byte: u8) -> Result<(), MappingLost> {
        let to = self.writable_at(skip_bytes, length_bytes);
        // SAFETY: the bytes lie in the mapping, which this keeps and which is for writing.
        unsafe { std::ptr::write_bytes(to, byte, length_bytes) }
        self.check()
    }

    /// Writes `count` little-endian words from `skip_bytes` on. `word` gives each word by its number.
    ///
    /// # Panics
    /// As [`Self::copy_from_slice`].
    pub fn put_words(
        &self,
        skip_bytes: usize,
        count: usize,
        mut word: impl FnMut(usize) -> u64,
    ) -> Result<(), MappingLost> {
        let length_bytes = count.checked_mul(size_of::<u64>());
        let to = self.writable_at(skip_bytes, length_bytes.unwrap_or(usize::MAX)).cast::<u64>();
        for number in 0..count {
            let word = word(number).to_le();
            // SAFETY: as in `fill`: all `count` words lie inside. The place need not be aligned.
            unsafe { to.wrapping_add(number).write_unaligned(word) }
        }
        self.check()
    }

    /// Looks at `count` words of 8 bytes, little-endian, where they lie, from `skip_bytes` on.
    ///
    /// # Panics
    /// As [`Self::copy_to_slice`].
    pub fn for_each_word(&self, skip_bytes: usize, count: usize, mut look: impl FnMut(u64)) -> Result<(), MappingLost> {
        let length_bytes = count.checked_mul(size_of::<u64>());
        let from = self.at(skip_bytes, length_bytes.unwrap_or(usize::MAX));
        // SAFETY: as in `copy_to_slice`: the words lie inside.
        unsafe { look_at_words(from, count, &mut look) }
        self.check()
    }

    fn at(&self, skip_bytes: usize, length_bytes: usize) -> *const u8 {
        let inside = skip_bytes.checked_add(length_bytes).is_some_and(|end| end <= self.length_bytes);
        assert!(inside, "{skip_bytes}+{length_bytes} of a mapped range of {} bytes", self.length_bytes);
        self.mapping.as_ptr().as_ptr().wrapping_add(self.skip_bytes + skip_bytes).cast_const()
    }

    fn writable_at(&self, skip_bytes: usize, length_bytes: usize) -> *mut u8 {
        assert!(self.mapping.is_writable(), "a write to a mapping that is for reading only");
        self.at(skip_bytes, length_bytes).cast_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IoBuf, PAGE_BYTES};
    use std::os::fd::AsFd;

    fn mapped(length_bytes: usize) -> (std::fs::File, Arc<Mapping>) {
        let (fd, _) = Mapping::anonymous_file(c"range", length_bytes).unwrap();
        let mapping = Mapping::of_storage(fd.as_fd(), length_bytes, true).unwrap();
        (fd.into(), Arc::new(mapping))
    }

    #[test]
    fn bytes_go_in_and_out_by_slices_and_windows_and_never_beside_the_range() {
        let (_file, mapping) = mapped(2 * PAGE_BYTES);
        assert!(MappedRange::new(&mapping, PAGE_BYTES, PAGE_BYTES + 1).is_none());
        assert!(MappedRange::new(&mapping, usize::MAX, 2).is_none());
        let range = MappedRange::new(&mapping, 100, 50).unwrap();
        range.copy_from_slice(10, &[1, 2, 3]).unwrap();
        range.fill(13, 2, 9).unwrap();
        let parts = IoBuf::zeroed(8).whole();
        let scattered = IoBuf::gather(vec![parts.slice(6, 2), parts.slice(0, 4)]).whole();
        range.copy_to(9, 6, &scattered).unwrap();
        assert_eq!(scattered.to_vec(), [0, 1, 2, 3, 9, 9]);
        range.copy_from(40, &scattered).unwrap();
        let mut bytes = [0; 8];
        range.copy_to_slice(39, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 1, 2, 3, 9, 9, 0]);
        range.put_words(33, 2, |number| 0x0102_0304_0506_0700 + number as u64).unwrap();
        range.copy_to_slice(34, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 6, 5, 4, 3, 2, 1, 1]);
        for skip in [32, 33, 36] {
            let mut words = Vec::new();
            range.for_each_word(skip, 1, |word| words.push(word)).unwrap();
            let mut bytes = [0; 8];
            range.copy_to_slice(skip, &mut bytes).unwrap();
            assert_eq!(words, [u64::from_le_bytes(bytes)]);
        }
        assert!(std::panic::catch_unwind(|| range.for_each_word(43, 1, |_| ())).is_err());
        assert!(std::panic::catch_unwind(|| range.put_words(42, 2, |_| 0)).is_err());
        assert!(std::panic::catch_unwind(|| range.put_words(0, usize::MAX / 4, |_| 0)).is_err());
        let outside = std::panic::catch_unwind(|| range.copy_to_slice(48, &mut [0; 3]));
        assert!(outside.is_err());
    }

    #[test]
    fn a_file_that_becomes_shorter_is_an_error_and_no_signal() {
        let (file, mapping) = mapped(2 * PAGE_BYTES);
        let range = MappedRange::new(&mapping, 0, 2 * PAGE_BYTES).unwrap();
        range.fill(0, 2 * PAGE_BYTES, 1).unwrap();
        file.set_len(PAGE_BYTES as u64).unwrap();
        let mut byte = [0];
        range.copy_to_slice(0, &mut byte).unwrap();
        assert_eq!(range.copy_to_slice(PAGE_BYTES, &mut byte), Err(MappingLost));
        assert_eq!(range.fill(PAGE_BYTES, 1, 1), Err(MappingLost), "nothing is believed any more");
    }

    #[test]
    fn what_is_mapped_for_reading_is_not_written_to() {
        let (file, _) = mapped(PAGE_BYTES);
        let mapping = Arc::new(Mapping::of_storage(file.as_fd(), PAGE_BYTES, false).unwrap());
        let range = MappedRange::new(&mapping, 0, 8).unwrap();
        assert!(std::panic::catch_unwind(|| range.fill(0, 1, 1)).is_err());
        range.copy_to_slice(0, &mut [0; 8]).unwrap();
    }
}
