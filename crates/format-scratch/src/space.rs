//! The space of the two files, reserved before it is used.

use block::{IoError, IoResult};
use rustix::fs::FallocateFlags;
use std::fs::File;

/// Reserves space of a file. The host's files implement it; tests run out of space on purpose.
pub trait Space: Send + Sync {
    /// Reserves space for the range. New space reads as zeros. The file is extended to the end of the range. May block.
    fn reserve(&self, offset: u64, length_bytes: u64) -> IoResult;
}

/// A file of the host.
#[derive(Debug)]
pub struct HostSpace(File);

impl HostSpace {
    /// Makes the space of `file`, which is open for writing.
    #[must_use]
    pub fn of(file: File) -> Self {
        Self(file)
    }
}

impl Space for HostSpace {
    fn reserve(&self, offset: u64, length_bytes: u64) -> IoResult {
        loop {
            match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), offset, length_bytes) {
                Err(rustix::io::Errno::INTR) => {}
                other => return other.map_err(|errno| IoError::from_errno(errno.raw_os_error())),
            }
        }
    }
}
