//! The interface between a queue and its transport.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use virtio::RingFault;

/// Connects one queue with its driver and the front end. Called on the queue's reactor, so nothing here may wait.
/// [`Transport::notify`] is called at most once a batch; all other calls are rare.
pub trait Transport: Send + 'static {
    /// Raises the driver's interrupt: requests have ended, and the driver wants to be notified. Returns false if it
    /// cannot be.
    fn notify(&self) -> bool;

    /// Returns a descriptor that becomes readable when the driver has kicked. Without it, an idle queue is looked at
    /// every millisecond. It is watched for edges, so it need not be read. It must stay the same while the queue runs.
    fn kick_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Tells that the queue takes no more requests, because of `fault`.
    fn stopped(&self, fault: &RingFault) {
        let _ = fault;
    }

    /// Tells that the file behind the guest's memory was shrunk. The queue takes no more requests, and ends those in
    /// flight without telling the driver.
    fn memory_lost(&self) {}
}

/// A transport of two event descriptors, as monitors have them from KVM. Both must be non-blocking (`EFD_NONBLOCK`):
/// nothing may wait on the queue's reactor.
#[derive(Debug)]
pub struct EventFds {
    /// The driver's kicks (KVM: ioeventfd).
    pub kick: OwnedFd,
    /// The driver's interrupt (KVM: irqfd).
    pub interrupt: OwnedFd,
}

impl Transport for EventFds {
    fn notify(&self) -> bool {
        rustix::io::write(&self.interrupt, &1_u64.to_ne_bytes()).is_ok()
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.kick.as_fd())
    }
}
