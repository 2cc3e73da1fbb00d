//! The device's half of a packed ring (virtio 1.2, 2.8).
//!
//! The driver looks at used descriptors in order, so the flags of the first are written last: then those of a batch
//! become visible together. A chain that is given back takes one descriptor of the ring, and the device skips the
//! chain's other descriptors.

use crate::device_ring::{DeviceRing, RingFeatures, indirect_count};
use crate::fault::{FaultReason, RingFault};
use crate::ring_access::{
    ChainMemory, EventWish, LayoutError, PackedAreas, PackedDescriptor, PackedPosition, descriptor_flags, full_fence,
    indirect_table, written_flag,
};

/// The device's half of a packed ring.
#[derive(Debug)]
pub struct PackedDeviceRing {
    areas: PackedAreas,
    features: RingFeatures,
    /// Next descriptor to take.
    next_avail: PackedPosition,
    /// Next descriptor to give back.
    next_used: PackedPosition,
    /// The first descriptor given back since [`DeviceRing::publish`], and its flags, which are not written yet.
    unpublished: Option<(u16, u16)>,
    /// Descriptors given back since the last publish.
    moved: u16,
    /// A batch was published with EVENT_IDX. The first one always notifies.
    notified_once: bool,
    faulted: bool,
    /// The number of descriptors in each buffer id's chain; zero if it is not in flight.
    chains: Box<[u16]>,
    /// The number of chains in flight.
    in_flight: u16,
    /// Descriptors between `next_used` and `next_avail`; never more than the ring has.
    held: u16,
    /// Memory region in which indirect tables were found last.
    table_hint: usize,
}

impl PackedDeviceRing {
    /// The position of a new ring, in the format of [`DeviceRing::base`].
    pub const NEW: u32 = 0x8000_8000;

    /// Starts on a ring, from `base` on. Its upper half may be zero: nothing is in flight then.
    ///
    /// Some front ends (User Mode Linux) begin every ring at zero, as if it were split. A ring also goes on at zero
    /// after a turn with the wrap counter set, but then the driver wrote the last descriptor in that turn.
    pub fn new(areas: PackedAreas, features: RingFeatures, base: u32) -> Result<Self, LayoutError> {
        let size = areas.size();
        let base = if base == 0 && !areas.was_filled() { Self::NEW } else { base };
        // The truncations pick the halves apart.
        let (low, high) = (base as u16, (base >> 16) as u16);
        let next_avail = PackedPosition::from_bits(low);
        let next_used = if high == 0 { next_avail } else { PackedPosition::from_bits(high) };
        let inside = next_avail.index < size && next_used.index < size;
        let held = next_used.distance_to(next_avail, size).filter(|_| inside);
        Ok(Self {
            features,
            next_avail,
            next_used,
            unpublished: None,
            moved: 0,
            notified_once: false,
            faulted: false,
            chains: vec![0; usize::from(size)].into_boxed_slice(),
            in_flight: 0,
            held: held.ok_or(LayoutError::Base { base, size })?,
            table_hint: 0,
            areas,
        })
    }

    /// Returns the ring's memory.
    #[must_use]
    pub fn areas(&self) -> &PackedAreas {
        &self.areas
    }

    #[inline]
    fn take(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault> {
        let (at, size) = (self.next_avail, self.areas.size());
        let flags = self.areas.flags(at.index);
        if !at.is_available(flags) {
            return Ok(None);
        }
        chain.begin();
        let (id, count) = self.walk(at.index, flags, chain).map_err(|reason| reason.in_chain(at.index))?;
        let held = self.held.saturating_add(count);
        if held > size {
            return Err(FaultReason::TooManyInFlight { size }.in_chain(at.index));
        }
        match self.chains.get_mut(usize::from(id)) {
            Some(chain) if *chain == 0 => *chain = count,
            Some(_) => return Err(FaultReason::HeadInFlight.in_chain(id)),
            None => return Err(FaultReason::IdOutside { id, size }.in_chain(at.index)),
        }
        self.held = held;
        self.in_flight = self.in_flight.wrapping_add(1);
        self.next_avail = at.advance(count, size);
        Ok(Some(id))
    }

    /// Follows the chain. Reads each descriptor once. Returns the buffer's id, which is in the last descriptor, and the
    /// number of descriptors.
    #[inline]
    fn walk(&mut self, head: u16, flags: u16, chain: &mut ChainMemory) -> Result<(u16, u16), FaultReason> {
        let size = self.areas.size();
        let (mut index, mut flags) = (head, flags);
        for count in 1..=size {
            let descriptor = self.areas.descriptor(index, flags);
            if descriptor.has(descriptor_flags::INDIRECT) {
                self.walk_indirect(descriptor, chain)?;
                return Ok((descriptor.id, count));
            }
            chain.push(descriptor.address, descriptor.length_bytes, descriptor.has(descriptor_flags::WRITE))?;
            if !descriptor.has(descriptor_flags::NEXT) {
                return Ok((descriptor.id, count));
            }
            index = index.wrapping_add(1);
            if index == size {
                index = 0;
            }
            flags = self.areas.flags(index);
        }
        Err(FaultReason::ChainTooLong { limit: u32::from(size) })
    }

    /// Takes the buffers of an indirect table, in order. Only their WRITE flag has a meaning (2.8.7).
    #[inline]
    fn walk_indirect(&mut self, table: PackedDescriptor, chain: &mut ChainMemory) -> Result<(), FaultReason> {
        if !self.features.indirect {
            return Err(FaultReason::IndirectNotNegotiated);
        }
        if table.has(descriptor_flags::NEXT) {
            return Err(FaultReason::IndirectWithNext);
        }
        let count = indirect_count(table.length_bytes)?;
        let table = indirect_table(self.areas.memory(), table.address, count, &mut self.table_hint)?;
        for descriptor in (0..count).map_while(|index| table.packed_descriptor(index)) {
            if descriptor.has(descriptor_flags::INDIRECT) {
                return Err(FaultReason::NestedIndirect);
            }
            chain.push(descriptor.address, descriptor.length_bytes, descriptor.has(descriptor_flags::WRITE))?;
        }
        Ok(())
    }

    /// Forgets a chain in flight. Returns the number of its descriptors; zero if it was not in flight.
    #[inline]
    fn forget(&mut self, id: u16) -> u16 {
        let count = self.chains.get_mut(usize::from(id)).map_or(0, std::mem::take);
        self.held = self.held.saturating_sub(count);
        self.in_flight = self.in_flight.saturating_sub(u16::from(count > 0));
        count
    }
}

impl DeviceRing for PackedDeviceRing {
    fn size(&self) -> u16 {
        self.areas.size()
    }

    #[inline]
    fn pop(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault> {
        if self.faulted {
            return Ok(None);
        }
        let taken = self.take(chain);
        self.faulted = taken.is_err();
        taken
    }

    #[cold]
    fn stop_at(&mut self, head: u16) {
        self.faulted = true;
        // The chain counts as never taken: the next owner of the ring finds it first.
        let count = self.forget(head);
        self.next_avail = self.next_avail.back(count, self.areas.size());
    }

    #[inline]
    fn put_used(&mut self, head: u16, written_bytes: u32) {
        let count = self.forget(head);
        if count == 0 {
            return;
        }
        let at = self.next_used;
        self.areas.set_used(at.index, head, written_bytes);
        let flags = at.used_flags() | written_flag(written_bytes);
        match self.unpublished {
            None => self.unpublished = Some((at.index, flags)),
            Some(_) => self.areas.set_flags(at.index, flags),
        }
        self.next_used = at.advance(count, self.areas.size());
        self.moved = self.moved.saturating_add(count);
    }

    #[inline]
    fn publish(&mut self) -> bool {
        let Some((index, flags)) = self.unpublished.take() else {
            return false;
        };
        self.areas.publish_flags(index, flags);
        let moved = std::mem::take(&mut self.moved);
        // The descriptor must be visible before we read whether the driver waits for it, or both sides would wait.
        full_fence();
        match self.areas.driver_wish() {
            EventWish::Never => false,
            EventWish::At(_) if !std::mem::replace(&mut self.notified_once, true) => true,
            wish => wish.is_due(self.next_used, moved, self.areas.size()),
        }
    }

    fn enable_notifications(&mut self) -> bool {
        if self.faulted {
            return false;
        }
        self.areas.set_device_wish(match self.features.event_idx {
            true => EventWish::At(self.next_avail.to_bits()),
            false => EventWish::Always,
        });
        // The wish must be visible before we look whether it came too late.
        full_fence();
        self.next_avail.is_available(self.areas.flags(self.next_avail.index))
    }

    fn disable_notifications(&mut self) {
        self.areas.set_device_wish(EventWish::Never);
    }

    fn base(&self) -> u32 {
        u32::from(self.next_avail.to_bits()) | u32::from(self.next_used.to_bits()) << 16
    }

    fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Looks at a few descriptors ahead, because a packed ring has no index. The driver makes them available in order.
    fn waiting(&self) -> u16 {
        let size = self.areas.size();
        let is_there = |ahead: &u16| {
            let at = self.next_avail.advance(*ahead, size);
            at.is_available(self.areas.flags(at.index))
        };
        [32, 64, 128, 256].into_iter().take_while(|ahead| *ahead < size).take_while(is_there).last().unwrap_or(0)
    }
}
