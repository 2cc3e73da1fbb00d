//! The thread pool: an engine of its own, and where the other engines send what they cannot do without blocking.
//!
//! Only numbers and raw pointers travel to a worker. The request, with the file and the memory it names, stays in the
//! reactor's slab until the worker's result has come back, and the pool is shut down before the slab goes.
//!
//! Files that lie in memory are an exception: their bytes are only copied, which takes less time than to wake somebody.
//! Their small transfers the reactor does itself, without a call where it can (see `file::mapped`): when it submits, or, where
//! a task awaits the end, at once. The task goes on without being woken, and finds in the processor's cache what it has
//! just read; what tasks may copy in a turn is limited, so that rings and other tasks come round. What takes a call waits
//! for the end of the turn, for one call carries it all out (see `together`). What may be left to the reactor, `inline`
//! says.

use crate::given;
use crate::inflight::{Action, Request, Slab, Step};
use crate::inline::{goes_in_turn, is_inline, waits_for_workers};
use crate::job_queue::{How, Job};
use crate::stats::Counters;
use crate::together::Together;
use crate::wakeup::Wakeup;
use crate::worker_pool::{ALONE, Pool};
use block::{Done, IoError};
use rustix::thread::CpuSet;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Requests for which lists have room at least.
const LEAST_ROOM: usize = 256;
/// What tasks may copy at once between two submits, and what each call counts for at least.
const AT_ONCE_BYTES: usize = 4 << 20;
const CALL_BYTES: usize = 4 << 10;

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
            pool: Arc::new(Pool::new(wakeup, processors, spin_limit)),
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
                match crate::blocking::run_without_call(request) {
                    None => {
                        self.at_once_bytes.set(left_bytes);
                        return self.counters.completions.add(1);
                    }
                    Some(left) => request = left,
                }
                // One call carries out all transfers of a turn that need one.
                if !Together::takes(request.action) && !waits_for_workers(&request) {
                    self.at_once_bytes.set(left_bytes);
                    self.counters.completions.add(1);
                    return self.counters.system_calls.add(crate::blocking::run(request));
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
        if let Ok(mut harvested) = self.harvested.try_borrow_mut() {
            grow(&mut harvested, count);
            self.room.set(count);
        }
        self.pool.make_room(count);
    }

    fn queue(&self, slab: &mut Slab, index: u32) {
        let buffers = slab.buffers(index);
        if let Some(request) = slab.get(index) {
            let fd = request.target.file.raw_fd();
            let (offset, length_bytes) = (request.file_offset(), request.left_bytes());
            let action = request.action;
            let (in_turn, how) = (false, How::Call);
            let job = Job { index, fd, in_turn, how, action, offset, length_bytes, buffers };
            match is_inline(request, self.inline_bytes) {
                true => self.inline.borrow_mut().push(job),
                false => self.leave_to_worker(request, job),
            }
        }
    }

    /// For a worker, and none with it.
    #[cold]
    fn queue_alone(&self, slab: &mut Slab, index: u32) {
        self.queue(slab, index);
        if let Some(job) = self.batch.borrow_mut().last_mut().filter(|job| job.index == index) {
            job.how = How::Call;
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
        let how = given::way_of(request);
        let is_there = self.pool.make_given(how);
        // Without Linux AIO each has a worker that waits for its end. (What goes in turn takes a call each then.)
        let how = if how == How::Begin && !is_there { How::Call } else { how };
        // One worker begins a file's writes: the next waits for little but the one before.
        let in_turn = in_turn || (how == How::Begin && !job.is_read());
        self.batch.borrow_mut().push(Job { in_turn, how, ..job });
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
        let (slab, mut calls) = (self.slab.borrow(), 0);
        let mut done = self.inline_done.borrow_mut();
        let mut together = self.together.borrow_mut();
        for job in jobs.drain(..) {
            let Some(request) = slab.get(job.index) else { continue };
            let file = &*request.target.file;
            // SAFETY: the slab's request keeps the memory.
            match unsafe { file.without_call(job.action, job.offset, job.buffers) } {
                Some(result) => done.push((job.index, result)),
                None if waits_for_workers(request) => self.leave_to_worker(request, job),
                None if Together::takes(job.action) => {
                    if together.add(job) {
                        calls += together.run(&mut done);
                    }
                }
                None => {
                    // Changes keep their order.
                    calls += together.run(&mut done) + 1;
                    done.push((job.index, job.run()));
                }
            }
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
        Pool::give(&self.pool, batch.drain(..));
        true
    }

    /// Takes results. Returns how many requests moved.
    pub(crate) fn harvest(&self) -> usize {
        if !self.pool.has_told() && self.inline_done.borrow().is_empty() {
            return 0;
        }
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        self.pool.take_results(&mut harvested);
        if !harvested.is_empty() {
            self.counters.worker_calls.set(self.pool.calls());
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
        if result == ALONE {
            return self.queue_alone(&mut slab, index);
        }
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
        pushed || !self.inline_done.borrow().is_empty() || self.pool.look_for_results()
    }

    /// Whether there may be results that workers do not tell at once.
    pub(crate) fn may_be_untold(&self) -> bool {
        self.in_turn.get() > 0
    }

    /// Looks for them; they are taken with the next harvest.
    pub(crate) fn look_for_untold(&self) {
        self.pool.look_for_results();
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

#[cfg(test)]
#[path = "threads_tests.rs"]
mod tests;
