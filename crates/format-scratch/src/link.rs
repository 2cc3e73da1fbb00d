//! Takes over pages that were filled before anybody could see them: *stage* reserves space, *link* publishes it.
//!
//! Before it is linked, a staged page has no place on the disk. So it blocks nobody, however long it takes, and
//! dropping it frees the space. Only whole pages are linked. Otherwise the rest of a page would have to be read and
//! copied, and a concurrent write to it would be lost.

use crate::layout::{PAGE_BYTES, data_page, word_of};
use crate::scratch::Scratch;
use crate::state::{Inner, State, Step};
use block::{IoError, IoErrorKind, IoResult, MetaIo};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The most bytes that are staged at once: they are linked under the lock.
const STAGED_BYTES_MAX: u64 = 2 << 20;

/// Contiguous space for whole pages of the data, invisible until linked. Dropping it frees the space.
pub struct Staged {
    /// First byte in the data file.
    pub file_offset: u64,
    /// Whole pages.
    pub length_bytes: u64,
    /// Whether the space reads as zeros.
    pub zeroed: bool,
    data: Range<u64>,
    is_linked: bool,
    inner: Arc<Inner>,
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staged({} bytes at {} of the data)", self.length_bytes, self.file_offset)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.is_linked {
            // A write to it may still be in flight.
            self.inner.lock().retire(&self.inner.epochs, [self.data.clone()]);
        }
    }
}

impl Scratch {
    /// Reserves space for the pages of a range. `None` if the range is not whole pages, or no contiguous space is
    /// ready. Does not wait.
    #[must_use]
    pub fn try_stage(&self, offset: u64, length_bytes: u64) -> Option<Staged> {
        let inner = &self.inner;
        let end = offset.checked_add(length_bytes).filter(|end| *end <= inner.size_bytes)?;
        let is_whole = offset.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES);
        if !is_whole || length_bytes == 0 || length_bytes > STAGED_BYTES_MAX || inner.index.is_lost() {
            return None;
        }
        let count = length_bytes / PAGE_BYTES;
        let (data, zeroed) = inner.lock().take_data_at_hand(&inner.epochs, count)?;
        Some(Staged {
            file_offset: data.start.saturating_mul(PAGE_BYTES),
            length_bytes,
            zeroed,
            data,
            is_linked: false,
            inner: Arc::clone(inner),
        })
    }

    /// Whether the space belongs to this overlay.
    #[must_use]
    pub fn owns(&self, staged: &Staged) -> bool {
        Arc::ptr_eq(&self.inner, &staged.inner)
    }

    /// Publishes staged pages at `offset` of the disk, where a page begins. All appear at one moment, unless they lie
    /// in several parts of the disk. Waits while another write allocates one of the pages.
    pub async fn link(&self, io: &MetaIo, offset: u64, staged: &mut Staged) -> IoResult {
        let end = offset.checked_add(staged.length_bytes).filter(|end| *end <= self.inner.size_bytes);
        if end.is_none() || !offset.is_multiple_of(PAGE_BYTES) || !self.owns(staged) || staged.is_linked {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        self.inner.run(io, |state| self.try_link(state, offset / PAGE_BYTES, staged)).await
    }

    fn try_link(&self, state: &mut State, first: u64, staged: &mut Staged) -> Step<()> {
        let inner = &self.inner;
        let count = staged.data.end.saturating_sub(staged.data.start);
        let guest = first..first.saturating_add(count);
        if state.is_in_flight(&guest) {
            return Step::Wait;
        }
        let parts = Inner::part_of(guest.start)..=Inner::part_of(guest.end.saturating_sub(1));
        for part in parts.clone() {
            if let Some(not_yet) = state.table_for(&inner.index, part) {
                return not_yet;
            }
        }
        parts.for_each(|part| inner.note_table(state, part));
        // From here on the space is the disk's, even if the index fails halfway.
        staged.is_linked = true;
        let mut freed: Vec<Range<u64>> = Vec::new();
        for (page, data) in guest.zip(staged.data.clone()) {
            let set = word_of(data).and_then(|word| inner.index.set(page, word));
            let Some(before) = set else { return Step::Fail(IoError::EIO) };
            let Some(data) = data_page(before) else { continue };
            match freed.last_mut() {
                Some(run) if run.end == data => run.end = data.saturating_add(1),
                _ => freed.push(data..data.saturating_add(1)),
            }
        }
        if !freed.is_empty() {
            state.retire(&inner.epochs, freed);
        }
        if inner.index.is_lost() { Step::Fail(IoError::EIO) } else { Step::Done(()) }
    }
}
