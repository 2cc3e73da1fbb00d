//! Work on another thread, and a future that ends with it.

use crate::{IoError, IoResult};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// A computation for another thread. It is dropped without being run if no thread is left to run it.
pub type Work = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Slot<T> {
    value: Option<T>,
    waker: Option<Waker>,
    has_ended: bool,
}

#[derive(Debug)]
struct Shared<T>(Mutex<Slot<T>>);

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the wait, with or without a value.
struct Ending<T>(Arc<Shared<T>>);

impl<T> Drop for Ending<T> {
    fn drop(&mut self) {
        let mut slot = self.0.lock();
        slot.has_ended = true;
        let waker = slot.waker.take();
        drop(slot);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Makes `compute` into work and a future of its result. The future fails if the work is dropped or panics. Once the
/// future is dropped, work that has not begun computes nothing.
pub(crate) fn aside<T: Send + 'static>(
    compute: impl FnOnce() -> T + Send + 'static,
) -> (Work, impl Future<Output = IoResult<T>>) {
    let shared = Arc::new(Shared(Mutex::new(Slot { value: None, waker: None, has_ended: false })));
    let ending = Ending(Arc::clone(&shared));
    let work = move || {
        // Many may be queued for a guest that has gone: a reactor that ends waits for them all.
        let is_awaited = Arc::strong_count(&ending.0) > 1;
        if !is_awaited {
            return;
        }
        let value = compute();
        ending.0.lock().value = Some(value);
    };
    (Box::new(work), Waiting(shared))
}

struct Waiting<T>(Arc<Shared<T>>);

impl<T> Future for Waiting<T> {
    type Output = IoResult<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult<T>> {
        let mut slot = self.0.lock();
        if slot.has_ended {
            return Poll::Ready(slot.value.take().ok_or(IoError::EIO));
        }
        slot.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(all(test, not(feature = "explore")))]
mod tests {
    use super::*;
    use crate::block_on;

    #[test]
    fn what_another_thread_computes_comes_back_and_what_nobody_computes_is_an_error() {
        let (work, value) = aside(|| 7);
        let thread = std::thread::spawn(work);
        assert_eq!(block_on(value), Ok(7));
        thread.join().unwrap();
        let (work, value) = aside(|| 7);
        drop(work);
        assert_eq!(block_on(value), Err(IoError::EIO));
        let (work, value) = aside(|| assert!(std::hint::black_box(false), "on purpose"));
        std::thread::spawn(work).join().unwrap_err();
        assert_eq!(block_on(value), Err(IoError::EIO));
    }

    #[test]
    fn what_nobody_waits_for_is_not_computed_and_what_it_holds_is_freed() {
        let held = Arc::new(());
        let holds = Arc::clone(&held);
        let (work, value) = aside(move || {
            assert_eq!(Arc::strong_count(&holds), 0, "it is computed");
        });
        drop(value);
        work();
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
