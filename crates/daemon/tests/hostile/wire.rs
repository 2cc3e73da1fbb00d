//! The vhost-user protocol in bytes, so that messages can be sent which no well-behaved monitor sends.

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The requests' numbers.
#[allow(dead_code)]
pub(crate) mod code {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    /// One more than the last that anybody has given a meaning.
    pub(crate) const END: u32 = 48;
}

pub(crate) const VERSION: u32 = 1;
pub(crate) const NEEDS_REPLY: u32 = 8;
/// Descriptors that one message carries here at most.
pub(crate) const MAX_FDS: usize = 40;
/// So long a peer waits for an answer: the server is busy, or it has hung up.
const PATIENCE: Duration = Duration::from_secs(20);

/// Numbers as bytes, as messages have them.
pub(crate) fn words32(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// The same for longer numbers.
pub(crate) fn words64(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// One connection to an export.
pub(crate) struct Wire {
    stream: UnixStream,
}

impl Wire {
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream })
    }

    /// A connection that exists.
    pub(crate) fn over(stream: UnixStream) -> Self {
        Self { stream }
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends bytes that may be any, with descriptors.
    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(crate) fn send(&self, code: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = words32(&[code, VERSION | flags, body.len() as u32]);
        bytes.extend(body);
        self.send_bytes(&bytes, fds)
    }

    /// The body of the next answer.
    pub(crate) fn answer(&self) -> io::Result<Vec<u8>> {
        let mut header = [0; 12];
        (&self.stream).read_exact(&mut header)?;
        let length = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut body = vec![0; length.min(4096) as usize];
        (&self.stream).read_exact(&mut body)?;
        Ok(body)
    }

    /// A question that has an answer.
    pub(crate) fn ask(&self, code: u32, body: &[u8]) -> io::Result<Vec<u8>> {
        self.send(code, 0, body, &[])?;
        self.answer()
    }

    /// A message that is carried out when this returns; an error if it was refused.
    pub(crate) fn tell(&self, code: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send(code, NEEDS_REPLY, body, fds)?;
        match self.answer()?.iter().all(|byte| *byte == 0) {
            true => Ok(()),
            false => Err(io::Error::other(format!("message {code} was refused"))),
        }
    }

    /// Chooses all features on offer but `without`.
    pub(crate) fn negotiate(&self, without: u64) -> io::Result<u64> {
        let number = |bytes: Vec<u8>| u64::from_ne_bytes(bytes[..8].try_into().unwrap());
        self.send(code::SET_OWNER, 0, &[], &[])?;
        let offered = number(self.ask(code::GET_FEATURES, &[])?);
        let protocol = number(self.ask(code::GET_PROTOCOL_FEATURES, &[])?);
        self.send(code::SET_PROTOCOL_FEATURES, 0, &words64(&[protocol]), &[])?;
        self.send(code::SET_FEATURES, 0, &words64(&[offered & !without]), &[])?;
        Ok(offered)
    }
}
