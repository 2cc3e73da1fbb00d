//! Write-zeroes and discard: whole clusters by the tables alone.

use crate::layout::entry::{COPIED, Cluster, ZERO};
use crate::live::image::Qcow2;
use crate::live::state::{Inner, Need, State, Step, Stop};
use block::{Extent, FileOp, IoResult, MetaIo};
use std::ops::Range;

/// What of a write-zeroes the tables could not do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ZeroOutcome {
    /// Ranges of the disk that the caller must zero by ordinary writes: none, the ragged ends, or everything.
    pub by_writing: Vec<Range<u64>>,
}

/// What becomes of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Zeros, keeping the space where it is the cluster's alone.
    Zeroed,
    /// Zeros, and the space is given back.
    ZeroedAndFreed,
    /// Anything; the space is given back.
    Discarded,
    /// What the layer below holds; the space is given back.
    Revealed,
}

impl Qcow2 {
    /// Makes whole clusters of the range read as zeros and says what is left to do by writing.
    pub async fn write_zeroes(&self, io: &MetaIo, offset: u64, length: u64, may_unmap: bool) -> IoResult<ZeroOutcome> {
        let inner = &self.inner;
        inner.check_write(offset, length)?;
        inner.begin_change(io, offset, length).await?;
        let end = offset.saturating_add(length);
        if let Some(data) = io.data().filter(|_| inner.header.data_file_is_raw()) {
            // What the file holds is what the guest sees, whatever the tables say.
            data.start(FileOp::WriteZeroes { offset, length, may_unmap }).await?;
            return Ok(ZeroOutcome::default());
        }
        let whole = inner.whole_clusters(offset, end);
        if may_unmap {
            inner.discard_data(io, &whole).await;
        }
        if inner.geometry.version < 3 && inner.geometry.has_backing {
            // Version 2 cannot say "zero" above a layer that says something else.
            return Ok(ZeroOutcome { by_writing: std::iter::once(offset..end).collect() });
        }
        let mut ragged: Vec<Range<u64>> = Vec::new();
        if inner.geometry.extended_l2 {
            let goal = if may_unmap { Goal::ZeroedAndFreed } else { Goal::Zeroed };
            let parts = inner.change_whole_parts(io, offset..end, goal).await?;
            // Of compressed clusters nothing can be changed in part.
            let first_end = inner.geometry.start_of(whole.start).clamp(parts.start, parts.end);
            let last_start = inner.geometry.start_of(whole.end).clamp(first_end, parts.end);
            ragged.extend([offset..parts.start, parts.start..first_end, last_start..parts.end, parts.end..end]);
        } else if whole.is_empty() {
            ragged.push(offset..end);
        } else {
            ragged.push(offset..inner.geometry.start_of(whole.start));
            ragged.push(inner.geometry.start_of(whole.end)..end);
            let goal = if may_unmap { Goal::ZeroedAndFreed } else { Goal::Zeroed };
            inner.change_clusters(io, whole, goal).await?;
        }
        let mut by_writing = Vec::new();
        for range in ragged {
            if !range.is_empty() && !self.reads_as_zeros(io, &range).await? {
                by_writing.push(range);
            }
        }
        Ok(ZeroOutcome { by_writing })
    }

    /// Gives the space of whole clusters of the range back; they read as zeros afterwards. Above a backing file in
    /// version 2, which cannot say that, nothing is done: what the layer below holds would come back to life.
    pub async fn discard(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult {
        self.inner.check_write(offset, length)?;
        if self.inner.geometry.version < 3 && self.inner.geometry.has_backing {
            return Ok(());
        }
        self.inner.begin_change(io, offset, length).await?;
        let whole = self.inner.whole_clusters(offset, offset.saturating_add(length));
        self.inner.discard_data(io, &whole).await;
        if self.inner.header.data_file_is_raw() {
            return Ok(());
        }
        if self.inner.geometry.extended_l2 {
            return self
                .inner
                .change_whole_parts(io, offset..offset.saturating_add(length), Goal::Discarded)
                .await
                .map(drop);
        }
        self.inner.change_clusters(io, whole, Goal::Discarded).await
    }

    /// Forgets whole clusters of the range: the guest sees what the layer below holds there, or zeros where there is none.
    /// For layers whose contents have gone to the one below: no bitmap notes a change, because there is none.
    pub async fn reveal(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult {
        self.inner.check_write(offset, length)?;
        let whole = self.inner.whole_clusters(offset, offset.saturating_add(length));
        if self.inner.geometry.extended_l2 {
            let bytes = self.inner.geometry.start_of(whole.start)..self.inner.geometry.start_of(whole.end);
            return self.inner.change_run_of_parts(io, bytes, Goal::Revealed).await;
        }
        self.inner.change_clusters(io, whole, Goal::Revealed).await
    }

    async fn reads_as_zeros(&self, io: &MetaIo, range: &Range<u64>) -> IoResult<bool> {
        let mut at = range.start;
        while at < range.end {
            let mapped = self.resolve(io, at, range.end.saturating_sub(at)).await?;
            let zero = match mapped.extent {
                Extent::Zero => true,
                Extent::Backing => !self.inner.geometry.has_backing,
                Extent::Data { .. } | Extent::Compressed(_) => false,
            };
            if !zero {
                return Ok(false);
            }
            at = at.saturating_add(mapped.length_bytes);
        }
        Ok(true)
    }
}

impl Inner {
    /// The clusters that lie wholly in a range; the disk's last one counts as whole where the range reaches its end.
    fn whole_clusters(&self, offset: u64, end: u64) -> Range<u64> {
        let first = self.geometry.clusters_for(offset);
        let last = match end >= self.geometry.size_bytes {
            true => self.geometry.guest_clusters(),
            false => self.geometry.cluster_of(end),
        };
        first..last
    }

    /// Gives back what an external data file holds of clusters, if it can. Before the tables are changed: afterwards the
    /// next write may already be there.
    async fn discard_data(&self, io: &MetaIo, clusters: &Range<u64>) {
        let Some(data) = io.data().filter(|_| !clusters.is_empty()) else { return };
        let offset = self.geometry.start_of(clusters.start);
        let length = self.geometry.start_of(clusters.end).min(self.geometry.size_bytes).saturating_sub(offset);
        // As zeros, not as a discard, which may leave anything there: until the tables are durable they say that these
        // are data. Best effort: what cannot be given back stays where it is.
        let _ = data.start(FileOp::WriteZeroes { offset, length, may_unmap: true }).await;
    }

    /// Changes the parts of clusters that lie wholly in a range; returns which bytes those are.
    async fn change_whole_parts(&self, io: &MetaIo, range: Range<u64>, goal: Goal) -> IoResult<Range<u64>> {
        let part_bytes = self.geometry.part_start(1);
        let start = range.start.next_multiple_of(part_bytes);
        let end = match range.end >= self.geometry.size_bytes {
            // What is behind the end of the disk goes with it.
            true => self.geometry.start_of(self.geometry.guest_clusters()),
            false => range.end.saturating_sub(range.end & part_bytes.saturating_sub(1)).max(start),
        };
        self.change_run_of_parts(io, start..end, goal).await?;
        Ok(start.min(range.end)..end.min(range.end))
    }

    async fn change_run_of_parts(&self, io: &MetaIo, range: Range<u64>, goal: Goal) -> IoResult {
        let mut at = range.start;
        while at < range.end {
            at = self.run(io, |state| self.change_parts(state, at..range.end, goal)).await?;
        }
        Ok(())
    }

    async fn change_clusters(&self, io: &MetaIo, clusters: Range<u64>, goal: Goal) -> IoResult {
        let mut at = clusters.start;
        while at < clusters.end {
            at = self.run(io, |state| self.change_step(state, at..clusters.end, goal)).await?;
        }
        Ok(())
    }

    /// Changes the first clusters of a range, as far as one slice goes; returns where to go on.
    fn change_step(&self, state: &mut State, clusters: Range<u64>, goal: Goal) -> Step<u64> {
        let first = clusters.start;
        let shows_backing = self.geometry.has_backing && goal != Goal::Revealed;
        if !shows_backing && self.table_or_complain(self.geometry.l1_index(first))?.is_none() {
            return Ok(self.geometry.table_end(first).min(clusters.end));
        }
        let part = first..clusters.end.min(self.geometry.slice_end(first));
        if let Some(busy) = state.overlapping(&part) {
            return Err(Stop::Need(Need::Idle(busy)));
        }
        let slice = self.own_slice(state, first)?;
        let mut changes = Vec::new();
        for cluster in part.clone() {
            let old = self.cluster(slice, cluster)?;
            if let Some(new) = self.changed_entry(old, goal) {
                self.guard_entry(state, &old)?;
                changes.push((cluster, old, new));
            }
        }
        let mut freed: Vec<Range<u64>> = Vec::new();
        for (cluster, old, new) in changes {
            self.set_entry(state, slice, cluster, new);
            let hosts = old.host_clusters(&self.geometry);
            let keeps = matches!(Cluster::decode(new, &self.geometry), Ok(Cluster::ZeroAllocated { .. }));
            match freed.last_mut() {
                _ if keeps || hosts.is_empty() => {}
                Some(last) if last.end == hosts.start => last.end = hosts.end,
                _ => freed.push(hosts),
            }
        }
        self.unlink(state, freed);
        Ok(part.end)
    }

    /// The new entry, or `None` where the old one will do.
    fn changed_entry(&self, old: Cluster, goal: Goal) -> Option<u64> {
        let has_zero_flag = self.geometry.version >= 3;
        // Where nothing lies below, an unallocated cluster reads as zeros.
        let zero_flag_needed = has_zero_flag && (self.geometry.has_backing || goal != Goal::Discarded);
        let gone = if zero_flag_needed { ZERO } else { 0 };
        match (old, goal) {
            (Cluster::Unallocated, Goal::Revealed) => None,
            (_, Goal::Revealed) => Some(0),
            (Cluster::Zero, _) => None,
            (Cluster::Unallocated, _) => (has_zero_flag && self.geometry.has_backing).then_some(ZERO),
            (Cluster::ZeroAllocated { .. }, Goal::Zeroed) => None,
            (Cluster::Data { host, copied: true }, Goal::Zeroed) if has_zero_flag => Some(host | COPIED | ZERO),
            (Cluster::ZeroAllocated { .. } | Cluster::Data { .. } | Cluster::Compressed { .. }, _) => Some(gone),
        }
    }
}
