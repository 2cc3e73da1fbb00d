//! Makes written data leave the page cache before a flush asks for it. For a file that is filled in one go.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The bytes written since the kernel was last asked to begin writing.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    bytes: AtomicU64,
    asking: AtomicBool,
}

impl WriteBehind {
    /// The kernel is asked once for this many bytes.
    const STEP_BYTES: u64 = 16 << 20;

    /// Counts a write. Returns whether to ask the kernel; if so, the caller calls [`WriteBehind::asked`] afterwards.
    pub(crate) fn note(&self, length_bytes: usize) -> bool {
        let length = length_bytes as u64;
        let waiting = self.bytes.fetch_add(length, Ordering::Relaxed).saturating_add(length);
        let is_due = waiting >= Self::STEP_BYTES && !self.asking.swap(true, Ordering::Relaxed);
        if is_due {
            self.bytes.store(0, Ordering::Relaxed);
        }
        is_due
    }

    pub(crate) fn asked(&self) {
        self.asking.store(false, Ordering::Relaxed);
    }
}
