//! The overlap guard: no write overwrites a table by mistake.
//!
//! It checks before space is handed out, before a table is changed, and before data are overwritten in place. It checks
//! again every piece of metadata on its way to the file. An overlap means that the image contradicts itself, and that
//! going on would destroy it. Then the write is refused, the log names both owners and their offsets, the corrupt bit
//! is set, and every later request fails. Harmless damage (an entry that breaks the specification) fails only its own
//! requests.

use crate::layout::entry::entries;
use crate::layout::entry::{Cluster, decode_l1};
use crate::layout::geometry::clusters_of;
use crate::layout::header::{HEADER_SECTOR_BYTES, INCOMPATIBLE_CORRUPT, OFFSET_INCOMPATIBLE};
use crate::layout::snapshot::{ROW_BYTES, RowHead};
use crate::live::free_runs::Run;
use crate::live::metadata_map::{MetadataMap, Owner};
use crate::live::refcounts::Piece;
use crate::live::state::{Inner, State, Step};
use block::sync::Ordering;
use block::{FileOp, IoError, IoErrorKind, IoResult, MetaIo, PastEnd};
use memory::{AlignedBuf, IoBuf};
use std::ops::Range;

/// The most bytes of snapshots' L1 tables that are read for the guard.
const SNAPSHOT_L1_BYTES_MAX: u64 = 64 << 20;

const CORRUPT: IoError = IoError::new(IoErrorKind::Corrupt);

impl Inner {
    /// Whether the guard has stopped this image.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_if_stopped(&self) -> IoResult {
        if self.is_stopped() { Err(CORRUPT) } else { Ok(()) }
    }

    /// Refuses to write where a table lies that does not belong to `writer` alone. Without a writer, the bytes are
    /// data.
    pub(crate) fn guard(&self, state: &mut State, writer: Option<Owner>, clusters: Range<u64>) -> IoResult {
        self.refuse_if_stopped()?;
        let offset = self.geometry.start_of(clusters.start);
        let Some((cluster, owner)) = self.tables(state).stranger(writer, clusters) else { return Ok(()) };
        let at = self.geometry.start_of(cluster);
        let what: &dyn std::fmt::Display = match &writer {
            Some(writer) => writer,
            None => &"data",
        };
        tracing::error!(
            "'{}': a write of {what} at {offset:#x} would have overwritten {owner} at {at:#x}. Nothing was written; the \
             image contradicts itself, is marked corrupt, and serves no more requests. Repair it with 'check -r all', \
             or copy what can be read with 'convert'",
            self.name
        );
        self.stopped.store(true, Ordering::Release);
        // Requests on the path without a lock then take the slow path, which refuses them.
        self.header_ready.store(false, Ordering::Release);
        Err(CORRUPT)
    }

    /// Refuses to hand out space where a table lies.
    pub(crate) fn guard_run(&self, state: &mut State, run: Run) -> Step<()> {
        Ok(self.guard(state, None, run.first..run.end())?)
    }

    /// Refuses to change an L2 table if another table lies in the same place.
    pub(crate) fn guard_l2(&self, state: &mut State, offset: u64) -> Step<()> {
        let cluster = self.geometry.cluster_of(offset);
        Ok(self.guard(state, Some(Owner::L2), cluster..cluster.saturating_add(1))?)
    }

    /// Refuses to write or free the clusters of an L2 entry if one of them holds a table.
    pub(crate) fn guard_entry(&self, state: &mut State, entry: &Cluster) -> Step<()> {
        Ok(self.guard(state, None, entry.host_clusters(&self.geometry))?)
    }

    /// Checks pieces of metadata just before they are written.
    pub(crate) fn guard_pieces(&self, owner: Owner, pieces: &[Piece]) -> IoResult {
        let mut state = self.lock();
        for piece in pieces {
            let clusters = clusters_of(&self.geometry, piece.offset, piece.bytes.len() as u64);
            self.guard(&mut state, Some(owner), clusters)?;
        }
        Ok(())
    }

    /// Sets the corrupt bit of an image that was stopped (version 3 has one). Only the leader of a flush calls this, so
    /// no other write of the header is in flight. Memory is not trusted any more, so the sector is read again.
    pub(crate) async fn mark_corrupt(&self, io: &MetaIo) {
        if self.geometry.version < 3 || self.marked.swap(true, Ordering::AcqRel) {
            return;
        }
        let marked = async {
            let mut sector = io.read(0, HEADER_SECTOR_BYTES, PastEnd::Fails).await?;
            let last = OFFSET_INCOMPATIBLE.saturating_add(7);
            *sector.get_mut(last).ok_or(IoError::EIO)? |= INCOMPATIBLE_CORRUPT as u8;
            let data = IoBuf::from_aligned(AlignedBuf::copy_of(&sector)).whole();
            self.table_writes.start(io.queue(), FileOp::Write { offset: 0, data, fua: false }).await?;
            io.flush().await
        };
        if let Err(error) = marked.await {
            tracing::error!("'{}': cannot be marked corrupt: {error}", self.name);
        }
    }

    /// Adds the tables of snapshots to the map. Tables that cannot be read are not guarded.
    pub(crate) async fn collect_snapshots(&self, io: &MetaIo) {
        if self.header.snapshots == 0 {
            return;
        }
        let mut found = Vec::new();
        if self.read_snapshots(io, &mut found).await.is_err() {
            tracing::warn!("'{}': not all tables of its snapshots could be read, so not all are guarded", self.name);
        }
        let mut state = self.lock();
        for (owner, clusters) in found {
            self.add_tables(&mut state, owner, clusters);
        }
    }

    async fn read_snapshots(&self, io: &MetaIo, found: &mut Vec<(Owner, Range<u64>)>) -> IoResult {
        let (mut at, start) = (self.header.snapshots_offset, self.header.snapshots_offset);
        let mut left = SNAPSHOT_L1_BYTES_MAX;
        let mut result = Ok(());
        for _ in 0..self.header.snapshots {
            let row = match io.read(at, ROW_BYTES, PastEnd::Fails).await {
                Ok(row) => RowHead::parse(&row),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            };
            if !row.has_sane_extra() {
                result = Err(CORRUPT);
                break;
            }
            at = row.next_row(at);
            let (offset, length) = (row.l1_offset, row.l1_bytes());
            if offset >= crate::layout::geometry::MAX_FILE_BYTES || length > left {
                result = Err(CORRUPT);
                continue;
            }
            left = left.saturating_sub(length);
            found.push((Owner::SnapshotL1, clusters_of(&self.geometry, offset, length)));
            result = result.and(self.read_snapshot_l1(io, offset, length, found).await);
        }
        found.push((Owner::SnapshotTable, clusters_of(&self.geometry, start, at.saturating_sub(start))));
        result
    }

    async fn read_snapshot_l1(
        &self,
        io: &MetaIo,
        offset: u64,
        length: u64,
        found: &mut Vec<(Owner, Range<u64>)>,
    ) -> IoResult {
        let length = usize::try_from(length).map_err(|_| IoError::EIO)?;
        if length == 0 {
            return Ok(());
        }
        let table = io.read(offset, length, PastEnd::Fails).await?;
        for raw in entries(&table) {
            if let Ok(Some(table)) = decode_l1(raw, &self.geometry) {
                found.push((Owner::SnapshotL2, clusters_of(&self.geometry, table.offset, 1)));
            }
        }
        Ok(())
    }
}

impl Inner {
    fn collect_tables(&self, state: &State) -> MetadataMap {
        let geometry = &self.geometry;
        // A disk of a terabyte has thousands of tables. They are counted first, so that the map does not grow step by
        // step.
        let used = self.l1.iter().filter(|entry| entry.load(Ordering::Relaxed) != 0).count();
        let expected = used.saturating_add(state.refcounts.block_offsets().count());
        let mut tables = MetadataMap::with_capacity(expected);
        let mut add = |owner, offset, length| {
            tables.add(&self.table_bits, owner, clusters_of(geometry, offset, length));
        };
        add(Owner::Header, 0, 1);
        add(Owner::L1, self.header.l1_offset, u64::from(self.header.l1_entries).saturating_mul(8));
        let refcount_table_bytes = state.refcounts.table_entries().saturating_mul(8);
        add(Owner::RefcountTable, state.refcounts.table_offset(), refcount_table_bytes);
        state.refcounts.block_offsets().for_each(|offset| add(Owner::RefcountBlock, offset, 1));
        for entry in &self.l1 {
            if let Ok(Some(table)) = decode_l1(entry.load(Ordering::Relaxed), geometry) {
                add(Owner::L2, table.offset, 1);
            }
        }
        tables
    }

    pub(crate) fn tables<'s>(&self, state: &'s mut State) -> &'s mut MetadataMap {
        if state.tables.is_none() {
            state.tables = Some(self.collect_tables(state));
        }
        state.tables.get_or_insert_default()
    }

    pub(crate) fn is_table(&self, state: &mut State, cluster: u64) -> bool {
        self.tables(state).holds_table(cluster)
    }

    pub(crate) fn add_tables(&self, state: &mut State, owner: Owner, clusters: Range<u64>) {
        self.tables(state).add(&self.table_bits, owner, clusters);
    }

    pub(crate) fn remove_tables(&self, state: &mut State, owner: Owner, clusters: Range<u64>) {
        self.tables(state).remove(&self.table_bits, owner, clusters);
    }
}
