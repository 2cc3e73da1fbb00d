//! A connection's bytes under TLS, on its reactor.

use crate::output::Output;
use nbd_tls::{Arrival, Channel, Socket};
use std::io;
use std::os::fd::BorrowedFd;

/// What is decrypted, and what is encrypted, in one turn: it takes time from the others on the reactor.
pub(crate) const BYTES_PER_TURN: usize = 128 << 10;
/// What is encrypted at once.
const SEALED_BYTES: usize = 64 << 10;

/// What a look at the socket has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// Plain bytes can be taken.
    pub(crate) has_plain: bool,
    /// What was read for it.
    pub(crate) read_bytes: usize,
    /// The socket has no more for now.
    pub(crate) is_drained: bool,
}

pub(crate) struct UnderTls {
    channel: Channel,
    /// What was encrypted in this turn.
    sealed_bytes: usize,
}

impl UnderTls {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel, sealed_bytes: 0 }
    }

    pub(crate) fn begins_turn(&mut self) {
        self.sealed_bytes = 0;
    }

    /// Whether something is here that no socket tells of.
    pub(crate) fn has_arrived(&self) -> bool {
        self.channel.has_arrived()
    }

    /// Looks for plain bytes.
    pub(crate) fn look(&mut self, socket: BorrowedFd<'_>) -> io::Result<Look> {
        let mut socket = Socket::new(socket);
        let has_plain = match self.channel.look(&mut socket)? {
            Arrival::Plain => true,
            Arrival::Nothing => false,
            Arrival::End => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
        };
        Ok(Look { has_plain, read_bytes: socket.read_bytes(), is_drained: socket.is_drained() })
    }

    /// Takes the plain bytes that `take` wants of those it gets; returns how many.
    pub(crate) fn take(&mut self, take: impl FnOnce(&[u8]) -> usize) -> io::Result<usize> {
        self.channel.take(take)
    }

    /// Whether it has something to send: replies of `output`, as far as this turn goes, or what was encrypted.
    pub(crate) fn sends(&self, output: &Output) -> bool {
        self.channel.wants_write() || !output.is_empty() && !self.was_short()
    }

    /// Whether nothing more is encrypted in this turn.
    pub(crate) fn was_short(&self) -> bool {
        self.sealed_bytes >= BYTES_PER_TURN
    }

    /// Whether replies are encrypted that the socket has not taken.
    pub(crate) fn wants_write(&self) -> bool {
        self.channel.wants_write()
    }

    /// Encrypts replies, and sends what the socket takes.
    pub(crate) fn send(&mut self, output: &mut Output, socket: BorrowedFd<'_>) -> io::Result<bool> {
        if !self.channel.wants_write() {
            let channel = &mut self.channel;
            let sealed = output.seal(SEALED_BYTES, |parts| channel.seal(parts))?;
            if sealed == 0 && !output.is_empty() {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.sealed_bytes = self.sealed_bytes.saturating_add(sealed);
        }
        self.channel.send(&mut Socket::new(socket))?;
        Ok(true)
    }

    /// Says that nothing more comes; false if that was said before.
    pub(crate) fn close(&mut self) -> bool {
        let is_new = !self.channel.is_closed();
        self.channel.close();
        is_new
    }

    /// Sends the last word, as far as the socket takes it.
    pub(crate) fn last_word(&mut self, socket: BorrowedFd<'_>) {
        let _ = self.channel.send(&mut Socket::new(socket));
    }
}
