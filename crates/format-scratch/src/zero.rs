//! Zeroing and discarding: pages that become zero free their space.

use crate::index::Part;
use crate::layout::{PAGE_BYTES, TABLE_WORDS, ZERO, data_page};
use crate::scratch::Scratch;
use crate::state::{Inner, State, Step};
use block::{IoResult, MetaIo, yield_now};
use std::ops::Range;

/// The number of parts of the disk after which other tasks run.
const PARTS_A_TURN: usize = 64;

impl Scratch {
    /// Makes a range read as zeros. Returns the incomplete pages, which ordinary writes have to zero.
    pub async fn write_zeroes(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult<Vec<Range<u64>>> {
        let end = offset.saturating_add(length_bytes).min(self.inner.size_bytes);
        let whole = self.whole_pages(offset, end);
        let head = offset..whole.start.saturating_mul(PAGE_BYTES).min(end);
        let tail = whole.end.saturating_mul(PAGE_BYTES).max(head.end)..end;
        self.zero_pages(io, whole).await?;
        let is_left = |part: &Range<u64>| !part.is_empty() && self.inner.index.word(part.start / PAGE_BYTES) != ZERO;
        Ok([head, tail].into_iter().filter(is_left).collect())
    }

    /// Makes the whole pages of a range read as zeros.
    pub async fn discard(&self, io: &MetaIo, offset: u64, length_bytes: u64) -> IoResult {
        let end = offset.saturating_add(length_bytes).min(self.inner.size_bytes);
        self.zero_pages(io, self.whole_pages(offset, end)).await
    }

    /// Returns the whole pages of a range. The page in which the disk ends is whole if the range also ends there.
    fn whole_pages(&self, offset: u64, end: u64) -> Range<u64> {
        let last = if end == self.inner.size_bytes { end.div_ceil(PAGE_BYTES) } else { end / PAGE_BYTES };
        offset.div_ceil(PAGE_BYTES)..last
    }

    async fn zero_pages(&self, io: &MetaIo, pages: Range<u64>) -> IoResult {
        let Range { mut start, end } = pages;
        for step in 1_usize.. {
            if start >= end {
                break;
            }
            let part_end = Inner::part_of(start).saturating_add(1).saturating_mul(TABLE_WORDS);
            let here = start..part_end.min(end);
            start = here.end;
            self.inner.run(io, |state| self.try_zero(state, &here)).await?;
            if step.is_multiple_of(PARTS_A_TURN) {
                yield_now().await;
            }
        }
        Ok(())
    }

    /// Zeroes pages of one part.
    fn try_zero(&self, state: &mut State, pages: &Range<u64>) -> Step<()> {
        let inner = &self.inner;
        if state.is_in_flight(pages) {
            return Step::Wait;
        }
        let part = Inner::part_of(pages.start);
        let disk_pages = inner.size_bytes.div_ceil(PAGE_BYTES);
        let is_whole = pages.start.is_multiple_of(TABLE_WORDS)
            && (pages.end.is_multiple_of(TABLE_WORDS) || pages.end == disk_pages);
        match inner.index.part(part) {
            Part::All(ZERO) => return Step::Done(()),
            Part::All(_) if is_whole => {
                inner.set_part(state, part, true);
                return Step::Done(());
            }
            _ => {}
        }
        if let Some(not_yet) = state.table_for(&inner.index, part) {
            return not_yet;
        }
        inner.note_table(state, part);
        let mut freed: Vec<Range<u64>> = Vec::new();
        for page in pages.clone() {
            let before = inner.index.set(page, ZERO).and_then(data_page);
            let Some(data) = before else { continue };
            match freed.last_mut() {
                Some(run) if run.end == data => run.end = data.saturating_add(1),
                _ => freed.push(data..data.saturating_add(1)),
            }
        }
        if !freed.is_empty() {
            state.retire(&inner.epochs, freed);
        }
        Step::Done(())
    }
}
