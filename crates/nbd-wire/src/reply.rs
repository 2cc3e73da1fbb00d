//! Answers to commands.

use crate::numbers::{EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};
use crate::{Reader, WireError};

/// The headers of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Style {
    /// Simple replies only.
    #[default]
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers, in both directions.
    Extended,
}

/// Room for the longest header with an offset behind it.
pub const HEAD_BYTES_MAX: usize = 40;

/// A header under construction, without allocation.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    length: usize,
}

impl Head {
    fn new() -> Self {
        Self { bytes: [0; HEAD_BYTES_MAX], length: 0 }
    }

    fn put(mut self, part: &[u8]) -> Self {
        let end = self.length.saturating_add(part.len());
        if let Some(room) = self.bytes.get_mut(self.length..end) {
            room.copy_from_slice(part);
            self.length = end;
        }
        self
    }

    /// Returns the bytes of the header.
    #[must_use]
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// Makes the header of a simple reply; the data of a read follow.
#[must_use]
pub fn simple(cookie: u64, error: u32) -> Head {
    Head::new().put(&SIMPLE_REPLY_MAGIC.to_be_bytes()).put(&error.to_be_bytes()).put(&cookie.to_be_bytes())
}

/// The header before a chunk of a structured or an extended reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Flags.
    pub flags: u16,
    /// The kind of the chunk.
    pub kind: u16,
    /// The cookie of the request.
    pub cookie: u64,
    /// The request's first byte; zero in structured replies.
    pub offset: u64,
    /// Bytes of payload.
    pub length_bytes: u64,
}

impl Chunk {
    /// Returns the header's bytes.
    #[must_use]
    pub fn head(&self, extended: bool) -> Head {
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        let head = Head::new().put(&magic.to_be_bytes());
        let head = head.put(&self.flags.to_be_bytes()).put(&self.kind.to_be_bytes()).put(&self.cookie.to_be_bytes());
        match extended {
            true => head.put(&self.offset.to_be_bytes()).put(&self.length_bytes.to_be_bytes()),
            false => head.put(&u32::try_from(self.length_bytes).unwrap_or(u32::MAX).to_be_bytes()),
        }
    }

    /// Returns the header of a chunk with data, up to the data, which begin at `offset`.
    #[must_use]
    pub fn data(extended: bool, cookie: u64, offset: u64, length_bytes: u64) -> Head {
        let chunk = Self {
            flags: chunk::DONE,
            kind: chunk::OFFSET_DATA,
            cookie,
            offset,
            length_bytes: length_bytes.saturating_add(8),
        };
        chunk.head(extended).put(&offset.to_be_bytes())
    }
}

/// The header of a reply, as a client reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply: error number and cookie.
    Simple {
        /// Zero for success.
        error: u32,
        /// The request's name.
        cookie: u64,
    },
    /// A chunk.
    Chunk(Chunk),
}

impl ReplyHead {
    /// Reads a header; `Ok(None)` while it has not arrived.
    pub fn read(reader: &mut Reader<'_>, style: Style) -> Result<Option<Self>, WireError> {
        let mut ahead = *reader;
        let Some(magic) = ahead.u32() else { return Ok(None) };
        let head = match (magic, style) {
            (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => Self::read_simple(&mut ahead),
            (STRUCTURED_REPLY_MAGIC, Style::Structured) => Self::read_chunk(&mut ahead, false),
            (EXTENDED_REPLY_MAGIC, Style::Extended) => Self::read_chunk(&mut ahead, true),
            _ => return Err(WireError("a reply begins with a wrong number")),
        };
        if head.is_some() {
            *reader = ahead;
        }
        Ok(head)
    }

    fn read_simple(reader: &mut Reader<'_>) -> Option<Self> {
        Some(Self::Simple { error: reader.u32()?, cookie: reader.u64()? })
    }

    fn read_chunk(reader: &mut Reader<'_>, extended: bool) -> Option<Self> {
        let (flags, kind, cookie) = (reader.u16()?, reader.u16()?, reader.u64()?);
        let offset = if extended { reader.u64()? } else { 0 };
        let length_bytes = if extended { reader.u64()? } else { u64::from(reader.u32()?) };
        Some(Self::Chunk(Chunk { flags, kind, cookie, offset, length_bytes }))
    }
}

/// Neighbouring bytes with the same flags in one metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub length_bytes: u64,
    /// The flags of the extent.
    pub flags: u64,
}

/// Appends a whole chunk with the extents of one context.
pub fn put_status(out: &mut Vec<u8>, extended: bool, head: Chunk, context: u32, extents: &[Extent]) {
    let count = u64::try_from(extents.len()).unwrap_or(0);
    let (kind, length_bytes) = match extended {
        true => (chunk::BLOCK_STATUS_EXT, count.saturating_mul(16).saturating_add(8)),
        false => (chunk::BLOCK_STATUS, count.saturating_mul(8).saturating_add(4)),
    };
    out.extend_from_slice(Chunk { kind, length_bytes, ..head }.head(extended).as_bytes());
    out.extend_from_slice(&context.to_be_bytes());
    if extended {
        out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes());
    }
    for Extent { length_bytes, flags } in extents {
        if extended {
            out.extend_from_slice(&length_bytes.to_be_bytes());
            out.extend_from_slice(&flags.to_be_bytes());
        } else {
            let short = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
            out.extend_from_slice(&short(*length_bytes));
            out.extend_from_slice(&short(*flags));
        }
    }
}

/// Reads the payload of a chunk with extents: the context and its extents; `None` if it is not well formed.
#[must_use]
pub fn read_status(payload: &[u8], extended: bool) -> Option<(u32, Vec<Extent>)> {
    let mut reader = Reader::new(payload);
    let context = reader.u32()?;
    let mut extents = Vec::new();
    if extended {
        // The length of the chunk says the same.
        reader.u32()?;
    }
    while !reader.is_empty() {
        extents.push(match extended {
            true => Extent { length_bytes: reader.u64()?, flags: reader.u64()? },
            false => Extent { length_bytes: reader.u32()?.into(), flags: reader.u32()?.into() },
        });
    }
    Some((context, extents))
}

/// Appends a whole chunk with an error, which ends the reply.
pub fn put_error(out: &mut Vec<u8>, extended: bool, cookie: u64, offset: u64, error: u32, message: &str) {
    let message = message.get(..message.len().min(1024)).unwrap_or_default();
    let length = u16::try_from(message.len()).unwrap_or(0);
    let length_bytes = u64::from(length).saturating_add(6);
    let head = Chunk { flags: chunk::DONE, kind: chunk::ERROR, cookie, offset, length_bytes };
    out.extend_from_slice(head.head(extended).as_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(message.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_as_they_were_written() {
        let read = |bytes: &[u8], style| ReplyHead::read(&mut Reader::new(bytes), style);
        let simple = simple(9, 5);
        assert_eq!(read(simple.as_bytes(), Style::Simple), Ok(Some(ReplyHead::Simple { error: 5, cookie: 9 })));
        assert!(read(simple.as_bytes(), Style::Extended).is_err());
        for (extended, style) in [(false, Style::Structured), (true, Style::Extended)] {
            let head = Chunk::data(extended, 3, 1 << 33, 4096);
            let whole = head.as_bytes();
            for cut in 0..whole.len() - 8 {
                assert_eq!(read(&whole[..cut], style), Ok(None));
            }
            let Ok(Some(ReplyHead::Chunk(chunk))) = read(whole, style) else { panic!("no chunk") };
            assert_eq!((chunk.cookie, chunk.length_bytes, chunk.flags), (3, 4104, chunk::DONE));
        }
    }

    #[test]
    fn extents_are_read_as_they_were_written() {
        let extents = [Extent { length_bytes: 512, flags: 3 }, Extent { length_bytes: 1 << 20, flags: 0 }];
        for extended in [false, true] {
            let mut out = Vec::new();
            let head = Chunk { flags: 1, kind: 0, cookie: 1, offset: 0, length_bytes: 0 };
            put_status(&mut out, extended, head, 7, &extents);
            let start = head.head(extended).as_bytes().len();
            assert_eq!(read_status(&out[start..], extended), Some((7, extents.to_vec())));
            assert_eq!(read_status(&out[start..out.len() - 1], extended), None);
        }
    }
}
