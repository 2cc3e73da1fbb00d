//! The driver's half against the device's half: every layout and feature, rings of random sizes, completions in random
//! order. A failure names its seed.
#![allow(clippy::unwrap_used, missing_docs)]

mod dice;

use dice::Dice;
use memory::{GuestMemory, GuestRegion, IoBuf, Mapping, RegionSpec};
use ringdisk_virtio::driver_ring::{AddError, Buffer, DriverRing, IndirectLayout, RingError};
use ringdisk_virtio::ring_access::{ChainMemory, PackedAreas, RingAddresses, RingAreas, RingLayout, SplitAreas};
use ringdisk_virtio::{DeviceRing, PackedDeviceRing, RingFeatures, SplitDeviceRing};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

const GUEST_BYTES: usize = 8 << 20;
/// Eight bytes a head: what its request is called.
const NAMES: u64 = 1 << 20;
/// Five descriptors a head.
const TABLES: u64 = 2 << 20;
const TABLE_ENTRIES: u16 = 5;
const DATA: u64 = 6 << 20;

struct Guest {
    mapping: Arc<Mapping>,
    memory: Arc<GuestMemory>,
}

impl Guest {
    fn new() -> Self {
        let (_, mapping) = Mapping::anonymous_file(c"halves", GUEST_BYTES).unwrap();
        let mapping = Arc::new(mapping);
        let spec = RegionSpec::new(0, GUEST_BYTES as u64);
        let region = GuestRegion::of_mapping(spec, Arc::clone(&mapping), 0).unwrap();
        Self { mapping, memory: Arc::new(GuestMemory::new(vec![region]).unwrap()) }
    }

    fn name(&self, head: u16, name: u64) {
        let at = NAMES as usize + 8 * usize::from(head);
        IoBuf::in_mapping(&self.mapping, at, 8, Box::new(())).unwrap().whole().copy_from_slice(0, &name.to_le_bytes());
    }
}

/// One combination of what can be negotiated.
#[derive(Debug, Clone, Copy)]
struct Case {
    layout: RingLayout,
    event_idx: bool,
    indirect: bool,
    size: u16,
}

impl Case {
    fn addresses(self) -> RingAddresses {
        let avail = 16 * u64::from(self.size);
        RingAddresses { table: 0, avail, used: (avail + 6 + 2 * u64::from(self.size)).next_multiple_of(4) }
    }

    fn driver(self, guest: &Guest) -> DriverRing {
        let memory = Arc::clone(&guest.memory);
        let areas = RingAreas::at_guest_addresses(self.layout, memory, self.addresses(), self.size).unwrap();
        let stride_bytes = 16 * usize::from(TABLE_ENTRIES);
        let layout = IndirectLayout { address: TABLES, stride_bytes, entries: TABLE_ENTRIES };
        DriverRing::new(areas, self.event_idx, self.indirect.then_some(layout)).unwrap()
    }

    fn features(self) -> RingFeatures {
        RingFeatures { indirect: self.indirect, event_idx: self.event_idx }
    }

    fn split(self, guest: &Guest) -> SplitDeviceRing {
        let areas = SplitAreas::at_guest_addresses(Arc::clone(&guest.memory), self.addresses(), self.size).unwrap();
        SplitDeviceRing::new(areas, self.features(), 0)
    }

    fn packed(self, guest: &Guest) -> PackedDeviceRing {
        PackedDeviceRing::new(self.packed_areas(guest), self.features(), PackedDeviceRing::NEW).unwrap()
    }

    fn packed_areas(self, guest: &Guest) -> PackedAreas {
        PackedAreas::at_guest_addresses(Arc::clone(&guest.memory), self.addresses(), self.size).unwrap()
    }
}

/// All that can be negotiated, with rings of `size` or the next power of two.
fn cases(size: impl Fn() -> u16) -> Vec<Case> {
    let mut cases = Vec::new();
    for layout in [RingLayout::Split, RingLayout::Packed] {
        for bits in 0..4 {
            let size = if layout == RingLayout::Split { size().next_power_of_two() } else { size() };
            cases.push(Case { layout, event_idx: bits & 1 != 0, indirect: bits & 2 != 0, size });
        }
    }
    cases
}

/// A request as the driver remembers it: its name, and how many bytes the device may read and write.
type Sent = (u64, u32, u32);

/// The name's buffer, and up to four of data.
fn buffers(head: u16, roll: u64, most: u16) -> (Vec<Buffer>, u32, u32) {
    let name = Buffer { address: NAMES + 8 * u64::from(head), length_bytes: 8, device_writes: false };
    let (mut buffers, mut readable, mut writable) = (vec![name], 8, 0);
    let more = (roll % 5).min(u64::from(most) - 1) as u32;
    for index in 0..more {
        let length_bytes = 1 + (roll >> 8) as u32 % 1000 + index;
        let device_writes = index >= (roll >> 20) as u32 % 5;
        *if device_writes { &mut writable } else { &mut readable } += length_bytes;
        buffers.push(Buffer { address: DATA + (roll >> 30) % 0x1000, length_bytes, device_writes });
    }
    (buffers, readable, writable)
}

/// Many turns of a ring, each side in steps of random length, each sometimes asleep: nothing is lost, mixed up or said
/// twice, and nobody sleeps while there is work for him.
fn exchange<R: DeviceRing>(guest: &Guest, case: Case, mut driver: DriverRing, mut device: R, seed: u64) {
    let mut chain = ChainMemory::new(Arc::clone(&guest.memory), case.size);
    let mut dice = Dice(seed);
    let mut sent: HashMap<u16, Sent> = HashMap::new();
    let mut taken: Vec<u16> = Vec::new();
    let (mut device_sleeps, mut driver_sleeps) = (false, false);
    let (mut name, mut done) = (0_u64, 0_u64);
    let burst = usize::from(case.size).min(2000) + 2;
    let enough = u64::from(case.size) * 3 + 500;
    device.disable_notifications();
    while done < enough {
        for _ in 0..dice.index(burst) {
            let Some(head) = driver.next_head() else { break };
            let (buffers, readable, writable) = buffers(head, dice.roll(), driver.max_buffers());
            guest.name(head, name);
            match driver.add(&buffers) {
                Ok(added) => assert_eq!(added, head),
                Err(error) => {
                    assert_eq!(error, AddError::Full, "{case:?}, seed {seed}");
                    break;
                }
            }
            assert!(sent.insert(head, (name, readable, writable)).is_none(), "{case:?}, seed {seed}: {head} is out");
            name += 1;
            if dice.index(9) == 0 {
                driver.show();
            }
        }
        let added = driver.is_unpublished();
        let kick = driver.publish();
        assert!(kick || !added || !device_sleeps, "{case:?}, seed {seed}: the device sleeps and nobody kicks it");
        if kick && std::mem::take(&mut device_sleeps) {
            device.disable_notifications();
        }
        if !device_sleeps {
            let most = dice.index(burst * 2);
            while taken.len() < most
                && let Some(head) = device.pop(&mut chain).unwrap()
            {
                let (name, readable, writable) = sent[&head];
                let seen = (u64::from_le_bytes(chain.copy_header().unwrap()), chain.readable_bytes());
                assert_eq!((seen, chain.writable_bytes()), ((name, readable), writable), "{case:?}, seed {seed}");
                taken.push(head);
            }
        }
        for _ in 0..dice.index(taken.len() + 1) {
            let head = taken.swap_remove(dice.index(taken.len()));
            device.put_used(head, u32::from(head) + 1);
        }
        assert_eq!(usize::from(device.in_flight()), taken.len());
        let (before, call) = (driver.has_used(), device.publish());
        let news = driver.has_used() && !before;
        assert!(call || !news || !driver_sleeps, "{case:?}, seed {seed}: the driver sleeps and nobody calls it");
        if call || !driver_sleeps {
            driver.disable_callbacks();
            driver_sleeps = false;
            for _ in 0..dice.index(burst * 2) {
                let Some(used) = driver.pop_used().unwrap() else { break };
                assert_eq!(used.written_bytes, u32::from(used.head) + 1);
                assert!(sent.remove(&used.head).is_some(), "{case:?}, seed {seed}: {} came twice", used.head);
                done += 1;
            }
        }
        assert_eq!(usize::from(driver.in_flight()), sent.len());
        if dice.index(2) == 0 && !driver_sleeps {
            driver_sleeps = !driver.enable_callbacks();
        }
        if dice.index(2) == 0 && !device_sleeps && taken.is_empty() {
            device_sleeps = !device.enable_notifications();
        }
    }
}

fn exchange_either(guest: &Guest, case: Case, seed: u64) {
    // First: it empties the ring.
    let driver = case.driver(guest);
    match case.layout {
        RingLayout::Split => exchange(guest, case, driver, case.split(guest), seed),
        RingLayout::Packed => exchange(guest, case, driver, case.packed(guest), seed),
    }
}

#[test]
fn every_request_arrives_and_comes_back_whatever_was_negotiated() {
    let guest = Guest::new();
    for seed in 0..25_u64 {
        let dice = std::cell::RefCell::new(Dice(seed));
        // Small rings wrap often; each power of two is as likely as any other.
        let size = || {
            let mut dice = dice.borrow_mut();
            let most = 2 << dice.index(10);
            2 + dice.index(most - 1) as u16
        };
        cases(size).into_iter().for_each(|case| exchange_either(&guest, case, seed));
    }
}

#[test]
fn the_largest_rings_work_too() {
    let guest = Guest::new();
    for layout in [RingLayout::Split, RingLayout::Packed] {
        let case = Case { layout, event_idx: true, indirect: true, size: 32768 };
        exchange_either(&guest, case, 1);
    }
    exchange_either(&guest, Case { layout: RingLayout::Packed, event_idx: true, indirect: false, size: 32767 }, 2);
}

fn sleep_until_woken(bell: &Receiver<()>, who: &str, case: Case) {
    if bell.recv_timeout(Duration::from_secs(60)).is_err() {
        panic!("{case:?}: the {who} sleeps and nobody wakes it");
    }
}

fn ring_bell(bell: &SyncSender<()>) {
    // A bell that rings already wakes, too.
    let _ = bell.try_send(());
}

/// Serves `total` requests as a device on a thread of its own, which sleeps whenever it finds nothing.
fn serve<R: DeviceRing>(
    mut device: R,
    memory: Arc<GuestMemory>,
    (case, total): (Case, u32),
    bell: &Receiver<()>,
    call: &SyncSender<()>,
) {
    let mut chain = ChainMemory::new(memory, case.size);
    let mut served = 0;
    device.disable_notifications();
    while served < total {
        let mut batch = 0;
        while batch < 4
            && let Some(head) = device.pop(&mut chain).unwrap()
        {
            device.put_used(head, 1);
            batch += 1;
        }
        served += batch;
        if device.publish() {
            ring_bell(call);
        }
        if batch == 0 && !device.enable_notifications() {
            sleep_until_woken(bell, "device", case);
            device.disable_notifications();
        }
    }
}

/// On two processors the stores and loads around "publish" and "does the other side want to know" overtake each other
/// unless both sides have their fences: then both sleep.
#[test]
fn two_threads_that_sleep_whenever_they_can_wake_each_other() {
    const TOTAL: u32 = 60_000;
    for case in cases(|| 3) {
        let guest = Guest::new();
        let mut driver = case.driver(&guest);
        let ((kick, kicked), (call, called)) = (sync_channel(1), sync_channel(1));
        std::thread::scope(|scope| {
            let memory = Arc::clone(&guest.memory);
            match case.layout {
                RingLayout::Split => {
                    let device = case.split(&guest);
                    scope.spawn(move || serve(device, memory, (case, TOTAL), &kicked, &call));
                }
                RingLayout::Packed => {
                    let device = case.packed(&guest);
                    scope.spawn(move || serve(device, memory, (case, TOTAL), &kicked, &call));
                }
            }
            let (mut added, mut ended) = (0, 0);
            let request = [Buffer { address: DATA, length_bytes: 1, device_writes: true }];
            while ended < TOTAL {
                while added < TOTAL && driver.add(&request).is_ok() {
                    added += 1;
                }
                if driver.publish() {
                    ring_bell(&kick);
                }
                let before = ended;
                while driver.pop_used().unwrap().is_some() {
                    ended += 1;
                }
                if ended == before && !driver.enable_callbacks() {
                    sleep_until_woken(&called, "driver", case);
                    driver.disable_callbacks();
                }
            }
        });
    }
}

#[test]
fn a_packed_ring_breaks_for_good_when_the_device_uses_what_it_cannot_have() {
    let guest = Guest::new();
    let case = Case { layout: RingLayout::Packed, event_idx: true, indirect: false, size: 5 };
    let request = [Buffer { address: DATA, length_bytes: 1, device_writes: true }; 2];
    let used = |id: u16| {
        let mut driver = case.driver(&guest);
        let areas = case.packed_areas(&guest);
        assert_eq!(driver.add(&request), Ok(0));
        driver.publish();
        assert_eq!(driver.add(&request), Ok(1));
        areas.set_used(0, id, 1);
        areas.publish_flags(0, 1 << 7 | 1 << 15);
        let first = driver.pop_used().map(|used| used.map(|used| used.head));
        assert_eq!(driver.broken().is_some(), first.is_err());
        if first.is_err() {
            areas.publish_flags(0, 0);
            assert_eq!(driver.pop_used().map(|used| used.map(|used| used.head)), first, "it stays broken");
        }
        first
    };
    assert_eq!(used(0), Ok(Some(0)));
    assert_eq!(used(1), Err(RingError::NotInFlight { head: 1 }), "added, never shown");
    assert_eq!(used(2), Err(RingError::NotInFlight { head: 2 }), "free");
    assert_eq!(used(5), Err(RingError::UsedId { id: 5, size: 5 }));
    assert_eq!(used(0xffff), Err(RingError::UsedId { id: 0xffff, size: 5 }));
    // Used twice: the second time it is free.
    let mut driver = case.driver(&guest);
    let areas = case.packed_areas(&guest);
    driver.add(&request).unwrap();
    driver.publish();
    for index in [0, 2] {
        areas.set_used(index, 0, 1);
        areas.publish_flags(index, 1 << 7 | 1 << 15);
    }
    assert!(driver.pop_used().unwrap().is_some());
    assert_eq!(driver.pop_used(), Err(RingError::NotInFlight { head: 0 }));
}

#[test]
fn a_full_packed_ring_takes_no_more_until_something_comes_back() {
    let guest = Guest::new();
    let case = Case { layout: RingLayout::Packed, event_idx: false, indirect: false, size: 5 };
    let mut driver = case.driver(&guest);
    let mut device = case.packed(&guest);
    let mut chain = ChainMemory::new(Arc::clone(&guest.memory), 5);
    let request = [Buffer { address: DATA, length_bytes: 1, device_writes: true }; 6];
    driver.add(&request[..3]).unwrap();
    assert_eq!(driver.add(&request[..3]), Err(AddError::Full));
    assert_eq!(driver.add(&request), Err(AddError::TooLong { buffers: 6, most: 5 }));
    driver.add(&request[..2]).unwrap();
    assert_eq!((driver.next_head(), driver.add(&request[..1])), (None, Err(AddError::Full)));
    assert!(driver.publish(), "a device that says nothing wants to be kicked");
    device.disable_notifications();
    let head = device.pop(&mut chain).unwrap().unwrap();
    device.put_used(head, 0);
    device.publish();
    assert_eq!(driver.pop_used().unwrap().map(|used| used.head), Some(head));
    driver.add(&request[..3]).unwrap();
    assert!(!driver.publish());
}
