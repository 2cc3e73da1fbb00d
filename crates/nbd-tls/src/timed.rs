//! A socket on which all waiting together has one end.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Waits for what `fds` ask for, until that moment.
pub(crate) fn wait_until(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    let rest = until.map(|until| until.saturating_duration_since(Instant::now()));
    if rest.is_some_and(|rest| rest.is_zero()) {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the time for it is over"));
    }
    let rest = rest.and_then(|rest| Timespec::try_from(rest).ok());
    match poll(fds, rest.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A socket of a peer that is not trusted: nothing it does keeps a thread longer than was said. Any stream socket will do.
#[derive(Debug)]
pub struct Timed<'a> {
    socket: &'a UnixStream,
    /// For whom it is used. When that one has gone, there is no use in waiting.
    behind: &'a UnixStream,
    until: Option<Instant>,
    grace: Duration,
    has_gone: bool,
}

impl<'a> Timed<'a> {
    /// All of what is read and written ends at `until`, and at once when the other end of `behind` has gone. The socket is
    /// set not to wait.
    pub fn until(socket: &'a UnixStream, behind: &'a UnixStream, until: Instant) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, behind, until: Some(until), grace: Duration::ZERO, has_gone: false })
    }

    /// What is read and written has a limit only when the other end of `behind` has gone: `grace` from then on.
    pub fn while_there(socket: &'a UnixStream, behind: &'a UnixStream, grace: Duration) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, behind, until: None, grace, has_gone: false })
    }

    fn carry_out(&mut self, wanted: PollFlags, mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait(wanted)?,
                result => {
                    // A peer that always has something more is not waited for, and has its end, too.
                    let is_over = self.until.is_some_and(|until| Instant::now() >= until);
                    return if is_over { wait_until(&mut [], self.until).and(result) } else { result };
                }
            }
        }
    }

    fn wait(&mut self, wanted: PollFlags) -> io::Result<()> {
        let mut fds = vec![PollFd::new(self.socket, wanted)];
        if !self.has_gone {
            // Only that it has gone is told of it.
            fds.push(PollFd::new(self.behind, PollFlags::empty()));
        }
        wait_until(&mut fds, self.until)?;
        if fds.get(1).is_some_and(|behind| behind.revents().intersects(PollFlags::HUP | PollFlags::ERR)) {
            let end = Instant::now().checked_add(self.grace);
            self.until = self.until.into_iter().chain(end).min();
            self.has_gone = true;
        }
        Ok(())
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
