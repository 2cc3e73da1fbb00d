//! How a layer's file gets space for a write, and how what was written becomes durable.

use super::{Allocation, Mapping, Overwrite, Prepared};
use block::{Extent, IoError, IoResult, Mapped, MetaIo};
use format_qcow2::{Compressor, PackedAllocation, PackedCluster, Qcow2};
use std::ops::Range;

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
    pub(crate) fn compressor(&self) -> Option<block::Result<Compressor>> {
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

    /// Cuts off space that was allocated in advance behind the end of a new image, which is closed.
    pub(crate) async fn trim(&self, io: &MetaIo) -> IoResult {
        match self {
            Self::Raw(_) | Self::Scratch(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.trim(io).await,
        }
    }
}
