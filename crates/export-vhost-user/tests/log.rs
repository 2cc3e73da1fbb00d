//! What a guest does again and again is not logged again and again. In a process of its own, whose log is counted.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../../virtio/tests/model/mod.rs"]
mod model;
mod support;

use model::Guest;
use std::io::{Read, Write};
use std::sync::Mutex;
use support::disk::MemDisk;
use support::{Client, Server, addresses};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const TIMES: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps all that is logged at `info` and above.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LOG.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

fn lines_with(text: &str) -> usize {
    LOG.lock().unwrap().iter().filter(|line| line.contains(text)).count()
}

#[test]
fn what_a_guest_repeats_is_logged_each_time_that_its_number_has_doubled() {
    tracing::subscriber::set_global_default(Log).unwrap();
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
