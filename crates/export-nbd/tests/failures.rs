//! What the storage fails is logged with its kind and place, and not again and again. In a process of its own, whose log
//! is kept.

mod common;

use common::{Client, Served};
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use ringdisk_export_nbd::ServerOptions;
use testkit::{keep_log, kept_lines};
use tracing::Level;

const TIMES: usize = 100;
/// 1, 2, 4, ... 64.
const LINES: usize = 7;

/// A null disk that fails all requests of one kind.
fn served(filter: &str) -> Served {
    let drive = format!("format=null,size=1M,name=disk,filter=error:{filter}");
    Served::start(|_| vec![drive], ServerOptions::default())
}

#[test]
fn failures_of_the_storage_are_logged_with_their_kind_and_place_and_a_full_disk_by_its_name() {
    keep_log(Level::WARN, "export_nbd");
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
        assert_eq!(kept_lines(said).len(), LINES, "{said}: {:?}", kept_lines(""));
    }
}
