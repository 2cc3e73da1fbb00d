//! Frees space. Refcounts are decremented in memory once nothing on disk or in flight can still refer to the space.
//! Free space is punched out of the file before it is handed out.
//!
//! The decrements reach the disk with a later flush. If a power cut loses them, clusters leak, which is harmless.

use crate::live::flush_queue::Barrier;
use crate::live::free_runs::Run;
use crate::live::refcounts::Absent;
use crate::live::state::{Freed, Inner, State};
use block::{IoResult, MetaIo, yield_now};

/// The smallest hole: file systems may not make smaller ones.
const HOLE_BYTES: u64 = 4096;

/// The most clusters that are decremented in one step, and the most entries that are looked at for it. Other tasks of
/// the reactor run in between.
const STEP_CLUSTERS: u64 = 512;
const STEP_LOOKS: usize = 1024;

/// Clusters that are being decremented. If the task is dropped or a load fails, the rest goes back to the list.
struct Unfinished<'a> {
    inner: &'a Inner,
    left: Vec<Freed>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.inner.lock().retired.append(&mut self.left);
    }
}

/// Free space that is being punched, so it is not handed out yet. Dropping this makes the space available. A run whose
/// punch is still in flight stays aside until the image is opened again.
struct Punching<'a> {
    inner: &'a Inner,
    runs: Vec<Run>,
    in_flight: Option<usize>,
}

impl Drop for Punching<'_> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        for (index, run) in self.runs.drain(..).enumerate() {
            if self.in_flight == Some(index) {
                continue;
            }
            state.space.quarantine.remove(run);
            state.space.free.add(run);
        }
    }
}

impl Inner {
    /// Decrements the refcounts that are due. With `all`, does not wait for epochs; nothing may be in flight then.
    /// Stops when too many changed refcounts wait for a flush.
    pub(crate) async fn reap(&self, io: &MetaIo, all: bool) -> IoResult {
        let mut looked_at = 0;
        while let Some(due) = self.take_due(all, &mut looked_at) {
            let mut unfinished = Unfinished { inner: self, left: due };
            while !unfinished.left.is_empty() {
                let mut punching = Punching { inner: self, runs: Vec::new(), in_flight: None };
                let has_room = self.decrement_step(io, &mut unfinished.left, &mut punching.runs).await?;
                self.punch(io, &mut punching).await;
                if !has_room {
                    return Ok(());
                }
                yield_now().await;
            }
        }
        Ok(())
    }

    /// Punches free space out of the file.
    async fn punch(&self, io: &MetaIo, punching: &mut Punching<'_>) {
        if !self.can_discard {
            return;
        }
        for (index, run) in punching.runs.iter_mut().enumerate() {
            punching.in_flight = Some(index);
            let (offset, length) = (self.geometry.start_of(run.first), self.geometry.start_of(run.count));
            // Best effort: space that cannot be punched is free all the same.
            let aligned = (offset | length) % HOLE_BYTES == 0;
            run.zeroed = io.discard(offset, length).await.is_ok() && self.discard_zeroes && aligned;
        }
        punching.in_flight = None;
    }

    /// Takes some of the entries that are due, skipping the first `looked_at`. Adds those that it leaves to
    /// `looked_at`. `None` if all entries have been looked at.
    fn take_due(&self, all: bool, looked_at: &mut usize) -> Option<Vec<Freed>> {
        let mut state = self.lock();
        if *looked_at >= state.retired.len() {
            return None;
        }
        let mut due = Vec::new();
        let mut last = None;
        for _ in 0..STEP_LOOKS {
            let Some(freed) = state.retired.get(*looked_at) else { break };
            // Neighbours mostly share an epoch, and asking takes a lock.
            let over = match last {
                Some((epoch, over)) if epoch == freed.epoch => over,
                _ => all || self.skips(Barrier::Epoch) || self.epochs.is_over(freed.epoch),
            };
            last = Some((freed.epoch, over));
            match over {
                true => due.push(state.retired.swap_remove(*looked_at)),
                false => *looked_at = looked_at.saturating_add(1),
            }
        }
        Some(due)
    }

    /// Decrements a bounded number of clusters. Returns false if a flush has to make room for more changed refcounts.
    async fn decrement_step(&self, io: &MetaIo, due: &mut Vec<Freed>, runs: &mut Vec<Run>) -> IoResult<bool> {
        let mut room = STEP_CLUSTERS;
        while room > 0
            && let Some(mut freed) = due.pop()
        {
            if self.lock().refcounts.is_half_crowded() {
                due.push(freed);
                return Ok(false);
            }
            let absent = self.decrement_some(&mut freed, &mut room, runs);
            if !freed.clusters.is_empty() {
                due.push(freed);
            }
            if let Some(block) = absent {
                self.load_block(io, block).await?;
            }
        }
        Ok(true)
    }

    /// Decrements clusters from the start of `freed`, at most `room`. Returns a block that has to be loaded first, if
    /// there is one.
    fn decrement_some(&self, freed: &mut Freed, room: &mut u64, runs: &mut Vec<Run>) -> Option<u64> {
        let mut state = self.lock();
        let clusters = &mut freed.clusters;
        while !clusters.is_empty() && *room > 0 {
            let found = state.refcounts.get(clusters.start);
            if let Err(Absent::NotLoaded(block)) = found {
                return Some(block);
            }
            if let Some(table) = freed.table {
                self.remove_tables(&mut state, table, clusters.start..clusters.start.saturating_add(1));
            }
            if freed.barred {
                self.tables(&mut state).unbar(&self.table_bits, clusters.start);
            }
            match found {
                Ok(1) if self.is_table(&mut state, clusters.start) => {
                    self.corrupt(format_args!("host cluster {} holds a table and was freed", clusters.start));
                }
                Ok(count) if count > 0 => self.decrement(&mut state, clusters.start, count, runs),
                Ok(_) | Err(_) => {
                    self.corrupt(format_args!("host cluster {} was used, but its refcount is 0", clusters.start));
                }
            }
            clusters.start = clusters.start.saturating_add(1);
            *room = room.saturating_sub(1);
        }
        None
    }

    pub(crate) fn decrement(&self, state: &mut State, cluster: u64, count: u64, runs: &mut Vec<Run>) {
        let left = count.saturating_sub(1);
        if state.refcounts.set(cluster, left).is_err() || left > 0 {
            return;
        }
        let run = Run { first: cluster, count: 1, zeroed: false };
        state.space.quarantine.add(run);
        // It was in use, so it should not be in the list of free space. Otherwise it could be handed out while it is
        // being punched.
        state.space.free.remove(run);
        match runs.last_mut() {
            Some(last) if last.end() == cluster => last.count = last.count.saturating_add(1),
            _ => runs.push(run),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture;
    use block::block_on;
    use testkit::qcow2_check;

    #[test]
    fn refcounts_in_memory_stay_bounded_however_much_falls_free_at_once() {
        // More than a hundred blocks.
        let size_bytes = 16 << 20;
        let (storage, io) = fixture::created(size_bytes);
        let (before, most) = block_on(async {
            let qcow2 = fixture::opened(&storage, &io).await;
            let in_memory = || qcow2.inner.lock().refcounts.blocks_in_memory();
            qcow2.inner.lock().refcounts.set_cache_bytes(0);
            fixture::fill(&qcow2, &io, 0..size_bytes).await;
            qcow2.flush(&io).await.unwrap();
            let before = in_memory();
            qcow2.discard(&io, 0, size_bytes).await.unwrap();
            let mut most = 0;
            for _ in 0..4 {
                qcow2.flush(&io).await.unwrap();
                most = most.max(in_memory());
            }
            qcow2.close(&io).await.unwrap();
            (before, most)
        });
        assert!(before <= 24 && most <= 24, "{before}, then {most}");
        let report = qcow2_check(&storage.bytes(fixture::NAME)).unwrap();
        assert_eq!((report.leaked_clusters, report.sound().is_ok()), (0, true));
    }
}
