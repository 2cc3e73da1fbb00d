//! A format's answer to *where a guest range lies*.

/// Where a run of guest bytes lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Stored as they are, from `offset` on in one of the layer's files: 0 is the image file, 1 the external data file
    /// of qcow2.
    Data {
        /// Which of the layer's files.
        file: u8,
        /// First byte in that file.
        offset: u64,
    },
    /// The bytes read as zeros; no layer below is asked.
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
    /// Bytes of compressed data at most (the stream may end earlier).
    pub length_bytes: u32,
    /// Where in the decompressed cluster the asked range starts.
    pub skip_bytes: u32,
}

/// The first part of a range that lies in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// Where.
    pub extent: Extent,
    /// How many bytes from the start of the asked range, at least 1, at most what was asked.
    pub length_bytes: u64,
}

/// Where a write may go, in a format with allocations of the kind `A`.
#[derive(Debug)]
pub enum Prepared<A> {
    /// The first part of the range is allocated already: overwrite it.
    InPlace {
        /// First byte in the file.
        offset: u64,
        /// How many bytes, at least 1.
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

/// How the bytes of an allocation's first or last unit that the request does not cover must be filled before commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: there are no such bytes, or they are zero in the file already.
    None,
    /// With zeros.
    Zero,
    /// With what the guest sees there. Bytes behind the end of the disk count as zero.
    Copy,
}
