//! Pages that a layer takes over without a request: space is reserved for them, they are filled, and published.

use super::{Mapping, Staged};
use block::{IoError, IoResult, MetaIo};

impl Mapping {
    /// Whether the format has pages that can be taken over.
    pub(crate) fn can_stage(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => false,
            Self::Scratch(_) => true,
        }
    }

    /// Reserves space for whole pages of a range, if the format has pages that can be taken over.
    pub(crate) fn try_stage(&self, offset: u64, length_bytes: u64) -> Option<Staged> {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => None,
            Self::Scratch(scratch) => scratch.try_stage(offset, length_bytes),
        }
    }

    /// Whether the space was reserved here.
    pub(crate) fn owns(&self, staged: &Staged) -> bool {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => false,
            Self::Scratch(scratch) => scratch.owns(staged),
        }
    }

    /// Whether little space is at hand.
    pub(crate) fn is_short(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => false,
            Self::Scratch(scratch) => scratch.is_short(),
        }
    }

    /// Reserves space for requests that come, if little is at hand and there is some.
    pub(crate) async fn reserve_ahead(&self, io: &MetaIo) {
        if let Self::Scratch(scratch) = self {
            scratch.reserve_ahead(io).await;
        }
    }

    /// Publishes staged pages at `offset`.
    pub(crate) async fn link(&self, io: &MetaIo, offset: u64, staged: &mut Staged) -> IoResult {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => Err(IoError::EIO),
            Self::Scratch(scratch) => scratch.link(io, offset, staged).await,
        }
    }

    /// Publishes staged pages at `offset`; `None` if that would wait.
    pub(crate) fn link_at_once(&self, offset: u64, staged: &mut Staged) -> Option<IoResult> {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => Some(Err(IoError::EIO)),
            Self::Scratch(scratch) => scratch.link_at_once(offset, staged),
        }
    }

    /// Gives space that was reserved, of a layer that is closed and holds nothing, back to the host.
    pub(crate) async fn give_back_if_empty(&self, io: &MetaIo) -> IoResult {
        match self {
            Self::Raw(_) | Self::Qcow2(_) => Ok(()),
            Self::Scratch(scratch) => scratch.give_back_if_empty(io).await,
        }
    }

    /// See [`format_scratch::Scratch::count_index_memory`].
    pub(crate) fn count_index_memory(&self, counts: bool) {
        if let Self::Scratch(scratch) = self {
            scratch.count_index_memory(counts);
        }
    }
}
