//! Who changes which range of a file: what keeps a read-modify-write from undoing a write beside it.
//!
//! A read-modify-write reads whole blocks, changes a part, and writes the blocks back: a write to another part of them
//! that happens between would be lost. So it holds its blocks in [`Tracking::locks`], and every other change of the
//! file must take its range there too. Files that never see a read-modify-write shall not pay for that; they are
//! *untracked* at first: aligned writes go to the engine without a lock, and each reactor only counts its own in a
//! plain cell ([`crate::target::QueueFile::change_begins`]).
//!
//! A read-modify-write makes the file *tracked* and waits until no untracked write is left:
//!
//! 1. It sets `tracked`, then sends a job to every reactor that has the file open.
//! 2. A write looks at `tracked` with a relaxed load. Once the job has run on a reactor, every later load there sees
//!    true, because handing the job over (a mutex) orders the store before it. So after the job no untracked write is
//!    begun on that reactor; those begun earlier are in its count.
//! 3. The job's [`Ack`] is dropped when that count is, or becomes, zero. When all are dropped the file is *settled*.
//!    A reactor that ends drops its jobs only after its engines have drained, so then too no untracked write is left.
//! 4. A reactor that opens the file later registers under the same mutex that step 1 holds: either it is sent a job,
//!    or it sees `tracked` from its first write on.
//!
//! Invariant: while a read-modify-write is at work, the file is settled, and every change in flight holds its range in
//! `locks` until the kernel has reported its end. What changes the file by way of a task (write-zeroes, discard,
//! lengths, bounced writes) and all blocking queues take the lock always, settled or not.
//!
//! When none is at work and [`CALM_WRITES`] aligned writes have passed since the last, the file is untracked again; the
//! next one begins at step 1.

use crate::reactor::{Local, Shared};
use crate::target::OpenFile;
use block::{RangeLocks, ReactorCtx, ReactorHandle, WaitList};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Aligned writes after which a file that is rarely written in parts is untracked again.
const CALM_WRITES: u32 = 256;

#[derive(Debug, Default)]
struct State {
    /// Tracked, or on the way there.
    started: bool,
    /// Read-modify-writes at work, or waiting for the file to settle.
    at_work: usize,
    open_on: Vec<Weak<Shared>>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Tracking {
    pub(crate) locks: RangeLocks,
    tracked: AtomicBool,
    settled: AtomicBool,
    acks_missing: AtomicUsize,
    waiting: WaitList,
    /// Aligned writes since the last read-modify-write.
    calm_writes: AtomicU32,
    state: Mutex<State>,
}

/// A reactor's word that it has no untracked change in flight; given by dropping it.
#[derive(Debug)]
pub(crate) struct Ack(Arc<OpenFile>);

impl Drop for Ack {
    fn drop(&mut self) {
        let tracking = &self.0.tracking;
        if tracking.acks_missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            tracking.settled.store(true, Ordering::Release);
            tracking.waiting.wake_all();
        }
    }
}

impl Tracking {
    /// Whether a change must hold its range in the locks.
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reactor opens the file.
    pub(crate) fn opened_on(&self, reactor: &Arc<Shared>) {
        let mut state = self.state();
        state.open_on.retain(|other| other.strong_count() > 0);
        if !state.open_on.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(reactor))) {
            state.open_on.push(Arc::downgrade(reactor));
        }
    }

    /// An aligned write has held its range: time passes for going back to untracked.
    pub(crate) fn aligned_write_ended(&self) {
        if !self.is_tracked() || self.calm_writes.fetch_add(1, Ordering::Relaxed) < CALM_WRITES {
            return;
        }
        let mut state = self.state();
        if state.started && state.at_work == 0 && self.settled.load(Ordering::Acquire) {
            state.started = false;
            self.settled.store(false, Ordering::Relaxed);
            self.tracked.store(false, Ordering::Relaxed);
        }
    }
}

/// A read-modify-write at work: the file stays settled as long as this lives.
#[derive(Debug)]
pub(crate) struct AtWork<'a>(&'a Tracking);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.state().at_work -= 1;
    }
}

/// Makes `file` tracked and waits until it is settled.
pub(crate) async fn settle(file: &Arc<OpenFile>) -> AtWork<'_> {
    let tracking = &file.tracking;
    tracking.calm_writes.store(0, Ordering::Relaxed);
    let (at_work, ask) = begin(tracking);
    if let Some(reactors) = ask {
        ask_for_acks(file, reactors);
    }
    tracking.waiting.until(|| tracking.settled.load(Ordering::Acquire).then_some(())).await;
    at_work
}

/// Counts a read-modify-write in, and lists whom to ask if the file was not tracked.
fn begin(tracking: &Tracking) -> (AtWork<'_>, Option<Vec<Arc<Shared>>>) {
    let mut state = tracking.state();
    state.at_work += 1;
    let at_work = AtWork(tracking);
    if std::mem::replace(&mut state.started, true) {
        return (at_work, None);
    }
    tracking.tracked.store(true, Ordering::Relaxed);
    let reactors: Vec<_> = state.open_on.iter().filter_map(Weak::upgrade).collect();
    // One more for the one who asks, so that nothing is settled before all were asked.
    tracking.acks_missing.store(reactors.len() + 1, Ordering::Relaxed);
    (at_work, Some(reactors))
}

fn ask_for_acks(file: &Arc<OpenFile>, reactors: Vec<Arc<Shared>>) {
    let _own = Ack(Arc::clone(file));
    for reactor in reactors {
        let (ack, id) = (Ack(Arc::clone(file)), file.id);
        if let Some(local) = Local::current().filter(|local| local.is(&reactor)) {
            // A blocking queue on the reactor's own thread waits here: no job would be run meanwhile.
            local.engines().acknowledge(ack, id);
            continue;
        }
        let job = move |ctx: &Rc<dyn ReactorCtx>| {
            if let Some(local) = ctx.as_any().downcast_ref::<Local>() {
                local.engines().acknowledge(ack, id);
            }
        };
        // A reactor that has ended drops the job, and with it the ack.
        let _ = reactor.run(Box::new(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenOptions;

    #[test]
    fn a_file_is_tracked_from_a_read_modify_write_until_things_have_been_calm_for_a_while() {
        let options = OpenOptions { lock: false, ..OpenOptions::default() };
        let file = crate::open::open_file(tempfile::tempfile().unwrap().into(), "test", &options).unwrap();
        let file = Arc::new(file);
        let tracking = &file.tracking;
        assert!(!tracking.is_tracked());
        for _ in 0..2 {
            let first = block::block_on(settle(&file));
            let second = block::block_on(settle(&file));
            drop(first);
            for _ in 0..2 * CALM_WRITES {
                tracking.aligned_write_ended();
                assert!(tracking.is_tracked(), "one is still at work");
            }
            drop(second);
            drop(block::block_on(settle(&file)));
            for _ in 0..CALM_WRITES {
                tracking.aligned_write_ended();
                assert!(tracking.is_tracked());
            }
            tracking.aligned_write_ended();
            assert!(!tracking.is_tracked());
        }
    }
}
