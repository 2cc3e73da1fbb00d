//! A memory table whose message is longer than its regions.
//!
//! User Mode Linux always sends room for two regions, also when it shares one. The protocol's length then disagrees with
//! its count, which the `vhost` crate refuses. Such a message is looked at before that crate sees it, and received here.
//! Every other message is left alone.

use block::{Error, ErrorKind, Result};
use memory::RegionSpec;
use rustix::io::IoSliceMut;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

const SET_MEM_TABLE: u32 = 5;
const NEEDS_REPLY: u32 = 8;
/// Version 1, an answer.
const REPLY: u32 = 5;
const HEADER_BYTES: usize = 12;
const COUNT_BYTES: usize = 8;
const REGION_BYTES: usize = 32;
/// Descriptors in one message at most.
const MAX_FDS: usize = 32;

/// A memory table, received.
pub(crate) struct LongMemTable {
    pub(crate) regions: Vec<(RegionSpec, OwnedFd)>,
    pub(crate) needs_reply: bool,
}

/// Receives the next message if it is such a one; leaves it where it is if not.
pub(crate) fn receive(stream: BorrowedFd<'_>) -> Result<Option<LongMemTable>> {
    let mut begin = [0; HEADER_BYTES + COUNT_BYTES];
    let peeked = recv(stream, &mut begin[..], RecvFlags::PEEK).map_or(0, |(_, length)| length);
    if peeked < begin.len() {
        return Ok(None);
    }
    let [kind, flags, length_bytes, count] = [0, 4, 8, HEADER_BYTES].map(|at| u32_at(&begin, at));
    let (length_bytes, count) = (length_bytes as usize, count as usize);
    let needed_bytes = count.saturating_mul(REGION_BYTES).saturating_add(COUNT_BYTES);
    let longest_bytes = MAX_FDS.saturating_mul(REGION_BYTES).saturating_add(COUNT_BYTES);
    let is_long = needed_bytes < length_bytes && length_bytes <= longest_bytes;
    if kind != SET_MEM_TABLE || count == 0 || !is_long {
        return Ok(None);
    }
    let (body, files) = receive_whole(stream, length_bytes.saturating_add(HEADER_BYTES))?;
    if files.len() != count {
        let message = format!("the peer shares {count} memory regions and passes {} descriptors", files.len());
        return Err(Error::new(ErrorKind::Protocol, message));
    }
    let regions = body.get(HEADER_BYTES.saturating_add(COUNT_BYTES)..).unwrap_or_default().chunks_exact(REGION_BYTES);
    let regions = regions.map(region).zip(files).collect();
    Ok(Some(LongMemTable { regions, needs_reply: flags & NEEDS_REPLY != 0 }))
}

fn receive_whole(stream: BorrowedFd<'_>, length_bytes: usize) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; length_bytes];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        .map_err(|error| Error::io("cannot receive the peer's memory table", error.into()))?;
    if received.bytes != length_bytes {
        return Err(Error::new(ErrorKind::Protocol, "the peer's memory table is cut off"));
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
    RegionSpec {
        guest_address: u64_at(bytes, 0),
        length_bytes: u64_at(bytes, 8),
        user_address: u64_at(bytes, 16),
        file_offset: u64_at(bytes, 24),
    }
}

/// Tells the peer whether its table was taken.
pub(crate) fn reply(stream: BorrowedFd<'_>, taken: bool) -> Result<()> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES.saturating_add(8));
    for word in [SET_MEM_TABLE, REPLY, 8, u32::from(!taken), 0] {
        bytes.extend(word.to_ne_bytes());
    }
    rustix::net::send(stream, &bytes, rustix::net::SendFlags::NOSIGNAL)
        .map_err(|error| Error::io("cannot answer the peer", error.into()))?;
    Ok(())
}

/// A number of the machine's own byte order, as the protocol has them; zero behind the end.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u32::from_ne_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |chunk| u64::from_ne_bytes(*chunk))
}
