//! How large a file a disk would take in another image.

use crate::Control;
use block::{Disk, Error, ErrorKind, Result};
use image::Image;

/// Size of an entry of an L1 table, a refcount table, or an L2 table without subclusters.
const ENTRY_BYTES: u64 = 8;
/// QEMU opens no image with a longer L1 table.
const L1_BYTES_MAX: u64 = 32 << 20;

/// The new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Guest bytes as they are.
    Raw,
    /// qcow2.
    Qcow2 {
        /// A power of two from 512 bytes to 2 MiB.
        cluster_bytes: u64,
        /// 1, 2, 4 ... 64.
        refcount_bits: u64,
        /// A backing file may share data with the source. How much is not known, so everything counts as needed.
        has_backing: bool,
        /// L2 entries take 16 bytes instead of 8.
        extended_l2: bool,
    },
}

/// File sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measure {
    /// With what the source holds now.
    pub required_bytes: u64,
    /// With every cluster allocated.
    pub fully_allocated_bytes: u64,
}

/// The file size for an empty disk of `size_bytes`.
pub fn measure_size(size_bytes: u64, target: Target) -> Result<Measure> {
    measured(size_bytes, 0, target)
}

/// The file size for a copy of `source`.
pub fn measure(source: &Image, target: Target, control: &mut Control<'_>) -> Result<Measure> {
    let size = source.info().size_bytes;
    let Target::Qcow2 { cluster_bytes, has_backing: false, .. } = target else {
        return measured(size, size, target);
    };
    // Checked before the source is read.
    measured(size, 0, target)?;
    // Clusters of the new image that hold data, each counted once.
    let (mut needed, mut counted_to) = (0u64, 0u64);
    for run in source.coarse_extents(cluster_bytes)? {
        let run = run?;
        control.check()?;
        if run.data {
            let start = (run.start / cluster_bytes * cluster_bytes).max(counted_to);
            let end = run.end().next_multiple_of(cluster_bytes);
            needed += end.saturating_sub(start);
            counted_to = counted_to.max(end);
        }
        control.tell(run.end(), size);
    }
    measured(size, needed, target)
}

fn measured(size_bytes: u64, needed_bytes: u64, target: Target) -> Result<Measure> {
    match target {
        Target::Raw => Ok(Measure { required_bytes: size_bytes, fully_allocated_bytes: size_bytes }),
        Target::Qcow2 { cluster_bytes, refcount_bits, has_backing, extended_l2 } => {
            let guest = size_bytes.next_multiple_of(cluster_bytes);
            let needed = if has_backing && needed_bytes > 0 { guest } else { needed_bytes };
            let l2_entry_bytes = if extended_l2 { 16 } else { ENTRY_BYTES };
            if l2_tables(guest, cluster_bytes, l2_entry_bytes) * ENTRY_BYTES > L1_BYTES_MAX {
                let what = "The image size is too large (try using a larger cluster size)";
                return Err(Error::new(ErrorKind::BadOption, what));
            }
            let metadata = qcow2_metadata_bytes(guest, cluster_bytes, refcount_bits, l2_entry_bytes);
            // The tables of the full image are counted in both: they may all be needed.
            Ok(Measure { required_bytes: metadata + needed, fully_allocated_bytes: metadata + guest })
        }
    }
}

/// How many L2 tables the full image has.
fn l2_tables(guest_bytes: u64, cluster_bytes: u64, entry_bytes: u64) -> u64 {
    (guest_bytes / cluster_bytes).div_ceil(cluster_bytes / entry_bytes)
}

/// Header, L1, L2 and refcounts of a full image (qcow2 specification, "Host cluster management", "Cluster mapping").
fn qcow2_metadata_bytes(guest_bytes: u64, cluster_bytes: u64, refcount_bits: u64, l2_entry_bytes: u64) -> u64 {
    let entries = cluster_bytes / ENTRY_BYTES;
    let l2_tables = l2_tables(guest_bytes, cluster_bytes, l2_entry_bytes);
    let l1_clusters = l2_tables.div_ceil(entries);
    let counted = guest_bytes / cluster_bytes + 1 + l2_tables + l1_clusters;
    // Refcount blocks and their table count themselves.
    let per_block = cluster_bytes * 8 / refcount_bits;
    let (mut blocks, mut table) = (0u64, 0u64);
    loop {
        let more_blocks = (counted + blocks + table).div_ceil(per_block);
        let more_table = more_blocks.div_ceil(entries);
        if (more_blocks, more_table) == (blocks, table) {
            break;
        }
        (blocks, table) = (more_blocks, more_table);
    }
    (1 + l2_tables + l1_clusters + blocks + table) * cluster_bytes
}
