//! The calls of a job: several at once, each made by a thread that blocks.
//!
//! Each file of a job has threads for its calls, as many as there are calls at once, up to a limit. Each call owns its
//! bytes. The ends are reported on the job's own thread: while it awaits them ([`JobCalls::awaiting`]), or, elsewhere,
//! before a push returns.
//!
//! If the calls are given up ([`GiveUp`]), those that may end do so with an error at once. Their threads stay until the
//! storage answers. Bytes are copied on the way, so a late read lands in the thread's own buffer.

mod call;

use self::call::Call;
use super::give_up::{Ends, GiveUp, given_up};
use super::layer::Layer;
use block::{Done, Error, ErrorKind, File, FileIo, FileOp, FileQueue, IoError, IoResult, MetaIo, ReactorCtx, Result};
use memory::{AlignedBuf, Window};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// How often a waiting job checks whether its calls were given up.
const LOOK: Duration = Duration::from_millis(50);
/// Threads of one file, at most.
const THREADS_MAX: usize = 8;

/// The calls of one job that have not ended. It stays on the job's thread.
pub(crate) struct JobCalls {
    /// A simulated reactor, where calls are in flight at the same time.
    on: Option<Rc<dyn ReactorCtx>>,
    give_up: Option<Arc<GiveUp>>,
    in_flight: RefCell<BTreeMap<u64, InFlight>>,
    next: Cell<u64>,
    ended: Arc<Ended>,
    /// Somebody awaits the ends, so pushes return at once.
    is_awaited: Cell<bool>,
    /// What is open.
    opened: RefCell<Vec<Opened>>,
}

thread_local! {
    static OVERLAPPING: RefCell<Option<Rc<dyn ReactorCtx>>> = const { RefCell::new(None) };
}

/// For tests: jobs that this thread begins from now on, and that nobody can give up, have several calls in flight on this
/// reactor, as others have on threads.
#[doc(hidden)]
pub fn overlap_calls_for_test(ctx: Option<Rc<dyn ReactorCtx>>) {
    OVERLAPPING.set(ctx);
}

/// A file, which of its calls end if they are given up, and its calls.
type Opened = (Arc<dyn File>, Ends, Weak<dyn FileQueue>);

/// A call that a thread makes, or will make.
struct InFlight {
    done: Done,
    /// Where a read's bytes go.
    data: Option<Window>,
    may_end: bool,
    is_out_of_step: Rc<Cell<bool>>,
}

/// What threads report.
#[derive(Default)]
struct Ended {
    reports: Mutex<Reports>,
    came: Condvar,
}

#[derive(Default)]
struct Reports {
    list: Vec<(u64, End)>,
    waker: Option<Waker>,
}

/// A call's result; a read's bytes.
type End = IoResult<Option<AlignedBuf>>;

impl Ended {
    fn lock(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, id: u64, end: End) {
        let mut reports = self.lock();
        reports.list.push((id, end));
        let waker = reports.waker.take();
        drop(reports);
        self.came.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl JobCalls {
    /// Without `give_up`, files are opened without threads: each push carries its call out.
    pub(crate) fn new(give_up: Option<&Arc<GiveUp>>) -> Rc<Self> {
        let on = if give_up.is_none() { OVERLAPPING.with_borrow(Clone::clone) } else { None };
        Self::with(give_up, on)
    }

    /// Each push carries its call out.
    pub(crate) fn blocking() -> Rc<Self> {
        Self::with(None, None)
    }

    fn with(give_up: Option<&Arc<GiveUp>>, on: Option<Rc<dyn ReactorCtx>>) -> Rc<Self> {
        Rc::new(Self {
            on,
            give_up: give_up.cloned(),
            in_flight: RefCell::default(),
            next: Cell::new(0),
            ended: Arc::default(),
            is_awaited: Cell::new(false),
            opened: RefCell::default(),
        })
    }

    /// Opens a layer's files. `ends` says which calls end if they are given up.
    pub(crate) fn open(self: &Rc<Self>, layer: &Layer, ends: Ends) -> Result<MetaIo> {
        if let Some(ctx) = &self.on {
            return layer.open_queues(ctx).map(|(_, meta)| meta);
        }
        if self.give_up.is_none() {
            return layer.open_blocking();
        }
        let meta = MetaIo::new(self.queue_of(&layer.file, ends)?);
        match &layer.data {
            Some(data) => Ok(meta.with_data(self.queue_of(&data.file, ends)?)),
            None => Ok(meta),
        }
    }

    /// A file has the same threads, however often the job opens it.
    fn queue_of(self: &Rc<Self>, file: &Arc<dyn File>, ends: Ends) -> Result<Rc<dyn FileQueue>> {
        let is_it = |(known, its, _): &&Opened| Arc::ptr_eq(known, file) && *its == ends;
        if let Some(queue) = self.opened.borrow().iter().find(is_it).and_then(|(_, _, queue)| queue.upgrade()) {
            return Ok(queue);
        }
        let queue = Calls::begin(self, file, ends)?;
        let mut opened = self.opened.borrow_mut();
        opened.retain(|(_, _, queue)| queue.strong_count() > 0);
        opened.push((Arc::clone(file), ends, Rc::downgrade(&queue)));
        Ok(queue)
    }

    /// Awaits `future`, which may have several calls in flight.
    pub(crate) async fn awaiting<T>(&self, future: impl Future<Output = T>) -> T {
        self.is_awaited.set(true);
        let _until = OnDrop(|| self.is_awaited.set(false));
        let mut future = pin!(future);
        let mut given_up = pin!(async {
            match &self.give_up {
                Some(give_up) => give_up.wait().await,
                None => std::future::pending().await,
            }
        });
        let mut is_given_up = false;
        std::future::poll_fn(|context| {
            loop {
                self.deliver();
                if let Poll::Ready(value) = future.as_mut().poll(context) {
                    return Poll::Ready(value);
                }
                if !is_given_up && given_up.as_mut().poll(context).is_ready() {
                    is_given_up = true;
                } else if self.waits_for_reports(context) {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Whether nothing was reported. If so, the next report wakes the task.
    fn waits_for_reports(&self, context: &Context<'_>) -> bool {
        let mut reports = self.ended.lock();
        reports.waker = Some(context.waker().clone());
        reports.list.is_empty()
    }

    fn is_given_up(&self) -> bool {
        self.give_up.as_ref().is_some_and(|give_up| give_up.is_given_up())
    }

    /// Reports what has ended, or has to end, to those who asked.
    fn deliver(&self) {
        let list = std::mem::take(&mut self.ended.lock().list);
        for (id, end) in list {
            // Nobody waits for a call that was given up.
            let in_flight = self.in_flight.borrow_mut().remove(&id);
            if let Some(InFlight { done, data, .. }) = in_flight {
                done.complete(end.map(|found| {
                    if let (Some(data), Some(found)) = (data, found) {
                        data.copy_from_slice(0, &found);
                    }
                }));
            }
        }
        if !self.is_given_up() {
            return;
        }
        let (ends, waits) = self.in_flight.take().into_iter().partition(|(_, call)| call.may_end);
        self.in_flight.replace(waits);
        let ends: BTreeMap<u64, InFlight> = ends;
        for InFlight { done, is_out_of_step, .. } in ends.into_values() {
            is_out_of_step.set(true);
            done.complete(Err(given_up()));
        }
    }

    /// Waits for the end of one call.
    fn wait_for(&self, id: u64) {
        loop {
            self.deliver();
            if !self.in_flight.borrow().contains_key(&id) {
                return;
            }
            let reports = self.ended.lock();
            drop(self.ended.came.wait_timeout_while(reports, LOOK, |reports| reports.list.is_empty()));
        }
    }

    fn next_id(&self) -> u64 {
        let id = self.next.get();
        self.next.set(id.wrapping_add(1));
        id
    }
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// What the threads of one file have to do.
#[derive(Default)]
struct Desk {
    state: Mutex<DeskState>,
    asked: Condvar,
}

#[derive(Default)]
struct DeskState {
    calls: VecDeque<(u64, Call)>,
    threads: usize,
    idle_threads: usize,
    /// The job is gone, or wants nothing more of this file.
    is_closed: bool,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(u64, Call)> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(call) = state.calls.pop_front() {
                return Some(call);
            }
            state.idle_threads = state.idle_threads.saturating_add(1);
            state = self.asked.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle_threads = state.idle_threads.saturating_sub(1);
        }
    }

    /// Adds a call; whether there are more calls than threads that wait for one.
    fn ask(&self, id: u64, call: Call) -> bool {
        let mut state = self.lock();
        state.calls.push_back((id, call));
        let wants_thread = state.calls.len() > state.idle_threads && state.threads < THREADS_MAX;
        drop(state);
        self.asked.notify_one();
        wants_thread
    }
}

/// Reports an error if its thread ends without another report.
struct Unreported<'a> {
    ended: &'a Ended,
    id: Option<u64>,
}

impl Drop for Unreported<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.ended.report(id, Err(IoError::EIO));
        }
    }
}

/// The calls of one file.
struct Calls {
    file: Arc<dyn File>,
    desk: Arc<Desk>,
    job: Rc<JobCalls>,
    may_end: Ends,
    /// A call was given up, so no later one may follow it.
    is_out_of_step: Rc<Cell<bool>>,
}

impl Calls {
    fn begin(job: &Rc<JobCalls>, file: &Arc<dyn File>, may_end: Ends) -> Result<Rc<dyn FileQueue>> {
        let calls = Self {
            file: Arc::clone(file),
            desk: Arc::default(),
            job: Rc::clone(job),
            may_end,
            is_out_of_step: Rc::default(),
        };
        let (opened, is_open) = std::sync::mpsc::channel();
        calls.add_thread(move |result| opened.send(result).unwrap_or(()))?;
        let panicked = |_| Error::new(ErrorKind::Io, "a file could not be opened once more");
        is_open.recv().map_err(panicked)??;
        Ok(Rc::new(calls))
    }

    fn add_thread(&self, opened: impl FnOnce(Result<()>) + Send + 'static) -> Result<()> {
        {
            let mut state = self.desk.lock();
            state.threads = state.threads.saturating_add(1);
        }
        let (desk, file, ended) = (Arc::clone(&self.desk), Arc::clone(&self.file), Arc::clone(&self.job.ended));
        let run = move || {
            let queue = match file.open_blocking() {
                Ok(queue) => queue,
                Err(error) => return opened(Err(error)),
            };
            opened(Ok(()));
            // The job that asks may be gone at any time.
            while let Some((id, call)) = desk.next() {
                let mut unreported = Unreported { ended: &ended, id: Some(id) };
                let end = call.carry_out(&*queue);
                unreported.id = None;
                ended.report(id, end);
            }
        };
        let started = std::thread::Builder::new().name("calls".to_owned()).spawn(run);
        started.map(drop).map_err(|error| Error::io("cannot start a thread", error))
    }
}

impl FileQueue for Calls {
    fn push(&self, FileIo { op, done, .. }: FileIo) {
        let may_end = self.may_end == Ends::All || matches!(op, FileOp::Read { .. });
        if self.job.is_given_up() && (may_end || self.is_out_of_step.get()) {
            return done.complete(Err(given_up()));
        }
        let call = match Call::of(&op) {
            Ok(call) => call,
            Err(error) => return done.complete(Err(error)),
        };
        let data = match op {
            FileOp::Read { data, .. } => Some(data),
            _ => None,
        };
        let (id, is_out_of_step) = (self.job.next_id(), Rc::clone(&self.is_out_of_step));
        self.job.in_flight.borrow_mut().insert(id, InFlight { done, data, may_end, is_out_of_step });
        let wants_thread = self.desk.ask(id, call);
        if !self.job.is_awaited.get() {
            return self.job.wait_for(id);
        }
        // The threads that are there go on alone if no other can be had.
        if wants_thread && let Err(error) = self.add_thread(|_| ()) {
            tracing::debug!("{error}");
        }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.desk.lock().is_closed = true;
        self.desk.asked.notify_all();
    }
}

#[cfg(test)]
mod tests;
