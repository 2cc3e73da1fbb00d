//! Reads and writes a stream socket through a borrowed descriptor.

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;

/// A borrowed socket. Its descriptor's flags say whether calls block.
#[derive(Debug)]
pub struct Socket<'a> {
    fd: BorrowedFd<'a>,
    read_bytes: usize,
    is_drained: bool,
}

impl<'a> Socket<'a> {
    /// Borrows the socket `fd`.
    #[must_use]
    pub fn new(fd: BorrowedFd<'a>) -> Self {
        Self { fd, read_bytes: 0, is_drained: false }
    }

    /// Returns the number of bytes read so far.
    #[must_use]
    pub fn read_bytes(&self) -> usize {
        self.read_bytes
    }

    /// Whether the last read got less than it had room for, so that another one would find nothing.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.is_drained
    }
}

impl Read for Socket<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = rustix::io::read(self.fd, &mut *bytes)?;
        self.is_drained = count < bytes.len();
        self.read_bytes = self.read_bytes.saturating_add(count);
        Ok(count)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        // If the peer has gone, the call returns an error instead of raising a signal.
        Ok(sendmsg(self.fd, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
