//! Bitmaps that were kept while we wrote, with QEMU as judge.
#![allow(clippy::unwrap_used)]

mod common;

use block::{File, block_on};
use common::{Base, NAME, blocking, has_tool, open, run};
use ringdisk_format_qcow2::read_bitmap;
use std::ops::Range;
use std::process::Command;
use testkit::{SimFileOptions, SimStorage, marked_as_qemu_sees};

#[test]
fn what_we_mark_is_what_qemu_sees_and_each_goes_on_from_the_other() {
    if !["qemu-img", "qemu-io", "qemu-nbd"].into_iter().all(has_tool) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image.qcow2");
    let image = path.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, "64M"]);
    run("qemu-img", &["bitmap", "--add", "-g", "64k", image, "coarse"]);
    run("qemu-img", &["bitmap", "--add", "-g", "512", image, "fine"]);
    run("qemu-img", &["bitmap", "--add", "--disable", image, "off"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 512", image]);
    let storage = SimStorage::new(3);
    let file = storage.create_with(NAME, &std::fs::read(image).unwrap(), SimFileOptions::default());
    let guest = open(&file, Base::default());
    let written = (1 << 20) + 4096..(1 << 20) + (300 << 10);
    block_on(async {
        guest.write(written.start, &vec![5; (written.end - written.start) as usize]).await.unwrap();
        guest.discard(9 << 20, 1 << 20).await.unwrap();
        guest.write_zeroes(20 << 20, 512, true).await.unwrap();
        guest.flush().await.unwrap();
    });
    let killed = storage.process_killed(1);
    block_on(guest.close()).unwrap();

    std::fs::write(image, storage.bytes(NAME)).unwrap();
    run("qemu-img", &["check", image]);
    assert!(!run("qemu-img", &["info", image]).contains("in-use"));
    let seen = |bitmap| marked_as_qemu_sees(directory.path(), &path, bitmap);
    let (sector, granule) = (512, 64 << 10);
    let exact = [0..sector, written.clone(), 9 << 20..10 << 20, 20 << 20..(20 << 20) + sector];
    assert_eq!(seen("fine"), exact);
    let whole = |range: Range<u64>| range.start / granule * granule..range.end.next_multiple_of(granule);
    assert_eq!(seen("coarse"), exact.map(whole));
    assert_eq!(seen("off"), []);

    // QEMU goes on with them.
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 2 40M 512", image]);
    let after = SimStorage::new(3);
    let file = after.create_with(NAME, &std::fs::read(image).unwrap(), SimFileOptions::default());
    let bits = block_on(read_bitmap(&blocking(&file), &file.info().name, "fine")).unwrap();
    assert!(bits.is_set(40 << 20) && bits.is_set(written.start) && !bits.is_set(30 << 20));

    // Had we died instead, it would believe none of those that we kept.
    std::fs::write(image, killed.bytes(NAME)).unwrap();
    let said = run("qemu-img", &["info", image]);
    assert_eq!(said.matches("in-use").count(), 2, "{said}");
    let merge = ["bitmap", "--merge", "fine", image, "off"];
    assert!(!Command::new("qemu-img").args(merge).output().unwrap().status.success());
    run("qemu-img", &["bitmap", "--remove", image, "fine"]);
}
