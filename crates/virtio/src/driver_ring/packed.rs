//! The part of the driver's half that is particular to packed rings (virtio 1.2, 2.8).
//!
//! A head is the id of a buffer. The device looks at descriptors in order, so the flags of the first are written last:
//! then it sees the requests of a batch together.

use super::state::State;
use super::{Buffer, Indirect, RingError};
use crate::ring_access::{EventWish, PackedAreas, PackedDescriptor, PackedPosition, descriptor_flags};

#[derive(Debug)]
pub(super) struct PackedHalf {
    areas: PackedAreas,
    /// Free descriptors.
    room: u16,
    next_avail: PackedPosition,
    next_used: PackedPosition,
    /// The first descriptor that the device cannot see yet, and its flags, which are not written yet.
    unshown: Option<(u16, u16)>,
    /// Descriptors made available since the device's wish was last read.
    moved: u16,
}

impl PackedHalf {
    pub(super) fn new(areas: PackedAreas) -> Self {
        let room = areas.size();
        // Descriptors of an earlier ring may look used or available.
        (0..room).for_each(|index| areas.set_flags(index, 0));
        areas.set_device_wish(EventWish::Always);
        let (next_avail, next_used) = (PackedPosition::START, PackedPosition::START);
        Self { areas, room, next_avail, next_used, unshown: None, moved: 0 }
    }

    pub(super) fn has_room(&self, state: &State, descriptors: u16) -> bool {
        self.room >= descriptors && !state.free.is_empty()
    }

    /// Puts a chain of `descriptors` into the ring. Its head is the last free one.
    #[inline]
    pub(super) fn put(&mut self, state: &mut State, head: u16, descriptors: u16, buffers: &[Buffer]) {
        state.free.pop();
        self.room = self.room.saturating_sub(descriptors);
        self.moved = self.moved.saturating_add(descriptors);
        match &state.indirect {
            Some(indirect) => self.put_descriptor(fill_table(indirect, head, buffers)),
            None => self.put_chain(head, buffers),
        }
    }

    fn put_chain(&mut self, id: u16, buffers: &[Buffer]) {
        let mut left = buffers.len();
        for buffer in buffers {
            left = left.saturating_sub(1);
            let next = if left > 0 { descriptor_flags::NEXT } else { 0 };
            let flags = buffer.write_flag() | next;
            let (address, length_bytes) = (buffer.address, buffer.length_bytes);
            self.put_descriptor(PackedDescriptor { address, length_bytes, id, flags });
        }
    }

    /// Puts a descriptor at the next place. The device sees it only after the first of its batch.
    #[inline]
    fn put_descriptor(&mut self, descriptor: PackedDescriptor) {
        let at = self.next_avail;
        self.areas.set_descriptor(at.index, descriptor);
        let flags = descriptor.flags | at.available_flags();
        match self.unshown {
            None => self.unshown = Some((at.index, flags)),
            Some(_) => self.areas.set_flags(at.index, flags),
        }
        self.next_avail = at.advance(1, self.areas.size());
    }

    pub(super) fn show(&mut self, _: &State) {
        if let Some((index, flags)) = self.unshown.take() {
            self.areas.publish_flags(index, flags);
        }
    }

    /// Whether the device waits for the descriptors that were just shown to it (2.8.10).
    pub(super) fn wants_kick(&mut self, _: &State) -> bool {
        let moved = std::mem::take(&mut self.moved);
        self.areas.device_wish().is_due(self.next_avail, moved, self.areas.size())
    }

    #[inline]
    pub(super) fn has_used(&self, _: &State) -> bool {
        self.next_used.is_used(self.areas.flags(self.next_used.index))
    }

    #[inline]
    pub(super) fn next_used(&mut self, state: &State) -> Result<Option<(u32, u32)>, RingError> {
        let found = self.has_used(state).then(|| self.areas.used(self.next_used.index));
        Ok(found.map(|(id, written_bytes)| (u32::from(id), written_bytes)))
    }

    /// Gives the descriptors of a chain back.
    #[inline]
    pub(super) fn release(&mut self, state: &mut State, head: u16, descriptors: u16) {
        state.free.push(head);
        self.room = self.room.saturating_add(descriptors);
        self.next_used = self.next_used.advance(descriptors, self.areas.size());
    }

    pub(super) fn enable_callbacks(&self, state: &State) {
        self.areas.set_driver_wish(match state.event_idx {
            true => EventWish::At(self.next_used.to_bits()),
            false => EventWish::Always,
        });
    }

    pub(super) fn disable_callbacks(&self, _: &State) {
        self.areas.set_driver_wish(EventWish::Never);
    }
}

/// Fills the table of `head`. Returns the descriptor that names the table.
fn fill_table(indirect: &Indirect, head: u16, buffers: &[Buffer]) -> PackedDescriptor {
    let start = indirect.start(head);
    let (mut offset, mut length_bytes) = (start, 0_u32);
    for buffer in buffers {
        let (address, flags) = (buffer.address, buffer.write_flag());
        let entry = PackedDescriptor { address, length_bytes: buffer.length_bytes, id: 0, flags };
        indirect.words.set_packed_descriptor(offset, entry);
        // No chain is longer than the ring, whose size is a `u16`: neither sum wraps.
        offset = offset.wrapping_add(16);
        length_bytes = length_bytes.wrapping_add(16);
    }
    let address = indirect.words.address().wrapping_add(start as u64);
    PackedDescriptor { address, length_bytes, id: head, flags: descriptor_flags::INDIRECT }
}
