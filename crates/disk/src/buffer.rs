//! The memory of an operation.

use memory::AlignedBuf;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Bytes aligned for direct I/O, so that they go to and from the storage without a copy.
///
/// A write also takes a slice, and copies it into a buffer.
pub struct Buffer(pub(crate) AlignedBuf);

impl Buffer {
    /// Makes a buffer of so many zeros.
    #[must_use]
    pub fn zeroed(length_bytes: usize) -> Self {
        Self(AlignedBuf::zeroed(length_bytes))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        Self(AlignedBuf::copy_of(bytes))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}
