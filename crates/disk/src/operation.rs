//! An operation that runs on the disk's thread, and those who wait for it.

use block::{Error, ErrorKind, Result};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A running operation: await it, or [`wait`](Operation::wait) for it.
///
/// It has begun already. If this is dropped, the operation still ends, but nobody learns the result.
#[must_use = "an operation can fail: await it, or wait for it"]
pub struct Operation<T> {
    shared: Arc<Shared<T>>,
}

/// Reports how the operation has ended. If dropped before, it reports that the disk's thread has ended.
pub(crate) struct Completer<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    ended: Condvar,
}

struct State<T> {
    result: Option<Result<T>>,
    waker: Option<Waker>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the result. Only the first call counts.
    fn end(&self, result: impl FnOnce() -> Result<T>) {
        let waker = {
            let mut state = self.lock();
            if state.result.is_some() {
                return;
            }
            state.result = Some(result());
            state.waker.take()
        };
        self.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Operation<T> {
    pub(crate) fn new() -> (Self, Completer<T>) {
        let state = Mutex::new(State { result: None, waker: None });
        let shared = Arc::new(Shared { state, ended: Condvar::new() });
        (Self { shared: Arc::clone(&shared) }, Completer { shared })
    }

    /// Makes an operation that failed before it began.
    pub(crate) fn failed(error: Error) -> Self {
        Self::ended(Err(error))
    }

    /// Makes an operation that has ended already.
    pub(crate) fn ended(result: Result<T>) -> Self {
        let (operation, completer) = Self::new();
        completer.complete(result);
        operation
    }

    /// Waits for the operation to end, on the calling thread.
    pub fn wait(self) -> Result<T> {
        let mut state = self.shared.lock();
        loop {
            match state.result.take() {
                Some(result) => return result,
                None => state = self.shared.ended.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl<T> Completer<T> {
    pub(crate) fn complete(self, result: Result<T>) {
        self.shared.end(|| result);
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        // After `complete`, this changes nothing, unless the result was taken already: then nobody looks again.
        self.shared.end(|| Err(Error::new(ErrorKind::Io, "the disk was closed before the operation ended")));
    }
}

impl<T> Future for Operation<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let mut state = self.shared.lock();
        match state.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> fmt::Debug for Operation<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.shared.lock().result.is_some();
        f.debug_struct("Operation").field("ended", &ended).finish()
    }
}
