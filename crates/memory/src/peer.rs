//! Finds out whether the process at the other end of a Unix socket still lives.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Linux 6.5; the same number on all architectures but a few old ones, where the call fails.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process that connected a Unix socket, or made the socket pair.
#[derive(Debug)]
pub enum PeerProcess {
    /// The process lives. The descriptor becomes readable when it has exited.
    Alive(OwnedFd),
    /// The process has exited. Others may hold its end of the socket.
    Exited,
    /// The process lives in another namespace, or the kernel is too old to say.
    Unknown,
}

/// Returns the process at the other end of `socket`.
#[must_use]
pub fn peer_process(socket: BorrowedFd<'_>) -> PeerProcess {
    let mut raw: libc::c_int = -1;
    // SAFETY: an integer is a valid value of the option, whatever the kernel writes.
    if unsafe { option(socket, SO_PEERPIDFD, &mut raw) }.is_ok() && raw >= 0 {
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        return PeerProcess::Alive(unsafe { OwnedFd::from_raw_fd(raw) });
    }
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: three integers are a valid value of the option, whatever the kernel writes.
    if unsafe { option(socket, libc::SO_PEERCRED, &mut credentials) }.is_err() || credentials.pid <= 0 {
        return PeerProcess::Unknown;
    }
    // SAFETY: the call takes two numbers and touches no memory.
    let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, credentials.pid, 0) };
    match i32::try_from(opened) {
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        Ok(raw) if raw >= 0 => PeerProcess::Alive(unsafe { OwnedFd::from_raw_fd(raw) }),
        _ if io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) => PeerProcess::Exited,
        _ => PeerProcess::Unknown,
    }
}

/// Reads an option of the socket.
///
/// # Safety
///
/// Any bytes that the kernel writes for this option must be a valid `T`.
unsafe fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `value` has.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut *value).cast(), &raw mut length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn our_own_process_is_alive_at_the_other_end_of_a_pair() {
        let (one, _other) = UnixStream::pair().unwrap();
        let PeerProcess::Alive(process) = peer_process(one.as_fd()) else { panic!("this process lives") };
        let mut polled = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        assert_eq!(unsafe { libc::poll(&raw mut polled, 1, 0) }, 0, "it has not exited");
        let not_a_socket = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(peer_process(not_a_socket.as_fd()), PeerProcess::Unknown));
    }
}
