//! The error for a peer's bytes, and for a name.

use std::fmt;

/// An error for bytes, or a URI, that the protocol does not allow: where, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireError(pub &'static str);

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for WireError {}
