//! Replies on their way to the socket: many go with one call.

use crate::limits::Grant;
use memory::{SocketPart, Window, send_parts};
use nbd_wire::reply::Head;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

#[derive(Debug)]
enum Item {
    /// A header, and the data of a read with their part of the room.
    Reply(Head, Option<(Window, Option<Grant>)>),
    /// Other bytes, with their part of the room if a request wanted them.
    Bytes(Vec<u8>, #[allow(dead_code)] Option<Grant>),
}

impl Item {
    fn head(&self) -> &[u8] {
        match self {
            Self::Reply(head, _) => head.as_bytes(),
            Self::Bytes(bytes, _) => bytes,
        }
    }

    fn data(&self) -> Option<&Window> {
        match self {
            Self::Reply(_, data) => data.as_ref().map(|(window, _)| window),
            Self::Bytes(..) => None,
        }
    }

    fn length_bytes(&self) -> usize {
        self.head().len().saturating_add(self.data().map_or(0, Window::length_bytes))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Output {
    items: VecDeque<Item>,
    /// What of the first item is sent.
    sent: usize,
}

impl Output {
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn bytes(&mut self, bytes: Vec<u8>, grant: Option<Grant>) {
        if !bytes.is_empty() {
            self.items.push_back(Item::Bytes(bytes, grant));
        }
    }

    pub(crate) fn reply(&mut self, head: Head, data: Option<(Window, Option<Grant>)>) {
        self.items.push_back(Item::Reply(head, data));
    }

    /// Sends what the socket takes at once; returns how many bytes that was.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if self.items.is_empty() {
            return Ok(0);
        }
        let mut skip = self.sent;
        let parts = self.items.iter().flat_map(|item| {
            let skipped = std::mem::take(&mut skip);
            let head = item.head().get(skipped..).unwrap_or_default();
            let in_data = skipped.saturating_sub(item.head().len());
            [Some(SocketPart::Bytes(head)), item.data().map(|data| SocketPart::Memory(data, in_data))]
                .into_iter()
                .flatten()
        });
        let count = send_parts(socket, parts)?;
        self.sent = self.sent.saturating_add(count);
        self.forget_sent();
        Ok(count)
    }

    /// Moves at most `most` bytes, as many as there are, behind those in `into`.
    pub(crate) fn take(&mut self, most: usize, into: &mut Vec<u8>) {
        let mut room = most;
        while room > 0
            && let Some(first) = self.items.front()
        {
            let head = first.head().get(self.sent..).unwrap_or_default();
            let head = head.get(..room.min(head.len())).unwrap_or_default();
            into.extend_from_slice(head);
            (self.sent, room) = (self.sent.saturating_add(head.len()), room.saturating_sub(head.len()));
            let in_data = self.sent.saturating_sub(first.head().len());
            if let Some(data) = first.data() {
                let count = data.length_bytes().saturating_sub(in_data).min(room);
                let start = into.len();
                into.resize(start.saturating_add(count), 0);
                let copied = data.copy_to_slice(in_data, into.get_mut(start..).unwrap_or_default());
                (self.sent, room) = (self.sent.saturating_add(copied), room.saturating_sub(copied));
            }
            self.forget_sent();
        }
    }

    /// Lets go of items that are sent.
    fn forget_sent(&mut self) {
        while let Some(first) = self.items.front()
            && self.sent >= first.length_bytes()
        {
            self.sent = self.sent.saturating_sub(first.length_bytes());
            self.items.pop_front();
        }
    }

    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.sent = 0;
    }
}
