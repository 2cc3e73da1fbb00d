//! Counts every reference again, from the header, L1, L2, snapshots, bitmaps and the refcounts' own tables.

use crate::check::references::Kind;
use crate::check::walk::{COMPRESSED, OFFSET_MASK, REFCOUNT_TABLE_RESERVED, Walk};
use crate::layout::entry::{COPIED, ZERO, entries};
use crate::layout::extended_entry::{ALL_DATA, ALL_ZERO};
use crate::layout::geometry::clusters_of;
use crate::layout::header::MAX_REFCOUNT_TABLE_BYTES;
use crate::layout::snapshot::{ROW_BYTES, RowHead};
use block::IoResult;

const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
const MAX_L1_BYTES: u64 = 32 << 20;
/// The most bytes by which a repair extends a file for the sake of a refcount block behind its end. A block farther
/// away is damage: it is dropped, and the refcounts are rebuilt.
const GROWTH_BYTES_MAX: u64 = 1 << 30;
/// The most clusters that are remembered of one reference behind the end of the file.
const CLAIMED_MAX: usize = 16;

impl Walk<'_, '_> {
    /// Counts `times` references to every cluster that the range touches.
    fn refer(&mut self, offset: u64, length: u64, times: u32) {
        let Some(last) = length.checked_sub(1) else { return };
        let end = offset.saturating_add(length);
        let last_cluster = self.geometry.cluster_of(offset.saturating_add(last));
        let touched = self.geometry.cluster_of(offset)..=last_cluster;
        if end.saturating_sub(self.file_bytes) >= self.geometry.cluster_bytes() {
            // The file may grow up to these clusters.
            self.claimed.extend(touched.take(CLAIMED_MAX));
            return self.corrupt(format!(
                "a reference exceeds the end of the file by one cluster or more: offset \
                 {offset:#x} size {length:#x}"
            ));
        }
        self.clusters = self.clusters.max(last_cluster.saturating_add(1));
        self.charge(last_cluster.saturating_sub(*touched.start()).saturating_mul(8));
        for cluster in touched {
            if self.stopped {
                break;
            }
            self.count(cluster, times);
        }
    }

    /// Counts `times` references to a cluster, up to the highest refcount.
    pub(crate) fn count(&mut self, cluster: u64, times: u32) {
        let bits = 1u32.wrapping_shl(self.geometry.refcount_order);
        let max = u32::try_from(u64::MAX.wrapping_shr(64u32.saturating_sub(bits))).unwrap_or(u32::MAX);
        let too_many = self.references.count(cluster, times, max);
        if too_many > 0 {
            let offset = self.geometry.start_of(cluster);
            self.overcounted.insert(cluster);
            self.corrupt(format!("more references to the cluster at {offset:#x} than a refcount can count"));
            self.report.corruptions = self.report.corruptions.saturating_add(u64::from(too_many.saturating_sub(1)));
        }
        if self.strict {
            self.limit_memory();
        }
    }

    /// Counts references to the space of refcounts.
    fn refer_to_refcounts(&mut self, offset: u64, length: u64) {
        for cluster in clusters_of(&self.geometry, offset, length.min(MAX_REFCOUNT_TABLE_BYTES)) {
            self.own_references.count(cluster, 1, u32::MAX);
        }
        self.refer_to_table(Kind::Other, offset, length);
    }

    /// Counts references to the space of a table.
    fn refer_to_table(&mut self, kind: Kind, offset: u64, length: u64) {
        self.kinds.add(kind, clusters_of(&self.geometry, offset, length.min(MAX_L1_BYTES)));
        self.refer(offset, length, 1);
    }

    pub(crate) async fn count_all(&mut self) -> IoResult {
        self.refer_to_table(Kind::Other, 0, self.geometry.cluster_bytes());
        let header = self.header;
        self.count_l1(header.l1_offset, u64::from(header.l1_entries), true).await?;
        self.count_snapshots().await?;
        self.count_again().await?;
        // All errors of the refcounts' own places can be repaired.
        let strict = std::mem::take(&mut self.strict);
        self.refer_to_refcounts(header.refcount_table_offset, self.table_bytes());
        self.strict = strict;
        for (offset, length) in self.bitmaps.clone() {
            if self.stopped {
                break;
            }
            self.refer_to_table(Kind::Other, offset, length);
        }
        self.strict = false;
        // A repair at open does not extend the file: nobody asked for that.
        self.count_blocks(!strict);
        if strict {
            self.limit_memory();
        }
        self.strict = strict;
        self.kinds.find_shared(&self.references, &self.overcounted);
        Ok(())
    }

    async fn count_l1(&mut self, offset: u64, l1_entries: u64, active: bool) -> IoResult {
        let bytes = l1_entries.saturating_mul(8);
        self.charge(bytes);
        self.refer_to_table(if active { Kind::L1 } else { Kind::Other }, offset, bytes);
        let table = self.read(offset, bytes).await?;
        for (index, entry) in entries(&table).enumerate() {
            if self.stopped {
                return Ok(());
            }
            if active {
                self.tell(index as u64, l1_entries);
            }
            let l2_offset = entry & OFFSET_MASK;
            if entry == 0 {
                continue;
            }
            if entry & L1_RESERVED != 0 {
                self.corrupt(format!("found L1 entry with reserved bits set: {entry:x}"));
            }
            self.refer_to_table(Kind::L2, l2_offset, self.geometry.cluster_bytes());
            if self.geometry.offset_in_cluster(l2_offset) != 0 {
                self.corrupt(format!("l2_offset={l2_offset:x}: Table is not cluster aligned; L1 entry corrupted"));
            }
            // Snapshots share tables. A table without errors is read once more, for all snapshots together.
            if !active && let Some(times) = self.again.get_mut(&l2_offset) {
                *times = times.saturating_add(1);
                continue;
            }
            let findings = self.findings;
            self.count_l2(l2_offset, active, 1).await?;
            if self.findings == findings {
                self.again.entry(l2_offset).or_insert(0);
            }
        }
        Ok(())
    }

    /// Counts the references of tables that snapshots share with the disk or with each other.
    async fn count_again(&mut self) -> IoResult {
        for (l2_offset, times) in std::mem::take(&mut self.again) {
            if times > 0 && !self.stopped {
                self.count_l2(l2_offset, false, times).await?;
            }
        }
        Ok(())
    }

    /// Counts `times` references to everything that an L2 table refers to.
    async fn count_l2(&mut self, l2_offset: u64, active: bool, times: u32) -> IoResult {
        self.charge(self.geometry.cluster_bytes());
        self.ask();
        if self.stopped {
            return Ok(());
        }
        let table = self.read(l2_offset, self.geometry.cluster_bytes()).await?;
        let mut expected = 0u64;
        let mut words = entries(&table).enumerate();
        while let Some((index, entry)) = words.next() {
            let bitmap = if self.geometry.extended_l2 { words.next().map_or(0, |(_, word)| word) } else { 0 };
            let at = l2_offset.saturating_add((index as u64).saturating_mul(8));
            let entry = self.new_entries.get(&at).copied().unwrap_or(entry);
            if entry & COMPRESSED != 0 {
                self.count_compressed(entry, bitmap, active, times);
                continue;
            }
            let offset = entry & OFFSET_MASK;
            if entry & L2_RESERVED != 0 {
                self.corrupt(format!("found l2 entry with reserved bits set: {entry:x}"));
            }
            // In an external data file, offset 0 belongs to the first cluster.
            let is_zero = entry & ZERO != 0 && !self.geometry.extended_l2;
            if offset == 0 && (is_zero || !self.geometry.data_file || entry & COPIED == 0) {
                if bitmap & ALL_DATA != 0 {
                    self.corrupt(format!("unallocated cluster with allocated parts: {bitmap:x}"));
                }
                continue;
            }
            if bitmap & bitmap >> 32 != 0 {
                self.corrupt(format!("offset={offset:x}: Allocated clusters and zero clusters overlap: {bitmap:x}"));
            }
            if self.geometry.offset_in_cluster(offset) != 0 {
                let holds_data = match self.geometry.extended_l2 {
                    true => bitmap & ALL_DATA != 0,
                    false => entry & ZERO == 0,
                };
                if !holds_data && self.repairs && !self.strict {
                    // The cluster reads as zeros, whatever its offset.
                    self.find(format!("Repairing offset={offset:x}: Preallocated cluster is not properly aligned"));
                    self.zero_entry(at);
                    continue;
                }
                self.corrupt(format!("offset={offset:x}: Cluster is not properly aligned; L2 entry corrupted."));
            }
            if active {
                self.report.allocated_clusters = self.report.allocated_clusters.saturating_add(1);
                if expected != 0 && offset != expected {
                    self.report.fragmented_clusters = self.report.fragmented_clusters.saturating_add(1);
                }
                expected = offset.saturating_add(self.geometry.cluster_bytes());
            }
            if !self.geometry.data_file {
                self.refer(offset, self.geometry.cluster_bytes(), times);
            }
        }
        Ok(())
    }

    /// Makes the entry at `at` read as zeros and refer to nothing.
    fn zero_entry(&mut self, at: u64) {
        if self.geometry.extended_l2 {
            self.new_entries.extend([(at, 0), (at.saturating_add(8), ALL_ZERO)]);
        } else {
            self.new_entries.insert(at, ZERO);
        }
        self.report.corruptions_fixed = self.report.corruptions_fixed.saturating_add(1);
    }

    /// Counts a compressed cluster. The entry gives its sectors only roughly, so all that it may touch is counted.
    fn count_compressed(&mut self, entry: u64, bitmap: u64, active: bool, times: u32) {
        self.has_compressed = true;
        let offset_bits = 62u32.saturating_sub(self.geometry.cluster_bits.saturating_sub(8));
        let offset = entry & 1u64.wrapping_shl(offset_bits).saturating_sub(1);
        let sectors = (entry & COMPRESSED.saturating_sub(1)).wrapping_shr(offset_bits).saturating_add(1);
        if entry & COPIED != 0 {
            self.corrupt(format!("coffset={offset:x}: copied flag must never be set for compressed clusters"));
        }
        let length = sectors.saturating_mul(512).saturating_sub(offset & 511);
        if self.geometry.data_file || bitmap != 0 {
            let why = if bitmap == 0 { "in an external data file" } else { "in parts" };
            // Not counted, but readers still read it: it must not be overwritten.
            self.claimed.extend(clusters_of(&self.geometry, offset, length).take(CLAIMED_MAX));
            return self.corrupt(format!("compressed cluster {why}, entry={entry:#x}"));
        }
        self.refer(offset, length, times);
        if active {
            let report = &mut self.report;
            report.allocated_clusters = report.allocated_clusters.saturating_add(1);
            report.compressed_clusters = report.compressed_clusters.saturating_add(1);
            // Compressed clusters lie inside host clusters, so they never follow the one before.
            report.fragmented_clusters = report.fragmented_clusters.saturating_add(1);
        }
    }

    async fn count_snapshots(&mut self) -> IoResult {
        let mut at = self.header.snapshots_offset;
        for index in 0..self.header.snapshots {
            if self.stopped {
                return Ok(());
            }
            let row = RowHead::parse(&self.read(at, ROW_BYTES as u64).await?);
            let RowHead { l1_offset, l1_entries, extra_bytes, .. } = row;
            if !row.has_sane_extra() {
                self.report.check_errors = self.report.check_errors.saturating_add(1);
                self.find(format!("ERROR snapshot {index} has {extra_bytes} bytes of extra data"));
                return Ok(());
            }
            at = row.next_row(at);
            if self.geometry.offset_in_cluster(l1_offset) != 0 {
                self.corrupt(format!("snapshot {index} l1_offset={l1_offset:#x}: L1 table is not cluster aligned"));
                continue;
            }
            if row.l1_bytes() > MAX_L1_BYTES {
                self.corrupt(format!("snapshot {index} l1_size={l1_entries:#x}: L1 table is too large"));
                continue;
            }
            self.count_l1(l1_offset, l1_entries, false).await?;
        }
        self.refer_to_table(Kind::Other, self.header.snapshots_offset, at.saturating_sub(self.header.snapshots_offset));
        Ok(())
    }

    fn count_blocks(&mut self, may_grow: bool) {
        let file_clusters = self.geometry.clusters_for(self.file_bytes);
        for index in 0..self.table.len() {
            // What was not counted would look as if nothing referred to it.
            if self.stopped {
                return;
            }
            let entry = self.table.get(index).copied().unwrap_or(0);
            let offset = entry & !REFCOUNT_TABLE_RESERVED;
            let cluster = self.geometry.cluster_of(offset);
            // A block outside the file is one of zeros until the file grows.
            let mut damaged = true;
            if entry & REFCOUNT_TABLE_RESERVED != 0 {
                self.corrupt(format!("refcount table entry {index} has reserved bits set"));
            } else if self.geometry.offset_in_cluster(offset) != 0 {
                self.corrupt(format!("refcount block {index} is not cluster aligned; refcount table entry corrupted"));
            } else if cluster >= file_clusters {
                let may_grow = may_grow && offset.saturating_sub(self.file_bytes) < GROWTH_BYTES_MAX;
                damaged = self.count_block_outside(index, offset, may_grow);
            } else if offset != 0 {
                self.refer_to_refcounts(offset, self.geometry.cluster_bytes());
                let references = self.references.get(cluster);
                // A refcount of one bit cannot count to two.
                damaged = references != 1 || self.overcounted.contains(&cluster);
                if references != 1 {
                    self.corrupt(format!("refcount block {index} refcount={references}"));
                }
            } else {
                damaged = false;
            }
            if damaged {
                self.needs_rebuild = true;
                self.claimed.insert(cluster);
            }
        }
    }

    /// Counts a refcount block behind the end of the file. Like qemu-img, a repair extends the file, and counts that as
    /// a correction, and what is wrong afterwards. Until then, reading zeros there has the same result. Returns whether
    /// the block is damaged.
    fn count_block_outside(&mut self, index: usize, offset: u64, may_grow: bool) -> bool {
        let cluster = self.geometry.cluster_of(offset);
        if !self.repairs || !may_grow {
            self.corrupt(format!("refcount block {index} is outside image"));
            return self.repairs;
        }
        self.find(format!("Repairing refcount block {index} is outside image"));
        self.report.corruptions_fixed = self.report.corruptions_fixed.saturating_add(1);
        self.clusters = self.clusters.max(cluster.saturating_add(1));
        self.outside_bytes = self.outside_bytes.max(offset.saturating_add(self.geometry.cluster_bytes()));
        self.count(cluster, 1);
        // Something else may also refer to the place behind the end.
        let references = self.references.get(cluster);
        if references != 1 {
            self.corrupt(format!("refcount block {index} refcount={references}"));
        }
        references != 1
    }
}
