//! Refcounts of host clusters: the refcount table in memory, refcount blocks cached on demand.
//!
//! All of this is protected by the image's mutex, and uses only blocks in memory. If a block is missing, its number is
//! returned to the caller, who loads it without the mutex and tries again.

use crate::layout::entry::decode_refcount_table;
use crate::layout::geometry::Geometry;
use crate::layout::refcount_entry::{max_count, read_entry, write_entry};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

const CACHED_BLOCKS_MIN: usize = 16;

/// At least this many unchanged blocks stay in memory, however many are changed: one step may need several at once, and
/// loading one must not push another out.
const CLEAN_BLOCKS_MIN: usize = 4;

/// The most runs of free clusters that are looked for at once.
const FREE_RUNS_MAX: usize = 256;

/// Blocks are written in parts of this size, so that a flush after a small write stays small.
const PART_BYTES: usize = 4096;

/// Why a refcount is not available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absent {
    /// The block is not in memory: load it.
    NotLoaded(u64),
    /// There is no block: nothing in its range is in use.
    NoBlock(u64),
    /// The table entry breaks the specification.
    Corrupt(u64),
}

/// The refcount would exceed the image's refcount width, or fall below zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overflow;

#[derive(Debug)]
pub(crate) struct Block {
    /// The bytes as on disk.
    bytes: Box<[u8]>,
    /// Parts that differ from the file.
    dirty: BTreeSet<usize>,
    /// Parts on their way to the file.
    writing: BTreeSet<usize>,
    used: u64,
}

impl Block {
    fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.writing.is_empty()
    }
}

#[derive(Debug)]
pub(crate) struct Refcounts {
    geometry: Geometry,
    /// The refcount table in memory; the file may be behind.
    table: Vec<u64>,
    table_offset: u64,
    /// Entries that differ from the file.
    table_dirty: BTreeSet<usize>,
    table_writing: BTreeSet<usize>,
    /// Whether the table lies in a new place that the header does not name yet.
    moved: bool,
    blocks: HashMap<u64, Block>,
    dirty_blocks: BTreeSet<u64>,
    writing_blocks: BTreeSet<u64>,
    clock: u64,
    /// The limit of clean blocks in bytes; more are dropped.
    cache_bytes: u64,
    /// The end of the last compressed cluster. More may follow in the same host cluster, unless this is a cluster's
    /// start.
    packed_end: u64,
}

/// One piece of metadata to write.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

impl Refcounts {
    pub(crate) fn new(geometry: Geometry, table: Vec<u64>, table_offset: u64, cache_bytes: u64) -> Self {
        Self {
            geometry,
            table,
            table_offset,
            table_dirty: BTreeSet::new(),
            table_writing: BTreeSet::new(),
            moved: false,
            blocks: HashMap::new(),
            dirty_blocks: BTreeSet::new(),
            writing_blocks: BTreeSet::new(),
            clock: 0,
            cache_bytes,
            packed_end: 0,
        }
    }

    /// Returns where a block lies in the file.
    pub(crate) fn block_offset(&self, block: u64) -> Result<u64, Absent> {
        let raw = usize::try_from(block).ok().and_then(|index| self.table.get(index)).copied().unwrap_or(0);
        match decode_refcount_table(raw, &self.geometry) {
            Ok(Some(offset)) => Ok(offset),
            Ok(None) => Err(Absent::NoBlock(block)),
            Err(_) => Err(Absent::Corrupt(block)),
        }
    }

    pub(crate) fn set_cache_bytes(&mut self, cache_bytes: u64) {
        self.cache_bytes = cache_bytes;
    }

    pub(crate) fn table_offset(&self) -> u64 {
        self.table_offset
    }

    /// Returns how many blocks the table has room for.
    pub(crate) fn table_entries(&self) -> u64 {
        self.table.len() as u64
    }

    /// Returns the last block.
    pub(crate) fn last_block(&self) -> Option<u64> {
        self.table.iter().rposition(|raw| *raw != 0).map(|index| index as u64)
    }

    /// Returns the offsets of all blocks.
    pub(crate) fn block_offsets(&self) -> impl Iterator<Item = u64> {
        self.table.iter().copied().filter(|raw| *raw != 0)
    }

    pub(crate) fn is_loaded(&self, block: u64) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Puts a block into memory that is new or was read from the file.
    pub(crate) fn install(&mut self, block: u64, bytes: Box<[u8]>) {
        // Makes room first, so that the new block is never the one that is dropped.
        let limit = self.geometry.cluster_of(self.cache_bytes).max(CACHED_BLOCKS_MIN as u64);
        if self.blocks.len() as u64 >= limit {
            let clean = || self.blocks.iter().filter(|(_, b)| b.is_clean());
            let victim = clean().min_by_key(|(_, b)| b.used).map(|(k, _)| *k);
            if let Some(victim) = victim.filter(|_| clean().count() > CLEAN_BLOCKS_MIN) {
                self.blocks.remove(&victim);
            }
        }
        self.clock = self.clock.wrapping_add(1);
        let fresh = Block { bytes, dirty: BTreeSet::new(), writing: BTreeSet::new(), used: self.clock };
        self.blocks.insert(block, fresh);
    }

    fn index_in_block(&self, cluster: u64) -> u64 {
        cluster & 1u64.wrapping_shl(self.geometry.block_bits()).saturating_sub(1)
    }

    /// Returns the refcount of a host cluster.
    pub(crate) fn get(&mut self, cluster: u64) -> Result<u64, Absent> {
        let block = self.geometry.block_of(cluster);
        let index = self.index_in_block(cluster);
        let order = self.geometry.refcount_order;
        self.clock = self.clock.wrapping_add(1);
        match self.blocks.get_mut(&block) {
            Some(found) => {
                found.used = self.clock;
                Ok(read_entry(&found.bytes, index, order))
            }
            None => Err(self.block_offset(block).map_or_else(|absent| absent, |_| Absent::NotLoaded(block))),
        }
    }

    /// Returns the first free host cluster behind `cluster` that the same block counts. If there is none, returns the
    /// first cluster of the next block. The block is in memory.
    pub(crate) fn next_free(&self, cluster: u64) -> u64 {
        let number = self.geometry.block_of(cluster);
        let Some(block) = self.blocks.get(&number) else { return cluster.saturating_add(1) };
        let order = self.geometry.refcount_order;
        let mut behind = cluster.saturating_add(1)..self.geometry.block_end(number);
        let end = behind.end;
        behind.find(|other| read_entry(&block.bytes, self.index_in_block(*other), order) == 0).unwrap_or(end)
    }

    /// Returns the runs of free host clusters between two clusters of one block, and how far it looked. If there are
    /// very many runs, it stops early.
    pub(crate) fn free_runs(&mut self, from: u64, to: u64) -> Result<(Vec<Range<u64>>, u64), Absent> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        if from >= to {
            return Ok((runs, to));
        }
        self.get(from)?;
        let first = self.index_in_block(from);
        let order = self.geometry.refcount_order;
        let Some(block) = self.blocks.get(&self.geometry.block_of(from)) else { return Ok((runs, to)) };
        for cluster in from..to {
            let index = first.saturating_add(cluster.saturating_sub(from));
            if read_entry(&block.bytes, index, order) != 0 {
                continue;
            }
            let count = runs.len();
            match runs.last_mut() {
                Some(last) if last.end == cluster => last.end = cluster.saturating_add(1),
                _ if count == FREE_RUNS_MAX => return Ok((runs, cluster)),
                _ => runs.push(cluster..cluster.saturating_add(1)),
            }
        }
        Ok((runs, to))
    }

    /// Counts the used host clusters between two clusters of one block.
    pub(crate) fn count_used(&mut self, from: u64, to: u64) -> Result<u64, Absent> {
        self.get(from)?;
        let order = self.geometry.refcount_order;
        let Some(block) = self.blocks.get(&self.geometry.block_of(from)) else { return Ok(0) };
        let is_used = |cluster: &u64| read_entry(&block.bytes, self.index_in_block(*cluster), order) != 0;
        Ok((from..to).filter(is_used).count() as u64)
    }

    /// Returns the highest refcount of the image's width.
    pub(crate) fn max(&self) -> u64 {
        max_count(self.geometry.refcount_order)
    }

    pub(crate) fn packed_end(&self) -> u64 {
        self.packed_end
    }

    pub(crate) fn set_packed_end(&mut self, offset: u64) {
        self.packed_end = offset;
    }

    /// Sets the refcount of a host cluster whose block is in memory.
    pub(crate) fn set(&mut self, cluster: u64, value: u64) -> Result<(), Overflow> {
        let order = self.geometry.refcount_order;
        if value > self.max() {
            return Err(Overflow);
        }
        if value == 0 && cluster == self.geometry.cluster_of(self.packed_end) {
            // Something else may soon use the cluster.
            self.packed_end = 0;
        }
        let (number, index) = (self.geometry.block_of(cluster), self.index_in_block(cluster));
        let block = self.blocks.get_mut(&number).ok_or(Overflow)?;
        let at = write_entry(&mut block.bytes, index, order, value);
        block.dirty.insert(at / PART_BYTES);
        self.dirty_blocks.insert(number);
        Ok(())
    }

    /// Adds a new, empty block at `offset`. The next flush publishes its table entry.
    pub(crate) fn add_block(&mut self, block: u64, offset: u64) {
        let Ok(index) = usize::try_from(block) else { return };
        let Some(entry) = self.table.get_mut(index) else { return };
        *entry = offset;
        self.table_dirty.insert(index);
        let bytes = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(0);
        self.install(block, vec![0; bytes].into_boxed_slice());
        if let Some(found) = self.blocks.get_mut(&block) {
            found.dirty.extend(0..bytes.div_ceil(PART_BYTES));
            self.dirty_blocks.insert(block);
        }
    }

    /// Moves the table to a new, larger place.
    pub(crate) fn move_table(&mut self, offset: u64, entries: usize) {
        self.table.resize(entries, 0);
        self.table_offset = offset;
        self.moved = true;
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty_blocks.is_empty() || !self.table_dirty.is_empty() || self.moved
    }

    /// Whether the table has a new place that the header does not name yet.
    pub(crate) fn has_moved(&self) -> bool {
        self.moved
    }

    /// Whether so many changes wait for a flush that one should run soon.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_filled(1)
    }

    /// Whether so many changes wait for a flush that only allocations should add more. Frees can wait.
    pub(crate) fn is_half_crowded(&self) -> bool {
        self.is_filled(2)
    }

    /// Whether the changes that wait for a flush take more than the room divided by `parts`.
    fn is_filled(&self, parts: u64) -> bool {
        let count = self.dirty_blocks.len() as u64;
        let dirty = count.saturating_mul(self.geometry.cluster_bytes());
        dirty.saturating_mul(parts) > self.cache_bytes && count.saturating_mul(parts) > CACHED_BLOCKS_MIN as u64
    }

    #[cfg(test)]
    pub(crate) fn blocks_in_memory(&self) -> usize {
        self.blocks.len()
    }

    /// Copies the changed metadata to be written, and marks it as *being written*.
    pub(crate) fn begin_writing(&mut self) -> RefcountWrites {
        let mut writes = RefcountWrites::default();
        self.writing_blocks = std::mem::take(&mut self.dirty_blocks);
        for number in &self.writing_blocks {
            let Ok(offset) = decode_entry_of(&self.table, *number, &self.geometry) else { continue };
            let Some(block) = self.blocks.get_mut(number) else { continue };
            block.writing = std::mem::take(&mut block.dirty);
            writes.blocks.extend(parts(&block.bytes, &block.writing, offset));
        }
        self.table_writing = std::mem::take(&mut self.table_dirty);
        if self.moved {
            self.moved = false;
            let bytes: Vec<u8> = self.table.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            let clusters = self.geometry.clusters_for(bytes.len() as u64);
            writes.moved_table =
                Some(MovedTable { piece: Piece { offset: self.table_offset, bytes }, clusters: clusters as u32 });
        } else {
            writes.entries = sectors(&self.table_writing, self.table_offset, |index| self.table.get(index).copied());
        }
        writes
    }

    /// Ends the writing that [`Refcounts::begin_writing`] began. Metadata that were not written become dirty again.
    pub(crate) fn end_writing(&mut self, written: bool, moved: bool) {
        for number in std::mem::take(&mut self.writing_blocks) {
            let Some(block) = self.blocks.get_mut(&number) else { continue };
            let parts = std::mem::take(&mut block.writing);
            if !written {
                block.dirty.extend(parts);
                self.dirty_blocks.insert(number);
            }
        }
        let entries = std::mem::take(&mut self.table_writing);
        if !written {
            self.table_dirty.extend(entries);
            self.moved |= moved;
        }
    }
}

fn decode_entry_of(table: &[u64], block: u64, geometry: &Geometry) -> Result<u64, ()> {
    let raw = usize::try_from(block).ok().and_then(|index| table.get(index)).copied().ok_or(())?;
    decode_refcount_table(raw, geometry).ok().flatten().ok_or(())
}

/// The writes of a flush for the refcounts.
#[derive(Debug, Default)]
pub(crate) struct RefcountWrites {
    pub(crate) blocks: Vec<Piece>,
    /// Changed sectors of the table in its old place.
    pub(crate) entries: Vec<Piece>,
    /// The whole table in a new place, instead of `entries`.
    pub(crate) moved_table: Option<MovedTable>,
}

/// A refcount table in a new place, which the header does not name yet.
#[derive(Debug)]
pub(crate) struct MovedTable {
    pub(crate) piece: Piece,
    pub(crate) clusters: u32,
}

/// Returns these parts of a block as pieces, with neighbours joined.
fn parts(bytes: &[u8], numbers: &BTreeSet<usize>, offset: u64) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for number in numbers {
        let start = number.saturating_mul(PART_BYTES);
        let end = start.saturating_add(PART_BYTES).min(bytes.len());
        let Some(part) = bytes.get(start..end) else { continue };
        let at = offset.saturating_add(start as u64);
        match pieces.last_mut() {
            Some(last) if last.offset.saturating_add(last.bytes.len() as u64) == at => last.bytes.extend(part),
            _ => pieces.push(Piece { offset: at, bytes: part.to_vec() }),
        }
    }
    pieces
}

/// Returns the sectors of a table of 64-bit entries that hold `dirty` ones, with neighbours joined. Entries that the
/// table lacks are zero.
pub(crate) fn sectors(dirty: &BTreeSet<usize>, table_offset: u64, entry: impl Fn(usize) -> Option<u64>) -> Vec<Piece> {
    const ENTRIES: usize = 64;
    let mut pieces: Vec<Piece> = Vec::new();
    let mut last_sector = None;
    for sector in dirty.iter().map(|index| index / ENTRIES) {
        if last_sector.replace(sector) == Some(sector) {
            continue;
        }
        let first = sector.saturating_mul(ENTRIES);
        let bytes = (first..first.saturating_add(ENTRIES)).flat_map(|index| entry(index).unwrap_or(0).to_be_bytes());
        let at = table_offset.saturating_add((first as u64).saturating_mul(8));
        match pieces.last_mut() {
            Some(last) if last.offset.saturating_add(last.bytes.len() as u64) == at => last.bytes.extend(bytes),
            _ => pieces.push(Piece { offset: at, bytes: bytes.collect() }),
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_runs_are_what_single_looks_say() {
        let geometry = Geometry {
            version: 3,
            size_bytes: 1 << 30,
            cluster_bits: 9,
            refcount_order: 2,
            has_backing: false,
            extended_l2: false,
            data_file: false,
        };
        let mut refcounts = Refcounts::new(geometry, vec![512, 1024, 0], 0, 0);
        assert_eq!(refcounts.free_runs(3, 9), Err(Absent::NotLoaded(0)));
        refcounts.install(1, vec![0; 512].into());
        for cluster in [1024, 1030, 1031, 2047] {
            refcounts.set(cluster, 1).unwrap();
        }
        assert_eq!(refcounts.free_runs(1024, 2048), Ok((vec![1025..1030, 1032..2047], 2048)));
        assert_eq!(refcounts.free_runs(1028, 1033), Ok((vec![1028..1030, 1032..1033], 1033)));
        assert_eq!(refcounts.free_runs(2048, 2050), Err(Absent::NoBlock(2)));
        let next = [1023, 1024, 1027, 1029, 2045, 2046].map(|cluster| refcounts.next_free(cluster));
        assert_eq!(next, [1024, 1025, 1028, 1032, 2046, 2048]);
    }

    #[test]
    fn a_count_that_does_not_fit_is_refused() {
        let geometry = Geometry {
            version: 3,
            size_bytes: 1 << 20,
            cluster_bits: 9,
            refcount_order: 1,
            has_backing: false,
            extended_l2: false,
            data_file: false,
        };
        let mut refcounts = Refcounts::new(geometry, vec![0; 64], 512, 0);
        refcounts.add_block(0, 1024);
        assert_eq!(refcounts.set(3, 3), Ok(()));
        assert_eq!(refcounts.set(3, 4), Err(Overflow));
        assert_eq!(refcounts.get(3), Ok(3));
        assert_eq!(refcounts.get(1 << 20), Err(Absent::NoBlock(512)));
    }

    #[test]
    fn only_changed_parts_are_written_and_a_failed_write_is_dirty_again() {
        let geometry = Geometry {
            version: 3,
            size_bytes: 1 << 30,
            cluster_bits: 16,
            refcount_order: 4,
            has_backing: false,
            extended_l2: false,
            data_file: false,
        };
        let mut refcounts = Refcounts::new(geometry, vec![0x30000, 0], 0x10000, 0);
        refcounts.install(0, vec![0; 65536].into());
        refcounts.set(0, 1).unwrap();
        refcounts.set(2048, 1).unwrap();
        refcounts.set(20000, 1).unwrap();
        for written in [false, true] {
            assert!(refcounts.has_dirty());
            let writes = refcounts.begin_writing();
            let places: Vec<_> = writes.blocks.iter().map(|piece| (piece.offset, piece.bytes.len())).collect();
            assert_eq!(places, [(0x30000, 8192), (0x30000 + 36864, 4096)]);
            refcounts.end_writing(written, false);
        }
        assert!(!refcounts.has_dirty());
    }
}
