//! Packed rings behind the socket: where they begin and go on, how long they may be, and drivers that break their rules.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::packed::PackedDriver;
use model::{Guest, NEXT, WRITE};
use ringdisk_export_vhost_user::ExportOptions;
use std::io::{Read, Write};
use support::disk::MemDisk;
use support::{Client, PATIENCE_SECONDS, Server, is_readable};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VringConfigData};
use virtio::blk::{RequestHeader, features as f, request_type as kind};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const OK: u8 = 0;
/// No power of two, so that what was in the ring before lies elsewhere in each turn.
const SIZE: u16 = 50;
const PAGES: u64 = 0x2_0000;
/// A new ring.
const NEW: u32 = 0x8000_8000;

fn server() -> Server {
    let mut options = ExportOptions::default();
    options.packed = true;
    Server::start_with(MemDisk::new(), options)
}

struct Queue<'a> {
    driver: PackedDriver<'a>,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
}

impl<'a> Queue<'a> {
    fn new(guest: &'a Guest) -> Self {
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        Self { driver: PackedDriver::new(guest, SIZE), kick: event(), call: event(), err: event() }
    }

    /// Sets the ring up and starts it where `base` says.
    fn start(&self, client: &mut Client, base: u32) {
        let driver = &self.driver;
        let addresses = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: driver.ring,
            used_ring_addr: driver.device_event,
            avail_ring_addr: driver.driver_event,
            log_addr: None,
        };
        client.frontend.set_vring_num(0, SIZE).unwrap();
        assert_eq!(set_base(client, base), 0);
        client.frontend.set_vring_addr(0, &addresses).unwrap();
        client.frontend.set_vring_call(0, &self.call).unwrap();
        client.frontend.set_vring_err(0, &self.err).unwrap();
        client.frontend.set_vring_kick(0, &self.kick).unwrap();
        client.frontend.set_vring_enable(0, true).unwrap();
    }

    /// Offers a write or read of a sector in slot `id`.
    fn send(&mut self, id: u16, kind: u32, sector: u64, out: &[u8]) {
        let (guest, page) = (self.driver.guest, PAGES + 0x1000 * u64::from(id));
        guest.write(page, &RequestHeader { kind, priority: 0, sector }.to_bytes());
        guest.write(page + 16, &[0xff]);
        guest.write(page + 512, out);
        self.driver.offer(id, &[(page, 16, false), (page + 512, 512, kind == kind::IN), (page + 16, 1, true)]);
        self.kick.write(1).unwrap();
    }

    /// Waits for the next used buffers, sleeping as a guest does.
    fn wait(&mut self) -> Vec<u16> {
        loop {
            self.driver.set_event(2, self.driver.used);
            let used = self.driver.take_used();
            if !used.is_empty() {
                return used.into_iter().map(|used| used.0).collect();
            }
            assert!(is_readable(&self.call, PATIENCE_SECONDS), "no notification");
            self.call.read().unwrap();
        }
    }

    fn answer(&self, id: u16) -> (u8, Vec<u8>) {
        let page = PAGES + 0x1000 * u64::from(id);
        (self.driver.guest.read(page + 16, 1)[0], self.driver.guest.read(page + 512, 512))
    }

    /// Writes a sector and reads it back.
    fn check(&mut self, sector: u64, byte: u8) {
        self.send(1, kind::OUT, sector, &[byte; 512]);
        assert_eq!((self.wait(), self.answer(1).0), (vec![1], OK));
        self.send(2, kind::IN, sector, &[0; 512]);
        assert_eq!((self.wait(), self.answer(2)), (vec![2], (OK, vec![byte; 512])));
    }
}

/// SET_VRING_BASE of ring 0, of which the front end sends sixteen bits only. Gives the server's answer.
fn set_base(client: &Client, base: u32) -> u64 {
    let words = [10_u32, 1 | 8, 8, 0, base];
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    (&client.stream).write_all(&bytes).unwrap();
    let mut answer = [0; 20];
    (&client.stream).read_exact(&mut answer).unwrap();
    u64::from_ne_bytes(answer[12..].try_into().unwrap())
}

#[test]
fn a_packed_ring_is_served_and_goes_on_where_it_stopped() {
    let server = server();
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = Queue::new(&guest);
    let mut base = NEW;
    for turn in 0..30_u8 {
        queue.start(&mut client, base);
        queue.check(u64::from(turn), turn);
        base = client.frontend.get_vring_base(0).unwrap();
        let (index, wrap) = queue.driver.avail;
        let here = u32::from(index) | u32::from(wrap) << 15;
        assert_eq!(base, here | here << 16, "turn {turn}");
        // Nothing but the lower half is known to a front end that thinks of split rings.
        base = if turn % 3 == 0 { base & 0xffff } else { base };
    }
}

#[test]
fn a_front_end_that_begins_every_ring_at_zero_is_served() {
    let server = server();
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = Queue::new(&guest);
    queue.start(&mut client, 0);
    queue.check(3, 0x33);
}

#[test]
fn stopping_a_packed_ring_waits_for_its_requests() {
    let server = server();
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = Queue::new(&guest);
    queue.start(&mut client, NEW);
    server.hold(true);
    queue.send(1, kind::OUT, 1, &[1; 512]);
    queue.send(2, kind::OUT, 2, &[2; 512]);
    server.wait_submitted(2);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| client.frontend.get_vring_base(0).unwrap());
        server.hold(false);
        assert_eq!(stopping.join().unwrap(), 0x8006_8006);
    });
    let mut ended = queue.wait();
    ended.sort_unstable();
    assert_eq!(ended, [1, 2]);
}

#[test]
fn packed_rings_are_of_any_size_and_split_ones_are_not() {
    let server = server();
    let set_size = |without, size| Client::connect(&server, without).frontend.set_vring_num(0, size).is_ok();
    assert!(set_size(0, 50) && set_size(0, 1) && set_size(0, 1024));
    assert!(!set_size(0, 0) && !set_size(0, 1025));
    assert!(!set_size(f::RING_PACKED, 50) && set_size(f::RING_PACKED, 64));
}

#[test]
fn packed_rings_are_offered_only_if_somebody_asks() {
    let server = Server::start(MemDisk::new());
    let client = Client::connect(&server, 0);
    assert_eq!(client.frontend.get_features().unwrap() & f::RING_PACKED, 0);
}

#[test]
fn a_driver_that_breaks_the_rules_of_its_packed_ring_stops_it_alone() {
    let server = server();
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = Queue::new(&guest);
    queue.start(&mut client, NEW);
    queue.check(0, 1);
    let header = (PAGES, 16);
    queue.driver.put_next(header.0, header.1, 0, NEXT);
    queue.driver.put_next(PAGES + 16, 1, SIZE, WRITE);
    queue.kick.write(1).unwrap();
    assert!(is_readable(&queue.err, PATIENCE_SECONDS), "the ring's error descriptor tells");
    assert_eq!(server.export().stats()[0].faults, 1);
    // Set up anew, it is served again.
    client.frontend.get_vring_base(0).unwrap();
    let mut queue = Queue::new(&guest);
    queue.start(&mut client, NEW);
    queue.check(1, 2);
}

#[test]
fn a_packed_ring_that_cannot_begin_there_does_not_start_and_the_session_goes_on() {
    let server = server();
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    for base in [0x8000_u32 + u32::from(SIZE), 0x8003_8002] {
        let queue = Queue::new(&guest);
        queue.start(&mut client, base);
        assert!(is_readable(&queue.err, PATIENCE_SECONDS), "{base:#x}: the ring's error descriptor tells");
    }
    let mut queue = Queue::new(&guest);
    queue.start(&mut client, NEW);
    queue.check(1, 2);
}
