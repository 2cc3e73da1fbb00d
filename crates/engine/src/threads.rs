//! The thread pool: an engine of its own, and where the other engines send what they cannot do without blocking.
//!
//! Only numbers and raw pointers travel to a worker. The request, with the file and the memory it names, stays in the
//! reactor's slab until the worker's result has come back, and the pool is shut down before the slab goes.
//!
//! Files that lie in memory are an exception: their bytes are only copied, which takes less time than to wake somebody.
//! Their small transfers the reactor does itself, without a call where it can (see `resident`): when it submits, or, where
//! a task awaits the end, at once. The task goes on without being woken, and finds in the processor's cache what it has
//! just read; what tasks may copy in a turn is limited, so that rings and other tasks come round. What takes a call waits
//! for the end of the turn, for one call carries it all out (see `together`). What may be left to the reactor, `inline`
//! says.

use crate::begun::{self, Begun};
use crate::inflight::{Action, Request, Slab, Step};
use crate::inline::{self, May, goes_in_turn, is_inline, waits_for_workers};
use crate::job_queue::{Job, Queue, Spinner};
use crate::poll::Pace;
use crate::stats::Counters;
use crate::swap;
use crate::together::Together;
use crate::untold::Untold;
use crate::wakeup::Wakeup;
use block::{Done, IoError};
use rustix::thread::CpuSet;
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The most workers of one reactor.
const MAX_WORKERS: usize = 64;
/// How long a worker without work stays.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// How long one spins at most: what comes later is worth a wake-up, whatever the reactor may do.
const SPIN_MAX: Duration = Duration::from_micros(100);
/// Requests for which lists have room at least.
const LEAST_ROOM: usize = 256;
/// A worker only calls the kernel.
const STACK_BYTES: usize = 128 << 10;

/// What tasks may copy at once between two submits, and what each call counts for at least.
const AT_ONCE_BYTES: usize = 4 << 20;
const CALL_BYTES: usize = 4 << 10;

/// Looked at again and again: on a cache line of its own, so that what is written beside it does not take it away.
#[derive(Default)]
#[repr(align(64))]
struct Polled<T>(T);

struct Pool {
    queue: Mutex<Queue>,
    /// Signalled when there are jobs or the pool stops.
    more: Condvar,
    /// Grows when a spinning worker has something to look for.
    batches: Polled<AtomicU64>,
    done: Mutex<Results>,
    /// The reactor is to look into `done`.
    has_done: Polled<AtomicBool>,
    /// With `done`: a result came in. The reactor waits on it only while it shuts down.
    progress: Condvar,
    /// With `queue`: a worker ended because the pool stops.
    stopped: Condvar,
    /// Made when it is first needed; `None` where it cannot be had.
    begun: OnceLock<Option<Begun>>,
    wakeup: Arc<Wakeup>,
    /// How long a worker without work spins at most; as the reactor, it adapts below this.
    spin_limit: Duration,
    /// Where workers may run: a reactor that is bound to one processor does not bind them.
    processors: Option<CpuSet>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What workers have carried out.
#[derive(Default)]
struct Results {
    all: Vec<(u32, i32)>,
    /// Somebody waits on `progress`.
    awaited: bool,
}

/// One reactor's workers.
pub(crate) struct Workers {
    slab: RefCell<Slab>,
    /// Taken since the last submit.
    batch: RefCell<Vec<Job>>,
    /// As `batch`, for the reactor itself, and what came of it.
    inline: RefCell<Vec<Job>>,
    inline_done: RefCell<Vec<(u32, i32)>>,
    /// Those of `inline` that one call carries out.
    together: RefCell<Together>,
    harvested: RefCell<Vec<(u32, i32)>>,
    /// The longest copy that the reactor makes itself.
    inline_bytes: usize,
    /// What tasks may still copy before the next submit.
    at_once_bytes: Cell<usize>,
    /// What workers carry out in turn.
    in_turn: Cell<usize>,
    /// Requests for which all lists have room.
    room: Cell<usize>,
    pool: Arc<Pool>,
    counters: Arc<Counters>,
    closed: Cell<bool>,
}

impl Workers {
    pub(crate) fn new(
        wakeup: Arc<Wakeup>,
        counters: Arc<Counters>,
        processors: Option<CpuSet>,
        inline_bytes: usize,
        spin_limit: Duration,
    ) -> Self {
        let pool = Pool {
            queue: Mutex::default(),
            more: Condvar::new(),
            batches: Polled::default(),
            done: Mutex::default(),
            has_done: Polled::default(),
            progress: Condvar::new(),
            stopped: Condvar::new(),
            begun: OnceLock::new(),
            wakeup,
            spin_limit: spin_limit.min(SPIN_MAX),
            processors,
        };
        Self {
            slab: RefCell::default(),
            batch: RefCell::default(),
            inline: RefCell::default(),
            inline_done: RefCell::default(),
            together: RefCell::default(),
            harvested: RefCell::default(),
            inline_bytes,
            at_once_bytes: Cell::new(AT_ONCE_BYTES),
            in_turn: Cell::new(0),
            room: Cell::new(0),
            pool: Arc::new(pool),
            counters,
            closed: Cell::new(false),
        }
    }

    /// Takes a request; workers see it with the next [`Workers::submit`]. What a task awaits may have ended on return.
    pub(crate) fn push(&self, mut request: Request) {
        self.counters.requests.add(1);
        if matches!(request.done, Done::Waiter(_)) && !self.closed.get() && is_inline(&request, self.inline_bytes) {
            let zeroed_bytes = match request.action {
                // Freeing behind the end of the file costs nothing, however long it is.
                Action::Fallocate { length, .. } => {
                    usize::try_from(length).unwrap_or(usize::MAX).min(self.inline_bytes)
                }
                _ => 0,
            };
            let cost_bytes = request.left_bytes().saturating_add(zeroed_bytes).saturating_add(CALL_BYTES);
            if let Some(left_bytes) = self.at_once_bytes.get().checked_sub(cost_bytes) {
                let moves = matches!(request.action, Action::Read { .. } | Action::Write { .. });
                let may = inline::what_reactor_may(&request, swap::look(), &self.counters);
                match may {
                    // One call carries out all transfers of a turn that need one.
                    May::Copy | May::Call if moves || may == May::Copy => {
                        match crate::blocking::run_without_call(request) {
                            None => {
                                self.at_once_bytes.set(left_bytes);
                                return self.counters.completions.add(1);
                            }
                            Some(left) => request = left,
                        }
                    }
                    May::Call if !waits_for_workers(&request) => {
                        self.at_once_bytes.set(left_bytes);
                        self.counters.completions.add(1);
                        return self.counters.system_calls.add(crate::blocking::run(request));
                    }
                    _ => {}
                }
            }
        }
        self.take_over(request);
    }

    /// As [`Workers::push`], for a request that another engine has counted.
    pub(crate) fn take_over(&self, request: Request) {
        if self.closed.get() {
            request.finish(Err(IoError::EIO));
            return;
        }
        let mut slab = self.slab.borrow_mut();
        let index = slab.insert(request);
        if slab.peak() > self.room.get() {
            self.make_room(slab.peak().next_power_of_two().max(LEAST_ROOM));
        }
        self.queue(&mut slab, index);
    }

    /// All lists are to hold `count` requests: all may wait, or end, at once.
    #[cold]
    fn make_room(&self, count: usize) {
        fn grow<T>(list: &mut Vec<T>, count: usize) {
            list.reserve(count.saturating_sub(list.len()));
        }
        for jobs in [&self.batch, &self.inline] {
            grow(&mut jobs.borrow_mut(), count);
        }
        // Both harvest's lists get results of both kinds.
        grow(&mut self.inline_done.borrow_mut(), count);
        grow(&mut locked(&self.pool.done).all, count);
        if let Ok(mut harvested) = self.harvested.try_borrow_mut() {
            grow(&mut harvested, count);
            self.room.set(count);
        }
        locked(&self.pool.queue).make_room(count);
    }

    fn queue(&self, slab: &mut Slab, index: u32) {
        let buffers = slab.buffers(index);
        if let Some(request) = slab.get(index) {
            let fd = request.target.file.raw_fd();
            let (offset, length_bytes) = (request.file_offset(), request.left_bytes());
            let action = request.action;
            let (in_turn, is_short, only_begins, aside) = (false, false, false, None);
            let job = Job { index, fd, in_turn, is_short, only_begins, action, offset, length_bytes, buffers, aside };
            match is_inline(request, self.inline_bytes) {
                true => self.inline.borrow_mut().push(job),
                false => self.leave_to_worker(request, job),
            }
        }
    }

    fn leave_to_worker(&self, request: &Request, job: Job) {
        let (in_turn, file) = (goes_in_turn(request), &*request.target.file);
        if in_turn {
            self.in_turn.update(|count| count + 1);
            if file.in_memory {
                file.changes_by_workers.fetch_add(1, Ordering::Relaxed);
            }
        }
        // What comes here of a file in memory may be fetched from swap, or change any length of it.
        let is_short = in_turn && !file.in_memory;
        let only_begins = begun::suits(request) && self.pool.begun.get_or_init(Begun::new).is_some();
        // One worker begins a file's writes: the next waits for little but the one before.
        let in_turn = in_turn || (only_begins && !matches!(job.action, Action::Read { .. }));
        self.batch.borrow_mut().push(Job { in_turn, is_short, only_begins, ..job });
    }

    /// Hands the batch to the workers, starting as many as are needed. Returns whether there was any.
    pub(crate) fn submit(&self) -> bool {
        self.at_once_bytes.set(AT_ONCE_BYTES);
        self.copy_inline() | self.submit_batch()
    }

    fn copy_inline(&self) -> bool {
        let mut jobs = self.inline.borrow_mut();
        if jobs.is_empty() {
            return false;
        }
        let (slab, swap, mut calls) = (self.slab.borrow(), swap::look(), 0);
        let mut done = self.inline_done.borrow_mut();
        let mut together = self.together.borrow_mut();
        for job in jobs.drain(..) {
            let Some(request) = slab.get(job.index) else { continue };
            let file = &*request.target.file;
            let may = inline::what_reactor_may(request, swap, &self.counters);
            let copied = match may {
                May::Nothing => None,
                // SAFETY: the slab's request keeps the memory.
                May::Copy | May::Call => unsafe { file.without_call(job.action, job.offset, job.buffers) },
            };
            let result = match copied {
                Some(result) => result,
                None if may == May::Call && !waits_for_workers(request) => {
                    if Together::takes(job.action) {
                        if together.add(job) {
                            calls += together.run(&mut done);
                        }
                        continue;
                    }
                    // Changes keep their order.
                    calls += together.run(&mut done);
                    calls += 1;
                    job.run()
                }
                None => {
                    let aside = inline::aside(request, &job, swap);
                    self.leave_to_worker(request, Job { aside, ..job });
                    continue;
                }
            };
            done.push((job.index, result));
        }
        calls += together.run(&mut done);
        self.counters.system_calls.add(calls);
        true
    }

    fn submit_batch(&self) -> bool {
        let mut batch = self.batch.borrow_mut();
        if batch.is_empty() {
            return false;
        }
        let mut queue = locked(&self.pool.queue);
        let wanted = queue.add_batch(batch.drain(..), MAX_WORKERS);
        drop(queue);
        if wanted.spinner {
            // It had seen no batch of this number under the lock.
            self.pool.batches.0.fetch_add(1, Ordering::Relaxed);
        }
        for _ in 0..wanted.to_wake {
            self.pool.more.notify_one();
        }
        for _ in 0..wanted.to_start {
            self.start_worker();
        }
        true
    }

    fn start_worker(&self) {
        if let Err(error) = spawn(Arc::clone(&self.pool)) {
            let mut queue = locked(&self.pool.queue);
            queue.threads -= 1;
            if queue.threads > 0 {
                return;
            }
            drop(queue);
            // Nobody else is there to do it: slow is better than never.
            tracing::warn!(%error, "cannot start an I/O worker; the reactor does the work itself");
            self.pool.drain_queue();
        }
    }

    /// Takes results. Returns how many requests moved.
    pub(crate) fn harvest(&self) -> usize {
        let has_done = self.pool.has_done.0.load(Ordering::Acquire);
        let ended = self.pool.begun().filter(|begun| begun.has_events());
        if !has_done && ended.is_none() && self.inline_done.borrow().is_empty() {
            return 0;
        }
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        if has_done {
            self.pool.has_done.0.store(false, Ordering::Relaxed);
            std::mem::swap(&mut *harvested, &mut locked(&self.pool.done).all);
        }
        if let Some(begun) = ended {
            begun.take(|index, result| harvested.push((index, result)));
        }
        if !harvested.is_empty() {
            self.counters.worker_calls.add(harvested.len() as u64);
            let slab = self.slab.borrow();
            let of_workers = harvested.iter().filter_map(|(index, _)| slab.get(*index));
            of_workers.filter(|request| goes_in_turn(request)).for_each(|request| {
                self.in_turn.update(|count| count - 1);
                let file = &*request.target.file;
                if file.in_memory {
                    file.changes_by_workers.fetch_sub(1, Ordering::Relaxed);
                }
            });
        }
        harvested.append(&mut self.inline_done.borrow_mut());
        let count = harvested.len();
        self.counters.harvests.add(u64::from(count > 0));
        for (index, result) in harvested.drain(..) {
            self.route(index, result);
        }
        count
    }

    fn route(&self, index: u32, result: i32) {
        let mut slab = self.slab.borrow_mut();
        let Some(request) = slab.get_mut(index) else { return };
        let result = match request.advance(result) {
            Step::Again => return self.queue(&mut slab, index),
            Step::ToWorker => Err(IoError::from_errno(libc::EAGAIN)),
            Step::Finished(result) => result,
        };
        let request = slab.remove(index);
        drop(slab);
        self.counters.completions.add(1);
        if let Some(request) = request {
            request.finish(result);
        }
    }

    /// Whether there is something to submit or to take; what was not told is found too, and taken with the next harvest.
    pub(crate) fn has_work(&self) -> bool {
        let pushed = !self.batch.borrow().is_empty() || !self.inline.borrow().is_empty();
        let ended = !self.inline_done.borrow().is_empty() || self.pool.begun().is_some_and(Begun::has_events);
        pushed || ended || self.pool.look_for_done()
    }

    /// Whether there may be results that workers do not tell at once. The last one's they do.
    pub(crate) fn may_be_untold(&self) -> bool {
        self.in_turn.get() > 1
    }

    /// Requests taken and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.slab.borrow().live()
    }

    /// Waits for every job, then for every worker. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        while self.in_flight() > 0 {
            self.submit();
            if self.harvest() == 0 {
                let mut done = locked(&self.pool.done);
                done.awaited = true;
                // What was begun ends without a word here.
                let limit = if self.pool.begun().is_some() { Duration::from_millis(1) } else { IDLE_LIMIT };
                drop(self.pool.progress.wait_timeout_while(done, limit, |done| done.all.is_empty()));
                self.pool.look_for_done();
            }
        }
        self.closed.set(true);
        let mut queue = locked(&self.pool.queue);
        queue.stop = true;
        self.pool.more.notify_all();
        while queue.threads > 0 {
            queue = self.pool.stopped.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl Pool {
    fn work(&self) {
        if let Some(processors) = &self.processors {
            // Fails where fewer are allowed by now; then the worker runs where the reactor does.
            let _ = rustix::thread::sched_setaffinity(None, processors);
        }
        let mut pace = Pace::new(self.spin_limit);
        while let Some(job) = self.next(&mut pace) {
            pace.busy();
            self.carry_out(job);
        }
    }

    /// The next job; `None` when this worker shall end, and then it is no longer counted.
    fn next(&self, pace: &mut Pace) -> Option<Job> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(job) = queue.take() {
                return Some(job);
            }
            if queue.stop {
                break;
            }
            // One is enough: it takes what the reactor gives next, without being woken for it.
            let may_spin = queue.spinner == Spinner::None;
            if may_spin && !pace.is_time_to_sleep(Instant::now()) {
                queue.spinner = Spinner::Looks;
                let batches = self.batches.0.load(Ordering::Relaxed);
                drop(queue);
                self.spin(batches, pace);
                queue = locked(&self.queue);
                queue.spinner = Spinner::None;
                continue;
            }
            queue.idle += 1;
            let (woken, waited) = self.more.wait_timeout(queue, IDLE_LIMIT).unwrap_or_else(PoisonError::into_inner);
            queue = woken;
            queue.idle -= 1;
            if may_spin {
                pace.slept();
            }
            if waited.timed_out() && queue.ready() == 0 {
                break;
            }
        }
        queue.threads -= 1;
        if queue.stop {
            self.stopped.notify_all();
        }
        None
    }

    /// Until another batch was given or spinning does not pay.
    fn spin(&self, batches: u64, pace: &mut Pace) {
        while self.batches.0.load(Ordering::Relaxed) == batches && !pace.is_time_to_sleep(Instant::now()) {
            // The reactor may need this very processor.
            std::thread::yield_now();
        }
    }

    /// Carries a job out, and those that follow it in turn.
    fn carry_out(&self, job: Job) {
        let mut untold = Untold::default();
        let mut next = Some(job);
        while let Some(job) = next {
            if job.only_begins && self.begun().is_some_and(|begun| begun.begin(&job, &self.wakeup)) {
                next = self.after(&job).0;
                continue;
            }
            let result = job.run();
            untold.add(result);
            let mut done = locked(&self.done);
            done.all.push((job.index, result));
            let awaited = done.awaited;
            drop(done);
            let waiting;
            (next, waiting) = self.after(&job);
            let may_wait_for = |next: &Job| next.is_short && untold.may_wait_for(next.length_bytes, waiting);
            let may_wait = next.as_ref().is_some_and(may_wait_for);
            if !may_wait || awaited {
                untold = Untold::default();
                self.has_done.0.store(true, Ordering::Release);
                self.wakeup.wake();
            }
            if awaited {
                self.progress.notify_all();
            }
        }
    }

    /// What the same worker goes on with after a job, and how many more wait for it.
    fn after(&self, job: &Job) -> (Option<Job>, usize) {
        if job.is_transfer() {
            locked(&self.queue).transfer_ended();
        }
        if job.in_turn { locked(&self.queue).next_in_turn(job.fd) } else { (None, 0) }
    }

    fn begun(&self) -> Option<&Begun> {
        self.begun.get()?.as_ref()
    }

    /// Whether there are results, told or not; then they count as told.
    fn look_for_done(&self) -> bool {
        let some = self.has_done.0.load(Ordering::Acquire) || !locked(&self.done).all.is_empty();
        if some {
            self.has_done.0.store(true, Ordering::Relaxed);
        }
        some
    }

    fn drain_queue(&self) {
        while let Some(job) = { locked(&self.queue).take() } {
            self.carry_out(job);
        }
    }
}

/// Starts a worker. Not by `std::thread`: a busy machine may need more workers at any time, and handles, names and
/// results that nobody asks for would be allocated each time. The C library maps a stack, or takes one that it has kept.
fn spawn(pool: Arc<Pool>) -> io::Result<()> {
    extern "C" fn enter(pool: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `spawn` gave this thread a reference of its own.
        let pool = unsafe { Arc::from_raw(pool.cast_const().cast::<Pool>()) };
        // SAFETY: names the calling thread; the name is a string of less than 16 bytes.
        unsafe { libc::pthread_setname_np(libc::pthread_self(), c"io-worker".as_ptr()) };
        pool.work();
        std::ptr::null_mut()
    }
    let pool = Arc::into_raw(pool);
    // SAFETY: the attributes are initialised before they are used, and destroyed after; the thread takes over `pool`.
    let error = unsafe {
        let (mut attributes, mut thread) = (std::mem::zeroed(), std::mem::zeroed());
        match libc::pthread_attr_init(&raw mut attributes) {
            0 => {
                libc::pthread_attr_setstacksize(&raw mut attributes, STACK_BYTES);
                libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
                let argument = pool.cast_mut().cast();
                let error = libc::pthread_create(&raw mut thread, &raw const attributes, enter, argument);
                libc::pthread_attr_destroy(&raw mut attributes);
                error
            }
            error => error,
        }
    };
    if error == 0 {
        return Ok(());
    }
    // SAFETY: there is no thread that would have taken it over.
    drop(unsafe { Arc::from_raw(pool) });
    Err(io::Error::from_raw_os_error(error))
}

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
