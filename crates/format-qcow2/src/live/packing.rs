//! Writes compressed clusters, packed without gaps into host clusters. A host cluster has one reference for each
//! compressed cluster that touches it (qcow2 specification, "Compressed Clusters Descriptor").
//!
//! Like any write, this has two steps: space is reserved; then the caller writes the data, and the entries are
//! published. The space behind the last compressed cluster stays open for the next one as long as its host cluster is
//! in use.

use crate::layout::entry::encode_compressed;
use crate::live::compress::Compressor;
use crate::live::free_runs::Run;
use crate::live::image::Qcow2;
use crate::live::state::{Freed, Inner, Need, State, Step, Stop};
use block::{Error, ErrorKind, IoError, IoErrorKind, IoResult, MetaIo, Result};
use std::ops::Range;
use std::sync::Arc;

/// The space that is set aside for compressed clusters at once: this part of the file, and at most this many clusters.
const KEPT_SHARE: u64 = 64;
const KEPT_CLUSTERS_MAX: u64 = 16;

/// A compressed guest cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedCluster {
    /// First byte of the disk, at a cluster boundary.
    pub guest_offset: u64,
    /// The compressed length: less than a cluster.
    pub length_bytes: u32,
}

/// The place of a compressed cluster.
#[derive(Debug, Clone, Copy)]
struct Placed {
    cluster: u64,
    raw: u64,
    first_host: u64,
    end_host: u64,
}

/// Space for compressed clusters, invisible until [`Qcow2::commit_compressed`]. Dropping it gives the space back.
#[derive(Debug)]
pub struct PackedAllocation {
    /// The first byte in the file of each cluster, in the order of the request.
    pub file_offsets: Vec<u64>,
    guest: Range<u64>,
    /// Clusters to be published, the last one first.
    unpublished: Vec<Placed>,
    inner: Arc<Inner>,
}

impl Drop for PackedAllocation {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.in_flight.remove(&self.guest.start);
        if !self.unpublished.is_empty() {
            let epoch = self.inner.epochs.retire();
            for placed in self.unpublished.drain(..) {
                state.retired.push(Freed {
                    clusters: placed.first_host..placed.end_host,
                    epoch,
                    table: None,
                    barred: false,
                });
            }
        }
        drop(state);
        self.inner.idle.wake_all();
    }
}

impl Qcow2 {
    /// Returns a compressor of the image's type. Each thread needs its own.
    pub fn compressor(&self) -> Result<Compressor> {
        if self.inner.geometry.data_file {
            let what =
                format!("'{}' keeps its data in an external data file, which holds none compressed", self.inner.name);
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        Compressor::new(self.inner.header.compression)
    }

    /// Reserves space for compressed clusters, which follow each other in the file if possible. The clusters are in the
    /// order of the disk, and are noted as written. Other writes to them must wait until they are committed.
    pub async fn prepare_compressed(&self, io: &MetaIo, clusters: &[PackedCluster]) -> IoResult<PackedAllocation> {
        let inner = &*self.inner;
        let (Some(first), Some(last)) = (clusters.first(), clusters.last()) else {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        };
        if inner.geometry.data_file {
            return Err(IoError::new(IoErrorKind::Unsupported));
        }
        for (index, cluster) in clusters.iter().enumerate() {
            inner.check_write(cluster.guest_offset, 1)?;
            let follows = index.checked_sub(1).and_then(|before| clusters.get(before));
            let in_order = follows.is_none_or(|before| before.guest_offset < cluster.guest_offset);
            let small = u64::from(cluster.length_bytes) < inner.geometry.cluster_bytes() && cluster.length_bytes > 0;
            if inner.geometry.offset_in_cluster(cluster.guest_offset) != 0 || !in_order || !small {
                return Err(IoError::new(IoErrorKind::OutOfRange));
            }
        }
        let guest = inner.geometry.cluster_of(first.guest_offset)
            ..inner.geometry.cluster_of(last.guest_offset).saturating_add(1);
        inner.make_ready(io).await?;
        for cluster in clusters {
            inner.begin_change(io, cluster.guest_offset, inner.geometry.cluster_bytes()).await?;
        }
        inner.run(io, |state| claim(state, &guest)).await?;
        let mut allocation = PackedAllocation {
            file_offsets: Vec::new(),
            guest,
            unpublished: Vec::new(),
            inner: Arc::clone(&self.inner),
        };
        for cluster in clusters {
            let length = u64::from(cluster.length_bytes);
            let (offset, mut placed) = inner.run(io, |state| inner.place(state, length)).await?;
            placed.cluster = inner.geometry.cluster_of(cluster.guest_offset);
            allocation.file_offsets.push(offset);
            allocation.unpublished.push(placed);
        }
        allocation.unpublished.reverse();
        Ok(allocation)
    }

    /// Publishes compressed clusters whose data have been written. The data need not be durable: a flush sees to that.
    pub async fn commit_compressed(&self, io: &MetaIo, mut allocation: PackedAllocation) -> IoResult {
        while let Some(placed) = allocation.unpublished.last().copied() {
            self.inner.run(io, |state| self.inner.publish(state, placed)).await?;
            allocation.unpublished.pop();
        }
        Ok(())
    }
}

fn claim(state: &mut State, guest: &Range<u64>) -> Step<()> {
    if let Some(busy) = state.overlapping(guest) {
        return Err(Stop::Need(Need::Idle(busy)));
    }
    state.in_flight.insert(guest.start, guest.end);
    Ok(())
}

impl Inner {
    /// Finds room for `length` bytes, less than a cluster, in the rest of the last host cluster and one more.
    fn place(&self, state: &mut State, length: u64) -> Step<(u64, Placed)> {
        let geometry = &self.geometry;
        let end = state.refcounts.packed_end();
        let host = geometry.cluster_of(end);
        let mut references = None;
        if geometry.offset_in_cluster(end) != 0 {
            let count = self.refcount_in_use(state, host)?;
            references = (count < state.refcounts.max()).then(|| count.saturating_add(1));
        }
        let room = match references {
            Some(_) => geometry.cluster_bytes().saturating_sub(geometry.offset_in_cluster(end)),
            None => 0,
        };
        let mut start = end;
        if length > room {
            let run = self.allocate_packed(state)?;
            // The open cluster's refcount block may have left memory meanwhile. Then the cluster is not open any more.
            let goes_on = run.first == host.saturating_add(1)
                && references.take().is_some_and(|count| state.refcounts.set(host, count).is_ok());
            if !goes_on {
                start = geometry.start_of(run.first);
            }
        } else if let Some(count) = references {
            state.refcounts.set(host, count).map_err(|_| IoError::EIO)?;
        }
        let next = start.saturating_add(length);
        state.refcounts.set_packed_end(next);
        let raw = encode_compressed(start, length, geometry).ok_or(IoError::new(IoErrorKind::NoSpace))?;
        let first_host = geometry.cluster_of(start);
        let end_host = geometry.clusters_for(next);
        Ok((start, Placed { cluster: 0, raw, first_host, end_host }))
    }

    /// Takes a host cluster from those set aside for compressed clusters. Other allocations come behind these, so
    /// compressed clusters keep following each other.
    fn allocate_packed(&self, state: &mut State) -> Step<Run> {
        if state.refcounts.is_crowded() {
            return Err(Stop::Need(Need::Flush));
        }
        loop {
            let first = state.space.for_packed.start;
            if first == state.space.for_packed.end {
                let want = state.space.frontier.checked_div(KEPT_SHARE).unwrap_or(0).clamp(1, KEPT_CLUSTERS_MAX);
                let run = self.find_space(state, want)?;
                state.space.for_packed = run.first..run.end();
                continue;
            }
            let is_free = match state.refcounts.get(first) {
                Ok(count) => count == 0,
                // Its refcount block may have left memory meanwhile.
                Err(absent) => return Err(self.stop_for(absent)),
            };
            let run = Run { first, count: 1, zeroed: false };
            if is_free {
                self.guard_run(state, run)?;
                self.count_one(state, run)?;
            }
            state.space.for_packed.start = first.saturating_add(1);
            if is_free {
                return Ok(run);
            }
        }
    }

    fn publish(&self, state: &mut State, placed: Placed) -> Step<()> {
        let slice = self.own_slice(state, placed.cluster)?;
        let old = self.cluster(slice, placed.cluster)?;
        self.guard_entry(state, &old)?;
        let old = old.host_clusters(&self.geometry);
        state.needs_order = true;
        self.set_entry(state, slice, placed.cluster, placed.raw);
        self.unlink(state, (!old.is_empty()).then_some(old));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, CLUSTER};
    use block::block_on;

    /// Packs a guest cluster into 100 bytes; returns where they lie.
    async fn pack(qcow2: &Qcow2, io: &MetaIo, guest: u64) -> u64 {
        let cluster = PackedCluster { guest_offset: guest * CLUSTER, length_bytes: 100 };
        let space = qcow2.prepare_compressed(io, &[cluster]).await.unwrap();
        let offset = space.file_offsets[0];
        qcow2.commit_compressed(io, space).await.unwrap();
        offset
    }

    async fn discard(qcow2: &Qcow2, io: &MetaIo, guest: u64) {
        qcow2.discard(io, guest * CLUSTER, CLUSTER).await.unwrap();
        // The first flush makes durable that nothing refers to it; the second frees the space.
        qcow2.flush(io).await.unwrap();
        qcow2.flush(io).await.unwrap();
    }

    #[test]
    fn nothing_is_packed_into_a_host_cluster_that_was_freed_and_is_somebody_elses() {
        let (storage, io) = fixture::created(64 << 10);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            let host = pack(&qcow2, &io, 0).await / CLUSTER;
            discard(&qcow2, &io, 0).await;
            let count = || qcow2.inner.lock().refcounts.get(host);
            assert_eq!(count(), Ok(0), "it was not freed, so this shows nothing");
            let mut guest = 10;
            while count() == Ok(0) {
                fixture::fill(&qcow2, &io, guest * CLUSTER..(guest + 1) * CLUSTER).await;
                guest += 1;
            }
            let packed = pack(&qcow2, &io, 5).await;
            assert_ne!(packed / CLUSTER, host, "two owners share a cluster");
            assert_eq!(count(), Ok(1));
        });
    }

    #[test]
    fn packing_goes_on_elsewhere_once_the_open_host_cluster_was_freed() {
        let (storage, io) = fixture::created(64 << 10);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            pack(&qcow2, &io, 0).await;
            discard(&qcow2, &io, 0).await;
            let packed = pack(&qcow2, &io, 1).await;
            assert_eq!(packed % CLUSTER, 0, "in a cluster of its own");
            assert_eq!(qcow2.inner.lock().refcounts.get(packed / CLUSTER), Ok(1));
            qcow2.close(&io).await.unwrap();
        });
        let report = testkit::qcow2_check(&storage.bytes(fixture::NAME)).unwrap();
        assert_eq!((report.sound(), report.leaked_clusters), (Ok(()), 0));
    }

    #[test]
    fn packing_goes_on_in_the_open_host_cluster_though_another_cluster_is_freed() {
        let (storage, io) = fixture::created(64 << 10);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 20 * CLUSTER..22 * CLUSTER).await;
            let first = pack(&qcow2, &io, 0).await;
            discard(&qcow2, &io, 20).await;
            assert_eq!(pack(&qcow2, &io, 1).await, first + 100);
        });
    }
}
