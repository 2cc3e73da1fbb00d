//! The descriptors through which a queue and its peer notify each other: vhost-user's [`Transport`].

use crate::notifier::{Blocked, Notifier};
use crate::session_events::{Ending, SessionEvents};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use virtio::RingFault;
use virtio_blk::Transport;

/// The descriptors of one queue, on its reactor.
#[derive(Debug)]
pub(crate) struct QueueFds {
    kick: Option<OwnedFd>,
    call: Option<Notifier>,
    err: Option<Notifier>,
    events: Arc<SessionEvents>,
}

impl QueueFds {
    /// Takes the descriptors. The notifiers are made on the session's thread, because looking at a descriptor may wait
    /// for the peer.
    pub(crate) fn new(
        kick: Option<OwnedFd>,
        call: Option<Notifier>,
        err: Option<Notifier>,
        events: Arc<SessionEvents>,
    ) -> Self {
        Self { kick, call, err, events }
    }

    /// Sets the peer's new descriptor for notifications, and notifies it at once: a notification through the old one
    /// may be lost.
    pub(crate) fn set_call(&mut self, call: Option<Notifier>) {
        self.call = call;
        self.notify();
    }

    /// Sets the peer's new descriptor for faults.
    pub(crate) fn set_err(&mut self, err: Option<Notifier>) {
        self.err = err;
    }

    /// Notifies the peer, unless it made us wait once: it may have a descriptor of this kind for each of its queues,
    /// and pass new ones.
    fn tell(&self, notifier: &Notifier) {
        if !self.events.is_ending() && notifier.notify() == Err(Blocked) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    #[test]
    fn a_peer_makes_us_wait_once_however_many_descriptors_it_passes() {
        let events = Arc::new(SessionEvents::new().unwrap());
        let full = || {
            let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            event
        };
        let calls = [full(), full()];
        let [first, second] = [0, 1].map(|index: usize| {
            let call = Notifier::new(calls[index].try_clone().unwrap()).unwrap();
            QueueFds::new(None, Some(call), None, Arc::clone(&events))
        });
        first.notify();
        assert!(events.check().is_err());
        // If it were told, the sum would be 1 more, or we would wait again.
        read(&calls[1], &mut [0; 8]).unwrap();
        write(&calls[1], &1_u64.to_ne_bytes()).unwrap();
        second.notify();
        let mut sum = [0; 8];
        read(&calls[1], &mut sum).unwrap();
        assert_eq!(u64::from_ne_bytes(sum), 1);
    }
}
