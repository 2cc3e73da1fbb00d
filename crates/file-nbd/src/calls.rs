//! Calls to the thread that owns the connections.

use block::{IoError, IoResult};
use memory::{Lent, PooledBuf};
use nbd_wire::reply::Extent;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::{Deref, Range};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};

/// Data of a write: a part of a buffer, which other parts may share.
#[derive(Debug, Clone)]
pub(crate) struct Payload {
    buffer: Arc<PooledBuf>,
    part: Range<usize>,
}

impl Payload {
    /// Wraps a whole buffer.
    pub(crate) fn new(buffer: PooledBuf) -> Self {
        let part = 0..buffer.len();
        Self { buffer: Arc::new(buffer), part }
    }

    /// Returns the part with these bytes, as far as they exist.
    pub(crate) fn part(&self, range: Range<usize>) -> Self {
        let at = |index: usize| self.part.start.saturating_add(index).min(self.part.end);
        Self { buffer: Arc::clone(&self.buffer), part: at(range.start)..at(range.end) }
    }

    /// Returns the size of the memory that the part keeps, in bytes.
    pub(crate) fn held_bytes(&self) -> usize {
        self.buffer.held_bytes()
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(self.part.clone()).unwrap_or_default()
    }
}

/// What a call asks for. Ranges are whole blocks of the server.
#[derive(Debug)]
pub(crate) enum Wish {
    /// Fill this memory, unless its owner takes it back first.
    Read(Lent),
    /// Store this.
    Write {
        data: Payload,
        fua: bool,
    },
    Zero {
        length_bytes: u64,
        may_unmap: bool,
    },
    Trim {
        length_bytes: u64,
    },
    Flush,
    /// Report holes and zeros.
    Status {
        length_bytes: u64,
    },
    /// Connect anew: a server tells the size of its disk in the handshake only.
    Renew,
}

/// The result of a call.
#[derive(Debug)]
pub(crate) enum Answer {
    Done,
    Extents(Vec<Extent>),
}

/// A wish, with its place and the way back for its answer.
#[derive(Debug)]
pub(crate) struct Call {
    /// The queue that asks. The queues are spread over the connections.
    pub(crate) queue: usize,
    pub(crate) offset: u64,
    pub(crate) wish: Wish,
    /// `None` for calls of the thread itself.
    pub(crate) reply: Option<Reply>,
}

impl Call {
    pub(crate) fn length_bytes(&self) -> u64 {
        match &self.wish {
            Wish::Read(place) => place.length_bytes() as u64,
            Wish::Write { data, .. } => data.len() as u64,
            Wish::Zero { length_bytes, .. } | Wish::Trim { length_bytes } | Wish::Status { length_bytes } => {
                *length_bytes
            }
            Wish::Flush | Wish::Renew => 0,
        }
    }

    pub(crate) fn fail(self, error: IoError) {
        if let Some(reply) = self.reply {
            reply.give(Err(error));
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    answer: Option<IoResult<Answer>>,
    waker: Option<Waker>,
}

/// Takes the answer to a call. If it is dropped without an answer, the call has failed, so nobody waits for ever.
#[derive(Debug)]
pub(crate) struct Reply(Arc<Mutex<Slot>>);

fn lock(slot: &Mutex<Slot>) -> MutexGuard<'_, Slot> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reply {
    pub(crate) fn give(self, answer: IoResult<Answer>) {
        lock(&self.0).answer = Some(answer);
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let waker = {
            let mut slot = lock(&self.0);
            slot.answer.get_or_insert(Err(IoError::EIO));
            slot.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

impl State {
    fn remember(&mut self, slot: &Arc<Mutex<Slot>>) {
        if self.slots.len() >= self.slots_max {
            self.slots.retain(|slot| slot.strong_count() > 0);
            self.slots_max = self.slots.len().saturating_mul(2).max(SLOTS_MIN);
        }
        self.slots.push(Arc::downgrade(slot));
    }
}

/// Calls that the thread has not seen yet.
///
/// Invariant: whoever has something for the thread makes it visible first, then sets `has_news`, then reads `waits`.
/// The thread sets `waits` first, then reads `has_news`. The fences between make sure that one of the two sees the
/// other.
#[derive(Debug)]
pub(crate) struct Calls {
    state: Mutex<State>,
    /// Wakes the thread from its wait.
    wake: OwnedFd,
    /// There is something that the thread may not have seen.
    has_news: AtomicBool,
    /// The thread waits, or is about to. A working thread notices news without a system call.
    waits: AtomicBool,
    /// The size of the disk, as the server told it at the last connection.
    size_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    calls: VecDeque<Call>,
    is_closed: bool,
    is_cancelled: bool,
    /// The slots of calls in flight, and of some whose callers are gone.
    slots: Vec<Weak<Mutex<Slot>>>,
    /// At this length, the slots of gone callers are removed.
    slots_max: usize,
    /// The number of queues that were opened.
    queues: usize,
}

/// The least value of [`State::slots_max`].
const SLOTS_MIN: usize = 256;

impl Calls {
    pub(crate) fn new(size_bytes: u64) -> block::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| block::Error::io("cannot make an event descriptor", error.into()))?;
        let (has_news, waits) = (AtomicBool::new(false), AtomicBool::new(false));
        let size_bytes = AtomicU64::new(size_bytes);
        Ok(Self { state: Mutex::default(), wake, has_news, waits, size_bytes })
    }

    /// Returns the size of the disk.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Sets the size that the server has told.
    pub(crate) fn has_size(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one wish to the thread and awaits the answer.
    pub(crate) async fn ask(&self, queue: usize, offset: u64, wish: Wish) -> IoResult<Answer> {
        let slot = Arc::new(Mutex::new(Slot::default()));
        let call = Call { queue, offset, wish, reply: Some(Reply(Arc::clone(&slot))) };
        {
            let mut state = self.state();
            match state.is_closed {
                false => {
                    state.calls.push_back(call);
                    state.remember(&slot);
                }
                // Dropping the call fails it.
                true => drop(call),
            }
        }
        self.ring();
        poll_fn(|context| {
            let mut slot = lock(&slot);
            match slot.answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => {
                    slot.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Counts one more queue; returns its number.
    pub(crate) fn open_queue(&self) -> usize {
        let number = {
            let mut state = self.state();
            let number = state.queues;
            state.queues = number.saturating_add(1);
            number
        };
        self.ring();
        number
    }

    /// Returns the number of queues that were opened.
    pub(crate) fn queues(&self) -> usize {
        self.state().queues
    }

    /// Makes the thread look at calls, connections and renewals again.
    pub(crate) fn ring(&self) {
        self.has_news.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waits.load(Ordering::Relaxed) && self.waits.swap(false, Ordering::AcqRel) {
            // If the counter is full, the write fails, but the thread is woken all the same.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// Waits for a call, for one of `others` or for the timeout. Afterwards the thread looks at everything.
    pub(crate) fn wait<'a>(&'a self, mut others: Vec<PollFd<'a>>, timeout: Option<Timespec>) {
        others.push(PollFd::new(&self.wake, PollFlags::IN));
        self.waits.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let timeout = if self.has_news.load(Ordering::Relaxed) { Some(Timespec::default()) } else { timeout };
        // The result does not matter: everything is looked at.
        let _ = poll(&mut others, timeout.as_ref());
        self.waits.store(false, Ordering::Relaxed);
        self.has_news.swap(false, Ordering::AcqRel);
        if others.last().is_some_and(|wake| !wake.revents().is_empty()) {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    /// Takes the calls that have come in; `None` at the end.
    pub(crate) fn take(&self) -> Option<VecDeque<Call>> {
        let mut state = self.state();
        let calls = std::mem::take(&mut state.calls);
        (!state.is_closed || !calls.is_empty()).then_some(calls)
    }

    /// Fails all waiting calls at once, whatever the thread is doing, and all later ones. The thread ends.
    pub(crate) fn cancel(&self) {
        let slots = {
            let mut state = self.state();
            (state.is_closed, state.is_cancelled) = (true, true);
            std::mem::take(&mut state.slots)
        };
        for slot in slots.iter().filter_map(Weak::upgrade) {
            // Dropping the reply fails the call.
            drop(Reply(slot));
        }
        self.ring();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state().is_cancelled
    }

    /// Says that no more calls will come.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::block_on;

    /// Ends each call as soon as it sees it. Returns how often it waited.
    fn serve(calls: &Calls) -> usize {
        let mut waits = 0;
        while let Some(taken) = calls.take() {
            for call in taken {
                call.reply.into_iter().for_each(|reply| reply.give(Ok(Answer::Done)));
            }
            calls.wait(Vec::new(), None);
            waits += 1;
        }
        waits
    }

    #[test]
    fn no_call_is_missed_by_a_thread_that_is_about_to_wait() {
        let calls = Calls::new(0).unwrap();
        std::thread::scope(|scope| {
            let served = scope.spawn(|| serve(&calls));
            let ask = || (0..5000).for_each(|_| drop(block_on(calls.ask(0, 0, Wish::Flush)).unwrap()));
            let asked = [scope.spawn(ask), scope.spawn(ask)];
            asked.into_iter().for_each(|asked| asked.join().unwrap());
            calls.close();
            assert!(served.join().unwrap() > 0);
        });
    }

    #[test]
    fn a_thread_that_did_not_wait_is_told_once() {
        let calls = Calls::new(0).unwrap();
        calls.ring();
        // It would hang.
        calls.wait(Vec::new(), None);
        assert!(!calls.has_news.load(Ordering::Relaxed), "and the next time it waits");
    }
}
