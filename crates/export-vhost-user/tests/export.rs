//! An export as its peers see it: over a real socket, with shared memory and event descriptors.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use block::Priority;
use model::any::AnyDriver;
use model::{Desc, Guest, NEXT};
use ringdisk_export_vhost_user::{Export, ExportOptions};
use std::sync::atomic::Ordering;
use support::disk::{Asked, DISK_BYTES, MemDisk};
use support::{Client, NO_CACHE, PACKED, PATIENCE_SECONDS, Queue, SIZE, Server, is_readable, read_config, region};
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio::blk::{RangeSegment, RequestHeader, features as f, request_type as kind};

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// What must not end before the test lets requests go has not ended. A moment is enough to catch what does not wait;
/// what waits passes however slow the machine is.
fn assert_waits<T>(thread: &std::thread::ScopedJoinHandle<'_, T>) {
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!thread.is_finished(), "it did not wait for the requests in flight");
}

#[test]
fn a_guest_reads_writes_flushes_and_frees() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let data: Vec<u8> = (0..4096_u32).map(|index| (index * 7) as u8).collect();
    assert_eq!(queue.request(kind::OUT, 8, &data, 0).0, OK);
    assert_eq!(queue.request(kind::IN, 8, &[], 4096), (OK, data));
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    assert_eq!(queue.request(kind::GET_ID, 0, &[], 20), (OK, b"serial-of-20-letters".to_vec()));
    let range = |sector, sector_count, flags| RangeSegment { sector, sector_count, flags }.to_bytes();
    let ranges = [range(0, 8, 1), range(16, 0, 0), range(100, 4, 0)].concat();
    assert_eq!(queue.request(kind::WRITE_ZEROES, 0, &ranges, 0).0, OK);
    assert_eq!(queue.request(kind::DISCARD, 0, &range(8, 8, 0), 0).0, OK);
    let zeroes = |offset, length, may_unmap| Asked::WriteZeroes { offset, length, may_unmap, fua: false };
    assert_eq!(
        server.disk.asked(),
        [
            Asked::Write { offset: 4096, fua: false },
            Asked::Read(4096),
            Asked::Flush,
            zeroes(0, 4096, true),
            zeroes(51200, 2048, false),
            Asked::Discard(4096, 4096),
        ]
    );
    let stats = server.export().stats();
    assert_eq!((stats[0].requests, stats[0].failed, stats[0].faults, stats[1].requests), (6, 0, 0, 0));
}

#[test]
fn requests_off_the_disk_or_unknown_are_refused_and_the_next_is_served() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let end = DISK_BYTES / 512;
    for sector in [end, end - 1, u64::MAX, u64::MAX / 512] {
        assert_eq!(queue.request(kind::IN, sector, &[], 1024).0, IOERR, "read at {sector}");
        assert_eq!(queue.request(kind::OUT, sector, &[1; 1024], 0).0, IOERR, "write at {sector}");
    }
    let range = |sector, sector_count| RangeSegment { sector, sector_count, flags: 0 }.to_bytes();
    let half = [range(0, 8), range(end, 1)].concat();
    assert_eq!(queue.request(kind::DISCARD, 0, &half, 0).0, IOERR);
    assert_eq!(queue.request(kind::SCSI_CMD, 0, &[], 512).0, UNSUPP);
    assert_eq!(server.disk.asked(), [], "nothing of all that reached the disk");
    assert_eq!(queue.request(kind::IN, end - 2, &[], 1024).0, OK);
}

#[test]
fn a_read_only_disk_says_so_and_refuses_writes() {
    let server = Server::start(MemDisk::with(|info| {
        info.read_only = true;
        info.volatile_cache = false;
    }));
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let offered = client.frontend.get_features().unwrap();
    assert_eq!(offered & (f::RO | f::FLUSH | f::CONFIG_WCE | f::DISCARD | f::WRITE_ZEROES), f::RO);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, IOERR);
    assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
    assert_eq!(queue.request(kind::WRITE_ZEROES, 0, &[0; 16], 0).0, UNSUPP);
}

#[test]
fn a_request_has_the_priority_of_its_header_as_far_as_a_guest_may_choose_it() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let real_time = 1 << 13 | 3;
    for word in [0, 2 << 13 | 6, real_time, 0xffff_ffff] {
        queue.priority = word;
        assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
        assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
    }
    let best_effort = Priority::best_effort;
    let expected = [Priority::NONE, best_effort(6), best_effort(0), Priority::NONE];
    assert_eq!(*server.disk.priorities.lock().unwrap(), expected.map(|priority| [priority; 2]).concat());
}

#[test]
fn writes_are_durable_one_by_one_for_a_guest_that_cannot_flush() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, NO_CACHE);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
    let range = RangeSegment { sector: 0, sector_count: 1, flags: 0 }.to_bytes();
    assert_eq!(queue.request(kind::WRITE_ZEROES, 0, &range, 0).0, OK);
    let zeroes = Asked::WriteZeroes { offset: 0, length: 512, may_unmap: false, fua: true };
    let asked = [Asked::Flush, Asked::Write { offset: 0, fua: true }, zeroes];
    assert_eq!(server.disk.asked(), asked, "the flush is of what others have left");
}

#[test]
fn a_guest_switches_the_cache_and_nothing_else_in_the_configuration() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let config = read_config(&mut client);
    assert_eq!((config.capacity_sectors, config.num_queues, config.writeback), (DISK_BYTES / 512, 2, 1));
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let write =
        |client: &mut Client, offset, byte| client.frontend.set_config(offset, VhostUserConfigFlags::WRITABLE, &[byte]);
    write(&mut client, 32, 0).unwrap();
    assert_eq!(read_config(&mut client).writeback, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
    assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
    write(&mut client, 32, 1).unwrap();
    assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
    assert_eq!(
        server.disk.asked(),
        [
            Asked::Flush,
            Asked::Write { offset: 0, fua: true },
            Asked::Write { offset: 0, fua: true },
            Asked::Write { offset: 0, fua: false },
        ],
        "the first write after the switch takes along what was written before"
    );
    assert!(write(&mut client, 32, 2).is_err());
    assert!(write(&mut client, 0, 1).is_err());
    assert_eq!(read_config(&mut client).capacity_sectors, DISK_BYTES / 512);
    assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK, "the session goes on");
}

/// How many turns a full ring of reads takes, each of `length` bytes.
fn turns_for_a_full_ring(length: u32) -> u64 {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let (header, table) = (0x1_0000, 0x1_1000);
    guest.write(header, &RequestHeader { kind: kind::IN, priority: 0, sector: 0 }.to_bytes());
    let chain = [(header, 16, false), (0x4_0000, length, true), (header + 16, 1, true)];
    for head in 0..SIZE {
        queue.driver.put_indirect(head, table, &chain);
    }
    queue.driver.publish();
    queue.kick.write(1).unwrap();
    let mut used = 0;
    while used < usize::from(SIZE) {
        used += queue.wait().len();
    }
    let stats = server.export().stats()[0];
    assert_eq!((stats.requests, stats.failed), (u64::from(SIZE), 0));
    stats.batches
}

#[test]
fn many_bytes_are_taken_in_several_turns_so_that_other_rings_come_round() {
    assert_eq!(turns_for_a_full_ring(0x8000), u64::from(SIZE) / 4, "128 KiB a turn");
}

#[test]
fn of_a_long_line_a_turn_takes_half_so_that_the_guest_goes_on_meanwhile() {
    assert_eq!(SIZE, 64);
    assert_eq!(turns_for_a_full_ring(512), 4, "31, 16, 16 and 1");
}

#[test]
fn rings_are_spread_over_the_reactors() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let (mut first, mut second) = (client.queue(&guest, 0), client.queue(&guest, 1));
    assert_eq!(first.request(kind::OUT, 0, &[1; 512], 0).0, OK);
    assert_eq!(second.request(kind::IN, 0, &[], 512), (OK, vec![1; 512]));
    assert_eq!(*server.disk.threads.lock().unwrap(), ["reactor-0", "reactor-1"]);
}

#[test]
fn a_peer_that_leaves_in_the_middle_is_awaited_and_the_next_one_is_served() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    server.hold(true);
    queue.send(0, kind::OUT, 0, &[0x77; 512], 0);
    queue.send(1, kind::IN, 0, &[], 512);
    server.wait_submitted(2);
    drop(client);
    // The next peer is in the socket's queue until the requests of the first have ended.
    let second = std::thread::scope(|scope| {
        let next = scope.spawn(|| Client::connect(&server, 0));
        assert_waits(&next);
        server.hold(false);
        next.join().unwrap()
    });
    assert_eq!(server.disk.read(0, 512), [0x77; 512]);
    let mut client = second;
    let fresh = Guest::new();
    client.share(&fresh);
    let mut queue = client.queue(&fresh, 0);
    assert_eq!(queue.request(kind::IN, 0, &[], 512), (OK, vec![0x77; 512]));
}

#[test]
fn stopping_a_ring_waits_for_its_requests_and_says_where_to_go_on() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    server.hold(true);
    for slot in 0..3 {
        queue.send(slot, kind::OUT, u64::from(slot), &[0x33; 512], 0);
    }
    server.wait_submitted(4);
    let base = std::thread::scope(|scope| {
        let stop = scope.spawn(|| client.frontend.get_vring_base(0).unwrap());
        assert_waits(&stop);
        server.hold(false);
        stop.join().unwrap()
    });
    assert_eq!(base, queue.driver.position());
    assert_eq!(queue.driver.take_used().len(), 3, "all were given back before the answer");
    assert_eq!([queue.status(0), queue.status(1), queue.status(2)], [OK; 3]);
    queue.send(0, kind::FLUSH, 0, &[], 0);
    let mut other = client.queue(&guest, 1);
    assert_eq!(other.request(kind::FLUSH, 0, &[], 0).0, OK);
    assert!(queue.driver.take_used().is_empty(), "a stopped ring takes nothing");
    client.start(&queue, base as u16);
    assert_eq!(queue.wait().len(), 1, "it goes on where it was");
}

#[test]
fn a_change_of_the_memory_map_waits_for_requests_in_flight() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    server.hold(true);
    queue.send(0, kind::OUT, 0, &[0x44; 512], 0);
    queue.send(1, kind::IN, 0, &[], 512);
    server.wait_submitted(2);
    std::thread::scope(|scope| {
        // The same memory in two regions: every pointer into the old map is void.
        let half = VhostUserMemoryRegionInfo { memory_size: region(&guest).memory_size / 2, ..region(&guest) };
        let size = half.memory_size;
        let upper =
            VhostUserMemoryRegionInfo { guest_phys_addr: size, userspace_addr: size, mmap_offset: size, ..half };
        let frontend = &client.frontend;
        let change = scope.spawn(move || frontend.set_mem_table(&[half, upper]).map(|_| ()).unwrap());
        assert_waits(&change);
        server.hold(false);
        change.join().unwrap();
    });
    let mut ended = queue.driver.take_used();
    ended.sort_unstable();
    assert_eq!(ended, [(0, 1), (3, 513)], "both had ended before the map changed");
    assert_eq!(queue.request(kind::IN, 0, &[], 512), (OK, vec![0x44; 512]));

    // Memory can also be added and removed piece by piece while rings run.
    let extra = VhostUserMemoryRegionInfo { guest_phys_addr: 1 << 40, userspace_addr: 1 << 40, ..region(&guest) };
    assert!(client.frontend.get_max_mem_slots().unwrap() >= 2);
    client.frontend.add_mem_region(&extra).unwrap();
    assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
    client.frontend.remove_mem_region(&extra).unwrap();
    assert_eq!(queue.request(kind::IN, 0, &[], 512).0, OK);
}

#[test]
fn memory_is_registered_as_long_as_a_ring_uses_it_and_only_if_somebody_asks() {
    let mut options = ExportOptions::default();
    options.fixed_buffers = true;
    let server = Server::start_with(MemDisk::new(), options);
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let all = region(&guest).memory_size;
    let registered = || server.reactors[0].registered();
    assert!(registered().is_empty(), "no ring runs yet");
    let mut queue = client.queue(&guest, 0);
    assert_eq!(registered(), [[all]]);
    server.hold(true);
    queue.send(0, kind::IN, 0, &[], 512);
    server.wait_submitted(1);
    std::thread::scope(|scope| {
        let half = VhostUserMemoryRegionInfo { memory_size: all / 2, ..region(&guest) };
        let frontend = &client.frontend;
        let change = scope.spawn(move || frontend.set_mem_table(&[half]).map(|_| ()).unwrap());
        assert_waits(&change);
        assert_eq!(registered(), [[all]], "a request is in flight in it");
        server.hold(false);
        change.join().unwrap();
    });
    assert_eq!(registered(), [[all / 2]]);
    drop(client);
    while !registered().is_empty() {
        std::thread::yield_now();
    }

    let guest = Guest::new();
    let plain = Server::start(MemDisk::new());
    let mut client = Client::connect(&plain, 0);
    client.share(&guest);
    assert_eq!(client.queue(&guest, 0).request(kind::FLUSH, 0, &[], 0).0, OK);
    assert!(plain.reactors[0].registered().is_empty());
}

#[test]
fn a_faulty_ring_stops_alone_until_it_is_set_up_again() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let (mut bad, mut good) = (client.queue(&guest, 0), client.queue(&guest, 1));
    match &mut bad.driver {
        AnyDriver::Split(driver) => {
            driver.put_desc(5, Desc { address: 0x1_0000, length: 16, flags: NEXT, next: 5 });
            driver.offer(5);
            driver.publish();
        }
        // A chain that never ends there goes round the whole ring.
        AnyDriver::Packed { driver, .. } => (0..SIZE).for_each(|id| driver.put_next(0x1_0000, 16, id, NEXT)),
    }
    bad.kick.write(1).unwrap();
    assert!(is_readable(&bad.err, PATIENCE_SECONDS), "the fault is signalled");
    if !PACKED {
        // In the packed ring there is no room.
        bad.send(0, kind::FLUSH, 0, &[], 0);
    }
    for _ in 0..10 {
        assert_eq!(good.request(kind::FLUSH, 0, &[], 0).0, OK);
    }
    assert!(bad.driver.take_used().is_empty());
    assert!(!is_readable(&good.err, 0));
    client.share(&guest);
    let base = client.frontend.get_vring_base(0).unwrap();
    assert_eq!(server.export().stats()[0].faults, 1, "a change of the memory map does not start it again");
    // A reset driver begins with a clean ring.
    bad.driver.reset();
    assert_eq!(base, bad.driver.position(), "the bad chain was not taken");
    client.start(&bad, 0);
    assert_eq!(bad.request(kind::FLUSH, 0, &[], 0).0, OK);
}

#[test]
fn a_ring_outside_memory_does_not_start_and_the_session_goes_on() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let mut addresses = support::addresses(&queue.driver);
    addresses.used_ring_addr = 1 << 50;
    client.frontend.set_vring_addr(0, &addresses).unwrap();
    assert!(is_readable(&queue.err, PATIENCE_SECONDS));
    client.start(&queue, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
}

#[test]
fn a_peer_that_shrinks_its_memory_ends_only_its_session() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    std::fs::File::from(guest.file.try_clone().unwrap()).set_len(0).unwrap();
    queue.kick.write(1).unwrap();
    let begun = std::time::Instant::now();
    while client.frontend.get_features().is_ok() {
        assert!(begun.elapsed().as_secs() < PATIENCE_SECONDS as u64, "the peer is not cut off");
        std::thread::yield_now();
    }
    let fresh = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&fresh);
    let mut queue = client.queue(&fresh, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
}

#[test]
fn a_write_whose_data_were_cut_away_is_never_called_done() {
    let server = Server::start(MemDisk::new());
    let (guest, cut) = (Guest::new(), Guest::new());
    let mut client = Client::connect(&server, 0);
    let far = 1 << 30;
    let region = VhostUserMemoryRegionInfo { guest_phys_addr: far, userspace_addr: far, ..support::region(&cut) };
    client.frontend.set_mem_table(&[support::region(&guest), region]).unwrap();
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    std::fs::File::from(cut.file.try_clone().unwrap()).set_len(0).unwrap();
    // Rings and status lie in memory that is there.
    let header = 0x1_0000;
    guest.write(header, &RequestHeader { kind: kind::OUT, priority: 0, sector: 0 }.to_bytes());
    queue.driver.put_chain(&[0, 1, 2], &[(header, 16, false), (far, 512, false), (header + 16, 1, true)]);
    queue.driver.offer(0);
    queue.driver.publish();
    queue.kick.write(1).unwrap();
    let begun = std::time::Instant::now();
    while client.frontend.get_features().is_ok() {
        assert!(begun.elapsed().as_secs() < PATIENCE_SECONDS as u64, "the peer is not cut off");
        std::thread::yield_now();
    }
    assert_eq!(queue.driver.take_used(), []);
}

#[test]
fn a_memory_table_with_room_to_spare_is_taken() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    assert_eq!(client.share_in_long_message(&guest, 1), 0);
    assert_eq!(client.queue(&guest, 0).request(kind::FLUSH, 0, &[], 0).0, OK);
    drop(client);
    let client = Client::connect(&server, 0);
    assert_ne!(client.share_in_long_message(&guest, 2), 0, "two descriptors for one region");
}

#[test]
fn a_broken_message_ends_only_its_session() {
    let server = Server::start(MemDisk::new());
    let client = Client::connect(&server, 0);
    assert!(client.frontend.set_features(1 << 63).is_err(), "a feature that was not offered");
    drop(client);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[1, 0, 0, 0, 1, 0]] {
        let mut stream = std::os::unix::net::UnixStream::connect(&server.socket).unwrap();
        std::io::Write::write_all(&mut stream, garbage).unwrap();
    }
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    assert_eq!(client.queue(&guest, 0).request(kind::FLUSH, 0, &[], 0).0, OK);
}

// QEMU shows the guest's drivers its own copy of the byte, and reads it from us neither after a reset nor after it has
// connected again. A driver that still sees write-through never flushes: going back to write-back would lose its writes.
#[test]
fn a_device_reset_forgets_the_rings_and_keeps_the_cache_mode() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let features = client.frontend.get_features().unwrap();
    let write_after_reset = |client: &mut Client, queue: &mut Queue<'_>, features| {
        client.frontend.reset_device().unwrap();
        client.frontend.set_features(features).unwrap();
        queue.driver.reset();
        client.start(queue, 0);
        assert_eq!(queue.request(kind::OUT, 0, &[1; 512], 0).0, OK);
        server.disk.asked().pop()
    };
    let write = |fua| Some(Asked::Write { offset: 0, fua });
    assert_eq!(write_after_reset(&mut client, &mut queue, features), write(false));
    client.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(write_after_reset(&mut client, &mut queue, features), write(true));
    assert_eq!(read_config(&mut client).writeback, 0);
    let no_choice = features & !f::CONFIG_WCE;
    assert_eq!(write_after_reset(&mut client, &mut queue, no_choice), write(false), "this one flushes");
    assert_eq!(write_after_reset(&mut client, &mut queue, no_choice & !f::FLUSH), write(true));
    assert_eq!(write_after_reset(&mut client, &mut queue, features), write(true), "the last word holds");
}

#[test]
fn a_socket_that_was_passed_in_is_served_and_left_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("passed.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let reactor = support::reactor::TestReactor::start("reactor");
    let disk = std::sync::Arc::new(support::disk::Shared(MemDisk::new()));
    let export = Export::adopt(listener, disk, vec![reactor.handle()], ExportOptions::default()).unwrap();
    let frontend = Frontend::connect(&path, 1).unwrap();
    assert_ne!(frontend.get_features().unwrap() & f::VERSION_1, 0);
    export.stop();
    assert!(frontend.get_features().is_err() && path.exists());
}

#[test]
fn stopping_the_export_awaits_requests_and_removes_the_socket() {
    let mut server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    server.hold(true);
    queue.send(0, kind::OUT, 0, &[0x55; 512], 0);
    server.wait_submitted(1);
    let export = server.export.take().unwrap();
    std::thread::scope(|scope| {
        let stop = scope.spawn(move || export.stop());
        assert_waits(&stop);
        server.hold(false);
        stop.join().unwrap();
    });
    assert_eq!((queue.status(0), server.disk.read(0, 512)), (OK, vec![0x55; 512]));
    assert!(!server.socket.exists());
    assert!(Frontend::connect(&server.socket, 1).is_err());
    assert_eq!(server.disk.submitted.load(Ordering::SeqCst), 1);
}

#[test]
fn a_silent_peer_does_not_keep_the_export_from_stopping() {
    let mut server = Server::start(MemDisk::new());
    let mut silent = std::os::unix::net::UnixStream::connect(&server.socket).unwrap();
    // Half a header: the server waits for the rest.
    std::io::Write::write_all(&mut silent, &[1, 0, 0, 0, 1, 0]).unwrap();
    server.export.take().unwrap().stop();
}

#[test]
fn impossible_options_name_what_is_possible() {
    let server = Server::start(MemDisk::new());
    let listen = |change: fn(&mut ExportOptions), reactors| {
        let disk = std::sync::Arc::new(support::disk::Shared(MemDisk::new()));
        let mut options = ExportOptions::default();
        change(&mut options);
        let refused = Export::listen(&server.socket.with_extension("other"), disk, reactors, options);
        refused.map(|_| ()).unwrap_err().to_string()
    };
    let handle = || vec![server.reactors[0].handle()];
    let size = listen(|options| options.queue_size = 100, handle());
    assert!(size.contains("100") && size.contains("power of two"), "{size}");
    let queues = listen(|options| options.max_queues = 0, handle());
    assert!(queues.contains("1 to"), "{queues}");
    assert!(listen(|_| {}, Vec::new()).contains("reactor"));
}
