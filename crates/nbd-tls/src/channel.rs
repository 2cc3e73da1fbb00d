//! A TLS connection after its handshake. It has no thread of its own: the owner of the socket drives it.

use crate::session::{Certified, Session};
use rustls::Connection;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;

/// The most plain bytes that are encrypted at once. More follow when the socket has taken these.
const SEALED_BYTES_MAX: usize = 64 << 10;
/// The most bytes that one read takes from the socket: all that the other side seals at once, with heads and tags.
const ARRIVED_BYTES: usize = SEALED_BYTES_MAX + (1 << 10);
/// The most slices that are encrypted at once.
const PARTS_MAX: usize = 64;
/// The most bytes that a peer may send without a plain byte among them: tickets, new keys, and an unfinished record.
const FRUITLESS_BYTES_MAX: usize = 128 << 10;

/// Runs the handshake on a blocking socket. A time limit of the socket limits the whole handshake.
pub fn shake_hands(session: &mut Connection, socket: &mut (impl Read + Write)) -> io::Result<()> {
    while session.is_handshaking() {
        session.complete_io(socket)?;
    }
    // Sends the last message of the handshake, or the alert that says why it failed.
    while session.wants_write() {
        session.write_tls(socket)?;
    }
    Ok(())
}

/// The result of [`Channel::look`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Plain bytes are there.
    Plain,
    /// Something came, but no plain bytes yet.
    Nothing,
    /// The peer has said that it sends nothing more.
    End,
}

/// A session after its handshake. It holds at most 65 KiB of arrived bytes, one decrypted record, and 64 KiB that are
/// to be sent. It never waits itself; the socket that it is given may.
#[derive(Debug)]
pub struct Channel {
    session: Box<dyn Session>,
    /// Arrived bytes; `rest` is the part that the session has not taken yet.
    arrived: Vec<u8>,
    rest: Range<usize>,
    /// Bytes that came since the last plain one.
    fruitless_bytes: usize,
    is_closed: bool,
}

impl Channel {
    /// Goes on after [`shake_hands`]. Bytes that arrived with the last handshake message are kept.
    pub fn new(session: Connection) -> io::Result<Self> {
        Ok(Self::of(Box::new(Certified::new(session, SEALED_BYTES_MAX)?), &[]))
    }

    /// Goes on with a session, and with sealed bytes that came behind its handshake.
    pub(crate) fn of(session: Box<dyn Session>, behind: &[u8]) -> Self {
        let mut arrived = vec![0; ARRIVED_BYTES];
        let rest = 0..copy_to(&mut arrived, behind);
        Self { session, arrived, rest, fruitless_bytes: 0, is_closed: false }
    }

    /// Whether [`Self::look`] has something to return without reading the socket.
    #[must_use]
    pub fn has_arrived(&self) -> bool {
        let state = self.session.state();
        state.plain_bytes > 0 || state.has_ended || !self.rest.is_empty()
    }

    /// Brings plain bytes, with at most one read from `socket`. If the connection ends without TLS's closing message,
    /// that is an error: somebody may have cut it. After any error but [`io::ErrorKind::WouldBlock`] and
    /// [`io::ErrorKind::Interrupted`], the bytes left to send are an alert that says why.
    pub fn look(&mut self, socket: &mut impl Read) -> io::Result<Arrival> {
        self.take_rest()?;
        let state = self.session.state();
        if state.plain_bytes == 0 && !state.has_ended {
            match socket.read(&mut self.arrived)? {
                0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it went without the end that TLS has")),
                count => {
                    self.fruitless_bytes = self.fruitless_bytes.saturating_add(count);
                    self.rest = 0..count;
                }
            }
            self.take_rest()?;
        }
        let state = self.session.state();
        match state.plain_bytes {
            0 if state.has_ended => Ok(Arrival::End),
            0 if self.fruitless_bytes > FRUITLESS_BYTES_MAX => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "it sends records with nothing in them"))
            }
            0 => Ok(Arrival::Nothing),
            _ => {
                self.fruitless_bytes = 0;
                Ok(Arrival::Plain)
            }
        }
    }

    /// Feeds arrived bytes to the session until it has plain bytes.
    fn take_rest(&mut self) -> io::Result<()> {
        let mut rest = self.arrived.get(self.rest.clone()).unwrap_or_default();
        let fed = self.session.feed(&mut rest);
        self.rest.start = self.rest.end.saturating_sub(rest.len());
        fed
    }

    /// Calls `take` with the first plain bytes; it returns how many of them it took.
    pub fn take(&mut self, take: impl FnOnce(&[u8]) -> usize) -> io::Result<usize> {
        if self.session.state().plain_bytes == 0 {
            return Ok(0);
        }
        let mut take = Some(take);
        self.session.take(&mut |first| take.take().map_or(0, |take| take(first)))
    }

    /// Whether bytes are left to be sent. While there are any, nothing more may be sealed.
    #[must_use]
    pub fn wants_write(&self) -> bool {
        self.session.wants_write()
    }

    /// Encrypts the first of the bytes of `parts`; returns how many. Nothing goes out before [`Self::send`].
    pub fn seal<'a>(&mut self, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<usize> {
        if self.is_closed {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "TLS: this side has ended"));
        }
        let mut slices = [IoSlice::new(&[]); PARTS_MAX];
        let (mut used, mut room) = (0_usize, SEALED_BYTES_MAX);
        for (slice, part) in slices.iter_mut().zip(parts.filter(|part| !part.is_empty())) {
            let part = part.get(..part.len().min(room)).unwrap_or_default();
            room = room.saturating_sub(part.len());
            (*slice, used) = (IoSlice::new(part), used.saturating_add(1));
            if room == 0 {
                break;
            }
        }
        self.session.seal(slices.get(..used).unwrap_or_default())
    }

    /// Sends sealed bytes, as far as `socket` takes them; the rest goes with the next call.
    pub fn send(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.session.wants_write() {
            match self.session.write(socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Tells the peer that nothing more comes, so that it can tell this end from a cut connection.
    pub fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true) {
            self.session.close();
        }
    }

    /// Whether this side has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns a stream of plain bytes over a blocking socket.
    pub fn over<S: Read + Write>(&mut self, socket: S) -> Over<'_, S> {
        Over { channel: self, socket }
    }

    /// Changes the keys that this side sends with.
    #[cfg(test)]
    fn renew_keys(&mut self) {
        self.session.renew_keys();
    }
}

/// A stream of plain bytes under TLS, on a blocking socket.
#[derive(Debug)]
pub struct Over<'a, S> {
    channel: &'a mut Channel,
    socket: S,
}

impl<S: Read> Read for Over<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.channel.look(&mut self.socket)? {
                Arrival::Plain => return self.channel.take(|plain| copy_to(bytes, plain)),
                Arrival::Nothing => {}
                Arrival::End => return Ok(0),
            }
        }
    }
}

impl<S: Write> Write for Over<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.channel.send(&mut self.socket)?;
        let count = self.channel.seal(std::iter::once(bytes))?;
        self.channel.send(&mut self.socket)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.channel.send(&mut self.socket)
    }
}

/// Copies as many bytes as both slices have room for; returns how many.
#[must_use]
pub fn copy_to(target: &mut [u8], source: &[u8]) -> usize {
    let count = target.len().min(source.len());
    if let (Some(target), Some(source)) = (target.get_mut(..count), source.get(..count)) {
        target.copy_from_slice(source);
    }
    count
}

#[cfg(test)]
mod tests;
