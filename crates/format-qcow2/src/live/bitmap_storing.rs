//! Keeps an image's persistent bitmaps while it is written to (specification, "Bitmaps"). Before the first write,
//! bitmaps are loaded, and the file marks them in use. Every change of the disk is noted in them. Closing the image
//! writes them back.
//!
//! A bitmap that the file marks in use is never used. The mark is durable before anything is written, and is removed
//! only when the file has every bit. So a bitmap that missed a write is never used, however the process ends. At the
//! end, the order is: bits and refcounts, durable; tables that name new clusters, durable; marks, durable. Bits are
//! overwritten in place, and nothing of a bitmap is freed. Refcounts are not postponed here, even if the image allows
//! it, so an image that is being closed does not become dirty again. Space that was given up (a table that moved, a
//! bitmap that is lost) is freed last.

use crate::layout::bitmap::{TABLE_ALL_ONES, data_offset, is_damaged_table};
use crate::layout::entry::entries;
use crate::layout::geometry::clusters_of;
use crate::live::bitmap_bits::DirtyBits;
use crate::live::bitmap_tracking::{BitmapTracking, Tracked};
use crate::live::flush::write_all;
use crate::live::flush_queue::Barrier;
use crate::live::metadata_map::Owner;
use crate::live::refcounts::Piece;
use crate::live::state::{Freed, Inner, Need, State};
use block::sync::Ordering;
use block::{IoError, IoErrorKind, IoResult, MetaIo, PastEnd};
use std::ops::Range;

/// How many parts of a bitmap are written at once.
const PARTS_AT_ONCE: usize = 16;

impl Inner {
    /// Notes a change of the disk that is about to be made. The header is ready for it.
    #[inline]
    pub(crate) fn mark_changed(&self, offset: u64, length: u64) {
        if let Some(tracking) = &self.tracking {
            tracking.mark(offset, length);
        }
    }

    /// As [`Inner::mark_changed`], but first makes the header ready.
    pub(crate) async fn begin_change(&self, io: &MetaIo, offset: u64, length: u64) -> IoResult {
        if self.tracking.is_none() && !self.geometry.data_file {
            // Nothing to note. Every change of the image makes the header ready by itself.
            return Ok(());
        }
        // An external data file changes without the image, so the header's promises about it must be withdrawn first.
        self.make_ready(io).await?;
        self.mark_changed(offset, length);
        Ok(())
    }

    /// Makes the image ready for changes: see [`Need::HeaderReady`].
    pub(crate) async fn make_ready(&self, io: &MetaIo) -> IoResult {
        while !self.header_ready.load(Ordering::Acquire) {
            self.refuse_if_stopped()?;
            self.satisfy(io, Need::HeaderReady).await?;
        }
        Ok(())
    }

    /// Loads the bitmaps and marks them in use, durably. Called when the header is made ready for writing. Returns
    /// whether the image keeps bitmaps.
    pub(crate) async fn begin_tracking(&self, io: &MetaIo) -> IoResult<bool> {
        let Some(tracking) = &self.tracking else { return Ok(false) };
        if !*tracking.kept.get_or_init(|| self.claim_directory(tracking)) {
            return Ok(false);
        }
        for tracked in tracking.tracked.iter().filter(|tracked| tracked.bits.get().is_none()) {
            let bits = match self.read_bits(io, tracked).await {
                Ok(bits) => Some(bits),
                Err(why) => {
                    tracing::error!(
                        "'{}': bitmap '{}' {why}. It is marked as inconsistent; remove it (bitmap --remove)",
                        self.name,
                        tracked.bitmap.name.escape_debug()
                    );
                    None
                }
            };
            let _ = tracked.bits.set(bits);
        }
        self.write_flags(io, tracking, Barrier::InUse, |_| true).await?;
        Ok(true)
    }

    fn claim_directory(&self, tracking: &BitmapTracking) -> bool {
        let free = self.claim(clusters_of(&self.geometry, tracking.directory_offset, tracking.directory.len() as u64));
        if !free {
            tracing::warn!("'{}': its bitmaps are given up: another table lies in their directory", self.name);
        }
        for (offset, bytes) in tracking.others.iter().filter(|_| free) {
            // A place that another table also claims is guarded already.
            let _ = self.claim(clusters_of(&self.geometry, *offset, *bytes));
        }
        free
    }

    /// Reserves clusters for the bitmaps if no other table and no other bitmap lies there.
    fn claim(&self, clusters: Range<u64>) -> bool {
        let mut state = self.lock();
        let free = self.tables(&mut state).stranger(None, clusters.clone()).is_none();
        if free {
            self.add_tables(&mut state, Owner::Bitmap, clusters);
        }
        free
    }

    async fn read_bits(&self, io: &MetaIo, tracked: &Tracked) -> std::result::Result<DirtyBits, String> {
        let (geometry, bitmap) = (&self.geometry, &tracked.bitmap);
        let cannot_read = |error: IoError| format!("cannot be read ({error})");
        let length = usize::try_from(bitmap.table_bytes()).map_err(|_| "has too large a table")?;
        let table = match length {
            0 => Vec::new(),
            _ => {
                let read = io.read(bitmap.table_offset, length, PastEnd::Fails).await;
                entries(&read.map_err(cannot_read)?).collect()
            }
        };
        let parts = geometry.clusters_for(bitmap.bits_bytes(geometry.size_bytes));
        if is_damaged_table(&table, geometry) || (table.len() as u64) < parts {
            return Err("has a damaged table".to_owned());
        }
        let bits = DirtyBits::new(bitmap.granularity_bits, geometry);
        let cluster_bytes = usize::try_from(geometry.cluster_bytes()).unwrap_or(0);
        let mut places = vec![clusters_of(geometry, bitmap.table_offset, bitmap.table_bytes())];
        for (part, entry) in table.iter().take(bits.parts()).enumerate() {
            match data_offset(*entry) {
                Some(offset) => {
                    let bytes = io.read(offset, cluster_bytes, PastEnd::Zeros).await.map_err(cannot_read)?;
                    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
                    bits.load_part(part, bytes.chunks_exact(8).map(word));
                    places.push(clusters_of(geometry, offset, 1));
                }
                None if entry & TABLE_ALL_ONES != 0 => bits.load_part(part, std::iter::repeat(u64::MAX)),
                None => {}
            }
        }
        if !places.into_iter().all(|clusters| self.claim(clusters)) {
            return Err("lies where another table does".to_owned());
        }
        tracked.table().entries = table;
        Ok(bits)
    }

    /// Writes to the directory which tracked bitmaps are in use, durably.
    async fn write_flags(
        &self,
        io: &MetaIo,
        tracking: &BitmapTracking,
        barrier: Barrier,
        in_use: impl Fn(&Tracked) -> bool,
    ) -> IoResult {
        let pieces = tracking.flags(in_use);
        if pieces.is_empty() {
            return Ok(());
        }
        self.guard_pieces(Owner::Bitmap, &pieces)?;
        write_all(&self.table_writes, io, pieces).await?;
        self.barrier(io, barrier).await
    }

    /// Writes the bitmaps to the file and removes their marks "in use". A bitmap that cannot be written keeps the mark:
    /// it is lost, and nothing else is. All else is durable, and no operation may be in flight. Fails if refcounts that
    /// were changed for a bitmap cannot be written.
    pub(crate) async fn store_bitmaps(&self, io: &MetaIo) -> IoResult {
        let Some(tracking) = &self.tracking else { return Ok(()) };
        if tracking.tracked.is_empty() || tracking.kept.get() != Some(&true) {
            return Ok(());
        }
        let Some(_making_ready) = self.begin(Need::HeaderReady).await else { return Ok(()) };
        if !self.header_ready.load(Ordering::Acquire) {
            // Nothing was written, or the overlap guard has stopped the image.
            return Ok(());
        }
        // The next write has to mark them in use first.
        self.header_ready.store(false, Ordering::Release);
        let mut stored = Vec::new();
        for tracked in tracking.tracked.iter().filter(|tracked| tracked.bits().is_some()) {
            match self.store_bits(io, tracked).await {
                Ok(()) => stored.push(tracked),
                Err(error) => {
                    self.give_back(tracked);
                    self.tell_lost(tracked, error);
                }
            }
        }
        if !stored.is_empty() {
            match self.publish_bits(io, tracking, &stored).await {
                Ok(()) => stored.iter().filter_map(|tracked| tracked.bits()).for_each(DirtyBits::all_stored),
                Err(error) => stored.iter().for_each(|tracked| self.tell_lost(tracked, error)),
            }
        }
        // Frees space that was taken without need, and the old place of a refcount table that has moved.
        let is_settled = self.lock().is_all_written();
        if is_settled { Ok(()) } else { self.settle(io).await }
    }

    fn tell_lost(&self, tracked: &Tracked, error: IoError) {
        tracing::error!(
            "'{}': bitmap '{}' could not be written: {error}. The disk is whole; the bitmap stays marked as \
             inconsistent, remove it (bitmap --remove) and make it anew",
            self.name,
            tracked.bitmap.name.escape_debug()
        );
    }

    /// Writes the parts that have changed. Parts without a cluster get new ones.
    async fn store_bits(&self, io: &MetaIo, tracked: &Tracked) -> IoResult {
        let Some(bits) = tracked.bits() else { return Ok(()) };
        for parts in bits.changed_parts().chunks(PARTS_AT_ONCE) {
            let mut pieces = Vec::new();
            for part in parts {
                let offset = self.place_of(io, tracked, *part).await?;
                pieces.push(Piece { offset, bytes: bits.part_bytes(*part) });
            }
            self.guard_pieces(Owner::Bitmap, &pieces)?;
            write_all(&self.table_writes, io, pieces).await?;
        }
        Ok(())
    }

    async fn place_of(&self, io: &MetaIo, tracked: &Tracked, part: usize) -> IoResult<u64> {
        let entry = tracked.table().entries.get(part).copied().ok_or(IoError::EIO)?;
        if let Some(offset) = data_offset(entry) {
            let cluster = self.geometry.cluster_of(offset);
            return match self.run(io, |state| self.refcount_in_use(state, cluster)).await? {
                1 => Ok(offset),
                // Something else also lies there.
                _ => Err(IoError::new(IoErrorKind::Corrupt)),
            };
        }
        let allocate = |state: &mut State| {
            let run = self.allocate_in_order(state, 1)?;
            self.add_tables(state, Owner::Bitmap, run.first..run.end());
            Ok(self.geometry.start_of(run.first))
        };
        let offset = self.run(io, allocate).await?;
        let mut table = tracked.table();
        if let Some(entry) = table.entries.get_mut(part) {
            *entry = offset;
        }
        table.fresh.push(part);
        table.differs = true;
        Ok(offset)
    }

    /// Frees the new clusters of a bitmap that is lost.
    fn give_back(&self, tracked: &Tracked) {
        let mut table = tracked.table();
        if table.fresh.is_empty() {
            return;
        }
        let mut state = self.lock();
        let epoch = self.epochs.retire();
        for part in std::mem::take(&mut table.fresh) {
            let Some(entry) = table.entries.get_mut(part) else { continue };
            let clusters = clusters_of(&self.geometry, std::mem::take(entry), 1);
            self.remove_tables(&mut state, Owner::Bitmap, clusters.clone());
            state.retired.push(Freed { clusters, epoch, table: None, barred: false });
        }
    }

    async fn publish_bits(&self, io: &MetaIo, tracking: &BitmapTracking, stored: &[&Tracked]) -> IoResult {
        if !self.skips(Barrier::Bits) {
            self.stop_postponing();
            self.flush(io).await?;
        }
        let mut wrote_tables = false;
        for tracked in stored {
            let bytes: Vec<u8> = {
                let mut table = tracked.table();
                // The file may name these clusters from here on.
                table.fresh.clear();
                match table.differs {
                    true => table.entries.iter().flat_map(|entry| entry.to_be_bytes()).collect(),
                    false => continue,
                }
            };
            let pieces = vec![Piece { offset: tracked.bitmap.table_offset, bytes }];
            self.guard_pieces(Owner::Bitmap, &pieces)?;
            write_all(&self.table_writes, io, pieces).await?;
            wrote_tables = true;
        }
        if wrote_tables {
            self.barrier(io, Barrier::Bits).await?;
            stored.iter().for_each(|tracked| tracked.table().differs = false);
        }
        let in_use = |tracked: &Tracked| !stored.iter().any(|stored| std::ptr::eq(*stored, tracked));
        self.write_flags(io, tracking, Barrier::End, in_use).await
    }
}
