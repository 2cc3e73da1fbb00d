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

    /// Sends what the socket takes at once; returns whether that was anything.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        if self.items.is_empty() {
            return Ok(false);
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
        while let Some(first) = self.items.front()
            && self.sent >= first.length_bytes()
        {
            self.sent = self.sent.saturating_sub(first.length_bytes());
            self.items.pop_front();
        }
        Ok(count > 0)
    }

    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.sent = 0;
    }
}
