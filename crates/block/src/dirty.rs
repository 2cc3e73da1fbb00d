//! Dirty bitmaps: the parts of a disk that were written since some moment.

use crate::Result;
use memory::to_usize;
use std::ops::Range;

/// A set of named bitmaps of a disk's written parts.
pub trait DirtyBitmaps: Send + Sync {
    /// Returns a copy of a bitmap. Fails if there is none of that name, or its bits mean nothing. Blocks while tables
    /// are read.
    fn dirty_bitmap(&self, name: &str) -> Result<DirtyMap>;
}

/// A bit for each granule of a disk, set if the granule was written. The first is the lowest bit of the first byte.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirtyMap {
    /// Bytes for each bit, as a power of two.
    pub granularity_bits: u8,
    /// The bytes of the disk that the bits cover. Bytes behind them were added later, and count as written.
    pub size_bytes: u64,
    /// The bits.
    pub bits: Vec<u8>,
    /// The bitmap still records writes, so a later copy may have more bits set.
    pub is_recording: bool,
}

impl DirtyMap {
    /// Makes a map of these bits.
    #[must_use]
    pub fn new(granularity_bits: u8, size_bytes: u64, bits: Vec<u8>, is_recording: bool) -> Self {
        Self { granularity_bits: granularity_bits.min(63), size_bytes, bits, is_recording }
    }

    /// Returns the first `most` runs of a range, in order and without gaps: their lengths, and whether they were
    /// written. Two neighbours differ.
    #[must_use]
    pub fn runs(&self, within: Range<u64>, most: usize) -> Vec<(u64, bool)> {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        let mut at = within.start;
        while at < within.end {
            let (dirty, next) = self.look_at(at);
            let next = next.min(within.end).max(at.saturating_add(1));
            let length_bytes = next.saturating_sub(at);
            let told = runs.len();
            match runs.last_mut() {
                Some((length, last)) if *last == dirty => *length = length.saturating_add(length_bytes),
                _ if told >= most => break,
                _ => runs.push((length_bytes, dirty)),
            }
            at = next;
        }
        runs
    }

    /// Returns whether a byte was written, and where that may change.
    fn look_at(&self, at: u64) -> (bool, u64) {
        if at >= self.size_bytes {
            return (true, u64::MAX);
        }
        let shift = u32::from(self.granularity_bits);
        let granule = at.wrapping_shr(shift);
        let index = to_usize(granule / 8);
        let byte = self.bits.get(index).copied().unwrap_or(0);
        // Granules in one byte that are all alike are one step.
        let (dirty, granules) = match byte {
            0 => (false, 8_u64.saturating_sub(granule % 8)),
            u8::MAX => (true, 8_u64.saturating_sub(granule % 8)),
            byte => (byte.wrapping_shr((granule % 8) as u32) & 1 != 0, 1),
        };
        let end = granule.saturating_add(granules);
        let end = end.saturating_mul(1_u64.wrapping_shl(shift));
        (dirty, end.min(self.size_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_those_of_the_bits_and_what_was_added_is_written() {
        let mut bits = vec![0; 8];
        (bits[0], bits[1], bits[2]) = (0b1000_0001, 0xff, 0b1);
        let map = DirtyMap::new(9, 64 * 512, bits, false);
        let all = map.runs(0..70 * 512, 100);
        let sectors: Vec<(u64, bool)> = all.into_iter().map(|(length, dirty)| (length / 512, dirty)).collect();
        assert_eq!(sectors, [(1, true), (6, false), (10, true), (47, false), (6, true)]);
        assert_eq!(map.runs(100..512 + 7, 100), [(412, true), (7, false)]);
        assert_eq!(map.runs(0..70 * 512, 2), [(512, true), (6 * 512, false)]);
        assert!(map.runs(5..5, 2).is_empty());
        // Fewer bits than the disk has granules.
        assert_eq!(DirtyMap::new(63, 1 << 40, Vec::new(), true).runs(0..1 << 40, 9), [(1 << 40, false)]);
    }
}
