//! The device's half under random drivers. Each request of a correct driver must come back right. The bytes of a
//! hostile driver may mean anything. A failure names its seed.
#![allow(clippy::unwrap_used, missing_docs)]

mod dice;
mod model;

use dice::Dice;
use model::{Desc, Driver, GUEST_BYTES, Guest, INDIRECT, NEXT, WRITE};
use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
use ringdisk_virtio::ring_access::{ChainMemory, RingAddresses, SplitAreas};
use ringdisk_virtio::{BlkQueue, DeviceRing, Request, RequestLimits, RingFeatures, SplitDeviceRing};
use std::collections::HashMap;
use std::sync::Arc;

const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000);

fn ring(driver: &Driver<'_>, features: RingFeatures, next_avail: u16) -> SplitDeviceRing {
    let at = RingAddresses { table: driver.table, avail: driver.avail, used: driver.used };
    let areas = SplitAreas::at_guest_addresses(Arc::clone(&driver.guest.memory), at, driver.size).unwrap();
    SplitDeviceRing::new(areas, features, next_avail)
}

/// What a correct driver remembers of a request.
struct Sent {
    kind: u32,
    sector: u64,
    data: u64,
    length: u32,
    written: Vec<u8>,
    status: u64,
    indices: Vec<u16>,
}

/// A correct driver with a random life: any cut of any request, direct or indirect, completions in any order.
struct Life<'a> {
    dice: Dice,
    driver: Driver<'a>,
    free: Vec<u16>,
    sent: HashMap<u16, Sent>,
    features: RingFeatures,
    /// The driver sleeps until it is notified: from this used index on.
    asleep: bool,
}

/// Where a head's request lies: 4 KiB each, from 64 KiB on.
fn page(head: u16) -> u64 {
    0x1_0000 + u64::from(head) * 0x1000
}

impl Life<'_> {
    /// Cuts `length` bytes at `at` into pieces.
    fn cut(&mut self, at: u64, length: u32, writable: bool, pieces: &mut Vec<(u64, u32, bool)>) {
        let (mut at, mut left) = (at, length);
        while left > 0 {
            let take = if self.dice.chance(2) { left } else { 1 + self.dice.below(u64::from(left)) as u32 };
            pieces.push((at, take, writable));
            (at, left) = (at + u64::from(take), left - take);
        }
    }

    fn send(&mut self) {
        let Some(head) = self.free.pop() else { return };
        let kind = [request_type::IN, request_type::OUT, request_type::FLUSH][self.dice.below(3) as usize];
        let sector = self.dice.roll();
        let length = if kind == request_type::FLUSH { 0 } else { 512 * (1 + self.dice.below(4) as u32) };
        let (data, status) = (page(head) + 0x100, page(head) + 0xf00);
        let written = self.dice.bytes(length as usize);
        let guest = self.driver.guest;
        guest.write(page(head), &RequestHeader { kind, priority: 0, sector }.to_bytes());
        guest.write(status, &[0xff]);
        guest.write(data, &written);
        let mut pieces = Vec::new();
        self.cut(page(head), 16, false, &mut pieces);
        if kind == request_type::OUT {
            self.cut(data, length, false, &mut pieces);
        }
        if kind == request_type::IN {
            self.cut(data, length, true, &mut pieces);
        }
        pieces.push((status, 1, true));
        let mut indices = vec![head];
        let direct = pieces.len() <= self.free.len() + 1 && !self.dice.chance(3);
        if direct {
            indices.extend(self.free.drain(self.free.len() - (pieces.len() - 1)..));
            self.driver.put_chain(&indices, &pieces);
        } else if self.features.indirect {
            self.driver.put_indirect(head, page(head) + 0x10_000 * 4 + 0x1, &pieces);
        } else {
            self.free.push(head);
            return;
        }
        self.driver.offer(head);
        self.sent.insert(head, Sent { kind, sector, data, length, written, status, indices });
    }

    fn check_taken(&self, head: u16, request: &Request) {
        let sent = &self.sent[&head];
        match (sent.kind, request) {
            (request_type::IN, Request::Read { sector, data, .. }) => {
                assert_eq!((*sector, data.length_bytes()), (sent.sector, sent.length as usize));
            }
            (request_type::OUT, Request::Write { sector, data, .. }) => {
                assert_eq!((*sector, data.to_vec()), (sent.sector, sent.written.clone()));
            }
            (request_type::FLUSH, Request::Flush) => {}
            (kind, request) => panic!("type {kind} became {request:?}"),
        }
    }

    /// Takes what was used and checks it against what `ended` says.
    fn collect(&mut self, ended: &mut HashMap<u16, (u8, Vec<u8>)>) {
        for (head, length) in self.driver.take_used() {
            let head = u16::try_from(head).unwrap();
            let sent = self.sent.remove(&head).expect("used twice");
            let (status, bytes) = ended.remove(&head).expect("used before it ended");
            let guest = self.driver.guest;
            assert_eq!(guest.read(sent.status, 1), [status]);
            let expected = match (sent.kind, status) {
                (request_type::IN, 0) => sent.length + 1,
                (request_type::IN, _) => 0,
                _ => 1,
            };
            assert_eq!((length, guest.read(sent.data, bytes.len())), (expected, bytes));
            self.free.extend(sent.indices);
        }
    }
}

fn live(seed: u64, guest: &Guest) {
    let mut dice = Dice(seed);
    guest.write(0, &[0; 0x1_0000]);
    let size = 1 << (1 + dice.below(6));
    let mut driver = Driver::new(guest, size);
    // Not far from the end of the index, so that it wraps.
    let begin = 0_u16.wrapping_sub(dice.below(100) as u16);
    (driver.avail_index, driver.used_index) = (begin, begin);
    guest.write(driver.avail + 2, &begin.to_le_bytes());
    guest.write(driver.used + 2, &begin.to_le_bytes());
    let features = RingFeatures { indirect: dice.chance(2), event_idx: dice.chance(2) };
    let mut queue = BlkQueue::new(ring(&driver, features, begin), Arc::clone(&guest.memory), LIMITS);
    let free = (0..size).collect();
    let mut life = Life { dice, driver, free, sent: HashMap::new(), features, asleep: false };
    let mut taken: Vec<(u16, Request)> = Vec::new();
    let mut ended = HashMap::new();
    for _ in 0..300 {
        match life.dice.below(4) {
            0 => (0..=life.dice.below(4)).for_each(|_| life.send()),
            1 => life.driver.publish(),
            2 => {
                while let Some((head, request)) = queue.pop().unwrap_or_else(|fault| panic!("seed {seed}: {fault}")) {
                    life.check_taken(head, &request);
                    taken.push((head, request));
                }
            }
            _ => {
                let count = life.dice.below(taken.len() as u64 + 1);
                for _ in 0..count {
                    let (head, request) = taken.swap_remove(life.dice.below(taken.len() as u64) as usize);
                    let status = if life.dice.chance(5) { Status::IoErr } else { Status::Ok };
                    let mut bytes = Vec::new();
                    if let (Request::Read { data, .. }, Status::Ok) = (&request, status) {
                        bytes = life.dice.bytes(data.length_bytes());
                        data.copy_from_slice(0, &bytes);
                    }
                    drop(request);
                    ended.insert(head, (status as u8, bytes));
                    queue.complete(head, status);
                }
                let notified = queue.publish();
                if life.asleep && count > 0 {
                    assert!(notified, "seed {seed}: the driver sleeps and nobody wakes it");
                }
                if notified || !life.asleep {
                    life.collect(&mut ended);
                    life.asleep = life.dice.chance(2);
                    // Wants to be woken by the next used entry, or by none for a long time.
                    let event = life.driver.used_index.wrapping_sub(u16::from(!life.asleep));
                    life.driver.set_used_event(event);
                    life.driver.set_avail_flags(u16::from(!life.asleep));
                }
            }
        }
    }
    assert_eq!(usize::from(queue.ring().in_flight()), taken.len(), "seed {seed}");
}

#[test]
fn every_request_of_a_correct_driver_comes_back_right() {
    let guest = Guest::new();
    for seed in 0..400 {
        live(seed, &guest);
    }
}

/// Correct chains with a few bytes of the ring changed.
fn damaged_ring(dice: &mut Dice, driver: &mut Driver<'_>) {
    for head in [0, 3] {
        let kinds = [0, 1, 4, 8, 11, 13];
        let header = RequestHeader { kind: kinds[dice.below(6) as usize], priority: 0, sector: dice.below(100) };
        let at = page(head);
        driver.guest.write(at, &header.to_bytes());
        driver.put_chain(
            &[head, head + 1, head + 2],
            &[(at, 16, false), (at + 0x200, 512, header.kind == 0 || header.kind == 8), (at + 0xf00, 1, true)],
        );
        driver.offer(head);
    }
    driver.put_indirect(6, page(6) + 0x800, &[(page(6), 16, false), (page(6) + 0xf00, 1, true)]);
    driver.offer(6);
    driver.publish();
    for _ in 0..dice.below(4) {
        let byte = dice.bytes(1);
        let at = if dice.chance(2) { dice.below(driver.used) } else { page(6) + 0x800 + dice.below(32) };
        driver.guest.write(at, &byte);
    }
}

/// Fills the ring with chains that are nearly right: small random changes find more than pure noise.
fn hostile_ring(dice: &mut Dice, driver: &mut Driver<'_>) {
    let guest = driver.guest;
    for index in 0..driver.size {
        let flags = match dice.below(8) {
            0 => dice.roll() as u16,
            1 | 2 => WRITE,
            3 => INDIRECT,
            4 => WRITE | NEXT,
            _ => NEXT,
        };
        let address = match dice.below(10) {
            0 => dice.roll(),
            1 => GUEST_BYTES as u64 - dice.below(100),
            2 => driver.table + dice.below(0x400),
            _ => 0x1_0000 + dice.below(0x8_0000),
        };
        let length = match dice.below(10) {
            0 => dice.roll() as u32,
            1 | 2 => 1 + dice.below(20) as u32,
            3..=6 => 16 * (1 + dice.below(40) as u32),
            _ => 512 * (1 + dice.below(3) as u32),
        };
        let next = if dice.chance(12) { dice.roll() as u16 } else { dice.below(u64::from(driver.size)) as u16 };
        driver.put_desc(index, Desc { address, length, flags, next });
        if flags == INDIRECT {
            let copies = guest.read(driver.table, 16 * usize::from(driver.size));
            if let Ok(table) = usize::try_from(address)
                && table + copies.len() <= GUEST_BYTES
            {
                guest.write(address, &copies);
            }
        }
    }
    for _ in 0..dice.below(u64::from(driver.size) + 2) {
        let head = if dice.chance(20) { dice.roll() as u16 } else { dice.below(u64::from(driver.size)) as u16 };
        driver.offer(head);
    }
    let header = RequestHeader { kind: dice.below(15) as u32, priority: 0, sector: dice.roll() };
    guest.write(0x1_0000 + 16 * dice.below(0x100), &header.to_bytes());
    if dice.chance(30) {
        driver.avail_index = dice.roll() as u16;
    }
    driver.publish();
}

#[test]
fn a_hostile_driver_never_gets_a_panic_or_a_byte_outside_its_memory() {
    let guest = Guest::new();
    let (mut faults, mut served) = (0_u32, 0_u32);
    for seed in 0..100_000_u64 {
        let mut dice = Dice(seed);
        let mut driver = Driver::new(&guest, 8);
        guest.write(driver.avail, &[0; 64]);
        guest.write(driver.used, &[0; 128]);
        let features = RingFeatures { indirect: !dice.chance(8), event_idx: dice.chance(2) };
        match dice.chance(2) {
            true => hostile_ring(&mut dice, &mut driver),
            false => damaged_ring(&mut dice, &mut driver),
        }
        let mut queue = BlkQueue::new(ring(&driver, features, 0), Arc::clone(&guest.memory), LIMITS);
        let mut heads = Vec::new();
        loop {
            match queue.pop() {
                Ok(Some((head, request))) => {
                    assert!(!heads.contains(&head), "seed {seed}: {head} is in flight twice");
                    // Touch every byte that a request names. One that lies outside would crash.
                    match &request {
                        Request::Read { data, .. } => data.fill(seed as u8),
                        Request::Write { data, .. } => assert!(!data.to_vec().is_empty()),
                        Request::GetId => queue.complete_id(head, "id"),
                        Request::Discard | Request::WriteZeroes => assert!(!queue.ranges(head).is_empty()),
                        Request::Flush | Request::Refused(_) => {}
                        Request::SecureErase | Request::GetLifetime => unreachable!("not offered"),
                    }
                    if !matches!(request, Request::GetId) {
                        heads.push(head);
                    }
                    served += 1;
                    // Scribbled over while in flight.
                    if dice.chance(4) {
                        let at = dice.below(128);
                        guest.write(at, &dice.bytes(16));
                    }
                }
                Ok(None) => break,
                Err(fault) => {
                    assert!(!fault.to_string().is_empty());
                    faults += 1;
                    break;
                }
            }
        }
        for head in heads {
            queue.complete(head, Status::Ok);
        }
        queue.publish();
        assert_eq!(queue.ring().in_flight(), 0, "seed {seed}");
    }
    assert!(faults > 10_000 && served > 10_000, "the dice are loaded: {faults} faults, {served} requests");
}

/// The chains of a ring as another implementation reads them: head, readable and writable bytes.
fn chains_by_virtio_queue(driver: &Driver<'_>) -> Vec<(u16, u64, u64)> {
    use virtio_queue::{Queue, QueueT};
    use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
    let file = std::fs::File::from(driver.guest.file.try_clone().unwrap());
    let range = (GuestAddress(0), GUEST_BYTES, Some(FileOffset::new(file, 0)));
    let memory: GuestMemoryMmap<()> = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
    let mut queue = Queue::new(driver.size).unwrap();
    queue.set_size(driver.size);
    let low = |address: u64| Some(address as u32);
    queue.set_desc_table_address(low(driver.table), Some(0));
    queue.set_avail_ring_address(low(driver.avail), Some(0));
    queue.set_used_ring_address(low(driver.used), Some(0));
    queue.set_ready(true);
    let mut chains = Vec::new();
    while let Some(chain) = queue.pop_descriptor_chain(&memory) {
        let head = chain.head_index();
        let (mut readable, mut writable) = (0, 0);
        for descriptor in chain {
            *if descriptor.is_write_only() { &mut writable } else { &mut readable } += u64::from(descriptor.len());
        }
        chains.push((head, readable, writable));
    }
    chains
}

#[test]
fn another_implementation_reads_the_same_chains() {
    let guest = Guest::new();
    let mut compared = 0;
    for seed in 0..3_000_u64 {
        let mut dice = Dice(seed);
        let mut driver = Driver::new(&guest, 16);
        guest.write(0, &[0; 0x1000]);
        match dice.chance(2) {
            true => hostile_ring(&mut dice, &mut driver),
            false => damaged_ring(&mut dice, &mut driver),
        }
        let mut ring = ring(&driver, RingFeatures { indirect: true, event_idx: false }, 0);
        let mut memory = ChainMemory::new(Arc::clone(&guest.memory), 16);
        let mut ours = Vec::new();
        while let Ok(Some(head)) = ring.pop(&mut memory) {
            ours.push((head, u64::from(memory.readable_bytes()), u64::from(memory.writable_bytes())));
        }
        // Chains that we refuse it ends silently or reads in its own way. Those that we accept must agree.
        if !ours.is_empty() {
            let theirs = chains_by_virtio_queue(&driver);
            assert_eq!(ours, theirs.get(..ours.len()).unwrap_or(&theirs), "seed {seed}");
            compared += ours.len();
        }
    }
    assert!(compared > 2_000, "only {compared} chains were compared");
}
