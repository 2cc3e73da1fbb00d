//! A format's answer to the question where a guest range lies.

/// The place of a run of guest bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Stored as they are, from `offset` on in one of the layer's files: 0 is the image file, 1 the external data file
    /// of qcow2.
    Data {
        /// The index of the file.
        file: u8,
        /// First byte in that file.
        offset: u64,
    },
    /// The bytes read as zeros, whatever the layer below holds.
    Zero,
    /// Inside a compressed cluster: slow path.
    Compressed(CompressedExtent),
    /// Not in this layer: the layer below decides. Zeros if there is none, or it ends before.
    Backing,
}

/// A compressed cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedExtent {
    /// First byte of the compressed data in the file.
    pub offset: u64,
    /// The most bytes of compressed data (the stream may end earlier).
    pub length_bytes: u32,
    /// The offset of the range in the decompressed cluster.
    pub skip_bytes: u32,
}

/// The first part of a range that lies in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// The place of the bytes.
    pub extent: Extent,
    /// The number of bytes from the start of the range, at least 1 and at most the length asked for.
    pub length_bytes: u64,
}

/// The place of a write, in a format with allocations of the type `A`.
#[derive(Debug)]
pub enum Prepared<A> {
    /// The first part of the range is allocated already: overwrite it.
    InPlace {
        /// First byte in the file.
        offset: u64,
        /// The number of bytes, at least 1.
        length_bytes: u64,
    },
    /// New space for the first part of the range.
    New(A),
}

impl<A> Prepared<A> {
    /// Converts the allocation to another kind.
    pub fn map<B>(self, change: impl FnOnce(A) -> B) -> Prepared<B> {
        match self {
            Self::InPlace { offset, length_bytes } => Prepared::InPlace { offset, length_bytes },
            Self::New(new) => Prepared::New(change(new)),
        }
    }
}

/// How to fill the bytes of an allocation's first or last unit that the request does not cover, before the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: there are no such bytes, or they are zero in the file already.
    None,
    /// With zeros.
    Zero,
    /// With the bytes that the guest sees there. Bytes behind the end of the disk count as zero.
    Copy,
}
