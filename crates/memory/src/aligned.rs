//! Owned memory at an alignment that direct I/O accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use thiserror::Error;

/// The page size assumed for alignment: every direct-I/O requirement seen so far divides it.
pub const PAGE_BYTES: usize = 4096;

/// Longer buffers are mappings of their own, whose pages are zero when they are first touched. The allocator would write
/// zeros to all of them at once. The pool makes several of a mebibyte in one turn, which would keep a reactor for
/// milliseconds.
const ALLOCATED_BYTES_MAX: usize = 512 << 10;

/// The allocator has no memory for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("out of memory: no buffer of {length_bytes} bytes")]
pub struct OutOfMemory {
    /// The length that was asked for.
    pub length_bytes: usize,
}

/// Zero-initialised memory, aligned to at least [`PAGE_BYTES`], freed on drop.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    length_bytes: usize,
}

// SAFETY: the allocation is owned exclusively by this value; moving it between threads moves that ownership.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only ever hands out `&[u8]`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Allocates `length_bytes` zeroed bytes; ends the process if there is no memory. A zero length allocates one byte,
    /// so that the pointer is always valid.
    #[must_use]
    pub fn zeroed(length_bytes: usize) -> Self {
        Self::try_zeroed(length_bytes).unwrap_or_else(|_| handle_alloc_error(Self::layout(length_bytes)))
    }

    /// As [`AlignedBuf::zeroed`], with an error if there is no memory. For memory that a guest's request needs.
    pub fn try_zeroed(length_bytes: usize) -> Result<Self, OutOfMemory> {
        let ptr = if length_bytes > ALLOCATED_BYTES_MAX {
            map(length_bytes)
        } else {
            // SAFETY: the layout has a non-zero size.
            NonNull::new(unsafe { alloc_zeroed(Self::layout(length_bytes)) })
        };
        Ok(Self { ptr: ptr.ok_or(OutOfMemory { length_bytes })?, length_bytes })
    }

    /// Copies `bytes` to memory at a direct-I/O alignment.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    fn layout(length_bytes: usize) -> Layout {
        match Layout::from_size_align(length_bytes.max(1), PAGE_BYTES) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {length_bytes} bytes cannot exist in this address space"),
        }
    }

    pub(crate) fn as_non_null(&self) -> NonNull<u8> {
        self.ptr
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `length_bytes` initialised bytes and `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.length_bytes) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.length_bytes) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.length_bytes > ALLOCATED_BYTES_MAX {
            // SAFETY: mapped in `try_zeroed` with the same length; nobody else has the address.
            unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.length_bytes) };
        } else {
            // SAFETY: allocated in `try_zeroed` with the same layout, freed once.
            unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.length_bytes)) }
        }
    }
}

/// Maps memory that is zero; `None` if there is none.
fn map(length_bytes: usize) -> Option<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping at an address that the kernel chooses replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), length_bytes, protection, flags, -1, 0) };
    NonNull::new(start.cast()).filter(|_| start != libc::MAP_FAILED)
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.length_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_pages(buf: &AlignedBuf) -> usize {
        let mut pages = vec![0_u8; buf.len().div_ceil(PAGE_BYTES)];
        // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
        let asked = unsafe { libc::mincore(buf.ptr.as_ptr().cast(), buf.len(), pages.as_mut_ptr()) };
        assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn a_long_buffer_takes_memory_page_by_page_as_it_is_touched() {
        let mut buf = AlignedBuf::zeroed(32 << 20);
        assert_eq!(resident_pages(&buf), 0);
        buf[5 << 20] = 1;
        assert!(buf[..5 << 20].iter().all(|byte| *byte == 0));
        assert!(resident_pages(&buf) < buf.len() / PAGE_BYTES);
    }

    #[test]
    fn buffers_of_all_lengths_are_zero_and_aligned() {
        for length_bytes in [0, 1, 4096, ALLOCATED_BYTES_MAX, ALLOCATED_BYTES_MAX + 1, (3 << 20) + 5] {
            let buf = AlignedBuf::zeroed(length_bytes);
            assert_eq!((buf.len(), buf.as_non_null().as_ptr() as usize % PAGE_BYTES), (length_bytes, 0));
            assert!(buf.iter().all(|byte| *byte == 0));
        }
        assert!(AlignedBuf::try_zeroed(1 << 60).is_err());
    }
}
