//! Walks the tables of a disk, active or a snapshot's: counts their references up or down, and updates their flags.
//!
//! The flag "refcount is exactly one" (specification, "L1/L2 table entry") is kept true only in the active tables, as
//! the specification says. A table whose flags change gets a new place.

use super::Edit;
use crate::layout::entry::entries;
use crate::layout::entry::{COPIED, Cluster};
use block::{IoError, IoErrorKind, IoResult, PastEnd, Result};
use std::ops::Range;

const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const CORRUPT: IoError = IoError::new(IoErrorKind::Corrupt);

/// An L2 entry as it is stored. Only extended entries have the second word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Words {
    pub(super) descriptor: u64,
    pub(super) bitmap: u64,
}

impl Words {
    pub(super) fn of(entry: &[u64]) -> Self {
        let word = |index: usize| entry.get(index).copied().unwrap_or(0);
        Self { descriptor: word(0), bitmap: word(1) }
    }

    pub(super) fn put(self, entry: &mut [u64]) {
        for (place, word) in entry.iter_mut().zip([self.descriptor, self.bitmap]) {
            *place = word;
        }
    }
}

/// Whether references are added or dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Up,
    Down,
}

impl Edit<'_, '_> {
    pub(super) async fn read_l1(&self, offset: u64, count: u32) -> IoResult<Vec<u64>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let length = usize::try_from(u64::from(count).saturating_mul(8)).map_err(|_| CORRUPT)?;
        Ok(entries(&self.io.read(offset, length, PastEnd::Fails).await?).collect())
    }

    /// Reads the disk's L1 table.
    pub(super) async fn active_l1(&self) -> IoResult<Vec<u64>> {
        self.read_l1(self.header.l1_offset, self.header.l1_entries).await
    }

    /// Returns the place of the L2 table that an L1 entry names.
    pub(super) fn l2_offset(&self, raw: u64) -> Option<u64> {
        let offset = raw & OFFSET_MASK;
        (offset != 0).then_some(offset)
    }

    pub(super) async fn read_l2(&self, offset: u64) -> IoResult<Vec<u64>> {
        if self.geometry.offset_in_cluster(offset) != 0 {
            return Err(CORRUPT);
        }
        let length = usize::try_from(self.geometry.cluster_bytes()).map_err(|_| CORRUPT)?;
        Ok(entries(&self.io.read(offset, length, PastEnd::Fails).await?).collect())
    }

    /// Returns the entry of a guest cluster; empty if the cluster has no table.
    pub(super) async fn entry_of(&self, l1: &[u64], cluster: u64) -> IoResult<Words> {
        let index = usize::try_from(self.geometry.l1_index(cluster)).unwrap_or(usize::MAX);
        let Some(offset) = l1.get(index).and_then(|raw| self.l2_offset(*raw)) else { return Ok(Words::default()) };
        let l2 = self.read_l2(offset).await?;
        let words = self.geometry.entry_words();
        let in_table = cluster & 1u64.wrapping_shl(self.geometry.l2_bits()).saturating_sub(1);
        let at = usize::try_from(in_table).unwrap_or(usize::MAX).saturating_mul(words);
        Ok(l2.get(at..at.saturating_add(words)).map_or(Words::default(), Words::of))
    }

    pub(super) async fn add_l2(&mut self, l2: &[u64], references: u64) -> IoResult<u64> {
        let bytes: Vec<u8> = l2.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        self.add_table(&bytes, references).await
    }

    pub(super) fn decode(&self, raw: u64) -> IoResult<Cluster> {
        Cluster::decode(raw, &self.geometry).map_err(|_| CORRUPT)
    }

    pub(super) fn cluster_at(&self, offset: u64) -> Range<u64> {
        let first = self.geometry.cluster_of(offset);
        first..first.saturating_add(1)
    }

    pub(super) async fn count(&mut self, clusters: Range<u64>, direction: Direction) -> IoResult {
        match direction {
            Direction::Up => self.refs.raise(clusters, 1).await,
            Direction::Down => self.refs.lower(clusters, 1).await,
        }
    }

    /// Counts everything that an L1 table leads to: tables and data.
    pub(super) async fn count_tree(&mut self, l1: &[u64], direction: Direction, steps: &mut Steps) -> Result<()> {
        for raw in l1 {
            if let Some(offset) = self.l2_offset(*raw) {
                self.count_table(offset, direction).await.map_err(|error| self.failed(error))?;
            }
            steps.one(self)?;
        }
        Ok(())
    }

    /// Counts an L2 table and the data that it maps.
    pub(super) async fn count_table(&mut self, offset: u64, direction: Direction) -> IoResult {
        let l2 = self.read_l2(offset).await?;
        // Neighbours are counted together.
        let mut run = 0..0;
        // In an extended entry, only the first word names a cluster.
        for raw in l2.into_iter().step_by(self.geometry.entry_words()) {
            let hosts = self.decode(raw)?.host_clusters(&self.geometry);
            if hosts.start == run.end {
                run.end = hosts.end;
            } else if !hosts.is_empty() {
                self.count(std::mem::replace(&mut run, hosts), direction).await?;
            }
        }
        self.count(run, direction).await?;
        self.count(self.cluster_at(offset), direction).await?;
        self.refs.relieve().await
    }

    /// Fails if an L1 table leads to something that counts as free: new tables would be put there. Call it before the
    /// edit writes anything.
    pub(super) async fn require_counted(&mut self, l1: &[u64], steps: &mut Steps) -> Result<()> {
        for raw in l1 {
            if let Some(offset) = self.l2_offset(*raw) {
                self.require_table_counted(offset).await.map_err(|error| self.failed(error))?;
            }
            steps.one(self)?;
        }
        Ok(())
    }

    async fn require_table_counted(&mut self, offset: u64) -> IoResult {
        for raw in self.read_l2(offset).await?.into_iter().step_by(self.geometry.entry_words()) {
            let hosts = self.decode(raw)?.host_clusters(&self.geometry);
            self.refs.require_kept(hosts).await?;
        }
        self.refs.relieve().await
    }

    /// Makes the flags of a tree agree with the refcounts, which must not be zero. Changed tables move. `sharers` is
    /// the number of L1 tables, this one included, that will name them.
    pub(super) async fn retag(&mut self, l1: &mut [u64], sharers: u64, steps: &mut Steps) -> Result<()> {
        for raw in l1.iter_mut() {
            if let Some(offset) = self.l2_offset(*raw) {
                *raw = self.retag_table(offset, sharers).await.map_err(|error| self.failed(error))?;
            }
            steps.one(self)?;
        }
        Ok(())
    }

    /// Updates the flags of a table. Returns its new L1 entry.
    async fn retag_table(&mut self, offset: u64, sharers: u64) -> IoResult<u64> {
        let mut l2 = self.read_l2(offset).await?;
        let mut changed = false;
        for word in l2.iter_mut().step_by(self.geometry.entry_words()) {
            let cluster = self.decode(*word)?;
            self.refs.require_kept(cluster.host_clusters(&self.geometry)).await?;
            let host = match cluster {
                Cluster::Data { host, .. } | Cluster::ZeroAllocated { host, .. } => host,
                Cluster::Unallocated | Cluster::Zero | Cluster::Compressed { .. } => continue,
            };
            let alone = self.refs.get(self.geometry.cluster_of(host)).await? == 1;
            let tagged = if alone { *word | COPIED } else { *word & !COPIED };
            changed |= tagged != *word;
            *word = tagged;
        }
        let mut place = offset;
        if changed {
            place = self.add_l2(&l2, sharers).await?;
            self.refs.lower(self.cluster_at(offset), sharers).await?;
        }
        let alone = self.refs.get(self.geometry.cluster_of(place)).await? == 1;
        Ok(if alone { place | COPIED } else { place })
    }
}

/// Counts the steps of a change and reports them to `watch`.
#[derive(Debug)]
pub(super) struct Steps {
    done: u64,
    total: u64,
}

impl Steps {
    pub(super) fn new(total: usize) -> Self {
        Self { done: 0, total: total as u64 }
    }

    pub(super) fn one(&mut self, edit: &mut Edit<'_, '_>) -> Result<()> {
        self.done = self.done.saturating_add(1);
        // Shown as bytes of the disk: those that an L2 table maps.
        let bytes = |tables: u64| edit.geometry.start_of(tables.wrapping_shl(edit.geometry.l2_bits()));
        let (done, total) = (bytes(self.done.min(self.total)), bytes(self.total));
        edit.tell(done, total)
    }
}
