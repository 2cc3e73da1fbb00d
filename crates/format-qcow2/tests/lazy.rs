//! The dirty bit: refcounts that are postponed where an image allows it, and images that somebody left dirty.
#![allow(clippy::unwrap_used)]

mod common;

use block::{Error, ErrorKind, File, IoError, Locks, MetaIo, block_on};
use common::{Base, DATA, Guest, NAME, blocking, created, judged_by_qemu, open, open_options};
use memory::AlignedBuf;
use ringdisk_format_qcow2::{CreateOptions, Qcow2, Repair};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use testkit::{Fault, FaultAction, OpKind, SimFile, SimFileOptions, SimStorage, mix, qcow2_check, stamped};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 512 << 10;

fn lazy() -> CreateOptions {
    CreateOptions::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = CLUSTER;
        options.lazy_refcounts = true;
    })
}

fn is_dirty(storage: &SimStorage) -> bool {
    qcow2_check(&storage.bytes(NAME)).unwrap().dirty
}

fn stored(bytes: &[u8]) -> SimStorage {
    let storage = SimStorage::new(5);
    storage.create_with(NAME, bytes, SimFileOptions::default());
    storage
}

/// Opens it and lets go of it, as the program does that was about to write.
fn opened(storage: &SimStorage, read_only: bool) -> Result<Guest, Error> {
    let file = storage.file(NAME).unwrap();
    let io = blocking(&file);
    let qcow2 = block_on(Qcow2::open(&io, file.info(), open_options(read_only)))?;
    Ok(Guest { qcow2: Arc::new(qcow2), io, base: Base::default() })
}

fn contents(storage: &SimStorage) -> Vec<u8> {
    block_on(opened(storage, true).unwrap().read_all()).unwrap()
}

/// An image that was written to, flushed, and not closed; with what it holds.
fn left_dirty() -> (SimStorage, Vec<u8>) {
    let (storage, file) = created(&lazy(), SimFileOptions::default());
    let guest = open(&file, Base::default());
    block_on(async {
        guest.write(1000, &stamped(1, 0, 90 << 10)).await.unwrap();
        guest.flush().await.unwrap();
        guest.discard(16 << 10, 24 << 10).await.unwrap();
        guest.flush().await.unwrap();
        guest.write(300 << 10, &stamped(2, 0, 20 << 10)).await.unwrap();
        guest.flush().await.unwrap();
    });
    let storage = storage.process_killed(1);
    assert!(is_dirty(&storage));
    let seen = contents(&storage);
    (storage, seen)
}

fn assert_repaired(storage: &SimStorage, what: &str) {
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    assert!(!report.dirty && report.leaked_clusters == 0, "{what}: {report:?}");
}

#[test]
fn flushes_of_a_lazy_image_take_one_barrier_and_write_no_refcounts() {
    let mut counted = Vec::new();
    for lazy_refcounts in [false, true] {
        let options = CreateOptions::default().with(|options| {
            options.size_bytes = 16 << 20;
            options.lazy_refcounts = lazy_refcounts;
        });
        let (storage, file) = created(&options, SimFileOptions::default());
        let guest = open(&file, Base::default());
        let before = [OpKind::Flush, OpKind::Write].map(|kind| storage.pushed(NAME, kind));
        for index in 0..40 {
            let data = stamped(index, 0, 4096);
            block_on(guest.write(index * (64 << 10), &data)).unwrap();
            block_on(guest.flush()).unwrap();
        }
        let after = [OpKind::Flush, OpKind::Write].map(|kind| storage.pushed(NAME, kind));
        counted.push((after[0] - before[0], after[1] - before[1]));
        assert_eq!(is_dirty(&storage), lazy_refcounts);
        block_on(guest.close()).unwrap();
        assert_repaired(&storage, "closed");
    }
    // Two barriers a flush, and for each a write of data, of refcounts and of the mapping; or one, and two writes.
    let [(flushes, writes), (lazy_flushes, lazy_writes)] = counted[..] else { panic!("{counted:?}") };
    assert!(flushes >= 80 && writes >= 120, "{counted:?}");
    assert!(lazy_flushes <= 40 + 10 && lazy_writes <= 80 + 5, "{counted:?}");
}

#[test]
fn a_flush_that_is_tried_again_after_a_failure_keeps_its_order() {
    let options = lazy().with(|options| options.size_bytes = 4 << 20);
    // What is freed keeps its bytes.
    let (storage, file) = created(&options, SimFileOptions { can_discard: false, ..SimFileOptions::default() });
    let guest = open(&file, Base::default());
    let far = 3 << 20;
    let new = stamped(2, far, 32 << 10);
    block_on(async {
        guest.write(0, &stamped(1, 0, 64 << 10)).await.unwrap();
        guest.flush().await.unwrap();
        guest.discard(0, 60 << 10).await.unwrap();
        for _ in 0..3 {
            guest.flush().await.unwrap();
        }
        // The table and the data lie where other data were: they must be durable before something refers to them.
        let length_bytes = file.length_bytes().unwrap();
        guest.write(far, &new).await.unwrap();
        assert_eq!(file.length_bytes().unwrap(), length_bytes, "nothing was freed, so this shows nothing");
        storage.inject(NAME, Fault::nth(OpKind::Write, 0, FaultAction::Fail(IoError::EIO)));
        guest.flush().await.unwrap_err();
        storage.record();
        guest.flush().await.unwrap();
    });
    let mut replay = storage.take_recording().replay();
    loop {
        for seed in 0..8 {
            let guest = opened(&replay.power_cut(seed), true).unwrap();
            let seen = block_on(guest.read(far, new.len())).unwrap();
            for (seen, new) in seen.chunks(512).zip(new.chunks(512)) {
                assert!(seen == new || seen == [0; 512], "seed {seed}: neither what was there nor what was written");
            }
        }
        if replay.advance().is_none() {
            break;
        }
    }
}

#[test]
fn a_lazy_image_is_dirty_only_while_refcounts_may_be_stale() {
    let (storage, file) = created(&lazy(), SimFileOptions::default());
    let write = |guest: &Guest, offset: u64, length: usize| {
        block_on(guest.write(offset, &stamped(3, offset, length))).unwrap();
        block_on(guest.flush()).unwrap();
    };
    let guest = open(&file, Base::default());
    write(&guest, 0, 20 << 10);
    assert!(is_dirty(&storage));
    block_on(guest.close()).unwrap();
    assert_repaired(&storage, "closed");
    // It may be used on after that.
    write(&guest, 2048, 4096);
    assert!(!is_dirty(&storage), "overwriting in place needs no refcounts");
    write(&guest, 100 << 10, 4096);
    assert!(is_dirty(&storage));
    block_on(guest.close()).unwrap();
    assert_repaired(&storage, "closed again");
    // Only reading, and discarding, which gives back in order.
    let guest = open(&file, Base::default());
    block_on(guest.read_all()).unwrap();
    block_on(guest.discard(0, 8192)).unwrap();
    block_on(guest.flush()).unwrap();
    assert!(!is_dirty(&storage));
    qcow2_check(&storage.bytes(NAME)).unwrap().sound().unwrap();
}

#[test]
fn the_repair_at_open_survives_a_power_cut_at_any_moment() {
    let (storage, expected) = left_dirty();
    let before = storage.bytes(NAME);
    assert!(contents(&storage) == expected && storage.bytes(NAME) == before, "opened read-only it is as it is");
    storage.record();
    drop(opened(&storage, false).unwrap());
    assert_repaired(&storage, "opened for writing");
    assert!(contents(&storage) == expected);
    let (mut replay, mut cuts) = (storage.take_recording().replay(), 0);
    while let Some(now) = replay.advance() {
        for outcome in 0..3 {
            let cut = replay.power_cut(outcome);
            let at = format!("cut at {now}, outcome {outcome}");
            let report = qcow2_check(&cut.bytes(NAME)).unwrap();
            report.sound().unwrap_or_else(|wrong| panic!("{at}: {wrong}"));
            assert!(contents(&cut) == expected, "{at}");
            drop(opened(&cut, false).unwrap());
            assert_repaired(&cut, &at);
            assert!(contents(&cut) == expected, "{at}");
            cuts += 1;
        }
    }
    assert!(cuts > 20, "{cuts}");
}

#[test]
fn a_repair_does_not_rely_on_what_a_dead_program_did_not_make_durable() {
    for seed in 0..8 {
        let (storage, file) = created(&lazy(), SimFileOptions::default());
        let guest = open(&file, Base::default());
        let flushed = stamped(1, 0, 60 << 10);
        block_on(async {
            guest.write(0, &flushed).await.unwrap();
            guest.flush().await.unwrap();
            guest.write(200 << 10, &stamped(2, 0, 40 << 10)).await.unwrap();
        });
        // Its tables are written and its death comes before they are durable.
        storage.inject(NAME, Fault::nth(OpKind::Flush, 0, FaultAction::Fail(IoError::EIO)));
        block_on(guest.flush()).unwrap_err();
        storage.clear_faults();
        drop(guest);
        storage.record();
        drop(opened(&storage, false).unwrap());
        assert_repaired(&storage, "opened for writing");
        let mut replay = storage.take_recording().replay();
        while let Some(now) = replay.advance() {
            let cut = replay.power_cut(mix(seed, now));
            let report = qcow2_check(&cut.bytes(NAME)).unwrap();
            report.sound().unwrap_or_else(|wrong| panic!("seed {seed}, cut at {now}: {wrong}"));
            assert!(contents(&cut)[..flushed.len()] == flushed[..], "seed {seed}, cut at {now}");
        }
    }
}

#[test]
fn a_failing_storage_ends_the_repair_at_open_with_an_image_that_the_next_one_repairs() {
    for kind in [OpKind::Read, OpKind::Write, OpKind::Flush] {
        for nth in 0..40 {
            let (storage, expected) = left_dirty();
            storage.inject(NAME, Fault::nth(kind, nth, FaultAction::Fail(IoError::EIO)));
            let result = opened(&storage, false).map(drop);
            storage.clear_faults();
            assert!(contents(&storage) == expected, "{kind:?} {nth}");
            drop(opened(&storage, false).unwrap());
            assert_repaired(&storage, "the second time");
            if result.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn without_room_for_new_refcounts_the_image_is_refused_and_left_as_it_was() {
    for nth in 0..2 {
        let (storage, expected) = left_dirty();
        let before = storage.bytes(NAME);
        let full = FaultAction::Fail(IoError::from_errno(28));
        storage.inject(NAME, Fault::nth(OpKind::Write, nth, full));
        assert!(opened(&storage, false).is_err(), "write {nth} was to fail");
        let after = storage.bytes(NAME);
        // Where nothing leads to, the first of them may lie already.
        assert!(nth > 0 || after == before, "the file has changed");
        assert!(after.len() == before.len() && after[..512] == before[..512], "write {nth}");
        assert_eq!(qcow2_check(&after), qcow2_check(&before), "write {nth}");
        storage.clear_faults();
        assert!(contents(&storage) == expected, "write {nth}");
    }
}

#[test]
fn what_refcounts_alone_do_not_explain_is_refused_and_left_as_it_was() {
    let (storage, _) = left_dirty();
    let good = storage.bytes(NAME);
    let word = |at: u64| u64::from_be_bytes(good[at as usize..at as usize + 8].try_into().unwrap());
    let l1 = word(40);
    let l2 = word(l1) & 0x00ff_ffff_ffff_fe00;
    let behind = (good.len() as u64).next_multiple_of(CLUSTER) + 32 * CLUSTER;
    let right_behind = (good.len() as u64).next_multiple_of(CLUSTER);
    let harm = [
        ("L1 where the file ends", 40, right_behind),
        ("an entry that leads behind the file", l2, behind),
        ("an entry off the clusters", l2, word(l2) + 512),
        ("a reserved bit", l2, word(l2) | 1 << 56),
        ("a table behind the file", l1, behind),
        ("L1 behind the file", 40, behind),
    ];
    for (what, at, value) in harm {
        let mut bytes = good.clone();
        bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
        let storage = stored(&bytes);
        let Err(error) = opened(&storage, false) else { panic!("{what}: opened") };
        assert!(error.to_string().contains("dirty bit"), "{what}: {error}");
        assert!(storage.bytes(NAME) == bytes, "{what}: the file has changed");
    }
    // Damage that refcounts do explain is repaired: no refcounts at all.
    let mut bytes = good.clone();
    bytes[word(48) as usize..][..8].fill(0);
    let storage = stored(&bytes);
    drop(opened(&storage, false).unwrap());
    assert_repaired(&storage, "no refcounts");
}

#[test]
fn more_wrong_flags_than_are_repaired_at_open_are_refused_and_left_as_they_were() {
    // One table that L1 names again and again: each time each of its entries claims to be the only one.
    const TABLES: u64 = (1 << 20) / (CLUSTER / 8) + 1;
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = TABLES * (CLUSTER / 8) * CLUSTER;
        options.cluster_size = CLUSTER;
        options.refcount_bits = 64;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    block_on(guest.write(0, &stamped(1, 0, CLUSTER as usize))).unwrap();
    block_on(guest.close()).unwrap();
    let mut bytes = storage.bytes(NAME);
    let word = |at: u64| -> [u8; 8] { bytes[at as usize..at as usize + 8].try_into().unwrap() };
    let l1 = u64::from_be_bytes(word(40));
    let l2 = u64::from_be_bytes(word(l1)) & 0x00ff_ffff_ffff_fe00;
    for (table, entries) in [(l1, TABLES), (l2, CLUSTER / 8)] {
        let first = bytes[table as usize..table as usize + 8].to_vec();
        bytes[table as usize..][..entries as usize * 8].copy_from_slice(&first.repeat(entries as usize));
    }
    bytes[79] |= 1;
    let storage = stored(&bytes);
    let error = opened(&storage, false).map(drop).unwrap_err();
    assert!(error.to_string().contains("entries have a wrong flag"), "{error}");
    assert!(storage.bytes(NAME) == bytes, "the file has changed");
}

#[test]
fn without_locks_a_dirty_image_is_taken_for_one_in_use_until_check_has_repaired_it() {
    let (storage, expected) = left_dirty();
    let bytes = storage.bytes(NAME);
    let unlocked = |locks| {
        let storage = SimStorage::new(5);
        storage.create_with(NAME, &bytes, SimFileOptions { locks, ..SimFileOptions::default() });
        storage
    };
    let storage = unlocked(Locks::Lacking);
    let file = storage.file(NAME).unwrap();
    let amended = |file: &SimFile| {
        let options =
            ringdisk_format_qcow2::AmendOptions::default().with(|options| options.lazy_refcounts = Some(false));
        block_on(ringdisk_format_qcow2::amend(&blocking(file), file, NAME, &options, &mut |_, _| true))
    };
    let renamed = block_on(ringdisk_format_qcow2::set_backing(&blocking(&file), file.as_ref(), NAME, None));
    for refused in [opened(&storage, false).map(drop), amended(&file), renamed] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("no locks") && error.to_string().contains("check -r all"), "{error}");
    }
    assert!(contents(&storage) == expected && storage.bytes(NAME) == bytes, "read it may be");
    let length = bytes.len() as u64;
    block_on(ringdisk_format_qcow2::repair(&blocking(&file), length, NAME, Repair::All, &mut |_| true)).unwrap();
    drop(opened(&storage, false).unwrap());
    assert_repaired(&storage, "checked");
    assert!(contents(&storage) == expected);
    // Where locks were not wanted, whoever did not want them knows.
    let storage = unlocked(Locks::NotWanted);
    drop(opened(&storage, false).unwrap());
    assert_repaired(&storage, "not locked");
}

#[test]
fn a_dirty_image_with_an_external_data_file_is_repaired_like_any_other() {
    let qemu = common::has_tool("qemu-img");
    let directory = tempfile::tempdir().unwrap();
    let data_path = directory.path().join(DATA);
    for extended_l2 in [false, true] {
        let options = CreateOptions::default().with(|options| {
            options.size_bytes = SIZE;
            options.cluster_size = 16384;
            options.extended_l2 = extended_l2;
            options.data_file = Some(data_path.display().to_string());
        });
        let (storage, file) = created(&options, SimFileOptions::default());
        let guest = open(&file, Base::default());
        block_on(async {
            guest.write(1000, &stamped(1, 0, 90 << 10)).await.unwrap();
            guest.write_zeroes(32 << 10, 16 << 10, false).await.unwrap();
            guest.close().await.unwrap();
        });
        let expected = block_on(guest.read_all()).unwrap();
        drop(guest);
        // Dirty, with an L2 table that no refcount knows of, and a refcount that is too high.
        let mut bytes = storage.bytes(NAME);
        let word = |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap());
        let l2 = word(word(40)) & 0x00ff_ffff_ffff_fe00;
        let block = word(word(48));
        let last = bytes.len() / 16384 - 1;
        bytes[(block + l2 / 16384 * 2) as usize..][..2].fill(0);
        bytes[block as usize + last * 2..][..2].copy_from_slice(&[0, 2]);
        bytes[79] |= 1;
        let dirty = common::copy(&storage);
        block_on(blocking(&dirty.file(NAME).unwrap()).write(0, AlignedBuf::copy_of(&bytes))).unwrap();
        assert!(is_dirty(&dirty) && qcow2_check(&dirty.bytes(NAME)).unwrap().sound().is_ok(), "the premise");
        // At open only the image itself is there, without its data file.
        let file = dirty.file(NAME).unwrap();
        let io = MetaIo::new(file.open_blocking().unwrap());
        drop(block_on(Qcow2::open(&io, file.info(), open_options(false))).unwrap());
        assert_repaired(&dirty, "repaired");
        assert!(contents(&dirty) == expected);
        if qemu {
            std::fs::write(&data_path, dirty.bytes(DATA)).unwrap();
            assert!(judged_by_qemu(directory.path(), &dirty.bytes(NAME)) == expected);
        }
    }
}

#[test]
fn verbs_that_change_an_image_repair_it_first() {
    let (storage, expected) = left_dirty();
    let file = storage.file(NAME).unwrap();
    let io = blocking(&file);
    let options = ringdisk_format_qcow2::AmendOptions::default().with(|options| options.lazy_refcounts = Some(false));
    block_on(ringdisk_format_qcow2::amend(&io, file.as_ref(), NAME, &options, &mut |_, _| true)).unwrap();
    assert_repaired(&storage, "amended");
    assert!(contents(&storage) == expected);
    let (storage, _) = left_dirty();
    let file = storage.file(NAME).unwrap();
    block_on(ringdisk_format_qcow2::set_backing(&blocking(&file), file.as_ref(), NAME, None)).unwrap();
    assert_repaired(&storage, "another backing file");
}

/// Writes with qemu-io, which then dies.
fn qemu_io_dies(path: &Path, commands: &[&str]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2"]);
    for text in commands {
        command.args(["-c", text]);
    }
    let output = command.args(["-c", "abort"]).arg(path).output().unwrap();
    assert!(!output.status.success(), "it was to die");
}

#[test]
fn images_that_qemu_left_dirty_are_repaired_here() {
    if !common::has_tool("qemu-img") || !common::has_tool("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("theirs.qcow2");
    for (extra, snapshot) in [("cluster_size=4k", true), ("extended_l2=on", false), ("refcount_bits=1", false)] {
        let options = format!("lazy_refcounts=on,{extra}");
        common::run("qemu-img", &["create", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), "8M"]);
        if snapshot {
            common::run("qemu-io", &["-f", "qcow2", "-c", "write -P 9 0 300k", path.to_str().unwrap()]);
            common::run("qemu-img", &["snapshot", "-c", "one", path.to_str().unwrap()]);
        }
        qemu_io_dies(&path, &["write -P 1 64k 200k", "flush", "discard 64k 64k", "write -P 2 3M 70k", "flush"]);
        let storage = stored(&std::fs::read(&path).unwrap());
        assert!(is_dirty(&storage), "{extra}: the premise");
        let mut expected = contents(&storage);
        let guest = opened(&storage, false).unwrap();
        assert_repaired(&storage, extra);
        expected[5 << 20..][..10_000].fill(3);
        block_on(guest.write(5 << 20, &[3; 10_000])).unwrap();
        block_on(guest.close()).unwrap();
        assert_repaired(&storage, extra);
        assert!(judged_by_qemu(directory.path(), &storage.bytes(NAME)) == expected, "{extra}");
    }
}

#[test]
fn images_that_we_left_dirty_are_repaired_by_qemu() {
    if !common::has_tool("qemu-img") || !common::has_tool("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ours.qcow2");
    let (storage, mut expected) = left_dirty();
    std::fs::write(&path, storage.bytes(NAME)).unwrap();
    common::run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 400k 8k", path.to_str().unwrap()]);
    expected[400 << 10..408 << 10].fill(7);
    let bytes = std::fs::read(&path).unwrap();
    assert_repaired(&stored(&bytes), "repaired by qemu");
    assert!(judged_by_qemu(directory.path(), &bytes) == expected);
}
