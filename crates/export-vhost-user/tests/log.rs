//! What a guest does again and again is not logged again and again. In a process of its own, whose log is counted.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use block::{IoError, IoErrorKind};
use model::Guest;
use std::io::{Read, Write};
use support::disk::MemDisk;
use support::{Client, Server, addresses};
use testkit::{keep_log, kept_lines};
use tracing::Level;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use virtio::blk::request_type as kind;

const TIMES: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

fn lines_with(text: &str) -> usize {
    kept_lines(text).len()
}

#[test]
fn failures_of_the_storage_are_logged_with_their_place_and_a_full_disk_by_its_name() {
    keep_log(Level::INFO, "");
    let server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let mut queue = client.queue(&guest, 0);
    let mut fail = |error: IoError, kind, times| {
        *server.disk.fail.lock().unwrap() = Some(error);
        for _ in 0..times {
            queue.request(kind, 3, &[0; 512], 0);
        }
    };
    let ranges = |sectors: &[u64]| -> Vec<u8> {
        let range = |sector: &u64| [&sector.to_le_bytes()[..], &8_u32.to_le_bytes(), &[0; 4]].concat();
        sectors.iter().flat_map(range).collect()
    };
    fail(IoError::EIO, kind::OUT, TIMES);
    assert_eq!(lines_with("the guest's write at byte 1536 failed: Input/output error"), LINES);
    fail(IoError::new(IoErrorKind::NoSpace), kind::OUT, 1);
    assert_eq!(lines_with("the storage is full: the guest's write at byte 1536 failed: No space left"), 1);
    fail(IoError::new(IoErrorKind::Unsupported), kind::OUT, TIMES);
    assert_eq!(lines_with("the guest's write at"), LINES + 1, "what is not supported is no failure");
    *server.disk.fail.lock().unwrap() = Some(IoError::EIO);
    for _ in LINES..TIMES {
        // The next line comes when their number has doubled.
        queue.request(kind::DISCARD, 0, &ranges(&[24]), 0);
        queue.request(kind::WRITE_ZEROES, 0, &ranges(&[16, 40]), 0);
    }
    assert_eq!(lines_with("the guest's discard at byte 12288 failed"), 1, "{:?}", kept_lines(""));
    assert_eq!(lines_with("the guest's write of zeros at byte 8192 (the first of 2 ranges) failed"), 1);
}

#[test]
fn what_a_guest_repeats_is_logged_each_time_that_its_number_has_doubled() {
    keep_log(Level::INFO, "");
    let mut server = Server::start(MemDisk::new());
    let guest = Guest::new();
    let mut client = Client::connect(&server, 0);
    client.share(&guest);
    let queue = client.queue(&guest, 0);
    let mut outside = addresses(&queue.driver);
    outside.used_ring_addr = 1 << 50;
    for time in 0..TIMES {
        client.frontend.set_vring_addr(0, &outside).unwrap();
        client.frontend.set_config(32, VhostUserConfigFlags::WRITABLE, &[(time % 2) as u8]).unwrap();
    }
    assert_eq!(lines_with("the queue cannot start"), LINES);
    assert_eq!(lines_with("the guest switched"), LINES);
    drop(client);
    for _ in 1..TIMES {
        let mut peer = std::os::unix::net::UnixStream::connect(&server.socket).unwrap();
        // No message of the protocol.
        peer.write_all(&[0xff; 64]).unwrap();
        while peer.read(&mut [0; 64]).is_ok_and(|length| length > 0) {}
    }
    server.export.take().unwrap().stop();
    assert_eq!(lines_with("a peer connected"), LINES);
    assert_eq!(lines_with("the session ended"), LINES);
}
