//! Ways for a task to wait for another task, perhaps on another thread, and to let others go first.

use crate::sync::{Mutex, MutexGuard, PoisonError};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// A list of tasks that wait for a condition which lives elsewhere. Call [`WaitList::wake_all`] after each change of
/// the condition. For slow paths only, because it wakes all tasks.
#[derive(Debug, Default)]
pub struct WaitList {
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    waiting: Vec<Waker>,
    /// The number of times that the waiting tasks were woken.
    rounds: u64,
    /// The list that was woken last, empty: it is reused.
    spare: Vec<Waker>,
}

/// The room of a list when it is first needed, so that it rarely grows.
const ROOM: usize = 64;

impl WaitList {
    /// Wakes all tasks that wait.
    pub fn wake_all(&self) {
        let mut lists = self.lock();
        if lists.waiting.is_empty() {
            return;
        }
        let spare = std::mem::take(&mut lists.spare);
        let mut waiting = std::mem::replace(&mut lists.waiting, spare);
        lists.rounds = lists.rounds.wrapping_add(1);
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

    /// Waits until `ready` returns a value. `ready` is called again after each [`WaitList::wake_all`], and once more
    /// when the task is on the list, so no wake-up is lost.
    pub fn until<T, F: FnMut() -> Option<T> + Unpin>(&self, ready: F) -> Wait<'_, F> {
        Wait { list: self, ready, place: None }
    }
}

/// The future of [`WaitList::until`].
#[derive(Debug)]
pub struct Wait<'a, F> {
    list: &'a WaitList,
    ready: F,
    /// The round, and the place on its list.
    place: Option<(u64, usize)>,
}

impl<T, F: FnMut() -> Option<T> + Unpin> Future for Wait<'_, F> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        if let Some(value) = (self.ready)() {
            return Poll::Ready(value);
        }
        let mut place = self.place;
        {
            let Lists { waiting, rounds, spare } = &mut *self.list.lock();
            for list in [&mut *waiting, spare] {
                if list.capacity() == 0 {
                    list.reserve_exact(ROOM);
                }
            }
            // Many may wait, so a task remembers its place and does not search the list.
            let own = self.place.filter(|(round, _)| round == rounds).and_then(|(_, index)| waiting.get_mut(index));
            match own {
                Some(waker) => waker.clone_from(context.waker()),
                None => {
                    place = Some((*rounds, waiting.len()));
                    waiting.push(context.waker().clone());
                }
            }
        }
        self.place = place;
        // The change may have come between the first look and the list.
        match (self.ready)() {
            Some(value) => Poll::Ready(value),
            None => Poll::Pending,
        }
    }
}

/// Lets other work of the thread run between two steps of a long task that waits for nothing. Code that walks tables
/// for a guest calls it after each bounded step.
pub async fn yield_now() {
    let mut has_yielded = false;
    std::future::poll_fn(|context| match std::mem::replace(&mut has_yielded, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

#[cfg(all(test, not(feature = "explore")))]
mod tests {
    use super::*;
    use std::pin::pin;

    #[test]
    fn a_task_that_looks_again_unasked_stands_on_the_list_once() {
        let list = WaitList::default();
        let mut context = Context::from_waker(Waker::noop());
        let mut waits: Vec<_> = (0..3).map(|_| Box::pin(list.until(|| None::<()>))).collect();
        for round in 0..3 {
            for _ in 0..2 {
                waits.iter_mut().for_each(|wait| assert!(wait.as_mut().poll(&mut context).is_pending()));
            }
            assert_eq!(list.lock().waiting.len(), 3, "round {round}");
            list.wake_all();
        }
    }

    #[test]
    fn yielding_gives_way_once_and_asks_to_go_on() {
        let mut context = Context::from_waker(Waker::noop());
        let mut yields = pin!(yield_now());
        assert!(yields.as_mut().poll(&mut context).is_pending());
        assert!(yields.as_mut().poll(&mut context).is_ready());
    }
}
