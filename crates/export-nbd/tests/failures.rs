//! What the storage fails is logged with its kind and place, and not again and again. In a process of its own, whose log
//! is kept.

mod common;

use common::{Client, Served};
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use ringdisk_export_nbd::ServerOptions;
use std::sync::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const TIMES: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what the NBD server warns of: the disk and the message.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().contains("export_nbd")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        LOG.lock().unwrap().push(format!("{}: {}", line.disk, line.message));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    disk: String,
    message: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            "disk" => self.disk = format!("{value:?}"),
            _ => {}
        }
    }
}

fn lines_with(text: &str) -> usize {
    LOG.lock().unwrap().iter().filter(|line| line.contains(text)).count()
}

/// A null disk that fails all requests of one kind.
fn served(filter: &str) -> Served {
    let drive = format!("format=null,size=1M,name=disk,filter=error:{filter}");
    Served::start(|_| vec![drive], ServerOptions::default())
}

#[test]
fn failures_of_the_storage_are_logged_with_their_kind_and_place_and_a_full_disk_by_its_name() {
    tracing::subscriber::set_global_default(Log).unwrap();
    for (kind, filter, payload, said) in [
        (command::READ, "kinds=read", &[][..], "\"disk\": an NBD client's read at byte 1536 failed: "),
        (
            command::WRITE,
            "kinds=write:errno=ENOSPC",
            &[1; 512],
            "the storage is full: an NBD client's write at byte 1536",
        ),
        (command::TRIM, "kinds=discard", &[], "an NBD client's discard at byte 1536 failed: "),
        (command::WRITE_ZEROES, "kinds=write-zeroes", &[], "an NBD client's write of zeros at byte 1536 failed: "),
        (command::FLUSH, "kinds=flush", &[], "an NBD client's flush failed: "),
    ] {
        let mut served = served(filter);
        let mut client = Client::connect(&served, Style::Simple, &[]);
        for _ in 0..TIMES {
            let (offset, length_bytes) = if kind == command::FLUSH { (0, 0) } else { (1536, 512) };
            client.send(kind, 0, offset, length_bytes, payload);
            assert_ne!(client.reply().0, 0, "{filter}");
        }
        drop(client);
        served.stop();
        assert_eq!(lines_with(said), LINES, "{said}: {:?}", LOG.lock().unwrap());
    }
}
