//! Keeps a read-modify-write from undoing a concurrent write to the same block.
//!
//! A read-modify-write reads whole blocks, changes a part, and writes the blocks back. A write to another part of them
//! in between would be lost. So it locks its blocks in [`RmwLock::ranges`], and every other change of the file must
//! lock its range there too. Files without read-modify-writes should not pay for that. They are *untracked* at first:
//! aligned writes go to the engine without a lock, and each reactor only counts its own in a plain cell
//! ([`Untracked`]).
//!
//! A read-modify-write makes the file *tracked* and waits until no untracked write is left:
//!
//! 1. It sets `tracked`, then sends a job to every reactor that has the file open.
//! 2. A write looks at `tracked` with a relaxed load. Once the job has run on a reactor, every later load there sees
//!    true, because handing the job over (a mutex) orders the store before it. So after the job no untracked write
//!    begins on that reactor. Those begun earlier are in its count.
//! 3. The job's [`Ack`] is dropped when that count is, or becomes, zero. When all are dropped the file is *settled*. A
//!    reactor that ends drops its jobs only after its engines have drained, so no untracked write is left then either.
//! 4. A reactor that opens the file later registers under the mutex that step 1 holds. So either it is sent a job, or
//!    it sees `tracked` from its first write on.
//!
//! Invariant: while a read-modify-write is at work, the file is settled, and every change in flight holds its range in
//! `ranges` until the kernel has reported its end. Changes by tasks (write-zeroes, discard, lengths, bounced writes)
//! and blocking queues always take the lock, settled or not.
//!
//! When no read-modify-write is at work and [`CALM_WRITES`] aligned writes have passed since the last, the file is
//! untracked again. The next one begins at step 1.

use block::{RangeLocks, ReactorCtx, ReactorHandle, WaitList};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{self, Rc};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};

/// Aligned writes after a read-modify-write that make the file untracked again.
const CALM_WRITES: u32 = 256;

#[derive(Debug, Default)]
struct State {
    /// Tracked, or on the way there.
    started: bool,
    /// Read-modify-writes at work, or waiting for the file to settle.
    at_work: usize,
    open_on: Vec<(ThreadId, Weak<dyn ReactorHandle>)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RmwLock {
    /// The file's [`OpenFile::id`](super::open_file::OpenFile::id).
    file_id: u64,
    pub(crate) ranges: RangeLocks,
    tracked: AtomicBool,
    settled: AtomicBool,
    acks_missing: AtomicUsize,
    waiting: WaitList,
    /// Aligned writes since the last read-modify-write.
    calm_writes: AtomicU32,
    state: Mutex<State>,
}

/// An acknowledgement that a reactor has no untracked change in flight. It is given by dropping this.
#[derive(Debug)]
pub(crate) struct Ack(Arc<RmwLock>);

impl Drop for Ack {
    fn drop(&mut self) {
        let lock = &self.0;
        if lock.acks_missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            lock.settled.store(true, Ordering::Release);
            lock.waiting.wake_all();
        }
    }
}

impl RmwLock {
    pub(crate) fn new(file_id: u64) -> Arc<Self> {
        Arc::new(Self {
            file_id,
            ranges: RangeLocks::default(),
            tracked: AtomicBool::new(false),
            settled: AtomicBool::new(false),
            acks_missing: AtomicUsize::new(0),
            waiting: WaitList::default(),
            calm_writes: AtomicU32::new(0),
            state: Mutex::default(),
        })
    }

    /// Whether a change must hold its range in the locks.
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the reactor of this thread opens the file.
    pub(crate) fn opened_on(&self, reactor: &Arc<dyn ReactorHandle>) {
        let (mut state, here) = (self.state(), thread::current().id());
        state.open_on.retain(|(_, other)| other.strong_count() > 0);
        if !state.open_on.iter().any(|(thread, _)| *thread == here) {
            state.open_on.push((here, Arc::downgrade(reactor)));
        }
    }

    /// Counts an aligned write that held its range. Enough of them make the file untracked again.
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
pub(crate) struct AtWork<'a>(&'a RmwLock);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.state().at_work -= 1;
    }
}

/// Makes the file tracked and waits until it is settled.
pub(crate) async fn settle(lock: &Arc<RmwLock>) -> AtWork<'_> {
    lock.calm_writes.store(0, Ordering::Relaxed);
    let (at_work, ask) = begin(lock);
    if let Some(reactors) = ask {
        ask_for_acks(lock, reactors);
    }
    lock.waiting.until(|| lock.settled.load(Ordering::Acquire).then_some(())).await;
    at_work
}

type Reactors = Vec<(ThreadId, Arc<dyn ReactorHandle>)>;

/// Counts a read-modify-write. Returns the reactors to ask if the file was not tracked before.
fn begin(lock: &RmwLock) -> (AtWork<'_>, Option<Reactors>) {
    let mut state = lock.state();
    state.at_work += 1;
    let at_work = AtWork(lock);
    if std::mem::replace(&mut state.started, true) {
        return (at_work, None);
    }
    lock.tracked.store(true, Ordering::Relaxed);
    let is_there = |(thread, reactor): &(ThreadId, Weak<dyn ReactorHandle>)| Some((*thread, reactor.upgrade()?));
    let reactors: Reactors = state.open_on.iter().filter_map(is_there).collect();
    // One more for this thread, so that nothing is settled before all reactors were asked.
    lock.acks_missing.store(reactors.len() + 1, Ordering::Relaxed);
    (at_work, Some(reactors))
}

fn ask_for_acks(lock: &Arc<RmwLock>, reactors: Reactors) {
    let _own = Ack(Arc::clone(lock));
    for (thread, reactor) in reactors {
        let (ack, id) = (Ack(Arc::clone(lock)), lock.file_id);
        if thread == thread::current().id() {
            // A blocking queue on the reactor's own thread waits here, so the reactor runs no jobs meanwhile.
            acknowledge_here(ack, id);
            continue;
        }
        // A reactor that has ended drops the job, and with it the ack.
        let _ = reactor.run(Box::new(move |_: &Rc<dyn ReactorCtx>| acknowledge_here(ack, id)));
    }
}

/// One reactor's untracked changes of one file that are in flight.
#[derive(Debug, Default)]
pub(crate) struct Untracked {
    changes: Cell<usize>,
    /// Dropped when no change is in flight.
    acks: RefCell<Vec<Ack>>,
}

thread_local! {
    /// The counts of the files that are open on this thread's reactor, by their ids.
    static HERE: RefCell<HashMap<u64, rc::Weak<Untracked>>> = RefCell::default();
}

impl Untracked {
    /// Returns the count of a file on this thread. All its queues here share it.
    pub(crate) fn here(file_id: u64) -> Rc<Self> {
        HERE.with_borrow_mut(|here| {
            if let Some(there) = here.get(&file_id).and_then(rc::Weak::upgrade) {
                return there;
            }
            here.retain(|_, other| other.strong_count() > 0);
            let new = Rc::default();
            here.insert(file_id, Rc::downgrade(&new));
            new
        })
    }

    pub(crate) fn change_begins(&self) {
        self.changes.set(self.changes.get() + 1);
    }

    pub(crate) fn change_ended(&self) {
        let left = self.changes.get().saturating_sub(1);
        self.changes.set(left);
        if left == 0 {
            // Dropped outside the borrow: the last ack wakes tasks.
            let acks = self.acks.take();
            drop(acks);
        }
    }
}

/// Drops `ack` as soon as no untracked change of the file is in flight on this thread. The file is tracked, so none
/// begins.
fn acknowledge_here(ack: Ack, file_id: u64) {
    let there = HERE.with_borrow(|here| here.get(&file_id).and_then(rc::Weak::upgrade));
    if let Some(there) = there.filter(|there| there.changes.get() > 0) {
        there.acks.borrow_mut().push(ack);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_tracked_from_a_read_modify_write_until_things_have_been_calm_for_a_while() {
        let lock = RmwLock::new(1);
        assert!(!lock.is_tracked());
        for _ in 0..2 {
            let first = block::block_on(settle(&lock));
            let second = block::block_on(settle(&lock));
            drop(first);
            for _ in 0..2 * CALM_WRITES {
                lock.aligned_write_ended();
                assert!(lock.is_tracked(), "one is still at work");
            }
            drop(second);
            drop(block::block_on(settle(&lock)));
            for _ in 0..CALM_WRITES {
                lock.aligned_write_ended();
                assert!(lock.is_tracked());
            }
            lock.aligned_write_ended();
            assert!(!lock.is_tracked());
        }
    }
}
