//! Faults that a test orders.

use block::{FileOp, IoError};

/// Kinds of file operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpKind {
    /// [`FileOp::Read`].
    Read,
    /// [`FileOp::Write`].
    Write,
    /// [`FileOp::Flush`].
    Flush,
    /// [`FileOp::Discard`].
    Discard,
    /// [`FileOp::WriteZeroes`].
    WriteZeroes,
    /// [`FileOp::SetLength`].
    SetLength,
}

impl OpKind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::SetLength];

    /// The kind of `op`.
    #[must_use]
    pub fn of(op: &FileOp) -> Self {
        match op {
            FileOp::Read { .. } => Self::Read,
            FileOp::Write { .. } => Self::Write,
            FileOp::Flush => Self::Flush,
            FileOp::Discard { .. } => Self::Discard,
            FileOp::WriteZeroes { .. } => Self::WriteZeroes,
            FileOp::SetLength { .. } => Self::SetLength,
        }
    }
}

/// What happens to an operation that is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAction {
    /// Nothing is done; it fails.
    Fail(IoError),
    /// A prefix of whole sectors is done, then it fails: what a file queue makes of a short read or write that it
    /// cannot resume.
    Short(IoError),
    /// The worst case: any of its sectors are done, perhaps all, then it fails.
    Scatter(IoError),
    /// A flush fails, and what it was to make durable is forgotten, as by the page cache of Linux: it is read until the power
    /// is cut, and no later flush makes it durable. Everything else fails as by [`FaultAction::Fail`].
    Lose(IoError),
    /// It stays in flight until [`crate::SimStorage::release_stalled`].
    Stall,
}

/// An order: which operations are hit, and how.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The kind that is hit; `None` for every kind.
    pub kind: Option<OpKind>,
    /// How many matching operations pass first.
    pub after: u64,
    /// How many are hit then; `u64::MAX` for all that follow.
    pub count: u64,
    /// What happens to them.
    pub action: FaultAction,
}

impl Fault {
    /// Hits only the `nth` operation (from zero) of `kind`.
    #[must_use]
    pub fn nth(kind: OpKind, nth: u64, action: FaultAction) -> Self {
        Self { kind: Some(kind), after: nth, count: 1, action }
    }

    /// Hits every operation of `kind` from the `nth` (from zero) on.
    #[must_use]
    pub fn from_nth(kind: OpKind, nth: u64, action: FaultAction) -> Self {
        Self { kind: Some(kind), after: nth, count: u64::MAX, action }
    }

    /// Whether `kind` is hit now; counts.
    pub(crate) fn hits(&mut self, kind: OpKind) -> bool {
        if self.count == 0 || self.kind.is_some_and(|own| own != kind) {
            return false;
        }
        if self.after > 0 {
            self.after -= 1;
            return false;
        }
        if self.count != u64::MAX {
            self.count -= 1;
        }
        true
    }
}
