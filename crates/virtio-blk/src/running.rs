//! Starts, changes and stops a queue on a reactor's thread from another thread.
//!
//! Queues stay on their thread. Other threads know them by a key, which jobs on that thread look up.

use crate::queue::{QueueControl, QueueSetup, StoppedQueue, open_queue};
use crate::transport::Transport;
use block::{Poller, PollerId, ReactorCtx, ReactorHandle, Result, run_and_wait};
use memory::GuestMemory;
use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Only the reactor keeps the queue alive.
type WeakQueue<T> = Weak<RefCell<dyn QueueControl<T>>>;

struct Entry {
    /// A [`WeakQueue`].
    queue: Box<dyn Any>,
    id: PollerId,
}

thread_local! {
    /// The queues of this reactor's thread.
    static QUEUES: RefCell<HashMap<u64, Entry>> = RefCell::default();
}

static NEXT_KEY: AtomicU64 = AtomicU64::new(0);

/// A queue that runs on a reactor. Dropping it leaves the queue running until its reactor ends.
pub struct RunningQueue<T> {
    reactor: Arc<dyn ReactorHandle>,
    key: u64,
    transport: PhantomData<fn() -> T>,
}

impl<T: Transport> RunningQueue<T> {
    /// Starts a queue on `reactor` and waits until it is there. Must not be called on the reactor's own thread.
    pub fn start(reactor: &Arc<dyn ReactorHandle>, setup: QueueSetup<T>) -> Result<Self> {
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        run_and_wait(reactor.as_ref(), move |ctx| add(ctx, key, setup))??;
        Ok(Self { reactor: Arc::clone(reactor), key, transport: PhantomData })
    }

    /// Changes the way to the driver between two turns, and waits until that is done.
    pub fn change_transport(&self, change: impl FnOnce(&mut T) + Send + 'static) {
        let key = self.key;
        // A reactor that has ended has no queue to change.
        let _ = run_and_wait(self.reactor.as_ref(), move |_| with::<T>(key, |queue| change(queue.transport_mut())));
    }

    /// Begins to stop: no request is taken any more. For several queues, begin with all, then wait for each.
    pub fn begin_stop(self) -> StoppingQueue<T> {
        let (sender, drained) = sync_channel(1);
        let key = self.key;
        // A reactor that has ended has no queue to stop.
        let _ = self.reactor.run(Box::new(move |_| with::<T>(key, |queue| queue.stop(sender))));
        StoppingQueue { queue: self, drained, stopped: None }
    }
}

/// A queue that is stopping: its requests in flight are awaited.
pub struct StoppingQueue<T> {
    queue: RunningQueue<T>,
    drained: Receiver<StoppedQueue>,
    /// The message that was received already; the inner `None` means that the reactor ended.
    stopped: Option<Option<StoppedQueue>>,
}

impl<T: Transport> StoppingQueue<T> {
    /// Waits until no request is in flight, for `time` at most. Returns whether that is so.
    pub fn is_drained_within(&mut self, time: Duration) -> bool {
        if self.stopped.is_none() {
            self.stopped = match self.drained.recv_timeout(time) {
                Ok(stopped) => Some(Some(stopped)),
                Err(RecvTimeoutError::Disconnected) => Some(None),
                Err(RecvTimeoutError::Timeout) => None,
            };
        }
        self.stopped.is_some()
    }

    /// Ends requests in flight with errors although the storage has not ended them. Returns the guest's memory, which
    /// the caller cuts off ([`GuestMemory::fence`]) when all queues on it have been given up. Then
    /// [`StoppingQueue::abandon`] removes the queue from its reactor.
    #[must_use]
    pub fn give_up(&self) -> Option<Arc<GuestMemory>> {
        let key = self.queue.key;
        let given_up = run_and_wait(self.queue.reactor.as_ref(), move |_| {
            let mut memory = None;
            with::<T>(key, |queue| memory = Some(queue.give_up()));
            memory
        });
        given_up.ok().flatten()
    }

    /// Removes a queue that was given up from its reactor. Later results of the storage are ignored.
    pub fn abandon(self) {
        let (reactor, key) = (self.queue.reactor.as_ref(), self.queue.key);
        // A reactor that has ended has no queue.
        let _ = run_and_wait(reactor, move |ctx| remove(ctx, key));
    }

    /// Waits until no request is in flight, and removes the queue from its reactor. When this returns, the reactor no
    /// longer holds the guest's memory and the transport. So it never drops the last handle to the memory, which unmaps
    /// it and takes long. `None` if the reactor ended before.
    pub fn wait(self) -> Option<StoppedQueue> {
        let stopped = self.stopped.unwrap_or_else(|| self.drained.recv().ok());
        let (reactor, key) = (self.queue.reactor.as_ref(), self.queue.key);
        if run_and_wait(reactor, move |ctx| remove(ctx, key)).is_ok() {
            // The reactor drops it at the end of a turn.
            while let Ok(false) = run_and_wait(reactor, move |_| forget::<T>(key)) {}
        }
        stopped
    }
}

fn add<T: Transport>(ctx: &Rc<dyn ReactorCtx>, key: u64, setup: QueueSetup<T>) -> Result<()> {
    let queue = open_queue(ctx, setup)?;
    let id = ctx.add_poller(Rc::clone(&queue) as Rc<RefCell<dyn Poller>>)?;
    let queue: WeakQueue<T> = Rc::downgrade(&queue);
    QUEUES.with_borrow_mut(|queues| queues.insert(key, Entry { queue: Box::new(queue), id }));
    Ok(())
}

fn with<T: Transport>(key: u64, change: impl FnOnce(&mut dyn QueueControl<T>)) {
    let find = |entry: &Entry| entry.queue.downcast_ref::<WeakQueue<T>>().and_then(Weak::upgrade);
    let queue = QUEUES.with_borrow(|queues| queues.get(&key).and_then(find));
    if let Some(queue) = queue {
        change(&mut *queue.borrow_mut());
    }
}

fn remove(ctx: &Rc<dyn ReactorCtx>, key: u64) {
    let id = QUEUES.with_borrow(|queues| queues.get(&key).map(|entry| entry.id));
    if let Some(id) = id {
        ctx.remove_poller(id);
    }
}

/// Forgets a queue if it was dropped. Returns whether it was.
fn forget<T: Transport>(key: u64) -> bool {
    let is_there =
        |entry: &Entry| entry.queue.downcast_ref::<WeakQueue<T>>().is_some_and(|queue| queue.strong_count() > 0);
    QUEUES.with_borrow_mut(|queues| {
        let gone = !queues.get(&key).is_some_and(is_there);
        if gone {
            queues.remove(&key);
        }
        gone
    })
}
