//! Owned memory from the pool that any thread may keep.

use crate::OutOfMemory;
use crate::pool::PooledPages;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Page-aligned memory from the pool, with its old contents: bytes that an earlier request put there. Up to a mebibyte,
/// nothing is allocated once the pool is warm. Dropping it, on any thread, gives it back to the pool.
pub struct PooledBuf {
    start: NonNull<u8>,
    length_bytes: usize,
    _pages: PooledPages,
}

// SAFETY: the memory is owned exclusively by this value, and its pages go back to the pool from any thread.
unsafe impl Send for PooledBuf {}
// SAFETY: shared access only ever hands out `&[u8]`.
unsafe impl Sync for PooledBuf {}

impl PooledBuf {
    /// Takes `length_bytes` from the pool.
    pub fn take(length_bytes: usize) -> Result<Self, OutOfMemory> {
        let (pages, start) = PooledPages::take(length_bytes)?;
        Ok(Self { start, length_bytes, _pages: pages })
    }

    /// Copies `bytes` into memory from the pool.
    pub fn copy_of(bytes: &[u8]) -> Result<Self, OutOfMemory> {
        let mut buf = Self::take(bytes.len())?;
        buf.copy_from_slice(bytes);
        Ok(buf)
    }

    /// Returns the size of the memory that it occupies, in bytes: the pool has a few sizes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        PooledPages::size_of(self.length_bytes)
    }
}

impl Deref for PooledBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages are valid for `length_bytes`, were zeroed when they were allocated, and `&self` keeps writers
        // out.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length_bytes) }
    }
}

impl DerefMut for PooledBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length_bytes) }
    }
}

impl std::fmt::Debug for PooledBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PooledBuf({} bytes)", self.length_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_and_read_on_any_thread() {
        let mut buf = PooledBuf::copy_of(&[1, 2, 3]).unwrap();
        buf[1] = 9;
        let buf = std::thread::spawn(move || buf).join().unwrap();
        assert_eq!((&buf[..], buf.held_bytes()), (&[1, 9, 3][..], 4096));
        assert!(PooledBuf::take(0).unwrap().is_empty());
    }
}
