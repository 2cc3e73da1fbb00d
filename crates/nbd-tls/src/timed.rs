//! A socket on which all reads and writes together have one time limit.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

fn over() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the time for it is over")
}

/// The socket of a peer that is not trusted: nothing it does keeps a thread longer than the limit. Any stream socket
/// will do.
#[derive(Debug)]
pub struct Timed<'a> {
    socket: &'a UnixStream,
    /// The socket of the side that this one is used for. When its other end has gone, waiting is of no use.
    behind: &'a UnixStream,
    until: Instant,
}

impl<'a> Timed<'a> {
    /// Ends all reads and writes at `until`, and at once when the other end of `behind` has gone. Sets the socket
    /// non-blocking.
    pub fn until(socket: &'a UnixStream, behind: &'a UnixStream, until: Instant) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, behind, until })
    }

    fn carry_out(&mut self, wanted: PollFlags, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(wanted)?,
                result => {
                    // A peer that always has more to send never makes `wait` run, so the limit is checked here, too.
                    return if Instant::now() >= self.until { Err(over()) } else { result };
                }
            }
        }
    }

    fn wait(&self, wanted: PollFlags) -> io::Result<()> {
        let rest = self.until.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(over());
        }
        // Of `behind`, only hang-ups and errors are reported.
        let mut fds = [PollFd::new(self.socket, wanted), PollFd::new(self.behind, PollFlags::empty())];
        match poll(&mut fds, Timespec::try_from(rest).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match fds[1].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            true => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "its server has ended")),
            false => Ok(()),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        self.carry_out(PollFlags::IN, || socket.read(bytes))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        self.carry_out(PollFlags::OUT, || socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
