//! The part of the driver's half that is particular to split rings (virtio 1.2, 2.7).

use super::state::{Head, State};
use super::{Buffer, Indirect, RingError, low};
use crate::ring_access::{AVAIL_NO_INTERRUPT, Descriptor, SplitAreas, USED_NO_NOTIFY, crossed_event, descriptor_flags};

#[derive(Debug)]
pub(super) struct SplitHalf {
    areas: SplitAreas,
    /// Our own copy of the chains' links: the device can write to the table.
    links: Vec<u16>,
    /// The used index when it was last read.
    seen_used: u16,
    /// The available index when the device's wish was last read.
    weighed: u16,
}

impl SplitHalf {
    pub(super) fn new(areas: SplitAreas) -> Self {
        areas.publish_avail_index(0);
        areas.publish_used_index(0);
        areas.set_used_flags(0);
        let links = vec![0; usize::from(areas.size())];
        Self { areas, links, seen_used: 0, weighed: 0 }
    }

    pub(super) fn has_room(&self, state: &State, descriptors: u16) -> bool {
        state.free.len() >= usize::from(descriptors.max(1))
    }

    /// Puts a chain into the ring. Its head is the last free descriptor.
    #[inline]
    pub(super) fn put(&mut self, state: &mut State, head: u16, _: u16, buffers: &[Buffer]) {
        let State { indirect, heads, free, added, .. } = state;
        match indirect {
            Some(indirect) => {
                free.pop();
                self.put_table(indirect, heads.get_mut(usize::from(head)), head, buffers);
            }
            None => self.put_chain(free, buffers),
        }
        self.areas.set_avail_entry(low(*added), head);
    }

    fn put_table(&self, indirect: &Indirect, state: Option<&mut Head>, head: u16, buffers: &[Buffer]) {
        let (words, start) = (&indirect.words, indirect.start(head));
        let mut next = 0u16;
        for buffer in buffers {
            let offset = start.wrapping_add(usize::from(next).wrapping_mul(16));
            next = next.wrapping_add(1);
            let last = usize::from(next) == buffers.len();
            words.set_descriptor(offset, descriptor(buffer, (!last).then_some(next)));
        }
        // No chain is longer than the ring, whose size is a `u16`: the product fits.
        let table_bytes = u32::from(next).wrapping_mul(16);
        if let Some(state) = state
            && state.table_bytes != table_bytes
        {
            state.table_bytes = table_bytes;
            let address = words.address().wrapping_add(start as u64);
            let flags = descriptor_flags::INDIRECT;
            self.areas.set_descriptor(head, Descriptor { address, length_bytes: table_bytes, flags, next: 0 });
        }
    }

    fn put_chain(&mut self, free: &mut Vec<u16>, buffers: &[Buffer]) {
        for (index, buffer) in buffers.iter().enumerate() {
            let Some(at) = free.pop() else { return };
            let last = index.wrapping_add(1) == buffers.len();
            let next = if last { None } else { free.last().copied() };
            if let Some(link) = self.links.get_mut(usize::from(at)) {
                *link = next.unwrap_or(at);
            }
            self.areas.set_descriptor(at, descriptor(buffer, next));
        }
    }

    pub(super) fn show(&mut self, state: &State) {
        self.areas.publish_avail_index(low(state.added));
    }

    /// Whether the device waits for the descriptors that were just shown to it (2.7.10).
    pub(super) fn wants_kick(&mut self, state: &State) -> bool {
        let new = low(state.added);
        let old = std::mem::replace(&mut self.weighed, new);
        match state.event_idx {
            true => crossed_event(self.areas.avail_event(), old, new),
            false => self.areas.used_flags() & USED_NO_NOTIFY == 0,
        }
    }

    #[inline]
    pub(super) fn has_used(&self, state: &State) -> bool {
        self.areas.used_index() != low(state.popped)
    }

    #[inline]
    pub(super) fn next_used(&mut self, state: &State) -> Result<Option<(u32, u32)>, RingError> {
        let position = low(state.popped);
        if position == self.seen_used && !self.look_at_used_index(state)? {
            return Ok(None);
        }
        Ok(Some(self.areas.used_entry(position)))
    }

    fn look_at_used_index(&mut self, state: &State) -> Result<bool, RingError> {
        let (from, to) = (low(state.popped), self.areas.used_index());
        let in_flight = low(state.shown.wrapping_sub(state.popped));
        if to.wrapping_sub(from) > in_flight {
            return Err(RingError::UsedIndex { from, to, in_flight });
        }
        self.seen_used = to;
        Ok(from != to)
    }

    /// Gives the descriptors of `head`'s chain back. The head is last, so that it is taken next while it is in the
    /// cache.
    #[inline]
    pub(super) fn release(&mut self, state: &mut State, head: u16, descriptors: u16) {
        let first = state.free.len();
        let mut at = head;
        for _ in 0..descriptors {
            state.free.push(at);
            at = self.links.get(usize::from(at)).copied().unwrap_or(at);
        }
        if let Some(returned) = state.free.get_mut(first..) {
            returned.reverse();
        }
    }

    pub(super) fn enable_callbacks(&self, state: &State) {
        match state.event_idx {
            true => self.areas.set_used_event(low(state.popped)),
            false => self.areas.set_avail_flags(0),
        }
    }

    /// Turns callbacks off. The device may still call once in 65536 entries.
    pub(super) fn disable_callbacks(&self, state: &State) {
        match state.event_idx {
            true => self.areas.set_used_event(low(state.popped).wrapping_sub(1)),
            false => self.areas.set_avail_flags(AVAIL_NO_INTERRUPT),
        }
    }
}

fn descriptor(buffer: &Buffer, next: Option<u16>) -> Descriptor {
    let flags = buffer.write_flag() | if next.is_some() { descriptor_flags::NEXT } else { 0 };
    Descriptor { address: buffer.address, length_bytes: buffer.length_bytes, flags, next: next.unwrap_or(0) }
}
