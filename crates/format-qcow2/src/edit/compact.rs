//! Moves tables from the end of the file to its start, so that the file can end before them. This happens after a disk
//! has become shorter, or after its data have moved down.
//!
//! This is an edit of its own, after the one that made room: space counts as free only once the image says so. Data
//! stay where they are, and so do the tables of snapshots.

use super::{Edit, EditWatch};
use block::{File, IoResult, MetaIo, Result};
use std::collections::BTreeSet;
use std::ops::Range;

/// Makes the file as short as moving tables can make it, after the disk has become shorter. The image must not be in
/// use. The contents do not change, even if this fails. `freed` holds the clusters that the edit before has freed.
pub(super) async fn compact(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    freed: Vec<Range<u64>>,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let moved = move_to_start(io, file, name, freed, watch).await;
    moved.map_err(|error| {
        error.in_context(format!("'{name}' has its new size and is whole, but its file is longer than it has to be"))
    })
}

/// Moves tables from the end of the file to the front, and cuts off the unused end. The image must not be in use, and
/// its last user must have closed it: references are not checked again. Clusters that count as free but hold data stay,
/// except in `looked_at`, where the caller has made sure that nothing refers to free clusters. The contents do not
/// change, even if this fails.
pub async fn shorten_just_closed(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    looked_at: Range<u64>,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    move_to_start(io, file, name, vec![looked_at.clone()], watch).await?;
    let mut edit = Edit::open_again(io, file, name, watch).await?;
    edit.nobodys = vec![looked_at];
    edit.cut_off_unused(0).await.map_err(|error| edit.failed(error))?;
    edit.io.flush().await.map_err(|error| edit.failed(error))
}

async fn move_to_start(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    freed: Vec<Range<u64>>,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open_again(io, file, name, watch).await?;
    edit.nobodys = freed;
    let moved = edit.move_tables().await;
    let prepared = match moved {
        Ok(None) => return Ok(()),
        Ok(Some(last)) => edit.prepare().await.map(|()| last),
        Err(error) => Err(error),
    };
    match prepared {
        Ok(last) if edit.refs.highest() <= last => match edit.switch().await {
            Ok(()) => edit.give_back().await.map_err(|error| edit.failed(error)),
            Err(failed) => edit.not_switched(failed).await,
        },
        // Not all tables found room in front, so the file would not become shorter.
        Ok(_) => {
            edit.undo().await;
            Ok(())
        }
        Err(error) => {
            edit.undo().await;
            Err(error)
        }
    }
}

impl Edit<'_, '_> {
    /// Reports no new steps, since the change before this one was reported as complete. Fails once the user gave up.
    fn listen(&mut self) -> Result<()> {
        let bytes = self.geometry.size_bytes;
        self.tell(bytes, bytes)
    }

    /// Moves tables that lie behind everything else, but none that can stay; returns where the last of them lay.
    async fn move_tables(&mut self) -> Result<Option<u64>> {
        if !self.can_grow {
            return Ok(None);
        }
        let mut l1 = self.active_l1().await.map_err(|error| self.failed(error))?;
        let tables = self.movable_tables(&l1).await?;
        let tail = self.tail_of(&tables).await?;
        let tail = self.surplus(tail, &tables).await?;
        let Some(last) = tables.range(tail.clone()).next_back().copied() else {
            return Ok(None);
        };
        let is_behind = |cluster: u64| tail.contains(&cluster) && tables.contains(&cluster);
        let l1_bytes = (l1.len() as u64).saturating_mul(8);
        let mut moves = is_behind(self.geometry.cluster_of(last_byte(self.header.l1_offset, l1_bytes)));
        for raw in &mut l1 {
            if let Some(offset) = self.l2_offset(*raw).filter(|offset| is_behind(self.geometry.cluster_of(*offset))) {
                *raw = self.moved_l2(offset).await.map_err(|error| self.failed(error))?;
                moves = true;
            }
            self.listen()?;
        }
        if moves {
            self.set_l1(&l1).await.map_err(|error| self.failed(error))?;
        }
        self.move_refcounts(&tail).await?;
        Ok(Some(last))
    }

    /// Returns the part of the tail whose tables find room in front of it. Tables that lie close behind the data stay:
    /// until the switch their space is not free, and those that move would have to go around them.
    async fn surplus(&mut self, tail: Range<u64>, tables: &BTreeSet<u64>) -> Result<Range<u64>> {
        // The refcount table gets another place in any case.
        let moving = tables.range(tail.clone()).count() as u64;
        let mut left = moving.saturating_add(u64::from(self.header.refcount_table_clusters));
        let mut start = 1u64;
        while left > 0 && start < tail.end {
            let stays = start >= tail.start && tables.contains(&start);
            if stays || self.refs.get(start).await.map_err(|error| self.failed(error))? == 0 {
                left = left.saturating_sub(1);
            }
            if start.is_multiple_of(0x10000) {
                self.listen()?;
            }
            start = start.saturating_add(1);
        }
        Ok(start.max(tail.start)..tail.end)
    }

    async fn moved_l2(&mut self, offset: u64) -> IoResult<u64> {
        let l2 = self.read_l2(offset).await?;
        self.move_l2(offset, &l2).await
    }

    /// Moves refcount blocks. If any of them moves, the refcount table moves too. If the table must move alone, the
    /// first block moves with it.
    async fn move_refcounts(&mut self, tail: &Range<u64>) -> Result<()> {
        let table_bytes = self.geometry.start_of(u64::from(self.header.refcount_table_clusters));
        let table_end = last_byte(self.header.refcount_table_offset, table_bytes);
        let mut table_moves = tail.contains(&self.geometry.cluster_of(table_end));
        for block in 0..self.refs.table_entries() {
            let moved = self.refs.move_block(block, tail, table_moves).await;
            table_moves &= !moved.map_err(|error| self.failed(error))?;
            self.listen()?;
        }
        Ok(())
    }

    /// Returns the clusters of the disk's own tables and of the refcounts.
    async fn movable_tables(&mut self, l1: &[u64]) -> Result<BTreeSet<u64>> {
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
            let count = self.refs.get(cluster).await;
            if count.map_err(|error| self.failed(error))? == 1 {
                tables.insert(cluster);
            }
            self.listen()?;
        }
        Ok(tables)
    }

    /// Returns the end of the last cluster that is in use and does not move.
    async fn tail_of(&mut self, tables: &BTreeSet<u64>) -> Result<Range<u64>> {
        let mut start = self.geometry.clusters_for(self.file_bytes);
        let end = start;
        loop {
            let skipped = self.skip_unused(start).await;
            let (lower, is_found) = skipped.map_err(|error| self.failed(error))?;
            start = lower;
            self.listen()?;
            match start.checked_sub(1) {
                Some(last) if is_found && tables.contains(&last) => start = last,
                Some(_) if !is_found => {}
                _ => return Ok(start..end),
            }
        }
    }
}

fn last_byte(offset: u64, bytes: u64) -> u64 {
    offset.saturating_add(bytes.saturating_sub(1))
}
