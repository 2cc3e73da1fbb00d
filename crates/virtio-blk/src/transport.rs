//! What a queue needs of the transport that connects it with its driver.

use std::os::fd::BorrowedFd;
use virtio::RingFault;

/// One queue's way to its driver, and to whoever set the queue up. Called on the queue's reactor, so nothing here may
/// wait. The driver's notification is asked for at most once a batch, everything else is rare.
pub trait Transport: Send + 'static {
    /// Requests have ended and the driver wants to be told: raises its interrupt. Returns false if nobody can be told.
    fn notify(&self) -> bool;

    /// Becomes readable when the driver has kicked. A queue without it is looked at every millisecond while nothing comes.
    /// Watched for edges, so nobody has to read it; it must stay the same while the queue runs.
    fn kick_fd(&self) -> Option<BorrowedFd<'_>>;

    /// The queue takes nothing more, because of `fault`.
    fn stopped(&self, fault: &RingFault) {
        let _ = fault;
    }

    /// Somebody shrank the file behind the guest's memory. The queue takes nothing more, and ends what is in flight
    /// without telling the driver.
    fn memory_lost(&self) {}
}
