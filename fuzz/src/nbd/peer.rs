//! The messages of a correct NBD client.

use nbd_wire::Reader;
use nbd_wire::numbers::{BASE_ALLOCATION, answer, chunk, command, handshake, option};
use nbd_wire::option::{ANSWER_HEADER_BYTES, AnswerHeader, GREETING_BYTES, InfoRequest, MetaRequest, put_option};
use nbd_wire::reply::{ReplyHead, Style, read_status};
use nbd_wire::request::Request;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Proof that an export was chosen.
#[derive(Debug)]
pub(crate) struct Chosen;

fn exactly(stream: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).map(|()| bytes)
}

fn ask(stream: &mut UnixStream, option: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::new();
    put_option(&mut bytes, option, data);
    stream.write_all(&bytes)?;
    loop {
        let head = exactly(stream, ANSWER_HEADER_BYTES)?;
        let head = AnswerHeader::read(&mut Reader::new(&head)).map_err(io::Error::other)?;
        exactly(stream, head.length_bytes as usize)?;
        if head.is_error() {
            return Err(io::Error::other(format!("option {option} is refused")));
        }
        if head.kind == answer::ACK {
            return Ok(());
        }
    }
}

/// Chooses the first export.
pub(crate) fn choose(stream: &mut UnixStream, style: Style) -> io::Result<Chosen> {
    exactly(stream, GREETING_BYTES)?;
    let flags = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&flags.to_be_bytes())?;
    match style {
        Style::Simple => {}
        Style::Structured => ask(stream, option::STRUCTURED_REPLY, &[])?,
        Style::Extended => ask(stream, option::EXTENDED_HEADERS, &[])?,
    }
    if style != Style::Simple {
        let contexts = MetaRequest { name: b"", queries: vec![BASE_ALLOCATION.as_bytes()] };
        ask(stream, option::SET_META_CONTEXT, &contexts.to_bytes())?;
    }
    ask(stream, option::GO, &InfoRequest { name: b"", wanted: vec![] }.to_bytes())?;
    Ok(Chosen)
}

/// A reply, as far as it has arrived.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) error: u32,
    pub(crate) data: Vec<u8>,
    pub(crate) is_done: bool,
}

/// Reads all bytes up to the end of the stream.
pub(crate) fn hear(mut stream: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    let goes_on = read.is_err_and(|error| matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut));
    assert!(!goes_on, "the server does not end");
    bytes
}

/// Parses the replies in `bytes`, up to one that is cut off. Panics if one is invalid.
pub(crate) fn replies(bytes: &[u8], style: Style, asked: &[Request]) -> BTreeMap<u64, Told> {
    let mut all = BTreeMap::new();
    let mut reader = Reader::new(bytes);
    while let Some(head) = ReplyHead::read(&mut reader, style).unwrap_or_else(|error| panic!("no reply: {error}")) {
        let (cookie, payload_bytes) = match &head {
            ReplyHead::Simple { error, cookie } => {
                let asked = asked.iter().find(|request| request.cookie == *cookie && *error == 0);
                let read = asked.filter(|request| request.command == command::READ);
                (*cookie, read.map_or(0, |request| request.length_bytes))
            }
            ReplyHead::Chunk(chunk) => (chunk.cookie, chunk.length_bytes),
        };
        let Some(payload) = reader.bytes(payload_bytes as usize) else { return all };
        let told: &mut Told = all.entry(cookie).or_default();
        assert!(!told.is_done, "two replies to {cookie}");
        match head {
            ReplyHead::Simple { error, .. } => {
                (told.error, told.is_done) = (error, true);
                told.data.extend_from_slice(payload);
            }
            ReplyHead::Chunk(head) => {
                told.is_done = head.flags & chunk::DONE != 0;
                match head.kind {
                    chunk::OFFSET_DATA => told.data.extend_from_slice(&payload[8..]),
                    chunk::NONE => assert!(payload.is_empty()),
                    chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                        let extended = head.kind == chunk::BLOCK_STATUS_EXT;
                        let Some((_, extents)) = read_status(payload, extended) else { panic!("no status") };
                        assert!(!extents.is_empty() && extents.iter().all(|extent| extent.length_bytes > 0));
                    }
                    kind => {
                        assert!(kind & chunk::ERROR_BIT != 0, "a chunk of the unknown kind {kind}");
                        told.error = Reader::new(payload).u32().unwrap_or(0).max(1);
                    }
                }
            }
        }
    }
    all
}
