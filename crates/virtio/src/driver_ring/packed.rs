//! The driver's half of a packed ring (virtio 1.2, 2.8).
//!
//! A head is the id of a buffer. The device sees the requests of a batch together: it looks at descriptors in order, so
//! the flags of the first are written last.

use super::{AddError, Buffer, Indirect, IndirectLayout, RingError, Used, low};
use crate::ring_access::{
    EventWish, LayoutError, PackedAreas, PackedDescriptor, PackedPosition, descriptor_flags, full_fence,
};

/// What is known of a buffer id.
#[derive(Debug, Clone, Copy, Default)]
struct Head {
    /// Descriptors of the ring that its chain takes; zero while it names nothing.
    descriptors: u16,
    /// How many requests had been added before it.
    position: u64,
}

/// The driver's half of a packed ring. [`super::DriverRing`] says what its methods do.
#[derive(Debug)]
pub struct PackedDriverRing {
    areas: PackedAreas,
    indirect: Option<Indirect>,
    event_idx: bool,
    /// Free ids, the next one last.
    free: Vec<u16>,
    /// Free descriptors.
    room: u16,
    heads: Vec<Head>,
    next_avail: PackedPosition,
    next_used: PackedPosition,
    /// The first descriptor that the device was not shown, and its flags, which are not written yet.
    unshown: Option<(u16, u16)>,
    /// Descriptors made available since the device's wish was last looked at.
    moved: u16,
    /// Requests ever added, shown to the device, weighed for a kick, popped.
    added: u64,
    shown: u64,
    published: u64,
    popped: u64,
    broken: Option<RingError>,
}

impl PackedDriverRing {
    /// See [`super::DriverRing::new`].
    pub fn new(areas: PackedAreas, event_idx: bool, indirect: Option<IndirectLayout>) -> Result<Self, LayoutError> {
        let size = areas.size();
        let indirect = Indirect::find(areas.memory(), indirect, size)?;
        // What an earlier ring left there may look used or available.
        (0..size).for_each(|index| areas.set_flags(index, 0));
        areas.set_device_wish(EventWish::Always);
        areas.set_driver_wish(EventWish::Never);
        Ok(Self {
            areas,
            indirect,
            event_idx,
            free: (0..size).rev().collect(),
            room: size,
            heads: vec![Head::default(); usize::from(size)],
            next_avail: PackedPosition::START,
            next_used: PackedPosition::START,
            unshown: None,
            moved: 0,
            added: 0,
            shown: 0,
            published: 0,
            popped: 0,
            broken: None,
        })
    }

    /// See [`super::DriverRing::size`].
    #[must_use]
    pub fn size(&self) -> u16 {
        self.areas.size()
    }

    /// See [`super::DriverRing::max_buffers`].
    #[must_use]
    pub fn max_buffers(&self) -> u16 {
        // 2.8.5: a chain, also an indirect one, is never longer than the queue.
        self.indirect.as_ref().map_or(self.size(), |indirect| indirect.layout.entries.min(self.size()))
    }

    /// See [`super::DriverRing::next_head`].
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        self.free.last().copied().filter(|_| self.room > 0)
    }

    /// See [`super::DriverRing::in_flight`].
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        low(self.added.wrapping_sub(self.popped))
    }

    /// See [`super::DriverRing::broken`].
    #[must_use]
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// See [`super::DriverRing::add`].
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<u16, AddError> {
        let most = self.max_buffers();
        let count = match u16::try_from(buffers.len()) {
            Ok(count) if (1..=most).contains(&count) => count,
            _ => return Err(AddError::TooLong { buffers: buffers.len(), most }),
        };
        let descriptors = if self.indirect.is_some() { 1 } else { count };
        let room = self.room.checked_sub(descriptors).ok_or(AddError::Full)?;
        let head = self.free.pop().ok_or(AddError::Full)?;
        self.room = room;
        match &self.indirect {
            Some(indirect) => {
                let table = fill_table(indirect, head, buffers);
                self.put(table);
            }
            None => self.put_chain(head, buffers),
        }
        let position = self.added;
        if let Some(state) = self.heads.get_mut(usize::from(head)) {
            *state = Head { descriptors, position };
        }
        self.moved = self.moved.saturating_add(descriptors);
        self.added = position.wrapping_add(1);
        Ok(head)
    }

    fn put_chain(&mut self, id: u16, buffers: &[Buffer]) {
        let mut left = buffers.len();
        for buffer in buffers {
            left = left.saturating_sub(1);
            let next = if left > 0 { descriptor_flags::NEXT } else { 0 };
            let flags = write_flag(buffer) | next;
            self.put(PackedDescriptor { address: buffer.address, length_bytes: buffer.length_bytes, id, flags });
        }
    }

    /// Puts a descriptor at the next place. The device does not see it before the first of its batch.
    #[inline]
    fn put(&mut self, descriptor: PackedDescriptor) {
        let at = self.next_avail;
        self.areas.set_descriptor(at.index, descriptor);
        let flags = descriptor.flags | at.available_flags();
        match self.unshown {
            None => self.unshown = Some((at.index, flags)),
            Some(_) => self.areas.set_flags(at.index, flags),
        }
        self.next_avail = at.advance(1, self.areas.size());
    }

    /// See [`super::DriverRing::unshown`].
    #[must_use]
    pub fn unshown(&self) -> u16 {
        low(self.added.wrapping_sub(self.shown))
    }

    /// See [`super::DriverRing::show`].
    pub fn show(&mut self) {
        if let Some((index, flags)) = self.unshown.take() {
            self.areas.publish_flags(index, flags);
        }
        self.shown = self.added;
    }

    /// See [`super::DriverRing::is_unpublished`].
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        self.published != self.added
    }

    /// See [`super::DriverRing::publish`].
    pub fn publish(&mut self) -> bool {
        if !self.is_unpublished() {
            return false;
        }
        self.show();
        self.published = self.added;
        let moved = std::mem::take(&mut self.moved);
        // 2.8.21.3.1: the descriptors are visible before we look whether the device waits for them.
        full_fence();
        self.areas.device_wish().is_due(self.next_avail, moved, self.areas.size())
    }

    /// See [`super::DriverRing::has_used`].
    #[must_use]
    pub fn has_used(&self) -> bool {
        self.next_used.is_used(self.areas.flags(self.next_used.index))
    }

    /// See [`super::DriverRing::pop_used`].
    pub fn pop_used(&mut self) -> Result<Option<Used>, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        if !self.has_used() {
            return Ok(None);
        }
        let (head, written_bytes) = self.areas.used(self.next_used.index);
        let size = self.size();
        let Some(state) = self.heads.get_mut(usize::from(head)) else {
            return Err(self.break_with(RingError::UsedId { id: u32::from(head), size }));
        };
        // Announced, and not used since: the device cannot know what was only added.
        if state.descriptors == 0 || state.position >= self.shown {
            return Err(self.break_with(RingError::NotInFlight { head }));
        }
        let count = std::mem::take(&mut state.descriptors);
        self.room = self.room.saturating_add(count);
        self.free.push(head);
        self.next_used = self.next_used.advance(count, size);
        self.popped = self.popped.wrapping_add(1);
        Ok(Some(Used { head, written_bytes }))
    }

    fn break_with(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }

    /// See [`super::DriverRing::enable_callbacks`].
    pub fn enable_callbacks(&mut self) -> bool {
        self.areas.set_driver_wish(match self.event_idx {
            true => EventWish::At(self.next_used.to_bits()),
            false => EventWish::Always,
        });
        // 2.8.21.3.1: the wish is visible before the second look.
        full_fence();
        self.has_used()
    }

    /// See [`super::DriverRing::disable_callbacks`].
    pub fn disable_callbacks(&self) {
        self.areas.set_driver_wish(EventWish::Never);
    }
}

fn write_flag(buffer: &Buffer) -> u16 {
    if buffer.device_writes { descriptor_flags::WRITE } else { 0 }
}

/// Fills the table of `head`; gives the descriptor that names it.
fn fill_table(indirect: &Indirect, head: u16, buffers: &[Buffer]) -> PackedDescriptor {
    let start = indirect.start(head);
    let (mut offset, mut length_bytes) = (start, 0_u32);
    for buffer in buffers {
        let (address, flags) = (buffer.address, write_flag(buffer));
        let entry = PackedDescriptor { address, length_bytes: buffer.length_bytes, id: 0, flags };
        indirect.words.set_packed_descriptor(offset, entry);
        // No chain is longer than the ring, whose size is a `u16`: neither sum wraps.
        offset = offset.wrapping_add(16);
        length_bytes = length_bytes.wrapping_add(16);
    }
    let address = indirect.words.address().wrapping_add(start as u64);
    PackedDescriptor { address, length_bytes, id: head, flags: descriptor_flags::INDIRECT }
}
