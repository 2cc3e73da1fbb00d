//! One request to a disk, and its end.

use crate::{IoResult, OpFlags, Priority};
use memory::Window;

/// The unit of virtio-blk's and most formats' addresses.
pub const SECTOR_BYTES: u64 = 512;

/// Chosen by the submitter; comes back with the completion. A front end uses the descriptor head.
pub type Tag = u64;

/// One request. It owns (or pins) the memory it touches until its completion.
///
/// Offsets and lengths are bytes of the disk. The front end checks them against the guest's idea of the disk; the disk
/// checks again (range, read-only) and answers [`crate::IoErrorKind::OutOfRange`], so no combination may panic.
#[derive(Debug, Clone)]
pub enum Op {
    /// Fills `data`.
    Read {
        /// First byte.
        offset: u64,
        /// The memory to fill.
        data: Window,
        /// The urgency of the read.
        priority: Priority,
    },
    /// Stores `data`.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes to store.
        data: Window,
        /// Whether a flush comes first, and whether the write is to be durable.
        flags: OpFlags,
        /// The urgency of the write.
        priority: Priority,
    },
    /// Makes every write durable that completed, on any queue of the disk, before this was submitted.
    Flush,
    /// The contents are no longer needed. From then on they may read as any old contents, or as zeros.
    Discard {
        /// First byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
    },
    /// Overwrites the contents where they lie, or destroys them for good in another way. Disks that cannot promise that
    /// answer [`crate::IoErrorKind::Unsupported`].
    SecureErase {
        /// First byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
    },
    /// Makes the range read as zeros from then on.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// The length in bytes.
        length: u64,
        /// Space may be given back to the host.
        may_unmap: bool,
        /// Whether a flush comes first, and whether the write is to be durable.
        flags: OpFlags,
    },
}

impl Op {
    /// Makes a read without a priority.
    #[inline]
    #[must_use]
    pub fn read(offset: u64, data: Window) -> Self {
        Self::Read { offset, data, priority: Priority::NONE }
    }

    /// Makes a write without a priority.
    #[inline]
    #[must_use]
    pub fn write(offset: u64, data: Window, flags: OpFlags) -> Self {
        Self::Write { offset, data, flags, priority: Priority::NONE }
    }

    /// Returns the flags; none if the operation has none.
    #[must_use]
    pub fn flags(&self) -> OpFlags {
        match self {
            Self::Write { flags, .. } | Self::WriteZeroes { flags, .. } => *flags,
            Self::Read { .. } | Self::Flush | Self::Discard { .. } | Self::SecureErase { .. } => OpFlags::NONE,
        }
    }

    /// Replaces the flags, if the request has any.
    #[must_use]
    pub fn with_flags(mut self, new: OpFlags) -> Self {
        if let Self::Write { flags, .. } | Self::WriteZeroes { flags, .. } = &mut self {
            *flags = new;
        }
        self
    }

    /// Returns the offset and length of the range that it touches; `None` for a flush.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { offset, data, .. } | Self::Write { offset, data, .. } => {
                Some((*offset, data.length_bytes() as u64))
            }
            Self::Discard { offset, length }
            | Self::SecureErase { offset, length }
            | Self::WriteZeroes { offset, length, .. } => Some((*offset, *length)),
            Self::Flush => None,
        }
    }

    /// Whether it changes the disk.
    #[must_use]
    pub fn is_write(&self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush)
    }
}

/// The end of a request. When this is visible, the path below has dropped all its handles to the request's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The submitter's tag.
    pub tag: Tag,
    /// The result. After an error the affected range of a write may hold old or new sectors.
    pub result: IoResult,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_priority_take_no_room() {
        // Window, offset, and a word for all that is small.
        assert_eq!(size_of::<Op>(), size_of::<Window>() + 2 * size_of::<u64>());
    }
}
