//! Images of every feature as qemu-img made them, kept in the tree (tests/images, with the commands): each holds the
//! same disk, read by us, and still by us after we wrote to it.

mod common;

use block::OpFlags;
use common::open_as;
use ringdisk_image::Format;
use std::path::PathBuf;
use testkit::{Request, Session, SimFileOptions, SimStorage, qcow2_check};

const SIZE: usize = 192 << 10;

fn content() -> Vec<u8> {
    let byte = |at: usize| if at / 512 % 128 < 11 { ((at / 37) ^ (at / 512)) as u8 } else { 0 };
    (0..SIZE).map(byte).collect()
}

/// An image and the files that it names, on simulated storage; the image is the first layer.
fn stored(name: &str, others: &[&str]) -> SimStorage {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/images");
    let bytes = |name: &str| std::fs::read(directory.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let storage = SimStorage::new(1);
    storage.create_with(&common::name(0), &bytes(name), SimFileOptions::default());
    for other in others {
        storage.create_with(other, &bytes(other), SimFileOptions::default());
    }
    storage
}

fn read(storage: &SimStorage, read_only: bool) -> Vec<u8> {
    let open = |storage: &SimStorage| open_as(storage, 0, Format::Qcow2, read_only, &[]);
    let mut session = Session::open(storage, &open, 1, 1).unwrap();
    let contents = session.read_all().unwrap();
    session.close().unwrap();
    contents
}

#[test]
fn every_golden_image_holds_the_disk_and_takes_writes() {
    let alone = [
        "version-2",
        "refcounts-of-1-bit",
        "refcounts-of-64-bits",
        "zlib",
        "zstd",
        "extended-l2",
        "extended-l2-zlib",
        "preallocated",
        "lazy",
        "snapshots",
        "bitmaps",
    ];
    let images = alone.map(|name| (name, &[][..])).into_iter().chain([
        ("external", &["external.data"][..]),
        ("external-raw", &["external-raw.data"]),
        ("overlay", &["base.qcow2"]),
    ]);
    for (name, others) in images {
        let storage = stored(&format!("{name}.qcow2"), others);
        assert!(read(&storage, true) == content(), "{name}");
        let before = qcow2_check(&storage.bytes(&common::name(0))).unwrap();
        let mut expected = content();
        let open = |storage: &SimStorage| open_as(storage, 0, Format::Qcow2, false, &[]);
        let mut session = Session::open(&storage, &open, 1, 1).unwrap();
        for (offset, length) in [(512, 1024), (70 << 10, 20 << 10)] {
            expected[offset..offset + length].fill(0x5a);
            session.call(Request::write(offset as u64, vec![0x5a; length])).unwrap();
        }
        expected[130 << 10..150 << 10].fill(0);
        let zeroes =
            Request::WriteZeroes { offset: 130 << 10, length: 20 << 10, may_unmap: true, flags: OpFlags::NONE };
        session.call(zeroes).unwrap();
        session.close().unwrap();
        let after = qcow2_check(&storage.bytes(&common::name(0))).unwrap();
        after.sound().unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
        assert_eq!(after.leaked_clusters, 0, "{name}");
        assert_eq!(after.snapshots_digest, before.snapshots_digest, "{name}");
        assert!(read(&storage.process_killed(0), false) == expected, "{name}");
        if name == "bitmaps" {
            let says_they_are_kept = storage.bytes(&common::name(0))[95] & 1 == 1;
            assert!(says_they_are_kept, "a feature bit that is cleared gives the bitmaps up");
        }
        if name == "external-raw" {
            assert!(storage.bytes("external-raw.data") == expected, "the file is not the disk any more");
        }
    }
}

#[test]
fn an_image_that_was_not_closed_can_be_read_and_is_repaired_for_whoever_writes() {
    let storage = stored("lazy-dirty.qcow2", &[]);
    assert!(qcow2_check(&storage.bytes(&common::name(0))).unwrap().dirty);
    let before = storage.bytes(&common::name(0));
    assert!(read(&storage, true) == content());
    assert!(storage.bytes(&common::name(0)) == before, "reading repairs nothing");
    // Whoever may write gets it repaired first.
    assert!(read(&storage, false) == content());
    let after = qcow2_check(&storage.bytes(&common::name(0))).unwrap();
    after.sound().unwrap();
    assert!(!after.dirty && after.leaked_clusters == 0, "{after:?}");
}
