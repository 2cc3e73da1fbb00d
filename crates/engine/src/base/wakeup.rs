//! Gets a sleeping reactor out of its wait, and costs almost nothing while it is awake.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// An event descriptor and whether its owner sleeps.
///
/// Invariant: whoever has work for the reactor makes it visible first, then calls [`Wakeup::wake`]; the reactor calls
/// [`Wakeup::about_to_sleep`] first, then looks for work once more. The fences between make one of the two see the
/// other, so no work is slept over.
#[derive(Debug)]
pub(crate) struct Wakeup {
    event: OwnedFd,
    sleeping: AtomicBool,
}

impl Wakeup {
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, sleeping: AtomicBool::new(false) })
    }

    /// Called by others, after making their work visible.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel) {
            // Fails only when the counter is at its end, and then the descriptor is readable anyway.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// As [`Wakeup::wake`], for an executor.
    pub(crate) fn waker(self: &Arc<Self>) -> Box<dyn Fn() + Send + Sync> {
        let wakeup = Arc::clone(self);
        Box::new(move || wakeup.wake())
    }

    /// Called by the reactor before it looks for work a last time.
    pub(crate) fn about_to_sleep(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Called by the reactor when it is awake.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Watched for edges: nobody reads it.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
