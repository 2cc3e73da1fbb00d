//! How flushes take turns, and the orderings that they keep.

use block::IoResult;
use std::sync::{Arc, OnceLock};

/// An ordering that a flush keeps. Tests leave one out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// Refcounts, new tables and data come before whatever refers to them.
    BeforeMapping,
    /// Refcount table entries come before L2 entries that rely on them.
    BeforeRelying,
    /// Everything comes before the flush is reported done.
    End,
    /// Unlinking is durable before the space is reused.
    Reuse,
    /// All operations resolved before a free end before the space is reused.
    Epoch,
    /// Zeros at the end of the file come before an L2 entry that refers to them and does not wait for its data.
    Extension,
    /// Marks "in use" of bitmaps come before any write.
    InUse,
    /// All bits of a bitmap come before its mark "in use" is removed.
    Bits,
    /// Tables that refer to a place come before a write there counts as durable by itself.
    Overwrite,
    /// All operations resolved before a move end before the data are copied.
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

/// The result of a flush; `None` inside if its task was dropped.
pub(crate) type Outcome = Arc<OnceLock<Option<IoResult>>>;

/// The running flush, and the next one, which collects callers.
#[derive(Debug, Default)]
pub(crate) struct FlushQueue {
    pub(super) running: bool,
    pub(super) next: Outcome,
}
