//! What a channel needs of a TLS session, whichever library it comes from.

use crate::in_words::said_of;
use rustls::Connection;
use std::fmt::Debug;
use std::io::{self, BufRead as _, IoSlice, Write};

/// The peer's bytes that a session holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// Decrypted bytes that were not taken yet.
    pub(crate) plain_bytes: usize,
    /// The peer has said that nothing more comes.
    pub(crate) has_ended: bool,
}

/// A session after its handshake. It touches no socket.
pub(crate) trait Session: Debug + Send {
    /// Feeds arrived bytes to the session until it has plain bytes. Otherwise none are left, unless the peer has ended.
    fn feed(&mut self, arrived: &mut &[u8]) -> io::Result<()>;
    fn state(&self) -> State;
    /// Calls `take` with the first plain bytes; returns how many it took.
    fn take(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize>;
    /// Encrypts as many of these bytes as there is room for; returns how many.
    fn seal(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Whether bytes are left to be sent.
    fn wants_write(&self) -> bool;
    /// Sends as much as the socket takes; returns how many bytes.
    fn write(&mut self, socket: &mut dyn Write) -> io::Result<usize>;
    /// Tells the peer that nothing more comes.
    fn close(&mut self);
    /// Changes the keys that this side sends with.
    #[cfg(test)]
    fn renew_keys(&mut self);
}

/// Room beside the sealed bytes for heads and tags of records, and for new keys, which go first.
const BESIDE_BYTES: usize = 4096;

/// A session with certificates.
#[derive(Debug)]
pub(crate) struct Certified {
    session: Connection,
    plain_bytes: usize,
    has_ended: bool,
}

impl Certified {
    /// Processes bytes that arrived with the last handshake message. At most `sealed_bytes_max` bytes are to be sealed
    /// at once.
    pub(crate) fn new(mut session: Connection, sealed_bytes_max: usize) -> io::Result<Self> {
        // The session counts encrypted bytes, and takes only as many plain bytes as have room.
        session.set_buffer_limit(Some(sealed_bytes_max.saturating_add(BESIDE_BYTES)));
        let mut certified = Self { session, plain_bytes: 0, has_ended: false };
        certified.open()?;
        Ok(certified)
    }

    fn open(&mut self) -> io::Result<()> {
        let state = self.session.process_new_packets();
        let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, said_of(&error)))?;
        self.plain_bytes = state.plaintext_bytes_to_read();
        // Bytes that the peer sends after its end are ignored.
        self.has_ended = state.peer_has_closed();
        Ok(())
    }
}

impl Session for Certified {
    fn feed(&mut self, arrived: &mut &[u8]) -> io::Result<()> {
        while !arrived.is_empty() && self.plain_bytes == 0 && !self.has_ended {
            let taken = self.session.read_tls(arrived)?;
            self.open()?;
            if taken == 0 && !self.has_ended {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "TLS: a record is not well formed"));
            }
        }
        Ok(())
    }

    fn state(&self) -> State {
        State { plain_bytes: self.plain_bytes, has_ended: self.has_ended }
    }

    fn take(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let mut reader = self.session.reader();
        let first = reader.fill_buf()?;
        let taken = take(first).min(first.len());
        reader.consume(taken);
        self.plain_bytes = self.plain_bytes.saturating_sub(taken);
        Ok(taken)
    }

    fn seal(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = self.session.writer().write_vectored(parts)?;
        if count > 0 && !self.session.wants_write() {
            // With TLS 1.2 a session's keys are used up at some time; rustls does not report this as an error.
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "TLS: the keys are used up"));
        }
        Ok(count)
    }

    fn wants_write(&self) -> bool {
        self.session.wants_write()
    }

    fn write(&mut self, mut socket: &mut dyn Write) -> io::Result<usize> {
        self.session.write_tls(&mut socket)
    }

    fn close(&mut self) {
        self.session.send_close_notify();
    }

    #[cfg(test)]
    fn renew_keys(&mut self) {
        self.session.refresh_traffic_keys().unwrap();
    }
}
