//! The device's half of a ring: takes chains, gives them back, decides about notifications.
//!
//! Queue code is generic over [`DeviceRing`], so that another layout of the ring changes nothing above.

use crate::fault::{FaultReason, RingFault};
use crate::ring_access::{
    AVAIL_NO_INTERRUPT, ChainMemory, Descriptor, MAX_CHAIN_SEGMENTS, SplitAreas, USED_NO_NOTIFY, crossed_event,
    descriptor_flags, full_fence, indirect_table,
};

/// What queue code needs of a ring, whatever its layout.
pub trait DeviceRing {
    /// Descriptors: heads are below it.
    fn size(&self) -> u16;

    /// Takes the next available chain into `chain` and returns its head; `None` when there is none. After a fault
    /// nothing is taken any more.
    fn pop(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault>;

    /// The chain taken last cannot be a request: it is left with the device, and nothing more is taken.
    fn stop_at(&mut self, head: u16);

    /// Gives a chain back, of which the first `written_bytes` writable bytes were written. Invisible before
    /// [`DeviceRing::publish`].
    fn put_used(&mut self, head: u16, written_bytes: u32);

    /// Makes what was put visible; returns whether the driver wants to be notified. Once a batch.
    fn publish(&mut self) -> bool;

    /// Asks for notifications of new chains; returns whether there are some already.
    fn enable_notifications(&mut self) -> bool;

    /// The device looks by itself: notifications are not needed.
    fn disable_notifications(&mut self);

    /// Where the ring goes on: what a front end hands to the next owner of the ring. As vhost-user words it: of a split
    /// ring the index of the next entry to take; of a packed one fifteen bits of the next descriptor to take and its wrap
    /// counter, and in the upper half the same of the next descriptor to use.
    fn base(&self) -> u32;

    /// Chains taken and not given back.
    fn in_flight(&self) -> u16;

    /// Chains that are known to wait; there may be more.
    fn waiting(&self) -> u16;
}

impl<R: DeviceRing + ?Sized> DeviceRing for Box<R> {
    fn size(&self) -> u16 {
        (**self).size()
    }

    fn pop(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault> {
        (**self).pop(chain)
    }

    fn stop_at(&mut self, head: u16) {
        (**self).stop_at(head);
    }

    fn put_used(&mut self, head: u16, written_bytes: u32) {
        (**self).put_used(head, written_bytes);
    }

    fn publish(&mut self) -> bool {
        (**self).publish()
    }

    fn enable_notifications(&mut self) -> bool {
        (**self).enable_notifications()
    }

    fn disable_notifications(&mut self) {
        (**self).disable_notifications();
    }

    fn base(&self) -> u32 {
        (**self).base()
    }

    fn in_flight(&self) -> u16 {
        (**self).in_flight()
    }

    fn waiting(&self) -> u16 {
        (**self).waiting()
    }
}

/// What was negotiated about a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingFeatures {
    /// INDIRECT_DESC.
    pub indirect: bool,
    /// EVENT_IDX.
    pub event_idx: bool,
}

impl RingFeatures {
    /// Picks them out of the negotiated feature bits. The layout is [`crate::ring_access::RingLayout`].
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        use crate::blk::features::{EVENT_IDX, INDIRECT_DESC};
        Self { indirect: bits & INDIRECT_DESC != 0, event_idx: bits & EVENT_IDX != 0 }
    }
}

/// The device's half of a split ring (virtio 1.2, 2.7).
#[derive(Debug)]
pub struct SplitDeviceRing {
    areas: SplitAreas,
    features: RingFeatures,
    /// Next entry of the available ring to take.
    next_avail: u16,
    /// The driver's index when it was last read: up to here entries can be taken without looking again.
    seen_avail: u16,
    /// Next entry of the used ring to fill.
    next_used: u16,
    /// The used index that the driver sees, at which notifying it was last decided about.
    published_used: u16,
    /// The driver was told at least once, so that `published_used` says what it knows.
    notified_once: bool,
    faulted: bool,
    in_flight: HeadSet,
    /// Memory region in which indirect tables were found last.
    table_hint: usize,
}

impl SplitDeviceRing {
    /// Starts on a ring, taking from `next_avail` on. The used index goes on from the ring's own: an earlier user of
    /// the ring published it there.
    #[must_use]
    pub fn new(areas: SplitAreas, features: RingFeatures, next_avail: u16) -> Self {
        let next_used = areas.used_index();
        let in_flight = HeadSet::new(areas.size());
        Self {
            areas,
            features,
            next_avail,
            seen_avail: next_avail,
            next_used,
            published_used: next_used,
            notified_once: false,
            faulted: false,
            in_flight,
            table_hint: 0,
        }
    }

    /// The ring's memory.
    #[must_use]
    pub fn areas(&self) -> &SplitAreas {
        &self.areas
    }

    fn look_for_more(&mut self) -> Result<bool, RingFault> {
        let (from, to, size) = (self.next_avail, self.areas.avail_index(), self.areas.size());
        if to.wrapping_sub(from) > size {
            return Err(RingFault { head: None, reason: FaultReason::AvailIndexJump { from, to, size } });
        }
        self.seen_avail = to;
        Ok(to != from)
    }

    #[inline]
    fn take(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault> {
        if self.seen_avail == self.next_avail && !self.look_for_more()? {
            return Ok(None);
        }
        let size = self.areas.size();
        let head = self.areas.avail_entry(self.next_avail);
        if head >= size {
            return Err(FaultReason::HeadOutside { size }.in_chain(head));
        }
        if self.in_flight.contains(head) {
            return Err(FaultReason::HeadInFlight.in_chain(head));
        }
        chain.begin();
        self.walk(head, chain).map_err(|reason| reason.in_chain(head))?;
        self.in_flight.insert(head);
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Follows the chain, reading each descriptor once: what is checked is what is used.
    #[inline]
    fn walk(&mut self, head: u16, chain: &mut ChainMemory) -> Result<(), FaultReason> {
        let size = self.areas.size();
        let mut descriptor = self.areas.descriptor(head);
        for _ in 0..size {
            if descriptor.has(descriptor_flags::INDIRECT) {
                return self.walk_indirect(descriptor, chain);
            }
            chain.push(descriptor.address, descriptor.length_bytes, descriptor.has(descriptor_flags::WRITE))?;
            if !descriptor.has(descriptor_flags::NEXT) {
                return Ok(());
            }
            let next = descriptor.next;
            if next >= size {
                return Err(FaultReason::NextOutside { next, size: u32::from(size) });
            }
            descriptor = self.areas.descriptor(next);
        }
        Err(FaultReason::ChainTooLong { limit: u32::from(size) })
    }

    /// Follows the chain in an indirect table. The table's own descriptor has no direction (2.7.5.3.2) and may stand
    /// behind direct ones.
    #[inline]
    fn walk_indirect(&mut self, table: Descriptor, chain: &mut ChainMemory) -> Result<(), FaultReason> {
        if !self.features.indirect {
            return Err(FaultReason::IndirectNotNegotiated);
        }
        if table.has(descriptor_flags::NEXT) {
            return Err(FaultReason::IndirectWithNext);
        }
        let count = indirect_count(table.length_bytes)?;
        let table = indirect_table(self.areas.memory(), table.address, count, &mut self.table_hint)?;
        let mut index = 0;
        for _ in 0..count {
            let Some(descriptor) = table.descriptor(index) else { break };
            if descriptor.has(descriptor_flags::INDIRECT) {
                return Err(FaultReason::NestedIndirect);
            }
            chain.push(descriptor.address, descriptor.length_bytes, descriptor.has(descriptor_flags::WRITE))?;
            if !descriptor.has(descriptor_flags::NEXT) {
                return Ok(());
            }
            index = descriptor.next;
        }
        // The walk ended at a link: out of the table, or back to a descriptor that was seen.
        match index < count {
            true => Err(FaultReason::ChainTooLong { limit: u32::from(count) }),
            false => Err(FaultReason::NextOutside { next: index, size: u32::from(count) }),
        }
    }
}

/// Descriptors in an indirect table of `length_bytes`.
pub(crate) fn indirect_count(length_bytes: u32) -> Result<u16, FaultReason> {
    let limit = MAX_CHAIN_SEGMENTS as u32;
    let possible = length_bytes != 0 && length_bytes.is_multiple_of(16) && length_bytes >> 4 <= limit;
    match u16::try_from(length_bytes >> 4) {
        Ok(count) if possible => Ok(count),
        _ => Err(FaultReason::IndirectLength { length_bytes, limit }),
    }
}

impl DeviceRing for SplitDeviceRing {
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
        // As if it had never been taken: the next owner of the ring finds it first.
        if self.in_flight.remove(head) {
            self.next_avail = self.next_avail.wrapping_sub(1);
        }
    }

    #[inline]
    fn put_used(&mut self, head: u16, written_bytes: u32) {
        if self.in_flight.remove(head) {
            self.areas.set_used_entry(self.next_used, u32::from(head), written_bytes);
            self.next_used = self.next_used.wrapping_add(1);
        }
    }

    #[inline]
    fn publish(&mut self) -> bool {
        let (old, new) = (self.published_used, self.next_used);
        if old == new {
            return false;
        }
        self.areas.publish_used_index(new);
        self.published_used = new;
        // The index must be visible before we read whether the driver waits for it, or both sides would wait.
        full_fence();
        match self.features.event_idx {
            true => {
                let first = !std::mem::replace(&mut self.notified_once, true);
                first || crossed_event(self.areas.used_event(), old, new)
            }
            false => self.areas.avail_flags() & AVAIL_NO_INTERRUPT == 0,
        }
    }

    fn enable_notifications(&mut self) -> bool {
        if self.faulted {
            return false;
        }
        match self.features.event_idx {
            true => self.areas.set_avail_event(self.next_avail),
            false => self.areas.set_used_flags(0),
        }
        // The wish must be visible before we look whether it came too late.
        full_fence();
        self.areas.avail_index() != self.next_avail
    }

    fn disable_notifications(&mut self) {
        match self.features.event_idx {
            // An event in the past is not crossed before the index has come round.
            true => self.areas.set_avail_event(self.next_avail.wrapping_sub(1)),
            false => self.areas.set_used_flags(USED_NO_NOTIFY),
        }
    }

    fn base(&self) -> u32 {
        u32::from(self.next_avail)
    }

    fn in_flight(&self) -> u16 {
        self.in_flight.count
    }

    fn waiting(&self) -> u16 {
        self.seen_avail.wrapping_sub(self.next_avail)
    }
}

/// Which heads are in flight: a bit each.
#[derive(Debug)]
struct HeadSet {
    words: Box<[u64]>,
    count: u16,
}

impl HeadSet {
    fn new(size: u16) -> Self {
        Self { words: vec![0; usize::from(size).div_ceil(64)].into_boxed_slice(), count: 0 }
    }

    fn place(head: u16) -> (usize, u64) {
        (usize::from(head >> 6), 1 << (head & 63))
    }

    #[inline]
    fn contains(&self, head: u16) -> bool {
        let (word, bit) = Self::place(head);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    #[inline]
    fn insert(&mut self, head: u16) {
        let (word, bit) = Self::place(head);
        if let Some(word) = self.words.get_mut(word)
            && *word & bit == 0
        {
            *word |= bit;
            self.count = self.count.wrapping_add(1);
        }
    }

    #[inline]
    fn remove(&mut self, head: u16) -> bool {
        let (word, bit) = Self::place(head);
        match self.words.get_mut(word) {
            Some(word) if *word & bit != 0 => {
                *word &= !bit;
                self.count = self.count.wrapping_sub(1);
                true
            }
            _ => false,
        }
    }
}
