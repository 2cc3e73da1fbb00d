//! Provides what a step needs: tables from the file, zeroed space, a range without writes in flight.
//!
//! Each load is done once; other tasks that need the same wait for it. A task that loads may be dropped at any await.
//! Its guard then lets the next task try.

use crate::layout::bitmap::AUTOCLEAR_BITMAPS;
use crate::layout::entry::entries;
use crate::layout::extended_entry::never_changing;
use crate::layout::geometry::MAX_FILE_BYTES;
use crate::layout::header::OFFSET_AUTOCLEAR;
use crate::live::flush_queue::Barrier;
use crate::live::state::{FreshTable, Inner, Need, State};
use block::sync::Ordering;
use block::{FileOp, IoError, IoErrorKind, IoResult, MetaIo, PastEnd};
use memory::{AlignedBuf, IoBuf};

/// The file grows by its own length, within these limits: rarely if it is large, by little if it is small.
const EXTENSION_BYTES_MIN: u64 = 256 << 10;
const EXTENSION_BYTES_MAX: u64 = 16 << 20;

/// Marks something as being loaded until dropped.
pub(crate) struct Loading<'a> {
    inner: &'a Inner,
    need: Need,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.inner.lock().busy.remove(&self.need);
        self.inner.loaded.wake_all();
    }
}

impl Inner {
    pub(crate) async fn satisfy(&self, io: &MetaIo, need: Need) -> IoResult {
        match need {
            Need::Flush => self.flush(io).await,
            Need::DirtyBit => self.make_dirty(io).await,
            Need::Idle(range) => {
                if self.lock().give_way(&range) {
                    self.idle.wake_all();
                }
                self.idle.until(|| self.lock().overlapping(&range).is_none().then_some(())).await;
                Ok(())
            }
            Need::Slice(slice) => {
                while !self.load_slice(io, slice).await? {
                    self.flush(io).await?;
                }
                Ok(())
            }
            Need::Block(block) => self.load_block(io, block).await,
            Need::Extension => self.extend(io).await,
            Need::HeaderReady => self.make_header_ready(io).await,
        }
    }

    /// Takes on a load. `None` if another task had it and has finished.
    pub(crate) async fn begin(&self, need: Need) -> Option<Loading<'_>> {
        if self.lock().busy.insert(need.clone()) {
            return Some(Loading { inner: self, need });
        }
        self.loaded.until(|| (!self.lock().busy.contains(&need)).then_some(())).await;
        None
    }

    /// Reads a slice into memory. Returns false if a flush has to make room first.
    async fn load_slice(&self, io: &MetaIo, slice: u64) -> IoResult<bool> {
        let Some(_loading) = self.begin(Need::Slice(slice)).await else { return Ok(true) };
        let l1_index = self.geometry.l1_index_of_slice(slice);
        if self.slices.view(slice).is_some() {
            return Ok(true);
        }
        let source = {
            let mut state = self.lock();
            if state.fresh_tables.get(&l1_index) == Some(&FreshTable::Zeros) {
                return Ok(state.book.install(&self.slices, slice, std::iter::repeat(0)));
            }
            self.table_in_file(&state, l1_index)?
        };
        // Without a table, there is nothing to load: the caller looks again.
        let Some(table) = source else { return Ok(true) };
        let offset = table.saturating_add(self.geometry.slice_offset_in_table(slice));
        let length = usize::try_from(self.geometry.slice_bytes()).map_err(|_| IoError::EIO)?;
        self.slices_read.fetch_add(1, Ordering::Relaxed);
        let read = io.read(offset, length, PastEnd::Fails).await;
        let mut state = self.lock();
        // If the table has moved meanwhile, the bytes may be anything: the caller looks again. A table never returns to
        // a place that it has left: it only moves towards the start of the file.
        if self.table_in_file(&state, l1_index)? != source {
            return Ok(true);
        }
        let bytes = read?;
        // The slice cannot have changed in between: only slices in memory change, and only this load could have put it
        // there.
        let words = entries(&bytes).enumerate().map(|(index, raw)| match self.geometry.extended_l2 && index % 2 == 0 {
            true => never_changing(raw),
            false => raw,
        });
        Ok(state.book.install(&self.slices, slice, words))
    }

    /// Returns where slices that are not in memory are read from; `None` if the file has no table.
    fn table_in_file(&self, state: &State, l1_index: u64) -> IoResult<Option<u64>> {
        match state.fresh_tables.get(&l1_index) {
            Some(FreshTable::Zeros) => Ok(None),
            Some(FreshTable::CopyOf(offset)) => Ok(Some(*offset)),
            None => Ok(self.table_or_complain(l1_index)?.map(|table| table.offset)),
        }
    }

    pub(crate) async fn load_block(&self, io: &MetaIo, block: u64) -> IoResult {
        let Some(_loading) = self.begin(Need::Block(block)).await else { return Ok(()) };
        let offset = {
            let state = self.lock();
            if state.refcounts.is_loaded(block) {
                return Ok(());
            }
            state.refcounts.block_offset(block)
        };
        let Ok(offset) = offset else { return Ok(()) };
        let length = usize::try_from(self.geometry.cluster_bytes()).map_err(|_| IoError::EIO)?;
        let bytes = io.read(offset, length, PastEnd::Fails).await?;
        self.lock().refcounts.install(block, Box::from(&*bytes));
        Ok(())
    }

    /// Extends the file by space that reads as zeros even after a power cut. The space is zeroed, so no old contents
    /// show through. Meanwhile no space at the end of the file is taken.
    async fn extend(&self, io: &MetaIo) -> IoResult {
        let Some(_loading) = self.begin(Need::Extension).await else { return Ok(()) };
        // A dropped task may still be zeroing there, and would overwrite later writes.
        self.extensions.over().await;
        self.settle_frontier(io).await?;
        let from = {
            let state = self.lock();
            if state.space.zeroed_end > state.space.frontier || !state.space.can_extend {
                return Ok(());
            }
            state.space.frontier
        };
        let length = self.geometry.start_of(from).clamp(EXTENSION_BYTES_MIN, EXTENSION_BYTES_MAX);
        let to = from.saturating_add(self.geometry.clusters_for(length));
        let (start, end) = (self.geometry.start_of(from), self.geometry.start_of(to));
        if end > MAX_FILE_BYTES {
            return Err(IoError::new(IoErrorKind::NoSpace));
        }
        // The length is never set directly: that could cut off data.
        let zeroes = FileOp::WriteZeroes { offset: start, length: end.saturating_sub(start), may_unmap: true };
        self.extensions.start(io.queue(), zeroes).await?;
        let mut state = self.lock();
        state.space.zeroed_end = to;
        if self.skips(Barrier::Extension) {
            state.space.blank_end = to;
        }
        Ok(())
    }

    /// Moves the frontier behind everything that has a refcount. Clusters behind the end of the file may be in use
    /// without having been written, and must neither be zeroed later nor cut off.
    async fn settle_frontier(&self, io: &MetaIo) -> IoResult {
        let (mut block, first) = {
            let state = self.lock();
            if state.space.settled {
                return Ok(());
            }
            (state.refcounts.last_block(), self.geometry.block_of(state.space.frontier))
        };
        while let Some(number) = block.filter(|number| *number >= first) {
            self.load_block(io, number).await?;
            let mut state = self.lock();
            // Another task may have had the load, and may have failed.
            if !state.refcounts.is_loaded(number) && state.refcounts.block_offset(number).is_ok() {
                continue;
            }
            let start = self.geometry.block_start(number).max(state.space.frontier);
            let end = self.geometry.block_end(number);
            let last_used =
                (start..end).rev().find(|cluster| state.refcounts.get(*cluster).is_ok_and(|count| count > 0));
            if let Some(cluster) = last_used {
                state.space.frontier = cluster.saturating_add(1);
                break;
            }
            block = number.checked_sub(1);
        }
        self.lock().space.settled = true;
        Ok(())
    }

    /// Prepares the image for its first write. Makes the header durable that was read at open: after a sync that failed, the
    /// storage may have another one. Finds all tables, those of snapshots included. Marks the bitmaps in use. Clears the
    /// autoclear bits whose structures we do not keep valid.
    async fn make_header_ready(&self, io: &MetaIo) -> IoResult {
        let Some(_loading) = self.begin(Need::HeaderReady).await else { return Ok(()) };
        // A close whose task was dropped may still be writing that bitmaps are not in use.
        self.table_writes.over().await;
        self.refuse_if_stopped()?;
        if self.header_ready.load(Ordering::Acquire) {
            return Ok(());
        }
        self.tables(&mut self.lock());
        if !self.lock().header_settled {
            self.write_header(io).await?;
            self.lock().header_settled = true;
        }
        if !self.lock().snapshots_known {
            self.collect_snapshots(io).await;
            self.lock().snapshots_known = true;
        }
        let bitmaps = if self.begin_tracking(io).await? { AUTOCLEAR_BITMAPS } else { 0 };
        self.keep_autoclear(io, self.header.kept_autoclear() | bitmaps).await?;
        self.header_ready.store(true, Ordering::Release);
        Ok(())
    }

    /// Clears all autoclear bits but these, durably. Version 2 has none: other data lie in their place.
    async fn keep_autoclear(&self, io: &MetaIo, kept: u64) -> IoResult {
        let kept = self.header.autoclear_features & kept;
        if kept == self.header.autoclear_features {
            return Ok(());
        }
        if let Some(field) = self.lock().header_sector.get_mut(OFFSET_AUTOCLEAR..OFFSET_AUTOCLEAR.saturating_add(8)) {
            field.copy_from_slice(&kept.to_be_bytes());
        }
        self.write_header(io).await
    }

    /// Writes the header's first sector, durably.
    async fn write_header(&self, io: &MetaIo) -> IoResult {
        let sector = AlignedBuf::copy_of(&self.lock().header_sector);
        let data = IoBuf::from_aligned(sector).whole();
        self.table_writes.start(io.queue(), FileOp::Write { offset: 0, data, fua: false }).await?;
        io.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use block::{File, block_on};

    #[test]
    fn what_is_in_use_behind_the_end_of_the_file_is_found_though_somebody_elses_load_of_it_failed() {
        let (storage, io) = fixture::created(1 << 20);
        let used = block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            // Counted but not written: the file ends before it.
            let last = fixture::file(&storage).info().length_bytes / fixture::CLUSTER;
            let first_free = last + 10;
            qcow2
                .inner
                .run(&io, |state| {
                    state.refcounts.get(first_free).map_err(|absent| qcow2.inner.stop_for(absent))?;
                    Ok(state.refcounts.set(first_free, 1).map_err(|_| IoError::EIO)?)
                })
                .await
                .unwrap();
            qcow2.flush(&io).await.unwrap();
            first_free
        });
        let qcow2 = block_on(fixture::opened(&storage, &io));
        let inner = &*qcow2.inner;
        let block = inner.geometry.block_of(used);
        let loading = block_on(inner.begin(Need::Block(block))).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let io = MetaIo::new(fixture::file(&storage).open_blocking().unwrap());
                block_on(inner.settle_frontier(&io)).unwrap();
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            drop(loading);
            other.join().unwrap();
        });
        assert_eq!(inner.lock().space.frontier, used + 1);
    }
}
