//! Where the guest's bytes lie in a layer's file.

use super::{Mapping, Plain};
use block::{CompressedExtent, Extent, IoError, IoResult, Mapped, MetaIo, PastEnd};
use memory::AlignedBuf;

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
