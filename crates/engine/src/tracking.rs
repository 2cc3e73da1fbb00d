//! Who changes which range of a file: what keeps a read-modify-write from undoing a write beside it.
//!
//! A read-modify-write reads whole blocks, changes a part, and writes the blocks back: a write to another part of them
//! that happens between would be lost. So it holds its blocks in [`Tracking::locks`], and every other change of the
//! file must take its range there too. Files that never see a read-modify-write shall not pay for that; they are
//! *untracked* at first: aligned writes go to the engine without a lock, and each reactor only counts its own in a
//! plain cell ([`crate::target::QueueFile::change_begins`]).
//!
//! The first read-modify-write makes the file *tracked*, for good, and waits until no untracked write is left:
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
//! Invariant: in a settled file, every change in flight holds its range in `locks` until the kernel has reported its
//! end. What changes the file by way of a task (write-zeroes, discard, lengths, bounced writes) and all blocking queues
//! take the lock always, settled or not.

use crate::reactor::{Local, Shared};
use crate::target::OpenFile;
use block::{RangeLocks, ReactorHandle, WaitList};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

#[derive(Debug, Default)]
struct Reactors {
    started: bool,
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
    reactors: Mutex<Reactors>,
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

    /// A reactor opens the file.
    pub(crate) fn opened_on(&self, reactor: &Arc<Shared>) {
        let mut reactors = self.reactors.lock().unwrap_or_else(PoisonError::into_inner);
        reactors.open_on.retain(|other| other.strong_count() > 0);
        if !reactors.open_on.iter().any(|other| std::ptr::eq(other.as_ptr(), Arc::as_ptr(reactor))) {
            reactors.open_on.push(Arc::downgrade(reactor));
        }
    }
}

/// Makes `file` tracked and waits until it is settled.
pub(crate) async fn settle(file: &Arc<OpenFile>) {
    let tracking = &file.tracking;
    if tracking.settled.load(Ordering::Acquire) {
        return;
    }
    start(file);
    tracking.waiting.until(|| tracking.settled.load(Ordering::Acquire).then_some(())).await;
}

fn start(file: &Arc<OpenFile>) {
    let tracking = &file.tracking;
    let mut reactors = tracking.reactors.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::replace(&mut reactors.started, true) {
        return;
    }
    tracking.tracked.store(true, Ordering::Relaxed);
    let open_on: Vec<_> = reactors.open_on.drain(..).filter_map(|reactor| reactor.upgrade()).collect();
    drop(reactors);
    // One more for this function, so that nothing is settled before all were asked.
    tracking.acks_missing.store(open_on.len() + 1, Ordering::Relaxed);
    let _own = Ack(Arc::clone(file));
    for reactor in open_on {
        let ack = Ack(Arc::clone(file));
        if let Some(local) = Local::current().filter(|local| local.is(&reactor)) {
            // A blocking queue on the reactor's own thread waits here: no job would be run meanwhile.
            local.engines().acknowledge(ack, file.id);
            continue;
        }
        let id = file.id;
        let job = move |ctx: &std::rc::Rc<dyn block::ReactorCtx>| {
            if let Some(local) = ctx.as_any().downcast_ref::<Local>() {
                local.engines().acknowledge(ack, id);
            }
        };
        // A reactor that has ended drops the job, and with it the ack.
        let _ = reactor.run(Box::new(job));
    }
}
