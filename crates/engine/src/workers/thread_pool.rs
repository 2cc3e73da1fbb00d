//! The thread pool: an engine of its own, which also carries out requests that the other engines would have to wait
//! for.
//!
//! A worker gets only numbers and raw pointers. The request, with its file and memory, stays in the reactor's slab
//! until the worker's result has come back. The pool is shut down before the slab is dropped.
//!
//! Files in memory are an exception: copying their bytes takes less time than waking a worker. The reactor carries out
//! their short requests itself, without a system call if possible (see `file::mapped`). It does so when it submits, or
//! at once if a task awaits the result. Then the task goes on without being woken, and finds the data in the
//! processor's cache. The bytes that tasks may copy in a turn are limited, so that rings and other tasks get their
//! turn. Transfers that take a call wait for the end of the turn, where one call carries them all out.

use super::batch::Batch;
use super::job::Job;
use super::pool::{ALONE, Pool};
use crate::base::call::Action;
use crate::base::harvest::Harvest;
use crate::base::io_submit::{IoSubmit, MOST};
use crate::base::stats::Counters;
use crate::base::wakeup::Wakeup;
use crate::file::open_file::Storage;
use crate::request::carry_out;
use crate::request::progress::{Request, Step};
use crate::request::slab::Slab;
use crate::route::{How, Now, Route, ends_in_turn, route};
use block::{Done, IoError, Work};
use memory::to_usize;
use rustix::thread::CpuSet;
use std::cell::{Cell, OnceCell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The least room of the lists, in requests.
const LEAST_ROOM: usize = 256;
/// The bytes that tasks may copy at once between two submits, and the bytes that each request adds to its length in
/// that count.
const AT_ONCE_BYTES: usize = 4 << 20;
const CALL_BYTES: usize = 4 << 10;

/// The jobs that the reactor carries out itself when it submits.
struct Inline {
    jobs: Vec<Job>,
    done: Vec<(u32, i32)>,
    /// Transfers that need a call: one call carries them all out.
    batch: Batch,
    /// Holds `None` if Linux AIO is not available.
    io_submit: OnceCell<Option<IoSubmit>>,
}

/// One reactor's workers.
pub(crate) struct Workers {
    slab: RefCell<Slab>,
    /// Jobs for workers since the last submit.
    taken: RefCell<Vec<Job>>,
    inline: RefCell<Inline>,
    harvested: RefCell<Harvest<(u32, i32)>>,
    /// The longest copy that the reactor makes itself.
    inline_bytes: usize,
    /// Bytes that tasks may still copy before the next submit.
    at_once_bytes: Cell<usize>,
    /// Jobs that workers carry out one after the other, and may not signal at once.
    in_turn: Cell<usize>,
    /// The number of requests that all lists have room for.
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
        let inline = Inline { jobs: Vec::new(), done: Vec::new(), batch: Batch::default(), io_submit: OnceCell::new() };
        Self {
            slab: RefCell::default(),
            taken: RefCell::default(),
            inline: RefCell::new(inline),
            harvested: RefCell::new(Harvest::with_capacity(0)),
            inline_bytes,
            at_once_bytes: Cell::new(AT_ONCE_BYTES),
            in_turn: Cell::new(0),
            room: Cell::new(0),
            pool: Arc::new(Pool::new(wakeup, processors, spin_limit)),
            counters,
            closed: Cell::new(false),
        }
    }

    /// Takes a request; workers see it with the next [`Workers::submit`]. A request that a task awaits may have ended
    /// on return.
    pub(crate) fn push(&self, request: Request) {
        self.counters.requests.add(1);
        let in_memory = request.target.traits.storage == Storage::Memory;
        if in_memory && matches!(request.done, Done::Waiter(_)) && !self.closed.get() {
            if let Some(request) = self.carry_out_at_once(request) {
                self.take_over(request);
            }
        } else {
            self.take_over(request);
        }
    }

    /// Carries out a request that a task awaits, if it is short, on a file in memory, and need not wait for others.
    /// Otherwise returns it.
    fn carry_out_at_once(&self, request: Request) -> Option<Request> {
        let length_bytes = self.length_of(&request);
        let cost_bytes = length_bytes.saturating_add(CALL_BYTES);
        let Some(left_bytes) = self.at_once_bytes.get().checked_sub(cost_bytes) else { return Some(request) };
        let by_reactor = |request: &Request, needs_call| {
            let now = self.now(request, needs_call);
            route(request.target.traits, request.action, length_bytes, now) == Route::Reactor
        };
        if !by_reactor(&request, false) {
            return Some(request);
        }
        let calls = match carry_out::run_without_call(request) {
            None => 0,
            // One call carries out all transfers of a turn that need one.
            Some(left) if left.action.is_transfer() || !by_reactor(&left, true) => return Some(left),
            Some(left) => carry_out::run(left),
        };
        self.at_once_bytes.set(left_bytes);
        self.counters.completions.add(1);
        self.counters.system_calls.add(calls);
        None
    }

    /// Returns how many bytes of a file in memory are moved, zeroed or freed.
    fn length_of(&self, request: &Request) -> usize {
        let Action::Fallocate { mode, length } = request.action else { return request.left_bytes() };
        let frees = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
        match to_usize(length) {
            // Behind the end of the file there is nothing to free, however long it is.
            length if length > self.inline_bytes && frees && request.target.file.ends_by(request.offset) => 0,
            length => length,
        }
    }

    fn now(&self, request: &Request, needs_call: bool) -> Now {
        let waits_for_workers = needs_call && request.target.file.is_changed_by_workers();
        Now { declined: true, inline_bytes: self.inline_bytes, waits_for_workers, ..Now::of(&request.target) }
    }

    /// Takes over a request that another engine could not finish, or ends it.
    #[inline]
    pub(crate) fn take_back(&self, request: Request, step: Step, counters: &Counters) {
        match step {
            Step::Finished(result) => {
                counters.completions.add(1);
                request.finish(result);
            }
            Step::Again | Step::ToWorker => self.take_over(request),
        }
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
        self.queue(&mut slab, index, true);
    }

    /// Makes room in all lists for `count` requests: all may wait, or end, at once.
    #[cold]
    fn make_room(&self, count: usize) {
        fn grow<T>(list: &mut Vec<T>, count: usize) {
            list.reserve(count.saturating_sub(list.len()));
        }
        grow(&mut self.taken.borrow_mut(), count);
        let mut inline = self.inline.borrow_mut();
        grow(&mut inline.jobs, count);
        // The lists of both harvests get results of both kinds.
        grow(&mut inline.done, count);
        if let Ok(mut harvested) = self.harvested.try_borrow_mut() {
            grow(harvested.list(), count);
            self.room.set(count);
        }
        self.pool.make_room(count);
    }

    /// Queues a request for the reactor or for workers. Without `may_batch`, it gets a call of its own.
    fn queue(&self, slab: &mut Slab, index: u32, may_batch: bool) {
        let buffers = slab.buffers(index);
        let Some(request) = slab.get(index) else { return };
        let (call, length_bytes) = (request.call(buffers), request.left_bytes());
        let job = Job { index, serialized: false, how: How::Call, length_bytes, call };
        let now = Now { io_submit: may_batch, ..self.now(request, false) };
        // Only for files in memory does learning the length take a system call.
        let in_memory = request.target.traits.storage == Storage::Memory;
        let length_bytes = if in_memory { self.length_of(request) } else { length_bytes };
        match route(request.target.traits, request.action, length_bytes, now) {
            Route::Worker { how, serialized } => self.leave_to_worker(request, Job { how, serialized, ..job }),
            Route::Engine | Route::Reactor => self.inline.borrow_mut().jobs.push(job),
        }
    }

    fn leave_to_worker(&self, request: &Request, job: Job) {
        let (traits, action) = (request.target.traits, request.action);
        let job = match self.pool.prepare(job.how) {
            true => job,
            // Without Linux AIO each job takes a call.
            false => {
                let now = Now { io_submit: false, ..self.now(request, true) };
                match route(traits, action, job.length_bytes, now) {
                    Route::Worker { how, serialized } => Job { how, serialized, ..job },
                    Route::Engine | Route::Reactor => job,
                }
            }
        };
        if ends_in_turn(traits, action) {
            self.in_turn.update(|count| count + 1);
            if traits.storage == Storage::Memory {
                request.target.file.changes_by_workers.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.taken.borrow_mut().push(job);
    }

    /// Hands the batch to the workers, starting as many as are needed. Returns whether there was any.
    pub(crate) fn submit(&self) -> bool {
        self.at_once_bytes.set(AT_ONCE_BYTES);
        self.copy_inline() | self.submit_batch()
    }

    fn copy_inline(&self) -> bool {
        let mut inline = self.inline.borrow_mut();
        if inline.jobs.is_empty() {
            return false;
        }
        let Inline { jobs, done, batch, io_submit } = &mut *inline;
        let (slab, mut calls) = (self.slab.borrow(), 0);
        for job in jobs.drain(..) {
            let Some(request) = slab.get(job.index) else { continue };
            let (file, action) = (&*request.target.file, request.action);
            let by_reactor = || route(request.target.traits, action, 0, self.now(request, true)) == Route::Reactor;
            // SAFETY: the slab's request keeps the memory.
            match unsafe { file.without_call(&job.call) } {
                Some(result) => done.push((job.index, result)),
                None if !by_reactor() => self.leave_to_worker(request, Job { serialized: true, ..job }),
                None if action.is_transfer() => {
                    if batch.add(job) {
                        calls += carry_out_batch(batch, io_submit, done);
                    }
                }
                None => {
                    // Changes keep their order.
                    calls += carry_out_batch(batch, io_submit, done) + 1;
                    done.push((job.index, job.run()));
                }
            }
        }
        calls += carry_out_batch(batch, io_submit, done);
        self.counters.system_calls.add(calls);
        true
    }

    fn submit_batch(&self) -> bool {
        let mut taken = self.taken.borrow_mut();
        if taken.is_empty() {
            return false;
        }
        Pool::give(&self.pool, taken.drain(..));
        true
    }

    /// Takes results. Returns how many.
    pub(crate) fn harvest(&self) -> usize {
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        if self.pool.has_signalled() {
            self.take_results(harvested.list());
        }
        {
            let mut inline = self.inline.borrow_mut();
            if !inline.done.is_empty() {
                harvested.list().append(&mut inline.done);
            }
        }
        let count = harvested.waiting().len();
        if count == 0 {
            return 0;
        }
        self.counters.harvested(count);
        while let Some((index, result)) = harvested.next() {
            self.complete(index, result);
        }
        count
    }

    fn take_results(&self, results: &mut Vec<(u32, i32)>) {
        let before = results.len();
        self.pool.take_results(results);
        self.counters.worker_calls.set(self.pool.calls());
        let slab = self.slab.borrow();
        for request in results[before..].iter().filter_map(|(index, _)| slab.get(*index)) {
            let traits = request.target.traits;
            if ends_in_turn(traits, request.action) {
                self.in_turn.update(|count| count - 1);
                if traits.storage == Storage::Memory {
                    request.target.file.changes_by_workers.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn complete(&self, index: u32, result: i32) {
        let mut slab = self.slab.borrow_mut();
        if result == ALONE {
            return self.queue(&mut slab, index, false);
        }
        let Some(request) = slab.get_mut(index) else { return };
        let result = match request.advance(result) {
            Step::Again => return self.queue(&mut slab, index, true),
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

    /// Whether there is something to submit or to take. This also finds results that are not signalled; the next
    /// harvest takes them.
    pub(crate) fn has_work(&self) -> bool {
        let inline = self.inline.borrow();
        !self.taken.borrow().is_empty()
            || !inline.jobs.is_empty()
            || !inline.done.is_empty()
            || self.pool.look_for_results()
    }

    /// Whether there may be results that workers do not signal at once.
    pub(crate) fn may_be_unsignalled(&self) -> bool {
        self.in_turn.get() > 0
    }

    /// Looks for results that are not signalled. The next harvest takes them.
    pub(crate) fn look_for_unsignalled(&self) {
        self.pool.look_for_results();
    }

    /// Returns how many requests were taken and have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.slab.borrow().live()
    }

    /// Makes a worker compute something for the file with this number. After shutdown the work is dropped.
    pub(crate) fn run_aside(&self, file: u64, work: Work) {
        if !self.closed.get() {
            Pool::give_work(&self.pool, file, work);
        }
    }

    /// Whether workers have computations that have not ended.
    pub(crate) fn is_computing(&self) -> bool {
        self.pool.computations() > 0
    }

    /// Waits for all jobs, then for all workers. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        while self.in_flight() > 0 {
            self.submit();
            if self.harvest() == 0 {
                self.pool.wait_for_results();
            }
        }
        self.closed.set(true);
        self.pool.stop();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// Carries a batch out, and adds the results to `done`. Returns how many system calls that took.
fn carry_out_batch(batch: &mut Batch, io_submit: &OnceCell<Option<IoSubmit>>, done: &mut Vec<(u32, i32)>) -> u64 {
    let mut calls = 0;
    let many = batch.len() > 1;
    let context = if many { io_submit.get_or_init(|| IoSubmit::new(MOST as u32)).as_ref() } else { None };
    match context {
        None => {
            calls += batch.len() as u64;
            done.extend(batch.jobs().map(|job| (job.index, job.run())));
        }
        Some(context) => {
            let mut refused = 0;
            let alone = |at| {
                refused += 1;
                done.extend(batch.jobs().nth(at).map(|job| (job.index, job.run())));
            };
            // SAFETY: the slab's requests keep memory and files until their results have come.
            let mut left = unsafe { context.submit(batch.calls(), None, || calls += 1, alone) };
            calls += refused;
            // For files in memory, all transfers have ended when the call returns.
            while left > 0 {
                context.take(|index, result| {
                    left -= 1;
                    // The request is repeated by a call of its own.
                    done.push((index, if result == -libc::EAGAIN { ALONE } else { result }));
                });
            }
        }
    }
    batch.become_one(None);
    calls
}

#[cfg(test)]
#[path = "thread_pool_tests.rs"]
mod tests;
