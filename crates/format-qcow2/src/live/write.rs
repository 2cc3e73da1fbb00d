//! Writes to new space, in two steps: *prepare* reserves it, *commit* publishes it.

use crate::layout::entry::{BadEntry, COPIED, Cluster};
use crate::live::flush_queue::Barrier;
use crate::live::image::Qcow2;
use crate::live::metadata_map::Owner;
use crate::live::state::{Freed, FreshTable, Inner, Need, State, Step, Stop, unless_block_missing};
use block::sync::Ordering;
use block::{Fill, IoError, IoResult, MetaIo};
use std::ops::Range;
use std::sync::Arc;

/// The most slices that may differ from the file: 32 MiB, the default of memory for tables. A flush copies all of them
/// at one moment, under the mutex.
pub(crate) const DIRTY_SLICES_MAX: usize = 8192;

/// The largest allocation for one write.
pub(crate) const ALLOCATION_BYTES_MAX: u64 = 2 << 20;

/// The result of preparing a write.
pub type Prepared = block::Prepared<Allocation>;

/// Space for whole guest clusters, invisible until [`Qcow2::commit_write`]. Dropping it gives the space back.
#[derive(Debug)]
pub struct Allocation {
    /// First byte of the disk, at or before the request. A cluster begins here, or a part if clusters are allocated in
    /// parts.
    pub guest_offset: u64,
    /// Whole clusters or parts. May end before the request does.
    pub length_bytes: u64,
    /// First byte in the file; contiguous.
    pub file_offset: u64,
    /// How to fill the first cluster before the request.
    pub head: Fill,
    /// How to fill the last cluster behind the request.
    pub tail: Fill,
    /// The space reads as zeros: zeros need not be written to it.
    pub zeroed: bool,
    /// Whether the zeros are durable, and nothing else was ever there.
    pub(crate) blank: bool,
    /// Whether only the place is published. If the format allows it, the entry says that the place holds nothing.
    pub(crate) without_data: bool,
    pub(crate) guest: Range<u64>,
    /// Host clusters that are freed if this is dropped uncommitted; empty if the guest's cluster keeps its host
    /// cluster.
    pub(crate) unpublished: Range<u64>,
    pub(crate) inner: Arc<Inner>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.in_flight.remove(&self.guest.start);
        if !self.unpublished.is_empty() {
            // A write to the space may still be in flight, so it waits for its epoch like other freed space.
            let epoch = self.inner.epochs.retire();
            state.retired.push(Freed { clusters: self.unpublished.clone(), epoch, table: None, barred: false });
        }
        drop(state);
        self.inner.idle.wake_all();
    }
}

impl Qcow2 {
    /// Reserves space for the first part of a write, or finds its place. The range is noted as written. Waits while
    /// another write allocates the same place.
    pub async fn prepare_write(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult<Prepared> {
        self.inner.check_write(offset, length)?;
        let prepared = self.inner.run(io, |state| self.try_prepare(state, offset, length)).await?;
        let end = match &prepared {
            Prepared::InPlace { length_bytes, .. } => offset.saturating_add(*length_bytes),
            Prepared::New(allocation) => allocation.guest_offset.saturating_add(allocation.length_bytes),
        };
        self.inner.mark_changed(offset, end.saturating_sub(offset).min(length));
        Ok(prepared)
    }

    /// As [`Qcow2::prepare_write`], for copies that do not change what the guest sees: bitmaps note nothing.
    pub async fn prepare_copy(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult<Prepared> {
        self.inner.check_write(offset, length)?;
        self.inner.run(io, |state| self.try_prepare(state, offset, length)).await
    }

    /// Publishes an allocation whose data and fillings have been written. These need not be durable: a flush sees to
    /// that.
    pub async fn commit_write(&self, io: &MetaIo, mut allocation: Allocation) -> IoResult {
        self.inner.run(io, |state| self.inner.try_commit(state, &allocation)).await?;
        allocation.unpublished = 0..0;
        Ok(())
    }

    fn try_prepare(&self, state: &mut State, offset: u64, length: u64) -> Step<Prepared> {
        let inner = &*self.inner;
        let geometry = &inner.geometry;
        let first = geometry.cluster_of(offset);
        let request_end = offset.saturating_add(length);
        if state.overlapping(&(first..first.saturating_add(1))).is_some() {
            return Err(Stop::Need(Need::Idle(first..first.saturating_add(1))));
        }
        if geometry.extended_l2 {
            return self.try_prepare_parts(state, offset, length);
        }
        let slice = inner.own_slice(state, first)?;
        let limit = geometry
            .clusters_for(request_end)
            .min(geometry.slice_end(first))
            .min(first.saturating_add(geometry.cluster_of(ALLOCATION_BYTES_MAX)))
            .min(state.next_in_flight(first));
        let target = inner.target(state, slice, first)?;
        let mut end = first.saturating_add(1);
        while end < limit {
            match unless_block_missing(inner.target(state, slice, end))? {
                Some(next) if target.goes_on(next, inner, end.saturating_sub(first)) => end = end.saturating_add(1),
                _ => break,
            }
        }
        let (host, fresh, zeroed, blank) = match target {
            Target::Own(host) => {
                let skip = geometry.offset_in_cluster(offset);
                let run_bytes = geometry.start_of(end.saturating_sub(first)).saturating_sub(skip);
                return Ok(Prepared::InPlace {
                    offset: host.saturating_add(skip),
                    length_bytes: run_bytes.min(length),
                });
            }
            Target::Kept(host) => (host, false, false, false),
            Target::New if geometry.data_file => (geometry.start_of(first), false, false, false),
            Target::New => {
                let (run, blank) = inner.allocate_blank(state, end.saturating_sub(first))?;
                end = first.saturating_add(run.count);
                (geometry.start_of(run.first), true, run.zeroed, blank)
            }
        };
        let end_bytes = geometry.start_of(end);
        let head_empty = geometry.offset_in_cluster(offset) == 0;
        let head = if head_empty { Fill::None } else { inner.fill(slice, first, zeroed)? };
        let tail = match inner.fill(slice, end.saturating_sub(1), zeroed)? {
            _ if request_end >= end_bytes => Fill::None,
            // Behind the end of the disk there is nothing to copy.
            Fill::Copy if request_end >= geometry.size_bytes && !zeroed => Fill::Zero,
            Fill::Copy if request_end >= geometry.size_bytes => Fill::None,
            fill => fill,
        };
        state.in_flight.insert(first, end);
        let host_first = geometry.cluster_of(host);
        let count = end.saturating_sub(first);
        Ok(Prepared::New(Allocation {
            guest_offset: geometry.start_of(first),
            length_bytes: geometry.start_of(count),
            file_offset: host,
            head,
            tail,
            zeroed,
            blank,
            without_data: false,
            guest: first..end,
            unpublished: if fresh { host_first..host_first.saturating_add(count) } else { 0..0 },
            inner: Arc::clone(&self.inner),
        }))
    }
}

/// What a write to a guest cluster needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// It has its own host cluster, at this offset: nothing is needed.
    Own(u64),
    /// It keeps its host cluster, at this offset, but needs a new entry.
    Kept(u64),
    /// It needs new space.
    New,
}

impl Target {
    fn goes_on(self, next: Self, inner: &Inner, distance: u64) -> bool {
        let after = |host: u64| host.saturating_add(inner.geometry.start_of(distance));
        match (self, next) {
            (Self::New, Self::New) => true,
            (Self::Own(host), Self::Own(next)) | (Self::Kept(host), Self::Kept(next)) => after(host) == next,
            _ => false,
        }
    }
}

impl Inner {
    /// Returns the L2 entry of a guest cluster whose slice is in memory.
    pub(crate) fn entry(&self, slice: u64, cluster: u64) -> Step<u64> {
        let view = self.slices.view(slice);
        view.and_then(|view| view.get(self.geometry.word_in_slice(cluster))).ok_or(Stop::Need(Need::Slice(slice)))
    }

    pub(crate) fn cluster(&self, slice: u64, cluster: u64) -> Step<Cluster> {
        let decoded = Cluster::decode(self.entry(slice, cluster)?, &self.geometry);
        let place = self.geometry.start_of(cluster);
        match decoded {
            Ok(Cluster::Data { host, .. } | Cluster::ZeroAllocated { host, .. })
                if self.geometry.is_misplaced(host, place) =>
            {
                Err(self.bad_entry_stop(cluster))
            }
            Ok(decoded) => Ok(decoded),
            Err(BadEntry) => Err(self.bad_entry_stop(cluster)),
        }
    }

    pub(crate) fn set_entry(&self, state: &mut State, slice: u64, cluster: u64, raw: u64) {
        if self.geometry.extended_l2 {
            return self.set_extended(state, slice, cluster, raw, 0);
        }
        self.mapping_changes();
        self.slices.set(slice, self.geometry.index_in_slice(cluster), raw);
        state.book.mark_dirty(slice);
    }

    pub(crate) fn set_l1(&self, state: &mut State, l1_index: u64, raw: u64) {
        let Ok(index) = usize::try_from(l1_index) else { return };
        if let Some(entry) = self.l1.get(index) {
            self.mapping_changes();
            entry.store(raw, Ordering::Release);
            state.l1_dirty.insert(index);
        }
    }

    /// Notes that the tables in memory have lost these references. Call it after the tables were changed.
    pub(crate) fn unlink(&self, state: &mut State, clusters: impl IntoIterator<Item = Range<u64>>) {
        self.unlink_from(state, clusters, None, false);
    }

    /// As [`Inner::unlink`], for clusters that are barred.
    pub(crate) fn unlink_barred(&self, state: &mut State, clusters: Range<u64>) {
        self.unlink_from(state, std::iter::once(clusters), None, true);
    }

    /// As [`Inner::unlink`], for a table that has moved.
    pub(crate) fn unlink_table(&self, state: &mut State, table: Owner, clusters: Range<u64>) {
        self.unlink_from(state, std::iter::once(clusters), Some(table), false);
    }

    fn unlink_from(
        &self,
        state: &mut State,
        clusters: impl IntoIterator<Item = Range<u64>>,
        table: Option<Owner>,
        barred: bool,
    ) {
        let mut clusters = clusters.into_iter().peekable();
        if clusters.peek().is_none() {
            return;
        }
        let epoch = self.epochs.retire();
        let mut count = 0u64;
        let freed = clusters.map(|clusters| {
            count = count.saturating_add(clusters.end.saturating_sub(clusters.start));
            Freed { clusters, epoch, table, barred }
        });
        match self.skips(Barrier::Reuse) {
            false => state.unlinked.extend(freed),
            true => state.retired.extend(freed),
        }
        state.unlinked_clusters = state.unlinked_clusters.saturating_add(count);
    }

    /// Makes the slice that maps a guest cluster writable. There must be an L2 table, only this disk may use it (a
    /// snapshot's is copied), and the slice must be in memory.
    pub(crate) fn own_slice(&self, state: &mut State, cluster: u64) -> Step<u64> {
        self.refuse_if_stopped()?;
        if !self.header_ready.load(Ordering::Acquire) {
            return Err(Stop::Need(Need::HeaderReady));
        }
        let l1_index = self.geometry.l1_index(cluster);
        let table = self.table_or_complain(l1_index)?;
        match table {
            None => {
                let offset = self.allocate_table(state, FreshTable::Zeros)?;
                state.fresh_tables.insert(l1_index, FreshTable::Zeros);
                self.set_l1(state, l1_index, offset | COPIED);
            }
            Some(table) if !table.copied => {
                let old = self.geometry.cluster_of(table.offset);
                if self.refcount_in_use(state, old)? == 1 {
                    self.guard_l2(state, table.offset)?;
                    self.set_l1(state, l1_index, table.offset | COPIED);
                } else {
                    let fresh = FreshTable::CopyOf(table.offset);
                    let offset = self.allocate_table(state, fresh)?;
                    state.fresh_tables.insert(l1_index, fresh);
                    self.set_l1(state, l1_index, offset | COPIED);
                    self.unlink_table(state, Owner::L2, old..old.saturating_add(1));
                }
            }
            Some(table) => self.guard_l2(state, table.offset)?,
        }
        let slice = self.geometry.slice_of(cluster);
        if state.book.dirty_count() >= DIRTY_SLICES_MAX && !state.book.is_dirty(slice) {
            return Err(Stop::Need(Need::Flush));
        }
        match self.slices.view(slice) {
            Some(_) => Ok(slice),
            None => Err(Stop::Need(Need::Slice(slice))),
        }
    }

    /// Finds out what a write to a guest cluster needs. If the refcount shows that a host cluster is ours alone, sets
    /// the entry's flag.
    fn target(&self, state: &mut State, slice: u64, cluster: u64) -> Step<Target> {
        let old = self.cluster(slice, cluster)?;
        self.guard_entry(state, &old)?;
        Ok(match old {
            Cluster::Unallocated | Cluster::Zero | Cluster::Compressed { .. } => Target::New,
            Cluster::Data { host, .. } if self.geometry.data_file => Target::Own(host),
            Cluster::ZeroAllocated { host, .. } if self.geometry.data_file => Target::Kept(host),
            Cluster::Data { host, copied: true } => Target::Own(host),
            Cluster::ZeroAllocated { host, copied: true } => Target::Kept(host),
            Cluster::Data { host, copied: false } => {
                if self.refcount_in_use(state, self.geometry.cluster_of(host))? > 1 {
                    return Ok(Target::New);
                }
                self.set_entry(state, slice, cluster, host | COPIED);
                Target::Own(host)
            }
            Cluster::ZeroAllocated { host, copied: false } => {
                match self.refcount_in_use(state, self.geometry.cluster_of(host))? {
                    1 => Target::Kept(host),
                    _ => Target::New,
                }
            }
        })
    }

    /// Returns how to fill the rest of a cluster's new place.
    fn fill(&self, slice: u64, cluster: u64, zeroed: bool) -> Step<Fill> {
        let zeros = if zeroed { Fill::None } else { Fill::Zero };
        Ok(match self.cluster(slice, cluster)? {
            Cluster::Unallocated if self.geometry.has_backing => Fill::Copy,
            Cluster::Unallocated | Cluster::Zero | Cluster::ZeroAllocated { .. } => zeros,
            Cluster::Data { .. } | Cluster::Compressed { .. } => Fill::Copy,
        })
    }

    fn try_commit(&self, state: &mut State, allocation: &Allocation) -> Step<()> {
        let slice = self.own_slice(state, allocation.guest.start)?;
        if self.geometry.extended_l2 {
            return self.commit_parts(state, slice, allocation);
        }
        let mut old_hosts = Vec::new();
        let mut host = allocation.file_offset;
        for cluster in allocation.guest.clone() {
            let old = self.cluster(slice, cluster)?;
            let old_clusters = old.host_clusters(&self.geometry);
            self.note_order(state, allocation.blank, old);
            self.set_entry(state, slice, cluster, host | COPIED);
            if !old_clusters.is_empty() && old_clusters.start != self.geometry.cluster_of(host) {
                old_hosts.push(old_clusters);
            }
            host = host.checked_add(self.geometry.cluster_bytes()).ok_or(IoError::EIO)?;
        }
        self.unlink(state, old_hosts);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edit::snapshots::{NewSnapshot, create_snapshot};
    use crate::fixture::{self, CLUSTER};
    use block::block_on;
    use std::time::Duration;

    /// Guest clusters whose refcounts all lie in different blocks: more than stay in memory.
    const SCATTERED: u64 = 20;
    const FILLER: u64 = 300;
    const SIZE: u64 = (64 + SCATTERED * FILLER) * CLUSTER;

    /// A write that never ends would spin in the test's own thread.
    fn ends(test: impl FnOnce() + Send + 'static) {
        let (sender, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            test();
            sender.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(120)).expect("the write does not end, or failed");
    }

    /// An image with a snapshot, whose guest wrote in scattered order, with as little memory as possible.
    async fn scattered() -> (testkit::SimStorage, MetaIo, Qcow2) {
        let (storage, io) = fixture::created(SIZE);
        let qcow2 = fixture::opened(&storage, &io).await;
        for guest in 0..SCATTERED {
            fixture::fill(&qcow2, &io, guest * CLUSTER..(guest + 1) * CLUSTER).await;
            let filler = (64 + guest * FILLER) * CLUSTER;
            fixture::fill(&qcow2, &io, filler..filler + FILLER * CLUSTER).await;
        }
        qcow2.close(&io).await.unwrap();
        let file = fixture::file(&storage);
        create_snapshot(&io, &*file, fixture::NAME, &NewSnapshot::new("kept"), &mut |_, _| true).await.unwrap();
        let mut qcow2 = fixture::opened(&storage, &io).await;
        qcow2.set_cache_bytes(0);
        (storage, io, qcow2)
    }

    #[test]
    fn a_write_over_more_refcount_blocks_than_stay_in_memory_ends() {
        ends(|| {
            block_on(async {
                let (storage, io, qcow2) = scattered().await;
                fixture::fill(&qcow2, &io, 0..SCATTERED * CLUSTER).await;
                qcow2.close(&io).await.unwrap();
                testkit::qcow2_check(&storage.bytes(fixture::NAME)).unwrap().sound().unwrap();
            });
        });
    }

    #[test]
    fn a_copied_write_ends_where_changes_fill_the_memory_for_refcounts() {
        ends(|| {
            block_on(async {
                let (storage, io, qcow2) = scattered().await;
                let inner = &*qcow2.inner;
                // Fifteen blocks are changed. The rest of the memory is for the block of the old cluster and that of
                // the new one.
                for block in 4..19 {
                    let cluster = block * (CLUSTER / 2);
                    let again = |state: &mut State| {
                        let count = state.refcounts.get(cluster).map_err(|absent| inner.stop_for(absent))?;
                        state.refcounts.set(cluster, count).map_err(|_| Stop::Fail(IoError::EIO))
                    };
                    inner.run(&io, again).await.unwrap();
                }
                let before = inner.lock().refcounts.blocks_in_memory();
                assert!(before >= 15, "{before}");
                fixture::fill(&qcow2, &io, 0..CLUSTER).await;
                qcow2.close(&io).await.unwrap();
                testkit::qcow2_check(&storage.bytes(fixture::NAME)).unwrap().sound().unwrap();
            });
        });
    }
}
