//! The running rings, which the session's thread and its export both reach.
//!
//! A peer passes descriptors, and a call on one may never end: closing a file of the peer's own FUSE file system, for
//! example, or a socket that lingers. Only the session's thread makes such calls. If it is held up when the export
//! ends, the export ends the rings without it, so that the disk can be closed.

use crate::queue_fds::QueueFds;
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use virtio_blk::{RunningQueue, StoppedQueue, StoppingQueue};

/// The interval at which a thread that waits for requests in flight checks whether it must give them up.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// See the module.
#[derive(Default)]
pub(crate) struct RunningRings {
    state: Mutex<State>,
    stopped: Condvar,
}

#[derive(Default)]
struct State {
    running: BTreeMap<usize, RunningQueue<QueueFds>>,
    /// Calls of [`RunningRings::stop_where`] that wait for requests in flight.
    stopping: usize,
    /// No ring starts any more.
    closed: bool,
    /// Requests in flight are no longer waited for.
    gives_up: bool,
}

/// Rings that have stopped, and where each goes on.
pub(crate) struct StoppedRings {
    pub(crate) rings: Vec<(usize, StoppedQueue)>,
    /// Whether no ring is missing. The place of a missing one is not known: its requests were given up, or its reactor or
    /// export has ended.
    pub(crate) is_complete: bool,
}

impl RunningRings {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().running.is_empty()
    }

    pub(crate) fn contains(&self, index: usize) -> bool {
        self.lock().running.contains_key(&index)
    }

    /// Starts a ring. Fails if the export has ended meanwhile, or its requests were given up: where a ring stood then is
    /// not known.
    pub(crate) fn start(&self, index: usize, start: impl FnOnce() -> Result<RunningQueue<QueueFds>>) -> Result<()> {
        let mut state = self.lock();
        if state.closed || state.gives_up {
            return Err(Error::new(ErrorKind::Io, "the export has ended"));
        }
        let queue = start()?;
        state.running.insert(index, queue);
        Ok(())
    }

    /// Changes how a running ring reaches its peer.
    pub(crate) fn change(&self, index: usize, change: impl FnOnce(&mut QueueFds) + Send + 'static) {
        if let Some(queue) = self.lock().running.get(&index) {
            queue.change_transport(change);
        }
    }

    /// Stops the rings that `which` names, all at once, and waits for their requests in flight.
    pub(crate) fn stop_where(&self, which: impl Fn(usize) -> bool) -> StoppedRings {
        let (stopping, is_closed) = {
            let mut state = self.lock();
            state.stopping = state.stopping.saturating_add(1);
            let all = std::mem::take(&mut state.running);
            let (stopping, left) = all.into_iter().partition(|(index, _)| which(*index));
            state.running = left;
            let stopping: BTreeMap<usize, RunningQueue<QueueFds>> = stopping;
            let begin = |(index, running): (usize, RunningQueue<QueueFds>)| (index, running.begin_stop());
            (stopping.into_iter().map(begin).collect(), state.closed)
        };
        let mut stopped = self.drained(stopping);
        // Another thread may have stopped them for good.
        stopped.is_complete &= !is_closed;
        let mut state = self.lock();
        state.stopping = state.stopping.saturating_sub(1);
        drop(state);
        self.stopped.notify_all();
        stopped
    }

    /// Waits for the requests in flight of these rings, or gives them up if [`RunningRings::give_up`] is called.
    fn drained(&self, mut stopping: Vec<(usize, StoppingQueue<QueueFds>)>) -> StoppedRings {
        let mut stopped = StoppedRings { rings: Vec::new(), is_complete: true };
        while let Some((_, first)) = stopping.first_mut() {
            if first.is_drained_within(LOOK_AGAIN) {
                let (index, ring) = stopping.remove(0);
                match ring.wait() {
                    Some(ring) => stopped.rings.push((index, ring)),
                    None => stopped.is_complete = false,
                }
            } else if self.lock().gives_up {
                give_up(stopping);
                stopped.is_complete = false;
                break;
            }
        }
        stopped
    }

    /// Ends all waiting for requests in flight, because the storage hangs and the disk is removed.
    pub(crate) fn give_up(&self) {
        self.lock().gives_up = true;
    }

    /// Whether requests in flight are waited for.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stopping > 0
    }

    /// Stops all rings for good. When this returns, none runs.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.stop_where(|_| true);
        let state = self.lock();
        let waited = self.stopped.wait_while(state, |state| state.stopping > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Ends requests in flight on these rings with errors, then cuts the guest's memory off from the storage.
fn give_up(mut rings: Vec<(usize, StoppingQueue<QueueFds>)>) {
    // Rings that have drained meanwhile need not be given up.
    let drained = rings.extract_if(.., |(_, ring)| ring.is_drained_within(Duration::ZERO));
    drained.for_each(|(_, ring)| {
        ring.wait();
    });
    let memories: Vec<_> = rings.iter().filter_map(|(_, ring)| ring.give_up()).collect();
    for memory in &memories {
        if !memory.fence() {
            tracing::error!("the guest's memory cannot be cut off: end the guest before its storage answers again");
        }
    }
    rings.into_iter().for_each(|(_, ring)| ring.abandon());
}
