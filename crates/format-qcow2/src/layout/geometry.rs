//! Sizes and indexes that follow from the header: the only place that shifts by cluster bits.

use block::SliceCache;
use std::ops::Range;

/// The most bytes of an L2 table that are cached together, as a power of two; of a smaller table, all.
const SLICE_BYTES_BITS_MAX: u32 = 12;

/// Exclusive bound of file offsets in L2 entries (56 bits).
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 56;

/// Sizes that follow from cluster size, refcount width and disk size. The header has checked that all shifts are small.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) version: u32,
    pub(crate) size_bytes: u64,
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    pub(crate) has_backing: bool,
    /// Whether L2 entries have a second word, which says which of a cluster's 32 parts are allocated or zero.
    pub(crate) extended_l2: bool,
    /// Whether guest data lie in an external file, each cluster at its offset on the disk.
    pub(crate) data_file: bool,
}

impl Geometry {
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits)
    }

    /// Returns the (guest or host) cluster that holds `offset`.
    pub(crate) fn cluster_of(&self, offset: u64) -> u64 {
        offset.wrapping_shr(self.cluster_bits)
    }

    /// Returns how many clusters `length` bytes need.
    pub(crate) fn clusters_for(&self, length: u64) -> u64 {
        length.div_ceil(self.cluster_bytes())
    }

    pub(crate) fn offset_in_cluster(&self, offset: u64) -> u64 {
        offset & self.cluster_bytes().saturating_sub(1)
    }

    /// Returns the first byte of a cluster; saturates for clusters that no file can hold.
    pub(crate) fn start_of(&self, cluster: u64) -> u64 {
        cluster.saturating_mul(self.cluster_bytes())
    }

    /// Returns the entries of an L2 table, as a power of two.
    pub(crate) fn l2_bits(&self) -> u32 {
        self.cluster_bits.saturating_sub(self.entry_bits())
    }

    /// Returns the bytes of an L2 entry, as a power of two.
    fn entry_bits(&self) -> u32 {
        if self.extended_l2 { 4 } else { 3 }
    }

    /// Returns the 64-bit words of an L2 entry.
    pub(crate) fn entry_words(&self) -> usize {
        if self.extended_l2 { 2 } else { 1 }
    }

    pub(crate) fn l1_index(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.l2_bits())
    }

    /// Returns the first guest cluster behind the L2 table that maps `cluster`.
    pub(crate) fn table_end(&self, cluster: u64) -> u64 {
        self.l1_index(cluster).saturating_add(1).wrapping_shl(self.l2_bits())
    }

    pub(crate) fn slice_bits(&self) -> u32 {
        self.l2_bits().min(SLICE_BYTES_BITS_MAX.saturating_sub(self.entry_bits()))
    }

    /// Returns the slice that maps a guest cluster. Slices are numbered over the whole disk.
    pub(crate) fn slice_of(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.slice_bits())
    }

    pub(crate) fn index_in_slice(&self, cluster: u64) -> usize {
        (cluster & self.slice_entries().saturating_sub(1)) as usize
    }

    /// Returns the first guest cluster behind the slice that maps `cluster`.
    pub(crate) fn slice_end(&self, cluster: u64) -> u64 {
        self.slice_of(cluster).saturating_add(1).wrapping_shl(self.slice_bits())
    }

    pub(crate) fn slice_entries(&self) -> u64 {
        1u64.wrapping_shl(self.slice_bits())
    }

    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_entries().wrapping_shl(self.entry_bits())
    }

    /// Returns the 64-bit words of a slice.
    pub(crate) fn slice_words(&self) -> usize {
        usize::try_from(self.slice_bytes() / 8).unwrap_or(0)
    }

    /// Returns the first word of a guest cluster's entry in its slice.
    pub(crate) fn word_in_slice(&self, cluster: u64) -> usize {
        self.index_in_slice(cluster).saturating_mul(self.entry_words())
    }

    /// Returns the part of a cluster that holds `offset`.
    pub(crate) fn part_of(&self, offset: u64) -> u32 {
        self.offset_in_cluster(offset).wrapping_shr(self.part_bits()) as u32
    }

    /// Returns where a part starts in its cluster.
    pub(crate) fn part_start(&self, part: u32) -> u64 {
        u64::from(part).wrapping_shl(self.part_bits())
    }

    /// Returns the bytes of a part (a 32nd of a cluster), as a power of two.
    pub(crate) fn part_bits(&self) -> u32 {
        self.cluster_bits.saturating_sub(5)
    }

    /// Whether data of guest byte `guest` cannot lie at `host`: in an external data file the two are equal.
    pub(crate) fn is_misplaced(&self, host: u64, guest: u64) -> bool {
        self.data_file && host != guest
    }

    /// Returns the slices of the whole disk.
    pub(crate) fn slices(&self) -> u64 {
        self.guest_clusters().div_ceil(self.slice_entries())
    }

    /// Makes an empty cache for the disk's L2 tables.
    pub(crate) fn slice_cache(&self, cache_bytes: u64) -> SliceCache {
        SliceCache::new(self.slices(), self.slice_words(), cache_bytes)
    }

    pub(crate) fn l1_index_of_slice(&self, slice: u64) -> u64 {
        slice.wrapping_shr(self.l2_bits().saturating_sub(self.slice_bits()))
    }

    /// Returns where a slice starts in its L2 table.
    pub(crate) fn slice_offset_in_table(&self, slice: u64) -> u64 {
        let slices_per_table = 1u64.wrapping_shl(self.l2_bits().saturating_sub(self.slice_bits()));
        (slice & slices_per_table.saturating_sub(1)).saturating_mul(self.slice_bytes())
    }

    /// Returns the guest clusters of the disk.
    pub(crate) fn guest_clusters(&self) -> u64 {
        self.clusters_for(self.size_bytes)
    }

    /// Returns how many L1 entries the disk needs.
    pub(crate) fn l1_entries(&self) -> u64 {
        self.guest_clusters().div_ceil(1u64.wrapping_shl(self.l2_bits()))
    }

    /// Returns how many bytes of the disk an L1 entry covers.
    pub(crate) fn l1_entry_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits.saturating_add(self.l2_bits()))
    }

    /// Returns the refcounts of a block, as a power of two.
    pub(crate) fn block_bits(&self) -> u32 {
        self.cluster_bits.saturating_add(3).saturating_sub(self.refcount_order)
    }

    /// Returns the refcount block that counts a host cluster.
    pub(crate) fn block_of(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.block_bits())
    }

    /// Returns the first host cluster behind those that `block` counts.
    pub(crate) fn block_end(&self, block: u64) -> u64 {
        block.saturating_add(1).wrapping_shl(self.block_bits())
    }

    /// Returns the first host cluster that `block` counts.
    pub(crate) fn block_start(&self, block: u64) -> u64 {
        block.wrapping_shl(self.block_bits())
    }
}

/// Returns the host clusters that `length` bytes at `offset` touch.
pub(crate) fn clusters_of(geometry: &Geometry, offset: u64, length: u64) -> Range<u64> {
    let end = geometry.offset_in_cluster(offset).saturating_add(length);
    let first = geometry.cluster_of(offset);
    first..first.saturating_add(geometry.clusters_for(end))
}
