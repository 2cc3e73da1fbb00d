//! Everything that depends on a layer's format: where the guest's bytes lie, how space is made, how it becomes durable.
//!
//! Nothing else in this crate asks for the format of an open layer. A new format gets a variant of [`Mapping`] and an
//! arm in the methods of this module. Dispatch is a match, so that the fast path has no virtual call here.
//!
//! * `lookup`: where the guest's bytes lie.
//! * `write`: how space is made, and how what was written becomes durable.
//! * `stage`: pages that the layer takes over without a request.
//! * `closed`: changes of a layer that is closed and that nobody uses.
//! * `new_layer`: layers that are made on top of an open one.

use crate::guess::Format;
use block::{CacheStats, Epochs, Error, ErrorKind, File, FileInfo, MetaIo, Result, block_on};
use format_qcow2::{Barrier, BitmapBits, Header, OpenOptions, Qcow2, SnapshotName};
use format_raw::Raw;
use format_scratch::Scratch;

mod allocation;
mod closed;
mod lookup;
mod new_layer;
mod stage;
mod write;

pub(crate) use allocation::{Allocation, Prepared};
pub(crate) use block::Fill;
pub(crate) use closed::raw_space;
pub(crate) use format_qcow2::{Overwrite, Plain};
pub(crate) use format_scratch::Staged;
pub(crate) use new_layer::{KEPT_HEADER_MAX_BYTES, KeptHeader, make_kept, make_overlay};

/// Maps a layer's guest bytes to its file.
pub(crate) enum Mapping {
    Raw(Raw),
    Qcow2(Qcow2),
    /// A temporary scratch overlay is made directly over open layers (`open/temporary.rs`). A kept one is opened as an
    /// image.
    Scratch(Scratch),
}

/// Opening, and properties of the layer.
impl Mapping {
    /// Opens the mapping of the image `name` in `file`, whose length is in `info`. Blocks.
    pub(crate) fn open(
        name: String,
        file: &dyn File,
        info: &FileInfo,
        format: Format,
        read_only: bool,
        snapshot: Option<&SnapshotName>,
    ) -> Result<Self> {
        match format {
            Format::Raw if snapshot.is_some() => {
                Err(Error::new(ErrorKind::BadOption, format!("'{name}': a raw image has no snapshots")))
            }
            Format::Raw => Ok(Self::Raw(Raw::new(info.length_bytes))),
            Format::Qcow2 => {
                let io = MetaIo::of_file(file)?;
                let options = OpenOptions::new(name, read_only);
                let qcow2 = match snapshot {
                    None => block_on(Qcow2::open(&io, info, options))?,
                    Some(which) => block_on(Qcow2::open_snapshot(&io, info, options, which))?,
                };
                Ok(Self::Qcow2(qcow2))
            }
            Format::Scratch if snapshot.is_some() => {
                Err(Error::new(ErrorKind::BadOption, format!("'{name}': a scratch overlay has no snapshots")))
            }
            Format::Scratch => {
                let io = MetaIo::of_file(file)?;
                let opened = block_on(Scratch::open_kept(&io, &name, info.length_bytes, read_only));
                Ok(Self::Scratch(opened?))
            }
        }
    }

    pub(crate) fn format(&self) -> Format {
        match self {
            Self::Raw(_) => Format::Raw,
            Self::Qcow2(_) => Format::Qcow2,
            Self::Scratch(_) => Format::Scratch,
        }
    }

    /// Returns the size of the layer's disk.
    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size_bytes(),
            Self::Qcow2(qcow2) => qcow2.size_bytes(),
            Self::Scratch(scratch) => scratch.size_bytes(),
        }
    }

    /// Returns the image if it is qcow2, for compaction, which only that format has.
    pub(crate) fn qcow2(&self) -> Option<&Qcow2> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2),
        }
    }

    pub(crate) fn header(&self) -> Option<&Header> {
        self.qcow2().map(Qcow2::header)
    }

    /// Returns the header of a kept scratch overlay.
    pub(crate) fn kept_header(&self) -> Option<&format_scratch::Header> {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => None,
            Self::Scratch(scratch) => scratch.header(),
        }
    }

    /// Returns the name of the external data file, if there is one.
    pub(crate) fn data_file(&self) -> Option<&str> {
        if let Some(header) = self.kept_header() {
            return Some(&header.data_file);
        }
        let header = self.header().filter(|header| header.has_data_file())?;
        header.data_file.as_deref()
    }

    /// Returns the name of the layer below, and its format if the image records it.
    pub(crate) fn backing(&self) -> Option<(&str, Option<&str>)> {
        if let Some(header) = self.kept_header() {
            return Some((&header.backing_file, header.backing_format.as_deref()));
        }
        let header = self.header()?;
        Some((header.backing_file.as_deref()?, header.backing_format.as_deref()))
    }

    /// Returns the unit of allocation, if the format has one.
    pub(crate) fn cluster_bytes(&self) -> Option<u32> {
        match self {
            Self::Scratch(_) => Some(format_scratch::PAGE_BYTES as u32),
            Self::Raw(_) | Self::Qcow2(_) => {
                self.header().map(|header| 1u32.checked_shl(header.cluster_bits).unwrap_or(0))
            }
        }
    }

    /// Whether data are found through tables, which are written separately.
    #[inline]
    pub(crate) fn has_tables(&self) -> bool {
        match self {
            Self::Raw(_) => false,
            Self::Qcow2(_) | Self::Scratch(_) => true,
        }
    }

    /// Whether a cluster can be marked as zero, hiding the layers below without data of its own.
    pub(crate) fn can_say_zero(&self) -> bool {
        self.header().is_none_or(|header| header.version >= 3)
    }

    /// The image is going to get a backing file: zeroed clusters say that they are zero from now on.
    pub(crate) fn expect_backing(&mut self) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.expect_backing();
        }
    }

    /// Whether many clusters take no space in the file, because only their tables were made in advance.
    pub(crate) async fn has_empty_clusters(&self, io: &MetaIo, file: &dyn File) -> bool {
        let Self::Qcow2(qcow2) = self else { return false };
        match (file.length_bytes(), file.allocated_bytes()) {
            (Ok(length), Ok(Some(allocated))) => qcow2.has_empty_clusters(io, length, allocated).await,
            _ => false,
        }
    }

    /// Returns the end of the data in the data file, if all up to there was written: a shorter file has lost some.
    pub(crate) fn data_end(&self) -> Option<u64> {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => None,
            Self::Scratch(scratch) => Some(scratch.used_bytes()),
        }
    }

    /// Whether this layer can be emptied, so that the layer below shows.
    pub(crate) fn can_reveal(&self) -> bool {
        self.qcow2().is_some() || self.kept_header().is_some()
    }

    /// Whether what its header leads to can be changed while the layer is closed: its backing file, its internal snapshots.
    pub(crate) fn can_be_edited(&self) -> bool {
        self.qcow2().is_some()
    }

    /// Whether somebody else who opens the file for writing may repair it first. What is in memory then fits it no more.
    pub(crate) fn may_be_repaired(&self) -> bool {
        self.qcow2().is_some_and(Qcow2::may_be_dirty)
    }

    /// Returns the epochs in which queues take part, if the format reuses freed space.
    #[inline]
    pub(crate) fn epochs(&self) -> Option<&Epochs> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.epochs()),
            Self::Scratch(scratch) => Some(scratch.epochs()),
        }
    }
}

/// Dirty bitmaps of a layer in use.
impl Mapping {
    /// Whether its bitmaps are in memory only: its format has no room for them.
    pub(crate) fn has_bitmaps_in_memory(&self) -> bool {
        match self {
            Self::Raw(_) => true,
            Self::Qcow2(_) | Self::Scratch(_) => false,
        }
    }

    /// Returns the present bits of a persistent bitmap that notes writes in memory; `None` for others.
    pub(crate) fn noted_bits(&self, bitmap: &str) -> Option<BitmapBits> {
        self.qcow2()?.noted_bits(bitmap)
    }

    /// Returns the persistent bitmaps that note writes in memory, each with the bytes that it marks.
    pub(crate) fn noting_bitmaps(&self) -> Vec<(String, u64)> {
        self.qcow2().map(Qcow2::noting_bitmaps).unwrap_or_default()
    }
}

/// Memory for tables.
impl Mapping {
    /// Returns the bytes of the mapping tables of the whole disk.
    pub(crate) fn mapping_bytes(&self) -> u64 {
        self.qcow2().map_or(0, Qcow2::mapping_bytes)
    }

    /// Returns the smallest part that mostly lies in one place, as a power of two, if there are tables.
    pub(crate) fn granule_bits(&self) -> Option<u32> {
        self.qcow2().map(Qcow2::granule_bits)
    }

    /// Limits the memory for tables. Call it before the mapping is used.
    pub(crate) fn set_cache_bytes(&mut self, bytes: u64) {
        match self {
            Self::Raw(_) | Self::Scratch(_) => {}
            Self::Qcow2(qcow2) => qcow2.set_cache_bytes(bytes),
        }
    }

    /// Returns the state and counters of the cache of tables, if there are tables.
    pub(crate) fn cache_stats(&self) -> Option<CacheStats> {
        self.qcow2().map(Qcow2::cache_stats)
    }

    /// Returns how many clusters were freed, and count as used until a flush has made that durable.
    pub(crate) fn unfreed_clusters(&self) -> u64 {
        self.qcow2().map_or(0, Qcow2::unfreed_clusters)
    }

    /// Returns how many slices of tables were read so far.
    pub(crate) fn slices_read(&self) -> u64 {
        self.qcow2().map_or(0, Qcow2::slices_read)
    }
}

/// For tests of the tests.
impl Mapping {
    /// Leaves out an ordering barrier.
    pub(crate) fn skip_barrier(&self, barrier: Barrier) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.skip_barrier_for_test(barrier);
        }
    }

    /// Holds the format's lock until the returned value is dropped.
    pub(crate) fn hold_lock(&self) -> Option<impl Drop + '_> {
        self.qcow2().map(Qcow2::hold_lock_for_test)
    }
}
