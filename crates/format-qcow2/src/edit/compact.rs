//! Tables at the end of a file that became emptier move to its start, so that the file can end before them.
//!
//! A change of its own after the one that made room: space counts as free only once the image says so. Data stay where
//! they are, and so do the tables of snapshots.

use super::Edit;
use block::{File, IoResult, MetaIo, Result};
use std::collections::BTreeSet;
use std::ops::Range;

/// Makes the file as short as moving tables can make it. Nobody else may use the image; its contents do not change.
pub(super) async fn compact(io: &MetaIo, file: &dyn File, name: &str) -> Result<()> {
    let watch: &mut super::EditWatch<'_> = &mut |_, _| true;
    let mut edit = Edit::open(io, file, name, watch).await?;
    let end = match edit.move_tables().await {
        Ok(Some(tail)) => tail.start,
        Ok(None) => return Ok(()),
        Err(error) => {
            edit.undo().await;
            return Err(edit.failed(error));
        }
    };
    match edit.prepare().await {
        Ok(()) if edit.refs.highest() <= end => edit.switch().await,
        // Nothing is won: there was no room for all of them before.
        prepared => {
            edit.undo().await;
            prepared
        }
    }
}

impl Edit<'_, '_> {
    /// Moves all tables behind the last thing that stays; returns what they leave.
    async fn move_tables(&mut self) -> IoResult<Option<Range<u64>>> {
        let mut l1 = self.active_l1().await?;
        let tables = self.movable_tables(&l1).await?;
        let tail = self.tail_of(&tables).await?;
        if !self.can_grow || tables.range(tail.clone()).next().is_none() {
            return Ok(None);
        }
        let is_behind = |cluster: u64| tail.contains(&cluster) && tables.contains(&cluster);
        let mut moves = is_behind(self.geometry.cluster_of(self.header.l1_offset));
        for raw in &mut l1 {
            if let Some(offset) = self.l2_offset(*raw).filter(|offset| is_behind(self.geometry.cluster_of(*offset))) {
                let l2 = self.read_l2(offset).await?;
                *raw = self.move_l2(offset, &l2).await?;
                moves = true;
            }
        }
        if moves {
            self.set_l1(&l1).await?;
        }
        self.refs.move_out_of(&tail).await?;
        Ok(Some(tail))
    }

    /// Where the disk's own tables and the refcounts lie.
    async fn movable_tables(&mut self, l1: &[u64]) -> IoResult<BTreeSet<u64>> {
        let geometry = self.geometry;
        let clusters = |offset: u64, bytes: u64| {
            let first = geometry.cluster_of(offset);
            first..first.saturating_add(geometry.clusters_for(bytes))
        };
        let mut tables: BTreeSet<u64> = clusters(self.header.l1_offset, (l1.len() as u64).saturating_mul(8)).collect();
        let table_bytes = geometry.start_of(u64::from(self.header.refcount_table_clusters));
        tables.extend(clusters(self.header.refcount_table_offset, table_bytes));
        tables.extend(self.refs.blocks_in_place().map(|offset| geometry.cluster_of(offset)));
        let l2s: Vec<u64> = l1.iter().filter_map(|raw| self.l2_offset(*raw)).collect();
        for offset in l2s {
            let cluster = geometry.cluster_of(offset);
            if self.refs.get(cluster).await? == 1 {
                tables.insert(cluster);
            }
        }
        Ok(tables)
    }

    /// What lies behind the last cluster that is in use and does not move.
    async fn tail_of(&mut self, tables: &BTreeSet<u64>) -> IoResult<Range<u64>> {
        let end = self.refs.end_of_use().await?;
        let mut start = end;
        while let Some(cluster) = start.checked_sub(1) {
            if !tables.contains(&cluster) && self.refs.get(cluster).await? > 0 {
                break;
            }
            start = cluster;
        }
        Ok(start..end)
    }
}
