//! Owned memory at an alignment that direct I/O accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use thiserror::Error;

/// The page size assumed for alignment: every direct-I/O requirement seen so far divides it.
pub const PAGE_BYTES: usize = 4096;

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
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(Self::layout(length_bytes)) };
        let ptr = NonNull::new(raw).ok_or(OutOfMemory { length_bytes })?;
        Ok(Self { ptr, length_bytes })
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
        // SAFETY: allocated in `zeroed` with the same layout, freed once.
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.length_bytes)) }
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.length_bytes)
    }
}
