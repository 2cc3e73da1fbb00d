//! The open image as its queues use it.

use crate::layout::bitmap::BitmapBits;
use crate::layout::entry::{BadEntry, Cluster};
use crate::layout::header::Header;
use crate::layout::snapshot::SnapshotName;
use crate::live::flush_queue::Barrier;
use crate::live::state::{Inner, Need, Stop};
use block::sync::Ordering;
use block::{CacheStats, CompressedExtent, Epochs, FileInfo, IoError, IoErrorKind, IoResult, Mapped, MetaIo, Result};
use memory::AlignedBuf;
use std::sync::Arc;

/// The limit of memory for L2 tables, as in qemu. Below it, the tables of the whole disk stay in memory.
const TABLE_CACHE_BYTES: u64 = 32 << 20;

/// An open qcow2 image, shared by all queues on all reactors.
#[derive(Debug)]
pub struct Qcow2 {
    pub(crate) inner: Arc<Inner>,
}

/// How to open an image.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The name in messages: the path.
    pub name: String,
    /// Whether nothing is ever written.
    pub read_only: bool,
}

impl OpenOptions {
    /// Makes options for an image that messages call `name`.
    #[must_use]
    pub fn new(name: impl Into<String>, read_only: bool) -> Self {
        Self { name: name.into(), read_only }
    }
}

/// Whether a write can go directly to the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// The first part of the range is allocated, and only this disk uses it.
    InPlace {
        /// First byte in the file.
        offset: u64,
        /// Length of that part; at least 1.
        length_bytes: u64,
    },
    /// Ask [`Qcow2::prepare_write`].
    Slow,
}

impl Qcow2 {
    /// Opens the image in `file`. Reads the header, the L1 table and, for writing, the refcount table. Writes nothing,
    /// unless it is opened for writing and its refcounts have to be repaired first (dirty bit).
    pub async fn open(io: &MetaIo, file: &FileInfo, options: OpenOptions) -> Result<Self> {
        Self::open_with_cache(io, file, options, TABLE_CACHE_BYTES).await
    }

    /// Opens the disk as it was when an internal snapshot was taken, read-only.
    pub async fn open_snapshot(
        io: &MetaIo,
        file: &FileInfo,
        options: OpenOptions,
        which: &SnapshotName,
    ) -> Result<Self> {
        let options = OpenOptions { read_only: true, ..options };
        Self::open_part(io, file, options, Some(which), TABLE_CACHE_BYTES).await
    }

    /// For tests: as [`Qcow2::open`], with another size of the cache for L2 tables.
    #[doc(hidden)]
    pub async fn open_with_cache(io: &MetaIo, file: &FileInfo, options: OpenOptions, cache: u64) -> Result<Self> {
        Self::open_part(io, file, options, None, cache).await
    }

    /// Returns the header as read at open.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.inner.header
    }

    /// Returns the size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.inner.geometry.size_bytes
    }

    /// The image is going to get a backing file: from now on a zeroed cluster gets the zero flag, even if nothing is mapped
    /// there. Call it before the image is shared; later calls change nothing.
    pub fn expect_backing(&mut self) {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.geometry.has_backing = true;
        }
    }

    /// Limits the memory for L2 tables. Call it before the image is shared and used; later calls change nothing. At
    /// least two slices of 4 KiB are kept. Refcount blocks may take another eighth of this size.
    pub fn set_cache_bytes(&mut self, l2_bytes: u64) {
        let Some(inner) = Arc::get_mut(&mut self.inner) else { return };
        inner.slices = inner.geometry.slice_cache(l2_bytes);
        inner.lock().refcounts.set_cache_bytes(l2_bytes / 8);
    }

    /// Returns the bytes of L2 tables for the whole disk.
    #[must_use]
    pub fn mapping_bytes(&self) -> u64 {
        let geometry = &self.inner.geometry;
        geometry.slices().saturating_mul(geometry.slice_bytes())
    }

    /// Returns the smallest part of the disk that mostly lies in one place, as a power of two.
    #[must_use]
    pub fn granule_bits(&self) -> u32 {
        self.inner.geometry.cluster_bits
    }

    /// Returns the state and counters of the cache of L2 tables.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.inner.slices.stats()
    }

    /// Returns how many slices of L2 tables were read from the file so far.
    #[must_use]
    pub fn slices_read(&self) -> u64 {
        self.inner.slices_read.load(Ordering::Relaxed)
    }

    /// Whether the file may have the dirty bit as long as the image is not closed. Whoever opens it for writing then repairs
    /// its refcounts first.
    #[must_use]
    pub fn may_be_dirty(&self) -> bool {
        self.inner.lazy
    }

    /// Returns the epochs. Each queue takes part in them; see [`Epochs`].
    #[must_use]
    pub fn epochs(&self) -> &Epochs {
        &self.inner.epochs
    }

    /// Looks up the first part of a range. Takes no lock and never waits. `None` if a table is not in memory, or the
    /// image is damaged there: ask [`Qcow2::resolve`].
    #[must_use]
    pub fn lookup(&self, offset: u64, length: u64) -> Option<Mapped> {
        self.inner.lookup(offset, length).ok().flatten()
    }

    /// As [`Qcow2::lookup`], but reads missing tables.
    pub async fn resolve(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult<Mapped> {
        let inner = &self.inner;
        inner.check_range(offset, length)?;
        loop {
            inner.refuse_if_stopped()?;
            match inner.lookup(offset, length) {
                Ok(Some(mapped)) => return Ok(mapped),
                Ok(None) => {
                    let cluster = inner.geometry.cluster_of(offset);
                    inner.table_or_complain(inner.geometry.l1_index(cluster))?;
                    inner.satisfy(io, Need::Slice(inner.geometry.slice_of(cluster))).await?;
                }
                Err(BadEntry) => {
                    // The two words of an extended entry may come from two moments that look alike. Under the mutex
                    // they come from one moment.
                    let again = {
                        let _state = inner.lock();
                        inner.lookup(offset, length)
                    };
                    again.map_err(|BadEntry| inner.bad_entry(inner.geometry.cluster_of(offset)))?;
                }
            }
        }
    }

    /// For a range that was just resolved and holds no data: returns the space that its first part still keeps in the
    /// file, and the length of that part.
    #[must_use]
    pub fn empty_space(&self, offset: u64, length: u64) -> (Option<u64>, u64) {
        let geometry = &self.inner.geometry;
        let cluster = geometry.cluster_of(offset);
        let in_cluster = geometry.offset_in_cluster(offset);
        if geometry.extended_l2 {
            return self.inner.empty_space_of_parts(offset, length);
        }
        let Some(view) = self.inner.slices.view(geometry.slice_of(cluster)) else { return (None, length) };
        let space_of = |index: usize| match Cluster::decode(view.get(index)?, geometry) {
            Ok(Cluster::ZeroAllocated { host, .. }) => Some(Some(host)),
            Ok(Cluster::Zero) => Some(None),
            _ => None,
        };
        let mut index = geometry.index_in_slice(cluster);
        let Some(first) = space_of(index) else { return (None, length) };
        let mut bytes = geometry.cluster_bytes().saturating_sub(in_cluster);
        while bytes < length {
            index = index.saturating_add(1);
            let follows = first.map(|host| host.saturating_add(in_cluster).saturating_add(bytes));
            if space_of(index) != Some(follows) {
                break;
            }
            bytes = bytes.saturating_add(geometry.cluster_bytes());
        }
        (first.map(|host| host.saturating_add(in_cluster)), bytes.min(length))
    }

    /// Looks up the first part of a write that may go directly to the file, and notes it as written. Takes no lock and
    /// never waits.
    #[must_use]
    pub fn lookup_overwrite(&self, offset: u64, length: u64) -> Overwrite {
        let place = self.inner.lookup_overwrite(offset, length).unwrap_or(Overwrite::Slow);
        if let Overwrite::InPlace { length_bytes, .. } = place {
            self.inner.mark_changed(offset, length_bytes);
        }
        place
    }

    /// Returns how many bytes of memory [`Qcow2::read_compressed`] takes.
    #[must_use]
    pub fn decompress_bytes(&self, extent: &CompressedExtent) -> u64 {
        self.inner.decompress_bytes(extent)
    }

    /// Reads and decompresses the whole cluster of `extent`.
    pub async fn read_compressed(&self, io: &MetaIo, extent: CompressedExtent) -> IoResult<AlignedBuf> {
        self.inner.read_compressed(io, extent).await
    }

    /// Makes every write that completed before this call durable, data and metadata. If no metadata have changed, it is
    /// exactly one flush of the file. Concurrent flushes share their work.
    pub async fn flush(&self, io: &MetaIo) -> IoResult {
        self.inner.flush(io).await
    }

    /// Flushes, writes the refcounts of freed clusters, and updates the persistent bitmaps in the file. A bitmap that
    /// cannot be written is lost. That is logged and is no error, unless refcounts that were changed for it cannot be
    /// written. No operation may be in flight. The image stays usable.
    pub async fn close(&self, io: &MetaIo) -> IoResult {
        self.inner.close(io).await
    }

    /// Returns the persistent bitmaps that note writes in memory, and how many bytes of the disk each marks as written.
    /// In the file they are in use, from the first write to [`Qcow2::close`].
    #[must_use]
    pub fn noting_bitmaps(&self) -> Vec<(String, u64)> {
        let size_bytes = self.size_bytes();
        self.inner.tracking.as_ref().map(|tracking| tracking.noting(size_bytes)).unwrap_or_default()
    }

    /// Returns the present bits of a persistent bitmap that notes writes in memory; `None` for others.
    #[must_use]
    pub fn noted_bits(&self, bitmap: &str) -> Option<BitmapBits> {
        self.inner.tracking.as_ref()?.bits_of(bitmap, self.size_bytes())
    }

    /// Cuts off preallocated space at the end of the file. For new images that are closed: in a damaged one, data may
    /// lie there without a refcount.
    pub async fn trim(&self, io: &MetaIo) -> IoResult {
        let inner = &self.inner;
        inner.extensions.over().await;
        let end = {
            let mut state = inner.lock();
            state.space.release_packed();
            if !state.space.settled || state.space.zeroed_end <= state.space.frontier || !inner.can_grow {
                return Ok(());
            }
            state.space.zeroed_end = state.space.frontier;
            state.space.blank_end = 0;
            inner.geometry.start_of(state.space.frontier)
        };
        io.set_length(end).await?;
        io.flush().await
    }

    /// For tests of the tests: leaves out a barrier, so that a simulated power cut has to find damage.
    #[doc(hidden)]
    pub fn skip_barrier_for_test(&self, barrier: Barrier) {
        self.inner.skipped_barriers.fetch_or(barrier.bit(), Ordering::Relaxed);
    }

    /// For tests: holds the mutex under which metadata change until the result is dropped.
    #[doc(hidden)]
    pub fn hold_lock_for_test(&self) -> impl Drop + '_ {
        self.inner.lock()
    }
}

impl Inner {
    #[inline]
    pub(crate) fn check_range(&self, offset: u64, length: u64) -> IoResult {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.geometry.size_bytes);
        if inside && length > 0 { Ok(()) } else { Err(IoError::new(IoErrorKind::OutOfRange)) }
    }

    #[inline]
    pub(crate) fn check_write(&self, offset: u64, length: u64) -> IoResult {
        self.check_range(offset, length)?;
        self.refuse_if_stopped()?;
        if self.read_only { Err(IoError::new(IoErrorKind::ReadOnly)) } else { Ok(()) }
    }

    pub(crate) fn bad_entry(&self, cluster: u64) -> IoError {
        let offset = self.geometry.start_of(cluster);
        self.corrupt(format_args!("the L2 entry for the disk's offset {offset:#x} is invalid"))
    }

    pub(crate) fn bad_entry_stop(&self, cluster: u64) -> Stop {
        Stop::Fail(self.bad_entry(cluster))
    }
}
