//! The size that the file of a new image would have.

use super::create::CreateOptions;
use super::preallocate::Preallocation;
use crate::layout::bitmap::Bitmap;
use block::{Error, ErrorKind, Result};

/// Size of an entry of an L1 table, a refcount table, or an L2 table without subclusters.
const ENTRY_BYTES: u64 = 8;
const EXTENDED_ENTRY_BYTES: u64 = 16;
/// QEMU opens no image with a longer L1 table.
const L1_BYTES_MAX: u64 = 32 << 20;

/// File sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measure {
    /// The size with the data that the source holds now.
    pub required_bytes: u64,
    /// The size with every cluster allocated.
    pub fully_allocated_bytes: u64,
}

/// Sizes in clusters; nothing overflows, because the options were checked.
struct Tables {
    cluster_bytes: u64,
    refcount_bits: u64,
    guest_clusters: u64,
    l2_tables: u64,
}

impl CreateOptions {
    /// Whether the file's size depends on how much data there are. With a backing file it does not: it is unknown how
    /// much the new image shares with it, so everything counts.
    #[must_use]
    pub fn measure_depends_on_data(&self) -> bool {
        self.backing_file.is_none() && !self.has_all_space()
    }

    /// Returns the file's size with `needed_bytes` in clusters that hold data. Checks only the options that change it.
    pub fn measure(&self, needed_bytes: u64) -> Result<Measure> {
        let bad = |what| Error::new(ErrorKind::BadOption, what);
        self.check_sizes()?;
        let cluster_bytes = self.cluster_size;
        let too_large = "The image size is too large (try using a larger cluster size)";
        let guest = self.size_bytes.checked_next_multiple_of(cluster_bytes).ok_or_else(|| bad(too_large))?;
        let entry_bytes = if self.extended_l2 { EXTENDED_ENTRY_BYTES } else { ENTRY_BYTES };
        let guest_clusters = div(guest, cluster_bytes);
        let l2_tables = guest_clusters.div_ceil(div(cluster_bytes, entry_bytes).max(1));
        if l2_tables > L1_BYTES_MAX / ENTRY_BYTES {
            return Err(bad(too_large));
        }
        let tables =
            Tables { cluster_bytes, refcount_bits: u64::from(self.refcount_bits).max(1), guest_clusters, l2_tables };
        let all = self.has_all_space() || (self.backing_file.is_some() && needed_bytes > 0);
        let needed = if all { guest } else { needed_bytes };
        // The tables of the full image are counted in both: they may all be needed.
        let metadata = tables.bytes();
        let [required_bytes, fully_allocated_bytes] = [needed, guest].map(|data| metadata.saturating_add(data));
        Ok(Measure { required_bytes, fully_allocated_bytes })
    }

    fn has_all_space(&self) -> bool {
        matches!(self.preallocation, Preallocation::Falloc | Preallocation::Full)
    }

    /// Returns the size of copies of these bitmaps in an image of this kind; `None` if such an image has no bitmaps.
    #[must_use]
    pub fn measure_bitmaps(&self, bitmaps: &[Bitmap]) -> Option<u64> {
        let round_up = |bytes: u64| bytes.div_ceil(self.cluster_size.max(1)).saturating_mul(self.cluster_size);
        let (mut total, mut rows) = (0u64, 0u64);
        for bitmap in bitmaps {
            let bits = round_up(bitmap.bits_bytes(self.size_bytes));
            let table = round_up(div(bits, self.cluster_size).saturating_mul(ENTRY_BYTES));
            total = total.saturating_add(bits).saturating_add(table);
            // Extra data that another program has added to a row are not copied.
            rows = rows.saturating_add(Bitmap { extra: Vec::new(), ..bitmap.clone() }.row().len() as u64);
        }
        (self.version >= 3).then(|| total.saturating_add(round_up(rows)))
    }
}

impl Tables {
    /// Returns the size of header, L1, L2 and refcounts of a full image (qcow2 specification, "Host cluster
    /// management", "Cluster mapping").
    fn bytes(&self) -> u64 {
        let entries = div(self.cluster_bytes, ENTRY_BYTES).max(1);
        let l1_clusters = self.l2_tables.div_ceil(entries);
        let mapping = self.l2_tables.saturating_add(l1_clusters).saturating_add(1);
        let counted = self.guest_clusters.saturating_add(mapping);
        // Refcount blocks and their table count themselves.
        let per_block = div(self.cluster_bytes.saturating_mul(8), self.refcount_bits).max(1);
        let (mut blocks, mut table) = (0u64, 0u64);
        loop {
            let more_blocks = counted.saturating_add(blocks).saturating_add(table).div_ceil(per_block);
            let more_table = more_blocks.div_ceil(entries);
            if (more_blocks, more_table) == (blocks, table) {
                break;
            }
            (blocks, table) = (more_blocks, more_table);
        }
        mapping.saturating_add(blocks).saturating_add(table).saturating_mul(self.cluster_bytes)
    }
}

fn div(bytes: u64, unit: u64) -> u64 {
    bytes.checked_div(unit).unwrap_or(0)
}
