//! Writes to pages that the overlay does not hold yet, in two steps: *prepare* reserves, *commit* publishes.

use crate::layout::{BELOW, PAGE_BYTES, data_page, word_of};
use crate::scratch::Scratch;
use crate::state::{Inner, State, Step};
use block::{Extent, Fill, IoError, IoErrorKind, IoResult, MetaIo};
use std::ops::Range;
use std::sync::Arc;

/// The most pages of one allocation: 2 MiB.
const ALLOCATION_PAGES: u64 = 512;

/// The result of preparing a write.
pub type Prepared = block::Prepared<Allocation>;

/// Space for whole pages, invisible until [`Scratch::commit_write`]. Dropping it gives the space back.
pub struct Allocation {
    /// First byte of the disk, at or before the request; a page begins here.
    pub guest_offset: u64,
    /// Whole pages. May end before the request does, or behind the end of the disk.
    pub length_bytes: u64,
    /// First byte in the data file.
    pub file_offset: u64,
    /// How to fill the first page before the request.
    pub head: Fill,
    /// How to fill the last page behind the request.
    pub tail: Fill,
    /// Whether the space reads as zeros.
    pub zeroed: bool,
    guest: Range<u64>,
    data: Range<u64>,
    is_published: bool,
    inner: Arc<Inner>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.in_flight.remove(&self.guest.start);
        if !self.is_published {
            // A write to it may still be in flight.
            state.retire(&self.inner.epochs, [self.data.clone()]);
        }
        drop(state);
        self.inner.idle.wake_all();
    }
}

impl Scratch {
    /// Reserves space for the first part of a write, or finds its place. Waits while another write allocates the same
    /// page, and for space.
    pub async fn prepare_write(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Prepared> {
        let end = offset.checked_add(length_bytes).filter(|end| *end <= self.inner.size_bytes && length_bytes > 0);
        if end.is_none() {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        self.inner.run(io, |state| self.try_prepare(state, offset, length_bytes)).await
    }

    fn try_prepare(&self, state: &mut State, offset: u64, length_bytes: u64) -> Step<Prepared> {
        let inner = &self.inner;
        let wanted = Inner::pages_of(offset, length_bytes);
        let first = wanted.start;
        if state.is_in_flight(&(first..first.saturating_add(1))) {
            return Step::Wait;
        }
        if data_page(inner.index.word(first)).is_some() {
            let mapped = inner.index.lookup(offset, length_bytes);
            let Extent::Data { offset, .. } = mapped.extent else { return Step::Fail(IoError::EIO) };
            return Step::Done(Prepared::InPlace { offset, length_bytes: mapped.length_bytes });
        }
        let part = Inner::part_of(first);
        if let Some(not_yet) = state.table_for(&inner.index, part) {
            return not_yet.without_value();
        }
        let is_free = |page: &u64| {
            Inner::part_of(*page) == part
                && data_page(inner.index.word(*page)).is_none()
                && !state.is_in_flight(&(*page..page.saturating_add(1)))
        };
        let count = wanted.take(ALLOCATION_PAGES as usize).take_while(is_free).count() as u64;
        let taken = state.take_data(&inner.epochs, count);
        inner.note_space(state);
        let (data, zeroed) = match taken {
            Ok(taken) => taken,
            Err(not_yet) => return not_yet.without_value(),
        };
        let count = data.end.saturating_sub(data.start);
        let guest = first..first.saturating_add(count);
        let fill = |page: u64| match inner.index.word(page) {
            BELOW => Fill::Copy,
            _ if zeroed => Fill::None,
            _ => Fill::Zero,
        };
        state.in_flight.insert(guest.start, guest.end);
        Step::Done(Prepared::New(Allocation {
            guest_offset: first.saturating_mul(PAGE_BYTES),
            length_bytes: count.saturating_mul(PAGE_BYTES),
            file_offset: data.start.saturating_mul(PAGE_BYTES),
            head: fill(first),
            tail: fill(guest.end.saturating_sub(1)),
            zeroed,
            guest,
            data,
            is_published: false,
            inner: Arc::clone(inner),
        }))
    }

    /// Publishes an allocation whose data and fillings have been written.
    pub fn commit_write(&self, mut allocation: Allocation) -> IoResult {
        let mut state = self.inner.lock();
        self.inner.note_table(&mut state, Inner::part_of(allocation.guest.start));
        // From here on the space belongs to the disk, even if the index fails halfway.
        allocation.is_published = true;
        for (page, data) in allocation.guest.clone().zip(allocation.data.clone()) {
            let word = word_of(data).ok_or(IoError::EIO)?;
            self.inner.index.set(page, word).ok_or(IoError::EIO)?;
        }
        drop(state);
        if self.inner.index.is_lost() { Err(IoError::EIO) } else { Ok(()) }
    }
}

impl Step<()> {
    /// Converts to the step of an attempt with a value, of which this is never [`Step::Done`].
    fn without_value<T>(self) -> Step<T> {
        match self {
            Self::Done(()) | Self::Wait => Step::Wait,
            Self::Need(need) => Step::Need(need),
            Self::Flush => Step::Flush,
            Self::Fail(error) => Step::Fail(error),
        }
    }
}
