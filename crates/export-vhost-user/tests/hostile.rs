//! Peers that mean harm: what they do ends their own session, and nobody else's.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::Guest;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use support::disk::MemDisk;
use support::{Client, PATIENCE_SECONDS, Server};
use vhost::VhostBackend;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
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
    // The flag is cleared only after the server has looked at it.
    fcntl_setfl(memory::duplicate_fd(&queue.call).unwrap(), OFlags::empty()).unwrap();
    queue.call.write(u64::MAX - 1).unwrap();
    queue.driver.set_used_event(queue.driver.used_index);
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

/// SET_VRING_CALL of ring 0 with a socket, which the front end would not send.
fn set_call_to(client: &Client, socket: &UnixStream) {
    let words = [13_u32, 1, 8, 0, 0];
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [socket.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&client.stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
}

/// A client that passes its own end of the session as a descriptor and then goes.
fn leaves_a_ghost(pass: impl FnOnce(&mut Client, &UnixStream)) {
    let server = Server::start(MemDisk::new());
    let mut client = Client::connect(&server, 0);
    let own = client.stream.try_clone().unwrap();
    pass(&mut client, &own);
    drop((client, own));
    let next = UnixStream::connect(&server.socket).unwrap();
    next.set_read_timeout(Some(PATIENCE)).unwrap();
    let frontend = Frontend::from_stream(next, 1);
    assert!(frontend.get_features().is_ok(), "the socket is busy with a peer that has gone");
}

#[test]
fn a_peer_that_passes_its_own_socket_and_goes_is_gone() {
    leaves_a_ghost(|client, own| {
        assert!(client.frontend.set_backend_request_fd(own).is_err());
    });
    leaves_a_ghost(|client, own| set_call_to(client, own));
}
