//! The error of a request that a job made.

use block::{Error, ErrorKind, IoError};

/// Makes the error of a failed request: `what` it did ("reading"), and the byte at which it began.
pub(crate) fn failed(what: &str, offset: u64, error: IoError) -> Error {
    Error::with_source(ErrorKind::Io, format!("error while {what} at byte {offset}"), error)
}
