//! The range of a disk that a run uses, divided into blocks.

/// The range of a run, already checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
    pub(crate) block_bytes: u32,
}

impl Range {
    /// Returns the number of blocks; the last may be shorter.
    pub(crate) fn blocks(&self) -> u64 {
        self.length_bytes.div_ceil(u64::from(self.block_bytes))
    }

    /// Returns the place and length of block `index`.
    pub(crate) fn block(&self, index: u64) -> (u64, usize) {
        let skip = index * u64::from(self.block_bytes);
        let length = (self.length_bytes - skip).min(u64::from(self.block_bytes));
        (self.offset_bytes + skip, length as usize)
    }

    /// Returns the blocks of part `index` of `count` nearly equal parts.
    pub(crate) fn part(&self, index: u64, count: u64) -> std::ops::Range<u64> {
        let blocks = u128::from(self.blocks());
        let at = |index: u64| (blocks * u128::from(index) / u128::from(count)) as u64;
        at(index)..at(index + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_range_once_and_the_last_block_may_be_short() {
        let range = Range { offset_bytes: 512, length_bytes: 10 * 4096 + 512, block_bytes: 4096 };
        let parts: Vec<_> = (0..3).flat_map(|index| range.part(index, 3)).collect();
        assert_eq!(parts, (0..11).collect::<Vec<_>>());
        assert_eq!(range.block(10), (512 + 10 * 4096, 512));
    }
}
