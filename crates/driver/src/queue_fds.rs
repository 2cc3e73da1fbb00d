//! The event descriptors of one queue.

use block::{Error, Result};
use memory::duplicate_fd;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A ring's event descriptors. They stay the same when a ring is started again.
#[derive(Debug, Clone, Copy)]
pub struct QueueEvents<'a> {
    /// The driver signals it for the device.
    pub kick: &'a EventFd,
    /// The device signals it for the driver.
    pub call: &'a EventFd,
    /// The device signals it when it gives up the ring.
    pub error: &'a EventFd,
}

/// One queue's descriptors: `kick` notifies the device, `call` notifies us, and `error` says that the device gave up
/// the ring.
#[derive(Debug)]
pub(crate) struct QueueFds {
    pub(crate) kick: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) error: OwnedFd,
    /// The same descriptors, in the form for the device.
    events: [EventFd; 3],
    /// The device signalled `error`, or was silent for too long.
    pub(crate) given_up: AtomicBool,
    /// Times that the device was kicked, and that the reactor slept and woke.
    pub(crate) kicks: AtomicU64,
    pub(crate) wakeups: AtomicU64,
    /// The number of ended requests, and in the low 16 bits those in flight. Updated once a batch.
    pub(crate) progress: AtomicU64,
}

impl QueueFds {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let event = || {
            let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
            let fd = duplicate_fd(&event)?;
            Ok((event, fd))
        };
        let no_event = |error: io::Error| Error::io("cannot make an event descriptor", error);
        let (kick_event, kick) = event().map_err(no_event)?;
        let (call_event, call) = event().map_err(no_event)?;
        let (error_event, error) = event().map_err(no_event)?;
        let (kicks, wakeups) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self {
            kick,
            call,
            error,
            events: [kick_event, call_event, error_event],
            given_up: AtomicBool::new(false),
            kicks,
            wakeups,
            progress: AtomicU64::new(0),
        }))
    }

    /// Wakes the reactor that sleeps on `call`, as the device would.
    pub(crate) fn wake(&self) {
        notify(&self.call);
    }

    /// Returns the descriptors for the device.
    pub(crate) fn events(&self) -> QueueEvents<'_> {
        let [kick, call, error] = &self.events;
        QueueEvents { kick, call, error }
    }

    /// Takes the device's signal that it gave the ring up. Returns whether there was one.
    pub(crate) fn take_error(&self) -> bool {
        rustix::io::read(&self.error, &mut [0; 8]).is_ok()
    }

    /// Gives the ring up: nothing that the device does with it counts any more.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        self.wake();
    }
}

/// Signals an event descriptor. This fails only if its counter is full, and then it is readable anyway.
pub(crate) fn notify(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}
