//! One connection: bytes that go to the server, and bytes that arrive.

use crate::calls::Payload;
use crate::replies::Replies;
use crate::stream::Stream;
use memory::Lent;
use nbd_wire::numbers::command;
use nbd_wire::request::Request;
use rustix::event::PollFd;
use std::collections::VecDeque;
use std::io;

/// The most bytes of unwanted data that are read at once.
const UNWANTED_BYTES: usize = 16 << 10;
/// The error for memory that is gone.
pub(crate) const EFAULT: i32 = 14;

/// Data of a read that are arriving.
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
    /// Headers, each with its payload, that are to be sent.
    sending: VecDeque<(Vec<u8>, Option<Payload>)>,
    /// The bytes of the first one that are sent.
    sent: usize,
    pub(crate) replies: Replies,
    pub(crate) data: Option<Data>,
    /// The last read got less than it had room for, so another one would find nothing.
    pub(crate) is_drained: bool,
}

impl Lane {
    pub(crate) fn new(stream: Stream) -> Self {
        Self { stream, sending: VecDeque::new(), sent: 0, replies: Replies::new(), data: None, is_drained: false }
    }

    /// Returns what to poll the socket for.
    pub(crate) fn interest(&self) -> PollFd<'_> {
        self.stream.interest(self.sends())
    }

    /// Queues a request for sending.
    pub(crate) fn put(&mut self, request: &Request, extended: bool, payload: Option<Payload>) {
        let mut head = Vec::new();
        request.put(&mut head, extended);
        self.sending.push_back((head, payload));
    }

    /// Whether something is left to be sent.
    pub(crate) fn sends(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Sends what the socket takes.
    pub(crate) fn send(&mut self) -> io::Result<()> {
        match self.stream.send_rest() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            sent => sent?,
        }
        while !self.sending.is_empty() {
            let mut skip = self.sent;
            let parts = self.sending.iter().flat_map(|(head, payload)| {
                let skipped = std::mem::take(&mut skip);
                let payload = payload.as_ref().map_or(&[][..], |payload| payload);
                let in_payload = skipped.saturating_sub(head.len());
                [head.get(skipped..).unwrap_or_default(), payload.get(in_payload..).unwrap_or_default()]
            });
            match self.stream.send(parts) {
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

    /// Receives more bytes that are not data of reads; false if none are there.
    pub(crate) fn fill(&mut self) -> io::Result<bool> {
        if self.is_drained {
            return Ok(false);
        }
        let (stream, is_drained) = (&mut self.stream, &mut self.is_drained);
        let filled = self.replies.fill(|room| {
            let count;
            (count, *is_drained) = stream.receive(room)?;
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

    /// Receives at most `left` bytes of data into `place`, from `at` on; `None` if none are there. If the place was
    /// taken back, the data are thrown away.
    pub(crate) fn receive_into(&mut self, place: &Lent, at: usize, left: usize) -> io::Result<Option<usize>> {
        if !self.replies.is_empty() {
            return Ok(Some(self.replies.take_bytes(left, |bytes| place.copy_in(at, bytes))));
        }
        if self.is_drained {
            return Ok(None);
        }
        let received = match self.stream.receive_to(place, at, left) {
            // A guest has taken its memory away. The data are still in the socket.
            Some(Err(error)) if error.raw_os_error() == Some(EFAULT) => {
                place.give_up();
                return Ok(Some(0));
            }
            Some(received) => received,
            None => {
                let mut unwanted = [0; UNWANTED_BYTES];
                self.stream.receive(unwanted.get_mut(..left.min(UNWANTED_BYTES)).unwrap_or_default())
            }
        };
        match received {
            Ok((0, _)) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it left within a reply")),
            Ok((count, is_drained)) => {
                self.is_drained = is_drained;
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
        self.stream.close();
    }
}
