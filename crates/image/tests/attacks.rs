//! CVE-2008-2004: a guest that writes another format's header to a disk whose format was only guessed to be raw would
//! choose the format, and with it the files, that are opened the next time.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Disk, IoErrorKind, OpFlags};
use common::SimOpener;
use ringdisk_image::{Format, ImageOptions};
use std::sync::Arc;
use testkit::{Harness, Reply, Request, SimFileOptions, SimHarness, SimStorage};

fn headers() -> Vec<(&'static str, Vec<u8>)> {
    let magics: [(&str, usize, &[u8]); 5] = [
        ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
        ("vmdk", 0, b"KDMV"),
        ("vhdx", 0, b"vhdxfile"),
        ("vdi", 0x40, b"\x7f\x10\xda\xbe"),
        ("luks", 0, b"LUKS\xba\xbe"),
    ];
    let sector = |(name, at, magic): (&'static str, usize, &[u8])| {
        let mut sector = vec![0u8; 512];
        sector[at..at + magic.len()].copy_from_slice(magic);
        (name, sector)
    };
    magics.into_iter().map(sector).collect()
}

/// Sends one write to a disk of zeros; returns its end and the file.
fn written(format: Option<Format>, request: Request) -> (Reply, Vec<u8>) {
    let storage = SimStorage::new(1);
    storage.create("disk", 64 << 10, SimFileOptions::default());
    let options = ImageOptions::new("disk").with(|options| options.format = format);
    let disk: Arc<dyn Disk> = Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone())).unwrap());
    let mut harness = SimHarness::new(1, 1);
    let queue = harness.open(&disk, 0).unwrap();
    harness.submit(queue, vec![(1, request)]);
    loop {
        let mut turn = harness.turn();
        if let Some((_, reply)) = turn.replies.pop() {
            return (reply, storage.bytes("disk"));
        }
        assert!(!turn.idle, "no reply");
    }
}

#[test]
fn a_guest_cannot_turn_a_disk_that_was_guessed_raw_into_another_format() {
    for (name, sector) in headers() {
        let long: Vec<u8> = [&sector[..], &[7; 8192]].concat();
        let pieces =
            |data: &[u8], pieces| Request::Write { offset: 0, data: data.into(), pieces, flags: OpFlags::NONE };
        // At once, with more behind it, from memory that lies in pieces so that no piece has the magic.
        let ways = [pieces(&sector, vec![]), pieces(&long, vec![]), pieces(&sector, vec![1, 1, 65, 445])];
        for (way, request) in ways.into_iter().enumerate() {
            let (reply, file) = written(None, request.clone());
            assert!(reply.result.is_err(), "{name}, way {way}: {:?}", reply.result);
            assert_ne!(reply.result.map_err(|error| error.kind()), Err(IoErrorKind::Corrupt), "{name}");
            assert!(file.iter().all(|byte| *byte == 0), "{name}, way {way}: something was written");
            // Whoever says that it is raw may write what they like.
            let (reply, file) = written(Some(Format::Raw), request);
            assert!(reply.result.is_ok() && file.starts_with(&sector), "{name}, way {way}");
        }
        // Elsewhere it is data like any other.
        let (reply, file) = written(None, Request::write(512, sector.clone()));
        assert!(reply.result.is_ok() && file[512..].starts_with(&sector), "{name}");
    }
}
