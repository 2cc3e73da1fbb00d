//! Self-describing data: the contents of each sector, and the contents that a read may find in it.
//!
//! Every 512-byte sector that a verified run writes names its offset, the generation of its block and the run's seed,
//! and carries a checksum. The rest of the sector follows from these. A read may find a range of generations: from the
//! last one acknowledged before the read began to the last one issued before it ended. Sectors are judged one by one,
//! because only a sector is never torn. If a write overlaps the read, even sectors may be torn: the kernel's page cache
//! copies without a lock. Then each byte must be of one of the generations.

use crate::range::Range;
use std::collections::VecDeque;

/// The unit that is never torn.
const SECTOR_BYTES: usize = 512;

const WORD_BYTES: usize = 8;
const MAGIC: u64 = 0x5269_6e67_6469_736b;

/// A generator of uncorrelated words from consecutive states (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Words(u64);

impl Words {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Returns a number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

fn checksum(seed: u64, offset: u64, generation: u32) -> u64 {
    Words::new(seed ^ offset.rotate_left(17) ^ u64::from(generation).rotate_left(43) ^ MAGIC).next()
}

/// Fills one sector.
fn fill_sector(sector: &mut [u8], seed: u64, offset: u64, generation: u32) {
    let check = checksum(seed, offset, generation);
    let mut filler = Words::new(check);
    for (index, word) in sector.chunks_exact_mut(WORD_BYTES).enumerate() {
        let value = match index {
            0 => MAGIC,
            1 => offset,
            2 => u64::from(generation),
            3 => seed,
            4 => check,
            _ => filler.next(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn word(sector: &[u8], index: usize) -> u64 {
    let bytes = sector.get(index * WORD_BYTES..(index + 1) * WORD_BYTES);
    bytes.and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// Fills `block`, whose offset is `offset`, with sectors of `generation`.
pub(crate) fn fill_block(block: &mut [u8], seed: u64, offset: u64, generation: u32) {
    for (index, sector) in block.chunks_mut(SECTOR_BYTES).enumerate() {
        fill_sector(sector, seed, offset + (index * SECTOR_BYTES) as u64, generation);
    }
}

/// The possible contents of a block: generations `lowest` to `highest`. Generation 0 is the contents before the first
/// write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expected {
    pub(crate) lowest: u32,
    pub(crate) highest: u32,
    /// Whether generation 0 is zeros. If not, it may be anything.
    pub(crate) zeros: bool,
    /// Whether a write overlapped the read.
    pub(crate) overlapped: bool,
}

/// Checks `block`, read from `offset`. Returns the first error.
pub(crate) fn check_block(block: &[u8], seed: u64, offset: u64, expected: Expected) -> Result<(), String> {
    if expected.lowest == 0 && !expected.zeros {
        return Ok(());
    }
    let mut model = [0; SECTOR_BYTES];
    for (index, sector) in block.chunks_exact(SECTOR_BYTES).enumerate() {
        let at = offset + (index * SECTOR_BYTES) as u64;
        let found = u32::try_from(word(sector, 2)).unwrap_or(u32::MAX);
        if found >= expected.lowest.max(1) && found <= expected.highest {
            fill_sector(&mut model, seed, at, found);
            if sector == model {
                continue;
            }
        }
        if expected.lowest == 0 && sector.iter().all(|byte| *byte == 0) {
            continue;
        }
        if expected.overlapped && is_mixed(sector, seed, at, expected) {
            continue;
        }
        return Err(describe(sector, seed, at, expected));
    }
    Ok(())
}

/// Whether each byte belongs to some expected generation.
fn is_mixed(sector: &[u8], seed: u64, offset: u64, expected: Expected) -> bool {
    let mut explained = [false; SECTOR_BYTES];
    let mut model = [0; SECTOR_BYTES];
    for generation in expected.lowest..=expected.highest {
        match generation {
            0 => model.fill(0),
            _ => fill_sector(&mut model, seed, offset, generation),
        }
        for ((explained, byte), own) in explained.iter_mut().zip(sector).zip(&model) {
            *explained |= byte == own;
        }
    }
    explained.iter().all(|explained| *explained)
}

fn describe(sector: &[u8], seed: u64, offset: u64, expected: Expected) -> String {
    let wanted = format!("offset {offset}: expected generation {} to {}", expected.lowest, expected.highest);
    if sector.iter().all(|byte| *byte == 0) {
        return format!("{wanted}, found zeros");
    }
    let (magic, at, generation) = (word(sector, 0), word(sector, 1), word(sector, 2));
    let whole = u32::try_from(generation).is_ok_and(|generation| word(sector, 4) == checksum(seed, at, generation));
    match (magic == MAGIC, word(sector, 3) == seed, whole) {
        (true, true, true) if at == offset => format!("{wanted}, found generation {generation}, perhaps torn"),
        (true, true, true) => format!("{wanted}, found generation {generation} of offset {at}"),
        (true, false, _) => format!("{wanted}, found data of another run"),
        (true, true, false) => format!("{wanted}, found a damaged sector"),
        (false, ..) => format!("{wanted}, found foreign bytes beginning {:02x?}", &sector[..16.min(sector.len())]),
    }
}

/// The history of a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockState {
    /// The last generation that a flush (or FUA) made durable.
    pub durable: u32,
    /// The last acknowledged generation.
    pub acknowledged: u32,
    /// The last issued generation, acknowledged or not.
    pub issued: u32,
}

/// The history of a range after a verified run: the start of another run, or of a check after a crash.
#[derive(Debug, Clone)]
pub struct VerifyState {
    range: Range,
    seed: u64,
    zeros: bool,
    blocks: Vec<BlockState>,
}

impl VerifyState {
    pub(crate) fn new(range: Range, seed: u64, zeros: bool, blocks: Vec<BlockState>) -> Self {
        Self { range, seed, zeros, blocks }
    }

    pub(crate) fn fits(&self, range: &Range) -> bool {
        self.range == *range && self.blocks.len() as u64 == range.blocks()
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn zeros(&self) -> bool {
        self.zeros
    }

    pub(crate) fn part(&self, blocks: std::ops::Range<u64>) -> Vec<BlockState> {
        self.blocks.get(blocks.start as usize..blocks.end as usize).unwrap_or_default().to_vec()
    }

    /// Returns the histories of the range's blocks.
    #[must_use]
    pub fn blocks(&self) -> &[BlockState] {
        &self.blocks
    }

    /// Returns the state after the server died: flushed data must be there, and anything issued later may be.
    #[must_use]
    pub fn after_crash(mut self) -> Self {
        for block in &mut self.blocks {
            block.acknowledged = block.durable;
        }
        self
    }
}

/// The history of a block when a read of it began.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReadBegan {
    lowest: u32,
    issued: u32,
    writing: bool,
}

/// The history of one queue's blocks. No other queue writes these blocks.
#[derive(Debug)]
pub(crate) struct Tracker {
    pub(crate) seed: u64,
    zeros: bool,
    first_block: u64,
    blocks: Vec<BlockState>,
    writing: Vec<bool>,
    /// Generations acknowledged since the last flush was submitted.
    since_flush: Vec<(u64, u32)>,
    /// Generations that flushes in flight will make durable, oldest first, with the flush's slot.
    flushing: VecDeque<(usize, Vec<(u64, u32)>)>,
}

impl Tracker {
    pub(crate) fn new(seed: u64, zeros: bool, first_block: u64, blocks: Vec<BlockState>) -> Self {
        let writing = vec![false; blocks.len()];
        let (since_flush, flushing) = (Vec::new(), VecDeque::new());
        Self { seed, zeros, first_block, blocks, writing, since_flush, flushing }
    }

    fn at(&self, block: u64) -> usize {
        (block - self.first_block) as usize
    }

    /// Whether a write of the block is in flight.
    pub(crate) fn is_writing(&self, block: u64) -> bool {
        self.writing[self.at(block)]
    }

    /// Notes the start of a write and returns its generation.
    pub(crate) fn begin_write(&mut self, block: u64) -> u32 {
        let at = self.at(block);
        self.writing[at] = true;
        self.blocks[at].issued += 1;
        self.blocks[at].issued
    }

    /// Notes the end of a write. After an error the block may hold old or new sectors, so nothing is acknowledged.
    pub(crate) fn end_write(&mut self, block: u64, acknowledged: bool, durable: bool) {
        let at = self.at(block);
        self.writing[at] = false;
        if !acknowledged {
            return;
        }
        let generation = self.blocks[at].issued;
        self.blocks[at].acknowledged = generation;
        match durable {
            true => self.blocks[at].durable = generation,
            false => self.since_flush.push((block, generation)),
        }
    }

    pub(crate) fn begin_flush(&mut self, slot: usize) {
        self.flushing.push_back((slot, std::mem::take(&mut self.since_flush)));
    }

    /// Notes the end of a flush. A failed flush makes nothing durable.
    pub(crate) fn end_flush(&mut self, slot: usize, success: bool) {
        let Some(index) = self.flushing.iter().position(|(of, _)| *of == slot) else { return };
        let Some((_, covered)) = self.flushing.remove(index) else { return };
        for (block, generation) in covered.into_iter().filter(|_| success) {
            let at = self.at(block);
            self.blocks[at].durable = self.blocks[at].durable.max(generation);
        }
    }

    /// Notes the start of a read.
    pub(crate) fn begin_read(&self, block: u64) -> ReadBegan {
        let at = self.at(block);
        let BlockState { acknowledged, issued, .. } = self.blocks[at];
        ReadBegan { lowest: acknowledged, issued, writing: self.writing[at] }
    }

    /// Returns the contents that an ended read may have found.
    pub(crate) fn expected(&self, block: u64, began: ReadBegan) -> Expected {
        let highest = self.blocks[self.at(block)].issued;
        let overlapped = began.writing || highest != began.issued;
        Expected { lowest: began.lowest, highest, zeros: self.zeros, overlapped }
    }

    pub(crate) fn into_blocks(self) -> Vec<BlockState> {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expect(lowest: u32, highest: u32) -> Expected {
        Expected { lowest, highest, zeros: true, overlapped: false }
    }

    #[test]
    fn a_block_is_accepted_only_at_its_place_in_its_generation_and_whole() {
        let mut block = vec![0; 2048];
        fill_block(&mut block, 7, 8192, 3);
        assert!(check_block(&block, 7, 8192, expect(3, 3)).is_ok());
        assert!(check_block(&block, 7, 8192, expect(0, 5)).is_ok());
        for (seed, offset, expected) in
            [(8, 8192, expect(3, 3)), (7, 4096, expect(3, 3)), (7, 8192, expect(4, 9)), (7, 8192, expect(1, 2))]
        {
            assert!(check_block(&block, seed, offset, expected).is_err(), "{seed} {offset} {expected:?}");
        }
        for flipped in [0, 40, 511, 512, 2047] {
            let mut damaged = block.clone();
            damaged[flipped] ^= 1;
            assert!(check_block(&damaged, 7, 8192, expect(3, 3)).is_err(), "byte {flipped}");
        }
    }

    #[test]
    fn sectors_of_one_block_may_be_of_different_generations_while_it_is_written() {
        let (mut old, mut new) = (vec![0; 1024], vec![0; 1024]);
        fill_block(&mut old, 1, 0, 4);
        fill_block(&mut new, 1, 0, 5);
        old[512..].copy_from_slice(&new[512..]);
        assert!(check_block(&old, 1, 0, expect(4, 5)).is_ok());
        assert!(check_block(&old, 1, 0, expect(5, 5)).unwrap_err().contains("found generation 4"));
        assert!(check_block(&[0; 512], 1, 0, expect(0, 1)).is_ok());
        assert!(check_block(&[0; 512], 1, 0, expect(1, 1)).unwrap_err().contains("zeros"));
    }

    #[test]
    fn a_sector_may_be_mixed_only_of_expected_generations_and_only_while_it_is_written() {
        let (mut mixed, mut new) = (vec![0; 512], vec![0; 512]);
        fill_block(&mut mixed, 1, 0, 4);
        fill_block(&mut new, 1, 0, 5);
        mixed[100..].copy_from_slice(&new[100..]);
        let overlapped = |lowest, highest| Expected { overlapped: true, ..expect(lowest, highest) };
        assert!(check_block(&mixed, 1, 0, overlapped(4, 5)).is_ok());
        assert!(check_block(&mixed, 1, 0, expect(4, 5)).is_err());
        assert!(check_block(&mixed, 1, 0, overlapped(5, 6)).is_err());
        mixed[300] ^= 1;
        assert!(check_block(&mixed, 1, 0, overlapped(4, 5)).is_err());
    }

    #[test]
    fn a_flush_promises_what_was_acknowledged_before_it_began() {
        let mut tracker = Tracker::new(1, true, 10, vec![BlockState::default(); 4]);
        tracker.begin_write(10);
        tracker.begin_write(11);
        tracker.end_write(10, true, false);
        tracker.begin_flush(0);
        tracker.end_write(11, true, false);
        tracker.end_flush(0, true);
        tracker.begin_flush(1);
        tracker.end_flush(1, false);
        tracker.begin_write(12);
        tracker.end_write(12, false, false);
        let durable: Vec<_> = tracker.blocks.iter().map(|block| (block.durable, block.acknowledged)).collect();
        assert_eq!(durable, [(1, 1), (0, 1), (0, 0), (0, 0)]);
        let expected = tracker.expected(12, ReadBegan::default());
        assert_eq!((expected.lowest, expected.highest, expected.overlapped), (0, 1, true));
    }
}
