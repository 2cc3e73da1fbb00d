//! The mapping of a raw image.

use block::{Extent, Mapped, SECTOR_BYTES};
use std::sync::atomic::{AtomicU64, Ordering};

/// A raw image of a file or block device.
///
/// A disk is a whole number of sectors. Where the file ends inside its last sector, the rest of that sector reads as
/// zeros until it is written, which makes the file longer.
#[derive(Debug)]
pub struct Raw {
    size_bytes: u64,
    file_length_bytes: AtomicU64,
}

impl Raw {
    /// A raw image over a file of this length.
    #[must_use]
    pub fn new(file_length_bytes: u64) -> Self {
        let size_bytes = file_length_bytes.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(file_length_bytes);
        Self { size_bytes, file_length_bytes: AtomicU64::new(file_length_bytes) }
    }

    /// Capacity of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Where the first part of the range lies.
    #[must_use]
    pub fn lookup(&self, offset: u64, length_bytes: u64) -> Mapped {
        let in_file = self.file_length_bytes.load(Ordering::Acquire).saturating_sub(offset);
        if in_file == 0 {
            return Mapped { extent: Extent::Zero, length_bytes };
        }
        Mapped { extent: Extent::Data { file: 0, offset }, length_bytes: length_bytes.min(in_file) }
    }

    /// A write up to `end` has completed: the file is at least that long now.
    pub fn written_up_to(&self, end: u64) {
        // A load first: the store is for the rare write into the padding of the last sector.
        if self.file_length_bytes.load(Ordering::Relaxed) < end {
            self.file_length_bytes.fetch_max(end, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_padding_of_the_last_sector_reads_as_zeros_until_it_is_written() {
        let raw = Raw::new(1000);
        assert_eq!(raw.size_bytes(), 1024);
        assert_eq!(raw.lookup(512, 512), Mapped { extent: Extent::Data { file: 0, offset: 512 }, length_bytes: 488 });
        assert_eq!(raw.lookup(1000, 24), Mapped { extent: Extent::Zero, length_bytes: 24 });
        raw.written_up_to(1024);
        assert_eq!(raw.lookup(1000, 24).extent, Extent::Data { file: 0, offset: 1000 });
    }
}
