//! Replies on their way to the socket: many go with one call.

use crate::limits::Grant;
use memory::{IoBuf, OutOfMemory, SocketPart, Window, send_parts};
use nbd_wire::reply::Head;
use std::cell::Cell;
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

    /// Makes the data this item's alone, so that they can be borrowed. Usually they are.
    fn own(&mut self) -> Result<(), OutOfMemory> {
        if let Self::Reply(_, Some((window, _))) = self
            && window.own_parts().is_none()
        {
            let copy = IoBuf::from_pool_in_pieces(window.length_bytes())?;
            window.copy_to(&copy.whole());
            *window = copy.whole();
        }
        Ok(())
    }

    /// Returns the header and the data, which are this item's alone.
    fn parts(&mut self) -> impl Iterator<Item = &[u8]> {
        let (head, data) = match self {
            Self::Reply(head, data) => (head.as_bytes(), data.as_mut().and_then(|(window, _)| window.own_parts())),
            Self::Bytes(bytes, _) => (bytes.as_slice(), None),
        };
        std::iter::once(head).chain(data.into_iter().flatten())
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

    /// Calls `seal` with the first bytes, at least `most` of them if there are as many; it returns how many it took.
    pub(crate) fn seal(
        &mut self,
        most: usize,
        seal: impl FnOnce(&mut dyn Iterator<Item = &[u8]>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let (mut count, mut bytes) = (0_usize, 0_usize);
        for item in &mut self.items {
            if bytes >= most.saturating_add(self.sent) {
                break;
            }
            item.own().map_err(io::Error::other)?;
            (count, bytes) = (count.saturating_add(1), bytes.saturating_add(item.length_bytes()));
        }
        let skip = Cell::new(self.sent);
        let sealed = seal(&mut self.items.iter_mut().take(count).flat_map(Item::parts).map(|part| {
            let skipped = skip.get().min(part.len());
            skip.set(skip.get().saturating_sub(skipped));
            part.get(skipped..).unwrap_or_default()
        }))?;
        self.sent = self.sent.saturating_add(sealed);
        self.forget_sent();
        Ok(sealed)
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

#[cfg(test)]
mod tests {
    use super::*;
    use nbd_wire::reply::simple;

    #[test]
    fn what_is_sealed_in_pieces_is_all_of_it_in_order_whoever_else_has_the_data() {
        let (mut output, mut expected) = (Output::default(), Vec::new());
        let mut shared = Vec::new();
        for number in 0..20_u8 {
            let data = IoBuf::from_pool(700).unwrap().whole();
            data.fill(number);
            let (head, data) = (simple(number.into(), 0), data.slice(usize::from(number), 600));
            expected.extend_from_slice(head.as_bytes());
            expected.extend([number; 600]);
            if number % 3 == 0 {
                shared.push(data.clone());
            }
            output.reply(head, Some((data, None)));
            output.bytes(vec![number; number.into()], None);
            expected.extend(vec![number; number.into()]);
        }
        let mut found = Vec::new();
        while !output.is_empty() {
            let most = 1 + found.len() % 1500;
            let sealed = output.seal(most, |parts| {
                let all: Vec<u8> = parts.flatten().copied().collect();
                assert!(all.len() >= most || expected.len() == found.len() + all.len());
                let count = all.len().min(most);
                found.extend_from_slice(&all[..count]);
                Ok(count)
            });
            assert!(sealed.unwrap() > 0);
        }
        assert!(found == expected);
    }
}
