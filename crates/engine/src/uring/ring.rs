//! The io_uring engine: one ring for each reactor, submitted once a turn.
//!
//! When fewer requests are in the kernel than wait in the queue, the ring asks for the end of the batch ([`BatchEnd`]).
//! So the disk works while the next batch is prepared, and a busy disk gets long batches. Either way a turn takes one
//! system call at most, which submits and fetches.
//!
//! The ring belongs to one thread. Its completions run only when that thread enters the kernel to fetch them (deferred
//! task work), so nothing interrupts the reactor. The kernel raises a flag in the shared ring when there is something
//! to fetch, so a turn without work costs two loads.

use super::entry::entry_of;
use super::fixed_buffers::{FixedBuffers, SLOTS};
use super::setup::{self, Setup};
use crate::base::call::Action;
use crate::base::harvest::Harvest;
use crate::base::stats::Counters;
use crate::base::wakeup::Wakeup;
use crate::file::open_file::Storage;
use crate::request::progress::{Request, Step};
use crate::request::queue_file::{FileTable, FixedFile};
use crate::request::slab::Slab;
use crate::route::{Now, Route, route};
use crate::workers::thread_pool::Workers;
use block::{BatchEnd, IoError};
use io_uring::{IoUring, opcode};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SUBMISSION_ENTRIES: u32 = 256;
/// Also the most requests in the kernel at once: the completion ring never overflows.
const COMPLETION_ENTRIES: u32 = 4096;
const FIXED_FILES: u32 = 1024;

/// How long a failed ring is retried. Then its requests fail, because the kernel reports no more results.
const PATIENCE: Duration = Duration::from_secs(10);
const TRY_AGAIN: Duration = Duration::from_millis(100);
/// How often an ending reactor looks whether a failed ring works again.
const NAP: Duration = Duration::from_millis(10);

const ENTER_GETEVENTS: u32 = 1;

/// Beside the index, the name that the kernel gives back holds two more things: whether the request uses registered
/// memory, and the slot of that.
const FIXED: u64 = 1 << 63;
const SLOT_SHIFT: u32 = 32;

struct State {
    ring: IoUring,
    slab: Slab,
    /// Requests taken, but not yet in the submission queue because that or the kernel is full.
    waiting: VecDeque<u32>,
    /// Requests in the submission queue or in the kernel.
    entered: usize,
    fixed_buffers: FixedBuffers,
    /// Places in the table of registered files that are free.
    fixed_free: Vec<u32>,
    /// Whether a vector may lie in registered memory (Linux 6.15).
    has_fixed_vectors: bool,
}

/// One reactor's ring.
pub(crate) struct Uring {
    /// `None` after shutdown.
    state: RefCell<Option<State>>,
    harvested: RefCell<Harvest<(u64, i32)>>,
    workers: Rc<Workers>,
    counters: Arc<Counters>,
    batch_end: BatchEnd,
    failure: Cell<Option<Failure>>,
    patience: Duration,
}

/// The kernel refuses the ring's calls.
#[derive(Clone, Copy)]
struct Failure {
    since: Instant,
    tried: Instant,
}

impl FileTable for Uring {
    fn give_back(&self, index: u32) {
        if let Some(state) = self.state.borrow_mut().as_mut()
            && state.ring.submitter().register_files_update(index, &[-1]).is_ok()
        {
            state.fixed_free.push(index);
        }
    }
}

impl Uring {
    /// Makes a ring for the calling thread.
    pub(crate) fn new(
        workers: Rc<Workers>,
        wakeup: &Wakeup,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
    ) -> io::Result<Self> {
        let ring = setup::build(SUBMISSION_ENTRIES, COMPLETION_ENTRIES)?;
        Self::with_ring(ring, workers, wakeup, counters, batch_end)
    }

    fn with_ring(
        (mut ring, setup): (IoUring, Setup),
        workers: Rc<Workers>,
        wakeup: &Wakeup,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
    ) -> io::Result<Self> {
        // Not the ring's own descriptor: with deferred task work, polling it does not show that task work is to be run.
        ring.submitter().register_eventfd(wakeup.fd().as_raw_fd())?;
        ring.completion().disable_eventfd();
        let mut probe = io_uring::Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let supports = |code| probed && probe.is_supported(code);
        let has_fixed_vectors = supports(opcode::ReadvFixed::CODE) && supports(opcode::WritevFixed::CODE);
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let files = if fixed { "registered files" } else { "no registered files: they need Linux 5.19" };
        tracing::info!("io_uring on this reactor: {}, {files}", setup.words());
        let state = State {
            ring,
            slab: Slab::with_capacity(SUBMISSION_ENTRIES as usize),
            waiting: VecDeque::with_capacity(SUBMISSION_ENTRIES as usize),
            entered: 0,
            fixed_buffers: FixedBuffers::default(),
            fixed_free: if fixed { (0..FIXED_FILES).rev().collect() } else { Vec::new() },
            has_fixed_vectors,
        };
        Ok(Self {
            state: RefCell::new(Some(state)),
            harvested: RefCell::new(Harvest::with_capacity(COMPLETION_ENTRIES as usize)),
            workers,
            counters,
            batch_end,
            failure: Cell::new(None),
            patience: PATIENCE,
        })
    }

    /// Registers a file, so that the kernel need not look it up for each request. `None` if there is no free place, or
    /// the kernel refuses.
    pub(crate) fn register_file(self: &Rc<Self>, fd: RawFd) -> Option<FixedFile> {
        let mut state = self.state.borrow_mut();
        let state = state.as_mut()?;
        let index = state.fixed_free.pop()?;
        match state.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Some(FixedFile::new(Rc::clone(self) as Rc<dyn FileTable>, index)),
            Err(_) => {
                state.fixed_free.push(index);
                None
            }
        }
    }

    /// Registers memory, so that the kernel need not look its pages up for each request. The memory must stay mapped
    /// until it is unregistered. Its pages stay in memory.
    pub(crate) fn register_buffer(&self, ptr: *mut u8, length_bytes: usize) -> io::Result<u16> {
        let mut state = self.state.borrow_mut();
        let State { ring, fixed_buffers, .. } =
            state.as_mut().ok_or_else(|| io::Error::other("the ring is shut down"))?;
        let submitter = ring.submitter();
        let slot = fixed_buffers.take_slot(|| submitter.register_buffers_sparse(u32::from(SLOTS)))?;
        let iovec = libc::iovec { iov_base: ptr.cast(), iov_len: length_bytes };
        // SAFETY: the kernel takes hold of the pages themselves, which live as long as it holds them, mapped or not.
        match unsafe { submitter.register_buffers_update(u32::from(slot), &[iovec], None) } {
            Ok(()) => {
                fixed_buffers.add(ptr.addr(), length_bytes, slot);
                Ok(slot)
            }
            Err(error) => {
                fixed_buffers.free_slot(slot);
                Err(error)
            }
        }
    }

    /// Unregisters memory. Requests in the kernel keep the pages that they use. Requests that it has not seen yet are
    /// repeated with plain addresses (see [`Uring::complete`]).
    pub(crate) fn unregister_buffer(&self, slot: u16) {
        let mut state = self.state.borrow_mut();
        let Some(State { ring, fixed_buffers, .. }) = state.as_mut() else { return };
        fixed_buffers.forget(slot);
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty buffer names no memory.
        match unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[none], None) } {
            Ok(()) => fixed_buffers.free_slot(slot),
            // The slot is lost, and its pages stay pinned until the ring is closed.
            Err(error) => tracing::warn!(%error, "cannot unregister memory from io_uring"),
        }
    }

    /// Returns the workers, which carry out requests that the ring would have to wait for.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Takes a request; it reaches the kernel with the next [`Uring::submit`] at the latest.
    pub(crate) fn push(&self, request: Request) {
        let target = &*request.target;
        if route(target.traits, request.action, request.left_bytes(), Now::of(target)) != Route::Engine {
            return self.workers.push(request);
        }
        let mut state = self.state.borrow_mut();
        match state.as_mut() {
            Some(state) if self.failure.get().is_none() => {
                self.counters.requests.add(1);
                let waits_for_storage = target.traits.storage == Storage::Direct;
                let index = state.slab.insert(request);
                if state.slab.peak() > state.waiting.capacity() {
                    // All requests may have to wait at once.
                    state.waiting.reserve(state.slab.peak());
                }
                state.enqueue(index);
                if waits_for_storage && state.kernel_has_less_than_queue() {
                    self.batch_end.raise();
                }
            }
            _ => {
                drop(state);
                request.finish(Err(IoError::EIO));
            }
        }
    }

    /// Submits all that is queued and fits, and lets the kernel post completions, in one system call; none without
    /// work. Returns whether anything was submitted or fetched.
    pub(crate) fn submit(&self) -> bool {
        if let Some(failure) = self.failure.get() {
            return self.try_again(failure);
        }
        match self.state.borrow_mut().as_mut() {
            Some(state) => self.enter(state, 0),
            None => false,
        }
    }

    fn enter(&self, state: &mut State, want: u32) -> bool {
        state.refill();
        let queue = state.ring.submission();
        let (queued, fetch) = (queue.len(), queue.taskrun() || queue.cq_overflow());
        drop(queue);
        if queued == 0 && !fetch && want == 0 {
            return false;
        }
        self.counters.system_calls.add(1);
        // SAFETY: no argument is passed; every entry in the queue names memory and descriptors that its slot keeps.
        let entered =
            unsafe { state.ring.submitter().enter::<libc::sigset_t>(queued as u32, want, ENTER_GETEVENTS, None) };
        match entered.map_err(|error| error.raw_os_error()) {
            // Interrupted, out of memory, or completions must be taken first: the rest is submitted in the next turn.
            Ok(_) | Err(Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => true,
            Err(error) => {
                self.fail(error);
                false
            }
        }
    }

    #[cold]
    fn fail(&self, error: Option<i32>) {
        let error = error.map(io::Error::from_raw_os_error);
        tracing::error!(?error, "io_uring_enter failed; the reactor's io_uring takes no more requests until it works");
        let now = Instant::now();
        self.failure.set(Some(Failure { since: now, tried: now }));
    }

    /// Whether the ring is closed: later pushes fail.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.borrow().is_none()
    }

    /// Whether the kernel refuses the ring's calls, so that its requests do not end by themselves.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Tries a failed ring once more. After some time without success, gives up its requests.
    #[cold]
    fn try_again(&self, failure: Failure) -> bool {
        if failure.tried.elapsed() < TRY_AGAIN.min(self.patience) {
            return false;
        }
        if let Some(state) = self.state.borrow_mut().as_mut() {
            state.refill();
            let queued = state.ring.submission().len() as u32;
            self.counters.system_calls.add(1);
            // SAFETY: as in `enter`.
            let entered = unsafe { state.ring.submitter().enter::<libc::sigset_t>(queued, 0, ENTER_GETEVENTS, None) };
            if entered.is_ok() {
                tracing::warn!("the reactor's io_uring works again");
                self.failure.set(None);
                return true;
            }
        }
        self.failure.set(Some(Failure { tried: Instant::now(), ..failure }));
        if failure.since.elapsed() >= self.patience {
            self.give_up();
        }
        true
    }

    /// Fails all requests and closes the ring. Their writes may still land later. So every later flush of these files
    /// fails, and no data count as durable.
    fn give_up(&self) {
        let Some(mut state) = self.state.borrow_mut().take() else { return };
        // From here on there is nothing to try again.
        self.failure.set(None);
        let requests = state.slab.abandon();
        tracing::error!(
            requests = requests.len(),
            "the reactor's io_uring failed for good: its requests fail, and its files cannot be flushed until they are \
             opened anew"
        );
        drop(state);
        for request in requests {
            if !matches!(request.action, Action::Read { .. }) {
                request.target.file.sync_lost.store(true, Ordering::Relaxed);
            }
            self.counters.completions.add(1);
            request.finish(Err(IoError::EIO));
        }
    }

    /// Takes completions from the shared ring, without a system call. Returns how many.
    pub(crate) fn harvest(&self) -> usize {
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        if let Some(state) = self.state.borrow_mut().as_mut() {
            let (entries, results) = (state.ring.completion(), harvested.list());
            let before = results.len();
            results.extend(entries.map(|entry| (entry.user_data(), entry.result())));
            state.entered = state.entered.saturating_sub(results.len() - before);
        }
        let count = harvested.waiting().len();
        if count > 0 {
            self.counters.harvested(count);
            let fixed = harvested.waiting().iter().filter(|(name, _)| name & FIXED != 0).count();
            self.counters.fixed.add(fixed as u64);
        }
        while let Some((name, result)) = harvested.next() {
            self.complete(name, result);
        }
        count
    }

    /// Handles one completion. The state is not borrowed while the request ends: dropping the request may drop a file
    /// or a queue.
    fn complete(&self, name: u64, result: i32) {
        let index = name as u32;
        let mut borrowed = self.state.borrow_mut();
        let Some(state) = borrowed.as_mut() else { return };
        if name & FIXED != 0 && result == -libc::EFAULT {
            // The memory was unregistered between the push and the submission. Without the piece, the request names its
            // memory by address.
            state.fixed_buffers.forget((name >> SLOT_SHIFT) as u16 & (SLOTS - 1));
            return state.enqueue(index);
        }
        let Some(request) = state.slab.get_mut(index) else {
            return;
        };
        let step = if request.needs_to_wait(result) { Step::ToWorker } else { request.advance(result) };
        if matches!(step, Step::Again) {
            return state.enqueue(index);
        }
        let Some(request) = state.slab.remove(index) else { return };
        drop(borrowed);
        self.workers.take_back(request, step, &self.counters);
    }

    /// Whether there is something to submit or to take, so that the reactor must not sleep.
    pub(crate) fn has_work(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let Some(state) = state.as_mut() else {
            return false;
        };
        if self.has_failed() {
            return !state.ring.completion().is_empty();
        }
        let has_room = !state.waiting.is_empty() && !state.is_full();
        let queue = state.ring.submission();
        let waiting = has_room || !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        drop(queue);
        waiting || !state.ring.completion().is_empty()
    }

    /// Returns how many requests were taken and have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.borrow().as_ref().map_or(0, |state| state.slab.live())
    }

    /// Sets whether the kernel signals the reactor's event descriptor when there is something to fetch. It is on only
    /// for a sleep; the reactor looks for work after switching it on.
    pub(crate) fn signal(&self, on: bool) {
        if let Some(state) = self.state.borrow_mut().as_mut() {
            let entries = state.ring.completion();
            if on { entries.enable_eventfd() } else { entries.disable_eventfd() }
        }
    }

    /// Waits for all requests in flight, then closes the ring. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        while self.in_flight() > 0 {
            if self.has_failed() {
                std::thread::sleep(NAP);
                self.submit();
            } else if let Some(state) = self.state.borrow_mut().as_mut()
                && state.slab.live() > 0
            {
                self.enter(state, 1);
            }
            self.harvest();
        }
        let Some(state) = self.state.borrow_mut().take() else {
            return;
        };
        // This closes (and unlocks) the files at once. The kernel frees the ring some time later.
        let _ = state.ring.submitter().unregister_files();
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shut_down();
    }
}

impl State {
    fn is_full(&self) -> bool {
        self.entered >= COMPLETION_ENTRIES as usize
    }

    /// Whether at least as many requests are queued as the kernel has. With this rule, the batches for an idle disk
    /// double in length.
    fn kernel_has_less_than_queue(&mut self) -> bool {
        let queued = self.ring.submission().len();
        queued >= self.entered.saturating_sub(queued).max(1)
    }

    /// Puts a request into the submission queue if there is room and none waits before it; else it waits.
    fn enqueue(&mut self, index: u32) {
        if !self.waiting.is_empty() || self.is_full() || !self.put(index) {
            self.waiting.push_back(index);
        }
    }

    fn refill(&mut self) {
        while let Some(&index) = self.waiting.front() {
            if self.is_full() || !self.put(index) {
                return;
            }
            self.waiting.pop_front();
        }
    }

    fn put(&mut self, index: u32) -> bool {
        let buffers = self.slab.buffers(index);
        let Some(request) = self.slab.get(index) else {
            return true;
        };
        let slot = self.fixed_buffers.slot_of(buffers, self.has_fixed_vectors);
        let name = slot.map_or(0, |slot| FIXED | u64::from(slot) << SLOT_SHIFT) | u64::from(index);
        let entry = entry_of(request, buffers, slot).user_data(name);
        // SAFETY: the slot keeps the request, and with it the file and the memory that the entry names, until the
        // completion with this index has been taken; see `Slab::buffers` for the list of segments.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        self.entered += usize::from(pushed);
        pushed
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
