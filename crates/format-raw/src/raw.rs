//! The mapping of a raw image.

use block::{Extent, Mapped, PastEnd, SECTOR_BYTES};
use std::sync::atomic::{AtomicBool, Ordering};

/// A raw image of a file or block device.
///
/// A disk is a whole number of sectors. If the file ends inside its last sector, the rest of that sector reads as
/// zeros. Before the first write there, the file is extended, durably, so that the sector is never torn.
#[derive(Debug)]
pub struct Raw {
    size_bytes: u64,
    /// Start of the sector in which the file ends; the size of the disk if the file ends between sectors.
    ragged_from: u64,
    padded: AtomicBool,
}

impl Raw {
    /// Makes a raw image over a file of this length.
    #[must_use]
    pub fn new(file_length_bytes: u64) -> Self {
        let size_bytes = file_length_bytes.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(file_length_bytes);
        let padded = size_bytes == file_length_bytes;
        let ragged_from = if padded { size_bytes } else { size_bytes.saturating_sub(SECTOR_BYTES) };
        Self { size_bytes, ragged_from, padded: AtomicBool::new(padded) }
    }

    /// Returns the size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Looks up the first part of the range. A sector in which the file ends is a part of its own.
    #[must_use]
    pub fn lookup(&self, offset: u64, length_bytes: u64) -> Mapped {
        let length_bytes = match self.ragged_from.checked_sub(offset) {
            Some(before) if before > 0 => length_bytes.min(before),
            _ => length_bytes,
        };
        Mapped { extent: Extent::Data { file: 0, offset }, length_bytes }
    }

    /// Whether [`Raw::lookup`] returns the whole range at once. The range is not empty.
    #[inline]
    #[must_use]
    pub fn is_in_one_piece(&self, offset: u64, length_bytes: u64) -> bool {
        length_bytes > 0 && (offset.saturating_add(length_bytes) <= self.ragged_from || offset >= self.ragged_from)
    }

    /// Says what a read at `offset` means behind the end of the file: missing data, except in the sector in which the
    /// file ends.
    #[must_use]
    pub fn past_end(&self, offset: u64) -> PastEnd {
        if offset >= self.ragged_from { PastEnd::Zeros } else { PastEnd::Fails }
    }

    /// Whether the file must be extended to the size of the disk before a write that ends at `end`.
    #[must_use]
    pub fn needs_padding(&self, end: u64) -> bool {
        end > self.ragged_from && !self.padded.load(Ordering::Acquire)
    }

    /// Notes that the file has the size of the disk, durably.
    pub fn set_padded(&self) {
        self.padded.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sector_in_which_the_file_ends_is_one_part_and_is_padded_before_it_is_written() {
        let raw = Raw::new(1000);
        assert_eq!(raw.size_bytes(), 1024);
        let at = |offset| Extent::Data { file: 0, offset };
        assert_eq!(raw.lookup(0, 1024), Mapped { extent: at(0), length_bytes: 512 });
        assert_eq!(raw.lookup(512, 512), Mapped { extent: at(512), length_bytes: 512 });
        assert_eq!((raw.past_end(0), raw.past_end(512)), (PastEnd::Fails, PastEnd::Zeros));
        assert!(!raw.needs_padding(512) && raw.needs_padding(513));
        raw.set_padded();
        assert!(!raw.needs_padding(1024));
    }

    #[test]
    fn a_file_of_whole_sectors_needs_nothing() {
        let raw = Raw::new(1024);
        assert_eq!(raw.lookup(0, 1024).length_bytes, 1024);
        assert_eq!(raw.past_end(512), PastEnd::Fails);
        assert!(!raw.needs_padding(1024));
    }
}
