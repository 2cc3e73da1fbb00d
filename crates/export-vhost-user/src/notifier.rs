//! The descriptors through which a ring notifies its guest.

use crate::watched_call::WatchedCall;
use block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, readlink};
use rustix::io::{Errno, write};
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, Shutdown, SocketType, recv, send, shutdown};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};

/// The kernel's name of an event descriptor.
const EVENT_DESCRIPTOR: &CStr = c"anon_inode:[eventfd]";

/// The purpose of a descriptor that the peer passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The peer notifies us of requests.
    Kick,
    /// We notify the peer of ended requests.
    Call,
    /// We notify the peer of faults.
    Err,
}

/// Refuses a descriptor of the wrong kind. An event descriptor serves every purpose, and a pipe those for which we
/// write. For calls a socket of a pair is allowed, too, because User Mode Linux passes one. Writing to anything else,
/// watching it or closing it may wait, perhaps for the peer. Kicks are never read, and an event descriptor adds them
/// up; a pipe would become full and make its guest wait.
pub(crate) fn check_kind(purpose: Purpose, fd: Option<&OwnedFd>) -> Result<()> {
    let Some(fd) = fd else { return Ok(()) };
    // Only this name distinguishes event descriptors from the kernel's other files without a type.
    let name = readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).ok();
    check_named(purpose, fd, name.as_deref())
}

fn check_named(purpose: Purpose, fd: &OwnedFd, name: Option<&CStr>) -> Result<()> {
    let stat = fstat(fd).map_err(|error| Error::io("cannot look at a descriptor of the peer's", error.into()))?;
    let found = match (FileType::from_raw_mode(stat.st_mode), name) {
        (_, Some(name)) if name == EVENT_DESCRIPTOR => return Ok(()),
        (FileType::Fifo, _) if purpose == Purpose::Kick => "a pipe".into(),
        (FileType::Fifo, _) => return Ok(()),
        (FileType::Socket, _) => match (is_unix_stream(fd), is_of_pair(fd)) {
            (true, true) if purpose == Purpose::Call => return Ok(()),
            (true, true) => "a Unix socket".into(),
            (true, false) => "a Unix socket that is not of a pair".into(),
            (false, _) => "a socket that is no Unix stream socket".into(),
        },
        (FileType::RegularFile, _) => "a file".into(),
        (FileType::Directory, _) => "a directory".into(),
        (FileType::CharacterDevice | FileType::BlockDevice, _) => "a device".into(),
        (_, Some(name)) => format!("{:?}", name.to_string_lossy()),
        // Without /proc it may be an event descriptor.
        (_, None) => return Ok(()),
    };
    let (of, others) = match purpose {
        Purpose::Kick => ("kicks", ""),
        Purpose::Call => ("calls", ", a pipe or a Unix stream socket"),
        Purpose::Err => ("errors", " or a pipe"),
    };
    let message = format!("the peer passes {found} for {of}, where an event descriptor{others} belongs");
    Err(Error::new(ErrorKind::Protocol, message))
}

fn is_unix_stream(fd: &OwnedFd) -> bool {
    socket_domain(fd) == Ok(AddressFamily::UNIX) && socket_type(fd) == Ok(SocketType::STREAM)
}

/// Refuses a channel for our own messages if it is not a socket of a pair.
pub(crate) fn check_channel(fd: &OwnedFd) -> Result<()> {
    match is_unix_stream(fd) && is_of_pair(fd) {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Protocol, "the peer's channel is not a Unix stream socket of a pair")),
    }
}

/// Makes a socket of the peer receive nothing more, and drops the messages that wait in it. These may hold any
/// descriptor of the peer, even its end of this session, which would stay open as long as we keep the socket. We only
/// send there.
pub(crate) fn seal(fd: &OwnedFd) {
    // Fails for other files, in which no descriptors wait.
    if shutdown(fd, Shutdown::Read).is_ok() {
        // The kernel closes descriptors that come along, because there is no room for them.
        while recv(fd, &mut [0; 4096][..], RecvFlags::DONTWAIT).is_ok_and(|(_, length)| length > 0) {}
    }
}

/// Whether a Unix socket is connected, and neither end has a name. A socket with a name may be the peer's own end of a
/// session. While we keep it open, that session never ends, even if the peer is gone.
fn is_of_pair(fd: &OwnedFd) -> bool {
    let Ok(socket) = fd.try_clone().map(UnixStream::from) else { return false };
    let ends = [socket.local_addr(), socket.peer_addr()];
    ends.iter().all(|end| end.as_ref().is_ok_and(SocketAddr::is_unnamed))
}

/// A way to notify a descriptor without waiting for the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// An event descriptor takes nearly 2^64 notifications before it is full.
    Event,
    /// A pipe in blocking mode may become full if its reader stops. So it is polled first.
    BlockingPipe,
    Pipe,
    /// The flags of the call say that it must not wait.
    Socket,
}

/// The peer made a notification wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Blocked;

/// A descriptor of the peer: an event descriptor, a pipe, or, with User Mode Linux, a socket.
#[derive(Debug)]
pub(crate) struct Notifier {
    fd: OwnedFd,
    way: Way,
    calls: WatchedCall,
    /// A notification had to wait, so no more are sent.
    blocked: AtomicBool,
}

impl Notifier {
    /// Makes a notifier. Looking at the descriptor may wait for its file system, so this must not be called on a
    /// reactor.
    pub(crate) fn new(fd: OwnedFd) -> Result<Self> {
        let stat = fstat(&fd).map_err(|error| Error::io("cannot look at a descriptor of the peer's", error.into()))?;
        let blocking = fcntl_getfl(&fd).map_or(true, |flags| !flags.contains(OFlags::NONBLOCK));
        let way = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Socket => Way::Socket,
            FileType::Fifo if blocking => Way::BlockingPipe,
            FileType::Fifo => Way::Pipe,
            _ => Way::Event,
        };
        Ok(Self { fd, way, calls: WatchedCall::new()?, blocked: AtomicBool::new(false) })
    }

    /// Notifies the peer. A full descriptor has notified it already, and a closed pipe has no reader. A peer that kept
    /// us in the call is not notified any more.
    pub(crate) fn notify(&self) -> std::result::Result<(), Blocked> {
        if self.blocked.load(Ordering::Relaxed) {
            return Err(Blocked);
        }
        let bytes = 1_u64.to_ne_bytes();
        match self.way {
            Way::Socket => {
                let _ = send(&self.fd, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
            Way::BlockingPipe if !self.has_room() => {}
            Way::Event | Way::Pipe | Way::BlockingPipe => {
                let written = self.calls.make(|| write(&self.fd, &bytes));
                // Only an interrupted write proves it: from outside, a thread without a processor looks the same.
                if written == Err(Errno::INTR) {
                    self.blocked.store(true, Ordering::Relaxed);
                    return Err(Blocked);
                }
            }
        }
        Ok(())
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
    use crate::watched_call::PERIOD;
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::{UnixDatagram, UnixListener};

    const ALL: [Purpose; 3] = [Purpose::Kick, Purpose::Call, Purpose::Err];

    fn refusal(purpose: Purpose, fd: &OwnedFd) -> String {
        let refused = check_kind(purpose, Some(fd)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Protocol);
        refused.to_string()
    }

    #[test]
    fn a_full_pipe_or_socket_never_keeps_us_waiting() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let (socket, _other) = UnixStream::pair().unwrap();
        for fd in [writer, OwnedFd::from(socket)] {
            let notifier = Notifier::new(fd).unwrap();
            for _ in 0..1_000_000 {
                assert_eq!(notifier.notify(), Ok(()));
                if !notifier.has_room() {
                    break;
                }
            }
            assert!(!notifier.has_room());
            assert_eq!(notifier.notify(), Ok(()));
        }
    }

    #[test]
    fn a_peer_is_not_blamed_where_our_own_thread_got_no_processor() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let notifier = Notifier::new(event.try_clone().unwrap()).unwrap();
        // The watch sees a call that has begun and not ended for many periods, and interrupts the thread.
        notifier.calls.make(|| std::thread::sleep(PERIOD * 10));
        assert_eq!(notifier.notify(), Ok(()));
        let mut sum = [0; 8];
        rustix::io::read(&event, &mut sum).unwrap();
        assert_eq!(u64::from_ne_bytes(sum), 1);
    }

    #[test]
    fn a_peer_that_makes_a_notification_wait_is_told_nothing_any_more() {
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let notifier = Notifier::new(full.try_clone().unwrap()).unwrap();
        assert_eq!(notifier.notify(), Err(Blocked));
        rustix::io::read(&full, &mut [0; 8]).unwrap();
        assert_eq!(notifier.notify(), Err(Blocked));
    }

    #[test]
    fn only_what_cannot_make_us_wait_for_its_owner_is_taken() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let device = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let tcp = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        let udp = OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        let datagram = OwnedFd::from(UnixDatagram::unbound().unwrap());
        for purpose in ALL {
            check_kind(purpose, None).unwrap();
            check_kind(purpose, Some(&event)).unwrap();
            let refused = [(&file, "a file"), (&device, "a device"), (&epoll, "[eventpoll]"), (&tcp, "a socket")];
            for (fd, named) in refused.into_iter().chain([(&udp, "a socket"), (&datagram, "a socket")]) {
                let message = refusal(purpose, fd);
                assert!(message.contains(named), "{message}");
            }
        }
    }

    #[test]
    fn a_pipe_is_taken_for_what_we_write_and_not_for_kicks_which_nobody_would_read() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        for fd in [&reader, &writer] {
            check_kind(Purpose::Call, Some(fd)).unwrap();
            check_kind(Purpose::Err, Some(fd)).unwrap();
            let message = refusal(Purpose::Kick, fd);
            assert!(message.contains("a pipe for kicks, where an event descriptor belongs"), "{message}");
        }
    }

    #[test]
    fn a_unix_stream_socket_is_taken_for_calls_only() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let socket = OwnedFd::from(socket);
        check_kind(Purpose::Call, Some(&socket)).unwrap();
        assert!(refusal(Purpose::Kick, &socket).contains("a Unix socket for kicks"));
        assert!(refusal(Purpose::Err, &socket).contains("a Unix socket for errors"));
    }

    #[test]
    fn a_socket_that_is_connected_by_name_or_not_at_all_is_taken_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (server, _) = listener.accept().unwrap();
        for fd in [OwnedFd::from(client), OwnedFd::from(server), OwnedFd::from(listener)] {
            assert!(refusal(Purpose::Call, &fd).contains("not of a pair"));
            assert!(check_channel(&fd).is_err());
        }
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(check_channel(&socket.into()).is_ok());
    }

    #[test]
    fn without_proc_event_descriptors_are_taken_and_sockets_and_files_still_refused() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let tcp = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        for purpose in ALL {
            check_named(purpose, &event, None).unwrap();
            check_named(purpose, &file, None).unwrap_err();
            check_named(purpose, &tcp, None).unwrap_err();
        }
    }
}
