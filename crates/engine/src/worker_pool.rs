//! A reactor's worker threads, and what passes between them and the reactor.

use crate::given::Given;
use crate::group::Group;
use crate::job_queue::{How, Job, Queue, Spinner};
use crate::poll::Pace;
use crate::wakeup::Wakeup;
use rustix::thread::CpuSet;
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
/// A worker only calls the kernel.
const STACK_BYTES: usize = 128 << 10;
/// Room for what workers have begun, and for what they have given to one call.
const BEGUN: u32 = 1024;
const TOGETHER: u32 = 256;
/// So many results of calls that follow each other are told at once.
const TOLD_AT_ONCE: usize = 16;
/// The result of what the kernel has not carried out with others, and a worker shall by a call of its own.
pub(crate) const ALONE: i32 = i32::MIN;

/// Looked at again and again: on a cache line of its own, so that what is written beside it does not take it away.
#[derive(Default)]
#[repr(align(64))]
struct Polled<T>(T);

/// What the reactor and its workers share.
pub(crate) struct Pool {
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
    /// What workers only begin, and what one call carries out of the page cache's. Made when they are first needed;
    /// `None` where they cannot be had.
    begun: OnceLock<Option<Given>>,
    together: OnceLock<Option<Given>>,
    /// Calls that workers have made.
    calls: AtomicU64,
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

impl Pool {
    pub(crate) fn new(wakeup: Arc<Wakeup>, processors: Option<CpuSet>, spin_limit: Duration) -> Self {
        Self {
            queue: Mutex::default(),
            more: Condvar::new(),
            batches: Polled::default(),
            done: Mutex::default(),
            has_done: Polled::default(),
            progress: Condvar::new(),
            stopped: Condvar::new(),
            begun: OnceLock::new(),
            together: OnceLock::new(),
            calls: AtomicU64::new(0),
            wakeup,
            spin_limit: spin_limit.min(SPIN_MAX),
            processors,
        }
    }
}

/// The reactor's side.
impl Pool {
    /// All lists are to hold `count` requests.
    pub(crate) fn make_room(&self, count: usize) {
        let all = &mut locked(&self.done).all;
        all.reserve(count.saturating_sub(all.len()));
        locked(&self.queue).make_room(count);
    }

    /// Hands a batch to the workers, starting as many as are needed.
    pub(crate) fn give(this: &Arc<Self>, batch: impl Iterator<Item = Job>) {
        let wanted = locked(&this.queue).add_batch(batch, MAX_WORKERS);
        if wanted.spinner {
            // It had seen no batch of this number under the lock.
            this.batches.0.fetch_add(1, Ordering::Relaxed);
        }
        for _ in 0..wanted.to_wake {
            this.more.notify_one();
        }
        for _ in 0..wanted.to_start {
            Self::start_worker(this);
        }
    }

    fn start_worker(this: &Arc<Self>) {
        if let Err(error) = spawn(Arc::clone(this)) {
            let mut queue = locked(&this.queue);
            queue.threads -= 1;
            if queue.threads > 0 {
                return;
            }
            drop(queue);
            // Nobody else is there to do it: slow is better than never.
            tracing::warn!(%error, "cannot start an I/O worker; the reactor does the work itself");
            this.drain_queue();
        }
    }

    fn drain_queue(&self) {
        let mut group = Group::default();
        while locked(&self.queue).take(&mut group) {
            self.carry_out(&mut group);
        }
    }

    /// Calls that workers have made so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Whether there are results, of those that are told.
    pub(crate) fn has_told(&self) -> bool {
        self.has_done.0.load(Ordering::Acquire) || self.given(How::Begin).is_some_and(Given::has_events)
    }

    #[cfg(test)]
    pub(crate) fn has_been_told(&self) -> bool {
        self.has_done.0.load(Ordering::Acquire)
    }

    /// Takes what was told, and whatever else has ended then. `results` is empty, and has room.
    pub(crate) fn take_results(&self, results: &mut Vec<(u32, i32)>) {
        let mut told = None;
        if self.has_done.0.load(Ordering::Acquire) {
            self.has_done.0.store(false, Ordering::Relaxed);
            std::mem::swap(results, &mut locked(&self.done).all);
            told = self.given(How::Together);
        }
        for given in self.given(How::Begin).into_iter().chain(told) {
            // A call of its own is repeated.
            given.take(|index, result| results.push((index, if result == -libc::EAGAIN { ALONE } else { result })));
        }
    }

    /// Whether there are results, told or not; then they count as told.
    pub(crate) fn look_for_results(&self) -> bool {
        let some = self.has_told() || self.has_untold(&locked(&self.done));
        if some {
            self.has_done.0.store(true, Ordering::Relaxed);
        }
        some
    }

    fn has_untold(&self, done: &Results) -> bool {
        !done.all.is_empty() || self.given(How::Together).is_some_and(Given::has_events)
    }

    /// Until there are results, or for a while.
    pub(crate) fn wait_for_results(&self) {
        let mut done = locked(&self.done);
        done.awaited = true;
        // What the kernel was given may end without a word here.
        let is_given = self.given(How::Begin).or(self.given(How::Together)).is_some();
        let limit = if is_given { Duration::from_millis(1) } else { IDLE_LIMIT };
        drop(self.progress.wait_timeout_while(done, limit, |done| !self.has_untold(done)));
        self.look_for_results();
    }

    /// Waits for every worker.
    pub(crate) fn stop(&self) {
        let mut queue = locked(&self.queue);
        queue.stop = true;
        self.more.notify_all();
        while queue.threads > 0 {
            queue = self.stopped.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has what workers carry out so, if anything has. Its ends are only for the reactor.
    fn given(&self, how: How) -> Option<&Given> {
        match how {
            How::Call => None,
            How::Together => self.together.get()?.as_ref(),
            How::Begin => self.begun.get()?.as_ref(),
        }
    }

    /// Makes it if need be. Returns whether it can be had.
    pub(crate) fn make_given(&self, how: How) -> bool {
        match how {
            How::Call => false,
            How::Together => self.together.get_or_init(|| Given::new(TOGETHER)).is_some(),
            How::Begin => self.begun.get_or_init(|| Given::new(BEGUN)).is_some(),
        }
    }
}

/// The workers' side.
impl Pool {
    fn work(&self) {
        if let Some(processors) = &self.processors {
            // Fails where fewer are allowed by now; then the worker runs where the reactor does.
            let _ = rustix::thread::sched_setaffinity(None, processors);
        }
        let mut pace = Pace::new(self.spin_limit);
        let mut group = Group::default();
        while self.next(&mut pace, &mut group) {
            pace.busy();
            self.carry_out(&mut group);
        }
    }

    /// Takes what is next; nothing when this worker shall end, and then it is no longer counted.
    fn next(&self, pace: &mut Pace, group: &mut Group) -> bool {
        let mut queue = locked(&self.queue);
        loop {
            if queue.take(group) {
                return true;
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
        false
    }

    /// Until another batch was given or spinning does not pay.
    fn spin(&self, batches: u64, pace: &mut Pace) {
        while self.batches.0.load(Ordering::Relaxed) == batches && !pace.is_time_to_sleep(Instant::now()) {
            // The reactor may need this very processor.
            std::thread::yield_now();
        }
    }

    /// Carries out what was taken, and what follows it in turn.
    fn carry_out(&self, group: &mut Group) {
        while let Some(&first) = group.first() {
            let awaited = match (first.how, self.given(first.how)) {
                (How::Begin, Some(given)) => {
                    // An end that comes signals by itself; what was refused does not wait for what is begun after it.
                    let alone = |job: &Job| self.tell(self.call_for(job));
                    given.submit(group, Some(&self.wakeup), &self.calls, alone);
                    self.take_after(&first, group);
                    continue;
                }
                (_, Some(given)) if group.len() > 1 => {
                    given.submit(group, None, &self.calls, |job| _ = self.call_for(job));
                    locked(&self.done).awaited
                }
                _ => self.call_for_each(group),
            };
            self.take_after(&first, group);
            self.tell(awaited);
        }
    }

    fn call_for_each(&self, group: &Group) -> bool {
        let mut awaited = false;
        for (place, job) in group.jobs().enumerate() {
            if place > 0 && place.is_multiple_of(TOLD_AT_ONCE) {
                self.tell(awaited);
            }
            awaited = self.call_for(job);
        }
        awaited
    }

    /// Returns whether the reactor waits for results.
    fn call_for(&self, job: &Job) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let result = job.run();
        let mut done = locked(&self.done);
        done.all.push((job.index, result));
        done.awaited
    }

    /// Takes what the same worker goes on with, which may be nothing.
    fn take_after(&self, job: &Job, group: &mut Group) {
        let mut queue = locked(&self.queue);
        if !job.in_turn {
            queue.ended(job);
        }
        if !job.in_turn || !queue.take_next_in_turn(job, group) {
            group.become_one(None);
        }
    }

    fn tell(&self, awaited: bool) {
        self.has_done.0.store(true, Ordering::Release);
        self.wakeup.wake();
        if awaited {
            self.progress.notify_all();
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
