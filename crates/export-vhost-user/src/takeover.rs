//! Decides when a new peer takes the place of one that is gone although its socket is still connected.
//!
//! A socket stays connected as long as its other end is held anywhere. A peer can leave that end where nothing closes
//! it, such as in the queue of a socket that is never read. So the process that connected is watched, too. The session
//! ends when that process has exited, another peer waits, and the guest has sent no request for some time. See
//! `docs/decisions/0058-gone-peers.md`.

use memory::{PeerProcess, peer_process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long the guest must send no request while another peer waits. A monitor may have got its socket from a process
/// that has exited since. Then its guest's requests show that the monitor lives.
pub(crate) const QUIET: Duration = Duration::from_secs(5);
/// How often the requests are counted while another peer waits.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// The state of one peer.
#[derive(Debug)]
enum State {
    /// The process that connected lives, as far as is known.
    Alive(Option<OwnedFd>),
    /// The process has exited.
    Exited,
    /// The process has exited, and another peer has waited since then. The guest had made this many requests at that
    /// time.
    Contested { since: Instant, requests: u64 },
}

/// Watches one peer's process.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    state: State,
    quiet: Duration,
}

impl PeerWatch {
    pub(crate) fn of(stream: BorrowedFd<'_>, quiet: Duration) -> Self {
        let state = match peer_process(stream) {
            PeerProcess::Alive(process) => State::Alive(Some(process)),
            PeerProcess::Exited => State::Exited,
            PeerProcess::Unknown => State::Alive(None),
        };
        Self { state, quiet }
    }

    /// Returns a descriptor that becomes readable when there is news, if there is one, and when to look at the latest.
    pub(crate) fn news<'a>(&'a self, listener: BorrowedFd<'a>) -> (Option<BorrowedFd<'a>>, Option<Duration>) {
        match &self.state {
            State::Alive(process) => (process.as_ref().map(AsFd::as_fd), None),
            State::Exited => (Some(listener), None),
            State::Contested { .. } => (None, Some(LOOK_AGAIN)),
        }
    }

    /// Whether the process that connected has exited.
    pub(crate) fn has_exited(&self) -> bool {
        match &self.state {
            State::Alive(Some(process)) => is_readable(process.as_fd()),
            State::Alive(None) => false,
            State::Exited | State::Contested { .. } => true,
        }
    }

    /// Notes that the peer has sent a message.
    pub(crate) fn heard(&mut self) {
        if let State::Contested { .. } = self.state {
            self.state = State::Exited;
        }
    }

    /// Updates the state; `requests` is the guest's count so far. Returns whether the session must end.
    pub(crate) fn look(&mut self, listener: BorrowedFd<'_>, requests: u64) -> bool {
        if let State::Alive(_) = self.state {
            if !self.has_exited() {
                return false;
            }
            self.state = State::Exited;
        }
        if !is_readable(listener) {
            self.state = State::Exited;
            return false;
        }
        match self.state {
            State::Contested { since, requests: before } if before == requests => since.elapsed() >= self.quiet,
            _ => {
                self.state = State::Contested { since: Instant::now(), requests };
                false
            }
        }
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
}
