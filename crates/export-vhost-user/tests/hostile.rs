//! Peers that mean harm: what they do ends their own session, and nobody else's.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::Guest;
use rustix::fs::{OFlags, fcntl_setfl};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use support::disk::MemDisk;
use support::{Client, PATIENCE_SECONDS, Server};
use vhost::VhostBackend;
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
