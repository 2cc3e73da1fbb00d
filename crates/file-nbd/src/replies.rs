//! Bytes that arrive from the server: headers and small payloads are collected; data of reads go directly into place.

use nbd_wire::numbers::{chunk, error};
use nbd_wire::reply::{Extent, ReplyHead, Style, read_status};
use nbd_wire::{Reader, WireError};
use std::io;

/// The size of the buffer for bytes that do not go directly into place.
const ROOM_BYTES: usize = 64 << 10;
/// The longest payload that is not data of a read.
const PAYLOAD_BYTES_MAX: u64 = 1 << 20;

/// A part of the server's replies. All parts but `Data` are complete.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// The request has ended, successfully if the error is zero.
    Ended { cookie: u64, error: u32 },
    /// The request will fail with this error; more parts may follow before its end.
    Failed { cookie: u64, error: u32, done: bool },
    /// A simple reply without an error: data follow if the request was a read.
    Simple { cookie: u64 },
    /// Data follow.
    Data { cookie: u64, offset: u64, length_bytes: u64, done: bool },
    /// Zeros.
    Hole { cookie: u64, offset: u64, length_bytes: u64, done: bool },
    /// Extents of a metadata context.
    Extents { cookie: u64, context: u32, extents: Vec<Extent>, done: bool },
}

#[derive(Debug)]
pub(crate) struct Replies {
    /// The buffer. Bytes `start..end` have arrived and were not parsed.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Replies {
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0 }
    }

    fn rest(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    /// Receives more; returns how much.
    pub(crate) fn fill(&mut self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end.saturating_sub(self.start));
        }
        let room_end = self.end.saturating_add(ROOM_BYTES);
        if self.bytes.len() < room_end {
            self.bytes.resize(room_end, 0);
        }
        let count = read(self.bytes.get_mut(self.end..room_end).unwrap_or_default())?;
        self.end = self.end.saturating_add(count).min(room_end);
        Ok(count)
    }

    /// Hands out at most `most` arrived bytes of data; returns how many.
    pub(crate) fn take_bytes(&mut self, most: usize, take: impl FnOnce(&[u8])) -> usize {
        let count = self.rest().len().min(most);
        take(self.rest().get(..count).unwrap_or_default());
        self.start = self.start.saturating_add(count);
        count
    }

    /// Returns the next part of the replies, if it has arrived.
    pub(crate) fn next(&mut self, style: Style) -> Result<Option<Said>, WireError> {
        let mut reader = Reader::new(self.rest());
        let said = Self::read(&mut reader, style)?;
        if said.is_some() {
            let left = reader.rest().len();
            self.start = self.end.saturating_sub(left);
        }
        Ok(said)
    }

    fn read(reader: &mut Reader<'_>, style: Style) -> Result<Option<Said>, WireError> {
        let chunk = match ReplyHead::read(reader, style)? {
            None => return Ok(None),
            Some(ReplyHead::Simple { error: 0, cookie }) => return Ok(Some(Said::Simple { cookie })),
            Some(ReplyHead::Simple { error, cookie }) => return Ok(Some(Said::Ended { cookie, error })),
            Some(ReplyHead::Chunk(chunk)) => chunk,
        };
        let (cookie, done, length) = (chunk.cookie, chunk.flags & chunk::DONE != 0, chunk.length_bytes);
        if chunk.kind == chunk::OFFSET_DATA {
            let length_bytes = length.checked_sub(8).ok_or(WireError("a chunk of data is too short"))?;
            return Ok(reader.u64().map(|offset| Said::Data { cookie, offset, length_bytes, done }));
        }
        if length > PAYLOAD_BYTES_MAX {
            return Err(WireError("a chunk of a reply is too long"));
        }
        let Some(payload) = reader.bytes(usize::try_from(length).unwrap_or(0)) else { return Ok(None) };
        let mut inside = Reader::new(payload);
        let broken = WireError("a chunk of a reply is not well formed");
        Ok(Some(match chunk.kind {
            chunk::NONE if done => Said::Ended { cookie, error: 0 },
            chunk::OFFSET_HOLE => {
                let (offset, length) = (inside.u64().ok_or(broken)?, inside.u32().ok_or(broken)?);
                Said::Hole { cookie, offset, length_bytes: length.into(), done }
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                let extended = chunk.kind == chunk::BLOCK_STATUS_EXT;
                let (context, extents) = read_status(payload, extended).ok_or(broken)?;
                Said::Extents { cookie, context, extents, done }
            }
            kind if kind & chunk::ERROR_BIT != 0 => {
                let error = inside.u32().filter(|error| *error != 0).unwrap_or(error::EIO);
                Said::Failed { cookie, error, done }
            }
            _ => return Err(WireError("a chunk of a reply has an unknown kind")),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nbd_wire::reply::{Chunk, put_error, put_status, simple};

    #[test]
    fn what_arrives_byte_by_byte_is_understood_when_it_is_whole() {
        let mut bytes = simple(1, 5).as_bytes().to_vec();
        let head = Chunk { flags: 0, kind: 0, cookie: 2, offset: 0, length_bytes: 0 };
        let extents = [Extent { length_bytes: 512, flags: 3 }];
        put_status(&mut bytes, false, head, 7, &extents);
        put_error(&mut bytes, false, 3, 0, 28, "no room");
        bytes.extend_from_slice(Chunk::data(false, 4, 512, 3).as_bytes());
        let (mut replies, mut said) = (Replies::new(), Vec::new());
        for byte in bytes {
            replies.fill(|room| Ok(room.first_mut().map_or(0, |first| (*first = byte, 1).1))).unwrap();
            said.extend(replies.next(Style::Structured).unwrap());
        }
        let expected = [
            Said::Ended { cookie: 1, error: 5 },
            Said::Extents { cookie: 2, context: 7, extents: extents.to_vec(), done: false },
            Said::Failed { cookie: 3, error: 28, done: true },
            Said::Data { cookie: 4, offset: 512, length_bytes: 3, done: true },
        ];
        assert_eq!(said, expected);
        assert!(replies.is_empty());
    }
}
