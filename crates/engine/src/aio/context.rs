//! The Linux AIO engine: one context for each reactor, one `io_submit` for each batch. Completions are read from the
//! shared ring.
//!
//! It is asynchronous only for direct I/O, and not even always: a write that allocates, or a busy device, may block in
//! `io_submit`. Requests are therefore submitted with `RWF_NOWAIT`, and those that would block go to a worker.

use crate::base::aio_abi::{Context, ControlBlock, Event};
use crate::base::call::Action;
use crate::base::harvest::Harvest;
use crate::base::io_submit::{control_block, set_priority};
use crate::base::stats::Counters;
use crate::base::wakeup::Wakeup;
use crate::request::progress::{Request, Step};
use crate::request::slab::Slab;
use crate::route::{Now, Route, route};
use crate::workers::thread_pool::Workers;
use block::{BatchEnd, IoError};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// The most requests in the kernel at once.
const EVENTS: usize = 1024;
/// The most requests of one `io_submit`.
const BATCH: usize = 256;
/// The kernel refuses a transfer that would have to wait.
const NOWAIT: i32 = libc::RWF_NOWAIT;

struct State {
    context: Context,
    slab: Slab,
    /// Requests taken, but not yet in the kernel.
    waiting: VecDeque<u32>,
    in_kernel: usize,
    blocks: Vec<ControlBlock>,
    pointers: Vec<*mut ControlBlock>,
}

/// One reactor's AIO context.
pub(crate) struct Aio {
    /// `None` after shutdown.
    state: RefCell<Option<State>>,
    harvested: RefCell<Harvest<(u32, i32)>>,
    wakeup: Arc<Wakeup>,
    workers: Rc<Workers>,
    counters: Arc<Counters>,
    /// Workers carry out syncs: the kernel has no asynchronous fdatasync here.
    syncs_by_worker: Cell<bool>,
    batch_end: BatchEnd,
}

/// Whether this process may use Linux AIO here at all.
pub(crate) fn probe() -> io::Result<()> {
    Context::new(1).map(drop)
}

impl Aio {
    pub(crate) fn new(
        workers: Rc<Workers>,
        wakeup: Arc<Wakeup>,
        counters: Arc<Counters>,
        batch_end: BatchEnd,
    ) -> io::Result<Self> {
        let state = State {
            context: Context::new(EVENTS as u32)?,
            slab: Slab::with_capacity(BATCH),
            waiting: VecDeque::with_capacity(BATCH),
            in_kernel: 0,
            blocks: Vec::with_capacity(BATCH),
            pointers: Vec::with_capacity(BATCH),
        };
        Ok(Self {
            state: RefCell::new(Some(state)),
            harvested: RefCell::new(Harvest::with_capacity(EVENTS)),
            wakeup,
            workers,
            counters,
            batch_end,
            syncs_by_worker: Cell::new(false),
        })
    }

    /// Returns the workers, which carry out requests that AIO would have to wait for.
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Takes a request; it reaches the kernel with the next [`Aio::submit`] at the latest.
    pub(crate) fn push(&self, request: Request) {
        let target = &*request.target;
        let declined = request.action == Action::Sync && self.syncs_by_worker.get();
        let now = Now { declined, ..Now::of(target) };
        if route(target.traits, request.action, request.left_bytes(), now) != Route::Engine {
            return self.workers.push(request);
        }
        let mut borrowed = self.state.borrow_mut();
        let Some(state) = borrowed.as_mut() else {
            drop(borrowed);
            return request.finish(Err(IoError::EIO));
        };
        self.counters.requests.add(1);
        let index = state.slab.insert(request);
        state.waiting.push_back(index);
        if state.slab.peak() > state.waiting.capacity() {
            // All requests may have to wait at once.
            state.waiting.reserve(state.slab.peak());
        }
        // See [`BatchEnd`]; io_uring does the same.
        if state.waiting.len() >= state.in_kernel.max(1) {
            self.batch_end.raise();
        }
    }

    /// Submits all that is queued and fits, in one call. Returns whether it submitted anything.
    pub(crate) fn submit(&self) -> bool {
        let (index, errno) = match self.state.borrow_mut().as_mut().map(|state| self.submit_batch(state)) {
            None | Some(Submitted::Nothing) => return false,
            Some(Submitted::Some) => return true,
            Some(Submitted::Failed(index, errno)) => (index, errno),
        };
        self.complete(index, -errno);
        true
    }

    fn submit_batch(&self, state: &mut State) -> Submitted {
        let count = state.waiting.len().min(BATCH).min(EVENTS - state.in_kernel);
        let Some(&first) = state.waiting.front().filter(|_| count > 0) else {
            return Submitted::Nothing;
        };
        state.build(count, &self.wakeup);
        self.counters.system_calls.add(1);
        // SAFETY: each block names memory and a file that its slot keeps until the event with its index was taken.
        match unsafe { state.context.submit(&mut state.pointers) } {
            Ok(0) => Submitted::Nothing,
            Ok(taken) => {
                state.waiting.drain(..taken);
                state.in_kernel += taken;
                Submitted::Some
            }
            Err(error) => match error.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => Submitted::Some,
                // The context is full: the rest goes next turn.
                libc::EAGAIN if state.in_kernel > 0 => Submitted::Nothing,
                errno => {
                    state.waiting.pop_front();
                    Submitted::Failed(first, errno)
                }
            },
        }
    }

    /// Takes completions, from the shared ring without a system call if that is readable. Returns how many.
    pub(crate) fn harvest(&self) -> usize {
        self.take(0)
    }

    fn take(&self, wait_for: usize) -> usize {
        let Ok(mut harvested) = self.harvested.try_borrow_mut() else {
            return 0;
        };
        if let Some(state) = self.state.borrow_mut().as_mut()
            && state.in_kernel > 0
        {
            let results = harvested.list();
            let before = results.len();
            let each = |event: Event| results.push((event.data as u32, event.result as i32));
            if wait_for == 0 && state.context.is_mapped() {
                state.context.take(each);
            } else {
                self.counters.system_calls.add(1);
                // If interrupted, nothing was taken, and the caller tries again.
                let _ = state.context.wait(wait_for, each);
            }
            state.in_kernel -= results.len() - before;
        }
        let count = harvested.waiting().len();
        self.counters.harvested(count);
        while let Some((index, result)) = harvested.next() {
            self.complete(index, result);
        }
        count
    }

    /// Handles one result. The state is not borrowed while the request ends: dropping the request may drop a file or a
    /// queue.
    fn complete(&self, index: u32, result: i32) {
        let mut borrowed = self.state.borrow_mut();
        let Some(state) = borrowed.as_mut() else { return };
        let Some(request) = state.slab.get_mut(index) else {
            return;
        };
        let step = match result {
            _ if request.needs_to_wait(result) => Step::ToWorker,
            _ if result == -libc::EINVAL && request.action == Action::Sync => {
                self.syncs_by_worker.set(true);
                Step::ToWorker
            }
            _ => request.advance(result),
        };
        if matches!(step, Step::Again) {
            return state.waiting.push_back(index);
        }
        let Some(request) = state.slab.remove(index) else { return };
        drop(borrowed);
        self.workers.take_back(request, step, &self.counters);
    }

    /// Whether there is something to submit or to take, so that the reactor must not sleep.
    pub(crate) fn has_work(&self) -> bool {
        self.state.borrow().as_ref().is_some_and(|state| {
            let may_submit = !state.waiting.is_empty() && state.in_kernel < EVENTS;
            may_submit || state.context.has_events()
        })
    }

    /// Returns how many requests were taken and have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.borrow().as_ref().map_or(0, |state| state.slab.live())
    }

    /// Waits for all requests in flight, then destroys the context. Later pushes fail.
    pub(crate) fn shut_down(&self) {
        while self.in_flight() > 0 {
            self.submit();
            self.take(1);
        }
        drop(self.state.borrow_mut().take());
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        self.shut_down();
    }
}

enum Submitted {
    Nothing,
    Some,
    /// The first waiting request cannot be submitted.
    Failed(u32, i32),
}

impl State {
    fn build(&mut self, count: usize, wakeup: &Wakeup) {
        self.blocks.clear();
        self.pointers.clear();
        for position in 0..count {
            let index = self.waiting[position];
            let buffers = self.slab.buffers(index);
            if let Some(request) = self.slab.get(index) {
                let call = request.call(buffers);
                let mut block = control_block(u64::from(index), &call, NOWAIT, Some(wakeup));
                if call.action.is_transfer() {
                    set_priority(&mut block, request.priority);
                }
                self.blocks.push(block);
            }
        }
        let blocks = &mut self.blocks;
        self.pointers.extend(blocks.iter_mut().map(|block| &raw mut *block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::{EngineKind, OpenOptions};
    use crate::file::extent_preload::ExtentPreload;
    use crate::file::open_file::Traits;
    use crate::request::queue_file::QueueFile;
    use block::{Done, Priority, Sink};
    use memory::IoBuf;

    #[test]
    fn a_file_that_takes_nothing_that_must_not_wait_is_left_to_workers() {
        if probe().is_err() {
            eprintln!("skipped: no Linux AIO here");
            return;
        }
        let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::new(Counters::default()));
        let limit = std::time::Duration::ZERO;
        let workers = Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), None, 0, limit));
        let aio = Aio::new(Rc::clone(&workers), wakeup, counters, BatchEnd::default()).unwrap();
        let options = OpenOptions { lock: false, ..OpenOptions::default() };
        let mut file = crate::open::opening::open_file(tempfile::tempfile().unwrap().into(), "test", &options).unwrap();
        file.extents = ExtentPreload::new(false);
        file.traits = Traits { engine: EngineKind::LinuxAio, ..file.traits };
        let target = Rc::new(QueueFile::blocking(Arc::new(file)));
        for is_refused in [false, true] {
            if is_refused {
                target.file.nowait_was_refused();
            }
            let (done, window) = (Done::Sink { sink: Sink::new(), token: 0 }, IoBuf::zeroed(512).whole());
            let (target, action) = (Rc::clone(&target), Action::Read { need_bytes: 0 });
            aio.push(Request {
                target,
                action,
                offset: 0,
                window,
                progress: 0,
                counted: false,
                priority: Priority::NONE,
                done,
            });
            assert_eq!((aio.in_flight(), workers.in_flight()), (1, usize::from(is_refused)));
        }
    }
}
