//! Rebuilds all refcounts of an image from its references, in space that nothing refers to.
//!
//! The space of the old refcounts counts as used, so that the header can switch at any moment; afterwards it is leaked.
//! Places are chosen as in `qemu-img check`: first fit, and a block never before the clusters that it counts. So both
//! leave files of one size.

use crate::check::references::References;
use crate::check::walk::Walk;
use crate::layout::geometry::Geometry;
use crate::layout::header::MAX_REFCOUNT_TABLE_BYTES;
use crate::layout::refcount_entry::write_entry;
use block::{IoError, IoErrorKind, IoResult, MetaIo};
use memory::AlignedBuf;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The plan of a rebuild, and the refcounts that it writes.
#[derive(Debug)]
pub(crate) struct Rebuilt {
    geometry: Geometry,
    /// The counted references.
    references: References,
    /// Clusters that the plan uses.
    own: BTreeSet<u64>,
    /// Clusters that damaged tables name: not referred to, but not to be overwritten.
    claimed: BTreeSet<u64>,
    /// The number of clusters to be counted. Grows when the plan takes space behind the file's end.
    clusters: u64,
    /// The place of each block.
    blocks: BTreeMap<u64, u64>,
    table_entries: u64,
    table_first: u64,
}

impl Rebuilt {
    pub(crate) fn plan(walk: &mut Walk<'_, '_>) -> IoResult<Self> {
        let mut plan = Self {
            geometry: walk.geometry,
            references: std::mem::take(&mut walk.references),
            own: BTreeSet::new(),
            claimed: walk.claimed.clone(),
            clusters: walk.geometry.clusters_for(walk.file_bytes),
            blocks: BTreeMap::new(),
            table_entries: 0,
            table_first: 0,
        };
        let everything = 0..plan.clusters.max(plan.references.end());
        plan.place_blocks(everything)?;
        loop {
            let table_clusters = plan.geometry.clusters_for(plan.table_entries.saturating_mul(8));
            plan.table_first = plan.take(table_clusters, 0)?;
            let entries = plan.table_entries;
            plan.place_blocks(plan.table_first..plan.table_first.saturating_add(table_clusters))?;
            if plan.table_entries == entries {
                return Ok(plan);
            }
        }
    }

    fn is_used(&self, cluster: u64) -> bool {
        self.references.get(cluster) > 0 || self.own.contains(&cluster)
    }

    /// Takes `count` contiguous free clusters from `from` on, behind the end of the file if need be. Returns the first.
    fn take(&mut self, count: u64, from: u64) -> IoResult<u64> {
        let (mut first, mut found) = (from, 0u64);
        while found < count {
            let cluster = first.saturating_add(found);
            if self.is_used(cluster) || self.claimed.contains(&cluster) {
                (first, found) = (cluster.saturating_add(1), 0);
            } else {
                found = found.saturating_add(1);
            }
        }
        let end = first.saturating_add(count);
        if self.geometry.start_of(end) > crate::layout::geometry::MAX_FILE_BYTES {
            return Err(IoError::new(IoErrorKind::NoSpace));
        }
        self.own.extend(first..end);
        self.clusters = self.clusters.max(end);
        Ok(first)
    }

    /// Returns the first used cluster of a range.
    fn next_used(&self, range: Range<u64>) -> Option<u64> {
        if range.is_empty() {
            return None;
        }
        let counted = self.references.used(range.clone()).next().map(|(cluster, _)| cluster);
        let own = self.own.range(range).next().copied();
        counted.into_iter().chain(own).min()
    }

    /// Finds space for the blocks that count the used clusters of a range, and for the blocks that count those blocks.
    fn place_blocks(&mut self, mut range: Range<u64>) -> IoResult<()> {
        let mut free_from = 0u64;
        while let Some(cluster) = self.next_used(range.clone()) {
            let block = self.geometry.block_of(cluster);
            range.start = self.geometry.block_end(block);
            if self.blocks.contains_key(&block) {
                continue;
            }
            free_from = free_from.max(self.geometry.block_start(block));
            let place = self.take(1, free_from)?;
            free_from = place;
            range.end = range.end.max(place.saturating_add(1));
            self.blocks.insert(block, place);
            let per_cluster = self.geometry.cluster_bytes() / 8;
            let entries = block.saturating_add(1).next_multiple_of(per_cluster);
            self.table_entries = self.table_entries.max(entries);
            if self.table_entries.saturating_mul(8) > MAX_REFCOUNT_TABLE_BYTES {
                return Err(IoError::new(IoErrorKind::NoSpace));
            }
        }
        Ok(())
    }

    /// Returns where the table lies, and its length in clusters.
    pub(crate) fn table(&self) -> (u64, u32) {
        let clusters = self.geometry.clusters_for(self.table_entries.saturating_mul(8));
        (self.geometry.start_of(self.table_first), clusters as u32)
    }

    /// Returns the entries of the table.
    pub(crate) fn entries(&self) -> Vec<u64> {
        let entry = |block| self.blocks.get(&block).map_or(0, |place| self.geometry.start_of(*place));
        (0..self.table_entries).map(entry).collect()
    }

    /// Returns the least length of the file after the rebuild.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.own.last().map_or(0, |last| self.geometry.start_of(last.saturating_add(1)))
    }

    /// Frees the memory of the counts, once they are written.
    pub(crate) fn forget_references(&mut self) {
        self.references = References::default();
    }

    /// Writes the blocks and the table. Nothing refers to them yet.
    pub(crate) async fn write(&self, io: &MetaIo) -> IoResult {
        let length = usize::try_from(self.geometry.cluster_bytes()).map_err(|_| IoError::EIO)?;
        for (block, place) in &self.blocks {
            let mut bytes = AlignedBuf::zeroed(length);
            let (start, end) = (self.geometry.block_start(*block), self.geometry.block_end(*block));
            let mut set = |cluster: u64, count| {
                write_entry(&mut bytes, cluster.saturating_sub(start), self.geometry.refcount_order, count);
            };
            self.references.used(start..end).for_each(|(cluster, count)| set(cluster, count));
            self.own.range(start..end).for_each(|cluster| set(*cluster, 1));
            io.write(self.geometry.start_of(*place), bytes).await?;
        }
        let table: Vec<u8> = self.entries().into_iter().flat_map(u64::to_be_bytes).collect();
        io.write(self.geometry.start_of(self.table_first), AlignedBuf::copy_of(&table)).await
    }
}
