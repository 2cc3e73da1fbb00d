//! Answers that are waited for: librbd's, and those of calls that block.

use block::{IoError, IoResult};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};

struct Slot<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    answer: Option<IoResult<T>>,
    waker: Option<Waker>,
}

impl<T> Slot<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody waits.
trait Waits: Send + Sync {
    /// Gives an error unless there is an answer, and wakes whoever waits.
    fn end(&self);
}

impl<T: Send> Waits for Slot<T> {
    fn end(&self) {
        let waker = {
            let mut state = self.state();
            state.answer.get_or_insert(Err(IoError::EIO));
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Where an answer is told, by any thread. One that is dropped has failed, so nobody waits for ever.
pub(crate) struct Reply<T: Send>(Arc<Slot<T>>);

impl<T: Send> Reply<T> {
    pub(crate) fn give(self, answer: IoResult<T>) {
        // One that was given up has its answer.
        let spare = {
            let mut state = self.0.state();
            match state.answer {
                None => {
                    state.answer = Some(answer);
                    None
                }
                Some(_) => Some(answer),
            }
        };
        drop(spare);
    }
}

impl<T: Send> Drop for Reply<T> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// All that wait for one image.
#[derive(Default)]
pub(crate) struct Calls {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    is_cancelled: bool,
    /// Those who wait, and others that are gone.
    slots: Vec<Weak<dyn Waits>>,
    /// With so many of them, those that are gone are left out.
    slots_max: usize,
}

/// What [`Waiting::slots_max`] is at least.
const SLOTS_MIN: usize = 256;

impl Waiting {
    fn remember(&mut self, slot: Weak<dyn Waits>) {
        if self.slots.len() >= self.slots_max {
            self.slots.retain(|slot| slot.strong_count() > 0);
            self.slots_max = self.slots.len().saturating_mul(2).max(SLOTS_MIN);
        }
        self.slots.push(slot);
    }
}

impl Calls {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets `start` begin something, and awaits the answer. Whoever stops waiting leaves it to its end.
    pub(crate) async fn ask<T: Send + 'static>(&self, start: impl FnOnce(Reply<T>)) -> IoResult<T> {
        let slot = Arc::new(Slot { state: Mutex::new(State { answer: None, waker: None }) });
        {
            let mut waiting = self.waiting();
            if waiting.is_cancelled {
                return Err(IoError::EIO);
            }
            let weak: Weak<Slot<T>> = Arc::downgrade(&slot);
            waiting.remember(weak);
        }
        start(Reply(Arc::clone(&slot)));
        poll_fn(|context| {
            let mut state = slot.state();
            match state.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    state.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// As [`Self::ask`], of a call that blocks: a thread makes it. For what is rare.
    pub(crate) async fn ask_aside<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> IoResult<T> + Send + 'static,
    ) -> IoResult<T> {
        self.ask(|reply: Reply<T>| {
            let named = std::thread::Builder::new().name("rbd-call".into());
            if let Err(error) = named.spawn(move || reply.give(call())) {
                // The reply is gone with the thread's work.
                tracing::error!("cannot start a thread for a call of librbd: {error}");
            }
        })
        .await
    }

    /// All that wait get an error at once, and so does whoever asks later.
    pub(crate) fn cancel(&self) {
        let slots = {
            let mut waiting = self.waiting();
            waiting.is_cancelled = true;
            std::mem::take(&mut waiting.slots)
        };
        slots.iter().filter_map(Weak::upgrade).for_each(|slot| slot.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::block_on;

    #[test]
    fn an_answer_that_nobody_gives_is_an_error_and_so_is_one_that_was_given_up() {
        let calls = Calls::default();
        assert_eq!(block_on(calls.ask(|reply| reply.give(Ok(7)))), Ok(7));
        assert_eq!(block_on(calls.ask(|reply: Reply<()>| drop(reply))), Err(IoError::EIO));
        let mut kept = None;
        let given_up = block_on(calls.ask(|reply: Reply<u8>| {
            kept = Some(reply);
            calls.cancel();
        }));
        assert_eq!(given_up, Err(IoError::EIO));
        kept.take().unwrap().give(Ok(1));
        assert_eq!(block_on(calls.ask(|reply| reply.give(Ok(7)))), Err(IoError::EIO));
    }

    #[test]
    fn calls_that_block_are_made_by_another_thread() {
        let here = std::thread::current().id();
        let there = block_on(Calls::default().ask_aside(|| Ok(std::thread::current().id()))).unwrap();
        assert_ne!(here, there);
    }
}
