//! The last cluster of a growing disk that ended within it. The bytes behind the old end become part of the disk, and
//! must be zeros.

use super::Edit;
use super::resize::{ResizeOptions, Sizes};
use super::tree::Words;
use crate::layout::entry::{BadEntry, COPIED, Cluster};
use crate::layout::extended_entry::{Extended, PARTS, Part, mask};
use crate::layout::geometry::Geometry;
use block::{ErrorKind, FileOp, IoError, IoErrorKind, IoResult, PastEnd, Result};
use memory::{AlignedBuf, IoBuf};

/// How the cluster's entry changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// The entry is replaced by this one.
    Entry(Words),
    /// The cluster is written again, with zeros behind the disk's old end, and the entry refers to the copy. In an
    /// external data file the cluster has its place, so it is written only from byte `from` of the cluster on.
    Rewritten { bitmap: u64, from: u64 },
}

/// Returns the parts from `first` on, as a mask; none behind the last.
fn from_part(first: u32) -> u32 {
    if first >= PARTS { 0 } else { mask(first, PARTS) }
}

/// Plans the entry's change. `rest` is how many bytes of the cluster belong to the disk; `shows` says that the layer
/// below has data behind them.
fn plan(geometry: &Geometry, old: Words, rest: u64, shows: bool) -> std::result::Result<Plan, BadEntry> {
    if geometry.extended_l2 {
        return plan_parts(geometry, old, rest, shows);
    }
    Ok(match Cluster::decode(old.descriptor, geometry)? {
        Cluster::Zero | Cluster::ZeroAllocated { .. } => Plan::Entry(old),
        Cluster::Unallocated if !shows => Plan::Entry(old),
        // Behind the disk's end the data file was made zeros.
        Cluster::Data { .. } if geometry.data_file => Plan::Entry(old),
        _ => Plan::Rewritten { bitmap: 0, from: 0 },
    })
}

fn plan_parts(geometry: &Geometry, old: Words, rest: u64, shows: bool) -> std::result::Result<Plan, BadEntry> {
    let entry = Extended::decode(old.descriptor, old.bitmap, geometry)?;
    let last = geometry.part_of(rest);
    let is_torn = rest > geometry.part_start(last);
    let first_behind = last.saturating_add(u32::from(is_torn));
    let (before, behind) = (mask(0, last), from_part(first_behind));
    let torn = if is_torn { mask(last, first_behind) } else { 0 };
    let is_rewritten = match entry.part(last) {
        _ if matches!(entry.cluster, Cluster::Compressed { .. }) => true,
        _ if !is_torn => false,
        Part::Data => !geometry.data_file,
        Part::Unallocated => shows,
        Part::Zero | Part::Compressed => false,
    };
    if !is_rewritten {
        // A disk that once became shorter may have left bytes behind its end. Their parts are dropped.
        let hidden = if shows { behind } else { behind & entry.alloc };
        let new = Extended { alloc: entry.alloc & !behind, zero: entry.zero | hidden, ..entry };
        return Ok(Plan::Entry(Words { bitmap: new.bitmap(), ..old }));
    }
    let (alloc, zero) = match entry.cluster {
        Cluster::Compressed { .. } => (before | torn, behind),
        _ => ((entry.alloc & before) | torn, (entry.zero & before) | behind),
    };
    let bitmap = Extended { alloc, zero, ..entry }.bitmap();
    Ok(Plan::Rewritten { bitmap, from: geometry.part_start(last) })
}

impl Edit<'_, '_> {
    pub(super) async fn extend_last_cluster(
        &mut self,
        l1: &mut [u64],
        sizes: &Sizes,
        options: &ResizeOptions,
        shows: bool,
    ) -> Result<()> {
        let cluster = sizes.old.cluster_of(sizes.old.size_bytes);
        let rest = sizes.old.offset_in_cluster(sizes.old.size_bytes);
        let old = self.entry_of(l1, cluster).await.map_err(|error| self.failed(error))?;
        let plan = plan(&self.geometry, old, rest, shows).map_err(|BadEntry| self.failed(CORRUPT))?;
        let new = match plan {
            Plan::Entry(new) => new,
            Plan::Rewritten { bitmap, from } => {
                let kept = self.kept_bytes(old, rest, options).await?;
                let descriptor = match self.geometry.data_file {
                    true => self.write_in_place(cluster, &kept, from).await,
                    false => self.write_elsewhere(old, &kept).await,
                };
                Words { descriptor: descriptor.map_err(|error| self.failed(error))?, bitmap }
            }
        };
        if new == old {
            return Ok(());
        }
        let only = cluster..cluster.saturating_add(1);
        self.change_entries(l1, only, &mut |_, _| new).await.map_err(|error| self.failed(error))
    }

    /// Returns the disk's bytes in its last cluster: those that the caller gave, or those in the file.
    async fn kept_bytes(&self, old: Words, rest: u64, options: &ResizeOptions) -> Result<Vec<u8>> {
        let mut kept = options.last_cluster.clone();
        if kept.is_empty()
            && let Some(read) = self.read_kept(old, rest).await.map_err(|error| self.failed(error))?
        {
            kept = read;
        }
        match kept.len() as u64 == rest {
            true => Ok(kept),
            false => self.refuse(ErrorKind::BadOption, "what the disk holds in its last cluster was not given"),
        }
    }

    /// Returns the disk's bytes in its last cluster, read from the file; `None` if the file does not have all of them.
    async fn read_kept(&self, old: Words, rest: u64) -> IoResult<Option<Vec<u8>>> {
        let geometry = &self.geometry;
        let Cluster::Data { host, .. } = self.decode(old.descriptor)? else { return Ok(None) };
        let length = usize::try_from(rest).map_err(|_| CORRUPT)?;
        let queue = self.io.data().filter(|_| geometry.data_file).unwrap_or(self.io.queue());
        let mut bytes = block::MetaIo::new(queue.clone()).read(host, length, PastEnd::Zeros).await?.to_vec();
        if !geometry.extended_l2 {
            return Ok(Some(bytes));
        }
        let entry = Extended::decode(old.descriptor, old.bitmap, geometry).map_err(|BadEntry| CORRUPT)?;
        let part_bytes = usize::try_from(geometry.part_start(1)).map_err(|_| CORRUPT)?;
        for (index, part) in (0..).zip(bytes.chunks_mut(part_bytes)) {
            match entry.part(index) {
                Part::Data => {}
                Part::Unallocated if geometry.has_backing => return Ok(None),
                _ => part.fill(0),
            }
        }
        Ok(Some(bytes))
    }

    /// Writes the bytes to new space in the image's own file. Returns the descriptor.
    async fn write_elsewhere(&mut self, old: Words, kept: &[u8]) -> IoResult<u64> {
        let place = self.add_table(kept, 1).await?;
        let hosts = self.decode(old.descriptor)?.host_clusters(&self.geometry);
        self.refs.lower(hosts, 1).await?;
        Ok(place | COPIED)
    }

    /// Writes the bytes to an external data file, where no entry refers to them yet. The space behind them is zeros
    /// already.
    async fn write_in_place(&self, cluster: u64, kept: &[u8], from: u64) -> IoResult<u64> {
        let place = self.geometry.start_of(cluster);
        let bytes = kept.get(usize::try_from(from).unwrap_or(usize::MAX)..).ok_or(CORRUPT)?;
        let data = IoBuf::from_aligned(AlignedBuf::copy_of(bytes)).whole();
        let write = FileOp::Write { offset: place.saturating_add(from), data, fua: false };
        self.io.data().ok_or(IoError::EIO)?.start(write).await?;
        Ok(place | COPIED)
    }
}

const CORRUPT: IoError = IoError::new(IoErrorKind::Corrupt);

#[cfg(test)]
mod tests {
    use super::*;

    /// Clusters of 64 KiB in parts of 2 KiB.
    fn geometry(extended_l2: bool, data_file: bool) -> Geometry {
        Geometry {
            version: 3,
            size_bytes: 1 << 30,
            cluster_bits: 16,
            refcount_order: 4,
            has_backing: true,
            extended_l2,
            data_file,
        }
    }

    fn entry(plan: std::result::Result<Plan, BadEntry>) -> Option<u64> {
        match plan.unwrap() {
            Plan::Entry(words) => Some(words.bitmap),
            Plan::Rewritten { .. } => None,
        }
    }

    #[test]
    fn parts_behind_the_end_are_zeros_and_the_one_that_holds_the_end_is_rewritten_only_if_it_must() {
        let own = |bitmap| Words { descriptor: COPIED | 0x50000, bitmap };
        let all = u64::from(u32::MAX);
        let inside = |old, rest, shows| plan(&geometry(true, false), old, rest, shows);
        // At the end of a part: bits are enough.
        assert_eq!(entry(inside(own(all), 4096, false)), Some(0xffff_fffc << 32 | 3));
        assert_eq!(entry(inside(own(3), 4096, false)), Some(3));
        assert_eq!(entry(inside(own(3), 4096, true)), Some(0xffff_fffc << 32 | 3));
        assert_eq!(entry(inside(Words::default(), 4096, true)), Some(0xffff_fffc << 32));
        // Within one.
        assert_eq!(entry(inside(own(3), 5000, false)), Some(3));
        assert_eq!(entry(inside(own(4 << 32), 5000, true)), Some(0xffff_fffc << 32));
        let rewritten = Plan::Rewritten { bitmap: 0xffff_fff8 << 32 | 5, from: 4096 };
        assert_eq!(inside(own(5), 5000, false).unwrap(), rewritten);
        assert_eq!(inside(own(1), 5000, true).unwrap(), rewritten);
        let whole = Plan::Rewritten { bitmap: 0xffff_fff8 << 32 | 7, from: 4096 };
        let compressed = Words { descriptor: 1 << 62 | 0x50000, bitmap: 0 };
        assert_eq!(inside(compressed, 5000, false).unwrap(), whole);
        // The last part has none behind it.
        let last = Plan::Rewritten { bitmap: all, from: 31 * 2048 };
        assert_eq!(inside(own(all), 65536 - 512, false).unwrap(), last);
        // Of a file of their own the bytes behind the end are zeros.
        let outside = |old, shows| plan(&geometry(true, true), old, 5000, shows);
        assert_eq!(entry(outside(own(all), false)), Some(0xffff_fff8 << 32 | 7));
        assert_eq!(outside(own(1), true).unwrap(), Plan::Rewritten { bitmap: 0xffff_fff8 << 32 | 5, from: 4096 });
    }
}
