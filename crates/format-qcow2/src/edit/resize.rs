//! More or less room on a disk.

use super::tree::Direction;
use super::{Edit, EditWatch};
use crate::entry::{COPIED, Cluster, ZERO};
use crate::geometry::Geometry;
use crate::header::MAX_L1_BYTES;
use block::{ErrorKind, File, IoResult, MetaIo, PastEnd, Result, SECTOR_BYTES};
use memory::AlignedBuf;
use std::ops::Range;

/// Zeros are written in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;
/// Holes are made in pieces of this size.
const HOLE_BYTES: u64 = 1 << 30;

/// What becomes of added space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GrowBy {
    /// Nothing: it is allocated when it is written.
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
pub struct ResizeOptions {
    /// The new size, rounded up to whole sectors.
    pub size_bytes: u64,
    /// Data behind the new end may be lost.
    pub shrink: bool,
    /// For space that is added.
    pub preallocation: GrowBy,
    /// Bytes that the layer below has: none of them may come to light behind the old end.
    pub backing_bytes: u64,
    /// What the disk holds in its last cluster, if it ends within one: from the cluster's start to the disk's end. Needed
    /// where that is compressed, or the layer below shows.
    pub last_cluster: Vec<u8>,
}

/// Changes the size of the disk; what is added reads as zeros. Nobody else may use the image.
pub async fn resize(
    io: &MetaIo,
    file: &dyn File,
    name: &str,
    options: &ResizeOptions,
    watch: &mut EditWatch<'_>,
) -> Result<()> {
    let mut edit = Edit::open(io, file, name, watch).await?;
    let done = edit.resize(options).await;
    edit.end(done).await
}

/// The disk before and after.
struct Sizes {
    old: Geometry,
    new: Geometry,
}

impl Edit<'_, '_> {
    pub(super) async fn resize(&mut self, options: &ResizeOptions) -> Result<()> {
        let too_large = "the new size is too large for its cluster size: the L1 table would have more than 32 MiB";
        let Some(size_bytes) = options.size_bytes.checked_next_multiple_of(SECTOR_BYTES) else {
            return self.refuse(ErrorKind::BadOption, too_large);
        };
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
        if self.geometry.extended_l2 {
            return self.refuse(ErrorKind::Unsupported, "an image with extended L2 entries cannot be resized yet");
        }
        let old_l1 = self.active_l1().await.map_err(|error| self.failed(error))?;
        let mut l1 = old_l1.clone();
        let needed = usize::try_from(sizes.new.l1_entries()).unwrap_or(0);
        if l1.len() < needed {
            l1.resize(needed, 0);
        }
        let kept = sizes.old.guest_clusters().min(sizes.new.guest_clusters());
        self.drop_behind(&mut l1, kept).await?;
        if size_bytes > old_bytes {
            self.hide_what_is_below(&mut l1, &sizes, options).await?;
            self.preallocate(&mut l1, &sizes, options.preallocation).await?;
        } else {
            l1.truncate(needed);
        }
        if l1 != old_l1 {
            self.set_l1(&l1).await.map_err(|error| self.failed(error))?;
        }
        self.fit_bitmaps(size_bytes, false).await?;
        self.set_size(size_bytes);
        Ok(())
    }

    /// Drops all that maps guest clusters from `end` on: what a shorter disk loses, and the state of a virtual machine,
    /// which lies behind the disk and must not become part of it.
    async fn drop_behind(&mut self, l1: &mut [u64], end: u64) -> Result<()> {
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
            self.tell(done, all)?;
        }
        Ok(())
    }

    /// Keeps the first entries of a table only; returns its L1 entry.
    async fn drop_part(&mut self, raw: u64, offset: u64, kept: usize) -> IoResult<u64> {
        let mut l2 = self.read_l2(offset).await?;
        let mut changed = false;
        for word in l2.iter_mut().skip(kept).filter(|word| **word != 0) {
            let hosts = self.decode(*word)?.host_clusters(&self.geometry);
            self.refs.lower(hosts, 1).await?;
            *word = 0;
            changed = true;
        }
        if !changed {
            return Ok(raw);
        }
        self.move_l2(offset, &l2).await
    }

    /// A changed table of the disk gets a new place; returns its L1 entry.
    async fn move_l2(&mut self, old: u64, l2: &[u64]) -> IoResult<u64> {
        let place = self.add_l2(l2, 1).await?;
        self.refs.lower(self.cluster_at(old), 1).await?;
        Ok(place | COPIED)
    }

    /// Replaces entries of the table that maps guest clusters; `change` gets each cluster's number and entry.
    async fn change_entries(
        &mut self,
        l1: &mut [u64],
        clusters: Range<u64>,
        change: &mut dyn FnMut(u64, u64) -> u64,
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
            for (cluster, word) in (table_start..table_end).zip(l2.iter_mut()) {
                if clusters.contains(&cluster) {
                    let new = change(cluster, *word);
                    changed |= new != *word;
                    *word = new;
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

    /// Makes added space read as zeros where the layer below, or the last cluster's rest, holds something.
    async fn hide_what_is_below(&mut self, l1: &mut [u64], sizes: &Sizes, options: &ResizeOptions) -> Result<()> {
        let old_end = sizes.old.size_bytes;
        let shows = options.backing_bytes > old_end;
        if sizes.old.offset_in_cluster(old_end) != 0 {
            self.rewrite_last_cluster(l1, sizes, options, shows).await?;
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
        let zeroed = self.change_entries(l1, sizes.old.guest_clusters()..end, &mut |_, _| ZERO).await;
        zeroed.map_err(|error| self.failed(error))
    }

    /// The disk ends within a cluster: its rest becomes part of the disk, and must be zeros.
    async fn rewrite_last_cluster(
        &mut self,
        l1: &mut [u64],
        sizes: &Sizes,
        options: &ResizeOptions,
        shows: bool,
    ) -> Result<()> {
        let cluster = sizes.old.cluster_of(sizes.old.size_bytes);
        let index = usize::try_from(sizes.old.l1_index(cluster)).unwrap_or(usize::MAX);
        let table = l1.get(index).and_then(|raw| self.l2_offset(*raw));
        let mut word = 0;
        if let Some(offset) = table {
            let l2 = self.read_l2(offset).await.map_err(|error| self.failed(error))?;
            let at = cluster & sizes.old.cluster_bytes().wrapping_shr(3).saturating_sub(1);
            word = usize::try_from(at).ok().and_then(|at| l2.get(at)).copied().unwrap_or(0);
        }
        let old = self.decode(word).map_err(|error| self.failed(error))?;
        let reads_zero = matches!(old, Cluster::Zero | Cluster::ZeroAllocated { .. });
        if reads_zero || (old == Cluster::Unallocated && !shows) {
            return Ok(());
        }
        let rest = sizes.old.offset_in_cluster(sizes.old.size_bytes);
        let mut kept = options.last_cluster.clone();
        if let (Cluster::Data { host, .. }, true) = (old, kept.is_empty()) {
            let length = usize::try_from(rest).unwrap_or(0);
            kept = self.io.read(host, length, PastEnd::Zeros).await.map_err(|error| self.failed(error))?.to_vec();
        }
        if kept.len() as u64 != rest {
            return self.refuse(ErrorKind::BadOption, "what the disk holds in its last cluster was not given");
        }
        let rewritten = async {
            let place = self.add_table(&kept, 1).await?;
            self.refs.lower(old.host_clusters(&self.geometry), 1).await?;
            let only = cluster..cluster.saturating_add(1);
            self.change_entries(l1, only, &mut |_, _| place | COPIED).await
        };
        rewritten.await.map_err(|error| self.failed(error))
    }

    /// Gives added space its place in the file.
    async fn preallocate(&mut self, l1: &mut [u64], sizes: &Sizes, preallocation: GrowBy) -> Result<()> {
        if preallocation == GrowBy::Nothing {
            return Ok(());
        }
        let clusters = sizes.old.guest_clusters()..sizes.new.guest_clusters();
        let count = clusters.end.saturating_sub(clusters.start);
        let first = self.refs.allocate_at_end(count).await.map_err(|error| self.failed(error))?;
        let (start, bytes) = (sizes.old.start_of(first), sizes.old.start_of(count));
        let place = |cluster: u64| start.saturating_add(sizes.old.start_of(cluster.saturating_sub(clusters.start)));
        let mut at = clusters.start;
        while at < clusters.end {
            let end = sizes.old.table_end(at).min(clusters.end);
            let mapped = self.change_entries(l1, at..end, &mut |cluster, _| place(cluster) | COPIED).await;
            mapped.map_err(|error| self.failed(error))?;
            at = end;
            self.tell(sizes.old.start_of(at.saturating_sub(clusters.start)), bytes)?;
        }
        self.fill(start..start.saturating_add(bytes), preallocation).await
    }

    async fn fill(&mut self, range: Range<u64>, preallocation: GrowBy) -> Result<()> {
        let total = range.end.saturating_sub(range.start);
        let mut at = range.start;
        while at < range.end {
            let most = if preallocation == GrowBy::Tables { HOLE_BYTES } else { PIECE_BYTES };
            let piece = most.min(range.end.saturating_sub(at));
            let filled = match preallocation {
                GrowBy::Zeros => self.io.write(at, AlignedBuf::zeroed(piece as usize)).await,
                // What a file grows by is zeros for good only once that was asked for.
                _ => self.io.write_zeroes(at, piece, preallocation == GrowBy::Tables).await,
            };
            filled.map_err(|error| self.failed(error))?;
            at = at.saturating_add(piece);
            self.tell(at.saturating_sub(range.start), total)?;
        }
        Ok(())
    }
}
