//! A disk that changes while it is exported, and one that is exported several times.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use block::ReactorHandle;
use model::Guest;
use ringdisk_export_vhost_user::{Export, ExportOptions};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use support::disk::{Asked, DISK_BYTES, MemDisk, Shared};
use support::reactor::TestReactor;
use support::{Client, Server, read_config};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use virtio::blk::{RangeSegment, features as f, request_type as kind};

const OK: u8 = 0;
const IOERR: u8 = 1;

/// CONFIG_CHANGE_MSG, with no answer asked for.
const CONFIG_CHANGE: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// Opens the channel for the server's own messages; gives the client's end.
fn open_channel(client: &mut Client) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(support::PATIENCE_SECONDS as u64))).unwrap();
    client.frontend.set_backend_request_fd(&theirs).unwrap();
    ours
}

fn wait_for_news(mut channel: &UnixStream) {
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    assert_eq!(message, CONFIG_CHANGE);
}

fn capacity_bytes(client: &mut Client) -> u64 {
    read_config(client).capacity_sectors * 512
}

#[test]
fn a_guest_hears_of_a_new_size_and_uses_it_while_its_queues_work() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let channel = open_channel(&mut client);
    client.share(&guest);
    let (mut queue, mut busy) = (client.queue(&guest, 0), client.queue(&guest, 1));
    let behind = DISK_BYTES / 512;
    assert_eq!(queue.request(kind::OUT, behind, &[7; 512], 0).0, IOERR);
    std::thread::scope(|scope| {
        let load = scope.spawn(move || {
            for sector in 0..300 {
                assert_eq!(busy.request(kind::OUT, sector, &[1; 512], 0).0, OK);
            }
        });
        for size_bytes in [2, 3, 4].map(|times| DISK_BYTES * times) {
            server.disk.grow(size_bytes);
            wait_for_news(&channel);
            assert_eq!(capacity_bytes(&mut client), size_bytes);
            assert_eq!(queue.request(kind::OUT, size_bytes / 512 - 1, &[7; 512], 0).0, OK);
            assert_eq!(queue.request(kind::IN, size_bytes / 512, &[], 512).0, IOERR);
        }
        load.join().unwrap();
    });
    assert_eq!(server.disk.read(DISK_BYTES as usize * 4 - 512, 512), [7; 512]);
}

#[test]
fn a_guest_that_comes_later_sees_the_size_of_then() {
    let server = Server::start(MemDisk::new());
    server.disk.grow(DISK_BYTES * 2);
    let mut client = Client::connect(&server, 0);
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES * 2);
    drop(client);
    server.disk.grow(DISK_BYTES * 3);
    let mut client = Client::connect(&server, 0);
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES * 3);
}

#[test]
fn a_size_that_changes_before_the_channel_is_open_is_told_when_it_is() {
    let server = Server::start(MemDisk::new());
    let mut client = Client::connect(&server, 0);
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES);
    server.disk.grow(DISK_BYTES * 2);
    let channel = open_channel(&mut client);
    wait_for_news(&channel);
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES * 2);
}

/// Whether the server has sent anything that was not read yet. What follows a message is sent before the next one is
/// answered.
fn has_news(client: &mut Client, mut channel: &UnixStream) -> bool {
    client.frontend.get_features().unwrap();
    channel.set_nonblocking(true).unwrap();
    let mut message = [0; 12];
    let read = channel.read(&mut message);
    channel.set_nonblocking(false).unwrap();
    read.is_ok_and(|_| message == CONFIG_CHANGE)
}

#[test]
fn a_size_that_changes_while_no_ring_runs_is_told_again_when_one_starts() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    let channel = open_channel(&mut client);
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    assert!(!has_news(&mut client, &channel), "the peer knows all");

    assert_eq!(client.frontend.get_vring_base(0).unwrap(), 1);
    server.disk.grow(DISK_BYTES * 2);
    wait_for_news(&channel);
    // The peer's device is stopped, so it does not look.
    client.start(&queue, 1);
    assert!(has_news(&mut client, &channel), "it has never read this size");
    assert_eq!(capacity_bytes(&mut client), DISK_BYTES * 2);
    let other = client.queue(&guest, 1);
    client.frontend.get_vring_base(0).unwrap();
    client.frontend.get_vring_base(1).unwrap();
    client.start(&other, 0);
    assert!(!has_news(&mut client, &channel), "it was told and has read");
}

#[test]
fn a_peer_that_reads_nothing_when_it_connects_again_is_told_when_its_rings_go_on() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    for resets in [false, true] {
        let mut client = Client::connect(&server, 0);
        let channel = open_channel(&mut client);
        client.share(&guest);
        assert!(!has_news(&mut client, &channel), "its device is not started: it would not look");
        let one = client.queue(&guest, 0);
        assert!(has_news(&mut client, &channel));
        let _other = client.queue(&guest, 1);
        assert!(!has_news(&mut client, &channel), "once");
        if resets {
            client.frontend.reset_device().unwrap();
            client.start(&one, 0);
            assert!(has_news(&mut client, &channel), "it still has read nothing");
        }
    }
}

/// A second socket for the server's disk.
struct SecondExport {
    _export: Export,
    _reactor: TestReactor,
    socket: PathBuf,
}

impl SecondExport {
    fn of(server: &Server, read_only: bool) -> Self {
        let reactor = TestReactor::start("second");
        let socket = server.socket.with_extension("second");
        let mut options = ExportOptions::default();
        (options.max_queues, options.read_only) = (support::QUEUES, read_only);
        let disk = Arc::new(Shared(Arc::clone(&server.disk)));
        let handles: Vec<Arc<dyn ReactorHandle>> = vec![reactor.handle()];
        let export = Export::listen(&socket, disk, handles, options).unwrap();
        Self { _export: export, _reactor: reactor, socket }
    }
}

#[test]
fn a_read_only_export_of_a_writable_disk_lets_no_write_through() {
    let server = Server::start(MemDisk::new());
    let second = SecondExport::of(&server, true);
    let (guest, reader) = (Guest::new(), Guest::new());
    let (mut writing, mut reading) = (Client::connect(&server, 0), Client::connect_to(&second.socket, 0));
    let changing = f::FLUSH | f::CONFIG_WCE | f::DISCARD | f::WRITE_ZEROES;
    assert_eq!(reading.frontend.get_features().unwrap() & (f::RO | changing), f::RO);
    assert_eq!(writing.frontend.get_features().unwrap() & (f::RO | changing), changing);
    writing.share(&guest);
    reading.share(&reader);
    let (mut writer, mut queue) = (writing.queue(&guest, 0), reading.queue(&reader, 0));
    let range = RangeSegment { sector: 0, sector_count: 1, flags: 0 }.to_bytes();
    assert_ne!(queue.request(kind::OUT, 0, &[9; 512], 0).0, OK);
    assert_ne!(queue.request(kind::WRITE_ZEROES, 0, &range, 0).0, OK);
    assert_ne!(queue.request(kind::DISCARD, 0, &range, 0).0, OK);
    assert!(reading.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).is_err());
    assert_eq!(server.disk.asked(), [], "nothing of all that reached the disk");
    assert_eq!(writer.request(kind::OUT, 0, &[5; 512], 0).0, OK);
    assert_eq!(queue.request(kind::IN, 0, &[], 512), (OK, vec![5; 512]));
}

#[test]
fn each_guest_of_a_disk_has_its_own_cache_type() {
    let server = Server::start(MemDisk::new());
    let second = SecondExport::of(&server, false);
    let (one, other) = (Guest::new(), Guest::new());
    let (mut first, mut second) = (Client::connect(&server, 0), Client::connect_to(&second.socket, 0));
    first.share(&one);
    second.share(&other);
    let (mut through, mut back) = (first.queue(&one, 0), second.queue(&other, 0));
    let switch = |client: &mut Client, byte| {
        client.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[byte]).unwrap();
    };
    switch(&mut first, 0);
    switch(&mut second, 0);
    switch(&mut second, 1);
    assert_eq!((read_config(&mut first).writeback, read_config(&mut second).writeback), (0, 1));
    assert_eq!(through.request(kind::OUT, 1, &[1; 512], 0).0, OK);
    assert_eq!(back.request(kind::OUT, 2, &[1; 512], 0).0, OK);
    let writes: Vec<_> = server.disk.asked().into_iter().filter(|asked| *asked != Asked::Flush).collect();
    assert_eq!(writes, [Asked::Write { offset: 512, fua: true }, Asked::Write { offset: 1024, fua: false }]);
}
