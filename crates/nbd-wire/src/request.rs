//! Commands of the transmission phase.

use crate::numbers::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC};
use crate::{Reader, WireError};

/// Bytes of a compact header.
pub const COMPACT_BYTES: usize = 28;
/// Bytes of an extended header.
pub const EXTENDED_BYTES: usize = 32;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Flags.
    pub flags: u16,
    /// The number of the command.
    pub command: u16,
    /// The client's name for the request.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// The length in bytes.
    pub length_bytes: u64,
}

impl Request {
    /// Returns the length of a header, in bytes.
    #[must_use]
    pub fn header_bytes(extended: bool) -> usize {
        if extended { EXTENDED_BYTES } else { COMPACT_BYTES }
    }

    /// Reads a header; `Ok(None)` while it has not arrived.
    #[inline]
    pub fn read(reader: &mut Reader<'_>, extended: bool) -> Result<Option<Self>, WireError> {
        let mut ahead = *reader;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        match ahead.u32() {
            None => return Ok(None),
            Some(got) if got == magic => {}
            Some(_) => return Err(WireError("a request begins with a wrong number")),
        }
        let read = |reader: &mut Reader<'_>| {
            let (flags, command) = (reader.u16()?, reader.u16()?);
            let (cookie, offset) = (reader.u64()?, reader.u64()?);
            let length_bytes = if extended { reader.u64()? } else { u64::from(reader.u32()?) };
            Some(Self { flags, command, cookie, offset, length_bytes })
        };
        let request = read(&mut ahead);
        if request.is_some() {
            *reader = ahead;
        }
        Ok(request)
    }

    /// Appends a header. A compact one holds 32 bits of the length.
    pub fn put(&self, out: &mut Vec<u8>, extended: bool) {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        out.extend_from_slice(&magic.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        if extended {
            out.extend_from_slice(&self.length_bytes.to_be_bytes());
        } else {
            out.extend_from_slice(&u32::try_from(self.length_bytes).unwrap_or(u32::MAX).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_when_it_is_whole() {
        let request = Request { flags: 1, command: 6, cookie: 77, offset: 1 << 40, length_bytes: 512 };
        for extended in [false, true] {
            let mut bytes = Vec::new();
            request.put(&mut bytes, extended);
            assert_eq!(bytes.len(), Request::header_bytes(extended));
            for cut in 0..bytes.len() {
                assert_eq!(Request::read(&mut Reader::new(&bytes[..cut]), extended), Ok(None));
            }
            assert_eq!(Request::read(&mut Reader::new(&bytes), extended), Ok(Some(request)));
            assert!(Request::read(&mut Reader::new(&bytes), !extended).is_err());
        }
    }
}
