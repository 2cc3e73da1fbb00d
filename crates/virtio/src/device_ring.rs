//! The device's half of a ring: takes chains, gives them back, and decides about notifications.
//!
//! Queue code is generic over [`DeviceRing`], so that another layout of the ring changes nothing above.

use crate::fault::{FaultReason, RingFault};
use crate::ring_access::{
    AVAIL_NO_INTERRUPT, ChainMemory, Descriptor, MAX_CHAIN_SEGMENTS, SplitAreas, USED_NO_NOTIFY, crossed_event,
    descriptor_flags, full_fence, indirect_table,
};

/// The interface of a ring for queue code, whatever the ring's layout.
pub trait DeviceRing {
    /// Returns the number of descriptors. Heads are below it.
    fn size(&self) -> u16;

    /// Takes the next available chain into `chain` and returns its head; `None` if there is none. After a fault nothing
    /// is taken any more.
    fn pop(&mut self, chain: &mut ChainMemory) -> Result<Option<u16>, RingFault>;

    /// Stops the ring, because the chain taken last cannot be a request. The chain counts as not taken.
    fn stop_at(&mut self, head: u16);

    /// Gives a chain back, whose first `written_bytes` writable bytes were written. It is invisible to the driver
    /// before [`DeviceRing::publish`].
    fn put_used(&mut self, head: u16, written_bytes: u32);

    /// Makes the chains that were given back visible. Returns whether the driver wants to be notified. Call it once a
    /// batch.
    fn publish(&mut self) -> bool;

    /// Asks for notifications of new chains. Returns whether there are some already.
    fn enable_notifications(&mut self) -> bool;

    /// Turns notifications off, because the device looks by itself.
    fn disable_notifications(&mut self);

    /// Returns where the ring goes on, which a front end hands to the ring's next owner. The format is vhost-user's.
    /// For a split ring, it is the index of the next entry to take. For a packed one, the lower half has fifteen bits
    /// of the next descriptor to take and its wrap counter; the upper half has the same for the next descriptor to use.
    fn base(&self) -> u32;

    /// Returns how many chains are taken and not given back.
    fn in_flight(&self) -> u16;

    /// Returns how many chains are known to wait. There may be more.
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

/// The negotiated features of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingFeatures {
    /// INDIRECT_DESC.
    pub indirect: bool,
    /// EVENT_IDX.
    pub event_idx: bool,
}

impl RingFeatures {
    /// Picks the ring's features out of the negotiated bits. The layout is [`crate::ring_access::RingLayout`].
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
    /// The driver's index when it was last read. Entries up to here can be taken without looking again.
    seen_avail: u16,
    /// Next entry of the used ring to fill.
    next_used: u16,
    /// The used index that the driver sees. The last decision about a notification was made at it.
    published_used: u16,
    /// A batch was published before, so the driver knows about `published_used`. With EVENT_IDX, the first batch always
    /// notifies.
    notified_once: bool,
    faulted: bool,
    in_flight: HeadSet,
    /// Memory region in which indirect tables were found last.
    table_hint: usize,
}

impl SplitDeviceRing {
    /// Starts on a ring, and takes chains from `next_avail` on. The used index goes on from the ring's own, which an
    /// earlier user of the ring published.
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

    /// Returns the ring's memory.
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
        if !self.in_flight.insert(head) {
            return Err(FaultReason::HeadInFlight.in_chain(head));
        }
        chain.begin();
        if let Err(reason) = self.walk(head, chain) {
            self.in_flight.remove(head);
            return Err(reason.in_chain(head));
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Follows the chain. Reads each descriptor once, so that the checked value is the used one.
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

    /// Follows the chain in an indirect table. The table's own descriptor has no direction (2.7.5.3.2) and may follow
    /// direct ones.
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

/// Returns the number of descriptors in an indirect table of `length_bytes`.
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
        // The chain counts as never taken: the next owner of the ring finds it first.
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
            // An event in the past is not crossed before the index has wrapped around.
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

/// The heads that are in flight, one bit for each.
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

    /// Adds a head. Returns whether it was not there.
    #[inline]
    fn insert(&mut self, head: u16) -> bool {
        let (word, bit) = Self::place(head);
        match self.words.get_mut(word) {
            Some(word) if *word & bit == 0 => {
                *word |= bit;
                self.count = self.count.wrapping_add(1);
                true
            }
            _ => false,
        }
    }

    /// Takes a head out. Returns whether it was there.
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
