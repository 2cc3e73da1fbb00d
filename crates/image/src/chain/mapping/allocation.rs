//! Space that a format reserves for a write.

use block::{Fill, IoError, IoResult};

/// Where a write goes.
pub(crate) type Prepared = block::Prepared<Allocation>;

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

/// The format that reserved the space.
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

impl From<format_qcow2::Allocation> for Allocation {
    fn from(new: format_qcow2::Allocation) -> Self {
        Self {
            guest_offset: new.guest_offset,
            length_bytes: new.length_bytes,
            file_offset: new.file_offset,
            head: new.head,
            tail: new.tail,
            zeroed: new.zeroed,
            of: Of::Qcow2(new),
        }
    }
}

impl From<format_scratch::Allocation> for Allocation {
    fn from(new: format_scratch::Allocation) -> Self {
        Self {
            guest_offset: new.guest_offset,
            length_bytes: new.length_bytes,
            file_offset: new.file_offset,
            head: new.head,
            tail: new.tail,
            zeroed: new.zeroed,
            of: Of::Scratch(new),
        }
    }
}
