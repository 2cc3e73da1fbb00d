//! Compares the flag "refcount is exactly one" of L1 and L2 entries with the refcounts.

use crate::check::walk::{COMPRESSED, OFFSET_MASK, Walk};
use crate::layout::entry::{COPIED, ZERO, entries};
use block::IoResult;

/// An entry whose flag "refcount is exactly one" is wrong.
#[derive(Debug)]
pub(crate) struct WrongFlag {
    /// The offset of the entry in the file.
    pub(crate) at: u64,
    pub(crate) entry: u64,
    pub(crate) what: String,
}

impl Walk<'_, '_> {
    /// Returns entries of the active tables whose flag "refcount is exactly one" is wrong. With `predict`, compares
    /// with the refcounts as they will be after the repair. Stops near `most`: it may exceed that by one L2 table.
    pub(crate) async fn wrong_flags(&mut self, predict: bool, most: usize) -> IoResult<Vec<WrongFlag>> {
        let header = self.header;
        let mut wrong = Vec::new();
        let l1 = self.read(header.l1_offset, u64::from(header.l1_entries).saturating_mul(8)).await?;
        for (index, entry) in entries(&l1).enumerate() {
            let l2_offset = entry & OFFSET_MASK;
            if l2_offset == 0 || self.stopped {
                continue;
            }
            if wrong.len() >= most {
                break;
            }
            let Some(refcount) = self.refcount_for_flag(l2_offset, predict).await else { continue };
            if (refcount == 1) != (entry & COPIED != 0) {
                let at = header.l1_offset.saturating_add((index as u64).saturating_mul(8));
                let what = format!("OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={entry:x} refcount={refcount}");
                wrong.push(WrongFlag { at, entry, what });
            }
            let l2 = self.read(l2_offset, self.geometry.cluster_bytes()).await?;
            for (index, entry) in entries(&l2).enumerate().step_by(self.geometry.entry_words()) {
                let at = l2_offset.saturating_add((index as u64).saturating_mul(8));
                let entry = self.new_entries.get(&at).copied().unwrap_or(entry);
                let offset = entry & OFFSET_MASK;
                if entry & COMPRESSED != 0 || offset == 0 {
                    continue;
                }
                let refcount = match self.geometry.data_file {
                    // Clusters of an external data file have no refcounts; each has one owner.
                    true => Some(1),
                    false => self.refcount_for_flag(offset, predict).await,
                };
                let Some(refcount) = refcount else { continue };
                if (refcount == 1) != (entry & COPIED != 0) {
                    let kind = if entry & ZERO == 0 { "data" } else { "zero" };
                    let what = format!("OFLAG_COPIED {kind} cluster: l2_entry={entry:x} refcount={refcount}");
                    wrong.push(WrongFlag { at, entry, what });
                }
            }
        }
        Ok(wrong)
    }

    async fn refcount_for_flag(&mut self, offset: u64, predict: bool) -> Option<u64> {
        let cluster = self.geometry.cluster_of(offset);
        // The cluster has more references than its refcount can say. With the flag, guests would overwrite shared data.
        if self.repairs && self.overcounted.contains(&cluster) {
            return None;
        }
        if !predict {
            return match self.refcount_in_memory(cluster) {
                None => self.refcount(cluster).await,
                known => known,
            };
        }
        // A rebuild frees the clusters of the old refcounts.
        let leaving = if self.needs_rebuild { self.own_references.get(cluster) } else { 0 };
        Some(self.references.get(cluster).saturating_sub(leaving))
    }
}
