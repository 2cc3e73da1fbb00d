//! Finds images whose tables were made in advance (`preallocation=metadata`): their clusters are allocated, but are
//! holes of the file.

use crate::layout::entry::{decode_refcount_table, entries};
use crate::layout::refcount_entry::read_entry;
use crate::live::image::Qcow2;
use block::{IoResult, MetaIo, PastEnd};

/// How many bytes of the refcount table are read at once.
const TABLE_PART_BYTES: u64 = 64 << 10;

impl Qcow2 {
    /// Whether the image counts many more clusters than its file, of `length_bytes`, has space for. Refcounts that
    /// cannot be read do not count. The limit is QEMU's, so that both show the same.
    pub async fn has_empty_clusters(&self, io: &MetaIo, length_bytes: u64, allocated_bytes: u64) -> bool {
        let geometry = &self.inner.geometry;
        // Refcounts do not count clusters of a data file.
        if geometry.data_file {
            return false;
        }
        let real = geometry.cluster_of(allocated_bytes);
        let limit = (u128::from(real).saturating_mul(10) / 9).max(u128::from(real).saturating_add(2));
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        let clusters = geometry.clusters_for(length_bytes);
        // Most files have hardly any holes; then nothing is read.
        clusters >= limit && self.count_clusters(io, clusters, limit).await.is_ok_and(|count| count >= limit)
    }

    /// Counts the used clusters among the first `clusters`, up to `limit`.
    async fn count_clusters(&self, io: &MetaIo, clusters: u64, limit: u64) -> IoResult<u64> {
        let (header, geometry) = (self.header(), &self.inner.geometry);
        let blocks = geometry.block_of(clusters.saturating_sub(1)).saturating_add(1);
        let table_bytes = geometry.start_of(header.refcount_table_clusters.into()).min(blocks.saturating_mul(8));
        let (mut count, mut block, mut at) = (0u64, 0u64, 0u64);
        while at < table_bytes {
            let part = table_bytes.saturating_sub(at).min(TABLE_PART_BYTES);
            let table = io.read(header.refcount_table_offset.saturating_add(at), part as usize, PastEnd::Zeros).await?;
            at = at.saturating_add(part);
            for raw in entries(&table) {
                let first = geometry.block_start(block);
                let inside = clusters.min(geometry.block_end(block)).saturating_sub(first);
                block = block.saturating_add(1);
                let Ok(Some(offset)) = decode_refcount_table(raw, geometry) else { continue };
                let bytes = io.read(offset, geometry.cluster_bytes() as usize, PastEnd::Zeros).await?;
                let used = (0..inside).filter(|index| read_entry(&bytes, *index, geometry.refcount_order) != 0).count();
                count = count.saturating_add(used as u64);
                if count >= limit {
                    return Ok(count);
                }
            }
        }
        Ok(count)
    }
}
