//! A file of our own as an array of 32-bit words in memory.

use crate::Mapping;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU32;

/// Words of a mapped file, read and changed without a lock.
///
/// The file may be shorter than the array. A word behind its end, or one whose page is lost, reads as zero, and the
/// array is [poisoned](MappedWords::is_poisoned) from then on. So its user reserves the file's space first, and ignores
/// what it has read once the array is poisoned.
#[derive(Debug)]
pub struct MappedWords {
    mapping: Mapping,
    count: usize,
}

impl MappedWords {
    /// Maps the first `count` words of `file`, which is open for reading and writing.
    pub fn new(file: BorrowedFd<'_>, count: usize) -> io::Result<Self> {
        let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the array is longer than any address space");
        let length_bytes = count.checked_mul(size_of::<AtomicU32>()).ok_or_else(too_long)?;
        Ok(Self { mapping: Mapping::of_storage(file, length_bytes, true)?, count })
    }

    /// Makes an array of `count` words in memory. They read as zeros, take space only once written, and can be swapped
    /// out.
    pub fn in_memory(count: usize) -> io::Result<Self> {
        let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "the array is longer than any address space");
        let length_bytes = count.checked_mul(size_of::<AtomicU32>()).ok_or_else(too_long)?;
        let (_file, mapping) = Mapping::anonymous_file(c"words", length_bytes)?;
        Ok(Self { mapping, count })
    }

    /// Returns a word; `None` behind the end of the array.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&AtomicU32> {
        if index >= self.count {
            return None;
        }
        // SAFETY: the word lies in the mapping, which is page-aligned and lives as long as the reference. It is only
        // reached as an atomic. A lost page is covered with zeros (see `fault`).
        Some(unsafe { &*self.mapping.as_ptr().cast::<AtomicU32>().as_ptr().add(index) })
    }

    /// Whether a word was behind the end of the file, or its page was lost.
    #[inline]
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }
}

/// Gives `look` each of `count` words.
///
/// # Safety
/// The words lie in mapped memory. Others may change them: each is read once.
pub(crate) unsafe fn look_at_words(from: *const u8, count: usize, look: &mut impl FnMut(u64)) {
    if from.addr().is_multiple_of(align_of::<u64>()) {
        let from = from.cast::<u64>();
        for number in 0..count {
            // SAFETY: the word lies in the memory, and is aligned like the first.
            look(u64::from_le(unsafe { from.wrapping_add(number).read_volatile() }));
        }
        return;
    }
    for number in 0..count {
        // SAFETY: the word lies in the memory, and an array of bytes may lie anywhere.
        look(u64::from_le_bytes(unsafe { from.wrapping_add(number * 8).cast::<[u8; 8]>().read_volatile() }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    #[test]
    fn words_are_the_files_bytes_and_one_behind_its_end_poisons_instead_of_a_signal() {
        let (fd, _whole) = Mapping::anonymous_file(c"words", 4096).unwrap();
        let words = MappedWords::new(fd.as_fd(), 4096).unwrap();
        words.get(1023).unwrap().store(7, Ordering::Release);
        let again = MappedWords::new(fd.as_fd(), 1024).unwrap();
        assert_eq!(again.get(1023).unwrap().load(Ordering::Acquire), 7);
        assert!(again.get(1024).is_none() && !words.is_poisoned());
        assert_eq!(words.get(4000).unwrap().load(Ordering::Acquire), 0);
        assert!(words.is_poisoned() && !again.is_poisoned());
    }
}
