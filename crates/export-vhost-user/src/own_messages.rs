//! Messages that we receive or send ourselves because the `vhost` crate cannot. They are handled before that crate sees
//! them.
//!
//! * A memory table whose message is longer than its regions. User Mode Linux always sends room for two regions, even
//!   if it shares one. The crate refuses a length that disagrees with the count.
//! * The channel for our own messages to the peer. The crate takes it, but cannot send a configuration change through
//!   it.
//!
//! All other messages are left to the crate.

use block::{Error, ErrorKind, Result};
use memory::RegionSpec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{IoSliceMut, ioctl_fionread};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

const SET_MEM_TABLE: u32 = 5;
const SET_BACKEND_REQ_FD: u32 = 21;
/// A message from us to the peer.
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const IS_REPLY: u32 = 4;
const NEEDS_REPLY: u32 = 8;
const HEADER_BYTES: usize = 12;
const COUNT_BYTES: usize = 8;
const REGION_BYTES: usize = 32;
/// A message must be shorter than this.
const MESSAGE_BYTES_MAX: usize = 0x1001;
/// The most descriptors in one message.
const MAX_FDS: usize = 32;

/// A message, received.
pub(crate) struct OwnMessage {
    kind: u32,
    pub(crate) needs_reply: bool,
    pub(crate) content: Content,
}

/// The content of a message.
pub(crate) enum Content {
    /// The peer's memory.
    Memory(Vec<(RegionSpec, OwnedFd)>),
    /// The channel for our own messages.
    PeerChannel(OwnedFd),
}

/// Receives the next message if it is handled here; otherwise leaves it in the socket.
pub(crate) fn receive(stream: BorrowedFd<'_>) -> Result<Option<OwnMessage>> {
    let mut begin = [0; HEADER_BYTES + COUNT_BYTES];
    let peeked = recv(stream, &mut begin[..], RecvFlags::PEEK).map_or(0, |(_, length)| length);
    let [kind, flags, length_bytes, count] = [0, 4, 8, HEADER_BYTES].map(|at| u32_at(&begin, at));
    let (length_bytes, count) = (length_bytes as usize, count as usize);
    let content = match kind {
        SET_MEM_TABLE if peeked == begin.len() && is_long(length_bytes, count) => {
            Content::Memory(receive_memory(stream, length_bytes, count)?)
        }
        SET_BACKEND_REQ_FD if peeked >= HEADER_BYTES && length_bytes == 0 => {
            let (_, files) = receive_whole(stream, HEADER_BYTES)?;
            let channel = files.into_iter().next();
            let none = || Error::new(ErrorKind::Protocol, "the peer passes no descriptor for its channel");
            Content::PeerChannel(channel.ok_or_else(none)?)
        }
        _ => return Ok(None),
    };
    Ok(Some(OwnMessage { kind, needs_reply: flags & NEEDS_REPLY != 0, content }))
}

/// Whether the next message can be received without waiting. Also true if nothing more comes, or if its length will be
/// refused.
pub(crate) fn is_whole(stream: BorrowedFd<'_>) -> bool {
    if has_hung_up(stream) {
        return true;
    }
    let mut header = [0; HEADER_BYTES];
    let (Ok((_, peeked)), Ok(there)) = (recv(stream, &mut header[..], RecvFlags::PEEK), ioctl_fionread(stream)) else {
        return true;
    };
    let length_bytes = u32_at(&header, 8) as usize;
    let needed_bytes = match length_bytes {
        // The crate refuses it without receiving the rest.
        MESSAGE_BYTES_MAX.. => HEADER_BYTES,
        _ => length_bytes.saturating_add(HEADER_BYTES),
    };
    // A peek ends at descriptors, so a header with some in its middle is never whole.
    peeked == 0 || (peeked == HEADER_BYTES && there >= needed_bytes as u64)
}

fn has_hung_up(stream: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(stream, PollFlags::RDHUP)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1))
}

fn is_long(length_bytes: usize, count: usize) -> bool {
    let needed_bytes = count.saturating_mul(REGION_BYTES).saturating_add(COUNT_BYTES);
    let longest_bytes = MAX_FDS.saturating_mul(REGION_BYTES).saturating_add(COUNT_BYTES);
    count > 0 && needed_bytes < length_bytes && length_bytes <= longest_bytes
}

fn receive_memory(stream: BorrowedFd<'_>, length_bytes: usize, count: usize) -> Result<Vec<(RegionSpec, OwnedFd)>> {
    let (message, files) = receive_whole(stream, length_bytes.saturating_add(HEADER_BYTES))?;
    if files.len() != count {
        let message = format!("the peer shares {count} memory regions and passes {} descriptors", files.len());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    let regions = message.get(HEADER_BYTES.saturating_add(COUNT_BYTES)..).unwrap_or_default();
    Ok(regions.chunks_exact(REGION_BYTES).map(region).zip(files).collect())
}

fn receive_whole(stream: BorrowedFd<'_>, length_bytes: usize) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; length_bytes];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        .map_err(|error| Error::io("cannot receive the peer's message", error.into()))?;
    if received.bytes != length_bytes {
        return Err(Error::new(ErrorKind::Protocol, "the peer's message is cut off"));
    }
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok((bytes, files))
}

fn region(bytes: &[u8]) -> RegionSpec {
    RegionSpec::new(u64_at(bytes, 0), u64_at(bytes, 8)).with(|region| {
        region.user_address = u64_at(bytes, 16);
        region.file_offset = u64_at(bytes, 24);
    })
}

impl OwnMessage {
    /// Tells the peer whether the message was taken.
    pub(crate) fn reply(kind: u32, stream: BorrowedFd<'_>, taken: bool) -> Result<()> {
        send_words(stream, &[kind, VERSION | IS_REPLY, 8, u32::from(!taken), 0])
    }

    /// Returns its number, for the reply.
    pub(crate) fn kind(&self) -> u32 {
        self.kind
    }
}

/// Tells the peer that the configuration space has changed. No answer is asked for, because the peer would first read
/// the configuration through the session.
pub(crate) fn send_config_change(channel: BorrowedFd<'_>) -> Result<()> {
    send_words(channel, &[CONFIG_CHANGE, VERSION, 0])
}

fn send_words(stream: BorrowedFd<'_>, words: &[u32]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    // A peer that does not read must not delay us.
    send(stream, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        .map_err(|error| Error::io("cannot answer the peer", error.into()))?;
    Ok(())
}

/// Reads a number in the machine's byte order, as the protocol has them; zero behind the end.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u32::from_ne_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u64::from_ne_bytes(*chunk))
}
