//! Looks up ranges in the tables in memory, without a lock and without waiting.

use crate::layout::entry::{BadEntry, COPIED, Cluster, Table, data_only};
use crate::live::flush_queue::Barrier;
use crate::live::image::{Overwrite, Qcow2};
use crate::live::state::Inner;
use block::sync::Ordering;
use block::{CompressedExtent, Extent, Mapped};

/// The most steps of one lookup: a missing table is one step, a slice with all its entries several. A guest may ask for
/// a gigabyte of tiny clusters.
const LOOKUP_STEPS: u32 = 4096;
const SLICE_STEPS: u32 = 64;

/// The result of most lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plain {
    /// The whole range lies in one data cluster, from this offset in the file.
    Data(u64),
    /// The whole range is left to the layer below.
    Unallocated,
}

impl Qcow2 {
    /// Answers most requests, in few steps, for a range in one cluster. `None` if [`Qcow2::lookup`] has to be asked.
    #[inline]
    #[must_use]
    pub fn lookup_plain(&self, offset: u64, length: u64) -> Option<Plain> {
        let (raw, in_cluster) = self.inner.plain_entry(offset, length)?;
        if raw == 0 {
            return Some(Plain::Unallocated);
        }
        Some(Plain::Data(data_only(raw, self.inner.more_than_data)?.saturating_add(in_cluster)))
    }

    /// Answers most writes, in few steps: where a range in one data cluster may be overwritten. The range is noted as
    /// written. `None` if [`Qcow2::lookup_overwrite`] has to be asked.
    #[inline]
    #[must_use]
    pub fn begin_overwrite(&self, offset: u64, length: u64) -> Option<u64> {
        let inner = &*self.inner;
        if !inner.header_ready.load(Ordering::Acquire) || inner.read_only {
            return None;
        }
        let (raw, in_cluster) = inner.plain_entry(offset, length)?;
        let host = data_only(raw, inner.more_than_data)?;
        let cluster = inner.geometry.cluster_of(offset);
        let shared = raw & COPIED == 0 || inner.own_table(cluster).is_none();
        if shared || inner.may_hold_table(host) {
            return None;
        }
        inner.mark_changed(offset, length);
        Some(host.saturating_add(in_cluster))
    }

    /// Makes nothing count as durable before the next flush.
    pub fn flush_with_next_write(&self) {
        self.inner.mapping_changes();
    }

    /// Whether every mapping that was looked up before this call is durable. If so, an overwrite there is durable as
    /// soon as its data are.
    #[inline]
    #[must_use]
    pub fn is_mapping_durable(&self) -> bool {
        // A writer clears the flag before it changes an entry, and the entry was loaded with Acquire. So a reader of
        // the new entry sees the flag cleared, or set again by a flush that made the entry durable.
        self.inner.mapping_is_durable.load(Ordering::Acquire) || self.inner.skips(Barrier::Overwrite)
    }
}

impl Inner {
    /// Clears the flag before an entry changes. A reader of the new entry then also sees that it is not durable yet.
    pub(crate) fn mapping_changes(&self) {
        self.mapping_is_durable.store(false, Ordering::Relaxed);
    }

    /// Looks up the first part of a range. `Ok(None)` if a table is not in memory. Neighbouring parts are joined.
    pub(crate) fn lookup(&self, offset: u64, length: u64) -> Result<Option<Mapped>, BadEntry> {
        if self.check_range(offset, length).is_err() || self.is_stopped() {
            return Ok(None);
        }
        let Some(mut mapped) = self.lookup_in_slice(offset, length)? else { return Ok(None) };
        let mut steps_left = LOOKUP_STEPS;
        while mapped.length_bytes < length && steps_left > 0 {
            let next = offset.saturating_add(mapped.length_bytes);
            let left = length.saturating_sub(mapped.length_bytes);
            let has_slice = self.slices.view(self.geometry.slice_of(self.geometry.cluster_of(next))).is_some();
            steps_left = steps_left.saturating_sub(if has_slice { SLICE_STEPS } else { 1 });
            match self.lookup_in_slice(next, left) {
                Ok(Some(more)) if follows(&mapped, &more) => {
                    mapped.length_bytes = mapped.length_bytes.saturating_add(more.length_bytes);
                }
                // A lookup of the rest will report what is wrong there.
                _ => break,
            }
        }
        Ok(Some(mapped))
    }

    /// Looks up the first part of a range that lies in one place and in one slice.
    #[inline]
    fn lookup_in_slice(&self, offset: u64, length: u64) -> Result<Option<Mapped>, BadEntry> {
        let geometry = &self.geometry;
        let cluster = geometry.cluster_of(offset);
        let in_cluster = geometry.offset_in_cluster(offset);
        let Some(view) = self.slices.view(geometry.slice_of(cluster)) else {
            let table = self.table(geometry.l1_index(cluster))?;
            let covered = geometry.start_of(geometry.table_end(cluster)).saturating_sub(offset);
            return Ok(table
                .is_none()
                .then_some(Mapped { extent: Extent::Backing, length_bytes: covered.min(length) }));
        };
        if geometry.extended_l2 {
            return self.lookup_parts(offset, length);
        }
        let index = geometry.index_in_slice(cluster);
        let Some(raw) = view.get(index) else { return Ok(None) };
        let first = Cluster::decode(raw, geometry);
        let mut bytes = geometry.cluster_bytes().saturating_sub(in_cluster);
        let mut next = index;
        while bytes < length {
            next = next.saturating_add(1);
            let Some(more) = view.get(next).map(|raw| Cluster::decode(raw, geometry)) else { break };
            if !continues(first, more, bytes.saturating_add(in_cluster)) {
                break;
            }
            bytes = bytes.saturating_add(geometry.cluster_bytes());
        }
        if !view.is_valid() {
            return Ok(None);
        }
        let extent = match first? {
            Cluster::Unallocated => Extent::Backing,
            Cluster::Zero | Cluster::ZeroAllocated { .. } => Extent::Zero,
            Cluster::Data { host, .. } => {
                let place = host.saturating_add(in_cluster);
                if geometry.is_misplaced(place, offset) {
                    return Err(BadEntry);
                }
                Extent::Data { file: u8::from(geometry.data_file), offset: place }
            }
            Cluster::Compressed { offset, length_bytes } => {
                Extent::Compressed(CompressedExtent { offset, length_bytes, skip_bytes: in_cluster as u32 })
            }
        };
        Ok(Some(Mapped { extent, length_bytes: bytes.min(length) }))
    }

    /// Whether a table may lie where an L2 entry refers to data. In an external data file there are no tables.
    #[inline]
    pub(crate) fn may_hold_table(&self, host: u64) -> bool {
        !self.geometry.data_file && self.table_bits.may_hold_table(self.geometry.cluster_of(host))
    }

    /// Returns the entry of the cluster that holds the range, and the range's offset in it. The entry is zero if there
    /// is no table. `None` if one look at an entry is not enough.
    #[inline]
    fn plain_entry(&self, offset: u64, length: u64) -> Option<(u64, u64)> {
        let geometry = &self.geometry;
        let in_cluster = geometry.offset_in_cluster(offset);
        let inside = in_cluster.saturating_add(length) <= geometry.cluster_bytes();
        let has_plain = self.more_than_data != u64::MAX;
        if !inside || !has_plain || self.check_range(offset, length).is_err() || self.is_stopped() {
            return None;
        }
        let cluster = geometry.cluster_of(offset);
        let Some(view) = self.slices.view(geometry.slice_of(cluster)) else {
            return matches!(self.table(geometry.l1_index(cluster)), Ok(None)).then_some((0, in_cluster));
        };
        let raw = view.get(geometry.index_in_slice(cluster))?;
        view.is_valid().then_some((raw, in_cluster))
    }

    /// Returns the table of a cluster, if only this disk uses it. If a snapshot shares the table, its entries do not
    /// say what only this disk uses.
    #[inline]
    fn own_table(&self, cluster: u64) -> Option<Table> {
        self.table(self.geometry.l1_index(cluster)).ok().flatten().filter(|table| table.copied)
    }

    pub(crate) fn lookup_overwrite(&self, offset: u64, length: u64) -> Option<Overwrite> {
        let geometry = &self.geometry;
        if !self.header_ready.load(Ordering::Acquire) || self.check_write(offset, length).is_err() {
            return None;
        }
        if geometry.extended_l2 {
            return self.overwrite_parts(offset, length);
        }
        let cluster = geometry.cluster_of(offset);
        let in_cluster = geometry.offset_in_cluster(offset);
        self.own_table(cluster)?;
        let view = self.slices.view(geometry.slice_of(cluster))?;
        let index = geometry.index_in_slice(cluster);
        let first = Cluster::decode(view.get(index)?, geometry).ok()?;
        let Cluster::Data { host, copied: true } = first else { return None };
        if self.may_hold_table(host) || geometry.is_misplaced(host, geometry.start_of(cluster)) {
            return None;
        }
        let mut bytes = geometry.cluster_bytes().saturating_sub(in_cluster);
        let mut next = index;
        while bytes < length {
            next = next.saturating_add(1);
            let Some(more) = view.get(next).map(|raw| Cluster::decode(raw, geometry)) else { break };
            let same = matches!(more, Ok(Cluster::Data { host, copied: true }) if
                !self.may_hold_table(host));
            if !same || !continues(Ok(first), more, bytes.saturating_add(in_cluster)) {
                break;
            }
            bytes = bytes.saturating_add(geometry.cluster_bytes());
        }
        view.is_valid()
            .then_some(Overwrite::InPlace { offset: host.saturating_add(in_cluster), length_bytes: bytes.min(length) })
    }
}

/// Whether `more` continues `first`, `distance` bytes after its start.
fn continues(first: Result<Cluster, BadEntry>, more: Result<Cluster, BadEntry>, distance: u64) -> bool {
    match (first, more) {
        (Ok(Cluster::Unallocated), Ok(Cluster::Unallocated)) => true,
        (Ok(Cluster::Zero | Cluster::ZeroAllocated { .. }), Ok(Cluster::Zero | Cluster::ZeroAllocated { .. })) => true,
        (Ok(Cluster::Data { host, .. }), Ok(Cluster::Data { host: next, .. })) => host.saturating_add(distance) == next,
        _ => false,
    }
}

/// Whether `more` continues `mapped`.
fn follows(mapped: &Mapped, more: &Mapped) -> bool {
    match (mapped.extent, more.extent) {
        (Extent::Zero, Extent::Zero) | (Extent::Backing, Extent::Backing) => true,
        (Extent::Data { offset, .. }, Extent::Data { offset: next, .. }) => {
            offset.saturating_add(mapped.length_bytes) == next
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture;
    use block::{Extent, block_on};
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn lookups_for_reads_and_overwrites_of_what_is_allocated_wait_for_no_lock() {
        let (storage, io) = fixture::created(64 << 10);
        let qcow2 = block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 0..64 << 10).await;
            qcow2.flush(&io).await.unwrap();
            qcow2
        });
        let (sender, answers) = mpsc::channel();
        let inner = &qcow2.inner;
        std::thread::scope(|scope| {
            let held = inner.lock();
            scope.spawn(|| {
                let plain = qcow2.lookup_plain(1024, 512).is_some() && qcow2.begin_overwrite(1024, 512).is_some();
                let whole = inner.lookup(512, 4096).unwrap().is_some() && inner.lookup_overwrite(512, 4096).is_some();
                sender.send((plain, whole)).unwrap();
            });
            // The lock is released before the thread is waited for, even if this fails.
            let answer = answers.recv_timeout(Duration::from_secs(20));
            drop(held);
            assert_eq!(answer.expect("a lookup waits for the image's lock"), (true, true));
        });
        block_on(qcow2.close(&io)).unwrap();
    }

    #[test]
    fn one_lookup_answers_for_neighbours_in_several_tables() {
        let size_bytes = 256 << 10;
        let (storage, io) = fixture::created(size_bytes);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            let seen = |offset: u64| {
                let mapped = qcow2.inner.lookup(offset, size_bytes - offset).unwrap().unwrap();
                (mapped.extent, mapped.length_bytes)
            };
            assert_eq!(seen(512), (Extent::Backing, size_bytes - 512), "there are no tables");
            fixture::fill(&qcow2, &io, 0..size_bytes / 2).await;
            qcow2.write_zeroes(&io, 0, size_bytes / 2, true).await.unwrap();
            assert_eq!(seen(512), (Extent::Zero, size_bytes / 2 - 512));
            assert_eq!(seen(size_bytes / 2), (Extent::Backing, size_bytes / 2));
            qcow2.close(&io).await.unwrap();
        });
    }
}
