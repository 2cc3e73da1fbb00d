//! Sizes and indexes that follow from the header: the only place that shifts by cluster bits.

use block::SliceCache;
use std::ops::Range;

/// What of an L2 table is cached together: 4 KiB of the table, or all of a smaller one.
const SLICE_BYTES_BITS_MAX: u32 = 12;

/// Largest offset in the file that an L2 entry can name (56 bits), exclusive.
pub(crate) const MAX_FILE_BYTES: u64 = 1 << 56;

/// What follows from cluster size, refcount width and virtual size. The header has checked that all shifts are small.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) version: u32,
    pub(crate) size_bytes: u64,
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    pub(crate) has_backing: bool,
    /// L2 entries have a second word: which of a cluster's 32 parts are allocated or zero.
    pub(crate) extended_l2: bool,
    /// Guest data lie in a file of their own, each cluster at its place on the disk.
    pub(crate) data_file: bool,
}

impl Geometry {
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits)
    }

    /// The (guest or host) cluster that holds `offset`.
    pub(crate) fn cluster_of(&self, offset: u64) -> u64 {
        offset.wrapping_shr(self.cluster_bits)
    }

    /// Clusters needed for `length` bytes.
    pub(crate) fn clusters_for(&self, length: u64) -> u64 {
        length.div_ceil(self.cluster_bytes())
    }

    pub(crate) fn offset_in_cluster(&self, offset: u64) -> u64 {
        offset & self.cluster_bytes().saturating_sub(1)
    }

    /// First byte of a cluster; saturates for clusters that no file can hold.
    pub(crate) fn start_of(&self, cluster: u64) -> u64 {
        cluster.saturating_mul(self.cluster_bytes())
    }

    /// Entries in an L2 table, as a power of two.
    pub(crate) fn l2_bits(&self) -> u32 {
        self.cluster_bits.saturating_sub(self.entry_bits())
    }

    /// Bytes of an L2 entry, as a power of two.
    fn entry_bits(&self) -> u32 {
        if self.extended_l2 { 4 } else { 3 }
    }

    /// 64-bit words of an L2 entry.
    pub(crate) fn entry_words(&self) -> usize {
        if self.extended_l2 { 2 } else { 1 }
    }

    pub(crate) fn l1_index(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.l2_bits())
    }

    /// The first guest cluster behind those of the L2 table that maps `cluster`.
    pub(crate) fn table_end(&self, cluster: u64) -> u64 {
        self.l1_index(cluster).saturating_add(1).wrapping_shl(self.l2_bits())
    }

    pub(crate) fn slice_bits(&self) -> u32 {
        self.l2_bits().min(SLICE_BYTES_BITS_MAX.saturating_sub(self.entry_bits()))
    }

    /// The slice (numbered through the guest's address space) that maps a guest cluster.
    pub(crate) fn slice_of(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.slice_bits())
    }

    pub(crate) fn index_in_slice(&self, cluster: u64) -> usize {
        (cluster & self.slice_entries().saturating_sub(1)) as usize
    }

    /// The first guest cluster behind those of the slice that maps `cluster`.
    pub(crate) fn slice_end(&self, cluster: u64) -> u64 {
        self.slice_of(cluster).saturating_add(1).wrapping_shl(self.slice_bits())
    }

    pub(crate) fn slice_entries(&self) -> u64 {
        1u64.wrapping_shl(self.slice_bits())
    }

    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_entries().wrapping_shl(self.entry_bits())
    }

    /// 64-bit words of a slice.
    pub(crate) fn slice_words(&self) -> usize {
        usize::try_from(self.slice_bytes() / 8).unwrap_or(0)
    }

    /// The first word of a guest cluster's entry in its slice.
    pub(crate) fn word_in_slice(&self, cluster: u64) -> usize {
        self.index_in_slice(cluster).saturating_mul(self.entry_words())
    }

    /// The part of a cluster that holds `offset`.
    pub(crate) fn part_of(&self, offset: u64) -> u32 {
        self.offset_in_cluster(offset).wrapping_shr(self.part_bits()) as u32
    }

    /// Where a part starts in its cluster.
    pub(crate) fn part_start(&self, part: u32) -> u64 {
        u64::from(part).wrapping_shl(self.part_bits())
    }

    /// Bytes of a part (a 32nd of a cluster), as a power of two.
    pub(crate) fn part_bits(&self) -> u32 {
        self.cluster_bits.saturating_sub(5)
    }

    /// Whether data of guest byte `guest` cannot lie at `host`: in an external data file each has one place.
    pub(crate) fn is_misplaced(&self, host: u64, guest: u64) -> bool {
        self.data_file && host != guest
    }

    /// Slices of the whole disk.
    pub(crate) fn slices(&self) -> u64 {
        self.guest_clusters().div_ceil(self.slice_entries())
    }

    /// An empty cache for the disk's L2 tables.
    pub(crate) fn slice_cache(&self, cache_bytes: u64) -> SliceCache {
        SliceCache::new(self.slices(), self.slice_words(), cache_bytes)
    }

    pub(crate) fn l1_index_of_slice(&self, slice: u64) -> u64 {
        slice.wrapping_shr(self.l2_bits().saturating_sub(self.slice_bits()))
    }

    /// Where a slice starts inside its L2 table.
    pub(crate) fn slice_offset_in_table(&self, slice: u64) -> u64 {
        let slices_per_table = 1u64.wrapping_shl(self.l2_bits().saturating_sub(self.slice_bits()));
        (slice & slices_per_table.saturating_sub(1)).saturating_mul(self.slice_bytes())
    }

    /// Guest clusters of the disk.
    pub(crate) fn guest_clusters(&self) -> u64 {
        self.clusters_for(self.size_bytes)
    }

    /// L1 entries that the disk needs.
    pub(crate) fn l1_entries(&self) -> u64 {
        self.guest_clusters().div_ceil(1u64.wrapping_shl(self.l2_bits()))
    }

    /// How much of the disk an L1 entry leads to.
    pub(crate) fn l1_entry_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.cluster_bits.saturating_add(self.l2_bits()))
    }

    /// Refcounts in a refcount block, as a power of two.
    pub(crate) fn block_bits(&self) -> u32 {
        self.cluster_bits.saturating_add(3).saturating_sub(self.refcount_order)
    }

    /// The refcount block that counts a host cluster.
    pub(crate) fn block_of(&self, cluster: u64) -> u64 {
        cluster.wrapping_shr(self.block_bits())
    }

    /// The first host cluster behind those that `block` counts.
    pub(crate) fn block_end(&self, block: u64) -> u64 {
        block.saturating_add(1).wrapping_shl(self.block_bits())
    }

    /// The first host cluster that `block` counts.
    pub(crate) fn block_start(&self, block: u64) -> u64 {
        block.wrapping_shl(self.block_bits())
    }
}

/// The host clusters that `length` bytes at `offset` touch.
pub(crate) fn clusters_of(geometry: &Geometry, offset: u64, length: u64) -> Range<u64> {
    let end = geometry.offset_in_cluster(offset).saturating_add(length);
    let first = geometry.cluster_of(offset);
    first..first.saturating_add(geometry.clusters_for(end))
}
