//! The alignment that direct I/O asks for.

use memory::Window;
use std::ops::Range;

/// The alignment that direct I/O asks for, in bytes; 1 if the page cache serves the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    pub(crate) offset_bytes: u32,
    pub(crate) memory_bytes: u32,
}

impl Alignment {
    pub(crate) const NONE: Self = Self { offset_bytes: 1, memory_bytes: 1 };

    /// Whether any alignment is allowed.
    pub(crate) fn is_none(self) -> bool {
        self.offset_bytes <= 1 && self.memory_bytes <= 1
    }

    pub(crate) fn unit(self) -> u64 {
        u64::from(self.offset_bytes.max(1))
    }

    /// Whether a range consists of whole units.
    pub(crate) fn fits_range(self, offset: u64, length: u64) -> bool {
        (offset | length) & (self.unit() - 1) == 0
    }

    /// Whether direct I/O takes this request as it is. Each segment must be whole units long, too: a device may cut a
    /// request between segments.
    pub(crate) fn fits(self, offset: u64, data: &Window) -> bool {
        if !self.fits_range(offset, data.length_bytes() as u64) {
            return false;
        }
        let (address_mask, length_mask) = (self.memory_bytes.max(1) as usize - 1, self.unit() as usize - 1);
        let mut fits = true;
        data.for_each_segment(|segment| {
            fits &= segment.as_ptr().addr() & address_mask == 0 && segment.length_bytes() & length_mask == 0;
        });
        fits
    }

    /// Widens the range to whole units.
    pub(crate) fn widen(self, offset: u64, length: u64) -> Range<u64> {
        let mask = self.unit() - 1;
        // No overflow: the queue refuses ranges that end beyond i64::MAX.
        offset & !mask..(offset + length + mask) & !mask
    }
}
