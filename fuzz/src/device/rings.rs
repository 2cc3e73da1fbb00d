//! The device's half of a ring: a correct one, and the bare ring for breaking the rules.

use super::wire::Told;
use arbitrary::{Result, Unstructured};
use std::sync::Arc;
use virtio::blk::Status;
use virtio::ring_access::{EventWish, PackedAreas, RingAreas, RingLayout, SharedWords, SplitAreas};
use virtio::{BlkQueue, DeviceRing, PackedDeviceRing, Request, RequestLimits, RingFeatures, SplitDeviceRing};

const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000).with_erases(4, 100).with_lifetime();

/// Returns what a ring's device fills reads with.
pub(super) fn byte_of(index: usize) -> u8 {
    0x50 + index as u8
}

/// The device of one ring.
pub(super) struct Device {
    index: usize,
    /// Which start of the ring it serves.
    starts: u32,
    good: BlkQueue<Box<dyn DeviceRing>>,
    held: Vec<(u16, Request)>,
    areas: RingAreas,
    size: u16,
    /// All memory that the driver shares.
    words: SharedWords,
    shared_bytes: usize,
}

impl Device {
    pub(super) fn new(told: &Told, index: usize) -> Option<Self> {
        let ring = told.rings.get(index)?;
        let (memory, setup) = (told.memory.clone()?, ring.setup?);
        let layout = RingLayout::from_bits(told.features);
        let areas =
            || RingAreas::at_guest_addresses(layout, Arc::clone(&memory), setup.guest_addresses, setup.size).ok();
        let features = RingFeatures::from_bits(told.features);
        let device_ring: Box<dyn DeviceRing> = match areas()? {
            RingAreas::Split(areas) => Box::new(SplitDeviceRing::new(areas, features, setup.first_position)),
            RingAreas::Packed(areas) => {
                Box::new(PackedDeviceRing::new(areas, features, setup.first_position.into()).ok()?)
            }
        };
        let (start, shared_bytes) = (told.range.0, told.range.1 as usize);
        Some(Self {
            index,
            starts: ring.starts,
            good: BlkQueue::new(device_ring, Arc::clone(&memory), LIMITS),
            held: Vec::new(),
            areas: areas()?,
            size: setup.size,
            words: SharedWords::at_guest_address(Arc::clone(&memory), start, shared_bytes).ok()?,
            shared_bytes,
        })
    }

    /// Begins anew if its ring was started again. Returns whether the ring runs.
    pub(super) fn follow(&mut self, told: &Told) -> bool {
        let ring = &told.rings[self.index];
        if ring.starts != self.starts {
            *self = Self::new(told, self.index).expect("as at the first start");
        }
        ring.runs
    }

    /// Takes at most so many requests. An honest device finds nothing wrong with them.
    fn take(&mut self, most: usize, is_honest: bool) {
        for _ in 0..most {
            match self.good.pop() {
                Ok(Some((head, request))) => {
                    let is_refused = matches!(request, Request::Refused(_));
                    assert!(!is_refused || !is_honest, "the driver asks for what is not served: {request:?}");
                    self.held.push((head, request));
                }
                Ok(None) => return,
                Err(fault) => {
                    assert!(!is_honest, "the driver breaks the rules of its ring: {fault}");
                    return;
                }
            }
        }
    }

    /// Ends a request that it has. Data come as late as they may.
    fn end(&mut self, at: usize, status: Status) {
        let (head, request) = self.held.swap_remove(at);
        if let (Request::Read { data, .. }, Status::Ok) = (&request, status) {
            data.fill(byte_of(self.index));
        }
        drop(request);
        self.good.complete(head, status);
    }

    /// Takes requests and ends some. Returns whether the driver wants to be called.
    pub(super) fn serve(&mut self, u: &mut Unstructured<'_>, is_honest: bool) -> Result<bool> {
        self.take(u.int_in_range(0..=4)?, is_honest);
        while !self.held.is_empty() && u.ratio(3u8, 4)? {
            let at = u.choose_index(self.held.len())?;
            self.end(at, *u.choose(&[Status::Ok, Status::Ok, Status::Ok, Status::IoErr, Status::Unsupported])?);
        }
        Ok(u.ratio(3u8, 4)? && self.good.publish())
    }

    /// Takes and ends all requests. Returns whether the driver wants to be called.
    pub(super) fn end_all(&mut self, is_honest: bool) -> bool {
        self.take(usize::from(self.size) + 1, is_honest);
        while !self.held.is_empty() {
            self.end(0, Status::Ok);
        }
        self.good.publish()
    }

    /// Whether the driver shows it a request that it has not taken.
    pub(super) fn has_more(&mut self) -> bool {
        let has_more = self.good.ring_mut().enable_notifications();
        self.good.ring_mut().disable_notifications();
        has_more
    }

    pub(super) fn misbehave(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if u.ratio(1u8, 3)? {
            // The rings, the headers and the status bytes come first.
            let end = if u.arbitrary()? { 8192 } else { self.shared_bytes };
            let at = u.int_in_range(0..=end.min(self.shared_bytes) - 1)?;
            self.words.set_byte(at, u.arbitrary()?);
            return Ok(());
        }
        match &self.areas {
            RingAreas::Split(areas) => misuse_split(u, areas, self.size),
            RingAreas::Packed(areas) => misuse_packed(u, areas, self.size),
        }
    }
}

/// Returns a number that is likely valid for a ring of `size`.
fn near(u: &mut Unstructured<'_>, size: u16) -> Result<u16> {
    if u.ratio(1u8, 8)? { u.arbitrary() } else { u.int_in_range(0..=size) }
}

fn written(u: &mut Unstructured<'_>) -> Result<u32> {
    if u.ratio(1u8, 4)? { u.arbitrary() } else { Ok(*u.choose(&[0, 1, 512, 513, 4096, 4097])?) }
}

fn misuse_split(u: &mut Unstructured<'_>, areas: &SplitAreas, size: u16) -> Result<()> {
    match u.int_in_range(0..=4)? {
        0 | 1 => {
            let id = if u.ratio(1u8, 8)? { u.arbitrary()? } else { near(u, size)?.into() };
            areas.set_used_entry(areas.used_index(), id, written(u)?);
            areas.publish_used_index(areas.used_index().wrapping_add(1));
        }
        2 => areas.publish_used_index(areas.used_index().wrapping_add(near(u, size)?)),
        3 => areas.set_used_flags(u.arbitrary()?),
        _ => areas.set_avail_event(u.arbitrary()?),
    }
    Ok(())
}

fn misuse_packed(u: &mut Unstructured<'_>, areas: &PackedAreas, size: u16) -> Result<()> {
    let index = near(u, size)? % size;
    match u.int_in_range(0..=4)? {
        0 | 1 => {
            areas.set_used(index, near(u, size)?, written(u)?);
            // Used, with either wrap counter.
            areas.publish_flags(index, if u.arbitrary()? { 0x8080 } else { 0 });
        }
        2 => areas.publish_flags(index, u.arbitrary()?),
        3 => areas.set_device_wish(EventWish::At(u.arbitrary()?)),
        _ => areas.set_device_wish(if u.arbitrary()? { EventWish::Always } else { EventWish::Never }),
    }
    Ok(())
}
