//! What lives on a reactor's thread, and how other threads reach it.
//!
//! A turn of a reactor: every [`Poller`] is polled (rings are popped and requests pushed, completions harvested), ready
//! tasks run, the engines submit once, their completions are routed. What a poller pushes in a turn is a batch. While nothing happens for a while, pollers are
//! armed and the thread sleeps until a wake descriptor, an engine or another thread has something.

use crate::{Readiness, Result, Task, Timers, WatchId};
use memory::GuestMemory;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

/// Names a poller on its reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PollerId(pub u64);

/// Something that a reactor looks at each turn: a device ring, the driver's used ring, a load generator.
pub trait Poller {
    /// One turn: takes new work, harvests what has completed. Returns whether it did anything. Never waits.
    fn poll(&mut self) -> bool;

    /// The reactor would like to sleep: asks the other side for notifications, then looks once more. Returns true if
    /// there is work, so that the reactor goes on.
    fn arm(&mut self) -> bool {
        false
    }

    /// The reactor is awake again: notifications are not needed while it looks by itself.
    fn disarm(&mut self) {}

    /// Becomes readable when the armed poller has work. Watched for edges, so nobody needs to read it. Must stay the
    /// same descriptor as long as the poller is registered.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Raised on a reactor while requests are pushed, when the storage has less to do than waits to be submitted: it had better
/// begin. A poller looks after each request that it pushes, ends its batch there, and goes on in the next turn. So a batch is
/// small while the storage is idle and grows with what it has, and each is submitted by one call.
#[derive(Debug, Clone, Default)]
pub struct BatchEnd(Rc<Cell<bool>>);

impl BatchEnd {
    /// The engine's part.
    pub fn raise(&self) {
        self.0.set(true);
    }

    /// Whether it was raised since the last look.
    #[inline]
    #[must_use]
    pub fn take(&self) -> bool {
        self.0.replace(false)
    }
}

/// What a disk, a file or a front end may ask of the reactor on whose thread it lives.
pub trait ReactorCtx {
    /// Runs `task` to its end on this thread, beginning with the reactor's next turn.
    fn spawn(&self, task: Task);

    /// Adds a poller, looked at from the next turn on. May be called from within a poll.
    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId>;

    /// Removes a poller; it is not polled again, and dropped by the end of the turn. May be called from within a poll,
    /// also its own. Unknown names are ignored.
    fn remove_poller(&self, id: PollerId);

    /// The reactor's timers; see `sleep_until` and `timer` for short ways to use them.
    fn timers(&self) -> &Rc<Timers>;

    /// Watches a descriptor and raises `readiness` when it becomes ready; for [`crate::Watch`]. The reactor looks before
    /// it sleeps, while it sleeps, and now and then while it is busy. Fails where the reactor cannot watch any.
    fn watch_fd(&self, fd: BorrowedFd<'_>, readiness: &Rc<Readiness>) -> Result<WatchId> {
        let _ = (fd, readiness);
        Err(crate::Error::new(crate::ErrorKind::Unsupported, "this reactor watches no descriptors"))
    }

    /// Ends a watch. The descriptor is still open.
    fn unwatch_fd(&self, id: WatchId, fd: BorrowedFd<'_>) {
        let _ = (id, fd);
    }

    /// Tells those who push requests in batches when to end one; the same for all on this reactor.
    fn batch_end(&self) -> BatchEnd {
        BatchEnd::default()
    }

    /// Tells the engines that requests will come from this memory, so that they may prepare for it, for as long as the
    /// result lives. It has to be dropped on this thread, when no request from that memory is in flight. The memory's
    /// pages are pinned: whoever owns it must not exchange them meanwhile. Fails where no engine here can use it.
    fn register_memory(&self, memory: &Arc<GuestMemory>) -> Result<Box<dyn Any>> {
        let _ = memory;
        Err(crate::Error::new(crate::ErrorKind::Unsupported, "this reactor has no engine that registers memory"))
    }

    /// The concrete reactor: an engine's files look for their own (and refuse a stranger's).
    fn as_any(&self) -> &dyn Any;
}

/// A job for a reactor's thread.
pub type Job = Box<dyn FnOnce(&Rc<dyn ReactorCtx>) + Send>;

/// Reaches a reactor from any thread.
pub trait ReactorHandle: Send + Sync {
    /// Runs `job` on the reactor's thread, soon, and wakes the reactor up for it. The jobs of one thread run in the order
    /// in which it gave them, between the polls of a turn. Fails if the reactor has ended. A reactor that is being stopped
    /// may drop a job that it took without running it: whoever waits has to notice that (see [`run_and_wait`]).
    fn run(&self, job: Job) -> Result<()>;

    /// For logs and metrics.
    fn name(&self) -> &str;
}

/// Runs `job` on the reactor's thread and waits for what it returns. Must not be called on that thread.
pub fn run_and_wait<T: Send + 'static>(
    reactor: &dyn ReactorHandle,
    job: impl FnOnce(&Rc<dyn ReactorCtx>) -> T + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    reactor.run(Box::new(move |ctx| {
        // The receiver is gone only if the waiting thread is.
        let _ = sender.send(job(ctx));
    }))?;
    let ended =
        |_| crate::Error::new(crate::ErrorKind::Io, format!("reactor '{}' ended before the job did", reactor.name()));
    receiver.recv().map_err(ended)
}
