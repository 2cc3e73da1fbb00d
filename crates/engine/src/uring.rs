//! The io_uring engine: one ring a reactor, submitted once a turn.
//!
//! A disk that has less to do than waits in the queue is given that at once, in the midst of a batch: it works while the
//! rest of the batch is prepared. A busy disk gets whole batches.
//!
//! The ring belongs to one thread and runs its completions only when that thread enters the kernel to fetch them
//! (deferred task work): nothing interrupts the reactor. The kernel raises a flag in the shared ring when there is
//! something to fetch, so a turn without work costs two loads.

use crate::inflight::{Action, Buffers, Request, Slab, Step};
use crate::stats::Counters;
use crate::target::QueueFile;
use crate::threads::Workers;
use crate::wakeup::Wakeup;
use block::IoError;
use io_uring::{IoUring, opcode, squeue, types};
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

struct State {
    ring: IoUring,
    slab: Slab,
    /// Taken, but not yet in the submission queue because that or the kernel is full.
    waiting: VecDeque<u32>,
    /// In the submission queue or in the kernel.
    entered: usize,
    /// Places in the table of registered files that are free.
    fixed_free: Vec<u32>,
    has_ftruncate: bool,
}

/// One reactor's ring.
pub(crate) struct Uring {
    /// `None` once it was shut down.
    state: RefCell<Option<State>>,
    harvested: RefCell<Vec<(u32, i32)>>,
    workers: Rc<Workers>,
    counters: Arc<Counters>,
    /// A part of the batch was submitted before its end.
    gave_early: Cell<bool>,
    broken: Cell<bool>,
}

/// A place in a ring's table of registered files; given back on drop.
pub(crate) struct FixedFile {
    ring: Rc<Uring>,
    index: u32,
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

/// How completions reach the ring, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setup {
    /// When the reactor fetches them (Linux 6.1).
    Deferred,
    /// When the reactor enters the kernel for whatever reason (Linux 5.19).
    Cooperative,
    /// At any time: the kernel interrupts the reactor.
    Plain,
}

impl Setup {
    fn build(self) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETION_ENTRIES);
        if self != Self::Plain {
            builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
        }
        if self == Self::Deferred {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        builder.build(SUBMISSION_ENTRIES)
    }
}

/// Sets a ring up in the best way that the kernel knows.
fn build_ring() -> io::Result<IoUring> {
    for setup in [Setup::Deferred, Setup::Cooperative] {
        match setup.build() {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => return other,
        }
    }
    Setup::Plain.build()
}

/// Whether this process may use io_uring here at all.
pub(crate) fn probe() -> io::Result<()> {
    let ring = IoUring::new(2)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    if needed.iter().all(|code| probe.is_supported(*code)) {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old (5.6 or later is needed)"))
    }
}

impl Uring {
    /// A ring for the calling thread.
    pub(crate) fn new(workers: Rc<Workers>, wakeup: &Wakeup, counters: Arc<Counters>) -> io::Result<Self> {
        Self::with_ring(build_ring()?, workers, wakeup, counters)
    }

    fn with_ring(
        mut ring: IoUring,
        workers: Rc<Workers>,
        wakeup: &Wakeup,
        counters: Arc<Counters>,
    ) -> io::Result<Self> {
        // Not the ring's own descriptor: with deferred task work its poll does not tell of work to be run.
        ring.submitter().register_eventfd(wakeup.fd().as_raw_fd())?;
        ring.completion().disable_eventfd();
        let mut probe = io_uring::Probe::new();
        let probed = ring.submitter().register_probe(&mut probe).is_ok();
        let has_ftruncate = probed && probe.is_supported(opcode::Ftruncate::CODE);
        let fixed = ring.submitter().register_files_sparse(FIXED_FILES).is_ok();
        let state = State {
            ring,
            slab: Slab::with_capacity(SUBMISSION_ENTRIES as usize),
            waiting: VecDeque::with_capacity(SUBMISSION_ENTRIES as usize),
            entered: 0,
            fixed_free: if fixed { (0..FIXED_FILES).rev().collect() } else { Vec::new() },
            has_ftruncate,
        };
        Ok(Self {
            state: RefCell::new(Some(state)),
            harvested: RefCell::default(),
            workers,
            counters,
            gave_early: Cell::new(false),
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

    /// Takes a request; it reaches the kernel with the next [`Uring::submit`] at the latest.
    pub(crate) fn push(&self, request: Request) {
        let mut state = self.state.borrow_mut();
        match state.as_mut() {
            Some(state) if !self.broken.get() => {
                self.counters.requests.add(1);
                if state.cannot_do(request.action) {
                    return self.workers.take_over(request);
                }
                let waits_for_device = !request.target.file.page_cached;
                let index = state.slab.insert(request);
                state.enqueue(index);
                if waits_for_device && state.kernel_has_less_than_queue() {
                    self.gave_early.set(self.enter(state, 0) || self.gave_early.get());
                }
            }
            _ => {
                drop(state);
                request.finish(Err(IoError::EIO));
            }
        }
    }

    /// Gives the kernel all that was queued, and lets it post completions. One system call a batch, none without work.
    /// Returns whether anything was given or fetched.
    pub(crate) fn submit(&self) -> bool {
        let gave_early = self.gave_early.take();
        match self.state.borrow_mut().as_mut() {
            Some(state) => self.enter(state, 0) || gave_early,
            None => false,
        }
    }

    fn enter(&self, state: &mut State, want: u32) -> bool {
        let mut worked = false;
        loop {
            state.refill();
            let queue = state.ring.submission();
            let (queued, fetch) = (queue.len(), queue.taskrun() || queue.cq_overflow());
            drop(queue);
            if queued == 0 && !fetch && want == 0 {
                return worked;
            }
            self.counters.system_calls.add(1);
            // SAFETY: no argument is passed; every entry in the queue names memory and descriptors that its slot keeps.
            let entered =
                unsafe { state.ring.submitter().enter::<libc::sigset_t>(queued as u32, want, ENTER_GETEVENTS, None) };
            match entered {
                Ok(_) => worked = true,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                // Out of memory or completions to take first: what is left is submitted next turn.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => return true,
                Err(error) => {
                    tracing::error!(%error, "io_uring_enter failed; the reactor's io_uring engine stops");
                    self.broken.set(true);
                    return worked;
                }
            }
            if state.waiting.is_empty() || state.is_full() || want > 0 {
                return worked;
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
            harvested.extend(entries.map(|entry| (entry.user_data() as u32, entry.result())));
            state.entered = state.entered.saturating_sub(harvested.len());
        }
        let count = harvested.len();
        if count > 0 {
            self.counters.harvests.add(1);
        }
        for (index, result) in harvested.drain(..) {
            self.route(index, result);
        }
        count
    }

    /// One completion. The state is not borrowed while the request ends: dropping it may drop a file or a queue.
    fn route(&self, index: u32, result: i32) {
        let mut borrowed = self.state.borrow_mut();
        let Some(state) = borrowed.as_mut() else { return };
        let Some(request) = state.slab.get_mut(index) else {
            return;
        };
        match request.advance(result) {
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
        let queue = state.ring.submission();
        let waiting = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
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
                self.enter(state, 1);
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
    /// What goes to a worker.
    fn cannot_do(&self, action: Action) -> bool {
        match action {
            Action::Truncate => !self.has_ftruncate,
            Action::DiscardBlocks { .. } => true,
            _ => false,
        }
    }

    fn is_full(&self) -> bool {
        self.entered >= COMPLETION_ENTRIES as usize
    }

    /// The parts of a batch that an idle disk is given double this way: their number is the logarithm of the batch.
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
        let entry = entry_of(request, buffers).user_data(u64::from(index));
        // SAFETY: the slot keeps the request, and with it the file and the memory that the entry names, until the
        // completion with this index has been taken; see `Slab::buffers` for the list of segments.
        let pushed = unsafe { self.ring.submission().push(&entry) }.is_ok();
        self.entered += usize::from(pushed);
        pushed
    }
}

/// What the page cache has is copied while the reactor submits. A longer copy goes to a kernel worker: it would hold up
/// every other disk of the reactor.
const INLINE_COPY_BYTES_MAX: usize = 1 << 20;

fn entry_of(request: &Request, buffers: Buffers) -> squeue::Entry {
    let QueueFile { file, fixed, .. } = &*request.target;
    let long_copy = file.page_cached && request.left_bytes() > INLINE_COPY_BYTES_MAX;
    let flags = if long_copy { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
    match fixed {
        Some(fixed) => build(types::Fd(fixed.index as i32), request, buffers).flags(flags | squeue::Flags::FIXED_FILE),
        None => build(types::Fd(file.raw_fd()), request, buffers).flags(flags),
    }
}

fn build(fd: types::Fd, request: &Request, buffers: Buffers) -> squeue::Entry {
    let offset = request.file_offset();
    let durable = |durable| if durable { libc::RWF_DSYNC } else { 0 };
    match (request.action, buffers) {
        (Action::Read { .. }, Buffers::Single { ptr, length_bytes }) => {
            opcode::Read::new(fd, ptr, length_bytes as u32).offset(offset).build()
        }
        (Action::Read { .. }, Buffers::Vector { ptr, count }) => {
            opcode::Readv::new(fd, ptr, count as u32).offset(offset).build()
        }
        (Action::Write { durable: sync }, Buffers::Single { ptr, length_bytes }) => {
            opcode::Write::new(fd, ptr, length_bytes as u32).offset(offset).rw_flags(durable(sync)).build()
        }
        (Action::Write { durable: sync }, Buffers::Vector { ptr, count }) => {
            opcode::Writev::new(fd, ptr, count as u32).offset(offset).rw_flags(durable(sync)).build()
        }
        (Action::Sync, _) => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        (Action::Fallocate { mode, length }, _) => opcode::Fallocate::new(fd, length).offset(offset).mode(mode).build(),
        // Block devices' discards never get here, see `State::cannot_do`.
        (Action::Truncate | Action::DiscardBlocks { .. }, _) => opcode::Ftruncate::new(fd, offset).build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenOptions;
    use block::{Done, Sink};
    use memory::IoBuf;
    use rustix::event::{PollFd, PollFlags, poll};

    const COUNT: u64 = 700;

    /// Reads that go to the kernel's own threads, or end at once; the caller sleeps on the wake-up alone.
    fn sleep_until_all_have_ended(setup: Setup) {
        let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::new(Counters::default()));
        let workers = Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), None));
        let uring = Uring::with_ring(setup.build().unwrap(), workers, &wakeup, counters).unwrap();
        let options = OpenOptions { lock: false, ..OpenOptions::default() };
        let file = crate::open::open_file(tempfile::tempfile().unwrap().into(), "test", &options).unwrap();
        let target = Rc::new(QueueFile::new(Arc::new(file), None));
        let (sink, mut ended) = (Sink::new(), Vec::new());
        for token in 0..COUNT {
            let (action, done) = (Action::Write { durable: false }, Done::Sink { sink: Rc::clone(&sink), token });
            let (window, target) = (IoBuf::zeroed(512).whole(), Rc::clone(&target));
            uring.push(Request { target, action, offset: token * 512, window, progress: 0, counted: false, done });
        }
        while ended.len() < COUNT as usize {
            uring.submit();
            uring.harvest();
            uring.signal(true);
            if !uring.has_work() && uring.in_flight() > 0 {
                poll(&mut [PollFd::new(&wakeup.fd(), PollFlags::IN)], None).unwrap();
                rustix::io::read(wakeup.fd(), &mut [0; 8]).unwrap();
            }
            uring.signal(false);
            let mut some = Vec::new();
            sink.take(&mut some);
            ended.extend(some);
        }
        ended.sort_by_key(|(token, _)| *token);
        assert!(ended.iter().enumerate().all(|(at, end)| *end == (at as u64, Ok(()))), "{setup:?}");
    }

    #[test]
    fn every_way_to_set_a_ring_up_tells_of_every_completion() {
        for setup in [Setup::Deferred, Setup::Cooperative, Setup::Plain] {
            sleep_until_all_have_ended(setup);
        }
    }

    #[test]
    fn an_idle_disk_begins_before_the_batch_is_whole_and_the_page_cache_is_given_it_at_once() {
        for (page_cached, calls_before_the_end) in [(false, 5), (true, 0)] {
            let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::new(Counters::default()));
            let workers = Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), None));
            let uring = Uring::new(workers, &wakeup, Arc::clone(&counters)).unwrap();
            let options = OpenOptions { lock: false, ..OpenOptions::default() };
            let mut file = crate::open::open_file(tempfile::tempfile().unwrap().into(), "test", &options).unwrap();
            file.page_cached = page_cached;
            let target = Rc::new(QueueFile::new(Arc::new(file), None));
            let sink = Sink::new();
            for token in 0..31 {
                let (action, done) = (Action::Write { durable: false }, Done::Sink { sink: Rc::clone(&sink), token });
                let (window, target) = (IoBuf::zeroed(512).whole(), Rc::clone(&target));
                uring.push(Request { target, action, offset: token * 512, window, progress: 0, counted: false, done });
            }
            // Of 1, 1, 2, 4 and 8; the other 15 are less than the disk has.
            assert_eq!(counters.snapshot().system_calls, calls_before_the_end);
            assert!(uring.submit(), "what went early counts as submitted");
            assert_eq!(counters.snapshot().system_calls, calls_before_the_end + 1);
        }
    }
}
