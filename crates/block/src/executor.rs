//! The reactor's own executor for slow work: metadata misses, copy-on-write, allocation, compression.
//!
//! Tasks stay on their thread; wakers may be used from any thread. Dropping the executor drops its tasks. The engine
//! keeps the memory that the kernel may still write.
//!
//! A task's memory comes from the pool ([`Task`]). The executor itself keeps a slot and a waker for each of the most
//! tasks that it has had at once.

use crate::turn;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// A task of the slow path.
pub type Task = memory::PooledFuture;

/// Polls between two looks at the clock.
const POLLS_PER_LOOK: usize = 4;

/// Tasks that there is room for from the beginning.
const ROOM: usize = 64;

struct Shared {
    ready: Mutex<VecDeque<usize>>,
    /// A task is ready. Each turn looks at this flag first, and takes the lock only if it is set.
    has_ready: AtomicBool,
    home: ThreadId,
    /// Called when another thread makes a task ready: wakes a sleeping reactor.
    notify: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    fn ready(&self) -> MutexGuard<'_, VecDeque<usize>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, index: usize) {
        let mut ready = self.ready();
        ready.push_back(index);
        self.has_ready.store(true, Ordering::Release);
    }

    fn pop(&self) -> Option<usize> {
        if !self.has_ready.load(Ordering::Acquire) {
            return None;
        }
        let mut ready = self.ready();
        let index = ready.pop_front();
        self.has_ready.store(!ready.is_empty(), Ordering::Release);
        index
    }
}

struct TaskWaker {
    index: usize,
    queued: AtomicBool,
    shared: Arc<Shared>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.shared.push(self.index);
        if std::thread::current().id() != self.shared.home {
            (self.shared.notify)();
        }
    }
}

struct Slot {
    task: Option<Task>,
    waker: Arc<TaskWaker>,
}

/// Runs tasks on one thread.
pub struct Executor {
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<usize>>,
    live: Cell<usize>,
    shared: Arc<Shared>,
}

impl Executor {
    /// Makes an executor for the calling thread. Other threads call `notify` when they have made a task ready.
    #[must_use]
    pub fn new(notify: Box<dyn Fn() + Send + Sync>) -> Self {
        let ready = Mutex::new(VecDeque::with_capacity(ROOM));
        let shared = Shared { ready, has_ready: AtomicBool::new(false), home: std::thread::current().id(), notify };
        Self {
            slots: RefCell::new(Vec::with_capacity(ROOM)),
            free: RefCell::new(Vec::with_capacity(ROOM)),
            live: Cell::new(0),
            shared: Arc::new(shared),
        }
    }

    /// Adds a task; it is polled by the next [`Executor::run_ready`].
    pub fn spawn(&self, task: Task) {
        let mut slots = self.slots.borrow_mut();
        let free = self.free.borrow_mut().pop();
        let index = match free {
            Some(index) => {
                slots[index].task = Some(task);
                index
            }
            None => {
                let index = slots.len();
                let waker = TaskWaker { index, queued: AtomicBool::new(false), shared: Arc::clone(&self.shared) };
                slots.push(Slot { task: Some(task), waker: Arc::new(waker) });
                // All tasks may be ready, or end, at once. Their room is reserved here, so that nothing allocates
                // later.
                self.reserve(slots.len());
                index
            }
        };
        self.live.set(self.live.get() + 1);
        let waker = Arc::clone(&slots[index].waker);
        drop(slots);
        waker.wake();
    }

    fn reserve(&self, tasks: usize) {
        let mut ready = self.shared.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = tasks.saturating_sub(ready.len());
        ready.reserve(missing);
        let mut free = self.free.borrow_mut();
        let missing = tasks.saturating_sub(free.len());
        free.reserve(missing);
    }

    /// Returns how many tasks have not ended.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.get()
    }

    /// Whether some task is ready.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        !self.shared.ready().is_empty()
    }

    /// Polls tasks until none is ready, and returns the number of polls. Tasks made ready meanwhile run too. `limit`
    /// bounds the polls, so a task that wakes itself cannot starve the rings. Ends earlier if tasks have moved enough
    /// bytes themselves (see [`turn`]).
    pub fn run_ready(&self, limit: usize) -> usize {
        turn::begin();
        let mut polls = 0;
        while polls < limit && !turn::has_moved_enough() {
            let Some(index) = self.shared.pop() else { break };
            self.poll_task(index);
            polls += 1;
        }
        polls
    }

    /// As [`Executor::run_ready`], for about `time` at most. The clock is read only once every few polls, so not at all
    /// if few tasks are ready.
    #[inline]
    pub fn run_for(&self, limit: usize, time: Duration) -> usize {
        turn::begin();
        if self.shared.has_ready.load(Ordering::Acquire) { self.run_those_ready(limit, time) } else { 0 }
    }

    fn run_those_ready(&self, limit: usize, time: Duration) -> usize {
        let (mut polls, mut begun) = (0, None);
        while polls < limit && !turn::has_moved_enough() {
            let Some(index) = self.shared.pop() else { break };
            self.poll_task(index);
            polls += 1;
            if polls.is_multiple_of(POLLS_PER_LOOK) && begun.get_or_insert_with(Instant::now).elapsed() >= time {
                break;
            }
        }
        polls
    }

    fn poll_task(&self, index: usize) {
        // The task leaves its slot while it runs, because it may spawn others.
        let mut slots = self.slots.borrow_mut();
        let slot = &mut slots[index];
        slot.waker.queued.store(false, Ordering::Release);
        // A stale waker of a task that ended finds the slot empty, or wakes the slot's next task without need.
        let Some(mut task) = slot.task.take() else {
            return;
        };
        let waker = Waker::from(Arc::clone(&slot.waker));
        drop(slots);
        match Pin::new(&mut task).poll(&mut Context::from_waker(&waker)) {
            Poll::Pending => self.slots.borrow_mut()[index].task = Some(task),
            Poll::Ready(()) => {
                drop(task);
                self.live.set(self.live.get() - 1);
                self.free.borrow_mut().push(index);
            }
        }
    }
}

struct ThreadWaker(std::thread::Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs one future to its end on the calling thread, which is parked between polls. For opening images and for tools,
/// with queues from [`crate::File::open_blocking`].
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(ThreadWaker(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        // Nothing else of this thread waits for its turn.
        turn::begin();
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WaitList;
    use std::rc::Rc;

    #[test]
    fn a_task_woken_from_another_thread_notifies_and_runs() {
        let notified = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&notified);
        let executor = Executor::new(Box::new(move || flag.store(true, Ordering::SeqCst)));
        let list = Arc::new(WaitList::default());
        let open = Arc::new(AtomicBool::new(false));
        let done = Rc::new(Cell::new(false));
        let (their_list, their_open, their_done) = (Arc::clone(&list), Arc::clone(&open), Rc::clone(&done));
        executor.spawn(Task::new(async move {
            their_list.until(|| their_open.load(Ordering::SeqCst).then_some(())).await;
            their_done.set(true);
        }));
        executor.run_ready(100);
        assert!(!done.get());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                open.store(true, Ordering::SeqCst);
                list.wake_all();
            });
        });
        assert!(notified.load(Ordering::SeqCst));
        executor.run_ready(100);
        assert!(done.get());
        assert_eq!(executor.live(), 0);
    }

    #[test]
    fn a_task_that_wakes_itself_is_bounded_by_the_limit() {
        let executor = Executor::new(Box::new(|| {}));
        executor.spawn(Task::new(std::future::poll_fn(|context| {
            context.waker().wake_by_ref();
            Poll::Pending
        })));
        assert_eq!(executor.run_ready(10), 10);
        assert_eq!(executor.run_for(10, Duration::MAX), 10);
    }

    #[test]
    fn many_tasks_that_are_ready_do_not_all_run_where_there_is_no_time() {
        let executor = Executor::new(Box::new(|| {}));
        (0..30).for_each(|_| executor.spawn(Task::new(async {})));
        assert_eq!(executor.run_for(100, Duration::ZERO), POLLS_PER_LOOK);
        assert_eq!(executor.run_for(100, Duration::MAX), 30 - POLLS_PER_LOOK);
        assert_eq!(executor.run_for(100, Duration::MAX), 0);
    }

    #[test]
    fn tasks_that_move_much_take_several_turns_and_let_others_come_between() {
        let executor = Executor::new(Box::new(|| {}));
        let moved = Rc::new(Cell::new(0));
        for _ in 0..2 {
            let moved = Rc::clone(&moved);
            executor.spawn(Task::new(async move {
                for _ in 0..32 {
                    moved.set(moved.get() + turn::STEP_BYTES);
                    turn::moved(turn::STEP_BYTES).await;
                }
            }));
        }
        let (mut turns, mut before) = (0, 0);
        while executor.run_ready(1000) > 0 {
            assert!(moved.get() - before <= 2 << 20, "{} bytes in a turn", moved.get() - before);
            (turns, before) = (turns + 1, moved.get());
        }
        assert!(moved.get() == 64 * turn::STEP_BYTES && turns >= 8, "{turns}");
        assert_eq!(executor.live(), 0);
    }
}
