//! Finds space in the file.
//!
//! Free space is known from two sources: what was freed, and refcounts that the scan has read. Each allocation scans a
//! few more refcounts; opening scans none. Without free space the file grows. An allocation raises the refcount from
//! zero to one in memory. A flush writes it before anything that refers to the space.

use crate::layout::geometry::MAX_FILE_BYTES;
use crate::layout::header::MAX_REFCOUNT_TABLE_BYTES;
use crate::live::free_runs::Run;
use crate::live::metadata_map::Owner;
use crate::live::refcounts::Absent;
use crate::live::state::{FreshTable, Inner, Need, State, Step, Stop};
use block::{IoError, IoErrorKind};

/// How many refcounts one step of the scan reads.
const SCAN_CLUSTERS: u64 = 1 << 16;
/// How many clusters are handed out at the frontier between two steps. Otherwise each allocation in a large image that
/// is nearly full would read a refcount block.
const SCAN_EVERY_CLUSTERS: u64 = 256;

/// An allocation flushes first when the space that the next flush will free exceeds this size or, on a larger disk,
/// this part of the disk.
const UNLINKED_BYTES: u64 = 64 << 20;
const UNLINKED_PART_OF_DISK: u64 = 8;

const NO_SPACE: Stop = Stop::Fail(IoError::new(IoErrorKind::NoSpace));

impl Inner {
    /// Takes at most `want` contiguous host clusters. Their refcounts are one from now on.
    pub(crate) fn allocate(&self, state: &mut State, want: u64) -> Step<Run> {
        self.require_dirty_bit(state)?;
        self.allocate_in_order(state, want)
    }

    /// As [`Inner::allocate`], for space that nothing refers to until a flush has written its refcounts. Nobody
    /// postpones them meanwhile, so they are never stale, and the dirty bit is not needed.
    pub(crate) fn allocate_in_order(&self, state: &mut State, want: u64) -> Step<Run> {
        if state.refcounts.is_crowded() {
            return Err(Stop::Need(Need::Flush));
        }
        let run = self.find_space(state, want.max(1))?;
        self.guard_run(state, run)?;
        self.count_one(state, run)?;
        Ok(run)
    }

    /// As [`Inner::allocate`]. Also returns whether the space is blank: never used, and durably reading as zeros.
    pub(crate) fn allocate_blank(&self, state: &mut State, want: u64) -> Step<(Run, bool)> {
        let unused = state.space.frontier;
        let run = self.allocate(state, want)?;
        Ok((run, run.first >= unused && run.zeroed && run.end() <= state.space.blank_end))
    }

    /// As [`Inner::allocate`], but one cluster for a new L2 table: an empty table, or a copy of another.
    pub(crate) fn allocate_table(&self, state: &mut State, fresh: FreshTable) -> Step<u64> {
        let (run, blank) = self.allocate_blank(state, 1)?;
        // While the cluster reads as zeros, it is a table that maps nothing.
        state.needs_order |= !blank || fresh != FreshTable::Zeros;
        self.add_tables(state, Owner::L2, run.first..run.end());
        Ok(self.geometry.start_of(run.first))
    }

    pub(crate) fn count_one(&self, state: &mut State, run: Run) -> Step<()> {
        for cluster in run.first..run.end() {
            // This cannot fail: the block is in memory, and a count of one fits every width.
            state.refcounts.set(cluster, 1).map_err(|_| IoError::EIO)?;
        }
        Ok(())
    }

    pub(crate) fn find_space(&self, state: &mut State, want: u64) -> Step<Run> {
        loop {
            let low =
                state.space.ceiling.map(|ceiling| self.take_free_below(state, want, ceiling)).transpose()?.flatten();
            if let Some(run) = low {
                return Ok(run);
            }
            if let Some(run) = self.take_free(state, want)? {
                return Ok(run);
            }
            let all_scanned = state.space.scanned_end >= state.space.scan_limit;
            let has_room = self.can_grow || state.space.frontier < self.file_clusters;
            // The next step of the scan is not due yet, and the file may grow instead.
            let is_early = has_room && state.space.frontier < state.space.next_scan && state.space.ceiling.is_none();
            if all_scanned || is_early {
                if state.unlinked_clusters > self.unlinked_clusters_max() {
                    return Err(Stop::Need(Need::Flush));
                }
                return self.take_at_frontier(state, want);
            }
            self.scan_step(state)?;
            state.space.next_scan = state.space.frontier.saturating_add(SCAN_EVERY_CLUSTERS);
        }
    }

    /// Returns the most unlinked clusters before an allocation waits for a flush. They limit how far a guest that
    /// discards and writes without flushing can make the file grow.
    fn unlinked_clusters_max(&self) -> u64 {
        let part_of_disk = self.geometry.clusters_for(self.geometry.size_bytes) / UNLINKED_PART_OF_DISK;
        self.geometry.cluster_of(UNLINKED_BYTES).max(part_of_disk)
    }

    /// As [`Inner::allocate`], but only from holes in front of `limit`; `None` if there is none.
    pub(crate) fn allocate_below(&self, state: &mut State, want: u64, limit: u64) -> Step<Option<Run>> {
        self.require_dirty_bit(state)?;
        if state.refcounts.is_crowded() {
            return Err(Stop::Need(Need::Flush));
        }
        loop {
            if let Some(run) = self.take_free_below(state, want.max(1), limit)? {
                self.guard_run(state, run)?;
                self.count_one(state, run)?;
                return Ok(Some(run));
            }
            if state.space.scanned_end >= state.space.scan_limit.min(limit) {
                return Ok(None);
            }
            self.scan_step(state)?;
        }
    }

    /// Takes space that is known to be free.
    fn take_free(&self, state: &mut State, want: u64) -> Step<Option<Run>> {
        self.take_free_below(state, want, u64::MAX)
    }

    fn take_free_below(&self, state: &mut State, want: u64, limit: u64) -> Step<Option<Run>> {
        while let Some(run) = state.space.free.find(want, limit) {
            let block = self.geometry.block_of(run.first);
            let end = run.end().min(self.geometry.block_end(block));
            let mut free_end = run.first;
            while free_end < end {
                match state.refcounts.get(free_end) {
                    Ok(0) => free_end = free_end.saturating_add(1),
                    Err(Absent::NotLoaded(block)) => return Err(Stop::Need(Need::Block(block))),
                    Ok(_) | Err(_) => break,
                }
            }
            let count = free_end.saturating_sub(run.first);
            if count > 0 {
                state.space.free.take(run.first, count);
                return Ok(Some(Run { count, ..run }));
            }
            // Not free after all, so it is never handed out again.
            state.space.free.take(run.first, 1);
        }
        Ok(None)
    }

    /// Reads the next refcounts that the scan has not read.
    fn scan_step(&self, state: &mut State) -> Step<()> {
        let from = state.space.scanned_end;
        let block_end = self.geometry.block_end(self.geometry.block_of(from));
        let to = block_end.min(state.space.scan_limit).min(from.saturating_add(SCAN_CLUSTERS));
        match state.refcounts.free_runs(from, to) {
            Ok((runs, looked_to)) => {
                for run in runs {
                    state.space.found_free(run);
                }
                state.space.scanned_end = looked_to;
            }
            Err(Absent::NotLoaded(block)) => return Err(Stop::Need(Need::Block(block))),
            // Without a block nothing is counted there, so space is taken only behind the last block.
            Err(_) => state.space.scanned_end = block_end,
        }
        Ok(())
    }

    /// Takes space that was never handed out, at the end of the file.
    fn take_at_frontier(&self, state: &mut State, want: u64) -> Step<Run> {
        if state.busy.contains(&Need::Extension) {
            return Err(Stop::Need(Need::Extension));
        }
        loop {
            let first = state.space.frontier;
            self.check_room(first.saturating_add(1))?;
            let block = self.geometry.block_of(first);
            match state.refcounts.get(first) {
                Ok(0) => {}
                Ok(_) => {
                    state.space.frontier = state.refcounts.next_free(first);
                    continue;
                }
                Err(Absent::NoBlock(_)) => {
                    self.add_blocks(state)?;
                    continue;
                }
                Err(absent) => return Err(self.stop_for(absent)),
            }
            let zeroed = first < state.space.zeroed_end;
            if state.space.can_extend && !zeroed {
                return Err(Stop::Need(Need::Extension));
            }
            let mut end = first.saturating_add(want).min(self.geometry.block_end(block));
            if zeroed {
                end = end.min(state.space.zeroed_end);
            }
            if !self.can_grow {
                end = end.min(self.file_clusters);
            }
            let mut free_end = first.saturating_add(1);
            while free_end < end && state.refcounts.get(free_end) == Ok(0) {
                free_end = free_end.saturating_add(1);
            }
            state.space.frontier = free_end;
            return Ok(Run { first, count: free_end.saturating_sub(first), zeroed });
        }
    }

    fn check_room(&self, end: u64) -> Step<()> {
        let too_far = self.geometry.start_of(end) > MAX_FILE_BYTES || (!self.can_grow && end > self.file_clusters);
        if too_far { Err(NO_SPACE) } else { Ok(()) }
    }

    /// Puts a new refcount block at the frontier. The block counts its own cluster. If the refcount table has no room
    /// for it, a larger table follows, with the blocks that count that table.
    fn add_blocks(&self, state: &mut State) -> Step<()> {
        let first = state.space.frontier;
        let block = self.geometry.block_of(first);
        let old_entries = state.refcounts.table_entries();
        let grows = block >= old_entries;
        let (mut blocks, mut entries, mut table_clusters) = (1u64, old_entries, 0u64);
        loop {
            if grows {
                let wanted = old_entries.saturating_add(old_entries / 2).max(block.saturating_add(blocks));
                table_clusters = self.geometry.clusters_for(wanted.saturating_mul(8));
                entries = self.geometry.start_of(table_clusters) / 8;
            }
            let last = first.saturating_add(blocks).saturating_add(table_clusters).saturating_sub(1);
            let needed = self.geometry.block_of(last).saturating_sub(block).saturating_add(1);
            if needed <= blocks {
                break;
            }
            blocks = needed;
        }
        if entries.saturating_mul(8) > MAX_REFCOUNT_TABLE_BYTES {
            return Err(NO_SPACE);
        }
        let run = Run { first, count: blocks.saturating_add(table_clusters), zeroed: false };
        self.check_room(run.end())?;
        self.guard_run(state, run)?;

        if grows {
            let old_first = self.geometry.cluster_of(state.refcounts.table_offset());
            let old_clusters = self.geometry.clusters_for(old_entries.saturating_mul(8));
            let new_offset = self.geometry.start_of(first.saturating_add(blocks));
            state.refcounts.move_table(new_offset, usize::try_from(entries).map_err(|_| IoError::EIO)?);
            let old = old_first..old_first.saturating_add(old_clusters);
            self.add_tables(state, Owner::RefcountTable, first.saturating_add(blocks)..run.end());
            self.unlink_table(state, Owner::RefcountTable, old);
        }
        for number in 0..blocks {
            let offset = self.geometry.start_of(first.saturating_add(number));
            state.refcounts.add_block(block.saturating_add(number), offset);
        }
        self.add_tables(state, Owner::RefcountBlock, first..first.saturating_add(blocks));
        state.space.frontier = run.end();
        self.count_one(state, run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, CLUSTER};
    use crate::live::image::Qcow2;
    use crate::live::packing::PackedCluster;
    use block::{File, MetaIo, block_on};
    use std::collections::BTreeSet;
    use std::ops::Range;
    use testkit::{SimFileOptions, SimStorage};

    /// Host clusters that a refcount block counts.
    const BLOCK: u64 = CLUSTER / 2;

    /// An image of 1000 clusters, all in use.
    fn full() -> (Qcow2, MetaIo) {
        let size_bytes = 1000 * CLUSTER;
        let (storage, io) = fixture::created(size_bytes);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 0..size_bytes).await;
            qcow2.close(&io).await.unwrap();
            (fixture::opened(&storage, &io).await, io)
        })
    }

    fn pack(qcow2: &Qcow2, io: &MetaIo, guest: u64) {
        let cluster = PackedCluster { guest_offset: guest * CLUSTER, length_bytes: 500 };
        block_on(async {
            let space = qcow2.prepare_compressed(io, &[cluster]).await.unwrap();
            qcow2.commit_compressed(io, space).await.unwrap();
        });
    }

    /// Returns which of the clusters are known to be free.
    fn free_among(state: &State, clusters: Range<u64>) -> Vec<u64> {
        clusters.filter(|cluster| state.space.free.gaps(*cluster, 1).is_empty()).collect()
    }

    #[test]
    fn what_is_kept_for_compressed_clusters_is_not_found_free_once_more() {
        let (qcow2, io) = full();
        let inner = &*qcow2.inner;
        // All of it is free, and known to be, though nobody has read the block.
        block_on(async {
            qcow2.discard(&io, 550 * CLUSTER, 40 * CLUSTER).await.unwrap();
            qcow2.flush(&io).await.unwrap();
            qcow2.flush(&io).await.unwrap();
        });
        let known = free_among(&inner.lock(), 2 * BLOCK..3 * BLOCK);
        assert!(known.len() >= 20, "{known:?}");
        pack(&qcow2, &io, 10);
        let kept = inner.lock().space.for_packed.clone();
        assert!(kept.end - kept.start >= 5 && kept.clone().all(|cluster| known.contains(&cluster)), "{kept:?}");
        block_on(inner.run(&io, |state| {
            state.space.scanned_end = 2 * BLOCK;
            inner.scan_step(state)
        }))
        .unwrap();
        assert_eq!(inner.lock().space.scanned_end, 3 * BLOCK);
        assert_eq!(free_among(&inner.lock(), kept.clone()), Vec::<u64>::new(), "kept, and free");
        for guest in 11..15 {
            pack(&qcow2, &io, guest);
        }
        let mut state = inner.lock();
        let free = free_among(&state, 2 * BLOCK..3 * BLOCK);
        assert!(!free.is_empty(), "nothing was found, so this shows nothing");
        for cluster in free {
            assert_eq!(state.refcounts.get(cluster), Ok(0), "cluster {cluster}");
        }
    }

    #[test]
    fn what_is_being_punched_is_not_handed_out_even_if_it_was_taken_for_free_before() {
        let (qcow2, io) = full();
        let inner = &*qcow2.inner;
        let cluster = 2 * BLOCK + 5;
        block_on(
            inner.run(&io, |state| state.refcounts.get(cluster).map(drop).map_err(|absent| inner.stop_for(absent))),
        )
        .unwrap();
        let mut state = inner.lock();
        state.space.free.add(Run { first: cluster, count: 1, zeroed: false });
        inner.decrement(&mut state, cluster, 1, &mut Vec::new());
        assert_eq!(state.refcounts.get(cluster), Ok(0));
        assert_eq!(free_among(&state, cluster..cluster + 1), Vec::<u64>::new());
    }

    #[test]
    fn free_space_is_handed_out_up_to_the_end_of_its_refcount_block_and_of_its_run_and_no_further() {
        let (qcow2, io) = full();
        let inner = &*qcow2.inner;
        // Five clusters are free on each side of a border between two blocks. Nobody knows of the last two.
        let border = 3 * BLOCK;
        let free = border - 5..border + 5;
        let load = |cluster: u64| {
            let step = |state: &mut State| state.refcounts.get(cluster).map_err(|absent| inner.stop_for(absent));
            block_on(inner.run(&io, step)).unwrap();
        };
        free.clone().for_each(load);
        let mut state = inner.lock();
        free.clone().for_each(|cluster| state.refcounts.set(cluster, 0).unwrap());
        state.space.free.add(Run { first: free.start, count: 8, zeroed: false });
        let mut take = |want| inner.take_free(&mut state, want).ok().unwrap().map(|run| (run.first, run.count));
        assert_eq!(take(2), Some((border - 5, 2)));
        assert_eq!(take(100), Some((border - 3, 3)));
        assert_eq!(take(100), Some((border, 3)));
        assert_eq!(take(1), None);
    }

    #[test]
    fn what_is_taken_for_free_and_is_not_is_left_alone_and_what_follows_is_still_handed_out() {
        let (qcow2, io) = full();
        let inner = &*qcow2.inner;
        let first = 2 * BLOCK + 10;
        block_on(inner.run(&io, |state| state.refcounts.get(first).map_err(|absent| inner.stop_for(absent)))).unwrap();
        let mut state = inner.lock();
        state.refcounts.set(first + 1, 0).unwrap();
        state.space.free.add(Run { first, count: 3, zeroed: false });
        let taken = inner.take_free(&mut state, 3).ok().unwrap();
        assert_eq!(taken.map(|run| (run.first, run.count)), Some((first + 1, 1)));
        assert_eq!(inner.take_free(&mut state, 3).ok().unwrap(), None);
    }

    /// There are so many clusters that the refcount table grows.
    #[test]
    fn a_device_is_handed_out_to_its_last_cluster_and_each_of_them_once() {
        const CLUSTERS: u64 = 20_000;
        let (storage, _) = fixture::created(CLUSTER << 20);
        let mut bytes = storage.bytes(fixture::NAME);
        bytes.resize(usize::try_from(CLUSTERS * CLUSTER).unwrap(), 0);
        let storage = SimStorage::new(1);
        let device = SimFileOptions { block_device: true, ..SimFileOptions::default() };
        let io = MetaIo::new(storage.create_with(fixture::NAME, &bytes, device).open_blocking().unwrap());
        let qcow2 = block_on(fixture::opened(&storage, &io));
        let inner = &*qcow2.inner;
        let table = inner.lock().refcounts.table_entries();
        let mut handed_out = BTreeSet::new();
        let refused = loop {
            // The last ones one by one.
            let want = if handed_out.last().is_some_and(|last| *last > CLUSTERS - 50) { 1 } else { 7 };
            match block_on(inner.run(&io, |state| inner.allocate(state, want))) {
                Ok(run) => {
                    assert!((1..=7).contains(&run.count), "{run:?}");
                    assert!((run.first..run.end()).all(|cluster| handed_out.insert(cluster)), "{run:?}: once more");
                }
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), IoErrorKind::NoSpace);
        assert!(inner.lock().refcounts.table_entries() > table, "the table did not grow, so this shows little");
        assert!(handed_out.last().is_some_and(|last| *last < CLUSTERS));
        for cluster in 0..CLUSTERS {
            let count = |state: &mut State| state.refcounts.get(cluster).map_err(|absent| inner.stop_for(absent));
            let count = block_on(inner.run(&io, count)).unwrap();
            assert!(count > 0, "cluster {cluster} is left over");
        }
        block_on(qcow2.close(&io)).unwrap();
        let report = testkit::qcow2_check(&storage.bytes(fixture::NAME)).unwrap();
        report.sound().unwrap();
        // Nothing refers to what was handed out.
        assert_eq!(report.leaked_clusters, handed_out.len() as u64);
    }
}
