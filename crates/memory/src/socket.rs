//! Moves bytes of a stream socket straight from and to the memory of operations.
//!
//! Windows are never borrowed as slices, so this module makes the system calls that gather and scatter. A descriptor
//! that does not block may fail with [`io::ErrorKind::WouldBlock`].

use crate::{Segment, Window};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The most segments in one call; the next call takes further ones.
const SEGMENTS_MAX: usize = 64;

/// A part of the bytes to send.
#[derive(Debug, Clone, Copy)]
pub enum SocketPart<'a> {
    /// Bytes of this program.
    Bytes(&'a [u8]),
    /// An operation's memory, from this byte on.
    Memory(&'a Window, usize),
}

/// The list of segments for one call.
struct Segments {
    list: [libc::iovec; SEGMENTS_MAX],
    count: usize,
}

impl Segments {
    fn new() -> Self {
        Self { list: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; SEGMENTS_MAX], count: 0 }
    }

    fn push(&mut self, segment: libc::iovec) {
        if let Some(slot) = self.list.get_mut(self.count)
            && segment.iov_len > 0
        {
            *slot = segment;
            self.count += 1;
        }
    }

    fn is_full(&self) -> bool {
        self.count == SEGMENTS_MAX
    }

    fn room_bytes(&self) -> usize {
        self.list.iter().map(|segment| segment.iov_len).sum()
    }

    fn push_window(&mut self, window: &Window, skip_bytes: usize) {
        let skip = skip_bytes.min(window.length_bytes());
        window.slice(skip, window.length_bytes() - skip).for_each_segment(|segment| self.push(segment.as_iovec()));
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zeros are a valid message header: no name, no list, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}

fn told(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Fills a window from `skip_bytes` on with bytes that have arrived. Returns their number. Zero means that the stream
/// has ended, or that there was no room.
pub fn receive_into(socket: BorrowedFd<'_>, window: &Window, skip_bytes: usize) -> io::Result<usize> {
    let skip = skip_bytes.min(window.length_bytes());
    let window = window.slice(skip, window.length_bytes() - skip);
    // SAFETY: these are segments of mapped memory (see `IoBuf::refill`) that `window` keeps during the call.
    unsafe { receive_into_segments(socket, |list| window.for_each_segment(list)) }.map(|(count, _)| count)
}

/// Fills segments, which `each` lists, with bytes that have arrived. Returns their number, and whether there was room
/// for more: the socket had no more then.
///
/// # Safety
/// The segments name memory that is mapped and writable during the call.
pub(crate) unsafe fn receive_into_segments(
    socket: BorrowedFd<'_>,
    each: impl FnOnce(&mut dyn FnMut(Segment)),
) -> io::Result<(usize, bool)> {
    let mut segments = Segments::new();
    each(&mut |segment| segments.push(segment.as_iovec()));
    let mut message = segments.message();
    // SAFETY: as the caller says.
    let count = told(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) })?;
    Ok((count, count < segments.room_bytes()))
}

/// Sends parts, one behind the other, as far as the socket takes them. Returns the number of bytes. A peer that has
/// gone is an error, not a signal.
pub fn send_parts<'a>(socket: BorrowedFd<'_>, parts: impl Iterator<Item = SocketPart<'a>>) -> io::Result<usize> {
    let mut segments = Segments::new();
    for part in parts {
        match part {
            SocketPart::Bytes(bytes) => {
                segments.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
            }
            SocketPart::Memory(window, skip_bytes) => segments.push_window(window, skip_bytes),
        }
        if segments.is_full() {
            break;
        }
    }
    let message = segments.message();
    // SAFETY: the list names bytes that the parts borrow, and mapped memory that their windows keep. The kernel only reads.
    told(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuf;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn parts_arrive_in_order_and_fill_windows_from_where_they_stand() {
        let (near, far) = UnixStream::pair().unwrap();
        let data = IoBuf::zeroed(100).whole();
        data.fill(7);
        let parts = [SocketPart::Bytes(b"head"), SocketPart::Memory(&data, 90), SocketPart::Bytes(b"tail")];
        assert_eq!(send_parts(near.as_fd(), parts.into_iter()).unwrap(), 18);
        let target = IoBuf::zeroed(20).whole();
        assert_eq!(receive_into(far.as_fd(), &target, 1).unwrap(), 18);
        assert_eq!(target.to_vec(), b"\0head\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07tail\0");
        drop(near);
        assert_eq!(receive_into(far.as_fd(), &target, 0).unwrap(), 0, "the end");
        let gone = send_parts(far.as_fd(), [SocketPart::Bytes(b"x")].into_iter()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn more_parts_than_one_call_takes_are_sent_in_part() {
        let (near, _far) = UnixStream::pair().unwrap();
        let parts = std::iter::repeat_n(SocketPart::Bytes(b"ab"), 3 * SEGMENTS_MAX);
        assert_eq!(send_parts(near.as_fd(), parts).unwrap(), 2 * SEGMENTS_MAX);
    }
}
