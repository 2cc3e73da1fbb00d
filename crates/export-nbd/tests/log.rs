//! Clients cannot fill the log. In a process of its own, whose log is counted.

mod common;

use common::Served;
use ringdisk_export_nbd::{Credentials, ServerOptions, Tls};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const CLIENTS: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

static LOGGED: AtomicUsize = AtomicUsize::new(0);

/// Counts what the NBD server logs at `info` and above.
struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().contains("export_nbd")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        LOGGED.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn clients_that_break_tls_again_and_again_are_logged_each_time_that_their_number_has_doubled() {
    tracing::subscriber::set_global_default(Log).unwrap();
    let pki = tempfile::tempdir().unwrap();
    common::self_signed(pki.path());
    let tls = Tls::new(&Credentials::in_directory(pki.path()), true, false).unwrap();
    let mut served = Served::raw(1 << 20, ServerOptions::default().with(|options| options.tls = Some(tls)));
    for _ in 0..CLIENTS {
        let mut stream = served.connect();
        // Neither flags nor an option.
        let _ = stream.write_all(&[0xff; 64]);
        while stream.read(&mut [0; 512]).is_ok_and(|length| length > 0) {}
    }
    let deadline = Instant::now() + common::PATIENCE;
    while served.server().connections() > 0 {
        assert!(Instant::now() < deadline, "clients that have gone still count");
        std::thread::sleep(Duration::from_millis(2));
    }
    served.stop();
    assert_eq!(LOGGED.load(Ordering::SeqCst), LINES);
}
