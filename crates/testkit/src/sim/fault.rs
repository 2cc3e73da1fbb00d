//! Faults that a test injects.

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
    /// All kinds.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::SetLength];

    /// Returns the kind of `op`.
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

/// The action on an operation that is hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAction {
    /// Fails it without any effect.
    Fail(IoError),
    /// Carries out a prefix of whole sectors, then fails it, as a file queue does after a short read or write that it
    /// cannot resume.
    Short(IoError),
    /// The worst case: carries out any of its sectors, perhaps all, then fails it.
    Scatter(IoError),
    /// Fails a flush, and forgets the data that it was to make durable, as the page cache of Linux does: they are read
    /// until the power is cut, and no later flush makes them durable. Other operations fail as by
    /// [`FaultAction::Fail`].
    Lose(IoError),
    /// Leaves it in flight until [`crate::SimStorage::release_stalled`].
    Stall,
}

/// A fault: the operations that are hit, and the action on them.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The kind of operations that match; `None` for all kinds.
    pub kind: Option<OpKind>,
    /// The number of matching operations that pass first.
    pub after: u64,
    /// The number of operations that are then hit; `u64::MAX` for all that follow.
    pub count: u64,
    /// The action on them.
    pub action: FaultAction,
}

impl Fault {
    /// Makes a fault that hits only the `nth` operation (from zero) of `kind`.
    #[must_use]
    pub fn nth(kind: OpKind, nth: u64, action: FaultAction) -> Self {
        Self { kind: Some(kind), after: nth, count: 1, action }
    }

    /// Makes a fault that hits every operation of `kind` from the `nth` (from zero) on.
    #[must_use]
    pub fn from_nth(kind: OpKind, nth: u64, action: FaultAction) -> Self {
        Self { kind: Some(kind), after: nth, count: u64::MAX, action }
    }

    /// Counts an operation of `kind`, and returns whether it is hit.
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
