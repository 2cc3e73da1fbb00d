//! A stream to a server: a socket, with TLS or without.

use memory::{Lent, SocketPart, send_parts};
use nbd_tls::{Arrival, Channel, Socket, copy_to, widen};
use nbd_wire::Server;
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::{Timeout, set_socket_keepalive, set_socket_timeout};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, send, socket_with};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long connecting to one of several addresses may take.
const ADDRESS_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
    Tls(Box<Secured>),
}

/// A socket with its TLS session.
#[derive(Debug)]
pub(crate) struct Secured {
    socket: Stream,
    channel: Channel,
}

impl Stream {
    /// Connects by `until`.
    pub(crate) fn connect(server: &Server, until: Instant) -> io::Result<Self> {
        match server {
            Server::Unix(path) => {
                let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
                // Without a timeout, this would wait for ever for a server that accepts nobody.
                set_socket_timeout(&socket, Timeout::Send, Some(left(until)?))?;
                rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| in_time(error.into()))?;
                let stream = UnixStream::from(socket);
                widen(&stream);
                Ok(Self::Unix(stream))
            }
            Server::Tcp(host, port) => {
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, left(until)?.min(ADDRESS_PATIENCE)) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            set_socket_keepalive(&stream, true)?;
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// Puts a TLS session over the socket.
    pub(crate) fn secured(self, channel: Channel) -> Self {
        Self::Tls(Box::new(Secured { socket: self, channel }))
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(true),
            Self::Tcp(stream) => stream.set_nonblocking(true),
            Self::Tls(secured) => secured.socket.set_nonblocking(),
        }
    }

    /// Returns what to poll the socket for: reading, and perhaps sending.
    pub(crate) fn interest(&self, sends: bool) -> PollFd<'_> {
        let writes = if sends || self.is_sending() { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::new(self, PollFlags::IN | writes)
    }

    /// Whether sealed bytes are left to be sent.
    fn is_sending(&self) -> bool {
        matches!(self, Self::Tls(secured) if secured.channel.wants_write())
    }

    /// Reads bytes that are there, and says whether those were all. After [`io::ErrorKind::Interrupted`] the call must
    /// be repeated.
    pub(crate) fn receive(&mut self, room: &mut [u8]) -> io::Result<(usize, bool)> {
        let Self::Tls(secured) = self else {
            let count = rustix::io::read(&*self, &mut *room)?;
            return Ok((count, count < room.len()));
        };
        secured.receive(|plain| copy_to(room, plain))
    }

    /// As [`Self::receive`], but at most `left` bytes into lent memory, from `at` on; `None` if the memory was taken
    /// back.
    pub(crate) fn receive_to(&mut self, place: &Lent, at: usize, left: usize) -> Option<io::Result<(usize, bool)>> {
        let Self::Tls(secured) = self else {
            return place.receive_into(self.as_fd(), at, left);
        };
        (!place.has_ended()).then(|| {
            secured.receive(|plain| {
                let plain = plain.get(..left.min(plain.len())).unwrap_or_default();
                place.copy_in(at, plain);
                plain.len()
            })
        })
    }

    /// Sends sealed bytes, then as much of `parts` as the socket takes; returns how many bytes of `parts`.
    pub(crate) fn send<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<usize> {
        let Self::Tls(secured) = self else { return send_parts(self.as_fd(), parts.map(SocketPart::Bytes)) };
        let Secured { socket, channel } = &mut **secured;
        let mut socket = Socket::new(socket.as_fd());
        channel.send(&mut socket)?;
        let count = channel.seal(parts)?;
        // Bytes that the socket does not take now stay in the channel.
        match channel.send(&mut socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }

    /// Sends sealed bytes.
    pub(crate) fn send_rest(&mut self) -> io::Result<()> {
        match self {
            Self::Unix(_) | Self::Tcp(_) => Ok(()),
            Self::Tls(secured) => secured.channel.send(&mut Socket::new(secured.socket.as_fd())),
        }
    }

    /// Ends sending. With TLS the server is told, as a courtesy.
    pub(crate) fn close(&mut self) {
        if let Self::Tls(secured) = self {
            secured.channel.close();
            let _ = self.send_rest();
        }
    }

    /// Returns the stream with blocking calls that fail after `until`.
    pub(crate) fn until(&mut self, until: Instant) -> Limited<'_> {
        Limited { stream: self, until }
    }
}

impl Secured {
    /// Gives `take` plain bytes that are there; returns how many it took, and whether those were all.
    fn receive(&mut self, take: impl FnOnce(&[u8]) -> usize) -> io::Result<(usize, bool)> {
        let Self { socket, channel } = self;
        let mut socket = Socket::new(socket.as_fd());
        match channel.look(&mut socket) {
            Ok(Arrival::Plain) => {
                let count = channel.take(take)?;
                Ok((count, socket.is_drained() && !channel.has_arrived()))
            }
            Ok(Arrival::Nothing) => Err(io::ErrorKind::Interrupted.into()),
            Ok(Arrival::End) => Ok((0, false)),
            Err(error) => {
                tell(channel, &mut socket, &error);
                Err(error)
            }
        }
    }
}

/// Sends the alert that says why this side ends.
fn tell(channel: &mut Channel, socket: &mut Socket<'_>, error: &io::Error) {
    if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
        let _ = channel.send(socket);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Tls(secured) => secured.socket.as_fd(),
        }
    }
}

/// Returns the time until `until`; an error if it is over.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left).ok_or_else(|| io::ErrorKind::TimedOut.into())
}

/// Turns the timeout of a socket, which is `WouldBlock`, into `TimedOut`.
fn in_time(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

/// A stream on which all reads and writes together have one time limit, however slow the peer is.
#[derive(Debug)]
pub(crate) struct Limited<'a> {
    stream: &'a mut Stream,
    until: Instant,
}

impl Read for Limited<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match &mut *self.stream {
            Stream::Tls(secured) => {
                let Secured { socket, channel } = &mut **secured;
                channel.over(socket.until(self.until)).read(bytes)
            }
            plain => {
                set_socket_timeout(&*plain, Timeout::Recv, Some(left(self.until)?))?;
                rustix::io::read(&*plain, bytes).map_err(|error| in_time(error.into()))
            }
        }
    }
}

impl Write for Limited<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut *self.stream {
            Stream::Tls(secured) => {
                let Secured { socket, channel } = &mut **secured;
                channel.over(socket.until(self.until)).write(bytes)
            }
            plain => {
                set_socket_timeout(&*plain, Timeout::Send, Some(left(self.until)?))?;
                send(&*plain, bytes, SendFlags::NOSIGNAL).map_err(|error| in_time(error.into()))
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
