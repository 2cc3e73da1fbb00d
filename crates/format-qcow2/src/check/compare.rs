//! The second half of a check: compares the refcounts on disk with the numbers of references.

use crate::check::walk::{MISMATCHES_MAX, Mismatch, REFCOUNT_TABLE_RESERVED, Walk};
use std::ops::Range;

impl Walk<'_, '_> {
    /// Returns the refcount on disk; `None` if its block is damaged or cannot be read.
    pub(crate) async fn refcount(&mut self, cluster: u64) -> Option<u64> {
        let number = self.geometry.block_of(cluster);
        let entry = usize::try_from(number).ok().and_then(|index| self.table.get(index)).copied().unwrap_or(0);
        let offset = entry & !REFCOUNT_TABLE_RESERVED;
        if offset == 0 {
            return Some(0);
        }
        if self.geometry.offset_in_cluster(offset) != 0 {
            return None;
        }
        if self.block.as_ref().is_none_or(|(loaded, _)| *loaded != number) {
            self.charge(self.geometry.cluster_bytes());
            self.block = Some((number, self.read(offset, self.geometry.cluster_bytes()).await.ok()?));
        }
        self.refcount_in_memory(cluster)
    }

    /// Returns the refcount on disk if it is in the block that was read last.
    pub(crate) fn refcount_in_memory(&self, cluster: u64) -> Option<u64> {
        let (loaded, bytes) = self.block.as_ref()?;
        if *loaded != self.geometry.block_of(cluster) {
            return None;
        }
        let bits = 1u64.wrapping_shl(self.geometry.refcount_order);
        let first_bit = cluster.saturating_sub(self.geometry.block_start(*loaded)).saturating_mul(bits);
        let at = usize::try_from(first_bit / 8).ok()?;
        if bits < 8 {
            let shift = (first_bit % 8) as u32;
            let mask = 1u64.wrapping_shl(bits as u32).saturating_sub(1);
            return Some(u64::from(*bytes.get(at)?).wrapping_shr(shift) & mask);
        }
        let field = bytes.get(at..at.saturating_add((bits / 8) as usize))?;
        Some(field.iter().fold(0u64, |value, byte| value.wrapping_shl(8) | u64::from(*byte)))
    }

    pub(crate) async fn compare(&mut self) {
        let clusters = self.clusters;
        let mut cluster = 0u64;
        while cluster < clusters && !self.stopped {
            let (piece_end, referred) = self.references.piece(cluster);
            let block = self.geometry.block_of(cluster);
            let counted = usize::try_from(block).ok().and_then(|index| self.table.get(index)).is_some_and(|o| *o != 0);
            let end = piece_end.min(clusters).min(self.geometry.block_end(block));
            if counted || referred {
                let mut at = cluster;
                while at < end {
                    self.compare_cluster(at).await;
                    at = self.pass_what_is_right(at.saturating_add(1)..end);
                }
            }
            self.tell(cluster, clusters);
            cluster = if counted || referred { end } else { end.max(self.next_piece(cluster).min(clusters)) };
        }
    }

    /// Returns the next cluster that may be counted or referred to. Most of a sparse file is neither.
    fn next_piece(&self, cluster: u64) -> u64 {
        let referred = self.references.next_piece(cluster);
        let block = usize::try_from(self.geometry.block_of(cluster)).unwrap_or(usize::MAX);
        let later = self.table.iter().enumerate().skip(block.saturating_add(1));
        let counted =
            later.filter(|(_, offset)| **offset != 0).map(|(index, _)| self.geometry.block_start(index as u64)).next();
        referred.into_iter().chain(counted).min().unwrap_or(u64::MAX)
    }

    /// Returns the first cluster of a range whose refcount is not in memory, or differs from the number of references.
    /// Nearly all are right, so this loop decides how long a check takes.
    fn pass_what_is_right(&mut self, range: Range<u64>) -> u64 {
        let mut used = None;
        let differs = range.clone().find(|cluster| {
            let references = self.references.get(*cluster);
            if self.refcount_in_memory(*cluster) != Some(references) {
                return true;
            }
            if references > 0 {
                used = Some(*cluster);
            }
            false
        });
        if let Some(last) = used {
            self.report.image_end_offset = self.geometry.start_of(last.saturating_add(1));
        }
        differs.unwrap_or(range.end.max(range.start))
    }

    async fn compare_cluster(&mut self, cluster: u64) {
        let references = self.references.get(cluster);
        let Some(refcount) = self.refcount(cluster).await else {
            self.report.check_errors = self.report.check_errors.saturating_add(1);
            return self.find(format!("Can't get refcount for cluster {cluster}: Input/output error"));
        };
        if refcount > 0 || references > 0 {
            self.report.image_end_offset = self.geometry.start_of(cluster.saturating_add(1));
        }
        if refcount == references {
            return;
        }
        self.needs_rebuild |= refcount == 0 || (self.repairs && self.mismatches.len() >= MISMATCHES_MAX);
        match self.repairs && self.needs_rebuild {
            // All refcounts will be written anew.
            true => self.mismatches = Vec::new(),
            false if !self.keeps_mismatches => {}
            false => self.mismatches.push(Mismatch { cluster, refcount, references }),
        }
        if refcount < references {
            self.corrupt(format!("cluster {cluster} refcount={refcount} reference={references}"));
        } else {
            self.report.leaks = self.report.leaks.saturating_add(1);
            self.find(format!("Leaked cluster {cluster} refcount={refcount} reference={references}"));
        }
    }
}
