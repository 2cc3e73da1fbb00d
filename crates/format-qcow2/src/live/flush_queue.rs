//! How flushes take turns, and which orderings they keep.

use block::IoResult;
use std::sync::{Arc, OnceLock};

/// An ordering that a flush keeps, for tests that leave it out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// Refcounts, new tables and data before whatever leads to them.
    BeforeMapping,
    /// Refcount table entries before L2 entries that rely on them.
    BeforeRelying,
    /// Everything before the flush is reported done.
    End,
    /// Unlinking durable before the space is used again.
    Reuse,
    /// Whatever was resolved before a free ended before the space is used again.
    Epoch,
    /// Zeros at the end of the file before anything is mapped there that is not durable itself.
    Extension,
    /// That bitmaps are in use before anything is written.
    InUse,
    /// All of a bitmap before it is said not to be in use.
    Bits,
    /// Tables that lead to a place before what is written there is called durable by itself.
    Overwrite,
    /// Whatever was resolved before a move ended before what moves is copied.
    Move,
}

impl Barrier {
    pub(crate) fn bit(self) -> u32 {
        match self {
            Self::BeforeMapping => 1,
            Self::BeforeRelying => 2,
            Self::End => 4,
            Self::Reuse => 8,
            Self::Epoch => 16,
            Self::Extension => 32,
            Self::InUse => 64,
            Self::Bits => 128,
            Self::Overwrite => 256,
            Self::Move => 512,
        }
    }
}

/// The end of one flush; `None` inside if its task was dropped.
pub(crate) type Outcome = Arc<OnceLock<Option<IoResult>>>;

/// One flush runs, the next collects those who want one.
#[derive(Debug, Default)]
pub(crate) struct FlushQueue {
    pub(super) running: bool,
    pub(super) next: Outcome,
}
