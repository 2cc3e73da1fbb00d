//! The status of a disk's ranges, for tools, jobs and exports.

use crate::Result;
use std::ops::Range;

/// The part of a disk whose status is asked for, and how exact the answer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusQuery {
    /// First byte.
    pub offset: u64,
    /// The length in bytes. Bytes behind the end of the disk are left out.
    pub length_bytes: u64,
    /// The number of layers to ask, from the top. Bytes that they leave to the layers below are neither present nor
    /// zero nor data. A disk without layers counts as one layer.
    pub layers: usize,
    /// Set by callers that count granules of this size with any data in them. Bytes behind data may then count as data
    /// up to the granule's end, and long runs come in pieces. This is cheaper if files lie in memory.
    pub granule_bytes: Option<u64>,
}

impl StatusQuery {
    /// Asks about all of a disk, through all layers.
    #[must_use]
    pub fn all() -> Self {
        Self::of(0, u64::MAX)
    }

    /// Asks about a range of a disk, through all layers.
    #[must_use]
    pub fn of(offset: u64, length_bytes: u64) -> Self {
        Self { offset, length_bytes, layers: usize::MAX, granule_bytes: None }
    }

    /// Changes some fields: `StatusQuery::all().with(|query| query.layers = 1)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Returns the part of the range that lies in a disk of this size.
    #[must_use]
    pub fn range_in(&self, size_bytes: u64) -> Range<u64> {
        let end = self.offset.saturating_add(self.length_bytes).min(size_bytes);
        self.offset.min(end)..end
    }

    /// Returns an answer of one run.
    #[must_use]
    pub fn answered_with(&self, size_bytes: u64, run: impl FnOnce(u64, u64) -> Run) -> Runs<'static> {
        let Range { start, end } = self.range_in(size_bytes);
        let length_bytes = end.saturating_sub(start);
        Box::new((length_bytes > 0).then(|| Ok(run(start, length_bytes))).into_iter())
    }
}

/// Neighbouring bytes of a disk with the same status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First byte of the disk.
    pub start: u64,
    /// The length in bytes, at least 1.
    pub length_bytes: u64,
    /// The layer that holds the status of the bytes; 0 is the top.
    pub depth: usize,
    /// That layer itself has an entry for them. If false, no layer in the chain has one.
    pub present: bool,
    /// The bytes read as zeros.
    pub zero: bool,
    /// A layer keeps data for them. If `zero` is set as well, they lie in a hole of the layer's file.
    pub data: bool,
    /// The bytes lie in compressed clusters.
    pub compressed: bool,
    /// Offset of the bytes in that layer's file.
    pub offset: Option<u64>,
}

impl Run {
    /// Makes a run of bytes of which nothing is known, so they must be read.
    #[must_use]
    pub fn of_data(start: u64, length_bytes: u64) -> Self {
        let (depth, offset) = (0, None);
        Self { start, length_bytes, depth, present: true, zero: false, data: true, compressed: false, offset }
    }

    /// Makes a run of bytes for which no layer has an entry. They read as zeros.
    #[must_use]
    pub fn of_nothing(start: u64, length_bytes: u64) -> Self {
        Self { present: false, zero: true, data: false, ..Self::of_data(start, length_bytes) }
    }

    /// Whether the bytes must be read to learn their contents.
    #[must_use]
    pub fn takes_read(&self) -> bool {
        self.data && !self.zero
    }

    /// Returns the first byte behind the run.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.length_bytes)
    }
}

/// Runs of a disk, in order and without gaps. An error ends them: the status behind the last run is unknown.
pub type Runs<'a> = Box<dyn Iterator<Item = Result<Run>> + 'a>;
