//! One request to a disk, and its end.

use crate::IoResult;
use memory::Window;

/// The unit of virtio-blk's and most formats' addresses.
pub const SECTOR_BYTES: u64 = 512;

/// Chosen by whoever submits; comes back with the completion. A front end uses the descriptor head.
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
        /// Where to.
        data: Window,
    },
    /// Stores `data`.
    Write {
        /// First byte.
        offset: u64,
        /// Where from.
        data: Window,
        /// Complete only when durable, metadata included.
        fua: bool,
    },
    /// Makes every write that completed before this was submitted, on any queue of the disk, durable.
    Flush,
    /// The contents are no longer needed: they may read as anything old, or zero, from then on.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Reads as zeros from then on.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Space may be given back to the host.
        may_unmap: bool,
        /// Complete only when durable, metadata included.
        fua: bool,
    },
}

impl Op {
    /// The range it touches; `None` for a flush.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { offset, data } | Self::Write { offset, data, .. } => {
                Some((*offset, data.length_bytes() as u64))
            }
            Self::Discard { offset, length } | Self::WriteZeroes { offset, length, .. } => Some((*offset, *length)),
            Self::Flush => None,
        }
    }

    /// Whether it changes the disk.
    #[must_use]
    pub fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }
}

/// The end of a request. All handles to its memory that the path below held are dropped when this is visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The submitter's tag.
    pub tag: Tag,
    /// How it ended. After an error the affected range of a write may hold old or new sectors.
    pub result: IoResult,
}
