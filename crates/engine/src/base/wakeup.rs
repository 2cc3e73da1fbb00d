//! Wakes a sleeping reactor. Costs almost nothing while the reactor is awake.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// An event descriptor and whether its owner sleeps.
///
/// Invariant: a thread with work for the reactor makes it visible first, then calls [`Wakeup::wake`]. The reactor calls
/// [`Wakeup::about_to_sleep`] first, then looks for work once more. The fences between make sure that one of the two
/// sees the other, so the reactor never sleeps while there is work.
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

    /// Wakes the reactor if it sleeps. Call it after making the work visible.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel) {
            // Fails only when the counter is at its end, and then the descriptor is readable anyway.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Returns a closure that calls [`Wakeup::wake`], for an executor.
    pub(crate) fn waker(self: &Arc<Self>) -> Box<dyn Fn() + Send + Sync> {
        let wakeup = Arc::clone(self);
        Box::new(move || wakeup.wake())
    }

    /// Notes that the reactor is about to sleep. Call it before the last look for work.
    pub(crate) fn about_to_sleep(&self) {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Notes that the reactor is awake.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Returns the event descriptor. It is watched for edges, so it is never read.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
