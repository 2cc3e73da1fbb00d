//! Write-zeroes and discard: whole clusters are changed only in the tables.

use crate::layout::entry::{COPIED, Cluster, ZERO};
use crate::live::image::Qcow2;
use crate::live::state::{Inner, Need, State, Step, Stop};
use block::{Extent, FileOp, IoResult, MetaIo, yield_now};
use std::ops::Range;

/// The most missing tables that one step skips, so that others can run in between.
const TABLES_A_STEP: usize = 1024;

/// The parts of a write-zeroes that changing tables could not do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ZeroOutcome {
    /// Ranges of the disk that the caller must zero by ordinary writes: none, the unaligned ends, or everything.
    pub by_writing: Vec<Range<u64>>,
}

/// The new state of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Zeros. The cluster keeps its space if no other cluster shares it.
    Zeroed,
    /// Zeros; the space is freed.
    ZeroedAndFreed,
    /// Anything; the space is freed.
    Discarded,
    /// The contents of the layer below; the space is freed.
    Revealed,
}

impl Qcow2 {
    /// Makes whole clusters of the range read as zeros. Returns the parts that are left to be written.
    pub async fn write_zeroes(&self, io: &MetaIo, offset: u64, length: u64, may_unmap: bool) -> IoResult<ZeroOutcome> {
        let inner = &self.inner;
        inner.check_write(offset, length)?;
        inner.begin_change(io, offset, length).await?;
        let end = offset.saturating_add(length);
        if let Some(data) = io.data().filter(|_| inner.header.data_file_is_raw()) {
            // The guest sees the contents of the file, whatever the tables say.
            data.start(FileOp::WriteZeroes { offset, length, may_unmap }).await?;
            return Ok(ZeroOutcome::default());
        }
        let whole = inner.whole_clusters(offset, end);
        if may_unmap {
            inner.discard_data(io, &whole).await;
        }
        if inner.geometry.version < 3 && inner.geometry.has_backing {
            // Version 2 has no zero flag, which would hide the layer below.
            return Ok(ZeroOutcome { by_writing: std::iter::once(offset..end).collect() });
        }
        let mut ragged: Vec<Range<u64>> = Vec::new();
        if inner.geometry.extended_l2 {
            let goal = if may_unmap { Goal::ZeroedAndFreed } else { Goal::Zeroed };
            let parts = inner.change_whole_parts(io, offset..end, goal).await?;
            // A compressed cluster cannot be changed partly.
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

    /// Frees the space of whole clusters of the range, which then read as zeros. Version 2 has no zero flag. So above a
    /// backing file nothing is done: the data of the layer below would reappear.
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

    /// Forgets whole clusters of the range: the guest then sees the layer below, or zeros if there is none. For layers
    /// whose data were copied to the layer below: the disk does not change, so bitmaps note nothing.
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
    /// Returns the clusters that lie wholly in a range. The disk's last cluster counts as whole if the range reaches
    /// the disk's end.
    fn whole_clusters(&self, offset: u64, end: u64) -> Range<u64> {
        let first = self.geometry.clusters_for(offset);
        let last = match end >= self.geometry.size_bytes {
            true => self.geometry.guest_clusters(),
            false => self.geometry.cluster_of(end),
        };
        first..last
    }

    /// Frees the space of clusters in an external data file, if possible. This comes before the tables are changed:
    /// afterwards the next write may already be there.
    async fn discard_data(&self, io: &MetaIo, clusters: &Range<u64>) {
        let Some(data) = io.data().filter(|_| !clusters.is_empty()) else { return };
        let offset = self.geometry.start_of(clusters.start);
        let length = self.geometry.start_of(clusters.end).min(self.geometry.size_bytes).saturating_sub(offset);
        // Zeros are written: a discard may leave any contents, and until the tables are durable, they call the clusters
        // data. This is best effort; space that cannot be freed stays.
        let _ = data.start(FileOp::WriteZeroes { offset, length, may_unmap: true }).await;
    }

    /// Changes the parts of clusters that lie wholly in a range. Returns the range of these parts.
    async fn change_whole_parts(&self, io: &MetaIo, range: Range<u64>, goal: Goal) -> IoResult<Range<u64>> {
        let part_bytes = self.geometry.part_start(1);
        let start = range.start.next_multiple_of(part_bytes);
        let end = match range.end >= self.geometry.size_bytes {
            // The rest of a part behind the end of the disk goes with it.
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
            if at < range.end {
                yield_now().await;
            }
        }
        Ok(())
    }

    async fn change_clusters(&self, io: &MetaIo, clusters: Range<u64>, goal: Goal) -> IoResult {
        let mut at = clusters.start;
        while at < clusters.end {
            at = self.run(io, |state| self.change_step(state, at..clusters.end, goal)).await?;
            if at < clusters.end {
                // A range has up to millions of clusters, and their tables may all be in memory.
                yield_now().await;
            }
        }
        Ok(())
    }

    /// Changes the first clusters of a range, up to the end of a slice. Returns where to go on.
    fn change_step(&self, state: &mut State, clusters: Range<u64>, goal: Goal) -> Step<u64> {
        let first = clusters.start;
        let shows_backing = self.geometry.has_backing && goal != Goal::Revealed;
        if !shows_backing {
            let end = self.end_of_missing_tables(&clusters)?;
            if end > first {
                return Ok(end);
            }
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

    /// Returns where the first table of a range begins, as far as one step looks. Nothing is mapped before.
    fn end_of_missing_tables(&self, clusters: &Range<u64>) -> Step<u64> {
        let mut at = clusters.start;
        for _ in 0..TABLES_A_STEP {
            if at >= clusters.end || self.table_or_complain(self.geometry.l1_index(at))?.is_some() {
                break;
            }
            at = self.geometry.table_end(at).min(clusters.end);
        }
        Ok(at)
    }

    /// Returns the new entry, or `None` if the old one will do.
    fn changed_entry(&self, old: Cluster, goal: Goal) -> Option<u64> {
        let has_zero_flag = self.geometry.version >= 3;
        // Without a layer below, an unallocated cluster reads as zeros.
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

#[cfg(test)]
mod tests {
    use crate::fixture::{self, CLUSTER};
    use crate::live::write::DIRTY_SLICES_MAX;
    use block::block_on;
    use std::future::{Future, poll_fn};
    use std::pin::pin;

    /// Counts how often a task is polled until it ends. Storage in memory never makes it wait.
    fn turns<T>(task: impl Future<Output = T>) -> (T, u64) {
        let (mut task, mut polls) = (pin!(task), 0);
        let value = block_on(poll_fn(|context| {
            polls += 1;
            task.as_mut().poll(context)
        }));
        (value, polls)
    }

    #[test]
    fn a_turn_of_a_discard_or_of_write_zeroes_changes_one_slice_and_gives_back_few_clusters() {
        let (clusters_a_slice, slices) = (CLUSTER / 8, 64);
        let size_bytes = slices * clusters_a_slice * CLUSTER;
        for discards in [false, true] {
            let (storage, io) = fixture::created(size_bytes);
            let qcow2 = block_on(fixture::opened(&storage, &io));
            block_on(fixture::fill(&qcow2, &io, 0..size_bytes));
            block_on(qcow2.flush(&io)).unwrap();
            let ((), polls) = turns(async {
                match discards {
                    true => qcow2.discard(&io, 0, size_bytes).await.unwrap(),
                    false => assert!(qcow2.write_zeroes(&io, 0, size_bytes, true).await.unwrap().by_writing.is_empty()),
                }
            });
            assert!(polls >= slices, "{polls} turns for {slices} slices");
            let (flushed, polls) = turns(qcow2.flush(&io));
            flushed.unwrap();
            assert!(polls >= slices * clusters_a_slice / 512, "{polls} turns for {slices} slices that were given back");
            block_on(qcow2.close(&io)).unwrap();
        }
    }

    #[test]
    fn only_so_many_tables_wait_for_a_flush_that_copies_all_of_them_at_once() {
        let size_bytes = (DIRTY_SLICES_MAX as u64 + 100) * (CLUSTER / 8) * CLUSTER;
        let (storage, io) = fixture::created(size_bytes);
        let qcow2 = block_on(fixture::opened(&storage, &io));
        let mut most = 0;
        for start in (0..size_bytes).step_by(1 << 20) {
            block_on(fixture::fill(&qcow2, &io, start..(start + (1 << 20)).min(size_bytes)));
            most = most.max(qcow2.inner.lock().book.dirty_count());
        }
        assert!(most > DIRTY_SLICES_MAX / 2 && most <= DIRTY_SLICES_MAX, "{most}");
        block_on(qcow2.close(&io)).unwrap();
    }
}
