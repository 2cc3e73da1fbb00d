//! Many pieces of work in flight at once: one thread hands them out, and tasks on reactors do them.

use crate::Control;
use crate::rate::RateLimit;
use block::{Error, ErrorKind, ReactorCtx, ReactorHandle, Result, WaitList, run_and_wait};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often progress is reported and the caller's cancel flag checked.
const TICK: Duration = Duration::from_millis(50);
/// The most pieces that wait, for each task.
const WAITING_PER_TASK: usize = 2;
/// At least this many pieces may wait altogether, so that the thread that hands out does not wake up for every few.
const WAITING_AT_LEAST: usize = 256;

/// Carries out pieces of work on one reactor.
pub(crate) trait Worker: 'static {
    /// A piece.
    type Item: Send + 'static;
    /// The state that a task keeps from piece to piece.
    type Scratch: 'static;

    /// Makes the state of a task.
    fn scratch(&self) -> Self::Scratch;

    /// Carries out one piece.
    fn work(&self, item: Self::Item, scratch: &mut Self::Scratch) -> impl Future<Output = Result<()>>;
}

struct State<T> {
    /// Pieces, and how many bytes of the disk each stands for.
    waiting: VecDeque<(T, u64)>,
    closed: bool,
    error: Option<Error>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// A piece was taken, or a task failed.
    taken: Condvar,
    /// A piece was added, or none will be.
    added: WaitList,
    done_bytes: AtomicU64,
    /// The most pieces that may wait.
    capacity: usize,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next piece; `None` when there will be no more.
    async fn next(&self) -> Option<(T, u64)> {
        let look = || {
            let mut state = self.lock();
            match state.waiting.pop_front() {
                Some(item) => Some((Some(item), state.waiting.len())),
                None => state.closed.then_some((None, 0)),
            }
        };
        let (next, left) = self.added.until(look).await;
        // Not after each piece: waking a thread costs as much as copying one.
        if left <= self.capacity / 2 {
            self.taken.notify_one();
        }
        next
    }

    fn close(&self, drop_waiting: bool) {
        let mut state = self.lock();
        state.closed = true;
        if drop_waiting {
            state.waiting.clear();
        }
        drop(state);
        self.added.wake_all();
    }

    fn fail(&self, error: Error) {
        self.lock().error.get_or_insert(error);
        self.close(true);
        self.taken.notify_one();
    }
}

/// The tasks of a reactor. When the last has ended, the worker is dropped, and then the sender, which reports the end.
struct Running<W> {
    worker: W,
    _ended: Sender<()>,
}

/// A task at work. If its reactor panics, the task is dropped together with its piece. Then the job must fail.
struct AtWork<'a, T>(&'a Shared<T>);

impl<T> AtWork<'_, T> {
    fn ended(self) {
        std::mem::forget(self);
    }
}

impl<T> Drop for AtWork<'_, T> {
    fn drop(&mut self) {
        self.0.fail(Error::new(ErrorKind::Io, "a reactor ended in the midst of its work"));
    }
}

async fn run_task<W: Worker>(shared: Arc<Shared<W::Item>>, running: Rc<Running<W>>) {
    let at_work = AtWork(&shared);
    let mut scratch = running.worker.scratch();
    while let Some((item, bytes)) = shared.next().await {
        if let Err(error) = running.worker.work(item, &mut scratch).await {
            shared.fail(error);
            break;
        }
        shared.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
    at_work.ended();
}

/// Starts tasks on a reactor.
struct Starter<W: Worker, F> {
    shared: Arc<Shared<W::Item>>,
    open: Arc<F>,
    tasks: usize,
    sender: Sender<()>,
}

impl<W, F> Starter<W, F>
where
    W: Worker,
    F: Fn(&Rc<dyn ReactorCtx>) -> Result<W> + Send + Sync + 'static,
{
    fn on(&self, reactor: &Arc<dyn ReactorHandle>) {
        let (shared, open, sender) = (Arc::clone(&self.shared), Arc::clone(&self.open), self.sender.clone());
        let tasks = self.tasks;
        let start = move |ctx: &Rc<dyn ReactorCtx>| -> Result<()> {
            let running = Rc::new(Running { worker: open(ctx)?, _ended: sender });
            for _ in 0..tasks {
                ctx.spawn(block::Task::new(run_task(Arc::clone(&shared), Rc::clone(&running))));
            }
            Ok(())
        };
        if let Err(error) = run_and_wait(reactor.as_ref(), start).and_then(|started| started) {
            self.shared.fail(error);
        }
    }
}

/// The reactors that work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// All, from the start.
    All,
    /// The first, until [`Pipeline::widen`]. If pieces only pass through, the kernel's copies take the time. The kernel
    /// takes writes to one file one by one, and reactors that wait for each other there do not read.
    First,
    /// All, with one task each. Reactors copy everything themselves, and find in the processor's cache what they have
    /// just read.
    OneTaskEach,
}

/// Work on its way.
pub(crate) struct Pipeline<T> {
    shared: Arc<Shared<T>>,
    ended: Receiver<()>,
    total_bytes: u64,
    rate: Mutex<RateLimit>,
    /// Starts tasks on the reactors that have none yet.
    widen: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl<T: Send + 'static> Pipeline<T> {
    /// Starts at most `tasks` tasks on each reactor. `open` makes a reactor's worker, on its thread.
    pub(crate) fn start<W: Worker<Item = T>>(
        reactors: &[Arc<dyn ReactorHandle>],
        spread: Spread,
        tasks: usize,
        total_bytes: u64,
        open: impl Fn(&Rc<dyn ReactorCtx>) -> Result<W> + Send + Sync + 'static,
    ) -> Self {
        let state = State { waiting: VecDeque::new(), closed: false, error: None };
        let tasks = if spread == Spread::OneTaskEach { 1 } else { tasks };
        let capacity = (tasks * reactors.len() * WAITING_PER_TASK).max(WAITING_AT_LEAST);
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            taken: Condvar::new(),
            added: WaitList::default(),
            done_bytes: AtomicU64::new(0),
            capacity,
        });
        let (sender, ended) = channel();
        let start = Starter { shared: Arc::clone(&shared), open: Arc::new(open), tasks, sender };
        let at_once = match spread {
            Spread::All | Spread::OneTaskEach => reactors.len(),
            Spread::First => 1.min(reactors.len()),
        };
        let (now, later) = reactors.split_at(at_once);
        now.iter().for_each(|reactor| start.on(reactor));
        let later = later.to_vec();
        let widen: Box<dyn FnOnce() + Send> = Box::new(move || later.iter().for_each(|reactor| start.on(reactor)));
        Self { shared, ended, total_bytes, rate: Mutex::new(RateLimit::new(None)), widen: Mutex::new(Some(widen)) }
    }

    /// Notes that pieces now need more than passing through.
    pub(crate) fn widen(&self) {
        let widen = self.widen.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(widen) = widen {
            widen();
        }
    }

    /// Limits how many bytes a second pass [`Pipeline::pass`].
    pub(crate) fn limited(self, bytes_per_second: Option<u64>) -> Self {
        Self { rate: Mutex::new(RateLimit::new(bytes_per_second)), ..self }
    }

    /// Waits until the rate allows `bytes` more.
    pub(crate) fn pass(&self, bytes: u64, control: &Control<'_>) {
        self.rate.lock().unwrap_or_else(PoisonError::into_inner).pass(bytes, control);
    }

    /// Hands out a piece that stands for `bytes` of the disk; waits for room. Returns false if no more is wanted; see
    /// [`Pipeline::finish`].
    pub(crate) fn push(&self, item: T, bytes: u64, control: &mut Control<'_>) -> bool {
        let mut state = self.shared.lock();
        while state.waiting.len() >= self.shared.capacity && !state.closed {
            // Progress is reported before the wait: under a simulator, only that makes time pass.
            drop(state);
            control.tell(self.shared.done_bytes.load(Ordering::Relaxed), self.total_bytes);
            if control.check().is_err() {
                return false;
            }
            state = self.shared.lock();
            if state.waiting.len() >= self.shared.capacity && !state.closed {
                (state, _) = self.shared.taken.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner);
            }
        }
        if state.closed {
            return false;
        }
        state.waiting.push_back((item, bytes));
        drop(state);
        self.shared.added.wake_all();
        control.check().is_ok()
    }

    /// Counts bytes of the disk that need no work.
    pub(crate) fn skip(&self, bytes: u64) {
        self.shared.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Waits for everything that was handed out. Fails if a piece failed or the job was cancelled. No queue is open
    /// afterwards.
    pub(crate) fn finish(mut self, control: &mut Control<'_>) -> Result<()> {
        self.shared.close(control.check().is_err());
        // No pieces are added from here on.
        self.widen = Mutex::default();
        loop {
            if control.check().is_err() {
                self.shared.close(true);
            }
            control.tell(self.shared.done_bytes.load(Ordering::Relaxed), self.total_bytes);
            match self.ended.recv_timeout(TICK) {
                // All senders are gone, so no task works any more.
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        if let Some(error) = self.shared.lock().error.take() {
            return Err(error);
        }
        control.check()?;
        control.tell(self.total_bytes, self.total_bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Progress;
    use engine::{Reactor, ReactorConfig};
    use std::sync::atomic::AtomicBool;

    struct PanicsAt(u64);

    impl Worker for PanicsAt {
        type Item = u64;
        type Scratch = ();

        fn scratch(&self) {}

        async fn work(&self, item: u64, (): &mut ()) -> Result<()> {
            assert_ne!(item, self.0, "the panic that the test wants");
            Ok(())
        }
    }

    #[test]
    fn work_that_a_panic_took_along_is_not_called_done() {
        let cancel = AtomicBool::new(false);
        for spread in [Spread::All, Spread::First] {
            // New ones each time: either may be the one that panics.
            let reactors: Vec<_> = (0..2).map(|_| Reactor::spawn(ReactorConfig::default()).unwrap()).collect();
            let handles: Vec<_> = reactors.iter().map(|reactor| reactor.handle()).collect();
            let mut silent = |_: Progress| ();
            let mut control = Control::new(&cancel, &mut silent);
            let pipeline = Pipeline::start(&handles, spread, 1, 1000, |_| Ok(PanicsAt(3)));
            let pushed = (0..1000).take_while(|item| pipeline.push(*item, 1, &mut control)).count();
            assert!(pushed > 3, "nothing happened");
            let error = pipeline.finish(&mut control).expect_err("a piece is missing");
            assert!(error.to_string().contains("reactor"), "{error}");
        }
    }
}
