//! Space that a write is given, whatever the format of its layer.

use block::{IoError, IoResult};
use format_qcow2::Fill;

/// Where a write may go.
pub(crate) enum Prepared {
    /// The first part of the range is allocated already.
    InPlace { offset: u64, length_bytes: u64 },
    /// New space for the first part of the range.
    New(Allocation),
}

/// Space for whole units of the disk, invisible until it is committed. Dropping it gives the space back.
pub(crate) struct Allocation {
    /// First byte of the disk, at or before the request.
    pub(crate) guest_offset: u64,
    /// May end before the request does.
    pub(crate) length_bytes: u64,
    /// First byte in the file; contiguous.
    pub(crate) file_offset: u64,
    /// What to do before the request, in the first unit.
    pub(crate) head: Fill,
    /// What to do behind the request, in the last unit.
    pub(crate) tail: Fill,
    /// The space reads as zeros: zeros need not be written to it.
    pub(crate) zeroed: bool,
    of: Of,
}

/// Whose it is.
enum Of {
    Qcow2(format_qcow2::Allocation),
    Scratch(format_scratch::Allocation),
}

impl Allocation {
    pub(crate) fn of_qcow2(self) -> IoResult<format_qcow2::Allocation> {
        match self.of {
            Of::Qcow2(allocation) => Ok(allocation),
            Of::Scratch(_) => Err(IoError::EIO),
        }
    }

    pub(crate) fn of_scratch(self) -> IoResult<format_scratch::Allocation> {
        match self.of {
            Of::Scratch(allocation) => Ok(allocation),
            Of::Qcow2(_) => Err(IoError::EIO),
        }
    }
}

impl From<format_qcow2::Prepared> for Prepared {
    fn from(prepared: format_qcow2::Prepared) -> Self {
        match prepared {
            format_qcow2::Prepared::InPlace { offset, length_bytes } => Self::InPlace { offset, length_bytes },
            format_qcow2::Prepared::New(new) => Self::New(Allocation {
                guest_offset: new.guest_offset,
                length_bytes: new.length_bytes,
                file_offset: new.file_offset,
                head: new.head,
                tail: new.tail,
                zeroed: new.zeroed,
                of: Of::Qcow2(new),
            }),
        }
    }
}

impl From<format_scratch::Prepared> for Prepared {
    fn from(prepared: format_scratch::Prepared) -> Self {
        let fill = |fill| match fill {
            format_scratch::Fill::None => Fill::None,
            format_scratch::Fill::Zero => Fill::Zero,
            format_scratch::Fill::Copy => Fill::Copy,
        };
        match prepared {
            format_scratch::Prepared::InPlace { offset, length_bytes } => Self::InPlace { offset, length_bytes },
            format_scratch::Prepared::New(new) => Self::New(Allocation {
                guest_offset: new.guest_offset,
                length_bytes: new.length_bytes,
                file_offset: new.file_offset,
                head: fill(new.head),
                tail: fill(new.tail),
                zeroed: new.zeroed,
                of: Of::Scratch(new),
            }),
        }
    }
}
