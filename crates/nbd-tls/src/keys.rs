//! Keys that both sides have (PSK), and TLS with them. The sessions come from GnuTLS, which the peers use as well.

use crate::ffi;
use crate::session::{Session, State};
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::path::Path;
use std::sync::Arc;

/// A longer file is refused.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// A longer key is refused.
const KEY_BYTES_MAX: usize = 256;
/// The most plain bytes in a record.
const RECORD_BYTES_MAX: usize = 16 << 10;
/// The most bytes that a session is given at once.
const GIVEN_BYTES: usize = 16 << 10;
/// The most warnings of a peer that are ignored.
const WARNINGS_MAX: usize = 8;

/// Keys by the names of their users, as `psktool` writes them.
#[derive(Default, Clone, PartialEq, Eq)]
pub struct SharedKeys(BTreeMap<Vec<u8>, Vec<u8>>);

impl fmt::Debug for SharedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedKeys").field("keys", &self.0.len()).finish()
    }
}

fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    let is_key = !text.is_empty() && text.len().is_multiple_of(2) && text.iter().all(u8::is_ascii_hexdigit);
    (is_key && text.len() / 2 <= KEY_BYTES_MAX).then(|| digits.collect())?
}

impl SharedKeys {
    /// Reads keys from a file. Each line is `USER:KEY`, the key in hexadecimal digits.
    pub fn in_file(path: &Path) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::BadOption, format!("TLS keys '{}': {why}", path.display()));
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(|error| bad(&error.to_string()))?;
        file.take(FILE_BYTES_MAX.saturating_add(1)).read_to_end(&mut text).map_err(|error| bad(&error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(bad("it is too long for a file of keys"));
        }
        let mut keys = BTreeMap::new();
        for (number, line) in (1_u32..).zip(text.split(|byte| *byte == b'\n')) {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let colon = line.iter().position(|byte| *byte == b':').filter(|colon| *colon > 0);
            let (user, key) = colon.and_then(|colon| line.split_at_checked(colon)).unwrap_or_default();
            // The message must not show the line, which is a secret.
            let key = key.get(1..).and_then(unhex).filter(|_| !user.contains(&0));
            let key =
                key.ok_or_else(|| bad(&format!("line {number} is not USER:KEY with a key in hexadecimal digits")))?;
            keys.insert(user.to_vec(), key);
        }
        if keys.is_empty() {
            return Err(bad("there is no key in it"));
        }
        Ok(Self(keys))
    }

    pub(crate) fn of(&self, user: &[u8]) -> Option<&[u8]> {
        self.0.get(user).map(Vec::as_slice)
    }

    /// Makes a server's session, for any client with one of the keys.
    pub(crate) fn serve(self: &Arc<Self>) -> Result<Shared> {
        Ok(Shared::new(ffi::Session::server(self)?))
    }

    /// Makes a client's session, with the key of `user` or with the only key.
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
    /// A decrypted record; bytes `first..end` were not taken yet.
    plain: Vec<u8>,
    first: usize,
    end: usize,
    /// The bytes that the session was given may hold another record.
    may_hold: bool,
    has_ended: bool,
    warnings: usize,
    /// Plain bytes that are sealed together. `sent` counts the sealed bytes that are sent.
    staged: Vec<u8>,
    sent: usize,
}

impl Shared {
    fn new(session: ffi::Session) -> Self {
        let (plain, staged) = (vec![0; RECORD_BYTES_MAX], Vec::new());
        let (may_hold, has_ended) = (true, false);
        Self { session, plain, first: 0, end: 0, may_hold, has_ended, warnings: 0, staged, sent: 0 }
    }

    /// Runs the handshake, with ephemeral keys, on a blocking socket.
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

    /// Tells the peer of the error, and returns it.
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
        self.staged.clear();
        parts.iter().for_each(|part| self.staged.extend_from_slice(part));
        let staged = std::mem::take(&mut self.staged);
        let mut left = staged.as_slice();
        let mut sealed = Ok(staged.len());
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
