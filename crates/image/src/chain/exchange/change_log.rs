//! Records where a disk is written to while somebody copies it.

use block::sync::{AtomicU64, Ordering};
use std::ops::Range;

/// A bit stands for at least 64 KiB.
const GRANULE_BITS_MIN: u32 = 16;
/// The most bits in a log.
const BITS_MAX: u64 = 1 << 20;

/// Written ranges, rounded to granules. A write is noted before it begins.
pub(crate) struct ChangeLog {
    granule_bits: u32,
    words: Box<[AtomicU64]>,
}

impl ChangeLog {
    pub(crate) fn new(size_bytes: u64) -> Self {
        let count = |bits: u32| size_bytes.wrapping_shr(bits).saturating_add(1);
        let granule_bits =
            (GRANULE_BITS_MIN..u64::BITS).find(|bits| count(*bits) <= BITS_MAX).unwrap_or(GRANULE_BITS_MIN);
        let words = count(granule_bits).div_ceil(64);
        Self { granule_bits, words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Notes a range that will be written to.
    pub(crate) fn note(&self, offset: u64, length_bytes: u64) {
        let Some(last) = offset.saturating_add(length_bytes).checked_sub(1).filter(|_| length_bytes > 0) else {
            return;
        };
        for granule in offset.wrapping_shr(self.granule_bits)..=last.wrapping_shr(self.granule_bits) {
            let word = usize::try_from(granule / 64).ok().and_then(|word| self.words.get(word));
            if let Some(word) = word {
                word.fetch_or(1u64.wrapping_shl((granule % 64) as u32), Ordering::Relaxed);
            }
        }
    }

    /// Returns the noted ranges in order, with neighbours joined, cut off at `size_bytes`.
    pub(crate) fn ranges(&self, size_bytes: u64) -> Vec<Range<u64>> {
        self.ranges_by(size_bytes, |word| word.load(Ordering::Relaxed))
    }

    /// As [`ChangeLog::ranges`], and forgets them.
    pub(crate) fn take_ranges(&self, size_bytes: u64) -> Vec<Range<u64>> {
        self.ranges_by(size_bytes, |word| word.swap(0, Ordering::Relaxed))
    }

    fn ranges_by(&self, size_bytes: u64, bits_of: impl Fn(&AtomicU64) -> u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (index, word) in self.words.iter().enumerate() {
            let bits = bits_of(word);
            for bit in (0..64u64).filter(|bit| bits & 1u64.wrapping_shl(*bit as u32) != 0) {
                let granule = (index as u64).saturating_mul(64).saturating_add(bit);
                let start = granule.wrapping_shl(self.granule_bits);
                let end = granule.saturating_add(1).wrapping_shl(self.granule_bits).min(size_bytes);
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        ranges.retain(|range| range.start < range.end);
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_comes_back_in_whole_granules_and_nothing_else_does() {
        const G: u64 = 1 << GRANULE_BITS_MIN;
        let log = ChangeLog::new(100 * G + 512);
        assert!(log.ranges(100 * G + 512).is_empty());
        log.note(G - 1, 2);
        log.note(5 * G, 0);
        log.note(70 * G, G);
        log.note(100 * G, 512);
        log.note(u64::MAX - 1, u64::MAX);
        assert_eq!(log.ranges(100 * G + 512), [0..2 * G, 70 * G..71 * G, 100 * G..100 * G + 512]);
        assert!(ChangeLog::new(1 << 60).words.len() as u64 <= BITS_MAX / 64 + 1);
    }
}
