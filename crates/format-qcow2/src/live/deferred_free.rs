//! Giving space back: refcounts are decremented in memory once nothing on disk or in flight can still lead to the
//! space; what becomes free is punched out of the file before anybody may have it.
//!
//! The decrements reach the disk with a later flush. Lost in a power cut they leave leaks, which are harmless.

use crate::live::flush_queue::Barrier;
use crate::live::free_runs::Run;
use crate::live::refcounts::Absent;
use crate::live::state::{Freed, Inner, State};
use block::{IoResult, MetaIo};

/// Holes finer than this are not relied on: a file system may leave them as they are.
const HOLE_BYTES: u64 = 4096;

/// Puts back what was not decremented, should the task be dropped or a load fail.
struct Unfinished<'a> {
    inner: &'a Inner,
    left: Vec<Freed>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.inner.lock().retired.append(&mut self.left);
    }
}

/// Space that is free but not handed out yet, because it is being punched. Becomes available when dropped, but for a run
/// whose punch is still in flight: that one stays aside until the image is opened again.
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
    /// Decrements what is due; `all`: without waiting for epochs, where nothing is in flight. As much as there is room for
    /// changed refcounts, that is, which a flush makes.
    pub(crate) async fn reap(&self, io: &MetaIo, all: bool) -> IoResult {
        let due = self.take_due(all);
        if due.is_empty() {
            return Ok(());
        }
        let mut punching = Punching { inner: self, runs: Vec::new(), in_flight: None };
        let mut unfinished = Unfinished { inner: self, left: due };
        'due: while let Some(mut freed) = unfinished.left.pop() {
            while !freed.clusters.is_empty() {
                if self.lock().refcounts.is_half_crowded() {
                    unfinished.left.push(freed);
                    break 'due;
                }
                let stopped = self.decrement_some(&mut freed, &mut punching.runs);
                let Some(block) = stopped else { continue };
                unfinished.left.push(freed.clone());
                self.load_block(io, block).await?;
                unfinished.left.pop();
            }
        }
        if self.can_discard {
            for (index, run) in punching.runs.iter_mut().enumerate() {
                punching.in_flight = Some(index);
                let (offset, length) = (self.geometry.start_of(run.first), self.geometry.start_of(run.count));
                // Best effort: what cannot be punched is free all the same.
                let aligned = (offset | length) % HOLE_BYTES == 0;
                run.zeroed = io.discard(offset, length).await.is_ok() && self.discard_zeroes && aligned;
            }
            punching.in_flight = None;
        }
        Ok(())
    }

    fn take_due(&self, all: bool) -> Vec<Freed> {
        let mut state = self.lock();
        let retired = std::mem::take(&mut state.retired);
        let mut last = None;
        let (due, waiting) = retired.into_iter().partition(|freed: &Freed| {
            // Neighbours mostly share an epoch; asking takes a lock.
            let over = match last {
                Some((epoch, over)) if epoch == freed.epoch => over,
                _ => all || self.skips(Barrier::Epoch) || self.epochs.is_over(freed.epoch),
            };
            last = Some((freed.epoch, over));
            over
        });
        state.retired = waiting;
        due
    }

    /// Decrements from the start of `freed` on; returns the block that has to be loaded first, if one has.
    fn decrement_some(&self, freed: &mut Freed, runs: &mut Vec<Run>) -> Option<u64> {
        let mut state = self.lock();
        let clusters = &mut freed.clusters;
        while !clusters.is_empty() {
            let found = state.refcounts.get(clusters.start);
            if let Err(Absent::NotLoaded(block)) = found {
                return Some(block);
            }
            if let Some(table) = freed.table {
                self.remove_tables(&mut state, table, clusters.start..clusters.start.saturating_add(1));
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
        // It was in use, so it is not known there; if it were, it could be handed out while it is being punched.
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
        assert!(before <= 20 && most <= 20, "{before}, then {most}");
        let report = qcow2_check(&storage.bytes(fixture::NAME)).unwrap();
        assert_eq!((report.leaked_clusters, report.sound().is_ok()), (0, true));
    }
}
