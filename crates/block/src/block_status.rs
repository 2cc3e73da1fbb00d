//! What lies where in a disk, as tools, jobs and exports ask for it.

use crate::Result;
use std::ops::Range;

/// What a disk is asked to tell about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatusQuery {
    /// First byte.
    pub offset: u64,
    /// Bytes; what is behind the end of the disk is left out.
    pub length_bytes: u64,
    /// How many layers are asked, from the top on. What they leave to those below is neither present nor zero nor data.
    /// A disk without layers counts as one.
    pub layers: usize,
    /// For whoever counts parts of the disk of this size in which any byte is data. What follows data may then be called
    /// data up to the part's end, and long runs are told in pieces. This costs less where files lie in memory.
    pub granule_bytes: Option<u64>,
}

impl StatusQuery {
    /// All of a disk, through all layers.
    #[must_use]
    pub fn all() -> Self {
        Self::of(0, u64::MAX)
    }

    /// A range of a disk, through all layers.
    #[must_use]
    pub fn of(offset: u64, length_bytes: u64) -> Self {
        Self { offset, length_bytes, layers: usize::MAX, granule_bytes: None }
    }

    /// Changes some of it: `StatusQuery::all().with(|query| query.layers = 1)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The bytes that are asked for of a disk of this size.
    #[must_use]
    pub fn range_in(&self, size_bytes: u64) -> Range<u64> {
        let end = self.offset.saturating_add(self.length_bytes).min(size_bytes);
        self.offset.min(end)..end
    }

    /// The answer that consists of one run.
    #[must_use]
    pub fn answered_with(&self, size_bytes: u64, run: impl FnOnce(u64, u64) -> Run) -> Runs<'static> {
        let Range { start, end } = self.range_in(size_bytes);
        let length_bytes = end.saturating_sub(start);
        Box::new((length_bytes > 0).then(|| Ok(run(start, length_bytes))).into_iter())
    }
}

/// Neighbouring bytes of a disk that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First byte of the disk.
    pub start: u64,
    /// Bytes, at least 1.
    pub length_bytes: u64,
    /// The layer that decides what they are, 0 for the top.
    pub depth: usize,
    /// That layer says something about them itself; where not, nothing in the chain does.
    pub present: bool,
    /// They read as zeros.
    pub zero: bool,
    /// A layer keeps data for them. If they are known to be zeros all the same (`zero`), they lie in a hole of its file.
    pub data: bool,
    /// They lie in compressed clusters.
    pub compressed: bool,
    /// Where they lie in that layer's file.
    pub offset: Option<u64>,
}

impl Run {
    /// Bytes of which nothing is known, so that they have to be read.
    #[must_use]
    pub fn of_data(start: u64, length_bytes: u64) -> Self {
        let (depth, offset) = (0, None);
        Self { start, length_bytes, depth, present: true, zero: false, data: true, compressed: false, offset }
    }

    /// Bytes that nothing in the chain says anything about: they read as zeros.
    #[must_use]
    pub fn of_nothing(start: u64, length_bytes: u64) -> Self {
        Self { present: false, zero: true, data: false, ..Self::of_data(start, length_bytes) }
    }

    /// Whether what they are takes a read.
    #[must_use]
    pub fn takes_read(&self) -> bool {
        self.data && !self.zero
    }

    /// The first byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.length_bytes)
    }
}

/// Runs of a disk, in order and without gaps. An error ends them: about what follows the last run nothing is known.
pub type Runs<'a> = Box<dyn Iterator<Item = Result<Run>> + 'a>;
