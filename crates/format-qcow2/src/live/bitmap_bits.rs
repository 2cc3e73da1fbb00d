//! The bits of a bitmap while a guest writes: set without a lock and without waiting, never cleared.

use crate::layout::geometry::Geometry;
use block::sync::{AtomicBool, AtomicU64, Ordering};

/// Bits of a word.
const WORD_BITS: u64 = 64;

/// A bit for each granule of the disk. The first is the lowest bit of the first word.
#[derive(Debug)]
pub(crate) struct DirtyBits {
    granularity_bits: u32,
    granules: u64,
    words: Box<[AtomicU64]>,
    /// Parts with bits that the file lacks. A part is a cluster of the bitmap in the file.
    changed: Box<[AtomicBool]>,
    /// Words of a part, as a power of two.
    part_bits: u32,
}

impl DirtyBits {
    /// Makes bits that are all clear.
    pub(crate) fn new(granularity_bits: u8, geometry: &Geometry) -> Self {
        let granularity_bits = u32::from(granularity_bits);
        let granules = geometry.size_bytes.div_ceil(1u64.wrapping_shl(granularity_bits));
        let part_bits = geometry.cluster_bits.saturating_sub(3);
        let words = granules.div_ceil(WORD_BITS);
        let parts = words.div_ceil(1u64.wrapping_shl(part_bits));
        Self {
            granularity_bits,
            granules,
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            changed: (0..parts).map(|_| AtomicBool::new(false)).collect(),
            part_bits,
        }
    }

    /// Sets the bit of every granule that a range touches. A reader of the bits has waited for all writers, so no
    /// memory order is needed here.
    #[inline]
    pub(crate) fn mark(&self, offset: u64, length: u64) {
        let Some(last) = offset.saturating_add(length).checked_sub(1).filter(|last| *last >= offset) else { return };
        let mut granule = offset.wrapping_shr(self.granularity_bits);
        let end = last.wrapping_shr(self.granularity_bits).saturating_add(1).min(self.granules);
        while granule < end {
            let up_to = (granule | WORD_BITS.saturating_sub(1)).saturating_add(1).min(end);
            // The number of granules here is from one to 64.
            let missing = WORD_BITS.saturating_sub(up_to.saturating_sub(granule)) as u32;
            let mask = u64::MAX.wrapping_shr(missing).wrapping_shl((granule % WORD_BITS) as u32);
            self.set((granule / WORD_BITS) as usize, mask);
            granule = up_to;
        }
    }

    fn set(&self, index: usize, mask: u64) {
        let Some(word) = self.words.get(index) else { return };
        // Mostly the bits are set already. Without a write, the cache line stays in every processor's cache.
        if word.load(Ordering::Relaxed) & mask == mask {
            return;
        }
        word.fetch_or(mask, Ordering::Relaxed);
        if let Some(changed) = self.changed.get(index.wrapping_shr(self.part_bits)) {
            changed.store(true, Ordering::Relaxed);
        }
    }

    /// Adds the bits of a part from the file.
    pub(crate) fn load_part(&self, part: usize, words: impl Iterator<Item = u64>) {
        let first = part.wrapping_shl(self.part_bits);
        let count = 1usize.wrapping_shl(self.part_bits);
        for (index, bits) in (first..).zip(words.take(count)) {
            let Some(word) = self.words.get(index) else { return };
            let granule = (index as u64).saturating_mul(WORD_BITS);
            let inside = self.granules.saturating_sub(granule).min(WORD_BITS);
            // Bits behind the end of the disk mean nothing.
            let mask = u64::MAX.wrapping_shr(WORD_BITS.saturating_sub(inside) as u32);
            word.fetch_or(bits & mask, Ordering::Relaxed);
        }
    }

    /// Returns a part as the file stores it: a whole cluster.
    pub(crate) fn part_bytes(&self, part: usize) -> Vec<u8> {
        let first = part.wrapping_shl(self.part_bits);
        let words = first..first.saturating_add(1usize.wrapping_shl(self.part_bits));
        let word = |index: usize| self.words.get(index).map_or(0, |word| word.load(Ordering::Relaxed));
        words.flat_map(|index| word(index).to_le_bytes()).collect()
    }

    /// Returns how many bytes of a disk of this size were written, in whole granules.
    pub(crate) fn dirty_bytes(&self, size_bytes: u64) -> u64 {
        let set = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        let granules = self.words.iter().map(set).fold(0u64, u64::saturating_add);
        granules.wrapping_shl(self.granularity_bits).min(size_bytes)
    }

    /// Returns the number of parts.
    pub(crate) fn parts(&self) -> usize {
        self.changed.len()
    }

    /// Returns the parts with bits that the file lacks.
    pub(crate) fn changed_parts(&self) -> Vec<usize> {
        let changed = self.changed.iter().enumerate().filter(|(_, changed)| changed.load(Ordering::Relaxed));
        changed.map(|(part, _)| part).collect()
    }

    /// Notes that the file has all bits.
    pub(crate) fn all_stored(&self) {
        self.changed.iter().for_each(|changed| changed.store(false, Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::bitmap::BitmapBits;
    use testkit::Dice;

    fn geometry(size_bytes: u64) -> Geometry {
        Geometry {
            version: 3,
            size_bytes,
            cluster_bits: 9,
            refcount_order: 4,
            has_backing: false,
            extended_l2: false,
            data_file: false,
        }
    }

    fn bytes(bits: &DirtyBits) -> Vec<u8> {
        (0..bits.parts()).flat_map(|part| bits.part_bytes(part)).collect()
    }

    #[test]
    fn bits_are_those_of_the_granules_that_were_touched_however_many_threads_set_them() {
        let mut dice = Dice::new(5);
        for granularity_bits in [9, 12, 16] {
            let size = (3 << 20) + 512 * (1 + dice.below(200));
            let geometry = geometry(size);
            let bits = DirtyBits::new(granularity_bits, &geometry);
            let mut ranges = Vec::new();
            for _ in 0..40 {
                let start = dice.below(size);
                let length = [1, 512, 40 << 10, size - start][dice.index(4)].min(size - start);
                ranges.push(start..start + if dice.chance(3) { length } else { length.min(90 << 10) });
            }
            std::thread::scope(|scope| {
                for part in ranges.chunks(10) {
                    let bits = &bits;
                    scope.spawn(move || part.iter().for_each(|range| bits.mark(range.start, range.end - range.start)));
                }
            });
            let mut expected = BitmapBits::of_ranges(granularity_bits, size, &ranges).bytes;
            let used: Vec<usize> = (0..expected.len().div_ceil(512)).collect();
            expected.resize(used.len() * 512, 0);
            assert!(bytes(&bits) == expected, "granularity {granularity_bits}");
            let dirty = |part: &usize| expected[part * 512..(part + 1) * 512].iter().any(|byte| *byte != 0);
            assert_eq!(bits.changed_parts(), used.into_iter().filter(dirty).collect::<Vec<_>>());
            bits.all_stored();
            bits.mark(ranges[0].start, 1);
            assert!(bits.changed_parts().is_empty(), "what was set already has to be stored again");
        }
    }

    #[test]
    fn what_is_loaded_stays_and_bits_behind_the_end_of_the_disk_go() {
        // 4097 granules: a part, and one bit of a second.
        let bits = DirtyBits::new(9, &geometry(4097 * 512));
        bits.load_part(0, [1 << 63].into_iter());
        bits.load_part(1, std::iter::repeat(u64::MAX));
        bits.mark(0, 1);
        bits.mark(5, 0);
        let mut expected = vec![0; 1024];
        (expected[0], expected[7], expected[512]) = (1, 0x80, 1);
        assert_eq!(bytes(&bits), expected);
        assert_eq!(bits.changed_parts(), [0]);
    }
}
