//! Takes over pages that were filled while they were invisible: *stage* reserves space, *link* publishes it.
//!
//! Before it is linked, a staged page has no place on the disk. So it delays no request, however long it takes, and
//! dropping it frees the space. Only whole pages are linked. Otherwise the rest of a page would have to be read and
//! copied, and a concurrent write to it would be lost.

use crate::index::Part;
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
    /// The length in bytes: whole pages.
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

impl Staged {
    /// Frees space that was never written to.
    pub fn give_back(mut self) {
        // So that the drop does not free it again.
        self.is_linked = true;
        let mut state = self.inner.lock();
        state.free.add(self.data.clone());
        self.inner.note_space(&state);
    }
}

impl Scratch {
    /// Reserves space for the pages of a range. `None` if the range is not whole pages, or no contiguous space is
    /// ready. Does not wait.
    ///
    /// Also `None` in a kept overlay. It may be opened anew while the space is still being filled, and then the space
    /// counts as free.
    #[must_use]
    pub fn try_stage(&self, offset: u64, length_bytes: u64) -> Option<Staged> {
        let inner = &self.inner;
        let end = offset.checked_add(length_bytes).filter(|end| *end <= inner.size_bytes)?;
        let is_whole = offset.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES);
        let may_go_away = inner.kept.is_some() || inner.index.is_lost();
        if may_go_away || !is_whole || length_bytes == 0 || length_bytes > STAGED_BYTES_MAX {
            return None;
        }
        let count = length_bytes / PAGE_BYTES;
        let mut state = inner.lock();
        let taken = state.take_data_at_hand(&inner.epochs, count);
        inner.note_space(&state);
        drop(state);
        let (data, zeroed) = taken?;
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
        self.check_link(offset, staged)?;
        self.inner.run(io, |state| self.try_link(state, offset / PAGE_BYTES, staged)).await
    }

    /// Whether later requests may find no reserved space, and no reservation is under way.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.inner.is_short()
    }

    /// Reserves space for later maps and writes, if little is left. Without it, maps use memory of their own. Requests
    /// must not wait for this.
    pub async fn reserve_ahead(&self, io: &MetaIo) {
        self.inner.reserve_ahead(io).await;
    }

    /// As [`Scratch::link`], but `None` if that would wait.
    pub fn link_at_once(&self, offset: u64, staged: &mut Staged) -> Option<IoResult> {
        if let Err(error) = self.check_link(offset, staged) {
            return Some(Err(error));
        }
        if self.inner.index.is_lost() {
            return Some(Err(IoError::EIO));
        }
        if !self.has_tables(offset, staged) {
            return None;
        }
        let mut state = self.inner.lock();
        match self.try_link(&mut state, offset / PAGE_BYTES, staged) {
            Step::Done(()) => Some(Ok(())),
            Step::Fail(error) => Some(Err(error)),
            Step::Wait | Step::Need(_) | Step::Flush => None,
        }
    }

    /// Whether all parts of the disk that the pages go to have tables.
    fn has_tables(&self, offset: u64, staged: &Staged) -> bool {
        let pages = Inner::pages_of(offset, staged.length_bytes);
        let mut parts = Inner::part_of(pages.start)..=Inner::part_of(pages.end.saturating_sub(1));
        parts.all(|part| matches!(self.inner.index.part(part), Part::Table(_)))
    }

    fn check_link(&self, offset: u64, staged: &Staged) -> IoResult {
        let end = offset.checked_add(staged.length_bytes).filter(|end| *end <= self.inner.size_bytes);
        if end.is_none() || !offset.is_multiple_of(PAGE_BYTES) || !self.owns(staged) || staged.is_linked {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        Ok(())
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
        // From here on the space belongs to the disk, even if the index fails halfway.
        staged.is_linked = true;
        let (mut freed, mut last): (Vec<Range<u64>>, Option<Range<u64>>) = (Vec::new(), None);
        for (page, data) in guest.zip(staged.data.clone()) {
            let set = word_of(data).and_then(|word| inner.index.set(page, word));
            let Some(before) = set else { return Step::Fail(IoError::EIO) };
            let Some(data) = data_page(before) else { continue };
            match &mut last {
                Some(run) if run.end == data => run.end = data.saturating_add(1),
                _ => freed.extend(last.replace(data..data.saturating_add(1))),
            }
        }
        if last.is_some() {
            state.retire(&inner.epochs, freed.into_iter().chain(last));
        }
        if inner.index.is_lost() { Step::Fail(IoError::EIO) } else { Step::Done(()) }
    }
}
