//! Changing the size of a disk.

use super::compact::compact;
use super::look_first::look_before_writing;
use super::tree::{Direction, Words};
use super::{Edit, EditWatch};
use crate::layout::entry::{COPIED, ZERO};
use crate::layout::extended_entry::{ALL_DATA, ALL_ZERO};
use crate::layout::geometry::Geometry;
use crate::layout::header::MAX_L1_BYTES;
use block::{ErrorKind, File, FileOp, FileQueue, IoResult, MetaIo, Result, SECTOR_BYTES};
use memory::{AlignedBuf, IoBuf};
use std::ops::Range;
use std::rc::Rc;

/// Zeros are written in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;
/// Holes are made in pieces of this size.
const HOLE_BYTES: u64 = 1 << 30;

/// What is allocated for added space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GrowBy {
    /// Nothing: space is allocated when it is written.
    #[default]
    Nothing,
    /// Tables only.
    Tables,
    /// Tables, and space that the host keeps for it.
    Space,
    /// Tables, and zeros that are written.
    Zeros,
}

/// How to change the size of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// The new size, rounded up to whole sectors.
    pub size_bytes: u64,
    /// Data behind the new end may be lost.
    pub shrink: bool,
    /// What is allocated for added space.
    pub preallocation: GrowBy,
    /// The size of the layer below, in bytes. Its data must not show behind the disk's old end.
    pub backing_bytes: u64,
    /// The disk's bytes in its last cluster, if the disk ends within one: from the cluster's start to the disk's end.
    /// Needed if that cluster is compressed, or if the layer below shows in it.
    pub last_cluster: Vec<u8>,
    /// The length of the external data file, if there is one whose length can be changed.
    pub data_file_bytes: Option<u64>,
}

impl ResizeOptions {
    /// Options for this size, with everything else at its default.
    #[must_use]
    pub fn to(size_bytes: u64) -> Self {
        Self { size_bytes, ..Self::default() }
    }

    /// Changes some options: `ResizeOptions::to(1 << 30).with(|options| options.shrink = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Changes the size of the disk; added space reads as zeros. The image must not be in use. If the disk becomes shorter
/// but its file cannot be cut off, the disk has its new size all the same, and the error says so.
pub async fn resize(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    options: &ResizeOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    look_before_writing(io, file, name, watch).await?;
    resize_looked_at(io, file, name, options, watch).await
}

/// As [`resize`], but without checking all references first, which takes long in a large image. The caller has checked
/// them ([`look_before_writing`]), or has had the image open for writing and has just closed it: new tables go to space
/// that the open image would have used for data.
pub async fn resize_looked_at(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    options: &ResizeOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open_again(io, file, name, watch).await?;
    let becomes_shorter = options.size_bytes < edit.header.size_bytes;
    let done = edit.resize(options).await;
    let freed = edit.end_freeing(done).await?;
    if becomes_shorter {
        compact(io, file, name, freed, watch).await?;
    }
    Ok(())
}

/// The disk before and after.
pub(super) struct Sizes {
    pub(super) old: Geometry,
    pub(super) new: Geometry,
}

impl Edit<'_, '_> {
    pub(super) async fn resize(&mut self, options: &ResizeOptions) -> Result<()> {
        let too_large = "Failed to grow the L1 table: File too large: the new size is too large for its cluster size, the L1 table would have more than 32 MiB";
        let size_bytes = options.size_bytes;
        if !size_bytes.is_multiple_of(SECTOR_BYTES) {
            return self.refuse(ErrorKind::BadOption, "The new size must be a multiple of 512");
        }
        let sizes = Sizes { old: self.geometry, new: Geometry { size_bytes, ..self.geometry } };
        let old_bytes = sizes.old.size_bytes;
        if size_bytes == old_bytes {
            return Ok(());
        }
        if size_bytes > i64::MAX as u64 || sizes.new.l1_entries().saturating_mul(8) > MAX_L1_BYTES {
            return self.refuse(ErrorKind::BadOption, too_large);
        }
        if size_bytes < old_bytes && !options.shrink {
            return self.refuse(ErrorKind::BadOption, "Use the --shrink option to perform a shrink operation.");
        }
        if size_bytes < old_bytes && options.preallocation != GrowBy::Nothing {
            return self.refuse(ErrorKind::BadOption, "Preallocation can only be used for growing images");
        }
        if self.header.version < 3 && !self.rows.is_empty() {
            return self.refuse(ErrorKind::Unsupported, "Can't resize a v2 image which has snapshots");
        }
        self.refuse_bitmaps_in_use().await?;
        if self.header.has_data_file() && (options.data_file_bytes.is_none() || self.io.data().is_none()) {
            return self.refuse(ErrorKind::Unsupported, "its external data file cannot be made longer or shorter");
        }
        let old_l1 = self.active_l1().await.map_err(|error| self.failed(error))?;
        let mut l1 = old_l1.clone();
        let needed = usize::try_from(sizes.new.l1_entries()).unwrap_or(0);
        if l1.len() < needed {
            l1.resize(needed, 0);
        }
        let kept = sizes.old.guest_clusters().min(sizes.new.guest_clusters());
        self.drop_behind(&mut l1, kept, size_bytes < old_bytes).await?;
        if size_bytes > old_bytes {
            let options = &self.with_raw_data_mapped(options);
            self.grow_data_file(&sizes, options).await?;
            self.hide_what_is_below(&mut l1, &sizes, options).await?;
            self.preallocate(&mut l1, &sizes, options).await?;
        } else {
            l1.truncate(needed);
            self.shrink_data_file(size_bytes);
        }
        if l1 != old_l1 {
            self.set_l1(&l1).await.map_err(|error| self.failed(error))?;
        }
        self.fit_bitmaps(size_bytes, false).await?;
        self.set_size(size_bytes);
        Ok(())
    }

    /// Drops everything that maps guest clusters from `end` on: the end of a disk that becomes shorter, and the state
    /// of a virtual machine, which lies behind the disk and must not become part of it.
    async fn drop_behind(&mut self, l1: &mut [u64], end: u64, shrinks: bool) -> Result<()> {
        let first = self.geometry.l1_index(end);
        let total = l1.len() as u64;
        for (index, raw) in (0u64..).zip(l1.iter_mut()).skip(usize::try_from(first).unwrap_or(usize::MAX)) {
            if let Some(offset) = self.l2_offset(*raw) {
                let starts = index.wrapping_shl(self.geometry.l2_bits());
                let dropped = match end.saturating_sub(starts) {
                    0 => self.count_table(offset, Direction::Down).await.map(|()| 0),
                    kept => self.drop_part(*raw, offset, usize::try_from(kept).unwrap_or(usize::MAX)).await,
                };
                *raw = dropped.map_err(|error| self.failed(error))?;
            }
            let bytes = |tables: u64| self.geometry.start_of(tables.wrapping_shl(self.geometry.l2_bits()));
            let (done, all) = (bytes(index), bytes(total));
            // Where the disk grows, longer steps follow.
            self.tell(if shrinks { done } else { 0 }, all)?;
        }
        Ok(())
    }

    /// Keeps only the first entries of a table. Returns its L1 entry.
    async fn drop_part(&mut self, raw: u64, offset: u64, kept: usize) -> IoResult<u64> {
        let mut l2 = self.read_l2(offset).await?;
        let mut changed = false;
        for entry in l2.chunks_exact_mut(self.geometry.entry_words()).skip(kept) {
            let words = Words::of(entry);
            if words == Words::default() {
                continue;
            }
            let hosts = self.decode(words.descriptor)?.host_clusters(&self.geometry);
            self.refs.lower(hosts, 1).await?;
            Words::default().put(entry);
            changed = true;
        }
        if !changed {
            return Ok(raw);
        }
        self.move_l2(offset, &l2).await
    }

    /// Gives a changed table of the disk a new place. Returns its L1 entry.
    pub(super) async fn move_l2(&mut self, old: u64, l2: &[u64]) -> IoResult<u64> {
        let place = self.add_l2(l2, 1).await?;
        self.refs.lower(self.cluster_at(old), 1).await?;
        Ok(place | COPIED)
    }

    /// Replaces entries of the table that maps guest clusters; `change` gets each cluster's number and entry.
    pub(super) async fn change_entries(
        &mut self,
        l1: &mut [u64],
        clusters: Range<u64>,
        change: &mut dyn FnMut(u64, Words) -> Words,
    ) -> IoResult {
        let mut at = clusters.start;
        while at < clusters.end {
            let table_end = self.geometry.table_end(at);
            let table_start = self.geometry.l1_index(at).wrapping_shl(self.geometry.l2_bits());
            let index = usize::try_from(self.geometry.l1_index(at)).unwrap_or(usize::MAX);
            let Some(raw) = l1.get_mut(index) else { return Ok(()) };
            let old = self.l2_offset(*raw);
            let mut l2 = match old {
                Some(offset) => self.read_l2(offset).await?,
                None => vec![0; usize::try_from(self.geometry.cluster_bytes() / 8).unwrap_or(0)],
            };
            let mut changed = false;
            let words = self.geometry.entry_words();
            for (cluster, entry) in (table_start..table_end).zip(l2.chunks_exact_mut(words)) {
                if clusters.contains(&cluster) {
                    let old = Words::of(entry);
                    let new = change(cluster, old);
                    changed |= new != old;
                    new.put(entry);
                }
            }
            match old {
                _ if !changed => {}
                Some(offset) => *raw = self.move_l2(offset, &l2).await?,
                None => *raw = self.add_l2(&l2, 1).await? | COPIED,
            }
            at = table_end;
        }
        Ok(())
    }

    /// Makes added space read as zeros, if the layer below or the rest of the last cluster holds something there.
    async fn hide_what_is_below(&mut self, l1: &mut [u64], sizes: &Sizes, options: &ResizeOptions) -> Result<()> {
        let old_end = sizes.old.size_bytes;
        let shows = options.backing_bytes > old_end;
        if sizes.old.offset_in_cluster(old_end) != 0 {
            self.extend_last_cluster(l1, sizes, options, shows).await?;
        }
        if !shows || options.preallocation != GrowBy::Nothing {
            return Ok(());
        }
        if self.header.version < 3 {
            let what = "what the backing file holds behind the old end cannot be hidden in version 2 (compat=0.10); \
                        change the version first (amend -o compat=1.1)";
            return self.refuse(ErrorKind::Unsupported, what);
        }
        let end = sizes.old.clusters_for(options.backing_bytes).min(sizes.new.guest_clusters());
        let zero = match self.geometry.extended_l2 {
            true => Words { descriptor: 0, bitmap: ALL_ZERO },
            false => Words { descriptor: ZERO, bitmap: 0 },
        };
        let zeroed = self.change_entries(l1, sizes.old.guest_clusters()..end, &mut |_, _| zero).await;
        zeroed.map_err(|error| self.failed(error))
    }

    /// Gives added space its place in the file.
    async fn preallocate(&mut self, l1: &mut [u64], sizes: &Sizes, options: &ResizeOptions) -> Result<()> {
        let clusters = sizes.old.guest_clusters()..sizes.new.guest_clusters();
        let preallocation = options.preallocation;
        if preallocation == GrowBy::Nothing || clusters.is_empty() {
            return Ok(());
        }
        let count = clusters.end.saturating_sub(clusters.start);
        let first = match self.geometry.data_file {
            true => clusters.start,
            false => self.refs.allocate_at_end(count).await.map_err(|error| self.failed(error))?,
        };
        let (start, bytes) = (sizes.old.start_of(first), sizes.old.start_of(count));
        let place = |cluster: u64| start.saturating_add(sizes.old.start_of(cluster.saturating_sub(clusters.start)));
        // A part that the entry leaves open shows the layer below.
        let bitmap = match preallocation {
            _ if !self.geometry.extended_l2 || options.backing_bytes <= sizes.old.size_bytes => 0,
            GrowBy::Tables => ALL_ZERO,
            _ => ALL_DATA,
        };
        let mut at = clusters.start;
        while at < clusters.end {
            let end = sizes.old.table_end(at).min(clusters.end);
            let change = &mut |cluster, _| Words { descriptor: place(cluster) | COPIED, bitmap };
            let mapped = self.change_entries(l1, at..end, change).await;
            mapped.map_err(|error| self.failed(error))?;
            at = end;
            // Zeros follow, which take longer.
            let done = if self.geometry.data_file { at.saturating_sub(clusters.start) } else { 0 };
            self.tell(sizes.old.start_of(done), bytes)?;
        }
        match self.geometry.data_file {
            // The data file is as long as the disk already.
            true => Ok(()),
            false => self.fill(self.io.queue(), start..start.saturating_add(bytes), preallocation).await,
        }
    }

    /// Writes zeros in a file where nothing leads yet.
    pub(super) async fn fill(
        &mut self,
        queue: &Rc<dyn FileQueue>,
        range: Range<u64>,
        preallocation: GrowBy,
    ) -> Result<()> {
        let total = range.end.saturating_sub(range.start);
        let mut at = range.start;
        while at < range.end {
            let most = if preallocation == GrowBy::Tables { HOLE_BYTES } else { PIECE_BYTES };
            let length = most.min(range.end.saturating_sub(at));
            let op = match preallocation {
                GrowBy::Zeros => {
                    let zeros = AlignedBuf::zeroed(usize::try_from(length).unwrap_or(0));
                    FileOp::Write { offset: at, data: IoBuf::from_aligned(zeros).whole(), fua: false }
                }
                // The zeros that a file grows by are durable only after this was asked for.
                _ => FileOp::WriteZeroes { offset: at, length, may_unmap: preallocation == GrowBy::Tables },
            };
            queue.start(op).await.map_err(|error| self.failed(error))?;
            at = at.saturating_add(length);
            self.tell(at.saturating_sub(range.start), total)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, NAME};
    use block::block_on;
    use testkit::OpKind;

    #[test]
    fn an_image_that_was_just_closed_grows_without_a_look_at_its_tables() {
        let (storage, io) = fixture::created(1 << 20);
        let file = fixture::file(&storage);
        let tables = (1 << 20) / (64 * fixture::CLUSTER);
        block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            fixture::fill(&qcow2, &io, 0..1 << 20).await;
            qcow2.close(&io).await.unwrap();
            let reads = || storage.pushed(NAME, OpKind::Read);
            let before = reads();
            let grown = ResizeOptions::to((1 << 20) + (64 << 10));
            resize_looked_at(&io, &*file, NAME, &grown, &mut |_, _| true).await.unwrap();
            let looked_at = reads() - before;
            let grown = ResizeOptions::to((1 << 20) + (128 << 10));
            resize(&io, &*file, NAME, &grown, &mut |_, _| true).await.unwrap();
            let anew = reads() - before - looked_at;
            assert!(looked_at + tables <= anew, "{looked_at} reads, and {anew} with a look at {tables} tables");
        });
    }
}
