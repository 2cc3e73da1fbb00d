//! The device's half of a packed ring against a driver written from the specification.
#![allow(clippy::unwrap_used, missing_docs)]

mod dice;
mod model;

use dice::Dice;
use model::packed::PackedDriver;
use model::{Guest, INDIRECT, NEXT, WRITE};
use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
use ringdisk_virtio::ring_access::{LayoutError, PackedAreas, RingAddresses};
use ringdisk_virtio::{
    BlkQueue, DeviceRing, FaultReason, PackedDeviceRing, Request, RequestLimits, RingFault, RingFeatures,
};
use std::sync::Arc;

const HEADER: u64 = 0x1_0000;
const STATUS: u64 = 0x1_1000;
const DATA: u64 = 0x2_0000;
const TABLE: u64 = 0x3_0000;
const READ: [(u64, u32, bool); 3] = [(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)];

const BOTH: RingFeatures = RingFeatures { indirect: true, event_idx: true };
const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000);

fn areas(driver: &PackedDriver<'_>) -> PackedAreas {
    let at = RingAddresses { table: driver.ring, avail: driver.driver_event, used: driver.device_event };
    PackedAreas::at_guest_addresses(Arc::clone(&driver.guest.memory), at, driver.size).unwrap()
}

fn device_from(driver: &PackedDriver<'_>, features: RingFeatures, base: u32) -> BlkQueue<PackedDeviceRing> {
    let ring = PackedDeviceRing::new(areas(driver), features, base).unwrap();
    BlkQueue::new(ring, Arc::clone(&driver.guest.memory), LIMITS)
}

fn device(driver: &PackedDriver<'_>, features: RingFeatures) -> BlkQueue<PackedDeviceRing> {
    device_from(driver, features, PackedDeviceRing::NEW)
}

fn put_header(guest: &Guest, kind: u32, sector: u64) {
    guest.write(HEADER, &RequestHeader { kind, priority: 0, sector }.to_bytes());
}

#[test]
fn a_read_is_filled_and_given_back_under_the_id_of_its_last_descriptor() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 77);
    guest.write(STATUS, &[0xff]);
    let mut driver = PackedDriver::new(&guest, 7);
    let mut queue = device(&driver, BOTH);
    driver.offer(5, &READ);
    let Some((5, Request::Read { sector: 77, data, .. })) = queue.pop().unwrap() else { panic!("no read") };
    data.fill(0x5a);
    drop(data);
    assert!(queue.pop().unwrap().is_none());
    queue.complete(5, Status::Ok);
    assert_eq!(driver.take_used(), [], "nothing is visible before the batch is published");
    assert!(queue.publish());
    assert_eq!(driver.take_used(), [(5, 513, true)]);
    assert_eq!((guest.read(DATA, 512), guest.read(STATUS, 1)), (vec![0x5a; 512], vec![0]));
}

#[test]
fn chains_go_round_a_ring_of_any_size_and_come_back_in_any_order() {
    for size in [5, 6, 7, 13] {
        let guest = Guest::new();
        put_header(&guest, request_type::FLUSH, 0);
        let mut driver = PackedDriver::new(&guest, size);
        let mut queue = device(&driver, BOTH);
        for turn in 0..50_u16 {
            let (first, second) = (turn % 3, 3 + turn % 2);
            driver.offer(first, &READ);
            driver.offer_indirect(second, TABLE, &READ);
            let taken: Vec<u16> = std::iter::from_fn(|| queue.pop().unwrap().map(|(head, _)| head)).collect();
            assert_eq!(taken, [first, second], "size {size}, turn {turn}");
            assert_eq!(queue.ring().in_flight(), 2);
            queue.complete(second, Status::IoErr);
            queue.complete(first, Status::Ok);
            queue.publish();
            assert_eq!(driver.take_used().iter().map(|used| used.0).collect::<Vec<_>>(), [second, first]);
        }
    }
}

#[test]
fn a_ring_goes_on_elsewhere_where_it_stopped() {
    let guest = Guest::new();
    put_header(&guest, request_type::FLUSH, 0);
    let mut driver = PackedDriver::new(&guest, 6);
    let mut base = PackedDeviceRing::NEW;
    for turn in 0..20 {
        let mut queue = device_from(&driver, BOTH, base);
        driver.offer(turn % 6, &READ);
        let (head, _) = queue.pop().unwrap().unwrap();
        assert!(queue.pop().unwrap().is_none(), "turn {turn}");
        queue.complete(head, Status::Ok);
        queue.publish();
        assert_eq!(driver.take_used().len(), 1, "turn {turn}");
        base = queue.ring().base();
        assert_eq!(base >> 16, base & 0xffff, "nothing is in flight");
        // Some front ends say only where available descriptors go on.
        base &= if turn % 2 == 0 { 0xffff } else { u32::MAX };
    }
}

#[test]
fn a_ring_cannot_go_on_outside_itself_or_with_more_in_flight_than_it_holds() {
    let guest = Guest::new();
    let driver = PackedDriver::new(&guest, 6);
    let begin = |base| PackedDeviceRing::new(areas(&driver), BOTH, base).map(|ring| ring.base());
    assert_eq!(begin(0x8003), Ok(0x8003_8003));
    assert_eq!(begin(0x8005_0005), Ok(0x8005_0005), "a full ring");
    for base in [0x8006, 0x8006_8000, 0x8003_8002, 0x8002_0003, 0x7fff_7fff] {
        assert_eq!(begin(base), Err(LayoutError::Base { base, size: 6 }), "{base:#x}");
    }
}

#[test]
fn a_front_end_that_begins_at_zero_means_a_new_ring_unless_the_ring_was_full_once() {
    let guest = Guest::new();
    put_header(&guest, request_type::FLUSH, 0);
    let mut driver = PackedDriver::new(&guest, 4);
    driver.offer(0, &READ);
    let mut queue = device_from(&driver, BOTH, 0);
    let serve = |driver: &mut PackedDriver<'_>, queue: &mut BlkQueue<PackedDeviceRing>| {
        let (head, _) = queue.pop().unwrap().unwrap();
        queue.complete(head, Status::Ok);
        queue.publish();
        assert_eq!(driver.take_used().len(), 1);
    };
    serve(&mut driver, &mut queue);
    driver.offer_indirect(1, TABLE, &READ);
    serve(&mut driver, &mut queue);
    assert_eq!(queue.ring().base(), 0);
    let mut queue = device_from(&driver, BOTH, 0);
    assert_eq!(queue.ring().base(), 0);
    driver.offer(2, &READ);
    serve(&mut driver, &mut queue);
}

/// Puts descriptors as `build` says and returns what stops the queue.
fn fault_of(features: RingFeatures, build: impl FnOnce(&mut PackedDriver<'_>)) -> RingFault {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = PackedDriver::new(&guest, 6);
    let mut queue = device(&driver, features);
    build(&mut driver);
    let fault = loop {
        match queue.pop() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the queue did not stop"),
            Err(fault) => break fault,
        }
    };
    assert!(matches!(queue.pop(), Ok(None)), "a stopped queue takes nothing");
    assert!(!queue.ring_mut().enable_notifications());
    fault
}

#[test]
fn what_no_driver_does_is_a_fault_with_its_reason() {
    use FaultReason as F;
    let loops = fault_of(BOTH, |driver| (0..6).for_each(|_| driver.put_next(HEADER, 16, 0, NEXT)));
    assert_eq!(loops.reason, F::ChainTooLong { limit: 6 });
    let outside = fault_of(BOTH, |driver| driver.offer(6, &READ));
    assert_eq!(outside.reason, F::IdOutside { id: 6, size: 6 });
    let twice = fault_of(BOTH, |driver| {
        driver.offer(1, &READ);
        driver.offer(1, &READ);
    });
    assert_eq!(twice, RingFault { head: Some(1), reason: F::HeadInFlight });
    let order = fault_of(BOTH, |driver| driver.offer(0, &[READ[1], READ[0]]));
    assert_eq!(order.reason, F::WrongOrder);
    let zero = fault_of(BOTH, |driver| driver.offer(0, &[READ[0], (DATA, 0, true), READ[2]]));
    assert_eq!(zero.reason, F::ZeroLength);
    let memory = fault_of(BOTH, |driver| driver.offer(0, &[READ[0], (u64::MAX, 512, true), READ[2]]));
    assert!(matches!(memory.reason, F::Memory(_)));
    let header = fault_of(BOTH, |driver| driver.offer(3, &[(HEADER, 15, false), READ[2]]));
    assert_eq!(header, RingFault { head: Some(3), reason: F::HeaderTooShort { readable_bytes: 15 } });
}

#[test]
fn a_chain_over_descriptors_that_the_device_still_has_is_a_fault() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = PackedDriver::new(&guest, 6);
    let mut queue = device(&driver, BOTH);
    driver.offer_indirect(0, TABLE, &READ);
    driver.offer_indirect(1, TABLE, &READ);
    assert!(queue.pop().unwrap().is_some() && queue.pop().unwrap().is_some());
    driver.offer(2, &[READ[0], READ[0], READ[1], READ[1], READ[2]]);
    assert_eq!(queue.pop().unwrap_err().reason, FaultReason::TooManyInFlight { size: 6 });
}

#[test]
fn impossible_indirect_tables_are_faults() {
    use FaultReason as F;
    let table = |length, flags| move |driver: &mut PackedDriver<'_>| driver.put_next(TABLE, length, 0, flags);
    assert_eq!(fault_of(RingFeatures::default(), table(48, INDIRECT)).reason, F::IndirectNotNegotiated);
    assert_eq!(fault_of(BOTH, table(48, INDIRECT | NEXT)).reason, F::IndirectWithNext);
    for length_bytes in [0, 47, 1024 * 16 + 16, 0xffff_fff0] {
        let reason = fault_of(BOTH, table(length_bytes, INDIRECT)).reason;
        assert_eq!(reason, F::IndirectLength { length_bytes, limit: 1024 });
    }
    let nested = fault_of(BOTH, |driver| {
        driver.offer_indirect(0, TABLE, &READ);
        driver.guest.write(TABLE + 14, &INDIRECT.to_le_bytes());
    });
    assert_eq!(nested.reason, F::NestedIndirect);
    let outside = fault_of(BOTH, |driver| driver.put_next(model::GUEST_BYTES as u64 - 16, 48, 0, INDIRECT));
    assert!(matches!(outside.reason, F::Memory(_)));
}

#[test]
fn a_chain_that_stops_the_queue_is_found_again_by_the_next_owner() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = PackedDriver::new(&guest, 6);
    let mut queue = device(&driver, BOTH);
    driver.offer(0, &READ);
    driver.offer(4, &[READ[0], (DATA, 512, false)]);
    assert!(matches!(queue.pop(), Ok(Some((0, _)))));
    assert_eq!(queue.pop().unwrap_err().reason, FaultReason::NoStatusByte);
    assert_eq!((queue.ring().base() & 0xffff, queue.ring().in_flight()), (0x8003, 1));
    queue.complete(0, Status::Ok);
    queue.complete(4, Status::Ok);
    queue.publish();
    assert_eq!(driver.take_used(), [(0, 513, true)], "what is in flight still ends; the bad chain is not given back");
    assert_eq!(queue.ring().base(), 0x8003_8003);
}

/// Offers and completes one flush; returns whether the driver was to be notified.
fn serve_flush(driver: &mut PackedDriver<'_>, queue: &mut BlkQueue<PackedDeviceRing>) -> bool {
    driver.offer(0, &[READ[0], READ[2]]);
    let Some((head, Request::Flush)) = queue.pop().unwrap() else { panic!("no flush") };
    queue.complete(head, Status::Ok);
    queue.publish()
}

#[test]
fn interrupts_come_only_when_the_driver_waits_for_them() {
    let guest = Guest::new();
    put_header(&guest, request_type::FLUSH, 0);
    let mut driver = PackedDriver::new(&guest, 5);
    let mut queue = device(&driver, BOTH);
    assert!(serve_flush(&mut driver, &mut queue), "always, as the area begins");
    driver.set_event(1, (0, true));
    assert!(!serve_flush(&mut driver, &mut queue));
    // Descriptors 4 and 0 of the next turn are used next: descriptor 1 of that turn is passed after them.
    driver.set_event(2, (1, false));
    assert!(serve_flush(&mut driver, &mut queue), "the first that is weighed is told in any case");
    assert!(serve_flush(&mut driver, &mut queue));
    assert!(!serve_flush(&mut driver, &mut queue), "passed already");
    driver.set_event(2, (0, true));
    assert!(serve_flush(&mut driver, &mut queue), "the start of the turn after");
    driver.set_event(3, (0, true));
    assert!(serve_flush(&mut driver, &mut queue), "a reserved value: rather too often");
}

#[test]
fn kicks_are_asked_for_by_flag_or_by_position() {
    for event_idx in [false, true] {
        let guest = Guest::new();
        put_header(&guest, request_type::FLUSH, 0);
        let mut driver = PackedDriver::new(&guest, 3);
        let mut queue = device(&driver, RingFeatures { indirect: false, event_idx });
        queue.ring_mut().disable_notifications();
        assert_eq!(driver.device_event().1, 1);
        serve_flush(&mut driver, &mut queue);
        serve_flush(&mut driver, &mut queue);
        assert!(!queue.ring_mut().enable_notifications());
        match event_idx {
            true => assert_eq!(driver.device_event(), ((1, false), 2)),
            false => assert_eq!(driver.device_event().1, 0),
        }
        driver.offer(0, &[READ[0], READ[2]]);
        assert!(queue.ring_mut().enable_notifications(), "it came before the wish was seen");
    }
}

/// Chains that are nearly right, and noise in the ring and its event areas.
fn hostile_ring(dice: &mut Dice, driver: &mut PackedDriver<'_>) {
    let guest = driver.guest;
    let kind = [0, 1, 4, 8, 11, 13][dice.below(6) as usize];
    guest.write(HEADER, &RequestHeader { kind, priority: 0, sector: dice.below(100) }.to_bytes());
    for _ in 0..dice.below(u64::from(driver.size) + 3) {
        let id = if dice.below(12) == 0 { dice.roll() as u16 } else { dice.below(u64::from(driver.size)) as u16 };
        match dice.below(4) {
            0 => driver.offer(id, &READ),
            1 => driver.offer_indirect(id, TABLE + 64 * dice.below(8), &READ),
            2 => driver.offer(id, &[READ[0], READ[2]]),
            _ => {
                let flags = [NEXT, WRITE, INDIRECT, NEXT | WRITE, dice.roll() as u16][dice.below(5) as usize];
                let address = [HEADER, DATA, TABLE, dice.roll()][dice.below(4) as usize];
                let length = [16, 512, 48, dice.roll() as u32][dice.below(4) as usize];
                driver.put_next(address, length, id, flags);
            }
        }
    }
    for _ in 0..dice.below(3) {
        let at = driver.ring + dice.below(u64::from(driver.size) * 16 + 8);
        guest.write(at, &[dice.roll() as u8]);
    }
}

#[test]
fn a_hostile_driver_never_gets_a_panic_or_a_byte_outside_its_memory() {
    let guest = Guest::new();
    let (mut faults, mut served) = (0_u32, 0_u32);
    for seed in 0..50_000_u64 {
        let mut dice = Dice(seed);
        let mut driver = PackedDriver::new(&guest, 3 + dice.below(10) as u16);
        let features = RingFeatures { indirect: dice.below(8) != 0, event_idx: dice.below(2) == 0 };
        let mut queue = device(&driver, features);
        let mut heads = Vec::new();
        'life: for _ in 0..3 {
            hostile_ring(&mut dice, &mut driver);
            loop {
                match queue.pop() {
                    Ok(Some((head, request))) => {
                        assert!(!heads.contains(&head), "seed {seed}: {head} is in flight twice");
                        // Touch every byte that a request names. One that lies outside would crash.
                        match &request {
                            Request::Read { data, .. } => data.fill(seed as u8),
                            Request::Write { data, .. } => assert!(!data.to_vec().is_empty()),
                            _ => {}
                        }
                        heads.push(head);
                        served += 1;
                    }
                    Ok(None) => break,
                    Err(fault) => {
                        assert!(!fault.to_string().is_empty());
                        faults += 1;
                        break 'life;
                    }
                }
            }
            while dice.below(3) > 0 && !heads.is_empty() {
                let head = heads.swap_remove(dice.below(heads.len() as u64) as usize);
                queue.complete(head, Status::Ok);
            }
            queue.publish();
            queue.ring_mut().enable_notifications();
            assert!(queue.ring().waiting() <= driver.size);
        }
        for head in heads {
            queue.complete(head, Status::Ok);
        }
        queue.publish();
        let base = queue.ring().base();
        assert_eq!((queue.ring().in_flight(), base >> 16), (0, base & 0xffff), "seed {seed}");
    }
    assert!(faults > 5_000 && served > 5_000, "the dice are loaded: {faults} faults, {served} requests");
}
