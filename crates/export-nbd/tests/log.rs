//! Clients cannot fill the log. In a process of its own, whose log is counted.

mod common;

use common::Served;
use ringdisk_export_nbd::{Credentials, ServerOptions, Tls};
use std::io::{Read, Write};
use std::time::{Duration, Instant};
use testkit::{keep_log, kept_lines};
use tracing::Level;

const CLIENTS: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

#[test]
fn clients_that_break_tls_again_and_again_are_logged_each_time_that_their_number_has_doubled() {
    keep_log(Level::INFO, "export_nbd");
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
    assert_eq!(kept_lines("").len(), LINES, "{:?}", kept_lines(""));
}
