//! The interfaces of a reactor, for code on its thread and for other threads.
//!
//! In each turn of a reactor, every [`Poller`] is polled: it pops rings, pushes requests and harvests completions.
//! Ready tasks run. Then the engines submit once, and their completions are routed. The requests that a poller pushes
//! in one turn are a batch.
//!
//! When nothing has happened for a while, pollers are armed and the thread sleeps. A wake descriptor, an engine or
//! another thread wakes it.

use crate::{Readiness, Result, Sleep, Task, Timer, Timers, WatchId, Work};
use memory::GuestMemory;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names a poller on its reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PollerId(pub u64);

/// Something that a reactor polls in each turn: a device ring, the driver's used ring, a load generator.
pub trait Poller {
    /// Takes new work and harvests completions, once a turn. Returns whether it did anything. Never waits.
    fn poll(&mut self) -> bool;

    /// Prepares for the reactor's sleep: asks the other side for notifications, then looks once more. Returns whether
    /// there is work; if so, the reactor goes on.
    fn arm(&mut self) -> bool {
        false
    }

    /// Tells the other side that notifications are not needed: the reactor is awake and looks by itself.
    fn disarm(&mut self) {}

    /// Returns a descriptor that becomes readable when the armed poller has work. It is watched for edges, so it need
    /// not be read. It must stay the same while the poller is registered.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Tells pollers to end their batch. An engine raises it when more requests wait to be submitted than the storage is
/// working on. A poller looks at it after each request that it pushes. If it is raised, the poller ends its batch and
/// goes on in the next turn. So batches are small while the storage is idle and grow with its load. Each takes one
/// system call.
#[derive(Debug, Clone, Default)]
pub struct BatchEnd(Rc<Cell<bool>>);

impl BatchEnd {
    /// Asks pollers to end their batch; for engines.
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

/// The services of a reactor for disks, files and front ends on its thread.
pub trait ReactorCtx {
    /// Runs `task` to its end on this thread, beginning with the reactor's next turn.
    fn spawn(&self, task: Task);

    /// Adds a poller, looked at from the next turn on. May be called from within a poll.
    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId>;

    /// Removes a poller; it is not polled again, and is dropped by the end of the turn. A poll may call this, also for
    /// its own poller. Unknown names are ignored.
    fn remove_poller(&self, id: PollerId);

    /// Returns the reactor's timers; `sleep_until` and `timer` are short ways to use them.
    fn timers(&self) -> &Rc<Timers>;

    /// Watches a descriptor and raises `readiness` when it becomes ready; for [`crate::Watch`]. The reactor looks
    /// when it has nothing else to do, while it sleeps, and now and then while it is busy. Fails if the reactor cannot
    /// watch any.
    fn watch_fd(&self, fd: BorrowedFd<'_>, readiness: &Rc<Readiness>) -> Result<WatchId> {
        let _ = (fd, readiness);
        Err(crate::Error::new(crate::ErrorKind::Unsupported, "this reactor watches no descriptors"))
    }

    /// Sets whether a watched descriptor is also watched for room to write. A new watch is not. If there is room
    /// already, the descriptor becomes ready.
    fn watch_room(&self, id: WatchId, fd: BorrowedFd<'_>, wanted: bool) {
        let _ = (id, fd, wanted);
    }

    /// Ends a watch. The descriptor must still be open.
    fn unwatch_fd(&self, id: WatchId, fd: BorrowedFd<'_>) {
        let _ = (id, fd);
    }

    /// Runs `work` on a thread that does not hold up the reactor. Different values of `turn` take turns; each file has
    /// its own. When the reactor has ended, the work is dropped.
    fn run_aside(&self, turn: u64, work: Work);

    /// Returns the flag that tells pollers when to end a batch; one for the whole reactor.
    fn batch_end(&self) -> BatchEnd {
        BatchEnd::default()
    }

    /// Registers memory with the engines, for as long as the result lives. Requests may use that memory faster then.
    /// Drop the result on this thread, when no request from that memory is in flight. The memory's pages are pinned, so
    /// its owner must not exchange them. Fails if no engine here can use it.
    fn register_memory(&self, memory: &Arc<GuestMemory>) -> Result<Box<dyn Any>> {
        let _ = memory;
        Err(crate::Error::new(crate::ErrorKind::Unsupported, "this reactor has no engine that registers memory"))
    }

    /// Returns the concrete reactor. An engine's files need a reactor of their own kind, and refuse another.
    fn as_any(&self) -> &dyn Any;
}

impl dyn ReactorCtx {
    /// Makes a timer on this reactor.
    #[must_use]
    pub fn timer(&self) -> Timer {
        Timer::new(self.timers())
    }

    /// Returns the time that this reactor's timers go by.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.timers().now()
    }

    /// Waits until `due`. For tasks of this reactor.
    pub fn sleep_until(&self, due: Instant) -> Sleep {
        let mut timer = self.timer();
        timer.set(due);
        Sleep(timer)
    }

    /// Waits for `duration`; for ever if that is later than the clock can express.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        match self.now().checked_add(duration) {
            Some(due) => self.sleep_until(due),
            None => Sleep(self.timer()),
        }
    }
}

/// A job for a reactor's thread.
pub type Job = Box<dyn FnOnce(&Rc<dyn ReactorCtx>) + Send>;

/// Access to a reactor from any thread.
pub trait ReactorHandle: Send + Sync {
    /// Runs `job` on the reactor's thread, soon, and wakes the reactor up for it. The jobs of one thread run in the
    /// order in which it gave them, between the polls of a turn. Fails if the reactor has ended. A reactor that is
    /// being stopped may drop an accepted job without running it. A caller that waits must notice that (see
    /// [`run_and_wait`]).
    fn run(&self, job: Job) -> Result<()>;

    /// Returns the reactor's name, for logs and metrics.
    fn name(&self) -> &str;
}

/// Runs `job` on the reactor's thread and waits for its result. Must not be called on that thread.
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
