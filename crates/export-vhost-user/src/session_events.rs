//! What a session's queues report to its thread.

use block::{Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

/// Why a queue wants its session to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The peer shrank a file of its memory.
    MemoryLost,
    /// The peer made a notification wait.
    Blocking,
}

impl Ending {
    fn why(self) -> &'static str {
        match self {
            Self::MemoryLost => "the peer shrank a memory file that it shares: what it holds is lost",
            Self::Blocking => "the peer filled a descriptor for notifications and let us wait for it",
        }
    }
}

/// Events that a session's queues report to its thread.
#[derive(Debug)]
pub(crate) struct SessionEvents {
    wake: OwnedFd,
    ending: OnceLock<Ending>,
}

impl SessionEvents {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        Ok(Self { wake, ending: OnceLock::new() })
    }

    /// Tells the thread that the session has to end.
    pub(crate) fn end_session(&self, ending: Ending) {
        if self.ending.set(ending).is_ok() {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// Whether the session has to end.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get().is_some()
    }

    /// Whether it ends because the peer made us wait.
    pub(crate) fn has_blocked(&self) -> bool {
        self.ending.get() == Some(&Ending::Blocking)
    }

    /// Fails if the session has to end.
    pub(crate) fn check(&self) -> Result<()> {
        self.ending.get().map_or(Ok(()), |ending| Err(Error::new(ErrorKind::Protocol, ending.why())))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
