//! The reactor: one thread that in each turn polls, runs tasks, submits once for each engine, and harvests.

use super::alarm::Alarm;
use super::config::ReactorConfig;
use super::fd_watch::FdWatches;
use super::pollers::Pollers;
use super::pool_trim::PoolTrim;
use crate::base::pace::Paces;
use crate::base::stats::{Counters, ReactorStats};
use crate::base::wakeup::Wakeup;
use crate::queue::engines::Engines;
use crate::uring::registration::Registrar;
use block::{
    BatchEnd, Error, ErrorKind, Executor, Job, Poller, PollerId, ReactorCtx, ReactorHandle, Readiness, Result, Task,
    Timers, WatchId, Work,
};
use memory::GuestMemory;
use rustix::event::{Timespec, epoll};
use rustix::thread::CpuSet;
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
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
/// How long unfinished tasks may go on after the reactor is stopped.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// The longest sleep of a stopping reactor before it looks again.
const STOP_NAP: Duration = Duration::from_millis(20);

/// Starts reactors.
#[derive(Debug)]
pub struct Reactor;

impl Reactor {
    /// Starts a reactor on a thread of its own.
    pub fn spawn(config: ReactorConfig) -> Result<ReactorThread> {
        let fails = |error| Error::io(format!("cannot start reactor '{}'", config.name), error);
        let shared = Arc::new(Shared {
            name: config.name.clone(),
            jobs: Mutex::default(),
            has_jobs: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            stop_patience: OnceLock::new(),
            wakeup: Arc::new(Wakeup::new().map_err(fails)?),
            counters: Arc::default(),
            harvest_after_submit: config.harvest_after_submit,
        });
        let theirs = Arc::clone(&shared);
        let (sender, started) = std::sync::mpsc::sync_channel(1);
        let limit = Duration::from_micros(u64::from(config.poll_max_us));
        let thread = std::thread::Builder::new().name(config.name.clone()).spawn(move || {
            let _end = CloseOnExit(Arc::clone(&theirs));
            let processors = config.cpu.and_then(|cpu| bind_to(cpu, &theirs.name));
            match Local::new(theirs, processors, config.inline_bytes, limit) {
                Ok(local) => {
                    CURRENT.set(Rc::downgrade(&local));
                    local.engines.become_current();
                    let _ = sender.send(Ok(()));
                    local.run(Paces::new(limit));
                }
                Err(error) => {
                    let _ = sender.send(Err(error));
                }
            }
        });
        let thread = thread.map_err(|error| Error::io(format!("cannot start reactor '{}'", shared.name), error))?;
        let gone = |_| Error::new(ErrorKind::Io, format!("reactor '{}' ended while it started", shared.name));
        started.recv().map_err(gone)??;
        Ok(ReactorThread { shared, thread: Some(thread) })
    }
}

/// Binds the calling thread to one processor. Returns where it was allowed to run before.
fn bind_to(cpu: usize, name: &str) -> Option<CpuSet> {
    let before = rustix::thread::sched_getaffinity(None).ok();
    let mut set = CpuSet::new();
    if cpu < CpuSet::MAX_CPU {
        set.set(cpu);
    }
    match rustix::thread::sched_setaffinity(None, &set) {
        Ok(()) => before,
        Err(error) => {
            tracing::warn!(%error, "cannot bind reactor '{name}' to processor {cpu}; it runs on any");
            None
        }
    }
}

/// A running reactor. Dropping it stops the reactor, as [`ReactorThread::stop`] does.
pub struct ReactorThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ReactorThread {
    /// Returns a handle that reaches the reactor from any thread. It may outlive the reactor.
    #[must_use]
    pub fn handle(&self) -> Arc<dyn ReactorHandle> {
        Arc::clone(&self.shared) as _
    }

    /// Returns the reactor's counts since its start.
    #[must_use]
    pub fn stats(&self) -> ReactorStats {
        self.shared.counters.snapshot()
    }

    /// Returns the harvests counted by their number of completions: index three has the number of harvests with three.
    /// The last entry stands for as many completions or more.
    #[must_use]
    pub fn harvest_lengths(&self) -> Vec<u64> {
        self.shared.counters.harvest_lengths.snapshot()
    }

    /// Stops the reactor and waits for its end. Jobs given before are run, and pollers dropped. Tasks at work get a few
    /// seconds to end; those that only wait for a time or a descriptor are dropped. Every request in flight is waited
    /// for, so no memory goes that the kernel may still write. Must not be called on the reactor's own thread.
    pub fn stop(mut self) -> Result<()> {
        self.join()
    }

    /// As [`ReactorThread::stop`], but waits for `limit` at most. Tasks at work get half of it: computations that wait
    /// for a worker end with the tasks. A thread that has not ended by then is left running, with the memory of the
    /// requests that its storage does not end.
    pub fn stop_within(mut self, limit: Duration) -> Result<()> {
        self.shared.stop_patience.get_or_init(|| STOP_PATIENCE.min(limit / 2));
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wakeup.wake();
        let begun = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if begun.elapsed() >= limit {
                self.thread = None;
                let message =
                    format!("reactor '{}' is left behind: storage does not end its requests", self.shared.name);
                return Err(Error::new(ErrorKind::Io, message));
            }
            std::thread::sleep(STOP_NAP);
        }
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wakeup.wake();
        thread.join().map_err(|_| {
            Error::new(ErrorKind::Io, format!("reactor '{}' panicked; its requests were waited for", self.shared.name))
        })
    }
}

impl Drop for ReactorThread {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!("{error}");
        }
    }
}

impl fmt::Debug for ReactorThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReactorThread({})", self.shared.name)
    }
}

#[derive(Default)]
struct Jobs {
    waiting: Vec<Job>,
    closed: bool,
}

/// The state of a reactor that other threads share.
#[derive(Debug)]
struct Shared {
    name: String,
    jobs: Mutex<Jobs>,
    /// Read in each turn, so that the lock is taken only if there are jobs.
    has_jobs: AtomicBool,
    stop: AtomicBool,
    /// How long unfinished tasks may go on, if that was said before the stop.
    stop_patience: OnceLock<Duration>,
    wakeup: Arc<Wakeup>,
    counters: Arc<Counters>,
    harvest_after_submit: bool,
}

impl Shared {
    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jobs({} waiting)", self.waiting.len())
    }
}

impl ReactorHandle for Shared {
    fn run(&self, job: Job) -> Result<()> {
        let mut jobs = self.jobs();
        if jobs.closed {
            return Err(Error::new(ErrorKind::Io, format!("reactor '{}' has ended", self.name)));
        }
        jobs.waiting.push(job);
        drop(jobs);
        self.has_jobs.store(true, Ordering::Release);
        self.wakeup.wake();
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Drops the remaining jobs, however the thread ends, so that nobody waits for a job that never runs.
struct CloseOnExit(Arc<Shared>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let mut jobs = self.0.jobs();
        jobs.closed = true;
        let left = std::mem::take(&mut jobs.waiting);
        drop(jobs);
        drop(left);
    }
}

thread_local! {
    static CURRENT: RefCell<Weak<Local>> = const { RefCell::new(Weak::new()) };
}

/// The reactor's state on its own thread.
struct Local {
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
    fn new(
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

    fn run(self: &Rc<Self>, mut paces: Paces) {
        let ctx: Rc<dyn ReactorCtx> = Rc::clone(self) as _;
        // If a poller panics, requests in flight are still waited for while the thread unwinds.
        let guard = Teardown(self);
        let mut pool_trim = PoolTrim::default();
        let mut look_again = LOOK_AGAIN;
        while !self.shared.stop.load(Ordering::Acquire) {
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
        if !self.shared.has_jobs.load(Ordering::Acquire) {
            return false;
        }
        self.shared.has_jobs.store(false, Ordering::Relaxed);
        let jobs = std::mem::take(&mut self.shared.jobs().waiting);
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
        self.shared.has_jobs.load(Ordering::Acquire)
            || self.shared.stop.load(Ordering::Acquire)
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
