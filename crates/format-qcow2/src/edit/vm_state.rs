//! The state of a machine, kept with an internal snapshot. As in QEMU's `savevm`, it lies behind the disk, at the first
//! place that has an L1 entry of its own.
//!
//! Only the snapshot's L1 table names it. The active table never does, so no state has to be removed from it.

use super::Edit;
use super::tree::Words;
use crate::layout::header::MAX_L1_BYTES;
use block::{ErrorKind, IoError, Result};
use memory::AlignedBuf;
use std::fmt;

/// The most bytes that are written at once.
const RUN_BYTES: u64 = 1 << 20;
/// All parts of a cluster are allocated (specification, "Extended L2 Entries").
const ALL_ALLOCATED: u64 = 0xffff_ffff;

/// The state of a machine.
pub struct VmState<'a> {
    /// The length of the state in bytes.
    pub length_bytes: u64,
    /// Fills the buffer with bytes of the state, from this offset on.
    pub read: &'a mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
}

impl fmt::Debug for VmState<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VmState({} bytes)", self.length_bytes)
    }
}

impl Edit<'_, '_> {
    /// Writes a machine's state to new clusters. Returns the entries of the L1 table that lead there.
    pub(super) async fn add_vm_state(&mut self, state: &mut VmState<'_>) -> Result<Vec<u64>> {
        let clusters = self.geometry.clusters_for(state.length_bytes);
        let in_table = 1u64.wrapping_shl(self.geometry.l2_bits());
        let l1_entries = self.geometry.l1_entries().saturating_add(clusters.div_ceil(in_table));
        if l1_entries.saturating_mul(8) > MAX_L1_BYTES {
            return self.refuse(ErrorKind::Unsupported, "the machine's state is larger than the image can address");
        }
        let mut tables = Vec::new();
        let mut done = 0;
        while done < clusters {
            let here = in_table.min(clusters.saturating_sub(done));
            let l2 = self.add_states_table(state, done, here).await?;
            let table = self.add_l2(&l2, 1).await.map_err(|error| self.failed(error))?;
            tables.push(table);
            done = done.saturating_add(here);
        }
        Ok(tables)
    }

    /// Writes `count` clusters of the state from cluster `first` on. Returns the L2 table that leads there.
    async fn add_states_table(&mut self, state: &mut VmState<'_>, first: u64, count: u64) -> Result<Vec<u64>> {
        let words = self.geometry.entry_words();
        let table_words = usize::try_from(self.geometry.cluster_bytes() / 8).unwrap_or(0);
        let mut l2 = vec![0; table_words];
        let run_clusters = self.geometry.cluster_of(RUN_BYTES).max(1);
        let mut entries = l2.chunks_exact_mut(words);
        let mut done = 0;
        while done < count {
            let here = run_clusters.min(count.saturating_sub(done));
            let host = self.add_states_run(state, first.saturating_add(done), here).await?;
            for index in 0..here {
                let descriptor = host.saturating_add(self.geometry.start_of(index));
                let bitmap = if words > 1 { ALL_ALLOCATED } else { 0 };
                let entry = entries.next().ok_or_else(|| self.failed(IoError::EIO))?;
                Words { descriptor, bitmap }.put(entry);
            }
            done = done.saturating_add(here);
            let cluster_done = first.saturating_add(done);
            let shown = self.geometry.start_of(cluster_done).min(state.length_bytes);
            self.tell(shown, state.length_bytes)?;
        }
        Ok(l2)
    }

    /// Writes some clusters of the state in a row. Returns where.
    async fn add_states_run(&mut self, state: &mut VmState<'_>, first: u64, count: u64) -> Result<u64> {
        let bytes = usize::try_from(self.geometry.start_of(count)).map_err(|_| self.failed(IoError::EIO))?;
        let mut run = AlignedBuf::zeroed(bytes);
        let start = self.geometry.start_of(first);
        let there = state.length_bytes.saturating_sub(start).min(bytes as u64) as usize;
        (state.read)(start, run.get_mut(..there).unwrap_or_default())?;
        let added = async {
            let host = self.geometry.start_of(self.refs.allocate(count, 1).await?);
            self.io.write(host, run).await?;
            self.refs.relieve().await?;
            Ok(host)
        };
        added.await.map_err(|error| self.failed(error))
    }
}
