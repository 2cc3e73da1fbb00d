//! Descriptors that a reactor watches for tasks and pollers: sockets above all.

use crate::{ReactorCtx, Result};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// What somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// There is something to read, or nothing will come any more.
    Read,
    /// There is room to write, or nobody reads any more.
    Write,
}

/// What is known of a watched descriptor. The reactor raises it; whoever finds that it is not so any more lowers it.
#[derive(Debug)]
pub struct Readiness {
    /// To read, to write. True until somebody finds that it is not so.
    ready: [Cell<bool>; 2],
    /// The other side sends nothing any more, or has gone.
    has_ended: Cell<bool>,
    wakers: [RefCell<Option<Waker>>; 2],
}

impl Default for Readiness {
    fn default() -> Self {
        Self { ready: [Cell::new(true), Cell::new(true)], has_ended: Cell::new(false), wakers: Default::default() }
    }
}

impl Readiness {
    /// The reactor's part: the descriptor became ready for `interest`.
    pub fn raise(&self, interest: Interest) {
        self.ready[interest as usize].set(true);
        let waker = self.wakers[interest as usize].borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The reactor's part: nothing more will come from the other side. Said before it is raised for that.
    pub fn ends(&self) {
        self.has_ended.set(true);
    }
}

/// A descriptor under a reactor's watch, with what it belongs to. It must not block (`O_NONBLOCK`).
///
/// It is watched for changes: it counts as ready until a call says [`io::ErrorKind::WouldBlock`], and then until the
/// reactor hears that it became ready. [`Watch::io`] does that for tasks. A poller tries whatever [`Watch::is_ready`]
/// says is worth it, and tells with [`Watch::not_ready`]; the reactor wakes up for it. At most one task waits for reading
/// and one for writing.
///
/// Room to write is watched for only while somebody waits for it: otherwise each reply that a peer takes would wake the
/// reactor up.
pub struct Watch<T: AsFd> {
    io: T,
    readiness: Rc<Readiness>,
    ctx: Rc<dyn ReactorCtx>,
    id: WatchId,
    awaits_room: Cell<bool>,
}

/// Names a watched descriptor on its reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WatchId(pub u64);

impl<T: AsFd> Watch<T> {
    /// Puts `io` under watch, on the reactor's own thread. Its descriptor must stay the same.
    pub fn new(ctx: &Rc<dyn ReactorCtx>, io: T) -> Result<Self> {
        let readiness = Rc::new(Readiness::default());
        let id = ctx.watch_fd(io.as_fd(), &readiness)?;
        Ok(Self { io, readiness, ctx: Rc::clone(ctx), id, awaits_room: Cell::new(false) })
    }

    /// What is watched.
    pub fn get_ref(&self) -> &T {
        &self.io
    }

    /// Whether a call is worth trying.
    #[must_use]
    pub fn is_ready(&self, interest: Interest) -> bool {
        self.readiness.ready[interest as usize].get()
    }

    /// A call has just said that it would block.
    pub fn not_ready(&self, interest: Interest) {
        self.readiness.ready[interest as usize].set(false);
        if interest == Interest::Write {
            self.watch_room(true);
        }
    }

    /// A call has taken less from a stream than it had room for. So nothing is left there, unless the stream has ended:
    /// then there is its end.
    pub fn is_drained(&self) {
        if !self.readiness.has_ended.get() {
            self.not_ready(Interest::Read);
        }
    }

    /// All is written that was to be written.
    pub fn has_written(&self) {
        self.watch_room(false);
    }

    fn watch_room(&self, wanted: bool) {
        if self.awaits_room.replace(wanted) != wanted {
            self.ctx.watch_room(self.id, self.io.as_fd(), wanted);
        }
    }

    /// Waits until a call is worth trying.
    pub async fn ready(&self, interest: Interest) {
        poll_fn(|context| {
            if self.is_ready(interest) {
                return Poll::Ready(());
            }
            *self.readiness.wakers[interest as usize].borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Calls `call` until it says something else than that it would block.
    pub async fn io<R>(&self, interest: Interest, mut call: impl FnMut(&T) -> io::Result<R>) -> io::Result<R> {
        loop {
            self.ready(interest).await;
            match call(&self.io) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.not_ready(interest),
                result => {
                    if interest == Interest::Write {
                        self.has_written();
                    }
                    return result;
                }
            }
        }
    }
}

impl<T: AsFd> Drop for Watch<T> {
    fn drop(&mut self) {
        // Before the descriptor is closed: others may hold duplicates of it.
        self.ctx.unwatch_fd(self.id, self.io.as_fd());
    }
}

impl<T: AsFd + fmt::Debug> fmt::Debug for Watch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watch").field(&self.io).finish()
    }
}
