//! Moves clusters from the end of the file down into holes, while guests go on. Once the image is closed, the file can
//! be cut off where its end has become free.
//!
//! A cluster that guests may overwrite in place cannot simply be copied: a write that was resolved before would land in
//! the old place after the copy. So a move has these steps:
//!
//! 1. Under the mutex: the guest's clusters count as being allocated, so the slow path learns of the move. The bits
//!    that protect tables are set for the old host clusters, so writes without the lock take the slow path. New
//!    clusters are allocated.
//! 2. Every operation that was resolved before ends (an epoch). A write to the clusters meanwhile cancels the move and
//!    goes on, because the move might be waiting for that very write.
//! 3. The data are copied. Writes to them wait for the end of the move. Reads go on.
//! 4. Under the mutex: the entries lead to the new place, and the old clusters are unlinked, as with any copy-on-write.
//!    So the next flush makes the copy durable before the entries. The old place is used again, or punched, only when
//!    the entries are durable and the reads in flight have ended. Until then its bits stay set, because a write that
//!    found the old entry may check them late.
//!
//! An L2 table moves as a snapshot's table is copied: the next flush writes its copy, and then the L1 entry.
//!
//! A pass looks at every entry. If an entry leads behind the new end of the file and does not move, its clusters must
//! have a refcount. So clusters behind the end that count as free are unused, whatever they hold, and can be cut off.

use crate::layout::entry::{COPIED, Cluster, ZERO};
use crate::live::flush_queue::Barrier;
use crate::live::free_runs::Run;
use crate::live::image::Qcow2;
use crate::live::metadata_map::Owner;
use crate::live::refcounts::Absent;
use crate::live::state::{FreshTable, Inner, Need, State, Step, Stop};
use crate::live::write::Allocation;
use block::sync::Ordering;
use block::{FileOp, Fill, IoError, IoResult, MetaIo, Participant, PastEnd, yield_now};
use memory::{AlignedBuf, IoBuf};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that are moved at once, at least one cluster. Guests' writes to them wait meanwhile.
const PIECE_BYTES: u64 = 512 << 10;

/// Refcounts that are counted in one step.
const COUNT_CLUSTERS: u64 = 1 << 15;

/// A compaction under way. While it lives, new space comes from below the planned end of the file, so keep it until the
/// image is closed.
#[derive(Debug)]
pub struct Compaction {
    pub(super) inner: Arc<Inner>,
    pub(super) participant: Participant,
    /// Host clusters from here on are to become free.
    pub(super) end: u64,
    moved_bytes: u64,
    /// Bytes behind the end that were not moved in this pass, for want of room below.
    missed_bytes: u64,
    /// Bytes behind the end that are never moved.
    pub(super) fixed_bytes: u64,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactionStep {
    /// The byte of the disk to go on from.
    pub next: u64,
    /// Bytes of the file that were moved.
    pub moved_bytes: u64,
    /// Bytes that were not moved, because requests in flight took too long. Their move may be tried again.
    pub late_bytes: u64,
}

impl CompactionStep {
    fn over(next: u64, moved_bytes: u64) -> Self {
        Self { next, moved_bytes, late_bytes: 0 }
    }
}

impl Compaction {
    /// Returns the number of bytes that were moved so far.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    /// Returns the number of bytes behind the planned end for which there was no room below, because guests took it.
    #[must_use]
    pub fn missed_bytes(&self) -> u64 {
        self.missed_bytes
    }

    /// Returns the number of bytes behind the planned end that are never moved: compressed clusters, and clusters that
    /// snapshots share.
    #[must_use]
    pub fn fixed_bytes(&self) -> u64 {
        self.fixed_bytes
    }

    /// Returns the host clusters where every free cluster is unused, whatever it holds. Valid after a whole pass and
    /// [`Qcow2::look_at_still`]: every entry that refers to a cluster there was seen, and that cluster has a refcount.
    #[must_use]
    pub fn looked_at(&self) -> Range<u64> {
        self.end..u64::MAX
    }
}

impl Drop for Compaction {
    fn drop(&mut self) {
        self.inner.lock().space.ceiling = None;
    }
}

/// A move that has begun. Dropping it cancels it, and guests' writes go on.
#[derive(Debug)]
struct Move {
    /// The old place: host clusters that may be overwritten in place only under the mutex.
    barred: Range<u64>,
    /// The new place. It is freed if it is not published.
    allocation: Allocation,
    /// A write to the guest's clusters may still cancel the move.
    is_tentative: bool,
    /// First byte of the old place.
    from: u64,
    /// The clusters hold no data: only their place is kept.
    is_empty: bool,
    epoch: u64,
}

impl Drop for Move {
    fn drop(&mut self) {
        let inner = &*self.allocation.inner;
        let mut state = inner.lock();
        if self.is_tentative && state.tentative.take().is_none() {
            self.allocation.guest = NOBODYS;
        }
        let tables = inner.tables(&mut state);
        for cluster in self.barred.clone() {
            tables.unbar(&inner.table_bits, cluster);
        }
    }
}

/// Takes the place of the guest's clusters in a cancelled move, which must not release them: the write that cancelled
/// it may be allocating them by now.
const NOBODYS: Range<u64> = u64::MAX..u64::MAX;

/// The first thing to move from a place of the disk on.
#[derive(Debug)]
enum Found {
    /// Nothing to move before the guest cluster `next`. `fixed` clusters before it stay behind the end.
    Nothing {
        next: u64,
        fixed: u64,
    },
    /// There is no room below for `clusters` clusters, up to the guest cluster `next`.
    NoRoom {
        next: u64,
        clusters: u64,
    },
    /// The table has moved; look at it again.
    Table,
    Clusters(Box<Move>),
}

/// What an entry refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No cluster, or one in front of the end.
    Settled,
    Fixed,
    Data(u64),
    Empty(u64),
}

impl Kind {
    fn host(self) -> Option<u64> {
        match self {
            Self::Data(host) | Self::Empty(host) => Some(host),
            Self::Settled | Self::Fixed => None,
        }
    }

    /// Whether `next`, `distance` bytes behind this one, can move together with it.
    fn goes_on(self, next: Self, distance: u64) -> bool {
        match (self, next) {
            (Self::Data(host), Self::Data(next)) | (Self::Empty(host), Self::Empty(next)) => {
                host.checked_add(distance) == Some(next)
            }
            _ => false,
        }
    }
}

impl Qcow2 {
    /// Returns why the file of this image cannot be made shorter while it is in use; `None` if it can.
    #[must_use]
    pub fn refuses_compaction(&self) -> Option<&'static str> {
        let inner = &self.inner;
        if inner.read_only {
            return Some("it is open for reading only");
        }
        if inner.geometry.data_file {
            return Some("its data lie in an external data file");
        }
        if !inner.can_grow {
            return Some("it does not lie in a file whose length can change");
        }
        (!inner.can_discard).then_some("its file system cannot make holes in a file")
    }

    /// Returns the number of host clusters that count as used although nothing refers to them. A flush frees some of
    /// them.
    #[must_use]
    pub fn unfreed_clusters(&self) -> u64 {
        let state = self.inner.lock();
        let freed = state.unlinked.iter().chain(&state.retired);
        freed.fold(0, |sum, freed| sum.saturating_add(freed.clusters.end.saturating_sub(freed.clusters.start)))
    }

    /// Begins a pass: decides where the file can end. Call it after a flush. Until the compaction ends, no snapshots of
    /// the image may be taken, and no other compaction may run.
    pub async fn begin_compaction(&self, io: &MetaIo) -> IoResult<Compaction> {
        let inner = &self.inner;
        let ready = |_: &mut State| match inner.header_ready.load(Ordering::Acquire) {
            true => Ok(()),
            false => Err(Stop::Need(Need::HeaderReady)),
        };
        inner.run(io, ready).await?;
        let used = self.count_used(io).await?;
        let mut state = inner.lock();
        let table_bytes = state.refcounts.table_entries().saturating_mul(8);
        // At the end, the refcount table may need room for a copy.
        let end = used.saturating_add(inner.geometry.clusters_for(table_bytes)).saturating_add(2);
        state.space.ceiling = Some(end);
        drop(state);
        Ok(Compaction {
            inner: Arc::clone(inner),
            participant: inner.epochs.join(),
            end,
            moved_bytes: 0,
            missed_bytes: 0,
            fixed_bytes: 0,
        })
    }

    async fn count_used(&self, io: &MetaIo) -> IoResult<u64> {
        let inner = &*self.inner;
        let (mut at, mut used) = (0u64, 0u64);
        while at < inner.lock().space.frontier {
            let (next, found) = inner.run(io, |state| inner.count_step(state, at)).await?;
            (at, used) = (next, used.saturating_add(found));
            yield_now().await;
        }
        Ok(used)
    }

    /// Moves the first clusters or the table behind the planned end of the file, if there are any within a short
    /// distance from the byte `at` of the disk. `waits` waits a little for requests in flight; if it returns false, the
    /// move is cancelled. `io` is for calls that block. The image is valid at every moment. After an error, what was
    /// moved stays moved.
    pub async fn compact_step(
        &self,
        io: &MetaIo,
        compaction: &mut Compaction,
        at: u64,
        waits: impl AsyncFnMut() -> bool,
    ) -> IoResult<CompactionStep> {
        let inner = &*self.inner;
        let cluster = inner.geometry.cluster_of(at);
        // Another task may move the tables that are read here. Their old place must not be reused meanwhile.
        let ticket = compaction.participant.begin(&inner.epochs);
        let end = compaction.end;
        let found = inner.run(io, |state| self.find_move(state, cluster, end)).await;
        compaction.participant.end(ticket);
        let bytes_of = |clusters: u64| inner.geometry.start_of(clusters);
        Ok(match found? {
            Found::Nothing { next, fixed } => {
                compaction.fixed_bytes = compaction.fixed_bytes.saturating_add(bytes_of(fixed));
                CompactionStep::over(bytes_of(next), 0)
            }
            Found::NoRoom { next, clusters } => {
                compaction.missed_bytes = compaction.missed_bytes.saturating_add(bytes_of(clusters));
                CompactionStep::over(bytes_of(next), 0)
            }
            Found::Table => {
                compaction.moved_bytes = compaction.moved_bytes.saturating_add(bytes_of(1));
                CompactionStep::over(at, bytes_of(1))
            }
            Found::Clusters(moving) => {
                let (next, bytes) = (bytes_of(moving.allocation.guest.end), moving.allocation.length_bytes);
                if !self.finish_move(io, moving, waits).await? {
                    return Ok(CompactionStep { next, moved_bytes: 0, late_bytes: bytes });
                }
                compaction.moved_bytes = compaction.moved_bytes.saturating_add(bytes);
                CompactionStep::over(next, bytes)
            }
        })
    }

    /// Copies the data and publishes the new place. Returns false if that would take too long.
    async fn finish_move(
        &self,
        io: &MetaIo,
        mut moving: Box<Move>,
        mut waits: impl AsyncFnMut() -> bool,
    ) -> IoResult<bool> {
        let inner = &*self.inner;
        let mut goes_on = true;
        while goes_on && !inner.epochs.is_over(moving.epoch) && !inner.skips(Barrier::Move) {
            goes_on = inner.lock().tentative.is_some() && waits().await;
        }
        if !inner.fix_move(&mut moving, goes_on) {
            return Ok(false);
        }
        if !moving.is_empty {
            inner.copy(io, moving.from, &moving.allocation).await?;
        }
        inner.run(io, |state| inner.publish_move(state, &moving)).await?;
        moving.allocation.unpublished = 0..0;
        // The old place stays barred until it is free. A write that began after the wait may have found the old entry,
        // and may check only now whether it may overwrite in place.
        moving.barred = 0..0;
        Ok(true)
    }

    fn find_move(&self, state: &mut State, first: u64, end: u64) -> Step<Found> {
        let inner = &*self.inner;
        let geometry = &inner.geometry;
        inner.refuse_if_stopped()?;
        if state.refcounts.is_half_crowded() {
            // A move needs two blocks at once, and loading one must not push the other out.
            return Err(Stop::Need(Need::Flush));
        }
        let l1_index = geometry.l1_index(first);
        let Some(table) = inner.table_or_complain(l1_index)? else {
            return Ok(Found::Nothing { next: geometry.table_end(first), fixed: 0 });
        };
        let is_behind = geometry.cluster_of(table.offset) >= end && !state.fresh_tables.contains_key(&l1_index);
        if table.copied && is_behind && inner.try_move_table(state, l1_index, table.offset, end)? {
            return Ok(Found::Table);
        }
        let slice = geometry.slice_of(first);
        if inner.slices.view(slice).is_none() {
            return Err(Stop::Need(Need::Slice(slice)));
        }
        // A table that a snapshot shares does not move, nor do its clusters, nor clusters behind the disk's end.
        let movable_end = if table.copied { geometry.guest_clusters() } else { 0 };
        let limit = geometry.slice_end(first);
        let (mut cluster, mut fixed) = (first, 0u64);
        let kind = loop {
            if cluster >= limit {
                return Ok(Found::Nothing { next: limit, fixed });
            }
            match inner.kind(slice, cluster, end)? {
                Kind::Settled => {}
                kind if kind.host().is_some() && cluster < movable_end => break kind,
                _ => match inner.require_counted(state, slice, cluster) {
                    Ok(()) => fixed = fixed.saturating_add(1),
                    // Each entry may need another block. Entries before this one are not looked at again.
                    Err(Stop::Need(_)) if cluster > first => return Ok(Found::Nothing { next: cluster, fixed }),
                    Err(stop) => return Err(stop),
                },
            }
            cluster = cluster.saturating_add(1);
        };
        if cluster > first {
            return Ok(Found::Nothing { next: cluster, fixed });
        }
        self.begin_move(state, slice, cluster..limit.min(movable_end), kind, end)
    }

    /// Begins to move the clusters that lie together, from the first of `clusters` of a slice on.
    fn begin_move(&self, state: &mut State, slice: u64, clusters: Range<u64>, kind: Kind, end: u64) -> Step<Found> {
        let inner = &*self.inner;
        let geometry = &inner.geometry;
        let first = clusters.start;
        let one = first..first.saturating_add(1);
        if state.overlapping(&one).is_some() {
            return Err(Stop::Need(Need::Idle(one)));
        }
        inner.own_slice(state, first)?;
        let most = geometry.cluster_of(PIECE_BYTES).max(1);
        let limit = clusters.end.min(first.saturating_add(most)).min(state.next_in_flight(first));
        let Some(from) = kind.host() else { return Err(Stop::Fail(IoError::EIO)) };
        let old = geometry.cluster_of(from);
        let mut wanted = 0u64;
        while first.saturating_add(wanted) < limit {
            let next = inner.kind(slice, first.saturating_add(wanted), end)?;
            if wanted > 0 && !kind.goes_on(next, geometry.start_of(wanted)) {
                break;
            }
            let host = old.saturating_add(wanted);
            inner.guard(state, None, host..host.saturating_add(1))?;
            if inner.refcount_in_use(state, host)? > 1 {
                break;
            }
            wanted = wanted.saturating_add(1);
        }
        if wanted == 0 {
            return Ok(Found::Nothing { next: one.end, fixed: 1 });
        }
        let Some(run) = inner.allocate_below(state, wanted, end)? else {
            return Ok(Found::NoRoom { next: first.saturating_add(wanted), clusters: wanted });
        };
        let guest = first..first.saturating_add(run.count);
        let barred = old..old.saturating_add(run.count);
        state.in_flight.insert(guest.start, guest.end);
        state.tentative = Some(guest.start);
        let tables = inner.tables(state);
        barred.clone().for_each(|cluster| tables.bar(&inner.table_bits, cluster));
        Ok(Found::Clusters(Box::new(Move {
            barred,
            is_tentative: true,
            allocation: Allocation {
                guest_offset: geometry.start_of(guest.start),
                length_bytes: geometry.start_of(run.count),
                file_offset: geometry.start_of(run.first),
                head: Fill::None,
                tail: Fill::None,
                zeroed: run.zeroed,
                blank: false,
                without_data: kind == Kind::Empty(from),
                guest,
                unpublished: run.first..run.end(),
                inner: Arc::clone(&self.inner),
            },
            from,
            is_empty: kind == Kind::Empty(from),
            epoch: inner.epochs.retire(),
        })))
    }
}

impl Inner {
    /// Counts the clusters in use from `at` on, as far as one step goes. Returns also where to go on.
    fn count_step(&self, state: &mut State, at: u64) -> Step<(u64, u64)> {
        let block = self.geometry.block_of(at);
        let to = self.geometry.block_end(block).min(state.space.frontier).min(at.saturating_add(COUNT_CLUSTERS));
        match state.refcounts.count_used(at, to) {
            Ok(used) => Ok((to, used)),
            Err(Absent::NoBlock(_)) => Ok((self.geometry.block_end(block), 0)),
            Err(absent) => Err(self.stop_for(absent)),
        }
    }

    /// Returns what the entry of a guest cluster refers to. Its slice must be in memory.
    fn kind(&self, slice: u64, cluster: u64, end: u64) -> Step<Kind> {
        let (entry, holds_data) = match self.geometry.extended_l2 {
            true => {
                let entry = self.extended(slice, cluster)?;
                (entry.cluster, entry.alloc != 0)
            }
            false => (self.cluster(slice, cluster)?, true),
        };
        if entry.host_clusters(&self.geometry).end <= end {
            return Ok(Kind::Settled);
        }
        Ok(match entry {
            Cluster::Data { host, copied: true } if holds_data => Kind::Data(host),
            Cluster::Data { host, copied: true } | Cluster::ZeroAllocated { host, copied: true } => Kind::Empty(host),
            _ => Kind::Fixed,
        })
    }

    /// Fails if an entry leads to a cluster that counts as free, because the cluster would be cut off.
    fn require_counted(&self, state: &mut State, slice: u64, cluster: u64) -> Step<()> {
        let entry = match self.geometry.extended_l2 {
            true => self.extended(slice, cluster)?.cluster,
            false => self.cluster(slice, cluster)?,
        };
        for host in entry.host_clusters(&self.geometry) {
            self.refcount_in_use(state, host)?;
        }
        Ok(())
    }

    /// Moves an L2 table to a place below `end`. Returns false if there is none, or if a snapshot shares the table.
    fn try_move_table(&self, state: &mut State, l1_index: u64, offset: u64, end: u64) -> Step<bool> {
        self.guard_l2(state, offset)?;
        let old = self.geometry.cluster_of(offset);
        if self.refcount_in_use(state, old)? > 1 {
            return Ok(false);
        }
        let Some(run) = self.allocate_below(state, 1, end)? else { return Ok(false) };
        state.needs_order = true;
        self.add_tables(state, Owner::L2, run.first..run.end());
        state.fresh_tables.insert(l1_index, FreshTable::CopyOf(offset));
        self.set_l1(state, l1_index, self.geometry.start_of(run.first) | COPIED);
        self.unlink_table(state, Owner::L2, old..old.saturating_add(1));
        Ok(true)
    }

    /// Makes writes to the guest's clusters wait for the end of the move. Returns false if a write has given the move
    /// up, or if `goes_on` is false. Then the new place, where nothing was written, is given back at once.
    fn fix_move(&self, moving: &mut Move, goes_on: bool) -> bool {
        let mut state = self.lock();
        moving.is_tentative = false;
        let allocation = &mut moving.allocation;
        let is_wanted = state.tentative.take().is_some();
        if is_wanted && goes_on {
            return true;
        }
        if !is_wanted {
            allocation.guest = NOBODYS;
        }
        while !allocation.unpublished.is_empty() {
            let first = allocation.unpublished.start;
            // If the block is not in memory, the rest is given back like any allocation.
            if state.refcounts.set(first, 0).is_err() {
                break;
            }
            state.space.free.add(Run { first, count: 1, zeroed: allocation.zeroed });
            allocation.unpublished.start = first.saturating_add(1);
        }
        false
    }

    /// Copies the data at `from` to the new place. Zeros take no space there.
    async fn copy(&self, io: &MetaIo, from: u64, to: &Allocation) -> IoResult {
        // The write may outlive this task. The new place is not used again before it has ended.
        let mut place = self.epochs.join();
        place.begin(&self.epochs);
        let length = usize::try_from(to.length_bytes).map_err(|_| IoError::EIO)?;
        let data: AlignedBuf = io.read(from, length, PastEnd::Zeros).await?;
        let offset = to.file_offset;
        let op = match data.iter().all(|byte| *byte == 0) {
            true if to.zeroed => return Ok(()),
            true => FileOp::WriteZeroes { offset, length: to.length_bytes, may_unmap: true },
            false => FileOp::Write { offset, data: IoBuf::from_aligned(data).whole(), fua: false },
        };
        io.queue().start_keeping(op, Rc::new(place)).await
    }

    /// Lets the entries lead to the new place.
    fn publish_move(&self, state: &mut State, moving: &Move) -> Step<()> {
        let Move { allocation, from, is_empty, .. } = moving;
        let (from, is_empty) = (*from, *is_empty);
        let slice = self.own_slice(state, allocation.guest.start)?;
        let old_first = self.geometry.cluster_of(from);
        let mut changes = Vec::new();
        for (index, cluster) in allocation.guest.clone().enumerate() {
            let distance = self.geometry.start_of(index as u64);
            let host = allocation.file_offset.checked_add(distance).ok_or(IoError::EIO)?;
            // No write can have changed the entry: writes wait for the end of the move.
            let expected = from.checked_add(distance);
            if self.kind(slice, cluster, old_first)?.host() != expected {
                return Err(Stop::Fail(IoError::EIO));
            }
            changes.push((cluster, host | COPIED));
        }
        state.needs_order = true;
        for (cluster, descriptor) in changes {
            match self.geometry.extended_l2 {
                true => {
                    let bitmap = self.extended(slice, cluster)?.bitmap();
                    self.set_extended(state, slice, cluster, descriptor, bitmap);
                }
                false if is_empty => self.set_entry(state, slice, cluster, descriptor | ZERO),
                false => self.set_entry(state, slice, cluster, descriptor),
            }
        }
        let count = allocation.guest.end.saturating_sub(allocation.guest.start);
        self.unlink_barred(state, old_first..old_first.saturating_add(count));
        Ok(())
    }
}

#[cfg(test)]
#[path = "compaction_tests.rs"]
mod tests;
