//! How whoever changes a running disk is watched and stopped.

use block::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Watches and stops a copy that goes on for long. Shared by the one who copies and by those who look.
///
/// The total is the disk's size, plus what guests write meanwhile and so has to be copied again. Both figures only rise,
/// and are equal when all is copied.
#[derive(Debug, Default)]
pub struct CopyWatch {
    is_cancelled: AtomicBool,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl CopyWatch {
    /// Asks for the end of the copy. It stops between two pieces, or not at all if its last piece has begun.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Bytes looked at; never more than the total that is asked for afterwards.
    #[must_use]
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes.load(Ordering::Acquire)
    }

    /// Bytes to look at, as far as known.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn more(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn done(&self, bytes: u64) {
        // Whoever sees this sees the total that it is part of.
        self.done_bytes.fetch_add(bytes, Ordering::Release);
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.is_cancelled.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Cancelled, "cancelled: the disk keeps its layers")),
        }
    }
}
