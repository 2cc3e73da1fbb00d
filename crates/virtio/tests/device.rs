//! The device's half against a driver written from the specification.
#![allow(clippy::unwrap_used, missing_docs)]

mod model;

use model::{Desc, Driver, Guest, INDIRECT, NEXT, SECOND_REGION, WRITE};
use ringdisk_virtio::blk::{RequestHeader, Status, request_type};
use ringdisk_virtio::ring_access::{RingAddresses, SplitAreas};
use ringdisk_virtio::{
    BlkQueue, DeviceRing, FaultReason, Request, RequestLimits, RingFault, RingFeatures, SplitDeviceRing,
};
use std::sync::Arc;

const SIZE: u16 = 16;
const HEADER: u64 = 0x1_0000;
const STATUS: u64 = 0x1_1000;
const DATA: u64 = 0x2_0000;
const TABLE: u64 = 0x3_0000;

const BOTH: RingFeatures = RingFeatures { indirect: true, event_idx: true };
const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000);

fn device(driver: &Driver<'_>, features: RingFeatures) -> BlkQueue<SplitDeviceRing> {
    let at = RingAddresses { table: driver.table, avail: driver.avail, used: driver.used };
    let areas = SplitAreas::at_guest_addresses(Arc::clone(&driver.guest.memory), at, driver.size).unwrap();
    BlkQueue::new(SplitDeviceRing::new(areas, features, 0), Arc::clone(&driver.guest.memory), LIMITS)
}

fn put_header(guest: &Guest, kind: u32, sector: u64) {
    guest.write(HEADER, &RequestHeader { kind, priority: 0, sector }.to_bytes());
}

/// Offers one chain of `buffers` and takes it.
fn pop_one(kind: u32, sector: u64, buffers: &[(u64, u32, bool)]) -> Result<Option<(u16, Request)>, RingFault> {
    let guest = Guest::new();
    put_header(&guest, kind, sector);
    let mut driver = Driver::new(&guest, SIZE);
    let indices: Vec<u16> = (0..SIZE).collect();
    driver.put_chain(&indices, buffers);
    driver.offer(0);
    driver.publish();
    device(&driver, BOTH).pop()
}

fn fault(buffers: &[(u64, u32, bool)]) -> FaultReason {
    pop_one(request_type::IN, 0, buffers).unwrap_err().reason
}

#[test]
fn a_read_is_filled_and_given_back() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 77);
    let mut driver = Driver::new(&guest, SIZE);
    driver.put_chain(&[3, 1, 2], &[(HEADER, 16, false), (DATA, 1024, true), (STATUS, 1, true)]);
    guest.write(STATUS, &[0xff]);
    driver.offer(3);
    driver.publish();
    let mut queue = device(&driver, BOTH);
    let Some((3, Request::Read { sector: 77, data, priority: 0 })) = queue.pop().unwrap() else { panic!("no read") };
    assert_eq!(data.length_bytes(), 1024);
    data.fill(0x5a);
    drop(data);
    assert!(queue.pop().unwrap().is_none());
    queue.complete(3, Status::Ok);
    assert_eq!(driver.take_used(), [], "nothing is visible before the batch is published");
    assert!(queue.publish());
    assert_eq!(driver.take_used(), [(3, 1025)]);
    assert_eq!((guest.read(DATA, 1024), guest.read(STATUS, 1)), (vec![0x5a; 1024], vec![0]));
}

#[test]
fn header_data_and_status_may_be_cut_anywhere() {
    let guest = Guest::new();
    let mut driver = Driver::new(&guest, SIZE);
    // Header and data in one run of bytes, cut at odd places; the status behind, with a byte before it.
    let mut bytes = RequestHeader { kind: request_type::OUT, priority: 0x4003, sector: 5 }.to_bytes().to_vec();
    bytes.extend((0..1024_u32).map(|index| index as u8));
    guest.write(SECOND_REGION - 500, &bytes);
    let at = SECOND_REGION - 500;
    driver.put_indirect(
        4,
        TABLE + 2,
        &[(at, 3, false), (at + 3, 12, false), (at + 15, 300, false), (at + 315, 725, false), (STATUS, 2, true)],
    );
    driver.offer(4);
    driver.publish();
    let mut queue = device(&driver, BOTH);
    let Some((4, Request::Write { sector: 5, data, priority: 0x4003 })) = queue.pop().unwrap() else {
        panic!("no write")
    };
    assert_eq!(data.to_vec(), bytes[16..]);
    drop(data);
    guest.write(STATUS, &[9, 9]);
    queue.complete(4, Status::IoErr);
    queue.publish();
    assert_eq!(guest.read(STATUS, 2), [9, 1]);
    assert_eq!(driver.take_used(), [(4, 0)], "the byte before the status was not written");
}

#[test]
fn an_indirect_table_may_follow_direct_descriptors() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = Driver::new(&guest, SIZE);
    driver.put_indirect(1, TABLE, &[(DATA, 512, true), (STATUS, 1, true)]);
    driver.put_desc(0, Desc { address: HEADER, length: 16, flags: NEXT, next: 1 });
    driver.offer(0);
    driver.publish();
    let taken = device(&driver, BOTH).pop().unwrap();
    assert!(matches!(taken, Some((0, Request::Read { .. }))), "{taken:?}");
}

#[test]
fn wrong_requests_are_refused_without_stopping_the_queue() {
    let status = (STATUS, 1, true);
    let refused = |kind, buffers: &[(u64, u32, bool)]| match pop_one(kind, 0, buffers) {
        Ok(Some((0, Request::Refused(status)))) => status,
        other => panic!("{other:?}"),
    };
    let header = (HEADER, 16, false);
    assert_eq!(refused(request_type::IN, &[header, (DATA, 511, true), status]), Status::IoErr);
    assert_eq!(refused(request_type::IN, &[header, status]), Status::IoErr);
    assert_eq!(refused(request_type::OUT, &[header, (DATA, 100, false), status]), Status::IoErr);
    for kind in [request_type::SCSI_CMD, request_type::SCSI_CMD_OUT, 7, 0xffff_ffff] {
        assert_eq!(refused(kind, &[header, (DATA, 512, true), status]), Status::Unsupported);
    }
    assert_eq!(refused(request_type::DISCARD, &[header, (DATA, 15, false), status]), Status::IoErr);
    assert_eq!(refused(request_type::DISCARD, &[header, status]), Status::IoErr);
    assert_eq!(refused(request_type::DISCARD, &[header, (DATA, 5 * 16, false), status]), Status::IoErr);
}

/// The legacy layout: header, command and data out are read; data in, sense, a header of errors and residual, and the
/// status are written.
#[test]
fn a_packet_command_is_unsupported_and_nothing_but_its_status_is_written() {
    const COMMAND: u64 = DATA + 0x1000;
    const IN_DATA: u64 = DATA + 0x2000;
    const SENSE: u64 = DATA + 0x3000;
    const IN_HEADER: u64 = DATA + 0x4000;
    let (header, command, out_data) = ((HEADER, 16, false), (COMMAND, 10, false), (DATA, 512, false));
    let (in_data, sense, in_header) = ((IN_DATA, 36, true), (SENSE, 96, true), (IN_HEADER, 16, true));
    let (status, together) = ((STATUS, 1, true), (IN_HEADER, 17, true));
    let layouts: [&[(u64, u32, bool)]; 5] = [
        &[header, command, in_data, sense, in_header, status],
        &[header, command, out_data, sense, in_header, status],
        &[header, command, sense, in_header, status],
        &[header, command, in_data, sense, together],
        &[header, status],
    ];
    for kind in [request_type::SCSI_CMD, request_type::SCSI_CMD_OUT] {
        for buffers in layouts {
            let guest = Guest::new();
            for page in [HEADER, STATUS] {
                guest.write(page, &[0xaa; 0x1000]);
            }
            guest.write(DATA, &[0xaa; 0x6000]);
            put_header(&guest, kind, 0x1234);
            let mut driver = Driver::new(&guest, SIZE);
            driver.put_chain(&(0..SIZE).collect::<Vec<_>>(), buffers);
            driver.offer(0);
            driver.publish();
            let mut queue = device(&driver, BOTH);
            let Ok(Some((0, Request::Refused(answer)))) = queue.pop() else { panic!("{buffers:?}") };
            queue.complete(0, answer);
            queue.publish();
            let (at, length, _) = buffers[buffers.len() - 1];
            let status_at = at + u64::from(length) - 1;
            assert_eq!(guest.read(status_at, 1), [2]);
            guest.write(status_at, &[0xaa]);
            assert_eq!(
                (guest.read(DATA, 0x6000), guest.read(STATUS, 0x1000)),
                (vec![0xaa; 0x6000], vec![0xaa; 0x1000])
            );
            assert_eq!(driver.take_used(), [(0, u32::from(buffers.len() == 2))], "no length that is not true");
        }
    }
}

#[test]
fn ranges_are_copied_once_and_checked() {
    let guest = Guest::new();
    let mut driver = Driver::new(&guest, SIZE);
    let mut queue = device(&driver, BOTH);
    let range = |sector: u64, count: u32, flags: u32| {
        ringdisk_virtio::blk::RangeSegment { sector, sector_count: count, flags }.to_bytes()
    };
    let mut take = |kind, ranges: &[[u8; 16]]| {
        put_header(&guest, kind, 0);
        guest.write(DATA, &ranges.concat());
        let length = 16 * ranges.len() as u32;
        driver.put_chain(&[0, 1, 2], &[(HEADER, 16, false), (DATA, length, false), (STATUS, 1, true)]);
        driver.offer(0);
        driver.publish();
        let (head, request) = queue.pop().unwrap().unwrap();
        guest.write(DATA, &[0xee; 64]);
        let ranges = queue.ranges(head).to_vec();
        queue.complete(head, Status::Ok);
        queue.publish();
        (request, ranges)
    };
    let (request, ranges) = take(request_type::WRITE_ZEROES, &[range(1, 2, 1), range(3, 1000, 0)]);
    assert!(matches!(request, Request::WriteZeroes));
    assert_eq!(
        ranges.iter().map(|r| (r.sector, r.sector_count, r.flags)).collect::<Vec<_>>(),
        [(1, 2, 1), (3, 1000, 0)]
    );
    assert!(matches!(take(request_type::DISCARD, &[range(1, 2, 0)]).0, Request::Discard));
    let (request, _) = take(request_type::DISCARD, &[range(1, 2, 1)]);
    assert!(matches!(request, Request::Refused(Status::Unsupported)), "unmap is reserved in a discard");
    let (request, _) = take(request_type::WRITE_ZEROES, &[range(1, 2, 2)]);
    assert!(matches!(request, Request::Refused(Status::Unsupported)), "a reserved flag");
    let (request, _) = take(request_type::WRITE_ZEROES, &[range(1, 1001, 0)]);
    assert!(matches!(request, Request::Refused(Status::IoErr)), "longer than the limit");
}

#[test]
fn the_serial_is_cut_and_padded() {
    for (length, serial, expected) in [
        (20, "disk-7", b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec()),
        (20, "a serial that is longer than twenty", b"a serial that is lon".to_vec()),
        (4, "disk-7", b"disk".to_vec()),
        (30, "", vec![0; 20]),
    ] {
        let guest = Guest::new();
        put_header(&guest, request_type::GET_ID, 0);
        guest.write(DATA, &[0xaa; 64]);
        let mut driver = Driver::new(&guest, SIZE);
        driver.put_chain(&[0, 1, 2], &[(HEADER, 16, false), (DATA, length, true), (STATUS, 1, true)]);
        driver.offer(0);
        driver.publish();
        let mut queue = device(&driver, BOTH);
        let Some((0, Request::GetId)) = queue.pop().unwrap() else { panic!("no GET_ID") };
        queue.complete_id(0, serial);
        queue.publish();
        assert_eq!(guest.read(DATA, expected.len()), expected);
        assert_eq!(guest.read(DATA + expected.len() as u64, 1), [0xaa]);
        let written = expected.len() as u32 + u32::from(length <= 20);
        assert_eq!((driver.take_used(), guest.read(STATUS, 1)), (vec![(0, written)], vec![0]));
    }
}

#[test]
fn a_malformed_chain_is_a_fault_with_its_reason() {
    use FaultReason as F;
    let (header, data, status) = ((HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true));
    assert_eq!(fault(&[(HEADER, 15, false), data, status]), F::HeaderTooShort { readable_bytes: 15 });
    assert_eq!(fault(&[(STATUS, 1, true)]), F::HeaderTooShort { readable_bytes: 0 });
    assert_eq!(fault(&[header, (DATA, 512, false)]), F::NoStatusByte);
    assert_eq!(fault(&[header, data, (DATA, 1, false)]), F::WrongOrder);
    assert_eq!(fault(&[header, (DATA, 0, true), status]), F::ZeroLength);
    let end = model::GUEST_BYTES as u64;
    for (address, length) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 3, 8), (DATA, 0x3000_0000)] {
        assert!(matches!(fault(&[header, (address, length, true), status]), F::Memory(_)), "{address:#x}+{length}");
    }
    let huge = (DATA, u32::MAX, true);
    assert!(matches!(fault(&[header, huge, status]), F::TooManyBytes { .. }));
    assert!(matches!(fault(&[header, data, (DATA, u32::MAX - 3, true)]), F::TooManyBytes { .. }));
}

/// Puts descriptors as `build` says, offers head 0 and returns what stops the queue.
fn fault_of(features: RingFeatures, build: impl FnOnce(&mut Driver<'_>)) -> RingFault {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = Driver::new(&guest, SIZE);
    driver.put_chain(&[0, 1, 2], &[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    build(&mut driver);
    if driver.avail_index == 0 {
        driver.offer(0);
    }
    driver.publish();
    let mut queue = device(&driver, features);
    let fault = loop {
        match queue.pop() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the queue did not stop"),
            Err(fault) => break fault,
        }
    };
    assert!(matches!(queue.pop(), Ok(None)), "a stopped queue takes nothing");
    fault
}

#[test]
fn loops_and_links_out_of_the_table_are_faults() {
    use FaultReason as F;
    let desc = |next| Desc { address: HEADER, length: 16, flags: NEXT, next };
    let looped = fault_of(BOTH, |driver| driver.put_desc(0, desc(0)));
    assert_eq!((looped.head, looped.reason), (Some(0), F::ChainTooLong { limit: 16 }));
    let outside = fault_of(BOTH, |driver| driver.put_desc(0, desc(SIZE)));
    assert_eq!(outside.reason, F::NextOutside { next: SIZE, size: 16 });
    let head = fault_of(BOTH, |driver| driver.offer(SIZE));
    assert_eq!((head.head, head.reason), (Some(SIZE), F::HeadOutside { size: 16 }));
}

#[test]
fn a_head_in_flight_or_an_impossible_index_is_a_fault() {
    use FaultReason as F;
    let twice = fault_of(BOTH, |driver| {
        driver.offer(0);
        driver.offer(0);
    });
    assert_eq!((twice.head, twice.reason), (Some(0), F::HeadInFlight));
    let jump = fault_of(BOTH, |driver| driver.avail_index = SIZE + 1);
    assert_eq!(jump, RingFault { head: None, reason: F::AvailIndexJump { from: 0, to: SIZE + 1, size: SIZE } });
}

#[test]
fn impossible_indirect_tables_are_faults() {
    use FaultReason as F;
    let buffers = [(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)];
    let table = |length, flags| {
        move |driver: &mut Driver<'_>| {
            driver.put_indirect(0, TABLE, &buffers);
            driver.put_desc(0, Desc { address: TABLE, length, flags, next: 1 });
        }
    };
    assert_eq!(fault_of(RingFeatures::default(), table(48, INDIRECT)).reason, F::IndirectNotNegotiated);
    assert_eq!(fault_of(BOTH, table(48, INDIRECT | NEXT)).reason, F::IndirectWithNext);
    for length in [0, 47, 1024 * 16 + 16, 0xffff_fff0] {
        assert_eq!(
            fault_of(BOTH, table(length, INDIRECT)).reason,
            F::IndirectLength { length_bytes: length, limit: 1024 }
        );
    }
    // Two of the three descriptors belong to the table: the link to the third leads out.
    assert_eq!(fault_of(BOTH, table(32, INDIRECT)).reason, F::NextOutside { next: 2, size: 2 });
    let nested = fault_of(BOTH, |driver| {
        driver.put_indirect(0, TABLE, &buffers);
        driver.guest.write(TABLE, &Desc { address: TABLE, length: 48, flags: INDIRECT, next: 0 }.bytes());
    });
    assert_eq!(nested.reason, F::NestedIndirect);
    let looped = fault_of(BOTH, |driver| {
        driver.put_indirect(0, TABLE, &buffers);
        driver.guest.write(TABLE + 16, &Desc { address: DATA, length: 512, flags: NEXT | WRITE, next: 1 }.bytes());
    });
    assert_eq!(looped.reason, F::ChainTooLong { limit: 3 });
    let outside = fault_of(BOTH, |driver| {
        let address = model::GUEST_BYTES as u64 - 16;
        driver.put_desc(0, Desc { address, length: 48, flags: INDIRECT, next: 0 });
    });
    assert!(matches!(outside.reason, F::Memory(_)));
}

#[test]
fn a_chain_that_stops_the_queue_is_found_again_by_the_next_owner() {
    let guest = Guest::new();
    put_header(&guest, request_type::IN, 0);
    let mut driver = Driver::new(&guest, SIZE);
    driver.put_chain(&[0, 1, 2], &[(HEADER, 16, false), (DATA, 512, true), (STATUS, 1, true)]);
    driver.put_chain(&[3, 4], &[(HEADER, 16, false), (DATA, 512, false)]);
    driver.offer(0);
    driver.offer(3);
    driver.publish();
    let mut queue = device(&driver, BOTH);
    assert!(matches!(queue.pop(), Ok(Some((0, _)))));
    assert!(queue.pop().is_err());
    assert_eq!((queue.ring().base(), queue.ring().in_flight()), (1, 1));
    queue.complete(0, Status::Ok);
    queue.complete(3, Status::Ok);
    queue.publish();
    assert_eq!(driver.take_used(), [(0, 513)], "what is in flight still ends; the bad chain is not given back");
}

/// Offers and completes one flush; returns whether the driver was to be notified.
fn serve_flush(driver: &mut Driver<'_>, queue: &mut BlkQueue<SplitDeviceRing>) -> bool {
    driver.put_chain(&[0, 1], &[(HEADER, 16, false), (STATUS, 1, true)]);
    driver.offer(0);
    driver.publish();
    let Some((head, Request::Flush)) = queue.pop().unwrap() else { panic!("no flush") };
    queue.complete(head, Status::Ok);
    queue.publish()
}

#[test]
fn interrupts_come_only_when_the_driver_waits_for_them() {
    let guest = Guest::new();
    put_header(&guest, request_type::FLUSH, 0);
    let mut driver = Driver::new(&guest, SIZE);
    let mut queue = device(&driver, BOTH);
    assert!(serve_flush(&mut driver, &mut queue), "the first one always");
    driver.set_used_event(3);
    let told: Vec<bool> = (0..5).map(|_| serve_flush(&mut driver, &mut queue)).collect();
    assert_eq!(told, [false, false, true, false, false]);
    assert!(!queue.publish(), "nothing new, nothing said");

    let mut driver = Driver::new(&guest, SIZE);
    guest.write(0, &[0; 4096]);
    let mut queue = device(&driver, RingFeatures::default());
    assert!(serve_flush(&mut driver, &mut queue));
    driver.set_avail_flags(1);
    assert!(!serve_flush(&mut driver, &mut queue));
}

#[test]
fn notifications_are_asked_for_and_late_ones_are_seen() {
    let guest = Guest::new();
    put_header(&guest, request_type::FLUSH, 0);
    for features in [BOTH, RingFeatures::default()] {
        guest.write(0, &[0; 4096]);
        let mut driver = Driver::new(&guest, SIZE);
        let mut queue = device(&driver, features);
        queue.ring_mut().disable_notifications();
        assert_eq!(driver.used_flags(), u16::from(!features.event_idx));
        serve_flush(&mut driver, &mut queue);
        assert!(!queue.ring_mut().enable_notifications());
        assert_eq!((driver.used_flags(), driver.avail_event()), (0, u16::from(features.event_idx)));
        queue.ring_mut().disable_notifications();
        assert_eq!(driver.avail_event(), 0, "behind the next entry: it is not crossed");
        driver.offer(0);
        driver.publish();
        assert!(queue.ring_mut().enable_notifications(), "work that came before the wish is not slept over");
    }
}
