//! The descriptors through which a queue and its peer tell each other something: vhost-user's [`Transport`].

use crate::notifier::Notifier;
use crate::session::SessionEvents;
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
    pub(crate) fn new(
        kick: Option<OwnedFd>,
        call: Option<OwnedFd>,
        err: Option<OwnedFd>,
        events: Arc<SessionEvents>,
    ) -> Self {
        Self { kick, call: call.map(Notifier::new), err: err.map(Notifier::new), events }
    }

    /// The peer's new descriptor for notifications. It is told at once: what was told through the old one may be lost.
    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call.map(Notifier::new);
        self.notify();
    }

    /// The peer's new descriptor for faults.
    pub(crate) fn set_err(&mut self, err: Option<OwnedFd>) {
        self.err = err.map(Notifier::new);
    }
}

impl Transport for QueueFds {
    fn notify(&self) -> bool {
        self.call.as_ref().map(Notifier::notify).is_some()
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(AsFd::as_fd)
    }

    fn stopped(&self, _fault: &RingFault) {
        if let Some(err) = &self.err {
            err.notify();
        }
    }

    fn memory_lost(&self) {
        self.events.report_poison();
    }
}
