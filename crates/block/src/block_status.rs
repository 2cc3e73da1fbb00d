//! What lies where in a disk, as tools, jobs and exports ask for it.

use crate::Result;

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
    /// They take a read.
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

    /// The first byte behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.length_bytes)
    }
}

/// Runs of a disk, in order and without gaps. An error ends them.
pub type Runs<'a> = Box<dyn Iterator<Item = Result<Run>> + 'a>;
