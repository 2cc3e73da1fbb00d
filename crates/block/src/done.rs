//! How the end of an operation reaches the one who asked for it. On the fast path that is a [`Sink`] which its owner
//! drains; on the slow path, a [`Waiter`] that a task awaits.

use crate::IoResult;
use memory::{PoolRc, room_for};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The receiver of an operation's end.
#[derive(Debug, Clone)]
pub enum Done {
    /// A queue that drains its sink each turn.
    Sink {
        /// The queue's sink.
        sink: Rc<Sink>,
        /// The owner's name for the operation.
        token: u64,
    },
    /// The task that awaits it.
    Waiter(PoolRc<Waiter>),
}

impl Done {
    /// Reports the end. Called once for each operation.
    pub fn complete(self, result: IoResult) {
        match self {
            Self::Sink { sink, token } => sink.put(token, result),
            Self::Waiter(waiter) => waiter.complete(result),
        }
    }
}

/// Collects the ends of a queue's operations until the queue takes them. Allocates only to grow to the peak.
#[derive(Debug, Default)]
pub struct Sink {
    done: RefCell<Vec<(u64, IoResult)>>,
    keep: RefCell<Option<Box<dyn Any>>>,
}

impl Sink {
    /// Makes an empty sink.
    #[must_use]
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    /// Adds the end of the operation `token`.
    pub fn put(&self, token: u64, result: IoResult) {
        self.done.borrow_mut().push((token, result));
    }

    /// Makes room for `count` ends at once, so that adding them allocates nothing.
    pub fn reserve(&self, count: usize) {
        let mut done = self.done.borrow_mut();
        let missing = count.saturating_sub(done.len());
        done.reserve(missing);
    }

    /// Whether nothing has come in.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.done.borrow().is_empty()
    }

    /// Keeps `value` until the sink is dropped. Operations in flight hold their sink. So a queue that is dropped before
    /// them leaves its part in the image's epochs here, which must outlive them.
    pub fn keep(&self, value: Box<dyn Any>) {
        *self.keep.borrow_mut() = Some(value);
    }

    /// Swaps the results that have come in with `empty`, a cleared vector that the caller keeps so that nothing is
    /// allocated.
    pub fn take(&self, empty: &mut Vec<(u64, IoResult)>) {
        debug_assert!(empty.is_empty());
        std::mem::swap(&mut *self.done.borrow_mut(), empty);
    }
}

room_for!(Waiter, "end of an operation that a task awaits");

/// The end of one operation, awaited by a task. Dropping the future that waits is safe: the engine still holds this and
/// the operation's memory.
#[derive(Debug, Default)]
pub struct Waiter {
    result: Cell<Option<IoResult>>,
    waker: RefCell<Option<Waker>>,
    /// A value that lives until the operation has ended, even if the task is dropped.
    _keep: Option<Rc<dyn Any>>,
}

impl Waiter {
    /// Makes a waiter.
    #[must_use]
    pub fn new() -> PoolRc<Self> {
        PoolRc::default()
    }

    /// Makes a waiter that keeps `value` until the operation has ended, even if the task is dropped.
    #[must_use]
    pub fn keeping(value: Rc<dyn Any>) -> PoolRc<Self> {
        PoolRc::new(Self { _keep: Some(value), ..Self::default() })
    }

    /// Returns a future of the operation's end.
    pub fn wait(this: &PoolRc<Self>) -> impl Future<Output = IoResult> + use<> {
        WaitForIo(this.clone())
    }

    fn complete(&self, result: IoResult) {
        self.result.set(Some(result));
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

pub(crate) struct WaitForIo(pub(crate) PoolRc<Waiter>);

impl Future for WaitForIo {
    type Output = IoResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        match self.0.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                *self.0.waker.borrow_mut() = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
