//! Snapshots, resizing and amending: against a model, at every power cut and fault, and with qemu-img as judge.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "edit/failed_syncs.rs"]
mod failed_syncs;

use block::{ErrorKind, File, IoError, MetaIo, Result, block_on};
use common::{Base, NAME, blocking, copy, created, has_tool, judged_by_qemu, open, open_options, run};
use ringdisk_format_qcow2::{
    AmendOptions, BitmapAction, CreateOptions, GrowBy, Header, NewSnapshot, Qcow2, ResizeOptions, Snapshot,
    SnapshotName, amend, apply_snapshot, create_snapshot, delete_snapshot, edit_bitmaps, resize, snapshots,
};
use std::sync::Arc;
use testkit::{Dice, Fault, FaultAction, OpKind, SimFileOptions, SimStorage, qcow2_check, stamped};

/// What is done to an image that nobody uses.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verb {
    Create(String),
    Apply(String),
    Delete(String),
    Resize(u64, GrowBy),
    Amend(AmendOptions),
}

/// All that an image holds: the disk, and its snapshots with their disks.
#[derive(Clone, PartialEq, Eq)]
struct Everything {
    disk: Vec<u8>,
    snapshots: Vec<(Snapshot, Vec<u8>)>,
}

impl std::fmt::Debug for Everything {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.snapshots.iter().map(|(snapshot, _)| &snapshot.name).collect::<Vec<_>>();
        write!(f, "a disk of {} bytes with snapshots {names:?}", self.disk.len())
    }
}

fn header(io: &MetaIo, storage: &SimStorage) -> Header {
    let options = open_options(true);
    block_on(Qcow2::open(io, storage.file(NAME).unwrap().info(), options)).unwrap().header().clone()
}

fn everything(storage: &SimStorage, base: &Base) -> Everything {
    let file = storage.file(NAME).unwrap();
    let io = blocking(&file);
    let disk = block_on(open(&file, Arc::clone(base)).read_all()).unwrap();
    let list = block_on(snapshots(&io, &header(&io, storage), NAME)).unwrap();
    let contents = |snapshot: &Snapshot| {
        let which = SnapshotName::Exactly { id: Some(snapshot.id.clone()), name: Some(snapshot.name.clone()) };
        let qcow2 = block_on(Qcow2::open_snapshot(&io, file.info(), open_options(true), &which)).unwrap();
        let guest = common::Guest { qcow2: Arc::new(qcow2), io: io.clone(), base: Arc::clone(base) };
        let mut then = block_on(guest.read_all()).unwrap();
        // Zeros follow where the disk has grown since.
        then.truncate(snapshot.disk_bytes as usize);
        then
    };
    let snapshots = list.iter().map(|snapshot| (snapshot.clone(), contents(snapshot))).collect();
    Everything { disk, snapshots }
}

fn carry_out(storage: &SimStorage, verb: &Verb, base: &Base) -> Result<()> {
    let file = storage.file(NAME).unwrap();
    let (io, file) = (blocking(&file), file.as_ref());
    let watch: &mut dyn FnMut(u64, u64) -> bool = &mut |_, _| true;
    match verb {
        Verb::Create(name) => {
            let new = NewSnapshot::new(name.clone()).with(|new| {
                new.date_seconds = 1_800_000_000;
                new.date_nanoseconds = 5;
            });
            block_on(create_snapshot(&io, file, NAME, &new, watch))
        }
        Verb::Apply(which) => block_on(apply_snapshot(&io, file, NAME, &SnapshotName::Any(which.clone()), watch)),
        Verb::Delete(which) => block_on(delete_snapshot(&io, file, NAME, &SnapshotName::named(which), watch)),
        Verb::Amend(options) => block_on(amend(&io, file, NAME, options, watch)),
        Verb::Resize(size_bytes, preallocation) => {
            // Through a copy: faults are for the verb.
            let guest = open(&copy(storage).file(NAME).unwrap(), Arc::clone(base));
            let size = guest.qcow2.size_bytes();
            let rest = size % (1 << guest.qcow2.header().cluster_bits);
            let options = ResizeOptions::to(*size_bytes).with(|options| {
                options.shrink = true;
                options.preallocation = *preallocation;
                options.backing_bytes = base.len() as u64;
                options.last_cluster = block_on(guest.read(size - rest, rest as usize)).unwrap();
                options.data_file_bytes = None;
            });
            block_on(resize(&io, file, NAME, &options, watch))
        }
    }
}

/// What an image must hold after a verb.
fn expected(before: &Everything, verb: &Verb) -> Everything {
    let mut after = before.clone();
    let find = |which: &str| before.snapshots.iter().position(|(snapshot, _)| snapshot.name == which).unwrap();
    match verb {
        Verb::Create(_) | Verb::Amend(_) => {}
        Verb::Apply(which) => after.disk = before.snapshots[find(which)].1.clone(),
        Verb::Delete(which) => _ = after.snapshots.remove(find(which)),
        Verb::Resize(size, _) => after.disk.resize(*size as usize, 0),
    }
    after
}

fn sound_without_leaks(storage: &SimStorage) {
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap();
    assert_eq!(report.leaked_clusters, 0);
}

/// Writes somewhere, through the format, and closes.
fn scribble(storage: &SimStorage, base: &Base, dice: &mut Dice) {
    let guest = open(&storage.file(NAME).unwrap(), Arc::clone(base));
    let size = guest.qcow2.size_bytes();
    block_on(async {
        for _ in 0..1 + dice.below(6) {
            let offset = dice.below(size / 512) * 512;
            let length = ((1 + dice.below(60)) * 512).min(size - offset);
            match dice.below(8) {
                0 => guest.discard(offset, length).await.unwrap(),
                1 => guest.write_zeroes(offset, length, dice.chance(50)).await.unwrap(),
                _ => guest.write(offset, &stamped(dice.seed(), offset, length as usize)).await.unwrap(),
            }
        }
        guest.close().await.unwrap();
    });
}

fn random_verb(dice: &mut Dice, now: &Everything, number: u64, may_resize: bool) -> Verb {
    let some = |dice: &mut Dice| now.snapshots[dice.below(now.snapshots.len() as u64) as usize].0.name.clone();
    match dice.below(8) {
        0..2 if !now.snapshots.is_empty() => Verb::Apply(some(dice)),
        2..4 if !now.snapshots.is_empty() => Verb::Delete(some(dice)),
        4..6 if may_resize => {
            let how = [GrowBy::Nothing, GrowBy::Nothing, GrowBy::Tables, GrowBy::Space, GrowBy::Zeros];
            let size = (1 + dice.below(700)) * 512;
            let grows = size > now.disk.len() as u64;
            Verb::Resize(size, if grows { how[dice.below(5) as usize] } else { GrowBy::Nothing })
        }
        _ => Verb::Create(format!("s{number}")),
    }
}

/// Compares what is there with what a verb should have made of `before`.
fn check_after(before: &Everything, verb: &Verb, after: &Everything) {
    let expected = expected(before, verb);
    let differs = after.disk.iter().zip(&expected.disk).position(|(found, expected)| found != expected);
    assert_eq!(differs, None, "{verb:?}: the disk differs; it had {} bytes", before.disk.len());
    assert_eq!(after.disk.len(), expected.disk.len());
    match verb {
        Verb::Create(name) => {
            let (new, rest) = after.snapshots.split_last().unwrap();
            assert!(rest == expected.snapshots && new.0.name == *name && new.1 == before.disk, "{verb:?}");
            assert_eq!(new.0.disk_bytes, before.disk.len() as u64);
            assert!(rest.iter().all(|(snapshot, _)| snapshot.id != new.0.id), "an id was used twice");
        }
        _ => assert!(after.snapshots == expected.snapshots, "{verb:?}: {after:?}, expected {expected:?}"),
    }
}

fn options(dice: &mut Dice, cluster_size: u64, version: u32) -> CreateOptions {
    let refcount_bits = if version == 2 { 16 } else { [8, 16, 32, 64][dice.below(4) as usize] };
    CreateOptions::default().with(|options| {
        options.size_bytes = 160 << 10;
        options.cluster_size = cluster_size;
        options.version = version;
        options.refcount_bits = refcount_bits;
    })
}

#[test]
fn random_histories_keep_what_the_disk_and_its_snapshots_hold_and_leak_nothing() {
    let qemu = has_tool("qemu-img");
    let directory = tempfile::tempdir().unwrap();
    for seed in 0..16 {
        let mut dice = Dice::new(seed);
        let version = if seed % 4 == 3 { 2 } else { 3 };
        let mut options = options(&mut dice, [512, 1024, 4096, 65536][seed as usize % 4], version);
        let mut base = Base::default();
        if seed % 3 == 1 {
            options.backing_file = Some("base.raw".to_owned());
            base = Arc::new(stamped(99, 0, 200 << 10));
        }
        let (storage, _) = created(&options, SimFileOptions::default());
        for number in 0..14 {
            scribble(&storage, &base, &mut dice);
            let before = everything(&storage, &base);
            let verb = random_verb(&mut dice, &before, number, version == 3);
            carry_out(&storage, &verb, &base).unwrap_or_else(|error| panic!("seed {seed}: {verb:?}: {error}"));
            sound_without_leaks(&storage);
            check_after(&before, &verb, &everything(&storage, &base));
        }
        if qemu && base.is_empty() {
            let end = everything(&storage, &base);
            assert!(judged_by_qemu(directory.path(), &storage.bytes(NAME)) == end.disk);
            for (snapshot, contents) in &end.snapshots {
                // qemu-img gives it the size that the disk has now.
                let read = qemu_reads_snapshot(directory.path(), &snapshot.name);
                let both = read.len().min(contents.len());
                assert!(read[..both] == contents[..both], "seed {seed}: {}", snapshot.name);
            }
        }
    }
}

fn qemu_reads_snapshot(directory: &std::path::Path, name: &str) -> Vec<u8> {
    let (image, raw) = (directory.join("judged.qcow2"), directory.join("snapshot.raw"));
    let arguments = ["convert", "-l", &format!("snapshot.name={name}"), "-O", "raw"];
    run("qemu-img", &[&arguments[..], &[image.to_str().unwrap(), raw.to_str().unwrap()]].concat());
    std::fs::read(raw).unwrap()
}

/// An image with two snapshots, on which each verb has something to do; and the verbs.
fn prepared(seed: u64, cluster_size: u64, base: &Base) -> (SimStorage, Vec<Verb>) {
    let mut dice = Dice::new(seed);
    let mut options = options(&mut dice, cluster_size, 3);
    if !base.is_empty() {
        options.backing_file = Some("base.raw".to_owned());
    }
    let kind = SimFileOptions {
        can_discard: !seed.is_multiple_of(3),
        discard_zeroes: !seed.is_multiple_of(2),
        ..SimFileOptions::default()
    };
    let (storage, _) = created(&options, kind);
    for name in ["one", "two"] {
        scribble(&storage, base, &mut dice);
        carry_out(&storage, &Verb::Create(name.to_owned()), base).unwrap();
    }
    scribble(&storage, base, &mut dice);
    let verbs = vec![
        Verb::Create("three".to_owned()),
        Verb::Apply("one".to_owned()),
        Verb::Delete("one".to_owned()),
        Verb::Resize(330 << 10, GrowBy::Nothing),
        Verb::Resize((200 << 10) + 512, GrowBy::Tables),
        Verb::Resize((90 << 10) + 512, GrowBy::Nothing),
        Verb::Amend(AmendOptions::default().with(|options| {
            options.refcount_bits = Some(4);
            options.lazy_refcounts = Some(true);
        })),
        Verb::Amend(AmendOptions::default().with(|options| {
            options.refcount_bits = Some(16);
            options.version = Some(2);
        })),
    ];
    (storage, verbs)
}

#[test]
fn a_power_cut_at_any_moment_leaves_the_image_before_or_the_image_after() {
    let mut seen = [0u64; 2];
    for seed in 0..4 {
        let base: Base = if seed == 3 { Arc::new(stamped(99, 0, 200 << 10)) } else { Base::default() };
        let (original, verbs) = prepared(seed, [512, 1024, 4096, 16384][seed as usize % 4], &base);
        let before = everything(&original, &base);
        for verb in verbs {
            let storage = copy(&original);
            storage.record();
            carry_out(&storage, &verb, &base).unwrap();
            let after = everything(&storage, &base);
            check_after(&before, &verb, &after);
            let mut replay = storage.take_recording().replay();
            while let Some(now) = replay.advance() {
                for outcome in 0..2 {
                    let cut = replay.power_cut(outcome);
                    qcow2_check(&cut.bytes(NAME)).unwrap().sound().unwrap();
                    let found = everything(&cut, &base);
                    assert!(found == before || found == after, "seed {seed}, {verb:?}, cut at {now}: {found:?}");
                    seen[usize::from(found == after)] += 1;
                }
            }
        }
    }
    assert!(seen[0] > 100 && seen[1] > 20, "{seen:?}");
}

#[test]
fn a_failed_operation_fails_the_verb_and_leaves_the_image_before_or_the_image_after() {
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard, OpKind::SetLength];
    let mut failures = 0;
    let base = Base::default();
    let (original, verbs) = prepared(1, 1024, &base);
    let before = everything(&original, &base);
    for verb in verbs {
        let storage = copy(&original);
        carry_out(&storage, &verb, &base).unwrap();
        let after = everything(&storage, &base);
        for kind in kinds {
            for nth in 0.. {
                let storage = copy(&original);
                let error = if nth % 2 == 0 { IoError::EIO } else { IoError::from_errno(28) };
                let pushed = storage.pushed(NAME, kind);
                storage.inject(NAME, Fault::nth(kind, nth, FaultAction::Fail(error)));
                let done = carry_out(&storage, &verb, &base);
                let reached = storage.pushed(NAME, kind) - pushed > nth;
                storage.clear_faults();
                failures += u64::from(done.is_err());
                sound_without_leaks(&storage);
                let found = everything(&storage, &base);
                assert!(found == before || found == after, "{verb:?}, {kind:?} {nth}: {found:?}");
                assert!(done.is_err() || found == after, "{verb:?}, {kind:?} {nth} was not told of");
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(failures > 100, "only {failures} verbs failed: the faults hit nothing");
}

#[test]
fn giving_up_leaves_the_image_as_it_was() {
    let base = Base::default();
    let (storage, _) = prepared(2, 512, &base);
    let before = everything(&storage, &base);
    let file = storage.file(NAME).unwrap();
    for steps in 0..3 {
        let mut left = steps;
        let watch: &mut dyn FnMut(u64, u64) -> bool = &mut |_, _| {
            left -= 1;
            left >= 0
        };
        let new = NewSnapshot::new("three");
        let error = block_on(create_snapshot(&blocking(&file), file.as_ref(), NAME, &new, watch)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(everything(&storage, &base) == before);
    }
    sound_without_leaks(&storage);
}

fn amended(version: u32, refcount_bits: u32, lazy_refcounts: bool) -> Verb {
    let lazy_refcounts = Some(lazy_refcounts);
    let (version, refcount_bits) = (Some(version), Some(refcount_bits));
    Verb::Amend(AmendOptions::default().with(|options| {
        options.version = version;
        options.refcount_bits = refcount_bits;
        options.lazy_refcounts = lazy_refcounts;
    }))
}

#[test]
fn amending_back_and_forth_changes_what_is_said_and_nothing_that_is_held() {
    let qemu = has_tool("qemu-img");
    let directory = tempfile::tempdir().unwrap();
    for (seed, cluster_size) in [(1, 512), (2, 4096), (3, 65536)] {
        let base: Base = if seed == 2 { Arc::new(stamped(99, 0, 120 << 10)) } else { Base::default() };
        let (storage, _) = prepared(seed, cluster_size, &base);
        let before = everything(&storage, &base);
        for (version, bits, lazy) in [(3, 64, true), (3, 2, false), (3, 16, true), (2, 16, false), (3, 8, false)] {
            let verb = amended(version, bits, lazy);
            // Three references do not fit one bit: refused, and nothing has changed.
            let refused = carry_out(&storage, &amended(3, 1, false), &base).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
            carry_out(&storage, &verb, &base).unwrap_or_else(|error| panic!("seed {seed}: {verb:?}: {error}"));
            sound_without_leaks(&storage);
            assert!(everything(&storage, &base) == before, "seed {seed}: {verb:?}");
            let header = header(&blocking(&storage.file(NAME).unwrap()), &storage);
            assert_eq!((header.version, header.refcount_bits), (version, bits));
            assert_eq!(header.compatible_features & 1, u64::from(lazy));
            assert_eq!(header.backing_file.is_some(), !base.is_empty());
            if qemu && base.is_empty() {
                assert!(judged_by_qemu(directory.path(), &storage.bytes(NAME)) == before.disk);
                assert!(qemu_reads_snapshot(directory.path(), "one") == before.snapshots[0].1);
            }
        }
    }
}

#[test]
fn damaged_tables_are_refused_without_a_switch_and_never_a_panic_or_much_memory() {
    let base = Base::default();
    let (original, verbs) = prepared(1, 512, &base);
    let healthy = original.bytes(NAME);
    let table = u64::from_be_bytes(healthy[64..72].try_into().unwrap()) as usize;
    // Fields of the header and of the first snapshot's row: all ones say "as much as can be".
    let fields = [(36, 4), (40, 8), (48, 8), (56, 4), (60, 4), (64, 8)];
    let row = [(0, 8), (8, 4), (12, 2), (14, 2), (36, 4), (40, 8), (48, 8)].map(|(at, length)| (table + at, length));
    let mut dice = Dice::new(3);
    let words = (0..400).map(|_| (dice.below(healthy.len() as u64 / 8) as usize * 8, 8)).collect::<Vec<_>>();
    let mut refused = 0;
    for (number, (at, length)) in fields.into_iter().chain(row).chain(words).enumerate() {
        let verb = &verbs[number % verbs.len()];
        let mut bytes = healthy.clone();
        match number % 2 {
            0 => bytes[at..at + length].fill(0xff),
            _ => bytes[at..at + length].iter_mut().for_each(|byte| *byte ^= dice.below(256) as u8),
        }
        let storage = SimStorage::new(5);
        storage.create_with(NAME, &bytes, SimFileOptions::default());
        // The resize verbs read the disk through the format first, which may fail by itself.
        if matches!(verb, Verb::Resize(..)) {
            continue;
        }
        if carry_out(&storage, verb, &base).is_err() {
            refused += 1;
            assert!(storage.bytes(NAME)[..512] == bytes[..512], "{verb:?} with a change at {at}");
        }
    }
    assert!(refused >= 8, "only {refused} damaged images were refused");
}

#[test]
fn a_snapshot_that_claims_an_impossible_size_is_refused() {
    let base = Base::default();
    for size in [u64::MAX, 1 << 62, 1 << 50] {
        let (storage, _) = prepared(2, 512, &base);
        let mut bytes = storage.bytes(NAME);
        let row = u64::from_be_bytes(bytes[64..72].try_into().unwrap()) as usize;
        bytes[row + 48..row + 56].copy_from_slice(&size.to_be_bytes());
        let storage = SimStorage::new(5);
        storage.create_with(NAME, &bytes, SimFileOptions::default());
        let error = carry_out(&storage, &Verb::Apply("one".to_owned()), &base).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadImage, "{error}");
        assert!(storage.bytes(NAME) == bytes, "the image has changed");
    }
}

#[test]
fn deleting_a_snapshot_whose_data_lead_into_tables_is_refused_before_they_are_given_back() {
    const CLUSTER: u64 = 4096;
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 4 << 20;
        options.cluster_size = CLUSTER;
    });
    let base = Base::default();
    let (storage, _) = created(&options, SimFileOptions::default());
    let write = |stamp| {
        let guest = open(&storage.file(NAME).unwrap(), Arc::clone(&base));
        block_on(guest.write(0, &stamped(stamp, 0, 8 * CLUSTER as usize))).unwrap();
        block_on(guest.close()).unwrap();
    };
    write(1);
    carry_out(&storage, &Verb::Create("one".to_owned()), &base).unwrap();
    // Now the disk shares nothing with the snapshot.
    write(2);
    let bytes = storage.bytes(NAME);
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap());
    let offset = |at: u64| word(at) & 0x00ff_ffff_ffff_fe00;
    let (l1, snapshot_l2) = (word(40), offset(offset(word(64))));
    for table in [l1, offset(l1)] {
        let mut bytes = bytes.clone();
        bytes[snapshot_l2 as usize..snapshot_l2 as usize + 8].copy_from_slice(&table.to_be_bytes());
        let storage = SimStorage::new(5);
        storage.create_with(NAME, &bytes, SimFileOptions::default());
        let error = carry_out(&storage, &Verb::Delete("one".to_owned()), &base).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadImage, "{error}");
        let guest = open(&storage.file(NAME).unwrap(), Arc::clone(&base));
        let disk = block_on(guest.read(0, 8 * CLUSTER as usize)).unwrap();
        assert!(disk == stamped(2, 0, 8 * CLUSTER as usize), "the table at {table:#x} is gone");
        assert_eq!(storage.bytes(NAME)[60..72], bytes[60..72], "the snapshot is gone");
    }
}

/// An image with a snapshot, a bitmap and free space inside, whose last cluster holds data of the disk, but has no
/// refcount; and where the disk has those data.
fn with_data_that_are_not_counted() -> (SimStorage, u64) {
    const CLUSTER: usize = 4096;
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 4 << 20;
        options.cluster_size = CLUSTER as u64;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let base = Base::default();
    let change = |discarded: u64, written: &[u64]| {
        let guest = open(&file, Arc::clone(&base));
        block_on(async {
            guest.discard(0, discarded * CLUSTER as u64).await.unwrap();
            for cluster in written {
                let at = cluster * CLUSTER as u64;
                guest.write(at, &stamped(*cluster, at, CLUSTER)).await.unwrap();
            }
            guest.close().await.unwrap();
        });
    };
    change(1, &(0..60).chain(500..520).collect::<Vec<_>>());
    change(40, &[]);
    carry_out(&storage, &Verb::Create("one".to_owned()), &base).unwrap();
    change(1, &[45]);
    let add = [("bits".to_owned(), BitmapAction::Add { granularity_bytes: None })];
    block_on(edit_bitmaps(&blocking(&file), &*file, NAME, &add, &mut |_, _| true)).unwrap();
    let mut bytes = storage.bytes(NAME);
    let word = |at: u64| u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap());
    let l2 = (word(word(40)) & 0x00ff_ffff_ffff_fe00) as usize;
    let host = bytes.len().next_multiple_of(CLUSTER);
    bytes.resize(host, 0);
    bytes.extend(stamped(7, 0, CLUSTER));
    bytes[l2 + 100 * 8..l2 + 101 * 8].copy_from_slice(&(host as u64 | 1 << 63).to_be_bytes());
    let storage = SimStorage::new(5);
    storage.create_with(NAME, &bytes, SimFileOptions::default());
    (storage, 100 * CLUSTER as u64)
}

#[test]
fn data_of_the_disk_that_have_no_refcount_are_not_cut_off() {
    let base = Base::default();
    let data = stamped(7, 0, 4096);
    let held = |storage: &SimStorage, at| block_on(open(&storage.file(NAME).unwrap(), Base::default()).read(at, 4096));
    let delete = Verb::Delete("one".to_owned());
    for verb in [delete, Verb::Resize(1 << 20, GrowBy::Nothing), amended(3, 64, false)] {
        let (storage, at) = with_data_that_are_not_counted();
        let bytes = storage.bytes(NAME);
        let error = carry_out(&storage, &verb, &base).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadImage, "{verb:?}: {error}");
        assert!(storage.bytes(NAME) == bytes, "{verb:?}: the image has changed");
        assert!(held(&storage, at).unwrap() == data, "{verb:?}");
    }
}

#[test]
fn an_edit_of_an_image_whose_refcounts_deny_data_is_refused_and_changes_nothing() {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = 256 << 10;
        options.cluster_size = 4096;
    });
    let (storage, _) = created(&options, SimFileOptions::default());
    let base = Base::default();
    carry_out(&storage, &Verb::Create("old".to_owned()), &base).unwrap();
    let guest = open(&storage.file(NAME).unwrap(), Arc::clone(&base));
    block_on(guest.write(0, &[7; 40 << 10])).unwrap();
    block_on(guest.close()).unwrap();
    drop(guest);
    let good = storage.bytes(NAME);
    let word = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let offset = |at: usize| word(at) & 0x00ff_ffff_ffff_fe00;
    let (l2, block) = (offset(offset(40)), word(word(48)));
    for entry in 0..10 {
        let mut bytes = good.clone();
        let refcount = block + offset(l2 + entry * 8) / 4096 * 2;
        bytes[refcount..refcount + 2].fill(0);
        let storage = SimStorage::new(9);
        storage.create_with(NAME, &bytes, SimFileOptions::default());
        let verbs = [
            Verb::Create("new".to_owned()),
            Verb::Apply("old".to_owned()),
            Verb::Delete("old".to_owned()),
            Verb::Resize(512 << 10, GrowBy::Nothing),
            Verb::Resize(64 << 10, GrowBy::Nothing),
            Verb::Amend(AmendOptions::default().with(|options| options.lazy_refcounts = Some(true))),
        ];
        for verb in verbs {
            let error = carry_out(&storage, &verb, &base).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadImage, "{verb:?}: {error}");
            assert!(error.to_string().contains("check -r all"), "{verb:?}: {error}");
            assert!(storage.bytes(NAME) == bytes, "{verb:?}: refused and untouched");
        }
        let file = storage.file(NAME).unwrap();
        let add = ("bits".to_owned(), BitmapAction::Add { granularity_bytes: None });
        let error = block_on(edit_bitmaps(&blocking(&file), file.as_ref(), NAME, &[add], &mut |_, _| true));
        assert_eq!(error.unwrap_err().kind(), ErrorKind::BadImage);
        assert!(storage.bytes(NAME) == bytes, "refused and untouched");
    }
}
