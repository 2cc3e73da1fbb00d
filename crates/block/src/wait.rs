//! Waiting, in a task, for something that another task (perhaps on another thread) does.

use crate::sync::{Mutex, PoisonError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Tasks that wait for a condition which lives elsewhere. Whoever changes the condition calls [`WaitList::wake_all`]
/// after the change. For slow paths: waking wakes everybody.
#[derive(Debug, Default)]
pub struct WaitList {
    waiting: Mutex<Vec<Waker>>,
}

impl WaitList {
    /// Wakes everybody that waits.
    pub fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        for waker in waiting {
            waker.wake();
        }
    }

    /// Waits until `ready` gives a value. It is asked again after each [`WaitList::wake_all`], and never between
    /// being asked and being on the list, so no wake-up is lost.
    pub fn until<T, F: FnMut() -> Option<T> + Unpin>(&self, ready: F) -> Wait<'_, F> {
        Wait { list: self, ready }
    }
}

/// The future of [`WaitList::until`].
#[derive(Debug)]
pub struct Wait<'a, F> {
    list: &'a WaitList,
    ready: F,
}

impl<T, F: FnMut() -> Option<T> + Unpin> Future for Wait<'_, F> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        if let Some(value) = (self.ready)() {
            return Poll::Ready(value);
        }
        {
            let mut waiting = self.list.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
        }
        // The change may have come between the first look and the list.
        match (self.ready)() {
            Some(value) => Poll::Ready(value),
            None => Poll::Pending,
        }
    }
}
