//! Overlays that outlive their process: how a flush makes them durable, and in what order.
//!
//! Requests use the index in memory. A flush takes the index's changed pages, makes the data durable, writes those
//! pages to the index file, and makes them durable. So:
//!
//! * A word in the file never names data that are not durable, whatever part of a page a power cut leaves.
//! * Freed pages of the data are used again only when the file no longer names them.
//! * Pages that refer to tables (the owners, the bits of zero parts) are written when the tables are durable.

use crate::header::Header;
use crate::index::Part;
use crate::layout::{BELOW, PAGE_BYTES, PART_BYTES, TABLE_WORDS, ZERO, data_page, leads_to_tables};
use crate::scratch::Scratch;
use crate::state::{Inner, State};
use crate::unwritten::Kept;
use block::{FileOp, IoError, IoResult, MetaIo};
use memory::{AlignedBuf, IoBuf};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The most pages of the index that are copied and written between two syncs of the data. Their copies are in memory at
/// once.
const BATCH_PAGES: usize = 1024;
/// The longest write, in pages.
const WRITE_PAGES: u64 = 64;

impl Inner {
    /// Notes that pages of the index are about to change. The lock is held until they have.
    fn note(&self, state: &mut State, pages: impl IntoIterator<Item = u64>) {
        let Some(kept) = &self.kept else { return };
        // A reader that sees the change also sees this.
        kept.is_clean.store(false, Ordering::Relaxed);
        state.unwritten.note(pages);
    }

    /// As [`Inner::note`], for the words of the part's table.
    pub(crate) fn note_table(&self, state: &mut State, part: u64) {
        if self.kept.is_some()
            && let Part::Table(page) = self.index.part(part)
        {
            self.note(state, [u64::from(page)]);
        }
    }

    /// Makes a part without a table zero, or leaves it to the layer below.
    pub(crate) fn set_part(&self, state: &mut State, part: u64, is_zero: bool) {
        if self.kept.is_some() {
            let changed = self.index.set_zero_bit(part, is_zero);
            self.note(state, [changed]);
        }
        self.index.set_part(part, is_zero);
    }

    /// Copies adjacent pages of the index.
    fn copy(&self, pages: Range<u64>) -> AlignedBuf {
        let count = pages.end.saturating_sub(pages.start);
        let mut copy = AlignedBuf::zeroed(usize::try_from(count.saturating_mul(PAGE_BYTES)).unwrap_or(0));
        for (bytes, word) in copy.chunks_exact_mut(4).zip(pages.flat_map(|page| self.index.page(page))) {
            bytes.copy_from_slice(&word.load(Ordering::Acquire).to_le_bytes());
        }
        copy
    }

    /// Copies these pages, and returns each run with its place.
    fn copies(&self, pages: impl Iterator<Item = u64>) -> Vec<(u64, AlignedBuf)> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for page in pages {
            match runs.last_mut() {
                Some(run) if run.end == page && page.saturating_sub(run.start) < WRITE_PAGES => {
                    run.end = page.saturating_add(1);
                }
                _ => runs.push(page..page.saturating_add(1)),
            }
        }
        runs.into_iter().map(|run| (run.start.saturating_mul(PAGE_BYTES), self.copy(run))).collect()
    }

    async fn write(&self, io: &MetaIo, copies: Vec<(u64, AlignedBuf)>) -> IoResult {
        for (offset, bytes) in copies {
            let write = FileOp::Write { offset, data: IoBuf::from_aligned(bytes).whole(), fua: false };
            self.index_writes.start(io.queue(), write).await?;
        }
        Ok(())
    }
}

/// A flush that is under way. The rest of an unfinished one is left for the next.
struct Flush<'a> {
    inner: &'a Inner,
    /// The pages that had changed when the flush began.
    pages: BTreeSet<u64>,
    change: u64,
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.unwritten.pages.append(&mut self.pages);
        state.unwritten.is_flushing = false;
        drop(state);
        self.inner.idle.wake_all();
    }
}

impl<'a> Flush<'a> {
    /// Waits for the flush before; then takes the changed pages, and copies those that refer to tables.
    async fn begin(inner: &'a Inner) -> (Self, Vec<(u64, AlignedBuf)>) {
        let mut begin = || {
            let mut state = inner.lock();
            if state.unwritten.is_flushing {
                return None;
            }
            state.unwritten.is_flushing = true;
            let pages = std::mem::take(&mut state.unwritten.pages);
            // These copies are made under the lock, so they refer to no table that is newer than those that this flush
            // writes.
            let leading = inner.copies(pages.iter().copied().filter(|page| inner.leads_to_tables(*page)));
            Some((Self { inner, pages, change: state.unwritten.change }, leading))
        };
        inner.idle.until(&mut begin).await
    }

    fn has_ended(mut self, kept: &Kept) {
        let mut state = self.inner.lock();
        self.pages.clear();
        state.unwritten.durable = self.change;
        if state.unwritten.change == self.change {
            kept.is_clean.store(true, Ordering::Release);
        }
        drop(state);
    }
}

impl Inner {
    /// Forgets all data, and their space, if a durable index names none. Returns whether it did.
    fn forget_data_if_empty(&self) -> bool {
        let mut state = self.lock();
        let is_durable = state.unwritten.change == state.unwritten.durable && !state.unwritten.is_flushing;
        let is_empty = self.kept.is_some() && is_durable && !self.index.is_lost() && !self.index.names_data();
        if is_empty {
            state.forget_data();
        }
        is_empty
    }

    fn leads_to_tables(&self, page: u64) -> bool {
        leads_to_tables(self.index.header_pages, page)
    }

    /// See [`Scratch::flush`].
    pub(crate) async fn flush(&self, io: &MetaIo) -> IoResult {
        let (inner, Some(kept)) = (self, &self.kept) else { return Ok(()) };
        let data = io.data().ok_or(IoError::EIO)?;
        let (flush, leading) = Flush::begin(inner).await;
        // A flush whose task was dropped may have older copies of the same pages in flight. They must not land last.
        inner.index_writes.over().await;
        if inner.index.is_lost() {
            return Err(IoError::EIO);
        }
        let tables: Vec<u64> = flush.pages.iter().copied().filter(|page| !inner.leads_to_tables(*page)).collect();
        if tables.is_empty() {
            data.start(FileOp::Flush).await?;
        }
        for batch in tables.chunks(BATCH_PAGES) {
            // Every word in these copies was published before the data are made durable.
            let copies = inner.copies(batch.iter().copied());
            data.start(FileOp::Flush).await?;
            inner.write(io, copies).await?;
        }
        if !tables.is_empty() {
            io.flush().await?;
        }
        if !leading.is_empty() {
            inner.write(io, leading).await?;
            io.flush().await?;
        }
        flush.has_ended(kept);
        Ok(())
    }
}

impl Scratch {
    /// Returns the header of a kept overlay.
    #[must_use]
    pub fn header(&self) -> Option<&Header> {
        self.inner.kept.as_ref().map(|kept| &kept.header)
    }

    /// Whether the mappings looked up before this call survive a power cut. A temporary overlay counts as durable.
    #[inline]
    #[must_use]
    pub fn is_mapping_durable(&self) -> bool {
        self.inner.kept.as_ref().is_none_or(|kept| kept.is_clean.load(Ordering::Acquire))
    }

    /// Sets whether its index counts towards the memory limit for indexes. While the same overlay is opened anew, only
    /// one of the two counts.
    pub fn count_index_memory(&self, counts: bool) {
        if let Some(memory) = &mut self.inner.lock().index_memory {
            memory.count(counts);
        }
    }

    /// Makes the next durable write also flush earlier writes.
    pub fn flush_with_next_write(&self) {
        self.inner.note(&mut self.inner.lock(), []);
    }

    /// Makes every write that completed before this call durable, if the overlay is kept.
    pub async fn flush(&self, io: &MetaIo) -> IoResult {
        self.inner.flush(io).await
    }

    /// Gives the space of the data back to the host, if the index names no data and is durable. No request is in
    /// flight.
    pub async fn give_back_if_empty(&self, io: &MetaIo) -> IoResult {
        let (inner, Some(data)) = (&*self.inner, io.data()) else { return Ok(()) };
        if inner.forget_data_if_empty() {
            data.start(FileOp::SetLength { length: 0 }).await?;
            data.start(FileOp::Flush).await?;
        }
        Ok(())
    }

    /// Makes a kept overlay forget whole parts of a range, so that the layer below shows. No request is in flight.
    pub fn reveal(&self, offset: u64, length_bytes: u64) {
        let inner = &*self.inner;
        let end = offset.saturating_add(length_bytes).min(inner.size_bytes);

        let behind = if end == inner.size_bytes { end.div_ceil(PART_BYTES) } else { end / PART_BYTES };
        for part in offset.div_ceil(PART_BYTES)..behind {
            let mut state = inner.lock();
            match inner.index.part(part) {
                Part::All(ZERO) => inner.set_part(&mut state, part, false),
                Part::All(_) => {}
                Part::Table(_) => {
                    inner.note_table(&mut state, part);
                    let first = part.saturating_mul(TABLE_WORDS);
                    let pages = first..first.saturating_add(TABLE_WORDS);
                    let freed = pages.filter_map(|page| inner.index.set(page, BELOW).and_then(data_page));
                    let freed: Vec<Range<u64>> = freed.map(|page| page..page.saturating_add(1)).collect();
                    state.retire(&inner.epochs, freed);
                }
            }
        }
    }
}
