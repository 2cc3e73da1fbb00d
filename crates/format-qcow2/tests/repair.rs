//! Repairing: whatever the damage and whenever the power fails or the storage does, the image is never worse than before,
//! and a repair that is run again gets to its end.
#![allow(clippy::unwrap_used)]

mod common;

use block::{File, IoError, PastEnd, block_on};
use common::{Base, NAME, blocking, created, open};
use memory::AlignedBuf;
use ringdisk_format_qcow2::{
    CheckEvent, CheckReport, CreateOptions, NewSnapshot, Qcow2, Repair, check, create_snapshot, repair,
};
use testkit::{Fault, FaultAction, OpKind, SimFileOptions, SimStorage, fill_seeded, mix, qcow2_check};

const COPIED: u64 = 1 << 63;

fn image(cluster_size: u64, refcount_bits: u32) -> Vec<u8> {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 512 << 10;
        options.cluster_size = cluster_size;
        options.refcount_bits = refcount_bits;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    let mut data = vec![0; 90 << 10];
    fill_seeded(1, &mut data);
    block_on(async {
        guest.write(0, &data).await.unwrap();
        guest.write_zeroes(16 << 10, 8 << 10, false).await.unwrap();
        guest.write(300 << 10, &data[..40 << 10]).await.unwrap();
        guest.close().await.unwrap();
    });
    storage.bytes(NAME)
}

fn word(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: u64, value: u64) {
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
}

/// Damage that a repair undoes without touching what the guest reads.
fn damaged(good: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let (l1, table) = (word(good, 40), word(good, 48));
    let (l2, block) = (word(good, l1) & !COPIED, word(good, table));
    let cluster = 1u64 << good[23];
    let entry = |index: u64| word(good, l2 + index * 8);
    let harm: Vec<(&str, Vec<(u64, u64)>)> = vec![
        ("leaks", vec![(l2, 0), (l2 + 8, 0)]),
        ("two mappings of one cluster", vec![(l2 + 16, entry(3))]),
        ("flags", vec![(l2, entry(0) ^ COPIED), (l1, word(good, l1) ^ COPIED), (l2 + 32, entry(4) ^ COPIED)]),
        ("low and high refcounts", vec![(block, 0x0002_0003_0001_0002), (block + 64, 0x0009_0001_0001_0001)]),
        ("refcounts of zero", vec![(block, 0), (block + 32, 0)]),
        ("no refcount block", vec![(table, 0)]),
        ("a refcount block off the clusters", vec![(table, block + 512)]),
        (
            "a refcount block behind the file",
            vec![(table + 8, (good.len() as u64).next_multiple_of(cluster) + 8 * cluster)],
        ),
        ("a refcount block in an L2 table", vec![(table + 8, l2)]),
        ("dirty and corrupt", vec![(72, 3), (l2, 0)]),
    ];
    let patched = |changes: Vec<(u64, u64)>| {
        let mut bytes = good.to_vec();
        changes.into_iter().for_each(|(at, value)| put(&mut bytes, at, value));
        bytes
    };
    harm.into_iter().map(|(what, changes)| (what, patched(changes))).collect()
}

/// How bad it is: everything that may cost data. That a flag "refcount is one" is missing costs nobody anything.
fn danger(bytes: &[u8]) -> u64 {
    let storage = SimStorage::new(1);
    let file = storage.create_with(NAME, bytes, SimFileOptions::default());
    let (mut harmless, mut told) = (0, 0);
    let mut watch = |event| {
        if let CheckEvent::Finding(text) = event {
            told += u64::from(text.starts_with("ERROR"));
            let entry = text.split("_entry=").nth(1).and_then(|rest| rest.split(' ').next());
            let entry = entry.and_then(|hex| u64::from_str_radix(hex, 16).ok());
            harmless += u64::from(entry.is_some_and(|entry| entry & COPIED == 0) && text.ends_with("refcount=1"));
        }
        true
    };
    let report = block_on(check(&blocking(&file), bytes.len() as u64, NAME, &mut watch)).unwrap();
    assert!(told >= report.corruptions);
    report.corruptions + report.check_errors - harmless
}

fn repaired(storage: &SimStorage, what: Repair) -> block::Result<CheckReport> {
    let file = storage.file(NAME).unwrap();
    let length = file.length_bytes().unwrap();
    block_on(repair(&blocking(&file), length, NAME, what, &mut |_| true))
}

/// What the guest reads, whatever the header says of itself.
fn contents(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[79] &= !3;
    let (_, guest) = common::open_bytes(&bytes, Base::default());
    block_on(guest.read_all()).unwrap()
}

fn storage_of(bytes: &[u8]) -> SimStorage {
    let storage = SimStorage::new(5);
    storage.create_with(NAME, bytes, SimFileOptions::default());
    storage
}

/// Nothing is worse, and the guest reads what it read.
fn assert_not_worse(before: &[u8], after: &[u8], what: &str) {
    assert!(danger(after) <= danger(before), "{what}: {} is worse than {}", danger(after), danger(before));
    assert!(contents(after) == contents(before), "{what}: the guest reads something else");
}

#[test]
fn a_power_cut_at_any_moment_leaves_an_image_that_is_not_worse_and_can_be_repaired() {
    let mut cuts = 0;
    for (cluster_size, refcount_bits) in [(4096, 16), (512, 16)] {
        for (what, bytes) in damaged(&image(cluster_size, refcount_bits)) {
            let storage = storage_of(&bytes);
            storage.record();
            let report = repaired(&storage, Repair::All).unwrap();
            assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{what}: {report:?}");
            assert!(report.corruptions_fixed + report.leaks_fixed > 0, "{what}");
            let after = storage.bytes(NAME);
            qcow2_check(&after).unwrap().sound().unwrap();
            assert_eq!(qcow2_check(&after).unwrap().leaked_clusters, 0, "{what}");
            assert_eq!(after[79] & 3, 0, "{what}: neither dirty nor corrupt");
            assert_not_worse(&bytes, &after, what);
            let mut replay = storage.take_recording().replay();
            while let Some(now) = replay.advance() {
                for outcome in 0..2 {
                    let cut = replay.power_cut(outcome);
                    let at = format!("{what}, clusters of {cluster_size}, cut at {now}, outcome {outcome}");
                    assert_not_worse(&bytes, &cut.bytes(NAME), &at);
                    if mix(now, outcome).is_multiple_of(4) {
                        let report = repaired(&cut, Repair::All).unwrap();
                        assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{at}");
                    }
                    cuts += 1;
                }
            }
        }
    }
    assert!(cuts > 300, "{cuts} cuts");
}

#[test]
fn a_failing_storage_leaves_an_image_that_is_not_worse() {
    for (what, bytes) in damaged(&image(4096, 16)) {
        for kind in [OpKind::Read, OpKind::Write, OpKind::Flush] {
            for (nth, errno) in (0..40).zip([5, 28].into_iter().cycle()) {
                let storage = storage_of(&bytes);
                storage.inject(NAME, Fault::nth(kind, nth, FaultAction::Fail(IoError::from_errno(errno))));
                let result = repaired(&storage, Repair::All);
                storage.clear_faults();
                let at = format!("{what}: {kind:?} {nth} fails with {errno}");
                assert_not_worse(&bytes, &storage.bytes(NAME), &at);
                if storage.pushed(NAME, kind) <= nth {
                    result.expect(&at);
                    break;
                }
            }
        }
    }
}

#[test]
fn only_leaks_are_freed_where_only_that_was_asked_for() {
    let good = image(4096, 16);
    let cases = damaged(&good);
    let find = |name: &str| &cases.iter().find(|(what, _)| *what == name).unwrap().1;
    let storage = storage_of(find("leaks"));
    let report = repaired(&storage, Repair::Leaks).unwrap();
    assert_eq!((report.leaks_fixed, report.corruptions, report.leaks), (2, 0, 0));
    assert_eq!(qcow2_check(&storage.bytes(NAME)).unwrap().leaked_clusters, 0);

    let storage = storage_of(find("two mappings of one cluster"));
    let report = repaired(&storage, Repair::Leaks).unwrap();
    assert_eq!((report.leaks_fixed, report.corruptions, report.corruptions_fixed), (1, 1, 0));

    let bytes = find("no refcount block");
    let storage = storage_of(bytes);
    let error = repaired(&storage, Repair::Leaks).unwrap_err().to_string();
    assert!(error.contains("-r all"), "{error}");
    assert!(storage.bytes(NAME) == *bytes, "refused and untouched");
}

#[test]
fn a_cluster_with_more_references_than_its_refcount_can_count_is_nobodys_to_write_over() {
    let mut bytes = image(4096, 1);
    let (l1, table) = (word(&bytes, 40), word(&bytes, 48));
    let l2 = word(&bytes, l1) & !COPIED;
    // The guest's first cluster is the table of refcounts: its one bit cannot say "two".
    put(&mut bytes, l2, table);
    let storage = storage_of(&bytes);
    let report = repaired(&storage, Repair::All).unwrap();
    assert!(report.corruptions > 0, "{report:?}");
    assert_eq!(word(&storage.bytes(NAME), l2), table, "no flag says that it is the guest's alone");
    // Left dirty, it is not opened for writing, and not repaired by halves.
    put(&mut bytes, 72, 1);
    let storage = storage_of(&bytes);
    let file = storage.file(NAME).unwrap();
    let opened = block_on(Qcow2::open(&blocking(&file), file.info(), common::open_options(false)));
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("than a refcount can count"), "{error}");
    assert!(storage.bytes(NAME) == bytes, "refused and untouched");
}

#[test]
fn a_refcount_block_far_behind_the_file_is_dropped_and_the_file_stays_short() {
    let good = image(4096, 16);
    let table = word(&good, 48);
    for far in [1 << 31, 1 << 40, 1 << 43, 1 << 50, (1 << 56) - 4096] {
        for index in [0, 1, 7] {
            let mut bytes = good.clone();
            put(&mut bytes, table + index * 8, far);
            let storage = storage_of(&bytes);
            let report = repaired(&storage, Repair::All).unwrap();
            assert_eq!((report.corruptions, report.leaks, report.check_errors), (0, 0, 0), "{far:#x}: {report:?}");
            let length = storage.file(NAME).unwrap().length_bytes().unwrap();
            assert!(length < 4 * good.len() as u64, "{far:#x}: the file has {length} bytes");
            let after = storage.bytes(NAME);
            qcow2_check(&after).unwrap().sound().unwrap();
            assert!(contents(&after) == contents(&good), "{far:#x}");
        }
    }
}

#[test]
fn data_that_an_l1_entry_takes_for_a_table_is_not_repaired() {
    for fill in [0x25, 0x80] {
        for active in [false, true] {
            let options = CreateOptions::default().with(|options| {
                options.size_bytes = 4 << 20;
                options.cluster_size = 4096;
            });
            let (storage, file) = created(&options, SimFileOptions::default());
            let guest = open(&file, Base::default());
            block_on(guest.write(0, &[fill; 64 << 10])).unwrap();
            block_on(guest.close()).unwrap();
            let new = NewSnapshot::new("one");
            block_on(create_snapshot(&blocking(&file), file.as_ref(), NAME, &new, &mut |_, _| true)).unwrap();
            let mut bytes = storage.bytes(NAME);
            let l1 = word(&bytes, if active { 40 } else { word(&bytes, 64) });
            let l2 = word(&bytes, word(&bytes, 40)) & !COPIED;
            let data = word(&bytes, l2) & !COPIED;
            put(&mut bytes, l1 + 8, data);
            let what = format!("fill {fill:#x}, in the active table: {active}");
            let before = disk_start(&bytes);
            assert!(before == [fill; 64 << 10], "{what}");
            let storage = storage_of(&bytes);
            let report = repaired(&storage, Repair::All).unwrap();
            assert!(report.corruptions > 0, "{what}: {report:?}");
            assert!(disk_start(&storage.bytes(NAME)) == before, "{what}: the guest reads something else");
            // Left dirty, it is not repaired at open.
            put(&mut bytes, 72, 1);
            let storage = storage_of(&bytes);
            let file = storage.file(NAME).unwrap();
            let opened = block_on(Qcow2::open(&blocking(&file), file.info(), common::open_options(false)));
            assert!(opened.is_err(), "{what}");
            assert!(storage.bytes(NAME) == bytes, "{what}: refused and untouched");
        }
    }
}

/// The first 64 KiB of the disk.
fn disk_start(bytes: &[u8]) -> Vec<u8> {
    let (_, guest) = common::open_bytes(bytes, Base::default());
    block_on(guest.read(0, 64 << 10)).unwrap()
}

#[test]
fn an_absurd_number_of_snapshots_is_cut_down_to_those_that_are_some() {
    for (snapshots, absurd) in [(0, u32::MAX), (2, 65_537), (2, 0x1000_0002)] {
        let storage = SimStorage::new(1);
        let file = storage.create_with(NAME, &image(4096, 16), SimFileOptions::default());
        for number in 0..snapshots {
            let new = NewSnapshot::new(format!("s{number}")).with(|new| new.date_seconds = 1);
            let io = blocking(&file);
            block_on(create_snapshot(&io, file.as_ref(), NAME, &new, &mut |_, _| true)).unwrap();
        }
        let good = storage.bytes(NAME);
        let mut bytes = good.clone();
        bytes[60..64].copy_from_slice(&absurd.to_be_bytes());
        if snapshots == 0 {
            // Where a table of the image lies, which is none of snapshots.
            put(&mut bytes, 64, word(&good, 48));
        }
        let storage = SimStorage::new(1);
        let file = storage.create_with(NAME, &bytes, SimFileOptions::default());
        let length = file.length_bytes().unwrap();
        let refused = block_on(check(&blocking(&file), length, NAME, &mut |_| true)).unwrap_err();
        assert!(refused.to_string().contains("check -r all"), "{refused}");
        let report = block_on(repair(&blocking(&file), length, NAME, Repair::All, &mut |_| true)).unwrap();
        assert_eq!((report.corruptions, report.corruptions_fixed), (0, 1), "{report:?}");
        let mut after = storage.bytes(NAME);
        assert_eq!(after[60..64], (snapshots as u32).to_be_bytes());
        after[64..72].copy_from_slice(&good[64..72]);
        assert!(after == good, "{snapshots} snapshots, {absurd} claimed: something else has changed");
        let length = file.length_bytes().unwrap();
        let report = block_on(check(&blocking(&file), length, NAME, &mut |_| true)).unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    }
}

#[test]
fn the_largest_number_of_snapshots_that_there_may_be_is_not_cut_down() {
    let mut bytes = image(4096, 16);
    bytes[60..64].copy_from_slice(&65_536u32.to_be_bytes());
    // Where a table of the image lies: most rows are no snapshots, but there may be so many.
    let table = word(&bytes, 48);
    put(&mut bytes, 64, table);
    let storage = storage_of(&bytes);
    let _ = repaired(&storage, Repair::All);
    assert_eq!(storage.bytes(NAME)[60..72], bytes[60..72]);
}

#[test]
fn where_new_refcounts_need_a_larger_table_than_there_may_be_nothing_changes() {
    // A refcount block counts 64 clusters, so the largest table, of 8 MiB, counts 32 GiB.
    let mut bytes = image(512, 64);
    let l2 = word(&bytes, word(&bytes, 40)) & !COPIED;
    let far = 33 << 30;
    put(&mut bytes, l2, far | COPIED);
    let storage = SimStorage::new(5);
    let sparse = SimFileOptions { max_length_bytes: 1 << 40, ..SimFileOptions::default() };
    let file = storage.create(NAME, far + 512, sparse);
    block_on(async {
        let io = blocking(&file);
        io.write(0, AlignedBuf::copy_of(&bytes)).await.unwrap();
        let refused = repaired(&storage, Repair::All).unwrap_err();
        assert!(format!("{refused:?}").contains("NoSpace"), "{refused:?}");
        assert!(*io.read(0, bytes.len(), PastEnd::Fails).await.unwrap() == *bytes, "something has changed");
        assert_eq!(file.length_bytes().unwrap(), far + 512);
    });
}

#[test]
fn an_entry_of_zeros_off_the_clusters_counts_as_repaired_only_if_it_was() {
    let good = image(4096, 16);
    let l2 = word(&good, word(&good, 40)) & !COPIED;
    let at = l2 + 4 * 8;
    // Cluster 4 reads as zeros, and its entry names a place between two clusters.
    let off = (l2 + 512) | 1;
    for is_shared in [false, true] {
        let mut bytes = good.clone();
        put(&mut bytes, at, off);
        if is_shared {
            // The guest's cluster 40 is the table itself, so whoever writes to the table writes to that cluster.
            put(&mut bytes, l2 + 40 * 8, l2 | COPIED);
        }
        let storage = storage_of(&bytes);
        let report = repaired(&storage, Repair::All).unwrap();
        let after = storage.bytes(NAME);
        match is_shared {
            false => {
                assert_eq!((report.corruptions, report.corruptions_fixed, word(&after, at)), (0, 1, 1), "{report:?}");
                assert!(contents(&after) == contents(&good), "the guest reads something else");
            }
            true => {
                assert_eq!(word(&after, at), off);
                assert!(report.corruptions > 0, "{report:?}");
            }
        }
    }
}
