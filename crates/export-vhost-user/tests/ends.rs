//! How an export ends: after its requests in flight, and though its peer keeps the session's thread in a call that never
//! ends.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::Guest;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::disk::MemDisk;
use support::{Client, Server, region};
use vhost::VhostBackend;
use virtio::blk::request_type as kind;

/// Sends `SET_VRING_CALL` for ring 0 with this descriptor, whose last copy is then with the receiver: it takes no message
/// before the rest is there, and by then ours is closed.
fn set_call_to(client: &Client, socket: TcpStream) {
    let words: [u32; 5] = [13, 1, 8, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let fds = [socket.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let (header, rest) = bytes.split_at(12);
    sendmsg(&client.stream, &[IoSlice::new(header)], &mut control, SendFlags::empty()).unwrap();
    drop(socket);
    (&client.stream).write_all(rest).unwrap();
}

/// A socket that takes an hour to close, as nobody reads what it has sent.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 1 << 16]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
    (ours, theirs)
}

/// QEMU goes on where the used ring stands when the connection breaks: what completes later is done twice, by two daemons.
#[test]
fn the_connection_ends_after_the_last_request_in_flight() {
    let mut server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    server.hold(true);
    queue.send(0, kind::OUT, 0, &[7; 512], 0);
    server.wait_submitted(1);
    let export = server.export.take().unwrap();
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| export.stop());
        let is_cut = |timeout: Duration| {
            client.stream.set_read_timeout(Some(timeout)).unwrap();
            (&client.stream).read(&mut [0]).is_ok_and(|count| count == 0)
        };
        // Longer than a peer may take to read an answer.
        let early = is_cut(Duration::from_millis(1500));
        server.hold(false);
        assert!(!early, "the peer was cut off with a request in flight");
        assert!(is_cut(Duration::from_secs(20)));
        assert_eq!(queue.driver.take_used().len(), 1);
        ending.join().unwrap();
    });
}

/// Connects a monitor. Its ring has ended one request, and the next hangs and was given up.
fn with_requests_given_up(server: &Server, guest: &Guest) -> Client {
    let mut client = Client::connect(server, 0);
    client.share(guest);
    let mut queue = client.queue(guest, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[7; 512], 0).0, 0);
    server.hold(true);
    queue.send(1, kind::OUT, 1, &[8; 512], 0);
    server.wait_submitted(2);
    server.export().surrender().give_up();
    client
}

/// A monitor keeps the base that it is told for the ring's next owner. A ring whose requests were given up has no true
/// one: the base at which the session began would have old entries carried out again.
#[test]
fn a_monitor_that_stops_a_ring_is_not_told_its_place_when_its_requests_are_given_up() {
    let (server, guest) = (Server::start(MemDisk::new()), Guest::new());
    let client = with_requests_given_up(&server, &guest);
    let base = client.frontend.get_vring_base(0);
    assert!(base.is_err(), "the place is {base:?}");
    server.hold(false);
}

/// Nor does the ring begin again at that place, when the monitor only changes something.
#[test]
fn a_ring_whose_requests_were_given_up_does_not_go_on_in_its_session() {
    let (server, guest) = (Server::start(MemDisk::new()), Guest::new());
    let client = with_requests_given_up(&server, &guest);
    let changed = client.frontend.set_mem_table(&[region(&guest)]);
    assert!(changed.is_err(), "the monitor's change was carried out");
    assert_eq!(server.disk.submitted.load(Ordering::SeqCst), 2, "an old entry was carried out again");
    server.hold(false);
}

/// What completes while the export stops finds a call descriptor that keeps the reactor waiting.
#[test]
fn an_export_stops_though_its_last_request_cannot_be_told() {
    let mut server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, 0);
    block::run_and_wait(server.reactors[0].handle().as_ref(), |_| {}).unwrap();
    let _ = queue.call.read();
    rustix::fs::fcntl_setfl(memory::duplicate_fd(&queue.call).unwrap(), rustix::fs::OFlags::empty()).unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    queue.driver.want_next();
    server.hold(true);
    queue.send(0, kind::OUT, 0, &[7; 512], 0);
    server.wait_submitted(2);
    let export = server.export.take().unwrap();
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| export.stop());
        // The session's thread has taken the wake by then, or finds it afterwards: both end.
        std::thread::sleep(Duration::from_millis(300));
        server.hold(false);
        ending.join().unwrap();
    });
    assert_eq!(queue.driver.take_used().len(), 1);
    assert!(!server.socket.exists());
}

#[test]
fn a_descriptor_that_is_never_closed_keeps_neither_the_export_nor_its_disk() {
    let mut server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::OUT, 0, &[7; 512], 0).0, 0);
    let (ours, _theirs) = lingering();
    set_call_to(&client, ours);
    // The session's thread refuses the socket, and closes it.
    std::thread::sleep(Duration::from_millis(300));
    let served = server.disk.clone();
    server.export.take().unwrap().stop();
    assert!(!server.socket.exists());
    drop(server);
    assert_eq!(Arc::strong_count(&served), 1, "the disk is still held");
}
