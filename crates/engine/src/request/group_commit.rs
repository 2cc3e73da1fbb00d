//! Durable writes through the page cache that share their syncs.
//!
//! The kernel would carry out durable writes one after the other, each with a sync of its own. So they are written
//! plainly, all at once. A sync makes durable all writes that ended before it began. Later ones wait for the next sync.
//! A single durable write is one request (`RWF_DSYNC`), but only if all writes of the file are durable. The kernel
//! reports lost data to one sync only: a durable write could take the report about a plain write's data from the flush
//! that covers that write.

use block::{IoResult, WaitList};
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

/// One reactor's syncs of one file, which run one at a time.
#[derive(Debug, Default)]
pub(crate) struct GroupCommit {
    /// Durable writes that were pushed and have not ended.
    writes: Cell<usize>,
    begun: Cell<u64>,
    ended: Cell<u64>,
    waiting: WaitList,
}

/// A durable write. It is counted when it is pushed, so that the first of a batch knows of the others.
pub(crate) struct DurableWrite(Rc<GroupCommit>);

impl DurableWrite {
    pub(crate) fn new(group: &Rc<GroupCommit>) -> Self {
        group.writes.update(|writes| writes + 1);
        Self(Rc::clone(group))
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.0.writes.get() == 1
    }
}

impl Drop for DurableWrite {
    fn drop(&mut self) {
        self.0.writes.update(|writes| writes.saturating_sub(1));
    }
}

enum Turn {
    Over,
    Mine,
}

impl GroupCommit {
    /// Waits for the end of a sync that begins after this call, and begins it if no other task does. A task that has
    /// begun one must not be dropped before its end (the engines' own never are).
    pub(crate) async fn join<F: Future<Output = IoResult>>(&self, sync: impl FnOnce() -> F) {
        // A sync that has begun may have missed this task's data.
        let wanted = self.begun.get() + 1;
        if let Turn::Mine = self.waiting.until(|| self.turn(wanted)).await {
            // The file remembers whether the sync failed.
            let _ = sync().await;
            self.ended.set(self.begun.get());
            self.waiting.wake_all();
        }
    }

    fn turn(&self, wanted: u64) -> Option<Turn> {
        if self.ended.get() >= wanted {
            return Some(Turn::Over);
        }
        if self.begun.get() > self.ended.get() {
            return None;
        }
        self.begun.set(self.begun.get() + 1);
        Some(Turn::Mine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Waiter;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll};

    fn poll(future: Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
        future.poll(&mut Context::from_waker(std::task::Waker::noop()))
    }

    #[test]
    fn a_sync_makes_durable_what_was_written_before_it_began_and_nothing_else() {
        let group = GroupCommit::default();
        let begun = Cell::new(0);
        let syncs = [(); 3].map(|()| Waiter::new());
        let sync = || {
            let waiter = &syncs[begun.replace(begun.get() + 1)];
            Waiter::wait(waiter)
        };
        let end = |index: usize| block::Done::Waiter(syncs[index].clone()).complete(Ok(()));

        let (mut one, mut two, mut three) = (pin!(group.join(sync)), pin!(group.join(sync)), pin!(group.join(sync)));
        assert_eq!(poll(one.as_mut()), Poll::Pending);
        assert_eq!((poll(two.as_mut()), poll(three.as_mut()), begun.get()), (Poll::Pending, Poll::Pending, 1));
        end(0);
        assert_eq!((poll(two.as_mut()), begun.get()), (Poll::Pending, 1), "the first has not told of its end yet");
        assert_eq!(poll(one.as_mut()), Poll::Ready(()));
        // Both were written while the first sync ran: they share the second.
        assert_eq!((poll(two.as_mut()), poll(three.as_mut()), begun.get()), (Poll::Pending, Poll::Pending, 2));
        let mut late = pin!(group.join(sync));
        assert_eq!(poll(late.as_mut()), Poll::Pending);
        end(1);
        assert_eq!(poll(three.as_mut()), Poll::Pending);
        assert_eq!((poll(two.as_mut()), poll(three.as_mut())), (Poll::Ready(()), Poll::Ready(())));
        assert_eq!((poll(late.as_mut()), begun.get()), (Poll::Pending, 3));
        end(2);
        assert_eq!((poll(late.as_mut()), begun.get()), (Poll::Ready(()), 3));
    }
}
