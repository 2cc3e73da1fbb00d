//! Waiting, in a task, for something that another task (perhaps on another thread) does.

use crate::sync::{Mutex, MutexGuard, PoisonError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Tasks that wait for a condition which lives elsewhere. Call [`WaitList::wake_all`] after each change of the
/// condition. For slow paths only, because it wakes all of them.
#[derive(Debug, Default)]
pub struct WaitList {
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    waiting: Vec<Waker>,
    /// The list that was woken last, empty: it is used again.
    spare: Vec<Waker>,
}

/// The room of a list when it is first needed, so that it rarely grows.
const ROOM: usize = 64;

impl WaitList {
    /// Wakes everybody that waits.
    pub fn wake_all(&self) {
        let mut lists = self.lock();
        if lists.waiting.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut lists.spare);
        let mut waiting = std::mem::replace(&mut lists.waiting, spare);
        drop(lists);
        for waker in waiting.drain(..) {
            waker.wake();
        }
        let mut lists = self.lock();
        if lists.spare.capacity() < waiting.capacity() {
            lists.spare = waiting;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
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
            let Lists { waiting, spare } = &mut *self.list.lock();
            for list in [&mut *waiting, spare] {
                if list.capacity() == 0 {
                    list.reserve_exact(ROOM);
                }
            }
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
