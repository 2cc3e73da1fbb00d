//! Descriptors, mostly sockets, that a reactor watches for tasks and pollers.

use crate::{Interest, ReactorCtx, Readiness, Result, WatchId};
use std::cell::Cell;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::task::Poll;

/// An object whose descriptor a reactor watches. The descriptor must not block (`O_NONBLOCK`).
///
/// It is watched for edges. It counts as ready until a call returns [`io::ErrorKind::WouldBlock`], and again when the
/// reactor hears that it became ready. [`Watch::io`] does that for tasks. A poller makes its call if
/// [`Watch::is_ready`] says so, and calls [`Watch::not_ready`] if that would block. The reactor wakes up when it is
/// ready again. At most one task waits for reading and one for writing.
///
/// Room to write is watched for only while a user waits for it. Otherwise each reply that a peer takes would wake the
/// reactor up.
pub struct Watch<T: AsFd> {
    io: T,
    readiness: Rc<Readiness>,
    ctx: Rc<dyn ReactorCtx>,
    id: WatchId,
    awaits_room: Cell<bool>,
}

impl<T: AsFd> Watch<T> {
    /// Puts `io` under watch, on the reactor's own thread. Its descriptor must stay the same.
    pub fn new(ctx: &Rc<dyn ReactorCtx>, io: T) -> Result<Self> {
        let readiness = Rc::new(Readiness::default());
        let id = ctx.watch_fd(io.as_fd(), &readiness)?;
        Ok(Self { io, readiness, ctx: Rc::clone(ctx), id, awaits_room: Cell::new(false) })
    }

    /// Returns the watched object.
    pub fn get_ref(&self) -> &T {
        &self.io
    }

    /// Whether a call is worth trying.
    #[must_use]
    pub fn is_ready(&self, interest: Interest) -> bool {
        self.readiness.ready[interest as usize].get()
    }

    /// Notes that a call would have blocked.
    pub fn not_ready(&self, interest: Interest) {
        self.readiness.ready[interest as usize].set(false);
        if interest == Interest::Write {
            self.watch_room(true);
        }
    }

    /// Notes that a call took less from a stream than it had room for. So no bytes are left, but perhaps the end of the
    /// stream.
    pub fn is_drained(&self) {
        if !self.readiness.has_ended.get() {
            self.not_ready(Interest::Read);
        }
    }

    /// Whether the other side sends nothing any more, or has gone. There may be bytes of it that nobody has read.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.readiness.has_ended.get()
    }

    /// Notes that everything was written.
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

    /// Repeats `call`, with waits between, until it does not return that it would block.
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
        // Ended before the descriptor is closed: duplicates may keep its file open.
        self.ctx.unwatch_fd(self.id, self.io.as_fd());
    }
}

impl<T: AsFd + fmt::Debug> fmt::Debug for Watch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watch").field(&self.io).finish()
    }
}
