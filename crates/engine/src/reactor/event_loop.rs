//! The reactor: one thread that in each turn polls, runs tasks, submits once for each engine, and harvests.

use super::alarm::Alarm;
use super::fd_watch::FdWatches;
use super::pollers::Pollers;
use super::pool_trim::PoolTrim;
use super::shared::{STOP_NAP, STOP_PATIENCE, Shared};
use crate::base::pace::Paces;
use crate::queue::engines::Engines;
use crate::uring::registration::Registrar;
use block::{
    BatchEnd, Error, Executor, Poller, PollerId, ReactorCtx, ReactorHandle, Readiness, Result, Task, Timers, WatchId,
    Work,
};
use memory::GuestMemory;
use rustix::event::{Timespec, epoll};
use rustix::thread::CpuSet;
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// The most polls of tasks in one turn, so that rings and engines get their turn.
const TASK_POLLS_PER_TURN: usize = 256;
/// About how long these polls may take: a task may walk tables, and a guest can make hundreds of tasks ready at once.
const TASK_TIME_PER_TURN: Duration = Duration::from_micros(500);
/// How often an idle reactor polls its rings before its next full turn.
const POLLS_BETWEEN_TURNS: usize = 8;
/// The first limit of a sleep before a reactor looks for results that workers have not signalled. It doubles each time
/// that there are none. So a result is found after at most twice the time that the request took.
const LOOK_AGAIN: Duration = Duration::from_micros(250);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(1);
/// A busy reactor looks for unsignalled results once in this many turns: usually the worker is about to signal them.
const LOOK_TURNS: u64 = 64;

thread_local! {
    static CURRENT: RefCell<Weak<Local>> = const { RefCell::new(Weak::new()) };
}

/// The reactor's state on its own thread.
pub(super) struct Local {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    pollers: Pollers,
    /// `None` when the reactor has stopped: tasks that come later are dropped.
    tasks: RefCell<Option<Rc<Executor>>>,
    engines: Rc<Engines>,
    timers: Rc<Timers>,
    alarm: Alarm,
    fd_watches: FdWatches,
}

impl ReactorCtx for Local {
    fn spawn(&self, task: Task) {
        let tasks = self.tasks.borrow().clone();
        if let Some(tasks) = tasks {
            tasks.spawn(task);
        }
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId> {
        self.pollers.add(poller, |fd| self.watch(fd))
    }

    fn remove_poller(&self, id: PollerId) {
        if let Some(fd) = self.pollers.remove(id) {
            // SAFETY: the poller, and with it the descriptor, lives until the turn's sweep.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    fn timers(&self) -> &Rc<Timers> {
        &self.timers
    }

    fn watch_fd(&self, fd: BorrowedFd<'_>, readiness: &Rc<Readiness>) -> Result<WatchId> {
        self.fd_watches.add(&self.epoll, fd, readiness)
    }

    fn watch_room(&self, id: WatchId, fd: BorrowedFd<'_>, wanted: bool) {
        self.fd_watches.watch_room(&self.epoll, id, fd, wanted);
    }

    fn unwatch_fd(&self, id: WatchId, fd: BorrowedFd<'_>) {
        self.fd_watches.remove(&self.epoll, id, fd);
    }

    fn run_aside(&self, turn: u64, work: Work) {
        self.engines.run_aside(turn, work);
    }

    fn batch_end(&self) -> BatchEnd {
        self.engines.batch_end()
    }

    fn register_memory(&self, memory: &Arc<GuestMemory>) -> Result<Box<dyn Any>> {
        let (registered, is_new) = self.engines.register_memory(memory)?;
        if is_new {
            let remove = |id| {
                if let Some(reactor) = Self::current() {
                    reactor.remove_poller(id);
                }
            };
            let registrar = Rc::new(RefCell::new(Registrar::new(&registered, Box::new(remove))));
            let id = self.add_poller(Rc::clone(&registrar) as _)?;
            registrar.borrow_mut().set_id(id);
        }
        Ok(Box::new(registered))
    }

    fn as_any(&self) -> &dyn Any {
        &*self.engines
    }
}

impl Local {
    pub(super) fn new(
        shared: Arc<Shared>,
        processors: Option<CpuSet>,
        inline_bytes: usize,
        spin_limit: Duration,
    ) -> Result<Rc<Self>> {
        let fails = |error: rustix::io::Errno| Error::io("cannot set a reactor's epoll up", error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fails)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, shared.wakeup.fd(), epoll::EventData::new_u64(0), flags).map_err(fails)?;
        let handle = Arc::clone(&shared) as Arc<dyn ReactorHandle>;
        let engines = Engines::new(
            handle,
            Arc::clone(&shared.wakeup),
            Arc::clone(&shared.counters),
            processors,
            inline_bytes,
            spin_limit,
        );
        Ok(Rc::new(Self {
            epoll,
            pollers: Pollers::default(),
            tasks: RefCell::new(Some(Rc::new(Executor::new(shared.wakeup.waker())))),
            engines: Rc::new(engines),
            timers: Timers::new(),
            alarm: Alarm::default(),
            fd_watches: FdWatches::default(),
            shared,
        }))
    }

    /// Makes this the reactor of the calling thread.
    pub(super) fn become_current(self: &Rc<Self>) {
        CURRENT.set(Rc::downgrade(self));
        self.engines.become_current();
    }

    /// Returns the reactor of the calling thread.
    fn current() -> Option<Rc<Self>> {
        CURRENT.with_borrow(Weak::upgrade)
    }

    /// Watches a descriptor for edges, so that it need not be read.
    fn watch(&self, fd: RawFd) -> Result<()> {
        // SAFETY: the caller's poller owns the descriptor and is alive.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let added = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags);
        added.map_err(|error| Error::io("cannot watch a wake-up descriptor with epoll", error.into()))
    }

    /// Runs turns until the reactor is stopped, then ends all that was asked for.
    pub(super) fn run(self: &Rc<Self>, mut paces: Paces) {
        let ctx: Rc<dyn ReactorCtx> = Rc::clone(self) as _;
        // If a poller panics, requests in flight are still waited for while the thread unwinds.
        let guard = Teardown(self);
        let mut pool_trim = PoolTrim::default();
        let mut look_again = LOOK_AGAIN;
        while !self.shared.must_stop() {
            if let Some(submitted) = self.turn(&ctx, false) {
                paces.busy(submitted);
                pool_trim.worked();
                look_again = LOOK_AGAIN;
                continue;
            }
            if !self.fd_watches.is_empty() && self.wait(Some(Duration::ZERO)) > 0 {
                continue;
            }
            if self.engines.in_flight() > 0 {
                // A request in flight may need this processor, for one of our threads or one of the kernel's.
                self.shared.counters.yields.add(1);
                std::thread::yield_now();
            } else if self.look_for_requests() {
                paces.busy(self.turn(&ctx, true) == Some(true));
                continue;
            }
            let now = Instant::now();
            if paces.is_time_to_sleep(now) {
                let mut limit = pool_trim.before_sleep(now);
                if self.engines.may_be_unsignalled() || self.engines.has_failed() {
                    limit = Some(limit.map_or(look_again, |limit| limit.min(look_again)));
                    look_again = (look_again * 2).min(LOOK_AGAIN_MAX);
                }
                if self.sleep(limit) {
                    paces.slept();
                }
            }
        }
        self.wind_down(&ctx);
        drop(guard);
    }

    /// Runs one turn. If anything happened, returns whether an engine was given requests. `polled` says that the
    /// pollers have been polled and found work.
    fn turn(&self, ctx: &Rc<dyn ReactorCtx>, polled: bool) -> Option<bool> {
        self.shared.counters.turns.add(1);
        // If a poller's timer is due, the poller sees that in the same turn.
        let mut woken = self.timers.fire() > 0;
        if !self.fd_watches.is_empty() && self.shared.counters.turns.get().is_multiple_of(LOOK_TURNS) {
            woken |= self.wait(Some(Duration::ZERO)) > 0;
        }
        let jobs = self.run_jobs(ctx);
        let polled = polled || self.pollers.poll();
        let tasks = self.run_tasks();
        let submitted = self.engines.submit();
        if self.engines.may_be_unsignalled() && self.shared.counters.turns.get().is_multiple_of(LOOK_TURNS) {
            self.engines.look_for_unsignalled();
        }
        let harvests = self.shared.harvest_after_submit || !submitted;
        let harvested = harvests && self.engines.harvest() > 0;
        self.pollers.sweep();
        (woken | jobs | polled | tasks | submitted | harvested).then_some(submitted)
    }

    /// Polls a few times in close succession, because only guests can bring work soon.
    fn look_for_requests(&self) -> bool {
        let spin = || {
            std::hint::spin_loop();
            self.pollers.poll()
        };
        (0..POLLS_BETWEEN_TURNS).any(|_| spin())
    }

    fn run_jobs(&self, ctx: &Rc<dyn ReactorCtx>) -> bool {
        let jobs = self.shared.take_jobs();
        let any = !jobs.is_empty();
        for job in jobs {
            job(ctx);
        }
        any
    }

    fn run_tasks(&self) -> bool {
        let tasks = self.tasks.borrow().clone();
        let polls = tasks.map_or(0, |tasks| tasks.run_for(TASK_POLLS_PER_TURN, TASK_TIME_PER_TURN));
        self.engines.run_tasks() | (polls > 0)
    }

    /// Sleeps until something happens, if nothing has happened already. Returns whether it slept.
    fn sleep(&self, limit: Option<Duration>) -> bool {
        let slept = !self.pollers.arm() && {
            self.shared.wakeup.about_to_sleep();
            self.engines.signal(true);
            // As in `Wakeup`: the kernel posts a completion, then checks whether to signal.
            fence(Ordering::SeqCst);
            let idle = !self.has_work();
            if idle {
                self.shared.counters.sleeps.add(1);
                let alarm_limit = self.alarm.set(&self.epoll, self.timers.next_due());
                self.wait(limit.into_iter().chain(alarm_limit).min());
            }
            self.engines.signal(false);
            self.shared.wakeup.awake();
            idle
        };
        self.pollers.disarm();
        slept
    }

    fn has_work(&self) -> bool {
        self.shared.has_jobs()
            || self.shared.must_stop()
            || self.tasks.borrow().as_ref().is_some_and(|tasks| tasks.has_ready())
            || self.engines.tasks().has_ready()
            || self.timers.has_due()
            || self.engines.has_work()
    }

    /// Waits for events and routes them to their watches. Returns how many came.
    fn wait(&self, limit: Option<Duration>) -> usize {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let limit =
            limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) });
        // An interrupted wait is a spurious wake-up: the next turn finds nothing, and sleeps again.
        let count = epoll::wait(&self.epoll, &mut events, limit.as_ref()).unwrap_or(0);
        events.iter().take(count).for_each(|event| self.fd_watches.route(*event));
        count
    }

    /// Ends all that was asked for before the stop.
    fn wind_down(&self, ctx: &Rc<dyn ReactorCtx>) {
        self.run_jobs(ctx);
        self.pollers.clear();
        let deadline = Instant::now() + *self.shared.stop_patience.get_or_init(|| STOP_PATIENCE);
        loop {
            self.run_jobs(ctx);
            self.timers.fire();
            let worked = self.run_tasks() | self.engines.submit() | (self.engines.harvest() > 0);
            self.pollers.clear();
            // This also looks for results without a signal.
            let ready = self.has_pending() || worked;
            let tasks_may_go_on = Instant::now() < deadline;
            if !tasks_may_go_on {
                // From here on only the engines' own tasks run, and they end with their requests.
                drop(self.tasks.take());
            }
            let at_work =
                self.engines.in_flight() > 0 || self.engines.tasks().live() > 0 || self.engines.is_computing();
            if !ready && !at_work {
                return;
            }
            if !worked {
                self.wait(Some(STOP_NAP));
            }
        }
    }

    /// Waits for all requests in flight; runs no task and no poller.
    fn drain(&self) {
        while self.engines.in_flight() > 0 {
            let worked = self.engines.submit() | (self.engines.harvest() > 0);
            if !worked && !self.engines.has_work() {
                self.wait(Some(STOP_NAP));
            }
        }
    }

    fn has_pending(&self) -> bool {
        self.tasks.borrow().as_ref().is_some_and(|tasks| tasks.has_ready())
            || self.engines.tasks().has_ready()
            || self.engines.has_work()
    }
}

/// Ends what the reactor holds, in an order that keeps memory alive for the kernel.
struct Teardown<'a>(&'a Local);

impl Drop for Teardown<'_> {
    fn drop(&mut self) {
        // After a panic requests may be in flight. Queues and tasks hold the ranges that these requests write, so they
        // are dropped only when the requests have ended. Otherwise a late write would destroy a newer one.
        self.0.drain();
        self.0.pollers.clear();
        drop(self.0.tasks.take());
        self.0.engines.shut_down();
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reactor({})", self.shared.name)
    }
}
