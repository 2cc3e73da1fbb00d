//! The image as others see it: what its queues ask.

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

/// The L2 tables of a whole disk are kept in memory as long as they fit this (qemu's default).
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
    /// For messages: the path.
    pub name: String,
    /// Nothing is ever written.
    pub read_only: bool,
}

impl OpenOptions {
    /// An image that messages call `name`.
    #[must_use]
    pub fn new(name: impl Into<String>, read_only: bool) -> Self {
        Self { name: name.into(), read_only }
    }
}

/// Whether a write can go straight to the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// The first part of the range is allocated, and belongs to nobody else.
    InPlace {
        /// First byte in the file.
        offset: u64,
        /// How many bytes, at least 1.
        length_bytes: u64,
    },
    /// Ask [`Qcow2::prepare_write`].
    Slow,
}

impl Qcow2 {
    /// Opens the image in `file`. Reads the header, the L1 table and, for writing, the refcount table; writes nothing,
    /// unless the image is opened for writing and its refcounts have to be repaired first (dirty bit).
    pub async fn open(io: &MetaIo, file: &FileInfo, options: OpenOptions) -> Result<Self> {
        Self::open_with_cache(io, file, options, TABLE_CACHE_BYTES).await
    }

    /// Opens the disk as it was when an internal snapshot was taken, to read it.
    pub async fn open_snapshot(
        io: &MetaIo,
        file: &FileInfo,
        options: OpenOptions,
        which: &SnapshotName,
    ) -> Result<Self> {
        let options = OpenOptions { read_only: true, ..options };
        Self::open_part(io, file, options, Some(which), TABLE_CACHE_BYTES).await
    }

    /// As [`Qcow2::open`], with a cache for L2 tables of another size: for tests.
    #[doc(hidden)]
    pub async fn open_with_cache(io: &MetaIo, file: &FileInfo, options: OpenOptions, cache: u64) -> Result<Self> {
        Self::open_part(io, file, options, None, cache).await
    }

    /// What the header said at open.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.inner.header
    }

    /// Size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.inner.geometry.size_bytes
    }

    /// Bounds the memory for L2 tables. Call it before the image is shared and used; later calls change nothing. Slices
    /// of 4 KiB are kept, at least two. Refcount blocks may take an eighth of this size on top.
    pub fn set_cache_bytes(&mut self, l2_bytes: u64) {
        let Some(inner) = Arc::get_mut(&mut self.inner) else { return };
        inner.slices = inner.geometry.slice_cache(l2_bytes);
        inner.lock().refcounts.set_cache_bytes(l2_bytes / 8);
    }

    /// The bytes of L2 tables for the whole disk.
    #[must_use]
    pub fn mapping_bytes(&self) -> u64 {
        let geometry = &self.inner.geometry;
        geometry.slices().saturating_mul(geometry.slice_bytes())
    }

    /// The smallest part of the disk that mostly lies in one place, as a power of two.
    #[must_use]
    pub fn granule_bits(&self) -> u32 {
        self.inner.geometry.cluster_bits
    }

    /// What the cache of L2 tables holds and did.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.inner.slices.stats()
    }

    /// How many slices of L2 tables were read from the file so far.
    #[must_use]
    pub fn slices_read(&self) -> u64 {
        self.inner.slices_read.load(Ordering::Relaxed)
    }

    /// Each queue takes part in these; see [`Epochs`].
    #[must_use]
    pub fn epochs(&self) -> &Epochs {
        &self.inner.epochs
    }

    /// Where the first part of a range lies. Takes no lock and never waits. `None`: a table is not in memory (or the
    /// image is damaged there), ask [`Qcow2::resolve`].
    #[must_use]
    pub fn lookup(&self, offset: u64, length: u64) -> Option<Mapped> {
        self.inner.lookup(offset, length).ok().flatten()
    }

    /// As [`Qcow2::lookup`], loading what is missing.
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
                    // they come from one.
                    let again = {
                        let _state = inner.lock();
                        inner.lookup(offset, length)
                    };
                    again.map_err(|BadEntry| inner.bad_entry(inner.geometry.cluster_of(offset)))?;
                }
            }
        }
    }

    /// For a range that was just resolved and holds no data here: the space in the file that its first part keeps all
    /// the same, and the length of that part.
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

    /// Whether the first part of a write may go straight to the file; that part is noted as written. Takes no lock and
    /// never waits.
    #[must_use]
    pub fn lookup_overwrite(&self, offset: u64, length: u64) -> Overwrite {
        let place = self.inner.lookup_overwrite(offset, length).unwrap_or(Overwrite::Slow);
        if let Overwrite::InPlace { length_bytes, .. } = place {
            self.inner.mark_changed(offset, length_bytes);
        }
        place
    }

    /// How much memory [`Qcow2::read_compressed`] takes, in bytes.
    #[must_use]
    pub fn decompress_bytes(&self, extent: &CompressedExtent) -> u64 {
        self.inner.decompress_bytes(extent)
    }

    /// The whole cluster that `extent` lies in, decompressed.
    pub async fn read_compressed(&self, io: &MetaIo, extent: CompressedExtent) -> IoResult<AlignedBuf> {
        self.inner.read_compressed(io, extent).await
    }

    /// Makes every write that completed before this call durable, data and metadata. Without changes to the metadata it
    /// is exactly one flush of the file. Flushes at the same time share their work.
    pub async fn flush(&self, io: &MetaIo) -> IoResult {
        self.inner.flush(io).await
    }

    /// Flushes, writes the refcounts of what was freed, and brings the persistent bitmaps in the file up to date. A
    /// bitmap that cannot be written is lost. That is logged and is no error, unless refcounts that were changed for it
    /// cannot be written. No operation may be in flight. The image stays usable.
    pub async fn close(&self, io: &MetaIo) -> IoResult {
        self.inner.close(io).await
    }

    /// The persistent bitmaps that note writes in memory, and how many bytes of the disk each says were written. The file
    /// says of these that they are in use, from the first write to [`Qcow2::close`].
    #[must_use]
    pub fn noting_bitmaps(&self) -> Vec<(String, u64)> {
        let size_bytes = self.size_bytes();
        self.inner.tracking.as_ref().map(|tracking| tracking.noting(size_bytes)).unwrap_or_default()
    }

    /// The bits of a persistent bitmap that notes writes in memory, as they are now; nothing of others.
    #[must_use]
    pub fn noted_bits(&self, bitmap: &str) -> Option<BitmapBits> {
        self.inner.tracking.as_ref()?.bits_of(bitmap, self.size_bytes())
    }

    /// Cuts space made in advance off the end of the file. For images that were made new and are closed: in a damaged one,
    /// data may lie there that its refcounts deny.
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

    /// For tests of the tests: leaves a barrier out, so that a simulated power cut must find damage.
    #[doc(hidden)]
    pub fn skip_barrier_for_test(&self, barrier: Barrier) {
        self.inner.skipped_barriers.fetch_or(barrier.bit(), Ordering::Relaxed);
    }

    /// For tests: the mutex under which metadata change, until what this returns is dropped.
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
