//! The refcounts of an image that is being edited: the old ones and the new ones.
//!
//! Nothing of the old structure is overwritten. A changed block gets a new place, and so does the table; the switch of
//! the header makes them valid. Space counts as free only if it was free before, too, so the old image stays whole
//! until the switch.

use crate::layout::entry::decode_refcount_table;
use crate::layout::geometry::{Geometry, MAX_FILE_BYTES};
use crate::layout::header::MAX_REFCOUNT_TABLE_BYTES;
use crate::layout::refcount_entry::{max_count, read_entry, write_entry};
use block::{IoError, IoErrorKind, IoResult, MetaIo, PastEnd};
use memory::AlignedBuf;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

/// Changed blocks are kept in memory up to this size together, then written to their new places.
const BLOCKS_BYTES: u64 = 64 << 20;
/// The most blocks of the old structure in memory: for reading counts, and for finding free space.
const OLD_BLOCKS: usize = 16;
/// The memory for blocks of the new structure that could be read again: this many bytes, but at least a few blocks, and
/// until the next cleanup as many as have changed.
const CLEAN_BYTES: u64 = 4 << 20;
const CLEAN_BLOCKS_MIN: usize = 16;

/// A count that the image's refcount width cannot hold.
const TOO_NARROW: IoError = IoError::new(IoErrorKind::OutOfRange);
const CORRUPT: IoError = IoError::new(IoErrorKind::Corrupt);

/// The place of the new structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewTable {
    pub(crate) offset: u64,
    pub(crate) clusters: u32,
}

pub(crate) struct Refs<'a> {
    io: &'a MetaIo,
    old: Geometry,
    /// As `old`, perhaps with another refcount width.
    new: Geometry,
    old_table: Vec<u64>,
    old_table_offset: u64,
    old_blocks: HashMap<u64, AlignedBuf>,
    /// See [`BLOCKS_BYTES`].
    blocks_bytes: u64,
    /// Blocks of the new structure in memory.
    blocks: BTreeMap<u64, Vec<u8>>,
    /// How many blocks were loaded since re-readable blocks were last dropped from memory.
    loaded: usize,
    /// See [`CLEAN_BYTES`].
    clean_bytes: u64,
    /// Blocks that differ from the old structure.
    changed: BTreeSet<u64>,
    /// Changed blocks that have no new place yet.
    homeless: BTreeSet<u64>,
    /// The new places of changed blocks.
    homes: BTreeMap<u64, u64>,
    /// Blocks whose present contents are in their new places.
    stored: BTreeSet<u64>,
    /// No cluster before these is free: `single_hint` for single clusters, `run_hint` for runs.
    single_hint: u64,
    run_hint: u64,
    /// Clusters that the file has. There can be more only if it can grow.
    file_clusters: u64,
    can_grow: bool,
    /// A run that is taken although not all of its counts say so yet.
    reserved: Range<u64>,
    /// The end of the clusters that were allocated.
    highest: u64,
    /// Clusters that this edit allocated and freed again. They were written to, so they do not read as zeros.
    spent: HashSet<u64>,
    /// Clusters that become free with the switch.
    freed: Vec<Range<u64>>,
}

impl<'a> Refs<'a> {
    pub(crate) fn new(io: &'a MetaIo, geometry: Geometry, table: Vec<u64>, table_offset: u64, file_bytes: u64) -> Self {
        Self {
            io,
            old: geometry,
            new: geometry,
            old_table: table,
            old_table_offset: table_offset,
            old_blocks: HashMap::new(),
            blocks_bytes: BLOCKS_BYTES,
            blocks: BTreeMap::new(),
            loaded: 0,
            clean_bytes: CLEAN_BYTES,
            changed: BTreeSet::new(),
            homeless: BTreeSet::new(),
            homes: BTreeMap::new(),
            stored: BTreeSet::new(),
            single_hint: 1,
            run_hint: 1,
            file_clusters: geometry.clusters_for(file_bytes),
            can_grow: true,
            reserved: 0..0,
            highest: 0,
            spent: HashSet::new(),
            freed: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn have_no_room(&mut self) {
        self.blocks_bytes = 0;
    }

    /// Takes new space only from within the file, because it is a device.
    pub(crate) fn within_the_file(&mut self, file_bytes: u64) {
        self.file_clusters = self.old.cluster_of(file_bytes);
        self.can_grow = false;
    }

    /// Changes the width of counts. Call it before anything else is changed.
    pub(crate) fn change_width(&mut self, refcount_order: u32) {
        self.new.refcount_order = refcount_order;
    }

    fn changes_width(&self) -> bool {
        self.old.refcount_order != self.new.refcount_order
    }

    fn cluster_len(&self) -> usize {
        usize::try_from(self.old.cluster_bytes()).unwrap_or(0)
    }

    fn old_block_offset(&self, block: u64) -> IoResult<Option<u64>> {
        let raw = usize::try_from(block).ok().and_then(|index| self.old_table.get(index)).copied().unwrap_or(0);
        decode_refcount_table(raw, &self.old).map_err(|_| CORRUPT)
    }

    /// Returns the count before the edit.
    async fn old_count(&mut self, cluster: u64) -> IoResult<u64> {
        let block = self.old.block_of(cluster);
        let Some(offset) = self.old_block_offset(block)? else { return Ok(0) };
        if !self.old_blocks.contains_key(&block) {
            if self.old_blocks.len() >= OLD_BLOCKS {
                self.old_blocks.clear();
            }
            let bytes = self.io.read(offset, self.cluster_len(), PastEnd::Fails).await?;
            self.old_blocks.insert(block, bytes);
        }
        let index = cluster.saturating_sub(self.old.block_start(block));
        let bytes = self.old_blocks.get(&block).ok_or(CORRUPT)?;
        Ok(read_entry(bytes, index, self.old.refcount_order))
    }

    /// Loads a block of the new structure into memory.
    async fn load(&mut self, block: u64) -> IoResult {
        if self.blocks.contains_key(&block) {
            return Ok(());
        }
        self.drop_clean();
        let length = self.cluster_len();
        let bytes = if self.stored.contains(&block) {
            let home = self.homes.get(&block).copied().ok_or(CORRUPT)?;
            self.io.read(home, length, PastEnd::Fails).await?.to_vec()
        } else if self.changes_width() {
            self.converted(block).await?
        } else {
            match self.old_block_offset(block)? {
                Some(offset) => self.io.read(offset, length, PastEnd::Fails).await?.to_vec(),
                None => vec![0; length],
            }
        };
        self.blocks.insert(block, bytes);
        self.loaded = self.loaded.saturating_add(1);
        Ok(())
    }

    /// Makes room for another block, once there may be many that can be read again.
    fn drop_clean(&mut self) {
        let clean = usize::try_from(self.old.cluster_of(self.clean_bytes)).unwrap_or(0).max(CLEAN_BLOCKS_MIN);
        if self.loaded < clean.max(self.blocks.len() / 2) {
            return;
        }
        self.loaded = 0;
        let (changed, stored) = (&self.changed, &self.stored);
        self.blocks.retain(|block, _| changed.contains(block) && !stored.contains(block));
    }

    /// Returns a block of the new width, with the old counts.
    async fn converted(&mut self, block: u64) -> IoResult<Vec<u8>> {
        let mut bytes = vec![0; self.cluster_len()];
        let (start, end) = (self.new.block_start(block), self.new.block_end(block));
        let mut cluster = start;
        while cluster < end {
            let old_block = self.old.block_of(cluster);
            let part_end = self.old.block_end(old_block).min(end);
            if self.old_block_offset(old_block)?.is_some() {
                for cluster in cluster..part_end {
                    let count = self.old_count(cluster).await?;
                    if count > max_count(self.new.refcount_order) {
                        return Err(TOO_NARROW);
                    }
                    if count > 0 {
                        let index = cluster.saturating_sub(start);
                        write_entry(&mut bytes, index, self.new.refcount_order, count);
                    }
                }
            }
            cluster = part_end;
        }
        Ok(bytes)
    }

    /// Returns the count after the edit.
    pub(crate) async fn get(&mut self, cluster: u64) -> IoResult<u64> {
        let block = self.new.block_of(cluster);
        self.load(block).await?;
        let index = cluster.saturating_sub(self.new.block_start(block));
        let bytes = self.blocks.get(&block).ok_or(CORRUPT)?;
        Ok(read_entry(bytes, index, self.new.refcount_order))
    }

    async fn set(&mut self, cluster: u64, count: u64) -> IoResult {
        if count > max_count(self.new.refcount_order) {
            return Err(TOO_NARROW);
        }
        let block = self.new.block_of(cluster);
        self.load(block).await?;
        let index = cluster.saturating_sub(self.new.block_start(block));
        let bytes = self.blocks.get_mut(&block).ok_or(CORRUPT)?;
        write_entry(bytes, index, self.new.refcount_order, count);
        self.note_change(block);
        Ok(())
    }

    fn note_change(&mut self, block: u64) {
        self.stored.remove(&block);
        if self.changed.insert(block) {
            self.homeless.insert(block);
        }
    }

    /// Adds references to clusters that are in use.
    pub(crate) async fn raise(&mut self, clusters: Range<u64>, by: u64) -> IoResult {
        for cluster in clusters {
            let count = self.get(cluster).await?;
            if count == 0 {
                return Err(CORRUPT);
            }
            self.set(cluster, count.checked_add(by).ok_or(TOO_NARROW)?).await?;
        }
        Ok(())
    }

    /// Drops references. Clusters without any become free.
    pub(crate) async fn lower(&mut self, clusters: Range<u64>, by: u64) -> IoResult {
        for cluster in clusters {
            let left = self.get(cluster).await?.checked_sub(by).ok_or(CORRUPT)?;
            self.set(cluster, left).await?;
            if left > 0 {
                continue;
            }
            if self.old_count(cluster).await? == 0 {
                self.spent.insert(cluster);
            }
            match self.freed.last_mut() {
                Some(last) if last.end == cluster => last.end = cluster.saturating_add(1),
                _ => self.freed.push(cluster..cluster.saturating_add(1)),
            }
        }
        Ok(())
    }

    /// Fails unless every cluster is in use. A table in space that counts as free would be overwritten.
    pub(crate) async fn require_used(&mut self, clusters: Range<u64>) -> IoResult {
        for cluster in clusters {
            if self.old_count(cluster).await? == 0 {
                return Err(CORRUPT);
            }
        }
        Ok(())
    }

    /// As [`Refs::require_used`], for the counts after the edit.
    pub(crate) async fn require_kept(&mut self, clusters: Range<u64>) -> IoResult {
        for cluster in clusters {
            if self.get(cluster).await? == 0 {
                return Err(CORRUPT);
            }
        }
        Ok(())
    }

    /// Returns the offsets of old blocks that have no new place.
    pub(crate) fn blocks_in_place(&self) -> impl Iterator<Item = u64> {
        let stays = |(block, _): &(u64, &u64)| self.changes_width() || !self.homes.contains_key(block);
        (0u64..).zip(&self.old_table).filter(stays).map(|(_, raw)| *raw).filter(|raw| *raw != 0)
    }

    async fn is_free(&mut self, cluster: u64) -> IoResult<bool> {
        if self.old_count(cluster).await? > 0 || self.spent.contains(&cluster) || self.reserved.contains(&cluster) {
            return Ok(false);
        }
        Ok(!self.changed.contains(&self.new.block_of(cluster)) || self.get(cluster).await? == 0)
    }

    /// Takes `count` contiguous free clusters, with `references` references each. Returns the first.
    pub(crate) async fn allocate(&mut self, count: u64, references: u64) -> IoResult<u64> {
        let hint = if count == 1 { self.single_hint } else { self.run_hint };
        let first = self.find_free(hint, count).await?;
        let end = first.saturating_add(count);
        if count == 1 {
            self.single_hint = end;
        } else {
            self.run_hint = end;
        }
        for cluster in first..end {
            self.set(cluster, references).await?;
        }
        Ok(first)
    }

    /// As `allocate`, but behind the end of the file, where space reads as zeros.
    pub(crate) async fn allocate_at_end(&mut self, count: u64) -> IoResult<u64> {
        let first = self.find_free(self.file_clusters, count).await?;
        // Blocks find new places meanwhile, but not in this space.
        self.reserved = first..first.saturating_add(count);
        for cluster in self.reserved.clone() {
            self.set(cluster, 1).await?;
            if cluster & 0xffff == 0 {
                self.relieve().await?;
            }
        }
        self.reserved = 0..0;
        self.run_hint = self.run_hint.max(first.saturating_add(count));
        Ok(first)
    }

    async fn find_free(&mut self, from: u64, count: u64) -> IoResult<u64> {
        let (mut first, mut cluster) = (from, from);
        while cluster.saturating_sub(first) < count {
            let beyond = self.old.start_of(cluster.saturating_add(1)) > MAX_FILE_BYTES;
            if beyond || (!self.can_grow && cluster >= self.file_clusters) {
                return Err(IoError::new(IoErrorKind::NoSpace));
            }
            let free = self.is_free(cluster).await?;
            cluster = cluster.saturating_add(1);
            if !free {
                first = cluster;
            }
        }
        self.highest = self.highest.max(cluster);
        Ok(first)
    }

    /// Makes room in memory if much has changed. Called between steps.
    pub(crate) async fn relieve(&mut self) -> IoResult {
        let held = self.old.start_of(self.blocks.len() as u64);
        if held < self.blocks_bytes {
            return Ok(());
        }
        self.find_homes().await?;
        self.store().await
    }

    /// Finds a new place for every changed block; that changes blocks as well.
    async fn find_homes(&mut self) -> IoResult {
        while let Some(block) = self.homeless.pop_first() {
            let home = self.allocate(1, 1).await?;
            self.homes.insert(block, self.old.start_of(home));
            if !self.changes_width()
                && let Some(old) = self.old_block_offset(block)?
            {
                let cluster = self.old.cluster_of(old);
                self.lower(cluster..cluster.saturating_add(1), 1).await?;
            }
        }
        Ok(())
    }

    /// Writes changed blocks to their new places, and drops all blocks from memory.
    async fn store(&mut self) -> IoResult {
        for (block, bytes) in std::mem::take(&mut self.blocks) {
            if !self.changed.contains(&block) || self.stored.contains(&block) {
                continue;
            }
            let home = self.homes.get(&block).copied().ok_or(CORRUPT)?;
            self.io.write(home, AlignedBuf::copy_of(&bytes)).await?;
            self.stored.insert(block);
        }
        Ok(())
    }

    /// Replaces all blocks by new ones of another width.
    async fn convert_all(&mut self) -> IoResult {
        let old_blocks: Vec<u64> = (0..self.old_table.len() as u64).collect();
        for old_block in old_blocks {
            let Some(offset) = self.old_block_offset(old_block)? else { continue };
            let cluster = self.old.cluster_of(offset);
            let first = self.new.block_of(self.old.block_start(old_block));
            let last = self.new.block_of(self.old.block_end(old_block).saturating_sub(1));
            for block in first..=last {
                self.load(block).await?;
                if self.blocks.get(&block).is_some_and(|bytes| bytes.iter().any(|byte| *byte != 0)) {
                    self.note_change(block);
                }
                self.relieve().await?;
            }
            self.lower(cluster..cluster.saturating_add(1), 1).await?;
        }
        Ok(())
    }

    /// Writes the new structure; `None` if nothing has changed. The image is still the old one.
    pub(crate) async fn finish(&mut self) -> IoResult<Option<NewTable>> {
        if self.changes_width() {
            self.convert_all().await?;
        }
        if self.changed.is_empty() {
            return Ok(None);
        }
        let old_clusters = self.old.clusters_for((self.old_table.len() as u64).saturating_mul(8));
        let first = self.old.cluster_of(self.old_table_offset);
        self.lower(first..first.saturating_add(old_clusters), 1).await?;
        let least = if self.changes_width() { 1 } else { old_clusters };
        // The table needs clusters that lie together, so it takes its place before single blocks fill the holes.
        let (mut place, mut clusters) = (0u64, 0u64);
        loop {
            let last = self.changed.last().copied().unwrap_or(0);
            let needed = self.old.clusters_for(last.saturating_add(1).saturating_mul(8)).max(least);
            if needed > clusters {
                // The space found before is too small. It is freed; nothing refers to it.
                for cluster in place..place.saturating_add(clusters) {
                    self.set(cluster, 0).await?;
                }
                (place, clusters) = (self.allocate(needed, 1).await?, needed);
            } else if self.homeless.is_empty() {
                break;
            }
            self.find_homes().await?;
        }
        if self.old.start_of(clusters) > MAX_REFCOUNT_TABLE_BYTES {
            return Err(IoError::new(IoErrorKind::NoSpace));
        }
        self.store().await?;
        let offset = self.old.start_of(place);
        self.io.write(offset, AlignedBuf::copy_of(&self.table_bytes(clusters))).await?;
        Ok(Some(NewTable { offset, clusters: u32::try_from(clusters).map_err(|_| CORRUPT)? }))
    }

    fn table_bytes(&self, clusters: u64) -> Vec<u8> {
        let entries = self.old.start_of(clusters) / 8;
        let keeps = !self.changes_width();
        let old = |block| usize::try_from(block).ok().and_then(|at| self.old_table.get(at)).copied().filter(|_| keeps);
        let entry = |block: u64| self.homes.get(&block).copied().or_else(|| old(block)).unwrap_or(0);
        (0..entries).flat_map(|block| entry(block).to_be_bytes()).collect()
    }

    /// Returns the number of blocks that the table has room for.
    pub(crate) fn table_entries(&self) -> u64 {
        self.old_table.len() as u64
    }

    /// Moves a block that lies in these clusters, and the table. With `any`, moves the block wherever it lies. Returns
    /// whether it moves.
    pub(crate) async fn move_block(&mut self, block: u64, clusters: &Range<u64>, any: bool) -> IoResult<bool> {
        let Some(offset) = self.old_block_offset(block)? else { return Ok(false) };
        let moves = any || clusters.contains(&self.old.cluster_of(offset));
        if moves {
            self.load(block).await?;
            self.note_change(block);
            self.relieve().await?;
        }
        Ok(moves)
    }

    /// Returns the end of the clusters that were allocated.
    pub(crate) fn highest(&self) -> u64 {
        self.highest
    }

    /// Whether space behind the old end of the file was taken.
    pub(crate) fn grew(&self) -> bool {
        self.highest > self.file_clusters
    }

    /// Goes down from `end` over unused clusters, within one refcount block. Returns where that leads, and whether to
    /// stop there: at a cluster in use, or at the start of the file.
    pub(crate) async fn skip_free(&mut self, end: u64) -> IoResult<(u64, bool)> {
        let Some(last) = end.checked_sub(1) else { return Ok((0, true)) };
        let block = self.new.block_of(last);
        let start = self.new.block_start(block);
        if !self.changes_width() && !self.changed.contains(&block) && self.old_block_offset(block)?.is_none() {
            return Ok((start, false));
        }
        let mut end = end;
        while end > start {
            let last = end.saturating_sub(1);
            if self.get(last).await? > 0 {
                return Ok((end, true));
            }
            end = last;
        }
        Ok((end, false))
    }

    /// Takes the clusters that became free; empty when called again.
    pub(crate) fn freed(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.freed)
    }
}

#[cfg(test)]
#[path = "refcounts_tests.rs"]
mod tests;
