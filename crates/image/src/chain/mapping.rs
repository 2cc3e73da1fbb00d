//! Everything that depends on a layer's format: where the guest's bytes lie, how space is made, how it becomes durable.
//!
//! Nothing else in this crate asks for the format of an open layer. A new format gets a variant of [`Mapping`] and an
//! arm in the methods below. Dispatch is a match, so that the fast path has no virtual call here.

use crate::guess::Format;
use block::{
    CacheStats, CompressedExtent, Epochs, Error, ErrorKind, Extent, File, FileInfo, IoError, IoResult, Mapped, MetaIo,
    PastEnd, Result, block_on,
};
use format_qcow2::{
    AmendOptions, Barrier, Compressor, EditWatch, GrowBy, Header, OpenOptions, PackedAllocation, PackedCluster, Qcow2,
    ResizeOptions, Snapshot, SnapshotName,
};
use format_raw::{NewSpace, Raw};
use format_scratch::Scratch;
use memory::AlignedBuf;
use std::ops::Range;

pub(crate) use super::allocation::{Allocation, Prepared};
pub(crate) use block::Fill;
pub(crate) use format_qcow2::{Overwrite, Plain};

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

    /// Returns the image if it is qcow2, for what only that format has: its header, and changes while nobody uses it.
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

    /// Reads the image's internal snapshots.
    pub(crate) async fn snapshots(&self, io: &MetaIo, name: &str) -> Result<Vec<Snapshot>> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(Vec::new()),
            Self::Qcow2(qcow2) => format_qcow2::snapshots(io, qcow2.header(), name).await,
        }
    }

    /// Whether this layer can be emptied, so that the layer below shows.
    pub(crate) fn can_reveal(&self) -> bool {
        self.qcow2().is_some() || self.kept_header().is_some()
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

/// Lookups.
impl Mapping {
    /// Returns where the first part of the range lies; `None` if a table has to be read. The range lies inside the
    /// layer.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Mapped> {
        match self {
            Self::Raw(raw) => Some(raw.lookup(offset, length_bytes)),
            Self::Qcow2(qcow2) => qcow2.lookup(offset, length_bytes),
            Self::Scratch(scratch) => scratch.lookup(offset, length_bytes),
        }
    }

    /// Answers most lookups, in few steps. `None` if [`Mapping::lookup`] has to be asked.
    #[inline]
    pub(crate) fn lookup_plain(&self, offset: u64, length_bytes: u64) -> Option<Plain> {
        match self {
            Self::Raw(raw) => raw.is_in_one_piece(offset, length_bytes).then_some(Plain::Data(offset)),
            Self::Qcow2(qcow2) => qcow2.lookup_plain(offset, length_bytes),
            Self::Scratch(scratch) => match scratch.in_one_piece(offset, length_bytes) {
                Some(place) => Some(Plain::Data(place)),
                None => {
                    let below = Mapped { extent: Extent::Backing, length_bytes };
                    (scratch.lookup(offset, length_bytes)? == below).then_some(Plain::Unallocated)
                }
            },
        }
    }

    /// As `lookup`, but reads tables as needed.
    pub(crate) async fn resolve(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Mapped> {
        match self {
            Self::Raw(raw) => Ok(raw.lookup(offset, length_bytes)),
            Self::Qcow2(qcow2) => qcow2.resolve(io, offset, length_bytes).await,
            Self::Scratch(scratch) => scratch.resolve(offset, length_bytes),
        }
    }

    /// Says what a read at `offset` of the file means behind the file's end. That is an allocated cluster that was
    /// never written, or a raw file that somebody cut off.
    #[inline]
    pub(crate) fn past_end(&self, offset: u64) -> PastEnd {
        match self {
            Self::Raw(raw) => raw.past_end(offset),
            Self::Qcow2(_) => PastEnd::Zeros,
            // All that a kept overlay maps was there when it was flushed: what is missing is lost.
            Self::Scratch(scratch) if scratch.header().is_some() => PastEnd::Fails,
            Self::Scratch(_) => PastEnd::Zeros,
        }
    }

    /// For a range without data in a layer with tables: the space that its first part keeps all the same, and the
    /// length of that part.
    pub(crate) fn empty_space(&self, offset: u64, length_bytes: u64) -> (Option<u64>, u64) {
        match self {
            Self::Raw(_) | Self::Scratch(_) => (None, length_bytes),
            Self::Qcow2(qcow2) => qcow2.empty_space(offset, length_bytes),
        }
    }

    /// Returns how many bytes of memory it takes to read the cluster of `extent`.
    pub(crate) fn decompress_bytes(&self, extent: &CompressedExtent) -> u64 {
        match self {
            Self::Raw(_) | Self::Scratch(_) => 0,
            Self::Qcow2(qcow2) => qcow2.decompress_bytes(extent),
        }
    }

    /// Reads and decompresses the whole cluster of `extent`.
    pub(crate) async fn read_compressed(&self, io: &MetaIo, extent: CompressedExtent) -> IoResult<AlignedBuf> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Err(IoError::EIO),
            Self::Qcow2(qcow2) => qcow2.read_compressed(io, extent).await,
        }
    }
}

/// Writing.
impl Mapping {
    /// Answers most writes, in few steps: where the whole range may be overwritten in one piece. The range is noted as
    /// written. `None` if [`Mapping::lookup_overwrite`] has to be asked.
    #[inline]
    pub(crate) fn begin_overwrite(&self, offset: u64, length_bytes: u64) -> Option<u64> {
        match self {
            Self::Raw(raw) => {
                let quick = length_bytes > 0 && !raw.needs_padding(offset.saturating_add(length_bytes));
                quick.then_some(offset)
            }
            Self::Qcow2(qcow2) => qcow2.begin_overwrite(offset, length_bytes),
            Self::Scratch(scratch) => scratch.in_one_piece(offset, length_bytes),
        }
    }

    /// Looks up the first part of the range that may be overwritten in place, at once.
    #[inline]
    pub(crate) fn lookup_overwrite(&self, offset: u64, length_bytes: u64) -> Overwrite {
        match self {
            Self::Raw(_) => Overwrite::InPlace { offset, length_bytes },
            Self::Qcow2(qcow2) => qcow2.lookup_overwrite(offset, length_bytes),
            Self::Scratch(scratch) => match scratch.lookup(offset, length_bytes) {
                Some(Mapped { extent: Extent::Data { offset, .. }, length_bytes }) => {
                    Overwrite::InPlace { offset, length_bytes }
                }
                _ => Overwrite::Slow,
            },
        }
    }

    /// Whether the tables behind all earlier lookups are durable.
    #[inline]
    pub(crate) fn is_mapping_durable(&self) -> bool {
        match self {
            Self::Raw(_) => true,
            Self::Qcow2(qcow2) => qcow2.is_mapping_durable(),
            Self::Scratch(scratch) => scratch.is_mapping_durable(),
        }
    }

    /// Reserves space for the first part of a write, or finds its place. The range is noted as written.
    pub(crate) async fn prepare_write(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Prepared> {
        match self {
            Self::Raw(_) => Ok(Prepared::InPlace { offset, length_bytes }),
            Self::Qcow2(qcow2) => Ok(qcow2.prepare_write(io, offset, length_bytes).await?.map(Allocation::from)),
            Self::Scratch(scratch) => Ok(scratch.prepare_write(io, offset, length_bytes).await?.map(Allocation::from)),
        }
    }

    /// As `prepare_write`, for a copy of what the guest sees: the range is not noted as written.
    pub(crate) async fn prepare_copy(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Prepared> {
        match self {
            Self::Raw(_) => Ok(Prepared::InPlace { offset, length_bytes }),
            Self::Qcow2(qcow2) => Ok(qcow2.prepare_copy(io, offset, length_bytes).await?.map(Allocation::from)),
            Self::Scratch(scratch) => Ok(scratch.prepare_write(io, offset, length_bytes).await?.map(Allocation::from)),
        }
    }

    /// Publishes an allocation after its data and fillings have been written.
    pub(crate) async fn commit_write(&self, io: &MetaIo, allocation: Allocation) -> IoResult {
        match self {
            Self::Raw(_) => Err(IoError::EIO),
            Self::Qcow2(qcow2) => qcow2.commit_write(io, allocation.of_qcow2()?).await,
            Self::Scratch(scratch) => scratch.commit_write(allocation.of_scratch()?),
        }
    }

    /// Whether the file must be made longer before a write that ends at `end`.
    #[inline]
    pub(crate) fn needs_padding(&self, end: u64) -> bool {
        match self {
            Self::Raw(raw) => raw.needs_padding(end),
            Self::Qcow2(_) | Self::Scratch(_) => false,
        }
    }

    /// If a raw file ends within a sector, extends it to the disk's size before that sector is written. If the length
    /// could be lost without the data, a power cut would tear the sector.
    pub(crate) async fn pad(&self, io: &MetaIo, end: u64) -> IoResult {
        if let Self::Raw(raw) = self
            && raw.needs_padding(end)
        {
            io.set_length(raw.size_bytes()).await?;
            io.flush().await?;
            raw.set_padded();
        }
        Ok(())
    }

    pub(crate) async fn discard(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult {
        match self {
            Self::Raw(_) => io.discard(offset, length_bytes).await,
            Self::Qcow2(qcow2) => qcow2.discard(io, offset, length_bytes).await,
            Self::Scratch(scratch) => scratch.discard(io, offset, length_bytes).await,
        }
    }

    /// Makes a range read as zeros. Returns the parts that ordinary writes have to zero.
    pub(crate) async fn write_zeroes(
        &self,
        io: &MetaIo,
        offset: u64,
        length_bytes: u64,
        may_unmap: bool,
    ) -> IoResult<Vec<Range<u64>>> {
        match self {
            Self::Raw(_) => {
                self.pad(io, offset.saturating_add(length_bytes)).await?;
                io.write_zeroes(offset, length_bytes, may_unmap).await?;
                Ok(Vec::new())
            }
            Self::Qcow2(qcow2) => Ok(qcow2.write_zeroes(io, offset, length_bytes, may_unmap).await?.by_writing),
            Self::Scratch(scratch) => scratch.write_zeroes(io, offset, length_bytes).await,
        }
    }

    /// Changes the size of a closed image that nobody uses. Open the image again afterwards, even if this fails.
    pub(crate) async fn resize_looked_at(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        options: &ResizeOptions,
        watch: &mut EditWatch<'_>,
    ) -> Result<()> {
        match self {
            Self::Raw(_) => {
                let space = raw_space(options.preallocation)?;
                format_raw::resize(io, file, options.size_bytes, options.shrink, space, watch).await
            }
            Self::Qcow2(_) => format_qcow2::resize_looked_at(io, file, name, options, watch).await,
            Self::Scratch(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "'{name}': a disk with snapshot=on keeps its size; resize the image below while nobody uses it"
                ),
            )),
        }
    }

    /// Changes options of a closed image that nobody uses.
    pub(crate) async fn amend_closed(
        &self,
        io: &MetaIo,
        file: &dyn File,
        name: &str,
        options: &AmendOptions,
        watch: &mut EditWatch<'_>,
    ) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => {
                let what = format!("'{name}': a {} image has no options to change", self.format());
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            Self::Qcow2(_) => format_qcow2::amend(io, file, name, options, watch).await,
        }
    }

    /// Forgets whole clusters of a range, so that the layer below shows.
    pub(crate) async fn reveal(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult {
        match self {
            Self::Raw(_) => Err(IoError::EIO),
            Self::Qcow2(qcow2) => qcow2.reveal(io, offset, length_bytes).await,
            Self::Scratch(scratch) => {
                scratch.reveal(offset, length_bytes);
                Ok(())
            }
        }
    }

    pub(crate) fn can_compress(&self) -> bool {
        self.qcow2().is_some()
    }

    /// Returns a compressor of the image's type; `None` if the format has no compressed clusters.
    pub(crate) fn compressor(&self) -> Option<Result<Compressor>> {
        self.qcow2().map(Qcow2::compressor)
    }

    /// Reserves space for compressed clusters, invisible until [`Mapping::commit_compressed`].
    pub(crate) async fn prepare_compressed(
        &self,
        io: &MetaIo,
        clusters: &[PackedCluster],
    ) -> IoResult<PackedAllocation> {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Err(IoError::EIO),
            Self::Qcow2(qcow2) => qcow2.prepare_compressed(io, clusters).await,
        }
    }

    pub(crate) async fn commit_compressed(&self, io: &MetaIo, allocation: PackedAllocation) -> IoResult {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Err(IoError::EIO),
            Self::Qcow2(qcow2) => qcow2.commit_compressed(io, allocation).await,
        }
    }
}

/// Durability.
impl Mapping {
    /// Makes every write that completed before this call durable, with the tables that lead to it.
    pub(crate) async fn flush(&self, io: &MetaIo) -> IoResult {
        match self {
            Self::Raw(_) => io.flush().await,
            Self::Qcow2(qcow2) => qcow2.flush(io).await,
            // Does nothing if the overlay does not outlive this process.
            Self::Scratch(scratch) => scratch.flush(io).await,
        }
    }

    /// Makes the next durable write also flush what was not flushed.
    pub(crate) fn flush_with_next_write(&self) {
        match self {
            Self::Raw(_) => {}
            Self::Qcow2(qcow2) => qcow2.flush_with_next_write(),
            Self::Scratch(scratch) => scratch.flush_with_next_write(),
        }
    }

    /// Writes everything to the file, durably. No operation is in flight. The mapping stays usable.
    pub(crate) async fn close(&self, io: &MetaIo) -> IoResult {
        match self {
            Self::Raw(_) => io.flush().await,
            Self::Qcow2(qcow2) => qcow2.close(io).await,
            Self::Scratch(scratch) => scratch.flush(io).await,
        }
    }

    /// See [`Scratch::count_index_memory`].
    pub(crate) fn count_index_memory(&self, counts: bool) {
        if let Self::Scratch(scratch) = self {
            scratch.count_index_memory(counts);
        }
    }

    /// Cuts off space that was allocated in advance behind the end of a new image, which is closed.
    pub(crate) async fn trim(&self, io: &MetaIo) -> IoResult {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.trim(io).await,
        }
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

    /// Returns how many slices of tables were read so far.
    pub(crate) fn slices_read(&self) -> u64 {
        self.qcow2().map_or(0, Qcow2::slices_read)
    }
}

/// Translates how space is added to a raw image.
pub(crate) fn raw_space(space: GrowBy) -> Result<NewSpace> {
    match space {
        GrowBy::Nothing => Ok(NewSpace::Hole),
        GrowBy::Space => Ok(NewSpace::Allocated),
        GrowBy::Zeros => Ok(NewSpace::Zeros),
        GrowBy::Tables => {
            let what = "a raw image has no metadata to preallocate; use off, falloc or full";
            Err(Error::new(ErrorKind::BadOption, what))
        }
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
