//! Rings that stop and go on while their peer stays: memory that goes and comes back, rings that are set up anew.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::{GUEST_BYTES, Guest};
use support::disk::{Asked, MemDisk};
use support::{Client, PATIENCE_SECONDS, Queue, SIZE, Server, addresses, is_readable, region};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio::blk::{RequestHeader, features as f, request_type as kind};

const OK: u8 = 0;

/// Where the memory of these tests is cut: the first queue's ring lies below, its buffers above.
const CUT: u64 = 0x1_0000;

fn ring_piece(guest: &Guest) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo { memory_size: CUT, ..region(guest) }
}

fn buffer_piece(guest: &Guest) -> VhostUserMemoryRegionInfo {
    let memory_size = GUEST_BYTES as u64 - CUT;
    VhostUserMemoryRegionInfo {
        guest_phys_addr: CUT,
        userspace_addr: CUT,
        mmap_offset: CUT,
        memory_size,
        ..region(guest)
    }
}

fn write_at(sector: u64) -> Asked {
    Asked::Write { offset: sector * 512, fua: false }
}

/// The ring's error descriptor has been told something since it was last asked.
fn told_of_fault(queue: &Queue<'_>) -> bool {
    let told = is_readable(&queue.err, PATIENCE_SECONDS);
    queue.err.read().unwrap();
    told
}

#[test]
fn a_ring_goes_on_when_the_memory_that_it_lies_in_comes_back() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let piece = ring_piece(&guest);
    client.frontend.set_mem_table(&[piece, buffer_piece(&guest)]).unwrap();
    let mut queue = client.queue(&guest, 0);
    for sector in 0..3 {
        client.frontend.remove_mem_region(&piece).unwrap();
        assert!(told_of_fault(&queue));
        queue.send(0, kind::OUT, sector, &[0x66; 512], 0);
        assert!(queue.driver.take_used().is_empty());
        client.frontend.add_mem_region(&piece).unwrap();
        assert_eq!((queue.wait(), queue.status(0)), (vec![(0, 1)], OK));
        assert_eq!(queue.request(kind::OUT, sector + 8, &[0x77; 512], 0).0, OK);
        assert_eq!(server.disk.asked(), [write_at(sector), write_at(sector + 8)], "once each");
    }
}

#[test]
fn a_request_whose_buffers_are_away_is_served_when_they_come_back() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let piece = buffer_piece(&guest);
    client.frontend.set_mem_table(&[ring_piece(&guest), piece]).unwrap();
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[0x11; 512], 0).0, OK);
    client.frontend.remove_mem_region(&piece).unwrap();
    server.hold(true);
    // In one batch: a request that lies with the ring, which is in flight when the next one cannot be reached.
    let header = RequestHeader { kind: kind::OUT, priority: 0, sector: 1 };
    guest.write(0x4000, &header.to_bytes());
    guest.write(0x4010, &[0xff]);
    queue.driver.put_chain(&[60, 61, 62], &[(0x4000, 16, false), (0x5000, 512, false), (0x4010, 1, true)]);
    queue.driver.offer(60);
    queue.send(0, kind::OUT, 2, &[0x22; 512], 0);
    queue.send(1, kind::OUT, 3, &[0x33; 512], 0);
    assert!(told_of_fault(&queue));
    server.wait_submitted(2);
    std::thread::scope(|scope| {
        let frontend = &mut client.frontend;
        let change = scope.spawn(move || frontend.add_mem_region(&piece).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!change.is_finished(), "it waits for the request in flight");
        server.hold(false);
        change.join().unwrap();
    });
    let mut used = Vec::new();
    while used.len() < 3 {
        used.extend(queue.wait());
    }
    assert_eq!(used, [(60, 1), (0, 1), (3, 1)]);
    assert_eq!([queue.status(0), queue.status(1), guest.read(0x4010, 1)[0]], [OK; 3]);
    assert_eq!(server.disk.asked(), [0, 1, 2, 3].map(write_at), "once each");
    assert_eq!(server.export().stats()[0].faults, 1);
    assert_eq!(queue.request(kind::OUT, 4, &[0x44; 512], 0).0, OK);
}

/// Stops a queue by `stop`, and starts it again with its new addresses last.
fn goes_on_only_with_new_addresses(stop: impl FnOnce(&Client)) {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    stop(&client);
    let mut other = client.queue(&guest, 1);
    // What the old ring says now is not for us: its memory may be something else by now.
    queue.send(0, kind::FLUSH, 0, &[], 0);
    client.frontend.set_vring_num(0, SIZE).unwrap();
    client.frontend.set_vring_base(0, 1).unwrap();
    client.frontend.set_vring_call(0, &queue.call).unwrap();
    client.frontend.set_vring_kick(0, &queue.kick).unwrap();
    client.frontend.set_vring_enable(0, true).unwrap();
    for _ in 0..10 {
        assert_eq!(other.request(kind::FLUSH, 0, &[], 0).0, OK);
    }
    assert!(queue.driver.take_used().is_empty(), "it runs at the old addresses");
    client.frontend.set_vring_addr(0, &addresses(&queue.driver)).unwrap();
    assert_eq!((queue.wait(), queue.status(0)), (vec![(0, 1)], OK));
}

#[test]
fn a_stopped_ring_waits_for_its_new_addresses() {
    goes_on_only_with_new_addresses(|client| assert_eq!(client.frontend.get_vring_base(0).unwrap(), 1));
}

#[test]
fn rings_of_a_peer_that_gave_its_device_up_wait_for_their_new_addresses() {
    goes_on_only_with_new_addresses(|client| client.frontend.reset_owner().unwrap());
}

/// A guest whose server ends after a few requests and another takes its place; gives what a write is then asked for.
fn write_at_the_next_server(without: u64, then: impl FnOnce(&mut Client, &mut Queue<'_>)) -> Option<Asked> {
    asked_at_the_next_server(without, then).pop()
}

/// The same; gives all that the next server's disk is asked for.
fn asked_at_the_next_server(without: u64, then: impl FnOnce(&mut Client, &mut Queue<'_>)) -> Vec<Asked> {
    let (first, second) = (Server::start(MemDisk::new()), Server::start(MemDisk::new()));
    let guest = Guest::new();
    let mut client = Client::connect(&first, without);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    for _ in 0..3 {
        assert_eq!(queue.request(kind::OUT, 0, &[0x11; 512], 0).0, OK);
    }
    drop((client, first));
    let mut client = Client::connect(&second, without);
    client.share(&guest);
    // The other queue was never used.
    let other = client.queue(&guest, 1);
    client.start(&queue, 3);
    then(&mut client, &mut queue);
    assert_eq!(queue.request(kind::OUT, 1, &[0x22; 512], 0).0, OK);
    drop(other);
    second.disk.asked()
}

/// It may be in write-through, where it takes what it reads for durable. The server before may have been killed.
#[test]
fn a_guest_that_another_server_served_before_reads_nothing_before_a_flush() {
    let read = |_: &mut Client, queue: &mut Queue<'_>| assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
    let durable = Asked::Write { offset: 512, fua: true };
    assert_eq!(asked_at_the_next_server(0, read), [Asked::Flush, Asked::Read(0), durable]);
    assert_eq!(asked_at_the_next_server(f::CONFIG_WCE, read), [Asked::Read(0), write_at(1)], "it flushes itself");
}

#[test]
fn a_guest_that_another_server_served_before_gets_durable_writes_until_it_shows_what_it_expects() {
    let durable = Some(Asked::Write { offset: 512, fua: true });
    assert_eq!(write_at_the_next_server(0, |_, _| {}), durable);
    let read = |_: &mut Client, queue: &mut Queue<'_>| assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
    assert_eq!(write_at_the_next_server(0, read), durable);
    let pause = |client: &mut Client, queue: &mut Queue<'_>| {
        let base = client.frontend.get_vring_base(0).unwrap();
        client.start(queue, base as u16);
    };
    assert_eq!(write_at_the_next_server(0, pause), durable);
    let flush = |_: &mut Client, queue: &mut Queue<'_>| assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    assert_eq!(write_at_the_next_server(0, flush), Some(write_at(1)));
    let switch = |byte| {
        move |client: &mut Client, _: &mut Queue<'_>| {
            client.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[byte]).unwrap();
        }
    };
    assert_eq!(write_at_the_next_server(0, switch(1)), Some(write_at(1)));
    assert_eq!(write_at_the_next_server(0, switch(0)), durable);
    assert_eq!(write_at_the_next_server(f::CONFIG_WCE, |_, _| {}), Some(write_at(1)), "it had no choice, and flushes");
}

#[test]
fn a_ring_that_goes_on_where_we_left_it_is_no_stranger() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::OUT, 1, &[0x11; 512], 0).0, OK);
    let base = client.frontend.get_vring_base(0).unwrap();
    client.start(&queue, base as u16);
    assert_eq!(queue.request(kind::OUT, 1, &[0x22; 512], 0).0, OK);
    drop(client);
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    client.start(&queue, 2);
    assert_eq!(queue.request(kind::OUT, 1, &[0x33; 512], 0).0, OK);
    assert_eq!(server.disk.asked(), [1; 3].map(write_at));
}
