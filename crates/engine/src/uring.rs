//! The io_uring engine: one ring a reactor, submitted once a turn.
//!
//! When a disk has less to do than waits in the queue, the ring asks for the end of the batch ([`BatchEnd`]): the disk works
//! while the next is prepared. A busy disk gets long batches. Either way a turn takes one system call at most, which submits
//! and fetches.
//!
//! The ring belongs to one thread and runs its completions only when that thread enters the kernel to fetch them
//! (deferred task work): nothing interrupts the reactor. The kernel raises a flag in the shared ring when there is
//! something to fetch, so a turn without work costs two loads.
//!
//! With a submission thread (`sqpoll=on`) the kernel looks into the ring by itself, and is called only to wake that
//! thread.

use crate::fixed_buffers::{FixedBuffers, SLOTS};
use crate::inflight::{Request, Slab, Step};
use crate::ring_entry::entry_of;
use crate::ring_setup::{self, Setup};
use crate::stats::Counters;
use crate::threads::Workers;
use crate::wakeup::Wakeup;
use block::{BatchEnd, IoError};
use io_uring::{IoUring, opcode};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

const SUBMISSION_ENTRIES: u32 = 256;
/// Also the most requests in the kernel at once: the completion ring never overflows.
const COMPLETION_ENTRIES: u32 = 4096;
const FIXED_FILES: u32 = 1024;

const ENTER_GETEVENTS: u32 = 1;
const ENTER_SQ_WAKEUP: u32 = 2;

/// Beside the index in the name that the kernel gives back: the slot of registered memory that the request names, and
/// that it names one.
const FIXED: u64 = 1 << 63;
const SLOT_SHIFT: u32 = 32;

struct State {
    ring: IoUring,
    setup: Setup,
    slab: Slab,
    /// Taken, but not yet in the submission queue because that or the kernel is full.
    waiting: VecDeque<u32>,
    /// In the submission queue or in the kernel.
    entered: usize,
    /// Something was put into the submission queue since it was last looked whether the kernel sees it.
    pushed: bool,
    fixed_buffers: FixedBuffers,
    /// Places in the table of registered files that are free.
    fixed_free: Vec<u32>,
    /// Whether a vector may lie in registered memory (Linux 6.15).
    has_fixed_vectors: bool,
}

/// One reactor's ring.
pub(crate) struct Uring {
    /// `None` once it was shut down.
    state: RefCell<Option<State>>,
    harvested: RefCell<Vec<(u64, i32)>>,
    workers: Rc<Workers>,
    counters: Arc<Counters>,
    batch_end: BatchEnd,
    broken: Cell<bool>,
}

/// A place in a ring's table of registered files; given back on drop.
pub(crate) struct FixedFile {
    ring: Rc<Uring>,
    pub(crate) index: u32,
}

impl std::fmt::Debug for FixedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FixedFile({})", self.index)
    }
}

impl Drop for FixedFile {
    fn drop(&mut self) {
        if let Some(state) = self.ring.state.borrow_mut().as_mut()
            && state.ring.submitter().register_files_update(self.index, &[-1]).is_ok()
        {
            state.fixed_free.push(self.index);
        }
    }
}

impl Uring {
    /// A ring for the calling thread, with a submission thread of the kernel's where that is wanted and to be had.
    pub(crate) fn new(
        submission_thread: bool,
        workers: Rc<Workers>,
        wakeup: &Wakeup,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
    ) -> io::Result<Self> {
        let ring = ring_setup::build(submission_thread, SUBMISSION_ENTRIES, COMPLETION_ENTRIES)?;
        Self::with_ring(ring, workers, wakeup, counters, batch_end)
    }

    fn with_ring(
        (mut ring, setup): (IoUring, Setup),
        workers: Rc<Workers>,
        wakeup: &Wakeup,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
    ) -> io::Result<Self> {
        // Not the ring's own descriptor: with deferred task work its poll does not tell of work to be run.
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
            setup,
            slab: Slab::with_capacity(SUBMISSION_ENTRIES as usize),
            waiting: VecDeque::with_capacity(SUBMISSION_ENTRIES as usize),
            entered: 0,
            pushed: false,
            fixed_buffers: FixedBuffers::default(),
            fixed_free: if fixed { (0..FIXED_FILES).rev().collect() } else { Vec::new() },
            has_fixed_vectors,
        };
        Ok(Self {
            state: RefCell::new(Some(state)),
            harvested: RefCell::new(Vec::with_capacity(COMPLETION_ENTRIES as usize)),
            workers,
            counters,
            batch_end,
            broken: Cell::new(false),
        })
    }

    /// Registers a file, so that the kernel need not look it up for each request. `None` where there is no place.
    pub(crate) fn register_file(self: &Rc<Self>, fd: RawFd) -> Option<FixedFile> {
        let mut state = self.state.borrow_mut();
        let state = state.as_mut()?;
        let index = state.fixed_free.pop()?;
        match state.ring.submitter().register_files_update(index, &[fd]) {
            Ok(_) => Some(FixedFile { ring: Rc::clone(self), index }),
            Err(_) => {
                state.fixed_free.push(index);
                None
            }
        }
    }

    /// Registers memory, so that requests in it need not look its pages up. It has to stay mapped until it is
    /// unregistered; its pages stay in memory.
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

    /// Gives memory back. Requests in the kernel keep what they use; those that it has not seen yet go the plain way
    /// (see [`Uring::route`]).
    pub(crate) fn unregister_buffer(&self, slot: u16) {
        let mut state = self.state.borrow_mut();
        let Some(State { ring, fixed_buffers, .. }) = state.as_mut() else { return };
        fixed_buffers.forget(slot);
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty buffer names no memory.
        match unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[none], None) } {
            Ok(()) => fixed_buffers.free_slot(slot),
            // The place is lost, and with it the pages until the ring goes.
            Err(error) => tracing::warn!(%error, "cannot unregister memory from io_uring"),
        }
    }

    /// Takes a request; it reaches the kernel with the next [`Uring::submit`] at the latest.
    pub(crate) fn push(&self, request: Request) {
        if request.target.file.in_memory {
            return self.workers.push(request);
        }
        let mut state = self.state.borrow_mut();
        match state.as_mut() {
            Some(state) if !self.broken.get() => {
                self.counters.requests.add(1);
                if request.target.goes_to_worker(request.action, request.left_bytes()) {
                    return self.workers.take_over(request);
                }
                let waits_for_storage = !request.target.file.page_cached && state.setup != Setup::SubmissionThread;
                let index = state.slab.insert(request);
                if state.slab.peak() > state.waiting.capacity() {
                    // All of them may have to wait at once.
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

    /// Gives the kernel all that was queued and fits, and lets it post completions: one system call, none without work.
    /// Returns whether anything was given or fetched.
    pub(crate) fn submit(&self) -> bool {
        match self.state.borrow_mut().as_mut() {
            Some(state) if state.setup == Setup::SubmissionThread => self.look_after_thread(state, 0),
            Some(state) => self.enter(state, 0),
            None => false,
        }
    }

    /// With a submission thread: sees that it is awake if it has something to do. Waits for `want` completions.
    fn look_after_thread(&self, state: &mut State, want: u32) -> bool {
        state.refill();
        let pushed = std::mem::take(&mut state.pushed);
        let queue = state.ring.submission();
        // Who puts something in looks at the flag after, the thread raises the flag first and looks into the queue after:
        // one of the two sees the other (the crate has the fence). So looking once after each push is enough.
        let wake = if pushed && queue.need_wakeup() { ENTER_SQ_WAKEUP } else { 0 };
        let fetch = if queue.cq_overflow() || want > 0 { ENTER_GETEVENTS } else { 0 };
        drop(queue);
        if wake | fetch != 0 {
            self.counters.system_calls.add(1);
            // SAFETY: no argument is passed; for the entries in the queue see `State::put`.
            let entered = unsafe { state.ring.submitter().enter::<libc::sigset_t>(0, want, wake | fetch, None) };
            match entered.map_err(|error| error.raw_os_error()) {
                Ok(_) => {}
                // To be tried again: the flag is looked at again.
                Err(Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => state.pushed = true,
                Err(error) => {
                    let error = error.map(io::Error::from_raw_os_error);
                    tracing::error!(?error, "io_uring_enter failed; the reactor's io_uring engine stops");
                    self.broken.set(true);
                }
            }
        }
        pushed
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
            // Interrupted, out of memory, or completions to take first: what is left is submitted next turn.
            Ok(_) | Err(Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => true,
            Err(error) => {
                let error = error.map(io::Error::from_raw_os_error);
                tracing::error!(?error, "io_uring_enter failed; the reactor's io_uring engine stops");
                self.broken.set(true);
                false
            }
        }
    }

    /// Takes completions from the shared ring, without a system call. Returns how many requests moved.
    pub(crate) fn harvest(&self) -> usize {
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        if let Some(state) = self.state.borrow_mut().as_mut() {
            let entries = state.ring.completion();
            harvested.extend(entries.map(|entry| (entry.user_data(), entry.result())));
            state.entered = state.entered.saturating_sub(harvested.len());
        }
        let count = harvested.len();
        if count > 0 {
            self.counters.harvests.add(1);
            let fixed = harvested.iter().filter(|(name, _)| name & FIXED != 0).count();
            self.counters.fixed.add(fixed as u64);
        }
        for (name, result) in harvested.drain(..) {
            self.route(name, result);
        }
        count
    }

    /// One completion. The state is not borrowed while the request ends: dropping it may drop a file or a queue.
    fn route(&self, name: u64, result: i32) {
        let index = name as u32;
        let mut borrowed = self.state.borrow_mut();
        let Some(state) = borrowed.as_mut() else { return };
        if name & FIXED != 0 && result == -libc::EFAULT {
            // The registered memory was given back between the push and the kernel's look. Without the piece the
            // request names its memory the plain way.
            state.fixed_buffers.forget((name >> SLOT_SHIFT) as u16 & (SLOTS - 1));
            return state.enqueue(index);
        }
        let Some(request) = state.slab.get_mut(index) else {
            return;
        };
        let step = if request.needs_to_wait(result) { Step::ToWorker } else { request.advance(result) };
        match step {
            Step::Again => state.enqueue(index),
            Step::ToWorker => {
                let request = state.slab.remove(index);
                drop(borrowed);
                if let Some(request) = request {
                    self.workers.take_over(request);
                }
            }
            Step::Finished(result) => {
                let request = state.slab.remove(index);
                drop(borrowed);
                self.counters.completions.add(1);
                if let Some(request) = request {
                    request.finish(result);
                }
            }
        }
    }

    /// Whether there is something to submit or to take, so that the reactor must not sleep.
    pub(crate) fn has_work(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let Some(state) = state.as_mut() else {
            return false;
        };
        let has_room = !state.waiting.is_empty() && !state.is_full();
        let queue = state.ring.submission();
        let queued = match state.setup {
            // What is in the queue is the thread's business.
            Setup::SubmissionThread => state.pushed,
            _ => !queue.is_empty() || queue.taskrun(),
        };
        let waiting = has_room || queued || queue.cq_overflow();
        drop(queue);
        waiting || !state.ring.completion().is_empty()
    }

    /// Requests taken and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.borrow().as_ref().map_or(0, |state| state.slab.live())
    }

    /// Whether the kernel shall signal the reactor's event descriptor when there is something to fetch. Only while the
    /// reactor is about to sleep; it looks for work after switching this on.
    pub(crate) fn signal(&self, on: bool) {
        if let Some(state) = self.state.borrow_mut().as_mut() {
            let entries = state.ring.completion();
            if on { entries.enable_eventfd() } else { entries.disable_eventfd() }
        }
    }

    /// Waits for everything in the kernel, then closes the ring. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        while self.in_flight() > 0 && !self.broken.get() {
            if let Some(state) = self.state.borrow_mut().as_mut()
                && state.slab.live() > 0
            {
                match state.setup {
                    Setup::SubmissionThread => self.look_after_thread(state, 1),
                    _ => self.enter(state, 1),
                };
            }
            self.harvest();
        }
        let Some(state) = self.state.borrow_mut().take() else {
            return;
        };
        if state.slab.live() > 0 {
            // The kernel may still write to this memory, and nobody can be asked: it stays allocated.
            std::mem::forget(state.slab);
            return;
        }
        // The files are closed (and unlocked) now, not when the kernel gets round to the ring.
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

    /// Batches that an idle disk is given double this way.
    fn kernel_has_less_than_queue(&mut self) -> bool {
        let queued = self.ring.submission().len();
        queued >= self.entered.saturating_sub(queued).max(1)
    }

    /// Into the submission queue if there is room and nobody waits before it.
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
        self.pushed |= pushed;
        pushed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inflight::Action;
    use crate::target::QueueFile;
    use crate::{CacheMode, OpenOptions};
    use block::{Done, Priority, Sink};
    use memory::{IoBuf, Mapping, Window};
    use rustix::event::{PollFd, PollFlags, poll};
    use std::os::unix::fs::FileExt;

    const COUNT: u64 = 700;
    const SETUPS: [Setup; 4] = [Setup::SubmissionThread, Setup::Deferred, Setup::Cooperative, Setup::Plain];

    struct Bench {
        uring: Uring,
        workers: Rc<Workers>,
        wakeup: Arc<Wakeup>,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
        target: Rc<QueueFile>,
        sink: Rc<Sink>,
    }

    /// A file that is written where it lies.
    fn file_in_place() -> crate::target::OpenFile {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![9; COUNT as usize * 512], 0).unwrap();
        file.sync_all().unwrap();
        let engine = crate::EngineKind::IoUring;
        let options = OpenOptions { lock: false, engine, cache: CacheMode::None, ..OpenOptions::default() };
        let mut file = crate::open::open_file(file.into(), "test", &options).unwrap();
        file.tables = crate::tables::Tables::new(false);
        file
    }

    impl Bench {
        fn new(setup: Setup) -> Self {
            let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::new(Counters::default()));
            let workers =
                Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), None, 0, std::time::Duration::ZERO));
            let ring = setup.build(SUBMISSION_ENTRIES, COMPLETION_ENTRIES).unwrap();
            let batch_end = BatchEnd::default();
            let theirs = (Rc::clone(&workers), Arc::clone(&counters));
            let uring = Uring::with_ring((ring, setup), theirs.0, &wakeup, theirs.1, batch_end.clone()).unwrap();
            let target = Rc::new(QueueFile::new(Arc::new(file_in_place()), None));
            Self { uring, workers, wakeup, counters, batch_end, target, sink: Sink::new() }
        }

        fn push(&self, token: u64, action: Action, offset: u64, window: Window) {
            let (done, target) = (Done::Sink { sink: Rc::clone(&self.sink), token }, Rc::clone(&self.target));
            self.uring.push(Request {
                target,
                action,
                offset,
                window,
                progress: 0,
                counted: false,
                priority: Priority::NONE,
                done,
            });
        }

        /// Until `count` requests have ended well; the caller sleeps on the wake-up alone.
        fn sleep_until_ended(&self, count: usize) {
            let mut ended = Vec::new();
            while ended.len() < count {
                // What a busy device refuses is a worker's.
                let _ = (self.uring.submit(), self.workers.submit());
                let _ = (self.uring.harvest(), self.workers.harvest());
                self.wakeup.about_to_sleep();
                self.uring.signal(true);
                let idle = !self.uring.has_work() && !self.workers.has_work();
                if idle && self.uring.in_flight() + self.workers.in_flight() > 0 {
                    poll(&mut [PollFd::new(&self.wakeup.fd(), PollFlags::IN)], None).unwrap();
                    rustix::io::read(self.wakeup.fd(), &mut [0; 8]).unwrap();
                }
                self.uring.signal(false);
                self.wakeup.awake();
                let mut some = Vec::new();
                self.sink.take(&mut some);
                ended.extend(some);
            }
            ended.sort_by_key(|(token, _)| *token);
            assert!(ended.iter().enumerate().all(|(at, end)| *end == (at as u64, Ok(()))), "{ended:?}");
        }
    }

    #[test]
    fn every_way_to_set_a_ring_up_tells_of_every_completion() {
        for setup in SETUPS {
            let bench = Bench::new(setup);
            // The second time a submission thread has to be woken.
            for _ in 0..2 {
                for token in 0..COUNT {
                    let window = IoBuf::zeroed(512).whole();
                    bench.push(token, Action::Write { durable: false }, token * 512, window);
                }
                bench.sleep_until_ended(COUNT as usize);
                std::thread::sleep(std::time::Duration::from_millis(60));
            }
        }
    }

    #[test]
    fn batches_are_short_while_the_disk_is_idle_and_long_for_the_page_cache_and_each_is_one_call() {
        for (page_cached, expected) in [(false, vec![1, 1, 2, 4, 8, 15]), (true, vec![31])] {
            let mut bench = Bench::new(Setup::Deferred);
            let target = Rc::get_mut(&mut bench.target).unwrap();
            Arc::get_mut(&mut target.file).unwrap().page_cached = page_cached;
            let (mut batches, mut batch) = (Vec::new(), 0);
            for token in 0..31 {
                bench.push(token, Action::Read { need_bytes: 512 }, token * 512, IoBuf::zeroed(512).whole());
                batch += 1;
                assert_eq!(bench.counters.snapshot().system_calls, batches.len() as u64, "pushing only queues");
                if bench.batch_end.take() || token == 30 {
                    assert!(bench.uring.submit());
                    batches.push(std::mem::take(&mut batch));
                }
            }
            assert_eq!((batches.len() as u64, batches), (bench.counters.snapshot().system_calls, expected));
            bench.sleep_until_ended(31);
        }
    }

    #[test]
    fn what_must_not_wait_and_is_refused_for_that_is_carried_out_by_one_who_may() {
        for errno in [libc::EAGAIN, libc::ENOMEM, libc::EOPNOTSUPP] {
            let bench = Bench::new(Setup::Deferred);
            let (sink, target) = (Rc::clone(&bench.sink), Rc::clone(&bench.target));
            let (done, window) = (Done::Sink { sink, token: 0 }, IoBuf::zeroed(512).whole());
            let action = Action::Read { need_bytes: 512 };
            let request = Request {
                target,
                action,
                offset: 0,
                window,
                progress: 0,
                counted: false,
                priority: Priority::NONE,
                done,
            };
            let index = bench.uring.state.borrow_mut().as_mut().unwrap().slab.insert(request);
            bench.uring.route(u64::from(index), -errno);
            assert_eq!((bench.uring.in_flight(), bench.workers.in_flight()), (0, 1));
            bench.sleep_until_ended(1);
            assert_eq!(bench.target.file.nowait.is_allowed(), errno != libc::EOPNOTSUPP);
        }
    }

    #[test]
    fn a_registered_file_is_named_by_its_place_in_the_table() {
        let mut bench = Bench::new(Setup::Deferred);
        let (plain, file) = (Rc::clone(&bench.target), Arc::clone(&bench.target.file));
        let uring = Rc::new(std::mem::replace(&mut bench.uring, Bench::new(Setup::Deferred).uring));
        let fixed = uring.register_file(file.raw_fd());
        assert!(fixed.is_some(), "this kernel registers files");
        let registered = Rc::new(QueueFile::new(file, fixed));
        for (target, is_fixed) in [(&plain, false), (&registered, true)] {
            let (done, window) = (Done::Sink { sink: Sink::new(), token: 0 }, Window::empty());
            let target = Rc::clone(target);
            let request = Request {
                target,
                action: Action::Write { durable: false },
                offset: 0,
                window,
                progress: 0,
                counted: false,
                priority: Priority::best_effort(1),
                done,
            };
            let none = crate::inflight::Buffers::Vector { ptr: std::ptr::null(), count: 0 };
            // `IOSQE_FIXED_FILE`.
            let words = format!("{:?}", entry_of(&request, none, None));
            assert!(words.contains(&format!("flags: {}", u8::from(is_fixed))), "{words}");
            let entry = entry_of(&request, none, None);
            // SAFETY: an entry is a `struct io_uring_sqe`: its priority lies behind the bytes of the opcode and the flags.
            let ioprio = unsafe { (&raw const entry).cast::<u16>().add(1).read() };
            assert_eq!(ioprio, request.priority.ioprio());
        }
    }

    /// Writes a pattern and reads it back, in one segment and in two, in memory of which the first half is registered;
    /// `meanwhile` happens when half of it was pushed.
    fn write_and_read_back(bench: &Bench, meanwhile: impl Fn()) {
        let (_, mapping) = Mapping::anonymous_file(c"guest", 1 << 16).unwrap();
        let mapping = Arc::new(mapping);
        let memory = IoBuf::in_mapping(&mapping, 0, 1 << 16, Box::new(())).unwrap().whole();
        let slot = bench.uring.register_buffer(mapping.as_ptr().as_ptr(), 1 << 15);
        let slot = slot.expect("this kernel registers shared memory");
        memory.copy_from_slice(0, &(0..1 << 16).map(|at| (at % 251) as u8).collect::<Vec<_>>());
        let expected = memory.to_vec();
        let parts = |at: usize| match at % 2 {
            0 => memory.slice(at * 4096, 4096),
            _ => IoBuf::gather(vec![memory.slice(at * 4096, 512), memory.slice(at * 4096 + 512, 3584)]).whole(),
        };
        for action in [Action::Write { durable: false }, Action::Read { need_bytes: 4096 }] {
            for at in 0..16 {
                bench.push(at as u64, action, at as u64 * 4096, parts(at));
                if at == 7 {
                    meanwhile();
                }
            }
            bench.sleep_until_ended(16);
            assert_eq!(memory.to_vec(), expected);
            memory.fill(if matches!(action, Action::Write { .. }) { 0 } else { 1 });
        }
        bench.uring.unregister_buffer(slot);
    }

    #[test]
    fn requests_in_registered_memory_name_it_and_others_go_the_plain_way() {
        for setup in SETUPS {
            let bench = Bench::new(setup);
            let vectors = bench.uring.state.borrow().as_ref().unwrap().has_fixed_vectors;
            for round in 1..4 {
                write_and_read_back(&bench, || ());
                let expected = round * if vectors { 16 } else { 8 };
                assert_eq!(bench.counters.snapshot().fixed, expected, "{setup:?}");
            }
        }
    }

    #[test]
    fn memory_that_is_given_back_before_the_kernel_looks_fails_no_request() {
        for setup in SETUPS {
            let bench = Bench::new(setup);
            for _ in 0..3 {
                write_and_read_back(&bench, || bench.uring.unregister_buffer(0));
            }
        }
    }

    #[test]
    fn memory_that_cannot_be_registered_is_an_error_that_changes_nothing() {
        let bench = Bench::new(Setup::Deferred);
        let nowhere = std::ptr::without_provenance_mut(1 << 30);
        assert!((0..=SLOTS).all(|_| bench.uring.register_buffer(nowhere, 1 << 16).is_err()));
        write_and_read_back(&bench, || ());
    }
}
