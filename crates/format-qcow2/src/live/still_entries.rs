//! The entries that no guest changes: those of internal snapshots, and those of the active tables behind the disk's
//! end, where a machine's state may lie. Before a file is cut off, every cluster behind the cut that one of them names
//! must have a refcount.

use crate::layout::entry::{BadEntry, Cluster, decode_l1, entries};
use crate::layout::extended_entry::Extended;
use crate::layout::geometry::MAX_FILE_BYTES;
use crate::layout::snapshot::{ROW_BYTES, RowHead};
use crate::live::compaction::Compaction;
use crate::live::image::Qcow2;
use crate::live::state::{FreshTable, Inner, Need, State, Step, Stop};
use block::{IoResult, MetaIo, PastEnd, yield_now};
use std::collections::HashSet;

/// An L1 table is read in pieces of this size.
const L1_PIECE_BYTES: u64 = 64 << 10;

/// The most tables that are remembered as seen: snapshots share tables.
const SEEN_MAX: usize = 1 << 18;

/// The state of a walk over tables.
struct Look<'a, F> {
    io: &'a MetaIo,
    compaction: &'a mut Compaction,
    goes_on: F,
    seen: HashSet<u64>,
}

impl Qcow2 {
    /// Looks at the entries that a pass over the disk does not meet. `goes_on` is asked before each table; if it
    /// returns false, so does this. `io` is for calls that block.
    pub async fn look_at_still(
        &self,
        io: &MetaIo,
        compaction: &mut Compaction,
        goes_on: impl FnMut() -> bool,
    ) -> IoResult<bool> {
        let inner = &*self.inner;
        let mut look = Look { io, compaction, goes_on, seen: HashSet::new() };
        Ok(inner.look_behind_disk(&mut look).await? && inner.look_at_snapshots(&mut look).await?)
    }
}

impl Inner {
    /// Looks at active entries behind the disk's end. They are in its last table, and in all tables after it.
    async fn look_behind_disk(&self, look: &mut Look<'_, impl FnMut() -> bool>) -> IoResult<bool> {
        let clusters = self.geometry.guest_clusters();
        for index in self.geometry.l1_index(clusters)..self.l1.len() as u64 {
            // If the table moves, its old place is not reused meanwhile.
            let ticket = look.compaction.participant.begin(&self.epochs);
            let offset = self.still_table(index);
            let first = clusters.saturating_sub(index.wrapping_shl(self.geometry.l2_bits()));
            let looked = match offset {
                Ok(Some(offset)) => self.look_at_table(look, offset, first).await,
                Ok(None) => Ok(true),
                Err(error) => Err(error),
            };
            look.compaction.participant.end(ticket);
            if !looked? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the place in the file of the table that an L1 entry names.
    fn still_table(&self, index: u64) -> IoResult<Option<u64>> {
        let state = self.lock();
        Ok(match state.fresh_tables.get(&index) {
            Some(FreshTable::Zeros) => None,
            Some(FreshTable::CopyOf(offset)) => Some(*offset),
            None => self.table_or_complain(index)?.map(|table| table.offset),
        })
    }

    async fn look_at_snapshots(&self, look: &mut Look<'_, impl FnMut() -> bool>) -> IoResult<bool> {
        let mut at = self.header.snapshots_offset;
        for number in 0..self.header.snapshots {
            let row = RowHead::parse(&look.io.read(at, ROW_BYTES, PastEnd::Fails).await?);
            let (offset, length) = (row.l1_offset, row.l1_bytes());
            if !row.has_sane_extra() || offset.saturating_add(length) > MAX_FILE_BYTES {
                return Err(self.corrupt(format_args!("row {number} of its snapshot table is invalid")));
            }
            if !self.look_at_l1(look, offset, length).await? {
                return Ok(false);
            }
            at = row.next_row(at);
        }
        Ok(true)
    }

    async fn look_at_l1(&self, look: &mut Look<'_, impl FnMut() -> bool>, offset: u64, bytes: u64) -> IoResult<bool> {
        let mut done = 0;
        while done < bytes {
            let piece = bytes.saturating_sub(done).min(L1_PIECE_BYTES);
            let length = usize::try_from(piece).unwrap_or(0);
            let l1 = look.io.read(offset.saturating_add(done), length, PastEnd::Fails).await?;
            for raw in entries(&l1) {
                let table = decode_l1(raw, &self.geometry);
                let table = table.map_err(|BadEntry| self.invalid_in("an L1 table", offset))?;
                if let Some(table) = table
                    && !look.seen.contains(&table.offset)
                {
                    if look.seen.len() < SEEN_MAX {
                        look.seen.insert(table.offset);
                    }
                    if !self.look_at_table(look, table.offset, 0).await? {
                        return Ok(false);
                    }
                }
            }
            done = done.saturating_add(piece);
        }
        Ok(true)
    }

    /// Looks at the entries of an L2 table, from number `first` on.
    async fn look_at_table(
        &self,
        look: &mut Look<'_, impl FnMut() -> bool>,
        offset: u64,
        first: u64,
    ) -> IoResult<bool> {
        if !(look.goes_on)() {
            return Ok(false);
        }
        let length = usize::try_from(self.geometry.cluster_bytes()).unwrap_or(0);
        let table = look.io.read(offset, length, PastEnd::Fails).await?;
        let words: Vec<u64> = entries(&table).collect();
        let (io, end) = (look.io, look.compaction.end);
        let mut at = usize::try_from(first).unwrap_or(usize::MAX).saturating_mul(self.geometry.entry_words());
        while at < words.len() {
            let (next, own) = self.run(io, |state| self.look_at_some(state, &words, at, end, offset)).await?;
            at = next;
            let more_bytes = self.geometry.start_of(own);
            look.compaction.fixed_bytes = look.compaction.fixed_bytes.saturating_add(more_bytes);
            yield_now().await;
        }
        Ok(true)
    }

    /// Looks at entries until a refcount block is missing. Returns where to go on, and how many clusters behind `end`
    /// have only this reference.
    fn look_at_some(&self, state: &mut State, words: &[u64], at: usize, end: u64, table: u64) -> Step<(usize, u64)> {
        if state.refcounts.is_half_crowded() {
            return Err(Stop::Need(Need::Flush));
        }
        let entry_words = self.geometry.entry_words();
        let (mut next, mut own) = (at, 0u64);
        for words in words.get(at..).unwrap_or_default().chunks_exact(entry_words) {
            let cluster = match *words {
                [descriptor, bitmap] => Extended::decode(descriptor, bitmap, &self.geometry).map(|entry| entry.cluster),
                [raw] => Cluster::decode(raw, &self.geometry),
                _ => Err(BadEntry),
            };
            let cluster = cluster.map_err(|BadEntry| self.invalid_in("an L2 table", table))?;
            for host in cluster.host_clusters(&self.geometry).filter(|host| *host >= end) {
                match self.refcount_in_use(state, host) {
                    Ok(1) => own = own.saturating_add(1),
                    Ok(_) => {}
                    Err(Stop::Need(_)) if next > at => return Ok((next, own)),
                    Err(stop) => return Err(stop),
                }
            }
            next = next.saturating_add(entry_words);
        }
        Ok((next, own))
    }

    fn invalid_in(&self, what: &str, offset: u64) -> block::IoError {
        self.corrupt(format_args!("{what} at {offset:#x} has an invalid entry"))
    }
}
