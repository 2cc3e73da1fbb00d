//! TLS with keys that both sides have. The sessions are GnuTLS's, which the peers use as well.

use crate::ffi;
use crate::keys::SharedKeys;
use crate::session::{Session, State};
use block::{Error, ErrorKind, Result};
use std::ffi::CString;
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;

/// The most plain bytes in a record.
const RECORD_BYTES_MAX: usize = 16 << 10;
/// What a session is given at once.
const GIVEN_BYTES: usize = 16 << 10;
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
    /// A record in plain, and which part of it was not taken yet.
    plain: Vec<u8>,
    first: usize,
    end: usize,
    /// What it was given may hold a record.
    may_hold: bool,
    has_ended: bool,
    warnings: usize,
    /// What is sealed together, and what of the sealed bytes is sent.
    staged: Vec<u8>,
    sent: usize,
}

impl Shared {
    fn new(session: ffi::Session) -> Self {
        let (plain, staged) = (vec![0; RECORD_BYTES_MAX], Vec::new());
        let (may_hold, has_ended) = (true, false);
        Self { session, plain, first: 0, end: 0, may_hold, has_ended, warnings: 0, staged, sent: 0 }
    }

    /// Agrees with the peer on keys of the moment, on a socket that waits.
    pub(crate) fn shake_hands(&mut self, socket: &mut (impl Read + Write)) -> io::Result<()> {
        let mut bytes = vec![0; 4096];
        loop {
            let went = self.session.handshake();
            if let Err(code) = went
                && !self.goes_on(code)
            {
                let error = self.ends(code);
                let _ = self.flush(socket);
                return Err(error);
            }
            self.flush(socket)?;
            match went {
                Ok(()) => return Ok(()),
                Err(ffi::AGAIN) => match socket.read(&mut bytes) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(count) => self.session.give(bytes.get(..count).unwrap_or_default()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                },
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
        while self.first == self.end && !self.has_ended {
            if self.may_hold {
                match self.session.receive(&mut self.plain) {
                    Ok(0) => self.has_ended = true,
                    Ok(count) => (self.first, self.end) = (0, count),
                    Err(ffi::AGAIN) => self.may_hold = false,
                    Err(code) if self.goes_on(code) => {}
                    Err(code) => {
                        let error = self.ends(code);
                        return Err(io::Error::new(error.kind(), format!("TLS: {error}")));
                    }
                }
                continue;
            }
            let Some((part, rest)) = arrived.split_at_checked(arrived.len().min(GIVEN_BYTES)) else { return Ok(()) };
            if part.is_empty() {
                return Ok(());
            }
            self.session.give(part);
            (*arrived, self.may_hold) = (rest, true);
        }
        Ok(())
    }

    fn state(&self) -> State {
        let plain_bytes = self.end.saturating_sub(self.first);
        State { plain_bytes, may_hold: self.may_hold, has_ended: self.has_ended && plain_bytes == 0 }
    }

    fn take(&mut self, take: &mut dyn FnMut(&[u8]) -> usize) -> io::Result<usize> {
        let plain = self.plain.get(self.first..self.end).unwrap_or_default();
        let taken = take(plain).min(plain.len());
        self.first = self.first.saturating_add(taken);
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
}
