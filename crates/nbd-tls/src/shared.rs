//! TLS with keys that both sides have. The sessions are GnuTLS's, which the peers use as well.

use crate::ffi;
use crate::keys::SharedKeys;
use crate::session::{Session, State};
use block::{Error, ErrorKind, Result};
use std::ffi::CString;
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;

/// What a failed handshake means, which the library calls an illegal parameter.
const OTHER_KEYS: &str = "the shared keys do not match: the user's name or the key differs on the two sides (keys.psk)";
/// What is read from the socket at once in the handshake.
const HANDSHAKE_BYTES: usize = 4096;
/// Warnings of a peer that are passed over.
const WARNINGS_MAX: usize = 8;

impl SharedKeys {
    /// A server's session with whoever has one of them.
    pub(crate) fn serve(self: &Arc<Self>) -> Result<Shared> {
        Ok(Shared::new(ffi::Session::server(self)?))
    }

    /// A client's session, with the key of this user or with the only one.
    pub(crate) fn connect(&self, user: Option<&str>) -> Result<Shared> {
        let bad = |why: String| Error::new(ErrorKind::BadOption, why);
        let (user, key) = match user {
            Some(user) => {
                let key = self.of(user.as_bytes());
                (user.as_bytes(), key.ok_or_else(|| bad(format!("there is no TLS key of '{user}' in the file")))?)
            }
            None => match self.0.iter().next().filter(|_| self.0.len() == 1) {
                Some((user, key)) => (user.as_slice(), key.as_slice()),
                None => {
                    return Err(bad("there are several TLS keys in the file: name a user (nbds://USER@HOST)".into()));
                }
            },
        };
        let user = CString::new(user).map_err(|_| bad("a user's name has no zero byte".into()))?;
        Ok(Shared::new(ffi::Session::client(&user, key)?))
    }
}

/// A session with shared keys.
#[derive(Debug)]
pub(crate) struct Shared {
    session: ffi::Session,
    /// A record in plain, and how much of it was taken.
    plain: Option<ffi::Record>,
    taken: usize,
    has_ended: bool,
    warnings: usize,
    /// What is sealed together, and what of the sealed bytes is sent.
    staged: Vec<u8>,
    sent: usize,
}

impl Shared {
    fn new(session: ffi::Session) -> Self {
        Self { session, plain: None, taken: 0, has_ended: false, warnings: 0, staged: Vec::new(), sent: 0 }
    }

    /// The plain bytes that were not taken yet.
    fn rest(&self) -> &[u8] {
        self.plain.as_ref().and_then(|record| record.bytes().get(self.taken..)).unwrap_or_default()
    }

    /// Agrees with the peer on keys of the moment, on a socket that waits. Returns what came behind the handshake.
    pub(crate) fn shake_hands(&mut self, socket: &mut (impl Read + Write)) -> io::Result<Vec<u8>> {
        let (mut bytes, mut rest) = (vec![0_u8; HANDSHAKE_BYTES], 0..0_usize);
        loop {
            let mut arrived = bytes.get(rest.clone()).unwrap_or_default();
            let went = self.session.handshake(&mut arrived);
            let is_stuck = arrived.len() == rest.len();
            rest.start = rest.end.saturating_sub(arrived.len());
            if let Err(code) = went
                && !self.goes_on(code)
            {
                let error = self.ends(code);
                let _ = self.flush(socket);
                return Err(if self.session.is_of_other_keys(code) {
                    io::Error::new(error.kind(), OTHER_KEYS)
                } else {
                    error
                });
            }
            self.flush(socket)?;
            match went {
                Ok(()) => return Ok(bytes.get(rest).unwrap_or_default().to_vec()),
                Err(ffi::AGAIN) if rest.is_empty() => match socket.read(&mut bytes) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(count) => rest = 0..count,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                },
                Err(ffi::AGAIN) if is_stuck => return Err(io::ErrorKind::InvalidData.into()),
                Err(_) => {}
            }
        }
    }

    fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.wants_write() {
            if self.write(socket)? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    fn goes_on(&mut self, code: ffi::Code) -> bool {
        match code {
            ffi::AGAIN | ffi::INTERRUPTED => true,
            ffi::WARNING_ALERT => {
                self.warnings = self.warnings.saturating_add(1);
                self.warnings <= WARNINGS_MAX
            }
            code => {
                !self.session.is_fatal(code) && self.warnings < WARNINGS_MAX && {
                    self.warnings = self.warnings.saturating_add(1);
                    true
                }
            }
        }
    }

    /// The error, of which the peer is told.
    fn ends(&mut self, code: ffi::Code) -> io::Error {
        self.session.alert(code);
        io::Error::new(io::ErrorKind::InvalidData, self.session.in_words(code))
    }
}

impl Session for Shared {
    fn feed(&mut self, arrived: &mut &[u8]) -> io::Result<()> {
        while !arrived.is_empty() && self.rest().is_empty() && !self.has_ended {
            let before = arrived.len();
            match self.session.receive(arrived) {
                Ok(Some(record)) => (self.plain, self.taken) = (Some(record), 0),
                Ok(None) => self.has_ended = true,
                // Either all was taken, or a message that is no data; others may be behind it.
                Err(ffi::AGAIN) if arrived.len() < before => {}
                Err(code) if code != ffi::AGAIN && self.goes_on(code) => {}
                Err(code) => {
                    let error = self.ends(code);
                    return Err(io::Error::new(error.kind(), format!("TLS: {error}")));
                }
            }
        }
        Ok(())
    }

    fn state(&self) -> State {
        let plain_bytes = self.rest().len();
        State { plain_bytes, has_ended: self.has_ended && plain_bytes == 0 }
    }

    fn take(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let rest = self.rest();
        let taken = take(rest).min(rest.len());
        self.taken = self.taken.saturating_add(taken);
        Ok(taken)
    }

    fn seal(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut staged = std::mem::take(&mut self.staged);
        let mut left: &[u8] = match parts {
            // Within a long payload.
            [only] => only,
            parts => {
                staged.clear();
                parts.iter().for_each(|part| staged.extend_from_slice(part));
                &staged
            }
        };
        let mut sealed = Ok(left.len());
        while !left.is_empty() {
            match self.session.send(left) {
                Ok(count @ 1..) => left = left.get(count..).unwrap_or_default(),
                Ok(_) | Err(ffi::INTERRUPTED) => {}
                Err(code) => {
                    sealed = Err(io::Error::other(format!("TLS: {}", self.session.in_words(code))));
                    break;
                }
            }
        }
        self.staged = staged;
        sealed
    }

    fn wants_write(&self) -> bool {
        self.session.has_sealed()
    }

    fn write(&mut self, socket: &mut dyn Write) -> io::Result<usize> {
        let sealed = self.session.sealed();
        let count = socket.write(sealed.get(self.sent..).unwrap_or_default())?;
        self.sent = self.sent.saturating_add(count);
        if self.sent >= sealed.len() {
            sealed.clear();
            self.sent = 0;
        }
        Ok(count)
    }

    fn close(&mut self) {
        self.session.end();
    }

    #[cfg(test)]
    fn renew_keys(&mut self) {
        self.session.renew_keys();
    }
}
