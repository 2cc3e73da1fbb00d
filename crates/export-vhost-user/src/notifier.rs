//! The descriptors through which a ring tells its guest something.

use block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::write;
use std::os::fd::OwnedFd;

/// Refuses what is neither an event descriptor nor a pipe or socket: writing to a file, or watching one, may wait for
/// whoever serves its file system, and a peer can be that itself.
pub(crate) fn check_kind(fd: Option<&OwnedFd>) -> Result<()> {
    let Some(fd) = fd else { return Ok(()) };
    let stat = fstat(fd).map_err(|error| Error::io("cannot look at a descriptor of the peer's", error.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::Directory | FileType::CharacterDevice | FileType::BlockDevice => {
            let message = "the peer passes a file or a device where an event descriptor or a pipe belongs";
            Err(Error::new(ErrorKind::Protocol, message))
        }
        _ => Ok(()),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn only_what_cannot_make_us_wait_for_its_owner_is_taken() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [event, reader, writer, socket.into()] {
            check_kind(Some(&fd)).unwrap();
        }
        check_kind(None).unwrap();
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let device = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        for fd in [file, device] {
            assert_eq!(check_kind(Some(&fd)).unwrap_err().kind(), ErrorKind::Protocol);
        }
    }
}
