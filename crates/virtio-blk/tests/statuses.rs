//! What each request gets as its status (virtio 1.2, 5.2.6.2): good ones, and those that lie outside the disk, off its
//! blocks, set reserved bits, or are not served.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
#[path = "../../export-vhost-user/tests/support/reactor.rs"]
mod reactor;

use block::{Completion, Disk, DiskInfo, DiskQueue, Lifetime, Op, Poller, ReactorCtx, Tag, run_and_wait};
use model::Guest;
use model::any::AnyDriver;
use reactor::TestReactor;
use ringdisk_virtio_blk::{Device, DeviceOptions, QueueSetup, Transport, open_poller};
use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio::blk::{RangeSegment, RequestHeader, request_type as kind};
use virtio::ring_access::{RingAddresses, RingAreas, RingLayout};

const SIZE: u16 = 16;
const SECTORS: u64 = 2048;
/// In blocks of 4 KiB.
const BLOCK_BYTES: u32 = 4096;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

struct Silent;

impl Transport for Silent {
    fn notify(&self) -> bool {
        false
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A disk that ends everything at once.
#[derive(Default)]
struct Ready {
    read_only: bool,
    has_lifetime: bool,
    /// It has got a layer since it was opened.
    is_covered: AtomicBool,
}

thread_local! {
    /// What the disk was asked for last.
    static LAST: RefCell<Vec<Op>> = RefCell::default();
}

impl Disk for Ready {
    fn info(&self) -> DiskInfo {
        let null = image::NullDisk::new(SECTORS * 512, "a serial".into()).info();
        DiskInfo { logical_block_bytes: BLOCK_BYTES, read_only: self.read_only, ..null }
    }

    fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        Ok(Box::new(ReadyQueue::default()))
    }

    fn lifetime(&self) -> Option<Lifetime> {
        self.has_lifetime.then_some(Lifetime { end_of_life: 0x0102, worn_a: 0x0304, worn_b: 0x0506 })
    }

    fn overwrites_in_place(&self) -> bool {
        !self.is_covered.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct ReadyQueue(Vec<Tag>);

impl DiskQueue for ReadyQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        LAST.with_borrow_mut(|last| last.push(op));
        self.0.push(tag);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let count = self.0.len();
        done.extend(self.0.drain(..).map(|tag| Completion { tag, result: Ok(()) }));
        count
    }

    fn in_flight(&self) -> usize {
        self.0.len()
    }
}

struct Asked<'a> {
    queue: Rc<RefCell<dyn Poller>>,
    driver: AnyDriver<'a>,
}

const HEADER: u64 = 0x2_0000;
const STATUS: u64 = 0x2_0010;
const OUT: u64 = 0x3_0000;
const IN: u64 = 0x4_0000;

impl<'a> Asked<'a> {
    fn new(ctx: &Rc<dyn ReactorCtx>, guest: &'a Guest, device: &Arc<Device>) -> Self {
        // The tests of `packed.rs` are these.
        let packed = env!("CARGO_CRATE_NAME") == "packed";
        let driver = AnyDriver::new(guest, SIZE, packed);
        let [table, avail, used] = driver.addresses();
        let at = RingAddresses { table, avail, used };
        let layout = if packed { RingLayout::Packed } else { RingLayout::Split };
        let areas = RingAreas::at_guest_addresses(layout, Arc::clone(&guest.memory), at, SIZE).unwrap();
        let setup = QueueSetup::new(Arc::clone(device), areas, 0, Silent);
        Self { queue: open_poller(ctx, setup).unwrap(), driver }
    }

    /// Sends a request with `out` to be read and room for `room` bytes; gives its status.
    fn status(&mut self, kind: u32, sector: u64, out: &[u8], room: u32) -> u8 {
        LAST.with_borrow_mut(Vec::clear);
        let guest = self.driver.guest();
        guest.write(HEADER, &RequestHeader { kind, priority: 0, sector }.to_bytes());
        guest.write(OUT, out);
        guest.write(STATUS, &[0xee]);
        let mut chain = vec![(HEADER, 16, false)];
        chain.extend((!out.is_empty()).then_some((OUT, out.len() as u32, false)));
        chain.extend((room > 0).then_some((IN, room, true)));
        chain.push((STATUS, 1, true));
        self.driver.put_chain(&[0, 1, 2, 3][..chain.len()], &chain);
        self.driver.offer(0);
        self.driver.publish();
        while self.queue.borrow_mut().poll() {}
        assert_eq!(self.driver.take_used().len(), 1, "it ends");
        guest.read(STATUS, 1)[0]
    }
}

fn device(disk: Ready, secure_erase: bool) -> block::Result<Arc<Device>> {
    let mut options = DeviceOptions::default();
    options.overrides.secure_erase = secure_erase;
    Device::new(Arc::new(disk), options)
}

fn ranges(all: &[(u64, u32, u32)]) -> Vec<u8> {
    let bytes = |(sector, sector_count, flags): &(u64, u32, u32)| {
        RangeSegment { sector: *sector, sector_count: *sector_count, flags: *flags }.to_bytes()
    };
    all.iter().flat_map(bytes).collect()
}

#[test]
fn every_request_gets_the_status_that_the_specification_asks_for() {
    let block = vec![7; BLOCK_BYTES as usize];
    // Type, sector, what the device reads, room to write, status.
    let mut table: Vec<(u32, u64, Vec<u8>, u32, u8)> = vec![
        (kind::IN, 0, vec![], 4096, OK),
        (kind::IN, SECTORS - 8, vec![], 4096, OK),
        (kind::IN, SECTORS, vec![], 4096, IOERR),
        (kind::IN, SECTORS - 8, vec![], 8192, IOERR),
        (kind::IN, u64::MAX, vec![], 4096, IOERR),
        (kind::IN, u64::MAX - 7, vec![], 4096, IOERR),
        (kind::IN, 1, vec![], 4096, IOERR),
        (kind::IN, 0, vec![], 512, IOERR),
        (kind::IN, 0, vec![], 4095, IOERR),
        (kind::IN, 0, vec![], 0, IOERR),
        (kind::OUT, 8, block.clone(), 0, OK),
        (kind::OUT, SECTORS, block.clone(), 0, IOERR),
        (kind::OUT, 4, block.clone(), 0, IOERR),
        (kind::OUT, 0, block[..512].to_vec(), 0, IOERR),
        (kind::OUT, 0, block[..100].to_vec(), 0, IOERR),
        (kind::OUT, 0, vec![], 0, IOERR),
        (kind::FLUSH, 0, vec![], 0, OK),
        (kind::FLUSH_OUT, 0, vec![], 0, OK),
        (kind::GET_ID, 0, vec![], 20, OK),
        (kind::GET_LIFETIME, 0, vec![], 6, OK),
        // Packet commands (with command, data, sense and residual), and what nobody has heard of.
        (kind::SCSI_CMD, 0, vec![0; 6], 512 + 96 + 16, UNSUPP),
        (kind::SCSI_CMD_OUT, 0, vec![0; 6 + 512], 96 + 16, UNSUPP),
        (6, 0, vec![], 0, UNSUPP),
        (15, 0, vec![], 4096, UNSUPP),
        (u32::MAX, 0, vec![], 0, UNSUPP),
    ];
    for (kind, longest, unmap) in
        [(kind::DISCARD, 1 << 21, UNSUPP), (kind::WRITE_ZEROES, 1 << 21, OK), (kind::SECURE_ERASE, 512, UNSUPP)]
    {
        let mut row = |list: &[(u64, u32, u32)], status| table.push((kind, 0, ranges(list), 0, status));
        row(&[(0, 8, 0)], OK);
        row(&[(0, 8, 0), (16, 16, 0), (SECTORS - 8, 8, 0)], OK);
        row(&[(0, 0, 0)], OK);
        row(&[(0, 8, 1)], unmap);
        row(&[(0, 8, 2)], UNSUPP);
        row(&[(0, 8, 0), (8, 8, 1 << 31)], UNSUPP);
        // A flag that is not known counts before a range that cannot be.
        row(&[(SECTORS, 8, 2)], UNSUPP);
        row(&[(SECTORS, 8, 0)], IOERR);
        row(&[(0, 8, 0), (SECTORS - 8, 16, 0)], IOERR);
        row(&[(u64::MAX - 7, 16, 0)], IOERR);
        row(&[(0, longest + 8, 0)], IOERR);
        row(&[(1, 8, 0)], IOERR);
        row(&[(0, 7, 0)], IOERR);
        row(&[(0, 8, 0); 16], OK);
        row(&[(0, 8, 0); 17], IOERR);
        row(&[], IOERR);
        table.push((kind, 0, ranges(&[(0, 8, 0), (8, 8, 0)])[..24].to_vec(), 0, IOERR));
    }
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let guest = Guest::new();
        let device = device(Ready { has_lifetime: true, ..Ready::default() }, true).unwrap();
        let mut asked = Asked::new(ctx, &guest, &device);
        for (kind, sector, out, room, status) in table {
            let found = asked.status(kind, sector, &out, room);
            assert_eq!(found, status, "type {kind}, sector {sector}, {} bytes out, {room} in: {out:?}", out.len());
            let is_carried_out = LAST.with_borrow(|last| !last.is_empty());
            assert!(status == OK || !is_carried_out, "type {kind}: what is refused touches nothing");
        }
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

#[test]
fn what_is_not_offered_is_not_supported_and_a_read_only_disk_refuses_writes() {
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let range = ranges(&[(0, 8, 0)]);
        for read_only in [false, true] {
            let guest = Guest::new();
            let device = device(Ready { read_only, ..Ready::default() }, false).unwrap();
            let mut asked = Asked::new(ctx, &guest, &device);
            let (written, ranged) = if read_only { (IOERR, UNSUPP) } else { (OK, OK) };
            assert_eq!(asked.status(kind::GET_LIFETIME, 0, &[], 6), UNSUPP);
            assert_eq!(asked.status(kind::SECURE_ERASE, 0, &range, 0), UNSUPP);
            assert_eq!(asked.status(kind::OUT, 0, &[1; 4096], 0), written);
            assert_eq!(asked.status(kind::DISCARD, 0, &range, 0), ranged);
            assert_eq!(asked.status(kind::WRITE_ZEROES, 0, &range, 0), ranged);
            assert_eq!(asked.status(kind::IN, 0, &[], 4096), OK);
        }
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

#[test]
fn a_secure_erase_overwrites_durably_or_fails() {
    let refused = |disk: Ready| device(disk, true).unwrap_err().to_string();
    assert!(refused(Ready { read_only: true, ..Ready::default() }).contains("read-only"));
    assert!(refused(Ready { is_covered: true.into(), ..Ready::default() }).contains("raw image without layers"));
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let guest = Guest::new();
        let disk = Arc::new(Ready::default());
        let mut options = DeviceOptions::default();
        options.overrides.secure_erase = true;
        let device = Device::new(Arc::clone(&disk) as Arc<dyn Disk>, options).unwrap();
        let config = device.config();
        let limits = (config.max_secure_erase_sectors, config.max_secure_erase_seg);
        assert_eq!((limits, config.secure_erase_sector_alignment), ((512, 16), 8));
        let mut asked = Asked::new(ctx, &guest, &device);
        assert_eq!(asked.status(kind::SECURE_ERASE, 0, &ranges(&[(0, 512, 0), (1024, 8, 0)]), 0), OK);
        LAST.with_borrow(|last| {
            let writes = last.iter().filter_map(|op| match op {
                Op::Write { offset, data, flags, .. } if flags.is_fua() && data.is_zero() => {
                    Some((*offset, data.length_bytes()))
                }
                _ => None,
            });
            assert_eq!(writes.collect::<Vec<_>>(), [(0, 512 * 512), (1024 * 512, 4096)]);
        });
        // What lies below the new layer would stay.
        disk.is_covered.store(true, Ordering::Relaxed);
        assert_eq!(asked.status(kind::SECURE_ERASE, 0, &ranges(&[(0, 8, 0)]), 0), IOERR);
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}

#[test]
fn the_wear_of_the_storage_is_three_numbers() {
    let reactor = TestReactor::start("reactor");
    let test = move |ctx: &_| {
        let guest = Guest::new();
        let device = device(Ready { has_lifetime: true, ..Ready::default() }, false).unwrap();
        let mut asked = Asked::new(ctx, &guest, &device);
        assert_eq!(asked.status(kind::GET_LIFETIME, 0, &[], 6), OK);
        assert_eq!(guest.read(IN, 6), [2, 1, 4, 3, 6, 5]);
    };
    run_and_wait(reactor.handle().as_ref(), test).unwrap();
}
