//! The dirty bit: the image's refcounts are not valid (qcow2 specification, incompatible features).
//!
//! If an image allows it (lazy refcounts), we set the bit, durably, before the first refcount is postponed. From then
//! on a flush writes only mappings. Closing the image writes the refcounts and clears the bit. All other orderings
//! stay: data and copies before whatever refers to them, unlinking before reuse. There is one exception: an entry may
//! refer to a place that is not filled yet. The place must never have been used and durably read as zeros, and the
//! entry must have read as zeros before.

use crate::layout::entry::Cluster;
use crate::layout::header::{INCOMPATIBLE_DIRTY, OFFSET_INCOMPATIBLE};
use crate::live::flush_queue::Barrier;
use crate::live::metadata_map::Owner;
use crate::live::refcounts::Piece;
use crate::live::state::{Inner, Need, State, Step, Stop};
use block::{FileOp, IoResult, MetaIo};
use memory::{AlignedBuf, IoBuf};

impl Inner {
    /// Whether a flush leaves out the refcounts. It writes them if too many wait, or if their table moves. The table's
    /// old place must not be reused while the header refers to it.
    pub(crate) fn postpones_refcounts(&self, state: &State) -> bool {
        let must_write = state.refcounts.is_half_crowded() || state.refcounts.has_moved();
        state.dirty.set && state.dirty.wanted && !must_write
    }

    /// Asks for the dirty bit before a refcount is raised, if the refcount may become stale.
    pub(crate) fn require_dirty_bit(&self, state: &State) -> Step<()> {
        match self.lazy && !(state.dirty.set && state.dirty.wanted) {
            true => Err(Stop::Need(Need::DirtyBit)),
            false => Ok(()),
        }
    }

    /// Makes the next flush set the bit. Only the leader of a flush writes the header, and only one flush runs at a
    /// time.
    pub(crate) async fn make_dirty(&self, io: &MetaIo) -> IoResult {
        self.lock().dirty.wanted = true;
        self.flush(io).await
    }

    /// Makes later flushes write the refcounts, and clear the bit once there is nothing else to write.
    pub(crate) fn stop_postponing(&self) {
        self.lock().dirty.wanted = false;
    }

    /// Writes the bit at the start of a flush, which postpones nothing yet. Returns whether it was written. It counts
    /// as set when the flush has ended.
    pub(crate) async fn write_dirty_bit_if_wanted(&self, io: &MetaIo) -> IoResult<bool> {
        {
            let state = self.lock();
            if !state.dirty.wanted || state.dirty.set {
                return Ok(false);
            }
        }
        self.write_dirty_bit(io, true).await?;
        Ok(true)
    }

    /// Notes that the flush which wrote the bit has ended.
    pub(crate) fn dirty_bit_is_set(&self) {
        self.lock().dirty.set = true;
    }

    /// Clears the bit at the end of a flush, when all that the flush wrote is durable, if there is nothing else to
    /// write.
    pub(crate) async fn clear_dirty_bit(&self, io: &MetaIo) -> IoResult {
        {
            let mut state = self.lock();
            let is_set = state.header_sector.get(LAST_BYTE).is_some_and(|byte| byte & INCOMPATIBLE_DIRTY as u8 != 0);
            if !self.lazy || !is_set || state.dirty.wanted || !state.is_all_written() {
                return Ok(());
            }
            // This comes first: from here on nothing is postponed, even if the write fails.
            state.dirty.set = false;
        }
        self.write_dirty_bit(io, false).await?;
        self.barrier(io, Barrier::End).await
    }

    async fn write_dirty_bit(&self, io: &MetaIo, is_dirty: bool) -> IoResult {
        self.guard_pieces(Owner::Header, &[Piece { offset: 0, bytes: vec![0] }])?;
        let sector = {
            let mut state = self.lock();
            if let Some(byte) = state.header_sector.get_mut(LAST_BYTE) {
                *byte &= !(INCOMPATIBLE_DIRTY as u8);
                *byte |= u8::from(is_dirty);
            }
            AlignedBuf::copy_of(&state.header_sector)
        };
        let data = IoBuf::from_aligned(sector).whole();
        self.table_writes.start(io.queue(), FileOp::Write { offset: 0, data, fua: false }).await
    }

    /// Notes that an entry will refer to new space. The data there must become durable first, unless the space reads as
    /// zeros (`blank`) and the guest sees zeros there now.
    pub(crate) fn note_order(&self, state: &mut State, blank: bool, old: Cluster) {
        let reads_as_zeros = match old {
            Cluster::Unallocated => !self.geometry.has_backing,
            Cluster::Zero => true,
            Cluster::Data { .. } | Cluster::ZeroAllocated { .. } | Cluster::Compressed { .. } => false,
        };
        state.needs_order |= !(blank && reads_as_zeros);
    }
}

/// Offset of the last byte of the incompatible features.
const LAST_BYTE: usize = OFFSET_INCOMPATIBLE.saturating_add(7);
