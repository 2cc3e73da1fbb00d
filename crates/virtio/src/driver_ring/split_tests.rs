//! The driver's half against a model of a device that keeps to the specification, and against ones that don't.

use super::*;
use crate::ring_access::{AVAIL_NO_INTERRUPT, Descriptor, RingAddresses, SplitAreas, USED_NO_NOTIFY, crossed_event};
use memory::{GuestMemory, GuestRegion, Mapping, RegionSpec};
use std::sync::Arc;

const BASE: u64 = 0x10_0000;
const TABLES: u64 = BASE + 0x4000;
const STRIDE: usize = 256;

fn memory() -> Arc<GuestMemory> {
    let (_, mapping) = Mapping::anonymous_file(c"driver ring", 1 << 20).unwrap();
    let spec = RegionSpec::new(BASE, 1 << 20).with(|region| region.user_address = 0x9000_0000);
    let region = GuestRegion::of_mapping(spec, Arc::new(mapping), 0).unwrap();
    Arc::new(GuestMemory::new(vec![region]).unwrap())
}

/// What a device sees of the ring, and where it is in it.
struct Device {
    areas: SplitAreas,
    memory: Arc<GuestMemory>,
    next_avail: u16,
    used: u16,
    event_idx: bool,
}

impl Device {
    /// Takes the next chain: its head and its buffers.
    fn pop(&mut self) -> Option<(u16, Vec<Buffer>)> {
        if self.next_avail == self.areas.avail_index() {
            return None;
        }
        let head = self.areas.avail_entry(self.next_avail);
        self.next_avail = self.next_avail.wrapping_add(1);
        let first = self.areas.descriptor(head);
        let mut buffers = Vec::new();
        let mut push = |found: Descriptor| {
            let device_writes = found.has(descriptor_flags::WRITE);
            buffers.push(Buffer { address: found.address, length_bytes: found.length_bytes, device_writes });
            found.has(descriptor_flags::NEXT).then_some(found.next)
        };
        if first.has(descriptor_flags::INDIRECT) {
            assert_eq!(first.flags, descriptor_flags::INDIRECT);
            let entries = first.length_bytes as u16 / 16;
            let at = RingAddresses { table: first.address, avail: BASE + 0x80000, used: BASE + 0x90000 };
            let table = SplitAreas::at_guest_addresses(self.memory.clone(), at, 32).unwrap();
            let mut next = Some(0);
            while let Some(index) = next {
                assert!(index < entries);
                next = push(table.descriptor(index));
            }
            assert_eq!(buffers.len(), usize::from(entries));
        } else {
            let mut next = push(first);
            while let Some(index) = next {
                next = push(self.areas.descriptor(index));
            }
        }
        Some((head, buffers))
    }

    /// Uses `head`; returns whether the driver wants to be called for it.
    fn push(&mut self, head: u32) -> bool {
        self.areas.set_used_entry(self.used, head, 77);
        let old = self.used;
        self.used = old.wrapping_add(1);
        self.areas.publish_used_index(self.used);
        match self.event_idx {
            true => crossed_event(self.areas.used_event(), old, self.used),
            false => self.areas.avail_flags() & AVAIL_NO_INTERRUPT == 0,
        }
    }
}

fn pair(size: u16, event_idx: bool, entries: Option<u16>) -> (DriverRing, Device) {
    let memory = memory();
    let at = RingAddresses { table: BASE, avail: BASE + 0x1000, used: BASE + 0x2000 };
    let areas = || SplitAreas::at_guest_addresses(memory.clone(), at, size).unwrap();
    let indirect = entries.map(|entries| IndirectLayout { address: TABLES, stride_bytes: STRIDE, entries });
    let ring = DriverRing::new(areas(), event_idx, indirect).unwrap();
    (ring, Device { areas: areas(), memory, next_avail: 0, used: 0, event_idx })
}

fn request(id: u64, buffers: usize) -> Vec<Buffer> {
    let writable = buffers / 2;
    let buffer = |index: usize| Buffer {
        address: id * 1000 + index as u64,
        length_bytes: index as u32 + 1,
        device_writes: index >= writable,
    };
    (0..buffers).map(buffer).collect()
}

/// A device that completes out of order, over many turns of the ring: every request arrives as it was added, every
/// completion names the request that it belongs to, and descriptors neither leak nor get mixed up.
fn exchange(event_idx: bool, entries: Option<u16>) {
    let (mut ring, mut device) = pair(8, event_idx, entries);
    let mut expected = vec![None; 8];
    let mut held: Vec<(u16, Vec<Buffer>)> = Vec::new();
    let (mut random, mut next_id, mut done) = (12345u32, 0, 0);
    let mut step = |bound: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) % bound
    };
    while done < 150_000 {
        for _ in 0..step(4) {
            let buffers = request(next_id, 1 + step(4) as usize);
            match ring.add(&buffers) {
                Ok(head) => {
                    assert!(expected[usize::from(head)].replace(buffers).is_none(), "head {head} is in flight");
                    next_id += 1;
                }
                Err(error) => assert_eq!(error, AddError::Full),
            }
        }
        ring.publish();
        while let Some(chain) = device.pop() {
            held.push(chain);
        }
        for _ in 0..step(5).min(held.len() as u32) {
            let (head, buffers) = held.swap_remove(step(held.len() as u32) as usize);
            assert_eq!(expected[usize::from(head)].as_ref(), Some(&buffers));
            device.push(u32::from(head));
        }
        while let Some(used) = ring.pop_used().unwrap() {
            assert_eq!(used.written_bytes, 77);
            assert!(expected[usize::from(used.head)].take().is_some());
            done += 1;
        }
        assert_eq!(usize::from(ring.in_flight()), expected.iter().flatten().count());
    }
}

#[test]
fn direct_requests_go_out_and_come_back_in_any_order() {
    exchange(false, None);
}

#[test]
fn indirect_requests_go_out_and_come_back_in_any_order() {
    exchange(true, Some(8));
}

#[test]
fn a_full_ring_takes_no_more_until_something_comes_back() {
    let (mut ring, mut device) = pair(4, false, None);
    ring.add(&request(1, 3)).unwrap();
    assert_eq!(ring.add(&request(2, 2)), Err(AddError::Full));
    assert_eq!(ring.add(&request(2, 5)), Err(AddError::TooLong { buffers: 5, most: 4 }));
    assert_eq!(ring.add(&[]), Err(AddError::TooLong { buffers: 0, most: 4 }));
    ring.publish();
    let (head, _) = device.pop().unwrap();
    device.push(u32::from(head));
    ring.pop_used().unwrap().unwrap();
    assert!(ring.add(&request(2, 4)).is_ok());

    let (mut ring, _) = pair(4, false, Some(16));
    assert_eq!(ring.max_buffers(), 4, "an indirect chain is no longer than the queue");
    for id in 0..4 {
        ring.add(&request(id, 4)).unwrap();
    }
    assert_eq!(ring.add(&request(4, 1)), Err(AddError::Full));
}

#[test]
fn the_device_is_kicked_once_a_batch_and_only_if_it_asks() {
    let (mut ring, device) = pair(8, false, None);
    assert!(!ring.publish(), "nothing to tell");
    ring.add(&request(1, 1)).unwrap();
    ring.add(&request(2, 1)).unwrap();
    assert!(ring.publish());
    assert!(!ring.publish());
    device.areas.set_used_flags(USED_NO_NOTIFY);
    ring.add(&request(3, 1)).unwrap();
    assert!(!ring.publish());

    let (mut ring, mut device) = pair(8, true, None);
    device.areas.set_avail_event(1);
    ring.add(&request(1, 1)).unwrap();
    assert!(!ring.publish(), "the device waits for the second entry");
    ring.add(&request(2, 1)).unwrap();
    ring.add(&request(3, 1)).unwrap();
    assert!(ring.publish());
    device.pop();
    ring.add(&request(4, 1)).unwrap();
    assert!(!ring.publish(), "the device has not asked again");
}

#[test]
fn what_is_shown_early_is_served_and_kicked_for_at_the_end_of_the_batch() {
    for event_idx in [false, true] {
        let (mut ring, mut device) = pair(8, event_idx, None);
        ring.add(&request(1, 1)).unwrap();
        assert_eq!((device.pop(), ring.unshown()), (None, 1));
        ring.show();
        let (head, _) = device.pop().unwrap();
        device.push(u32::from(head));
        assert_eq!((ring.pop_used().unwrap().unwrap().head, ring.unshown()), (head, 0));
        ring.add(&request(2, 1)).unwrap();
        // The device fell asleep after the first entry, or before it: either way it is told.
        device.areas.set_avail_event(0);
        assert!(ring.is_unpublished() && ring.publish() && !ring.is_unpublished());
    }
}

#[test]
fn callbacks_are_off_while_polling_and_on_before_sleeping() {
    for event_idx in [false, true] {
        let (mut ring, mut device) = pair(8, event_idx, None);
        let mut heads: Vec<u32> = (0..6).map(|id| u32::from(ring.add(&request(id, 1)).unwrap())).collect();
        ring.publish();
        assert!(!device.push(heads.remove(0)), "off from the start");
        assert!(ring.enable_callbacks(), "what came before is seen by the second look");
        ring.disable_callbacks();
        while ring.pop_used().unwrap().is_some() {}
        assert!(!ring.enable_callbacks());
        assert!(device.push(heads.remove(0)), "asleep: the device calls");
        ring.disable_callbacks();
        assert!(!device.push(heads.remove(0)));
        while ring.pop_used().unwrap().is_some() {}
        ring.disable_callbacks();
        assert!(!device.push(heads.remove(0)), "event_idx {event_idx}");
    }
}

#[test]
fn a_used_index_beyond_what_is_in_flight_breaks_the_ring() {
    for jump in [3, 0x8000, 0xffff] {
        let (mut ring, device) = pair(8, false, None);
        ring.add(&request(1, 1)).unwrap();
        ring.add(&request(2, 1)).unwrap();
        ring.publish();
        ring.add(&request(3, 1)).unwrap();
        device.areas.publish_used_index(jump);
        let error = RingError::UsedIndex { from: 0, to: jump, in_flight: 2 };
        assert_eq!(ring.pop_used(), Err(error));
        device.areas.publish_used_index(0);
        assert_eq!((ring.pop_used(), ring.broken()), (Err(error), Some(error)), "it stays broken");
    }
}

#[test]
fn a_used_entry_for_no_request_in_flight_breaks_the_ring() {
    let used = |head: u32| {
        let (mut ring, mut device) = pair(8, true, None);
        let first = ring.add(&request(1, 2)).unwrap();
        let second = ring.add(&request(2, 1)).unwrap();
        assert_eq!((first, second), (0, 2));
        ring.publish();
        assert_eq!(ring.add(&request(3, 1)), Ok(3));
        device.push(head);
        ring.pop_used().map(|used| used.map(|used| used.head))
    };
    assert_eq!(used(2), Ok(Some(2)));
    assert_eq!(used(8), Err(RingError::UsedId { id: 8, size: 8 }));
    assert_eq!(used(0x1_0000), Err(RingError::UsedId { id: 0x1_0000, size: 8 }));
    assert_eq!(used(1), Err(RingError::NotInFlight { head: 1 }), "the middle of a chain");
    assert_eq!(used(3), Err(RingError::NotInFlight { head: 3 }), "added, never published");
    assert_eq!(used(5), Err(RingError::NotInFlight { head: 5 }), "free");
    let (mut ring, mut device) = pair(8, false, Some(4));
    ring.add(&request(1, 2)).unwrap();
    ring.add(&request(2, 2)).unwrap();
    ring.publish();
    device.push(0);
    device.push(0);
    assert!(ring.pop_used().unwrap().is_some());
    assert_eq!(ring.pop_used(), Err(RingError::NotInFlight { head: 0 }), "twice");
}
