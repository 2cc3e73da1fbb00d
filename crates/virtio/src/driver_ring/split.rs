//! The driver's half of a split ring (virtio 1.2, 2.7): descriptors out, used entries in.

use super::{AddError, Buffer, Indirect, IndirectLayout, RingError, Used, low};
use crate::ring_access::{
    AVAIL_NO_INTERRUPT, Descriptor, LayoutError, SplitAreas, USED_NO_NOTIFY, crossed_event, descriptor_flags,
    full_fence,
};

/// What is known of a descriptor as a head.
#[derive(Debug, Clone, Copy, Default)]
struct Head {
    /// Descriptors of the ring that its chain holds; zero while it heads nothing.
    descriptors: u16,
    /// How many requests had been added before it.
    position: u64,
    /// The length its indirect table was last announced with: the descriptor is rewritten only if that changes.
    table_bytes: u32,
}

/// The driver's half of a split ring. [`super::DriverRing`] says what its methods do.
#[derive(Debug)]
pub struct SplitDriverRing {
    areas: SplitAreas,
    indirect: Option<Indirect>,
    event_idx: bool,
    /// Free descriptors, the next one last.
    free: Vec<u16>,
    heads: Vec<Head>,
    /// Our own copy of the chains' links: the table belongs to memory that the device can write.
    links: Vec<u16>,
    /// Requests ever added, shown to the device, weighed for a kick, popped. The ring's indices are their low 16 bits;
    /// a request may stay in flight while the indices go round.
    added: u64,
    shown: u64,
    published: u64,
    popped: u64,
    /// The used index when it was last looked at.
    seen_used: u16,
    broken: Option<RingError>,
}

impl SplitDriverRing {
    /// A ring over areas that nobody uses yet: positions begin at zero, callbacks are off.
    pub fn new(areas: SplitAreas, event_idx: bool, indirect: Option<IndirectLayout>) -> Result<Self, LayoutError> {
        let size = areas.size();
        let indirect = Indirect::find(areas.memory(), indirect, size)?;
        areas.publish_avail_index(0);
        areas.publish_used_index(0);
        areas.set_used_flags(0);
        let ring = Self {
            areas,
            indirect,
            event_idx,
            free: (0..size).rev().collect(),
            heads: vec![Head::default(); usize::from(size)],
            links: vec![0; usize::from(size)],
            added: 0,
            shown: 0,
            published: 0,
            popped: 0,
            seen_used: 0,
            broken: None,
        };
        ring.disable_callbacks();
        Ok(ring)
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.areas.size()
    }

    /// The most buffers that a request may have.
    #[must_use]
    pub fn max_buffers(&self) -> u16 {
        // 2.7.5.3.1: a chain, also an indirect one, is never longer than the queue.
        self.indirect.as_ref().map_or(self.size(), |indirect| indirect.layout.entries.min(self.size()))
    }

    /// The head that the next successful [`SplitDriverRing::add`] returns.
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Requests added and not popped.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        low(self.added.wrapping_sub(self.popped))
    }

    /// What broke the ring, if something has.
    #[must_use]
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// Adds a request; the device sees it with the next [`SplitDriverRing::publish`].
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<u16, AddError> {
        let most = self.max_buffers();
        let count = match u16::try_from(buffers.len()) {
            Ok(count) if (1..=most).contains(&count) => count,
            _ => return Err(AddError::TooLong { buffers: buffers.len(), most }),
        };
        let descriptors = if self.indirect.is_some() { 1 } else { count };
        if self.free.len() < usize::from(descriptors) {
            return Err(AddError::Full);
        }
        let head = self.next_head().ok_or(AddError::Full)?;
        match &self.indirect {
            Some(_) => self.fill_table(head, buffers),
            None => self.fill_chain(buffers),
        }
        let position = self.added;
        if let Some(state) = self.heads.get_mut(usize::from(head)) {
            state.descriptors = descriptors;
            state.position = position;
        }
        self.areas.set_avail_entry(low(position), head);
        self.added = position.wrapping_add(1);
        Ok(head)
    }

    fn fill_table(&mut self, head: u16, buffers: &[Buffer]) {
        self.free.pop();
        let Some(indirect) = &self.indirect else { return };
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
        if let Some(state) = self.heads.get_mut(usize::from(head))
            && state.table_bytes != table_bytes
        {
            state.table_bytes = table_bytes;
            let address = words.address().wrapping_add(start as u64);
            let flags = descriptor_flags::INDIRECT;
            self.areas.set_descriptor(head, Descriptor { address, length_bytes: table_bytes, flags, next: 0 });
        }
    }

    fn fill_chain(&mut self, buffers: &[Buffer]) {
        for (index, buffer) in buffers.iter().enumerate() {
            let Some(at) = self.free.pop() else { return };
            let last = index.wrapping_add(1) == buffers.len();
            let next = if last { None } else { self.free.last().copied() };
            if let Some(link) = self.links.get_mut(usize::from(at)) {
                *link = next.unwrap_or(at);
            }
            self.areas.set_descriptor(at, descriptor(buffer, next));
        }
    }

    /// Requests added since the device was last shown any.
    #[must_use]
    pub fn unshown(&self) -> u16 {
        low(self.added.wrapping_sub(self.shown))
    }

    /// Lets a device that polls see what was added so far, in the middle of a batch: no barrier and no kick, both of
    /// which come with [`SplitDriverRing::publish`] at its end.
    pub fn show(&mut self) {
        self.areas.publish_avail_index(low(self.added));
        self.shown = self.added;
    }

    /// Whether something was added since the last [`SplitDriverRing::publish`].
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        self.published != self.added
    }

    /// Shows the device what was added. Returns whether it must be kicked for it.
    pub fn publish(&mut self) -> bool {
        if !self.is_unpublished() {
            return false;
        }
        let (old, new) = (low(self.published), low(self.added));
        self.show();
        self.published = self.added;
        // 2.7.13.4.1: the index is visible before we look whether the device waits for it.
        full_fence();
        match self.event_idx {
            true => crossed_event(self.areas.avail_event(), old, new),
            false => self.areas.used_flags() & USED_NO_NOTIFY == 0,
        }
    }

    /// Whether the device has used something that was not popped yet.
    #[must_use]
    pub fn has_used(&self) -> bool {
        self.areas.used_index() != low(self.popped)
    }

    /// Takes the next request that the device is done with. After an error the ring stays broken.
    pub fn pop_used(&mut self) -> Result<Option<Used>, RingError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        let position = low(self.popped);
        if position == self.seen_used && !self.look_at_used_index()? {
            return Ok(None);
        }
        let (id, written_bytes) = self.areas.used_entry(position);
        let size = self.size();
        let head = match u16::try_from(id) {
            Ok(head) if head < size => head,
            _ => return Err(self.break_with(RingError::UsedId { id, size })),
        };
        // Announced, and not used since: the device cannot know what was only added.
        let state = self.heads.get(usize::from(head));
        let known = state.is_some_and(|state| state.descriptors > 0 && state.position < self.shown);
        if !known {
            return Err(self.break_with(RingError::NotInFlight { head }));
        }
        self.popped = self.popped.wrapping_add(1);
        self.release(head);
        Ok(Some(Used { head, written_bytes }))
    }

    fn look_at_used_index(&mut self) -> Result<bool, RingError> {
        let (from, to) = (low(self.popped), self.areas.used_index());
        let in_flight = low(self.shown.wrapping_sub(self.popped));
        if to.wrapping_sub(from) > in_flight {
            return Err(self.break_with(RingError::UsedIndex { from, to, in_flight }));
        }
        self.seen_used = to;
        Ok(from != to)
    }

    fn break_with(&mut self, error: RingError) -> RingError {
        self.broken = Some(error);
        error
    }

    /// Gives the descriptors of `head`'s chain back, the head last, so that it is taken next while it is warm.
    fn release(&mut self, head: u16) {
        let Some(state) = self.heads.get_mut(usize::from(head)) else { return };
        let count = std::mem::take(&mut state.descriptors);
        let first = self.free.len();
        let mut at = head;
        for _ in 0..count {
            self.free.push(at);
            at = self.links.get(usize::from(at)).copied().unwrap_or(at);
        }
        if let Some(returned) = self.free.get_mut(first..) {
            returned.reverse();
        }
    }

    /// Asks the device to call when it uses the next entry. Returns true if it has used one already; then the caller
    /// should go on instead of sleeping.
    pub fn enable_callbacks(&mut self) -> bool {
        match self.event_idx {
            true => self.areas.set_used_event(low(self.popped)),
            false => self.areas.set_avail_flags(0),
        }
        // 2.7.14: the wish is visible before the second look.
        full_fence();
        self.has_used()
    }

    /// The device need not call: the driver looks by itself. (It may still do so once in 65536 entries.)
    pub fn disable_callbacks(&self) {
        match self.event_idx {
            true => self.areas.set_used_event(low(self.popped).wrapping_sub(1)),
            false => self.areas.set_avail_flags(AVAIL_NO_INTERRUPT),
        }
    }
}

fn descriptor(buffer: &Buffer, next: Option<u16>) -> Descriptor {
    let mut flags = if buffer.device_writes { descriptor_flags::WRITE } else { 0 };
    if next.is_some() {
        flags |= descriptor_flags::NEXT;
    }
    Descriptor { address: buffer.address, length_bytes: buffer.length_bytes, flags, next: next.unwrap_or(0) }
}

#[cfg(test)]
#[path = "split_tests.rs"]
mod tests;
