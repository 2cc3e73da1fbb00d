//! One connection: bytes on their way to the server, and those that arrive.

use crate::calls::Payload;
use crate::handshake::Stream;
use crate::replies::Replies;
use memory::{Lent, SocketPart, send_parts};
use nbd_wire::numbers::command;
use nbd_wire::request::Request;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

/// What of data that nobody wants is read at once.
const UNWANTED_BYTES: usize = 16 << 10;
/// Memory that is not there.
pub(crate) const EFAULT: i32 = 14;

/// Data on their way to a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Data {
    pub(crate) cookie: u64,
    pub(crate) at: usize,
    pub(crate) left: usize,
    pub(crate) done: bool,
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    /// Headers with the payload behind them.
    sending: VecDeque<(Vec<u8>, Option<Payload>)>,
    /// What of the first of them is sent.
    sent: usize,
    pub(crate) replies: Replies,
    pub(crate) data: Option<Data>,
    /// A read got less than it had room for, so another one now would be for nothing.
    pub(crate) is_drained: bool,
}

impl Lane {
    pub(crate) fn new(stream: Stream) -> Self {
        Self { stream, sending: VecDeque::new(), sent: 0, replies: Replies::new(), data: None, is_drained: false }
    }

    /// What is waited for.
    pub(crate) fn interest(&self) -> PollFd<'_> {
        let writes = if self.sends() { PollFlags::OUT } else { PollFlags::empty() };
        PollFd::new(&self.stream, PollFlags::IN | writes)
    }

    /// A request goes out next.
    pub(crate) fn put(&mut self, request: &Request, extended: bool, payload: Option<Payload>) {
        let mut head = Vec::new();
        request.put(&mut head, extended);
        self.sending.push_back((head, payload));
    }

    /// Something is left to be sent.
    pub(crate) fn sends(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Sends what the socket takes.
    pub(crate) fn send(&mut self) -> io::Result<()> {
        while !self.sending.is_empty() {
            let mut skip = self.sent;
            let parts = self.sending.iter().flat_map(|(head, payload)| {
                let skipped = std::mem::take(&mut skip);
                let payload = payload.as_ref().map_or(&[][..], |payload| payload);
                let in_payload = skipped.saturating_sub(head.len());
                [head.get(skipped..).unwrap_or_default(), payload.get(in_payload..).unwrap_or_default()]
                    .map(SocketPart::Bytes)
            });
            match send_parts(self.stream.as_fd(), parts) {
                Ok(count) => self.sent = self.sent.saturating_add(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            while let Some((head, payload)) = self.sending.front() {
                let length = head.len().saturating_add(payload.as_ref().map_or(0, |payload| payload.len()));
                if self.sent < length {
                    break;
                }
                self.sent = self.sent.saturating_sub(length);
                self.sending.pop_front();
            }
        }
        Ok(())
    }

    /// Receives more of what is no data; false if nothing is there.
    pub(crate) fn fill(&mut self) -> io::Result<bool> {
        if self.is_drained {
            return Ok(false);
        }
        let (stream, is_drained) = (&self.stream, &mut self.is_drained);
        let filled = self.replies.fill(|room| {
            let count = rustix::io::read(stream, &mut *room)?;
            *is_drained = count < room.len();
            Ok(count)
        });
        match filled {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Receives data to their place, from `at` on, and at most as much as is left of them; `None` if nothing is there. Where
    /// the place was taken back, they are thrown away.
    pub(crate) fn receive_into(&mut self, place: &Lent, at: usize, left: usize) -> io::Result<Option<usize>> {
        if !self.replies.is_empty() {
            return Ok(Some(self.replies.take_bytes(left, |bytes| place.copy_in(at, bytes))));
        }
        if self.is_drained {
            return Ok(None);
        }
        let stream = self.stream.as_fd();
        let (received, most) = match place.receive_into(stream, at, left) {
            // A guest has taken its memory away. The socket still has the data.
            Some(Err(error)) if error.raw_os_error() == Some(EFAULT) => {
                place.give_up();
                return Ok(Some(0));
            }
            Some(received) => (received, left),
            None => {
                let mut unwanted = [0; UNWANTED_BYTES];
                let room = unwanted.get_mut(..left.min(UNWANTED_BYTES)).unwrap_or_default();
                (rustix::io::read(stream, room).map_err(io::Error::from), left.min(UNWANTED_BYTES))
            }
        };
        match received {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it left within a reply")),
            Ok(count) => {
                self.is_drained = count < most;
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(0)),
            Err(error) => Err(error),
        }
    }

    /// Says goodbye, as a courtesy.
    pub(crate) fn end(mut self, extended: bool) {
        let request = Request { flags: 0, command: command::DISC, cookie: 0, offset: 0, length_bytes: 0 };
        self.put(&request, extended, None);
        let _ = self.send();
    }
}
