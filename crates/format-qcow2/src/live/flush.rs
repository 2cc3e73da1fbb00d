//! Makes changes durable, in an order that keeps the image valid at every moment.
//!
//! 1. Refcount blocks and new L2 tables that nothing on disk refers to yet; barrier. The barrier also makes durable,
//!    before any mapping refers to them, guest data and the copied or zeroed rest of clusters.
//! 2. If refcount blocks are new, their entries in the refcount table. If that table has moved, the header. Barrier.
//!
//! If refcounts are postponed (see `lazy_refcounts`), no step writes them. Steps 1 and 3 then become one step if all
//! the new places read as zeros until they are written, as the guest's clusters did before.
//!
//! Refcounts of clusters that step 3 unlinked are decremented only afterwards. So refcounts are never too low after a
//! power cut. All bytes to write are copied at one moment, under the mutex, so the tables agree. One flush runs at a
//! time. Callers that arrive meanwhile share the next one.

use crate::layout::header::OFFSET_REFCOUNT_TABLE;
use crate::live::flush_queue::{Barrier, Outcome};
use crate::live::metadata_map::Owner;
use crate::live::refcounts::{Piece, RefcountWrites, sectors};
use crate::live::state::{Freed, FreshTable, Inner, State};
use block::sync::Ordering;
use block::{FileOp, InFlightOps, IoError, IoResult, MetaIo, PastEnd};
use memory::IoBuf;
use std::sync::Arc;

/// Neighbouring pieces are joined into writes of up to this size.
const JOINED_BYTES_MAX: usize = 1 << 20;
/// The most writes in flight at once.
const BATCH: usize = 32;

enum Turn {
    Over(Option<IoResult>),
    Mine,
}

/// Held by the task that carries out a flush. If it is dropped before the end, those who share the flush start another.
struct Leading<'a> {
    inner: &'a Inner,
    outcome: Outcome,
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        // Already set unless the task was dropped.
        let _ = self.outcome.set(None);
        self.inner.lock().flushes.running = false;
        self.inner.flushed.wake_all();
    }
}

impl Inner {
    pub(crate) async fn flush(&self, io: &MetaIo) -> IoResult {
        if self.read_only {
            return Ok(());
        }
        loop {
            // Only a flush that has not started yet covers everything that has completed.
            let outcome = Arc::clone(&self.lock().flushes.next);
            let turn = self.flushed.until(|| self.turn(&outcome)).await;
            match turn {
                Turn::Over(Some(result)) => return result,
                Turn::Over(None) => {}
                Turn::Mine => {
                    let leading = Leading { inner: self, outcome };
                    let result = self.flush_now(io).await;
                    let _ = leading.outcome.set(Some(result));
                    return result;
                }
            }
        }
    }

    fn turn(&self, outcome: &Outcome) -> Option<Turn> {
        if let Some(result) = outcome.get() {
            return Some(Turn::Over(*result));
        }
        let mut state = self.lock();
        if state.flushes.running {
            return None;
        }
        state.flushes.running = true;
        state.flushes.next = Outcome::default();
        Some(Turn::Mine)
    }

    pub(crate) async fn close(&self, io: &MetaIo) -> IoResult {
        if self.read_only {
            return Ok(());
        }
        // Preallocated space stays: in a damaged image, data may lie there without a refcount.
        self.settle(io).await?;
        self.store_bitmaps(io).await
    }

    /// Writes everything to the file, including refcounts. No operation is in flight.
    pub(crate) async fn settle(&self, io: &MetaIo) -> IoResult {
        self.stop_postponing();
        loop {
            self.flush(io).await?;
            // Maps may still read without a request; they are not waited for.
            self.epochs.overrule();
            self.reap(io, true).await?;
            let state = self.lock();
            if state.retired.is_empty() && state.unlinked.is_empty() {
                break;
            }
        }
        self.flush(io).await
    }

    pub(crate) fn skips(&self, barrier: Barrier) -> bool {
        self.skipped_barriers.load(Ordering::Relaxed) & barrier.bit() != 0
    }

    pub(crate) async fn barrier(&self, io: &MetaIo, which: Barrier) -> IoResult {
        if self.skips(which) { Ok(()) } else { io.flush().await }
    }

    async fn flush_now(&self, io: &MetaIo) -> IoResult {
        // A flush whose task was dropped may have older writes in flight. They must end first.
        self.table_writes.over().await;
        if self.is_stopped() {
            self.mark_corrupt(io).await;
            return self.refuse_if_stopped();
        }
        let zeroed_end = self.lock().space.zeroed_end;
        let marked = self.write_dirty_bit_if_wanted(io).await?;
        self.flush_tables(io).await?;
        {
            let mut state = self.lock();
            state.space.blank_end = zeroed_end;
            if state.is_mapping_written() {
                self.mapping_is_durable.store(true, Ordering::Release);
            }
        }
        if marked {
            self.dirty_bit_is_set();
        }
        self.clear_dirty_bit(io).await
    }

    async fn flush_tables(&self, io: &MetaIo) -> IoResult {
        // After an error, the next flush tries to decrement again. Until then space is lost, but no data.
        let _ = self.reap(io, false).await;
        let writing = Writing::begin(self)?;
        // Data in an external file become durable before anything that refers to them.
        if let Some(data) = io.data()
            && !(writing.is_some() && self.skips(Barrier::BeforeMapping))
        {
            data.start(FileOp::Flush).await?;
        }
        let Some(mut writing) = writing else {
            return self.barrier(io, Barrier::End).await;
        };
        let result = match self.guard_writes(&writing) {
            Ok(()) => self.write_tables(io, &mut writing).await,
            Err(error) => {
                self.mark_corrupt(io).await;
                Err(error)
            }
        };
        drop(writing);
        if result.is_ok() {
            let _ = self.reap(io, false).await;
        }
        result
    }

    fn guard_writes(&self, writing: &Writing<'_>) -> IoResult {
        let Writing { refcounts, fresh, mapping, l1, .. } = writing;
        self.guard_pieces(Owner::RefcountBlock, &refcounts.blocks)?;
        self.guard_pieces(Owner::RefcountTable, &refcounts.entries)?;
        if let Some(table) = &refcounts.moved_table {
            self.guard_pieces(Owner::RefcountTable, std::slice::from_ref(&table.piece))?;
            self.guard_pieces(Owner::Header, &[Piece { offset: 0, bytes: vec![0] }])?;
        }
        for table in fresh {
            self.guard_pieces(Owner::L2, &[Piece { offset: table.offset, bytes: vec![0] }])?;
        }
        self.guard_pieces(Owner::L2, mapping)?;
        self.guard_pieces(Owner::L1, l1)
    }

    async fn write_tables(&self, io: &MetaIo, writing: &mut Writing<'_>) -> IoResult {
        let refcounts = std::mem::take(&mut writing.refcounts);
        let mut mapping = std::mem::take(&mut writing.mapping);
        mapping.append(&mut writing.l1);
        write_all(&self.table_writes, io, refcounts.blocks).await?;
        for table in std::mem::take(&mut writing.fresh) {
            let bytes = self.fresh_table_bytes(io, &table).await?;
            write_all(&self.table_writes, io, vec![Piece { offset: table.offset, bytes }]).await?;
            writing.fresh_written.push(table.l1_index);
        }
        let place = refcounts.moved_table.as_ref().map(|table| (table.piece.offset, table.clusters));
        let relies = place.is_some() || !refcounts.entries.is_empty();
        let table = refcounts.moved_table.map(|table| table.piece);
        write_all(&self.table_writes, io, table.into_iter().collect()).await?;
        let last = !relies && mapping.is_empty();
        if last || writing.ordered {
            self.barrier(io, if last { Barrier::End } else { Barrier::BeforeMapping }).await?;
            writing.tables_are_written();
        }
        if relies {
            write_all(&self.table_writes, io, refcounts.entries).await?;
            // Not before: if a step above fails, later writes of the header have to name the old table.
            let header = place.map(|(offset, clusters)| self.header_naming(offset, clusters));
            write_all(&self.table_writes, io, header.into_iter().collect()).await?;
            let last = mapping.is_empty();
            self.barrier(io, if last { Barrier::End } else { Barrier::BeforeRelying }).await?;
        }
        writing.refcounts_are_written();
        if !mapping.is_empty() {
            write_all(&self.table_writes, io, mapping).await?;
            self.barrier(io, Barrier::End).await?;
        }
        writing.tables_are_written();
        writing.all_is_written();
        Ok(())
    }

    /// Returns the bytes of a whole L2 table that was never written.
    async fn fresh_table_bytes(&self, io: &MetaIo, table: &FreshWrite) -> IoResult<Vec<u8>> {
        let length = usize::try_from(self.geometry.cluster_bytes()).map_err(|_| IoError::EIO)?;
        let mut bytes = match table.kind {
            FreshTable::Zeros => vec![0; length],
            FreshTable::CopyOf(offset) => io.read(offset, length, PastEnd::Fails).await?.to_vec(),
        };
        for (skip, slice) in &table.slices {
            let end = skip.saturating_add(slice.len());
            bytes.get_mut(*skip..end).ok_or(IoError::EIO)?.copy_from_slice(slice);
        }
        Ok(bytes)
    }

    /// Returns the header's first sector with a refcount table in a new place.
    fn header_naming(&self, table_offset: u64, clusters: u32) -> Piece {
        let mut state = self.lock();
        let mut fields = table_offset.to_be_bytes().to_vec();
        fields.extend(clusters.to_be_bytes());
        let end = OFFSET_REFCOUNT_TABLE.saturating_add(fields.len());
        if let Some(place) = state.header_sector.get_mut(OFFSET_REFCOUNT_TABLE..end) {
            place.copy_from_slice(&fields);
        }
        Piece { offset: 0, bytes: state.header_sector.to_vec() }
    }

    fn slice_bytes(&self, slice: u64) -> Option<Vec<u8>> {
        let view = self.slices.view(slice)?;
        let words = self.geometry.slice_words();
        let mut bytes = Vec::with_capacity(words.saturating_mul(8));
        for index in 0..words {
            bytes.extend_from_slice(&view.get(index)?.to_be_bytes());
        }
        Some(bytes)
    }
}

/// A new L2 table, and its changed slices.
struct FreshWrite {
    l1_index: u64,
    offset: u64,
    kind: FreshTable,
    slices: Vec<(usize, Vec<u8>)>,
}

/// A copy of the dirty tables at one moment, to be written to the file. If this is dropped, tables that were not
/// written become dirty again.
struct Writing<'a> {
    inner: &'a Inner,
    refcounts: RefcountWrites,
    table_moved: bool,
    fresh: Vec<FreshWrite>,
    fresh_written: Vec<u64>,
    /// Changed slices, and changed sectors of L1.
    mapping: Vec<Piece>,
    l1: Vec<Piece>,
    unlinked: Vec<Freed>,
    /// Whether everything that the mapping refers to must become durable first.
    ordered: bool,
    refcounts_written: bool,
    mapping_written: bool,
}

impl<'a> Writing<'a> {
    /// Copies the dirty tables; `None` if nothing is dirty.
    fn begin(inner: &'a Inner) -> IoResult<Option<Self>> {
        let mut guard = inner.lock();
        let state = &mut *guard;
        state.unlinked_clusters = 0;
        let postponed = inner.postpones_refcounts(state);
        let clean = !state.book.has_dirty() && state.l1_dirty.is_empty();
        if clean && (postponed || !state.refcounts.has_dirty()) && state.unlinked.is_empty() {
            return Ok(None);
        }
        let refcounts = if postponed { RefcountWrites::default() } else { state.refcounts.begin_writing() };
        let mut writing = Self {
            inner,
            table_moved: refcounts.moved_table.is_some(),
            refcounts,
            fresh: Vec::new(),
            fresh_written: Vec::new(),
            mapping: Vec::new(),
            l1: Vec::new(),
            unlinked: std::mem::take(&mut state.unlinked),
            ordered: std::mem::take(&mut state.needs_order) || !postponed,
            refcounts_written: false,
            mapping_written: false,
        };
        let collected = writing.collect_mapping(state);
        // Dropping `writing` takes the mutex.
        drop(guard);
        collected.map(|()| Some(writing))
    }

    fn collect_mapping(&mut self, state: &mut State) -> IoResult {
        let inner = self.inner;
        for (l1_index, kind) in &state.fresh_tables {
            let offset = inner.table_or_complain(*l1_index)?.ok_or(IoError::EIO)?.offset;
            self.fresh.push(FreshWrite { l1_index: *l1_index, offset, kind: *kind, slices: Vec::new() });
        }
        self.fresh.sort_by_key(|table| table.l1_index);
        for slice in state.book.begin_writing() {
            let l1_index = inner.geometry.l1_index_of_slice(slice);
            let skip = inner.geometry.slice_offset_in_table(slice);
            let bytes = inner.slice_bytes(slice).ok_or(IoError::EIO)?;
            if let Ok(found) = self.fresh.binary_search_by_key(&l1_index, |table| table.l1_index) {
                let table = self.fresh.get_mut(found).ok_or(IoError::EIO)?;
                table.slices.push((usize::try_from(skip).map_err(|_| IoError::EIO)?, bytes));
                continue;
            }
            let table = inner.table_or_complain(l1_index)?.ok_or(IoError::EIO)?;
            push_joined(&mut self.mapping, Piece { offset: table.offset.saturating_add(skip), bytes });
        }
        state.l1_writing = std::mem::take(&mut state.l1_dirty);
        let entry = |index: usize| inner.l1.get(index).map(|entry| entry.load(Ordering::Relaxed));
        self.l1 = sectors(&state.l1_writing, inner.header.l1_offset, entry);
        Ok(())
    }

    /// Notes that the new tables are durable: from now on they are like other tables.
    fn tables_are_written(&mut self) {
        let mut state = self.inner.lock();
        for l1_index in self.fresh_written.drain(..) {
            state.fresh_tables.remove(&l1_index);
        }
    }

    fn refcounts_are_written(&mut self) {
        self.refcounts_written = true;
        self.inner.lock().refcounts.end_writing(true, false);
    }

    /// Notes that the mapping is durable. The references that it dropped can be decremented.
    fn all_is_written(&mut self) {
        self.mapping_written = true;
        let mut state = self.inner.lock();
        state.book.end_writing(true);
        state.l1_writing.clear();
        self.retire_tables_anew();
        if state.retired.len() < self.unlinked.len() {
            // The list may be long, and its order does not matter.
            std::mem::swap(&mut state.retired, &mut self.unlinked);
        }
        state.retired.append(&mut self.unlinked);
    }

    /// Gives moved tables a new epoch: requests may have begun to read the old place until now.
    fn retire_tables_anew(&mut self) {
        let mut tables = self.unlinked.iter_mut().filter(|freed| freed.table == Some(Owner::L2)).peekable();
        if tables.peek().is_none() {
            return;
        }
        let epoch = self.inner.epochs.retire();
        tables.for_each(|freed| freed.epoch = epoch);
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        if !self.refcounts_written {
            state.refcounts.end_writing(false, self.table_moved);
        }
        if !self.mapping_written {
            state.book.end_writing(false);
            let entries = std::mem::take(&mut state.l1_writing);
            state.l1_dirty.extend(entries);
            state.needs_order |= self.ordered;
            state.unlinked.append(&mut self.unlinked);
        }
    }
}

fn push_joined(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last)
            if last.offset.saturating_add(last.bytes.len() as u64) == piece.offset
                && last.bytes.len() < JOINED_BYTES_MAX =>
        {
            last.bytes.extend(piece.bytes);
        }
        _ => pieces.push(piece),
    }
}

/// Writes all pieces, several at a time. After an error, some may have been written.
pub(crate) async fn write_all(tail: &Arc<InFlightOps>, io: &MetaIo, pieces: Vec<Piece>) -> IoResult {
    for batch in pieces.chunks(BATCH) {
        let copied = |piece: &Piece| {
            let data = IoBuf::from_pool(piece.bytes.len())?.whole();
            data.copy_from_slice(0, &piece.bytes);
            Ok(FileOp::Write { offset: piece.offset, data, fua: false })
        };
        let writes = batch.iter().map(copied).collect::<IoResult<Vec<_>>>()?;
        let started: Vec<_> = writes.into_iter().map(|write| tail.start(io.queue(), write)).collect();
        let mut result = Ok(());
        for write in started {
            result = result.and(write.await);
        }
        result?;
    }
    Ok(())
}
