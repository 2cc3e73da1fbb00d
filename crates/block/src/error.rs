//! Two kinds of error: [`Error`] speaks to a person, [`IoError`] travels with a request and costs nothing.

use std::borrow::Cow;
use std::fmt;
use std::io;

/// The kind of an error, so that callers can choose an exit code or a reaction without reading the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An option or argument is unknown or impossible.
    BadOption,
    /// What was named is not there (a snapshot in an image).
    NotFound,
    /// The image is damaged, or contradicts itself.
    BadImage,
    /// Valid, but not served (a feature, an encryption method, a call the kernel lacks).
    Unsupported,
    /// A policy forbids the action (a backing file outside the allowed places).
    Denied,
    /// The file is in use elsewhere.
    Locked,
    /// The host's storage or kernel failed.
    Io,
    /// A peer broke the protocol.
    Protocol,
    /// The action was cancelled before its end.
    Cancelled,
    /// The action has failed, and nobody knows whether what it has done will last.
    Unsure,
}

/// An error with a message that a person can act on: what failed, on which file, key or offset, and what to do.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    only_for_writing: bool,
}

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error of `kind`; the message names the file, key or offset.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None, only_for_writing: false }
    }

    /// As [`Error::new`], and keeps the cause.
    pub fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(source.into()), ..Self::new(kind, message) }
    }

    /// Makes an error for a failed system call: `what` names the action and the file ("cannot open '/x/y.raw'").
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::with_source(ErrorKind::Io, what, source)
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Marks an error of an opening for writing: opening for reading only may succeed.
    #[must_use]
    pub fn only_for_writing(mut self) -> Self {
        self.only_for_writing = true;
        self
    }

    /// Whether opening for reading only may succeed. A caller with a key or a flag for that names it in its message.
    #[must_use]
    pub fn is_only_for_writing(&self) -> bool {
        self.only_for_writing
    }

    /// Makes it one of the kind [`ErrorKind::Unsure`].
    #[must_use]
    pub fn unsure(self) -> Self {
        Self { kind: ErrorKind::Unsure, ..self }
    }

    /// Puts `context` before the message ("drive 2: ...").
    #[must_use]
    pub fn in_context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {}", without_numbers(&source.to_string())),
            None => Ok(()),
        }
    }
}

/// Returns a message without the numbers that the standard library puts behind the kernel's words: `(os error 2)` says
/// nothing to a person.
#[must_use]
pub fn without_numbers(message: &str) -> Cow<'_, str> {
    const START: &str = " (os error ";
    let mut parts = message.split(START);
    let first = parts.next().unwrap_or_default();
    let mut text = Cow::Borrowed(first);
    for part in parts {
        let rest = part.trim_start_matches('-').trim_start_matches(|char: char| char.is_ascii_digit());
        let text = text.to_mut();
        match rest.strip_prefix(')').filter(|_| rest.len() < part.len()) {
            Some(rest) => text.push_str(rest),
            None => text.extend([START, part]),
        }
    }
    text
}

// `source()` stays `None`: Display already tells the whole chain, and reporters would print it twice.
impl std::error::Error for Error {}

/// The kind of a request's error; a front end turns it into its protocol's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The storage failed (EIO and every error without a kind of its own).
    Io,
    /// No space, quota or file-size limit left.
    NoSpace,
    /// This disk, file or engine cannot do the operation.
    Unsupported,
    /// The range lies outside the disk, or is not a multiple of its block.
    OutOfRange,
    /// A write to something read-only.
    ReadOnly,
    /// The image's metadata are wrong; the request was not carried out.
    Corrupt,
}

/// The error of one request: small, copied freely, allocates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoError {
    kind: IoErrorKind,
    errno: i32,
}

/// Result of a request.
pub type IoResult<T = ()> = std::result::Result<T, IoError>;

const ENOSPC: i32 = 28;
const EFBIG: i32 = 27;
const EDQUOT: i32 = 122;
const EOPNOTSUPP: i32 = 95;
const ENOSYS: i32 = 38;
const EROFS: i32 = 30;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EFAULT: i32 = 14;

impl IoError {
    /// An I/O error without further detail.
    pub const EIO: Self = Self { kind: IoErrorKind::Io, errno: EIO };

    /// Makes an error of `kind` that no system call caused.
    #[must_use]
    pub const fn new(kind: IoErrorKind) -> Self {
        let errno = match kind {
            IoErrorKind::NoSpace => ENOSPC,
            IoErrorKind::Unsupported => EOPNOTSUPP,
            IoErrorKind::ReadOnly => EROFS,
            IoErrorKind::Io | IoErrorKind::OutOfRange | IoErrorKind::Corrupt => EIO,
        };
        Self { kind, errno }
    }

    /// Makes an error from a positive Linux error number.
    #[must_use]
    pub const fn from_errno(errno: i32) -> Self {
        let kind = match errno {
            ENOSPC | EFBIG | EDQUOT => IoErrorKind::NoSpace,
            EOPNOTSUPP | ENOSYS => IoErrorKind::Unsupported,
            EROFS => IoErrorKind::ReadOnly,
            _ => IoErrorKind::Io,
        };
        Self { kind, errno }
    }

    /// Returns the kind.
    #[must_use]
    pub const fn kind(self) -> IoErrorKind {
        self.kind
    }

    /// Returns the Linux error number that describes it best.
    #[must_use]
    pub const fn errno(self) -> i32 {
        self.errno
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            IoErrorKind::OutOfRange => f.write_str("the range lies outside the disk or off its block size"),
            IoErrorKind::ReadOnly => f.write_str("the disk is read-only"),
            IoErrorKind::Corrupt => f.write_str("the image's metadata are damaged"),
            IoErrorKind::Unsupported => f.write_str("the operation is not supported here"),
            IoErrorKind::Io | IoErrorKind::NoSpace => {
                f.write_str(&without_numbers(&io::Error::from_raw_os_error(self.errno).to_string()))
            }
        }
    }
}

impl std::error::Error for IoError {}

impl From<io::Error> for IoError {
    fn from(error: io::Error) -> Self {
        Self::from_errno(error.raw_os_error().unwrap_or(EIO))
    }
}

impl From<memory::OutOfMemory> for IoError {
    fn from(_: memory::OutOfMemory) -> Self {
        Self::from_errno(ENOMEM)
    }
}

impl From<memory::MemoryLost> for IoError {
    fn from(_: memory::MemoryLost) -> Self {
        Self::from_errno(EFAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_kernels_words_without_its_numbers() {
        let missing = || io::Error::from_raw_os_error(2);
        let shown = Error::io("Could not open 'a'", missing()).to_string();
        assert_eq!(shown, "Could not open 'a': No such file or directory");
        let wrapped = Error::io("Could not open 'b'", io::Error::other(missing()));
        assert_eq!(wrapped.to_string(), "Could not open 'b': No such file or directory");
        assert_eq!(IoError::from_errno(28).to_string(), "No space left on device");
        for text in ["", "a (os error )", "a (os error 2", "a (os error x)", "it said (os error"] {
            assert_eq!(without_numbers(text), text);
        }
        assert_eq!(without_numbers("a (os error 2): b (os error -13)"), "a: b");
    }
}
