//! Where the image's own tables lie, so that nothing else is ever written there, whatever the image says.
//!
//! Collected from the header, the refcount table and L1 when an image is first written to, and kept up to date. It costs
//! a look per allocated run and per loaded entry, and stops a damaged or hostile image from destroying itself silently.

use crate::entry::{Cluster, decode_l1};
use crate::free_runs::Run;
use crate::state::{Inner, State, Step, Stop};
use block::IoResult;
use block::sync::Ordering;
use std::collections::HashSet;
use std::ops::Range;

/// Host clusters that hold tables.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    clusters: HashSet<u64>,
    /// Claimed by two tables: neither may be changed.
    claimed_twice: HashSet<u64>,
}

impl Tables {
    pub(crate) fn add(&mut self, clusters: Range<u64>) {
        for cluster in clusters {
            if !self.clusters.insert(cluster) {
                self.claimed_twice.insert(cluster);
            }
        }
    }

    pub(crate) fn remove(&mut self, clusters: Range<u64>) {
        clusters.for_each(|cluster| _ = self.clusters.remove(&cluster));
    }

    fn collect(inner: &Inner, state: &State) -> Self {
        let geometry = &inner.geometry;
        let mut tables = Self::default();
        let mut add = |offset: u64, length: u64| {
            let first = geometry.cluster_of(offset);
            tables.add(first..first.saturating_add(geometry.clusters_for(length)));
        };
        add(0, 1);
        add(inner.header.l1_offset, u64::from(inner.header.l1_entries).saturating_mul(8));
        add(state.refcounts.table_offset(), state.refcounts.table_entries().saturating_mul(8));
        if inner.header.snapshots > 0 {
            add(inner.header.snapshots_offset, 1);
        }
        state.refcounts.block_offsets().for_each(|offset| add(offset, 1));
        for entry in &inner.l1 {
            if let Ok(Some(table)) = decode_l1(entry.load(Ordering::Relaxed), geometry) {
                add(table.offset, 1);
            }
        }
        tables
    }
}

impl Inner {
    pub(crate) fn tables<'s>(&self, state: &'s mut State) -> &'s mut Tables {
        if state.tables.is_none() {
            state.tables = Some(Tables::collect(self, state));
        }
        state.tables.get_or_insert_default()
    }

    pub(crate) fn is_table(&self, state: &mut State, cluster: u64) -> bool {
        self.tables(state).clusters.contains(&cluster)
    }

    /// Refuses to hand out space that a table lies in.
    pub(crate) fn refuse_tables(&self, state: &mut State, run: Run) -> Step<()> {
        let tables = self.tables(state);
        match (run.first..run.end()).find(|cluster| tables.clusters.contains(cluster)) {
            None => Ok(()),
            Some(cluster) => Err(Stop::Fail(self.corrupt(format_args!(
                "host cluster {cluster} holds a table, but its refcount is 0, so it was nearly overwritten"
            )))),
        }
    }

    /// Refuses to change a table that lies where another one does.
    pub(crate) fn refuse_shared_table(&self, state: &mut State, offset: u64) -> Step<()> {
        let cluster = self.geometry.cluster_of(offset);
        match self.tables(state).claimed_twice.contains(&cluster) {
            false => Ok(()),
            true => Err(Stop::Fail(self.corrupt(format_args!("two tables lie at {offset:#x}")))),
        }
    }

    /// Refuses a slice with an entry that leads the guest's data into a table.
    pub(crate) fn refuse_entries(&self, state: &mut State, raw: impl Iterator<Item = u64>) -> IoResult {
        if self.read_only {
            return Ok(());
        }
        for entry in raw.filter_map(|raw| Cluster::decode(raw, &self.geometry).ok()) {
            for cluster in entry.host_clusters(&self.geometry) {
                if self.is_table(state, cluster) {
                    return Err(self.corrupt(format_args!("an L2 entry leads to the table in host cluster {cluster}")));
                }
            }
        }
        Ok(())
    }
}
