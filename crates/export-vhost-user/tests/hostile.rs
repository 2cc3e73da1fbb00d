//! Peers that mean harm: what they do ends their own session, and nobody else's.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use block::run_and_wait;
use model::Guest;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use support::disk::MemDisk;
use support::{Client, PATIENCE_SECONDS, Server};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio::blk::request_type as kind;

const OK: u8 = 0;
const PATIENCE: Duration = Duration::from_secs(PATIENCE_SECONDS as u64);

/// Waits until the server has ended the client's session.
fn assert_cut_off(client: &Client) {
    let begun = Instant::now();
    while client.frontend.get_features().is_ok() {
        assert!(begun.elapsed() < PATIENCE, "the peer is not cut off");
        std::thread::yield_now();
    }
}

#[test]
fn a_peer_that_makes_its_notifications_wait_does_not_hold_up_the_reactor() {
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
    // What ended is seen before it is told: nothing is told any more after a turn.
    run_and_wait(server.reactors[0].handle().as_ref(), |_| {}).unwrap();
    let _ = queue.call.read();
    // The flag is cleared only after the server has looked at it.
    fcntl_setfl(memory::duplicate_fd(&queue.call).unwrap(), OFlags::empty()).unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    queue.driver.want_next();
    queue.send(0, kind::IN, 0, &[], 512);
    let (sender, turned) = channel();
    while server.export().stats()[0].requests < 2 {
        std::thread::yield_now();
    }
    server.reactors[0].handle().run(Box::new(move |_| sender.send(()).unwrap())).unwrap();
    let turned = turned.recv_timeout(PATIENCE);
    if turned.is_err() {
        // Lets the reactor go, so that the test ends.
        queue.call.read().unwrap();
    }
    assert_eq!(turned, Ok(()), "the reactor waits for the peer");
    assert_cut_off(&client);
    let fresh = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&fresh);
    assert_eq!(client.queue(&fresh, 0).request(kind::FLUSH, 0, &[], 0).0, OK);
}

/// Sends bytes with descriptors, which the front end would not send.
fn send_with(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    try_to_send_with(stream, bytes, fds).unwrap();
}

fn try_to_send_with(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// SET_VRING_CALL of ring 0.
fn set_call_to(client: &Client, socket: &UnixStream) {
    send_with(&client.stream, &words(&[13, 1, 8, 0, 0]), &[socket.as_fd()]);
}

/// Fails unless somebody new is served.
fn assert_free(server: &Server) {
    let next = UnixStream::connect(&server.socket).unwrap();
    next.set_read_timeout(Some(PATIENCE)).unwrap();
    let frontend = Frontend::from_stream(next, 1);
    assert!(frontend.get_features().is_ok(), "the socket is busy with a peer that has gone");
}

/// A client that passes its own end of the session as a descriptor and then goes.
fn leaves_a_ghost(pass: impl FnOnce(&mut Client, &UnixStream)) {
    let server = Server::start(MemDisk::new());
    let mut client = Client::connect(&server, 0);
    let own = client.stream.try_clone().unwrap();
    pass(&mut client, &own);
    drop((client, own));
    assert_free(&server);
}

#[test]
fn a_peer_that_passes_its_own_socket_and_goes_is_gone() {
    leaves_a_ghost(|client, own| {
        assert!(client.frontend.set_backend_request_fd(own).is_err());
    });
    leaves_a_ghost(|client, own| set_call_to(client, own));
}

#[test]
fn a_peer_that_hides_its_own_socket_in_the_queue_of_another_and_goes_is_gone() {
    leaves_a_ghost(|client, own| {
        let (near, far) = UnixStream::pair().unwrap();
        send_with(&near, &[1], &[own.as_fd()]);
        set_call_to(client, &far);
    });
    leaves_a_ghost(|client, own| {
        let (near, far) = UnixStream::pair().unwrap();
        send_with(&near, &[1], &[own.as_fd()]);
        client.frontend.set_backend_request_fd(&far).unwrap();
    });
    leaves_a_ghost(|client, own| {
        let (near, far) = UnixStream::pair().unwrap();
        set_call_to(client, &far);
        // Answered when the call is set.
        client.frontend.get_features().unwrap();
        let sent = try_to_send_with(&near, &[1], &[own.as_fd()]);
        assert_eq!(sent, Err(Errno::PIPE), "what we only send to receives nothing");
    });
}

/// A message with one descriptor, of a ring or of memory.
fn pass_own(client: &Client, own: &UnixStream, code: u32, body: &[u32]) {
    let length_bytes = 4 * body.len() as u32;
    send_with(&client.stream, &words(&[&[code, 1, length_bytes], body].concat()), &[own.as_fd()]);
}

#[test]
fn a_peer_that_passes_its_own_socket_where_something_else_belongs_is_gone() {
    const SET_MEM_TABLE: (u32, &[u32]) = (5, &[1, 0, 0, 0, 4096, 0, 0, 0, 0, 0]);
    const SET_LOG_BASE: (u32, &[u32]) = (6, &[4096, 0, 0, 0]);
    const SET_LOG_FD: (u32, &[u32]) = (7, &[]);
    const SET_VRING_KICK: (u32, &[u32]) = (12, &[0, 0]);
    const SET_VRING_ERR: (u32, &[u32]) = (14, &[0, 0]);
    // No message that should have a descriptor.
    const GET_FEATURES: (u32, &[u32]) = (1, &[]);
    const SET_INFLIGHT_FD: (u32, &[u32]) = (32, &[4096, 0, 0, 0, 1 << 16, 64]);
    const ADD_MEM_REG: (u32, &[u32]) = (37, &[0, 0, 0, 0, 4096, 0, 0, 0, 0, 0]);
    let messages = [SET_MEM_TABLE, SET_LOG_BASE, SET_LOG_FD, SET_VRING_KICK, SET_VRING_ERR, GET_FEATURES];
    for (code, body) in messages.into_iter().chain([SET_INFLIGHT_FD, ADD_MEM_REG]) {
        eprintln!("message {code}");
        leaves_a_ghost(|client, own| pass_own(client, own, code, body));
    }
}

#[test]
fn a_peer_gets_its_memory_whatever_others_have_mapped() {
    const LARGEST_BYTES: u64 = 8 << 40;
    let region = |file: &OwnedFd, length_bytes| VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: length_bytes,
        userspace_addr: 0,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let file = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let server = Server::start(MemDisk::new());
    rustix::fs::ftruncate(&file, 64 << 40).unwrap();
    // More than all the address space there is for all.
    let greedy = Client::connect(&server, 0);
    assert!(greedy.frontend.set_mem_table(&[region(&file, 0x3fe6_6666_6000)]).is_err());
    drop(greedy);
    let greedy: Vec<_> = std::iter::repeat_with(|| {
        let server = Server::start(MemDisk::new());
        let client = Client::connect(&server, 0);
        client.frontend.set_mem_table(&[region(&file, LARGEST_BYTES)]).is_ok().then_some((server, client))
    })
    .map_while(|taken| taken)
    .take(8)
    .collect();
    assert!((2..8).contains(&greedy.len()), "{} peers have {LARGEST_BYTES:#x} bytes each", greedy.len());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    assert_eq!(client.queue(&guest, 0).request(kind::FLUSH, 0, &[], 0).0, OK);
    // And what is common for an honest guest.
    client.frontend.set_mem_table(&[region(&file, 16 << 30)]).unwrap();
}

const PEER: &str = "RINGDISK_TEST_PEER";
const SOCKET: &str = "RINGDISK_TEST_SOCKET";

/// Not a test, but a process that some below start: connects, does what it is told with its end, and exits.
#[test]
fn a_peer_of_another_test() {
    let Ok(what) = std::env::var(PEER) else { return };
    let stream = UnixStream::connect(std::env::var_os(SOCKET).unwrap()).unwrap();
    match what.as_str() {
        // A part of a message; what comes with it is this end.
        "leave-a-part" => send_with(&stream, &words(&[13, 1, 8, 0]), &[stream.as_fd()]),
        // To whoever reads our input, or does not.
        "pass-on" => send_with(std::io::stdin(), &[1], &[stream.as_fd()]),
        other => panic!("{other}?"),
    }
}

fn run_peer(server: &Server, what: &str, input: UnixStream) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_peer_of_another_test"])
        .env(PEER, what)
        .env(SOCKET, &server.socket)
        .stdin(OwnedFd::from(input))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_part_of_a_message_keeps_no_session_of_a_process_that_has_exited() {
    let server = Server::start(MemDisk::new());
    let (_near, far) = UnixStream::pair().unwrap();
    run_peer(&server, "leave-a-part", far);
    assert_free(&server);
}

#[test]
fn a_peer_whose_process_has_exited_makes_room_for_another_wherever_its_socket_is() {
    let server = Server::start(MemDisk::new());
    // Its end stays in this socket's queue.
    let (_unread, far) = UnixStream::pair().unwrap();
    run_peer(&server, "pass-on", far);
    assert_free(&server);
}

#[test]
fn a_session_that_was_passed_on_stays_while_its_guest_makes_requests() {
    let server = Server::start(MemDisk::new());
    let (near, far) = UnixStream::pair().unwrap();
    run_peer(&server, "pass-on", far);
    let mut client = Client::over(receive(&near), 0);
    let guest = Guest::new();
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let newcomer = UnixStream::connect(&server.socket).unwrap();
    newcomer.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    send_with(&newcomer, &words(&[1, 1, 0]), &[]);
    // For longer than a quiet guest would be left in peace.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(7) {
        assert_eq!(queue.request(kind::FLUSH, 0, &[], 0).0, OK);
        assert!((&newcomer).read(&mut [0; 20]).is_err(), "two peers are served at once");
        std::thread::sleep(Duration::from_millis(100));
    }
    newcomer.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!((&newcomer).read(&mut [0; 20]).is_ok_and(|length| length > 0), "nobody else is ever served");
}

fn receive(stream: &UnixStream) -> UnixStream {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(stream, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::empty()).unwrap();
    let fds = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.unwrap().into()
}
