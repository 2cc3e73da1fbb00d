//! What a channel wants of a session of TLS, whoever made it.

use crate::in_words::said_of;
use rustls::Connection;
use std::fmt::Debug;
use std::io::{self, BufRead as _, IoSlice, Write};

/// What of the peer's is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct State {
    /// Plain bytes that were not taken yet.
    pub(crate) plain_bytes: usize,
    /// What it has taken may be more than it has opened.
    pub(crate) may_hold: bool,
    /// The peer has said that nothing more comes.
    pub(crate) has_ended: bool,
}

/// A session of which the handshake is over. It touches no socket.
pub(crate) trait Session: Debug + Send {
    /// Takes what has arrived, up to plain bytes.
    fn feed(&mut self, arrived: &mut &[u8]) -> io::Result<()>;
    fn state(&self) -> State;
    /// Lets the first plain bytes be taken; returns how many were.
    fn take(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize>;
    /// Encrypts as many of these bytes as there is room for.
    fn seal(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Whether something is left to be sent.
    fn wants_write(&self) -> bool;
    /// Sends of it what is taken.
    fn write(&mut self, socket: &mut dyn Write) -> io::Result<usize>;
    /// Says that nothing more comes.
    fn close(&mut self);
    /// Changes the keys that this side sends with.
    #[cfg(test)]
    fn renew_keys(&mut self) {
        unimplemented!("for sessions with certificates");
    }
}

/// Room beside what is sealed at once: records' heads and tags, and new keys, which go ahead of it.
const BESIDE_BYTES: usize = 4096;

/// A session with certificates.
#[derive(Debug)]
pub(crate) struct Certified {
    session: Connection,
    plain_bytes: usize,
    has_ended: bool,
}

impl Certified {
    /// Takes what came together with the last of the keys. No more than `sealed_bytes_max` are to be sealed at once.
    pub(crate) fn new(mut session: Connection, sealed_bytes_max: usize) -> io::Result<Self> {
        // The session counts what it has encrypted, and takes only a part of what has no room.
        session.set_buffer_limit(Some(sealed_bytes_max.saturating_add(BESIDE_BYTES)));
        let mut certified = Self { session, plain_bytes: 0, has_ended: false };
        certified.open()?;
        Ok(certified)
    }

    fn open(&mut self) -> io::Result<()> {
        let state = self.session.process_new_packets();
        let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, said_of(&error)))?;
        self.plain_bytes = state.plaintext_bytes_to_read();
        // What it sends after its end is not looked at.
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
        State { plain_bytes: self.plain_bytes, may_hold: false, has_ended: self.has_ended }
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
            // The session keeps this to itself: with TLS 1.2 keys are used up at some time.
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
