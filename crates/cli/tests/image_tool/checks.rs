//! `ringdisk check` beside `qemu-img check`.

use super::common::{at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool};
use super::zoo;
use serde_json::Value;
use std::path::Path;

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Both check the image: the same counts, text and exit code.
fn assert_check_agrees(image: &Path, what: &str) {
    let human = ["check", "-f", "qcow2", path_str(image)];
    let (ours, theirs) = (run(&human), tool("qemu-img", &human));
    let said = format!("{what}\n{}\n{}", text(&ours.stderr), text(&theirs.stderr));
    assert_eq!(ours.status.code(), theirs.status.code(), "{said}");
    assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{said}");
    let json = ["check", "--output=json", "-f", "qcow2", path_str(image)];
    let parse = |output: &[u8]| serde_json::from_slice::<Value>(output).unwrap();
    assert_eq!(parse(&run(&json).stdout), parse(&tool("qemu-img", &json).stdout), "{said}");
}

#[test]
fn an_image_that_cannot_be_read_was_not_checked_as_qemu_img_says() {
    let dir = directory();
    let image = at(&dir, "image.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "1M"]);
    let good = std::fs::read(&image).unwrap();
    // Encrypted, and with a feature that nobody knows.
    for (place, value) in [(35, 1), (35, 2), (74, 1)] {
        let mut bytes = good.clone();
        bytes[place] = value;
        std::fs::write(&image, &bytes).unwrap();
        for format in [&["-f", "qcow2"][..], &[]] {
            run_fails(1, &[&["check"], format, &[path_str(&image)]].concat());
            run_fails(1, &[&["check", "-r", "all"], format, &[path_str(&image)]].concat());
        }
        assert!(std::fs::read(&image).unwrap() == bytes, "untouched");
        if has_tool("qemu-img") && place != 35 {
            assert_eq!(tool("qemu-img", &["check", path_str(&image)]).status.code(), Some(1));
        }
    }
}

#[test]
fn check_finds_what_qemu_img_finds_in_healthy_and_damaged_images() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for (image, format) in zoo(&dir) {
        if format == "raw" {
            run_fails(63, &["check", "-f", "raw", path_str(&image)]);
            continue;
        }
        assert_check_agrees(&image, path_str(&image));
    }
    let damaged = at(&dir, "damaged.qcow2");
    for name in ["0.qcow2", "snapshot.qcow2", "3.qcow2"] {
        let good = std::fs::read(at(&dir, name)).unwrap();
        let (l1, table) = (u64_at(&good, 40) as usize, u64_at(&good, 48) as usize);
        let mask = 0x00ff_ffff_ffff_fe00;
        let l2 = (u64_at(&good, l1) & mask) as usize;
        let block = u64_at(&good, table) as usize;
        let cluster = 1u64 << u32::from_be_bytes(good[20..24].try_into().unwrap());
        let used = (0..).map(|index| l2 + index * 8).find(|at| u64_at(&good, *at) & mask != 0).unwrap();
        let entry = u64_at(&good, used);
        let end = (good.len() as u64).next_multiple_of(cluster);
        let harm: [(&str, usize, u64); 12] = [
            ("the COPIED flag of a cluster is wrong", used, entry ^ 1 << 63),
            ("the COPIED flag of a table is wrong", l1, u64_at(&good, l1) ^ 1 << 63),
            ("a cluster is forgotten", used, 0),
            ("two entries lead to one cluster", used, u64_at(&good, used + 8)),
            ("an entry leads into the L1 table", used, l1 as u64 | 1 << 63),
            ("an entry leads behind the end", used, (end + 16 * cluster) | 1 << 63),
            ("refcounts are zero", block, 0),
            ("refcounts are too high", block, 0x0002_0003_0004_0005),
            ("a table is forgotten", l1, 0),
            ("an entry has nothing but a reserved bit", used, 1 << 56),
            ("an entry leads to the cluster that the file ends before", used, end | 1 << 63),
            ("a refcount block lies off the clusters", table, block as u64 + 512),
        ];
        for (what, at, value) in harm {
            let mut bytes = good.clone();
            bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
            std::fs::write(&damaged, &bytes).unwrap();
            assert_check_agrees(&damaged, &format!("{name}: {what}"));
        }
        // Any word of any table, changed in one bit.
        let tables = [l1..l1 + 16, l2..l2 + 512, block..block + 512, table..table + 8];
        let mut dice = 0x9e37_79b9_7f4a_7c15u64;
        let mut roll = |sides: usize| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            (dice % sides as u64) as usize
        };
        for round in 0..40 {
            let mut bytes = good.clone();
            let within = &tables[roll(tables.len())];
            let (at, bit) = (within.start + roll(within.len()), roll(8));
            bytes[at] ^= 1 << bit;
            std::fs::write(&damaged, &bytes).unwrap();
            assert_check_agrees(&damaged, &format!("{name}: round {round}, bit {bit} of the byte at {at:#x}"));
        }
    }
}
