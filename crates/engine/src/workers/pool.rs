//! A reactor's worker threads, and how jobs and results pass between reactor and workers.

use super::batch::Batch;
use super::job::Job;
use super::job_queue::{Queue, Spinner, Wanted};
use super::mailbox::{Mailbox, Results};
use crate::base::io_submit::IoSubmit;
use crate::base::pace::Pace;
use crate::base::wakeup::Wakeup;
use crate::route::How;
use block::Work;
use rustix::thread::CpuSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The most workers of one reactor, far more than a few files take (see `job_queue`). Beyond that, jobs wait until a
/// worker is free.
const MAX_WORKERS: usize = 512;
/// How long a worker without work lives.
const IDLE_LIMIT: Duration = Duration::from_secs(10);
/// The longest time that a worker spins. A job that comes later is worth a wake-up.
const SPIN_MAX: Duration = Duration::from_micros(100);
/// Enough for system calls, and for computations that need little stack.
const STACK_BYTES: usize = 256 << 10;
/// The sizes of the two contexts of Linux AIO: for requests that workers only begin, and for batches that they carry
/// out.
const BEGUN: u32 = 1024;
const BATCHED: u32 = 256;
/// Stands for the result of a job that the kernel did not carry out in a batch: it gets a call of its own.
pub(crate) const ALONE: i32 = i32::MIN;

/// A number that is polled. It has a cache line of its own, as the mailbox's flag has.
#[derive(Default)]
#[repr(align(64))]
struct Polled(AtomicU64);

/// The state that the reactor and its workers share.
pub(crate) struct Pool {
    queue: Mutex<Queue>,
    /// Signalled when there are jobs or the pool stops.
    more: Condvar,
    /// Grows when there is a job for a spinning worker. Written after the queue, with release: a worker that sees the
    /// new number finds the jobs.
    batches: Polled,
    done: Mailbox,
    /// With `done`: a result came in. The reactor waits for it only while it shuts down.
    progress: Condvar,
    /// With `queue`: a worker ended because the pool stops.
    stopped: Condvar,
    /// Contexts for requests that workers only begin, and for batches on the page cache. Made when first needed; `None`
    /// if Linux AIO is not available.
    begun: OnceLock<Option<IoSubmit>>,
    batched: OnceLock<Option<IoSubmit>>,
    /// Calls that workers have made.
    calls: AtomicU64,
    wakeup: Arc<Wakeup>,
    /// The longest time that a worker without work spins. The worker adapts below this, as the reactor does.
    spin_limit: Duration,
    /// The processors that workers may run on. A reactor that is bound to one processor does not bind its workers.
    processors: Option<CpuSet>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub(crate) fn new(wakeup: Arc<Wakeup>, processors: Option<CpuSet>, spin_limit: Duration) -> Self {
        Self {
            queue: Mutex::default(),
            more: Condvar::new(),
            batches: Polled::default(),
            done: Mailbox::default(),
            progress: Condvar::new(),
            stopped: Condvar::new(),
            begun: OnceLock::new(),
            batched: OnceLock::new(),
            calls: AtomicU64::new(0),
            wakeup,
            spin_limit: spin_limit.min(SPIN_MAX),
            processors,
        }
    }
}

/// The reactor's side.
impl Pool {
    /// Makes room for `count` requests in all lists.
    pub(crate) fn make_room(&self, count: usize) {
        let all = &mut self.done.results().all;
        all.reserve(count.saturating_sub(all.len()));
        locked(&self.queue).make_room(count);
    }

    /// Hands a batch to the workers, starting as many as are needed.
    pub(crate) fn give(this: &Arc<Self>, batch: impl Iterator<Item = Job>) {
        let wanted = locked(&this.queue).add_batch(batch, MAX_WORKERS);
        Self::see_to_workers(this, wanted);
    }

    /// Hands a computation for a file to a worker at once, without waiting for the next submit.
    pub(crate) fn give_work(this: &Arc<Self>, file: u64, work: Work) {
        let wanted = locked(&this.queue).add_work(file, work, MAX_WORKERS);
        Self::see_to_workers(this, wanted);
    }

    /// Returns how many computations have not ended.
    pub(crate) fn computations(&self) -> usize {
        locked(&self.queue).computations.live()
    }

    fn see_to_workers(this: &Arc<Self>, wanted: Wanted) {
        if wanted.spinner {
            // The spinning worker read the old number under the lock.
            this.batches.0.fetch_add(1, Ordering::Release);
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
            // There is no worker at all, so the reactor does the work: slow is better than never.
            tracing::warn!(%error, "cannot start an I/O worker; the reactor does the work itself");
            this.drain_queue();
        }
    }

    fn drain_queue(&self) {
        let mut batch = Batch::default();
        while locked(&self.queue).take(&mut batch) {
            self.carry_out(&mut batch);
        }
    }

    /// Returns how many calls workers have made so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Whether there are signalled results.
    pub(crate) fn has_signalled(&self) -> bool {
        self.done.has_signal() || self.io_submit(How::Begin).is_some_and(IoSubmit::has_events)
    }

    #[cfg(test)]
    pub(crate) fn has_been_signalled(&self) -> bool {
        self.done.has_signal()
    }

    /// Takes the signalled results, and those of batches. `results` has room.
    pub(crate) fn take_results(&self, results: &mut Vec<(u32, i32)>) {
        let mut batched = None;
        if self.done.take_signal() {
            let all = &mut self.done.results().all;
            match results.is_empty() {
                // A swap, so that both lists keep their room.
                true => std::mem::swap(results, all),
                false => results.append(all),
            }
            batched = self.io_submit(How::Batch);
        }
        for ended in self.io_submit(How::Begin).into_iter().chain(batched) {
            // The request is repeated by a call of its own.
            ended.take(|index, result| results.push((index, if result == -libc::EAGAIN { ALONE } else { result })));
        }
    }

    /// Whether there are results, signalled or not. If so, they count as signalled from then on.
    pub(crate) fn look_for_results(&self) -> bool {
        let some = self.has_signalled() || self.has_unsignalled(&self.done.results());
        if some {
            self.done.signal();
        }
        some
    }

    fn has_unsignalled(&self, done: &Results) -> bool {
        !done.all.is_empty() || self.io_submit(How::Batch).is_some_and(IoSubmit::has_events)
    }

    /// Waits until there are results, for a limited time.
    pub(crate) fn wait_for_results(&self) {
        let mut done = self.done.results();
        done.awaited = true;
        // The kernel's results do not notify this condition variable, so the wait is short.
        let is_given = self.io_submit(How::Begin).or(self.io_submit(How::Batch)).is_some();
        let limit = if is_given { Duration::from_millis(1) } else { IDLE_LIMIT };
        drop(self.progress.wait_timeout_while(done, limit, |done| !self.has_unsignalled(done)));
        self.look_for_results();
    }

    /// Stops the workers and waits for all of them.
    pub(crate) fn stop(&self) {
        let mut queue = locked(&self.queue);
        queue.stop = true;
        self.more.notify_all();
        while queue.threads > 0 {
            queue = self.stopped.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the context for this way of carrying jobs out, if there is one. Only the reactor takes from its ring.
    fn io_submit(&self, how: How) -> Option<&IoSubmit> {
        match how {
            How::Call => None,
            How::Batch => self.batched.get()?.as_ref(),
            How::Begin => self.begun.get()?.as_ref(),
        }
    }

    /// Prepares workers for this way of carrying jobs out. Returns whether they can.
    pub(crate) fn prepare(&self, how: How) -> bool {
        match how {
            How::Call => true,
            How::Batch => self.batched.get_or_init(|| IoSubmit::new(BATCHED)).is_some(),
            How::Begin => self.begun.get_or_init(|| IoSubmit::new(BEGUN)).is_some(),
        }
    }
}

/// The workers' side.
impl Pool {
    fn work(&self) {
        if let Some(processors) = &self.processors {
            // Fails if fewer processors are allowed by now. Then the worker runs where the reactor does.
            let _ = rustix::thread::sched_setaffinity(None, processors);
        }
        let mut pace = Pace::new(self.spin_limit);
        let mut batch = Batch::default();
        while self.next(&mut pace, &mut batch) {
            pace.busy();
            self.carry_out(&mut batch);
        }
    }

    /// Takes the next jobs. Returns false if this worker must end; it is no longer counted then.
    fn next(&self, pace: &mut Pace, batch: &mut Batch) -> bool {
        let mut queue = locked(&self.queue);
        loop {
            if queue.take(batch) {
                return true;
            }
            if queue.stop {
                break;
            }
            // One spinning worker is enough: it takes the reactor's next job without being woken.
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

    /// Spins until another batch comes or spinning does not pay.
    fn spin(&self, batches: u64, pace: &mut Pace) {
        while self.batches.0.load(Ordering::Acquire) == batches && !pace.is_time_to_sleep(Instant::now()) {
            // The reactor may need this processor.
            std::thread::yield_now();
        }
    }

    /// Carries out a batch, then the jobs that follow it on the same file.
    fn carry_out(&self, batch: &mut Batch) {
        if let Some(work) = batch.take_work() {
            // If a computation panics, its closure is dropped, and the task that waits for it gets an error.
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                tracing::error!("a computation on an I/O worker panicked");
            }
            return locked(&self.queue).computations.ended();
        }
        while let Some(&first) = batch.first() {
            let before_call = || _ = self.calls.fetch_add(1, Ordering::Relaxed);
            let awaited = match (first.how, self.io_submit(first.how)) {
                (How::Begin, Some(begun)) => {
                    // The kernel signals each end. A refused request is signalled at once, and does not wait for those
                    // begun after it.
                    let alone = |at| batch.jobs().nth(at).into_iter().for_each(|job| self.signal(self.call_for(job)));
                    // SAFETY: the slab's requests keep memory and files until their results have come.
                    unsafe { begun.submit(batch.calls(), Some(&self.wakeup), before_call, alone) };
                    self.take_after(&first, batch);
                    continue;
                }
                (_, Some(batched)) if batch.len() > 1 => {
                    let alone = |at| batch.jobs().nth(at).into_iter().for_each(|job| _ = self.call_for(job));
                    // SAFETY: as above.
                    unsafe { batched.submit(batch.calls(), None, before_call, alone) };
                    self.done.results().awaited
                }
                _ => batch.jobs().fold(false, |_, job| self.call_for(job)),
            };
            self.take_after(&first, batch);
            self.signal(awaited);
        }
    }

    /// Carries a job out by a call of its own. Returns whether the reactor waits for results.
    fn call_for(&self, job: &Job) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let result = job.run();
        let mut done = self.done.results();
        done.all.push((job.index, result));
        done.awaited
    }

    /// Takes the jobs that the same worker carries out after `job`, if any.
    fn take_after(&self, job: &Job, batch: &mut Batch) {
        let mut queue = locked(&self.queue);
        if !job.serialized {
            queue.ended(job);
        }
        if !job.serialized || !queue.take_next_serialized(job, batch) {
            batch.become_one(None);
        }
    }

    fn signal(&self, awaited: bool) {
        self.done.signal();
        self.wakeup.wake();
        if awaited {
            self.progress.notify_all();
        }
    }
}

/// Starts a worker. Not by `std::thread`: workers may start at any time, and it would allocate handles, names and
/// results each time. The C library maps a stack, or uses a kept one.
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
    // SAFETY: no thread was started that would own the reference.
    drop(unsafe { Arc::from_raw(pool) });
    Err(io::Error::from_raw_os_error(error))
}
