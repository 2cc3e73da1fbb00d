//! The descriptors through which a queue and its peer tell each other something: vhost-user's [`Transport`].

use crate::notifier::{Blocked, Notifier};
use crate::session::{Ending, SessionEvents};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use virtio::RingFault;
use virtio_blk::Transport;

/// One queue's descriptors, on its reactor.
#[derive(Debug)]
pub(crate) struct QueueFds {
    kick: Option<OwnedFd>,
    call: Option<Notifier>,
    err: Option<Notifier>,
    events: Arc<SessionEvents>,
}

impl QueueFds {
    /// Called on the session's thread: looking at a descriptor may wait for the peer.
    pub(crate) fn new(
        kick: Option<OwnedFd>,
        call: Option<Notifier>,
        err: Option<Notifier>,
        events: Arc<SessionEvents>,
    ) -> Self {
        Self { kick, call, err, events }
    }

    /// The peer's new descriptor for notifications. It is told at once: what was told through the old one may be lost.
    pub(crate) fn set_call(&mut self, call: Option<Notifier>) {
        self.call = call;
        self.notify();
    }

    /// The peer's new descriptor for faults.
    pub(crate) fn set_err(&mut self, err: Option<Notifier>) {
        self.err = err;
    }

    fn tell(&self, notifier: &Notifier) {
        if notifier.notify() == Err(Blocked) {
            self.events.end_session(Ending::Blocking);
        }
    }
}

impl Transport for QueueFds {
    fn notify(&self) -> bool {
        self.call.as_ref().map(|call| self.tell(call)).is_some()
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(AsFd::as_fd)
    }

    fn stopped(&self, _fault: &RingFault) {
        if let Some(err) = &self.err {
            self.tell(err);
        }
    }

    fn memory_lost(&self) {
        self.events.end_session(Ending::MemoryLost);
    }
}
