//! The descriptors through which a ring tells its guest something.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::write;
use std::os::fd::OwnedFd;

/// An event descriptor (or, with User Mode Linux, a pipe) of the peer's.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    /// The peer left it blocking: we must not write while it is full, or the reactor would wait for the peer.
    blocking: bool,
}

impl Notifier {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let blocking = fcntl_getfl(&fd).map_or(true, |flags| !flags.contains(OFlags::NONBLOCK));
        Self { fd, blocking }
    }

    /// Tells the peer. A full descriptor has told it already, and a closed pipe has nobody to tell.
    pub(crate) fn notify(&self) {
        if self.blocking && !self.has_room() {
            return;
        }
        let _ = write(&self.fd, &1_u64.to_ne_bytes());
    }

    fn has_room(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds.iter().any(|fd| fd.revents().contains(PollFlags::OUT))
    }
}
