//! Resizing images with extended L2 entries and with external data files: against a model, at every power cut and
//! fault, and with qemu-img as judge.
#![allow(clippy::unwrap_used)]

mod common;

use block::{File, IoError, Result, block_on};
use common::{Base, DATA, NAME, blocking, copy, created, has_tool, judged_by_qemu, open};
use ringdisk_format_qcow2::{CreateOptions, EditWatch, GrowBy, Preallocation, ResizeOptions, preallocate, resize};
use std::path::Path;
use std::sync::Arc;
use testkit::{Dice, Fault, FaultAction, OpKind, SimFileOptions, SimStorage, qcow2_check, stamped};

/// What is resized.
#[derive(Debug, Clone, Copy)]
struct Kind {
    extended: bool,
    /// With an external data file, and whether that is a raw image.
    data_file: Option<bool>,
    backing: bool,
}

const KINDS: [Kind; 6] = [
    Kind { extended: true, data_file: None, backing: false },
    Kind { extended: true, data_file: None, backing: true },
    Kind { extended: false, data_file: Some(false), backing: true },
    Kind { extended: false, data_file: Some(true), backing: false },
    Kind { extended: true, data_file: Some(false), backing: true },
    Kind { extended: true, data_file: Some(true), backing: false },
];

/// Of 32 parts, each of two sectors.
const CLUSTER: u64 = 32768;

const HOW: [GrowBy; 5] = [GrowBy::Nothing, GrowBy::Nothing, GrowBy::Tables, GrowBy::Space, GrowBy::Zeros];

fn made(kind: Kind, directory: &Path) -> (SimStorage, Base) {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = (150 << 10) + 512;
        options.cluster_size = CLUSTER;
        options.extended_l2 = kind.extended;
        options.data_file = kind.data_file.map(|_| directory.join(DATA).display().to_string());
        options.data_file_raw = kind.data_file == Some(true);
        options.backing_file = kind.backing.then(|| "base.raw".to_owned());
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    if kind.data_file == Some(true) {
        let (io, watch) = (blocking(&file), &mut |_: u64, _: u64| true);
        block_on(preallocate(&io, file.info(), Preallocation::Metadata, watch)).unwrap();
    }
    let base = if kind.backing { stamped(99, 0, 230 << 10) } else { Vec::new() };
    (storage, Arc::new(base))
}

fn disk(storage: &SimStorage, base: &Base) -> Vec<u8> {
    block_on(open(&storage.file(NAME).unwrap(), Arc::clone(base)).read_all()).unwrap()
}

/// Writes somewhere, and most often where the disk ends.
fn scribble(storage: &SimStorage, base: &Base, dice: &mut Dice) {
    let guest = open(&storage.file(NAME).unwrap(), Arc::clone(base));
    let size = guest.qcow2.size_bytes();
    let data_file = guest.io.data().is_some();
    block_on(async {
        for _ in 0..1 + dice.below(6) {
            let length = ((1 + dice.below(60)) * 512).min(size);
            let near = if dice.chance(50) { size.min(20 << 10) } else { size };
            let offset = (size - (1 + dice.below(near / 512)) * 512).min(size - length);
            let stamp = stamped(dice.seed(), offset, length as usize);
            match dice.below(8) {
                0 => guest.discard(offset, length).await.unwrap(),
                1 => guest.write_zeroes(offset, length, dice.chance(50)).await.unwrap(),
                2 if !data_file => {
                    let start = (size - 1) / CLUSTER * CLUSTER;
                    let mut plain = vec![7; (size - start) as usize];
                    plain[..512].copy_from_slice(&stamped(dice.seed(), start, 512));
                    guest.write_compressed(start, &plain).await.unwrap();
                }
                _ => guest.write(offset, &stamp).await.unwrap(),
            }
        }
        guest.close().await.unwrap();
    });
}

fn resized(storage: &SimStorage, base: &Base, size_bytes: u64, preallocation: GrowBy) -> Result<()> {
    // Through a copy: faults are for the resize.
    let guest = open(&copy(storage).file(NAME).unwrap(), Arc::clone(base));
    let size = guest.qcow2.size_bytes();
    let rest = size % CLUSTER;
    let options = ResizeOptions::to(size_bytes).with(|options| {
        options.shrink = true;
        options.preallocation = if size_bytes > size { preallocation } else { GrowBy::Nothing };
        options.backing_bytes = base.len() as u64;
        options.last_cluster = block_on(guest.read(size - rest, rest as usize)).unwrap();
        options.data_file_bytes = storage.file(DATA).map(|file| file.length_bytes().unwrap());
    });
    let file = storage.file(NAME).unwrap();
    block_on(resize(&blocking(&file), file.as_ref(), NAME, &options, &mut |_, _| true))
}

fn sound_without_leaks(storage: &SimStorage, what: &str) {
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
    assert_eq!(report.leaked_clusters, 0, "{what}");
}

/// Sizes at the ends of clusters, of parts, and of sectors.
fn any_size(dice: &mut Dice) -> u64 {
    let unit = [512, 512, 512, 1024, CLUSTER][dice.below(5) as usize];
    (1 + dice.below((300 << 10) / unit)) * unit
}

#[test]
fn a_disk_keeps_what_it_held_and_gets_zeros() {
    let qemu = has_tool("qemu-img");
    let directory = tempfile::tempdir().unwrap();
    for (kind, seed) in KINDS.into_iter().flat_map(|kind| (0..4).map(move |seed| (kind, seed))) {
        let mut dice = Dice::new(seed);
        let (storage, base) = made(kind, directory.path());
        for _ in 0..10 {
            scribble(&storage, &base, &mut dice);
            let mut expected = disk(&storage, &base);
            let (size, how) = (any_size(&mut dice), HOW[dice.below(5) as usize]);
            let what = format!("{kind:?}, seed {seed}: {} to {size} bytes, {how:?}", expected.len());
            resized(&storage, &base, size, how).unwrap_or_else(|error| panic!("{what}: {error}"));
            sound_without_leaks(&storage, &what);
            expected.resize(size as usize, 0);
            let found = disk(&storage, &base);
            let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!((differs, found.len()), (None, expected.len()), "{what}");
            if kind.data_file.is_some() {
                assert_eq!(storage.bytes(DATA).len() as u64, size, "{what}");
            }
            if kind.data_file == Some(true) {
                assert!(storage.bytes(DATA) == expected, "{what}: the data file is another raw image");
            }
        }
        if qemu && !kind.backing {
            if kind.data_file.is_some() {
                std::fs::write(directory.path().join(DATA), storage.bytes(DATA)).unwrap();
            }
            assert!(judged_by_qemu(directory.path(), &storage.bytes(NAME)) == disk(&storage, &base), "{kind:?}");
        }
    }
}

/// Larger within the last cluster and beyond, and smaller.
const CHANGES: [(u64, GrowBy); 4] = [
    ((155 << 10) + 512, GrowBy::Nothing),
    ((300 << 10) + 512, GrowBy::Nothing),
    (250 << 10, GrowBy::Space),
    ((70 << 10) + 512, GrowBy::Nothing),
];

#[test]
fn a_power_cut_at_any_moment_leaves_the_disk_before_or_the_disk_after() {
    let directory = tempfile::tempdir().unwrap();
    let mut seen = [0u64; 2];
    for (seed, kind) in KINDS.into_iter().enumerate() {
        let mut dice = Dice::new(seed as u64);
        let (original, base) = made(kind, directory.path());
        scribble(&original, &base, &mut dice);
        let before = disk(&original, &base);
        for (size, how) in CHANGES {
            let storage = copy(&original);
            storage.record();
            resized(&storage, &base, size, how).unwrap();
            let after = disk(&storage, &base);
            let mut replay = storage.take_recording().replay();
            while let Some(now) = replay.advance() {
                for outcome in 0..2 {
                    let cut = replay.power_cut(outcome);
                    qcow2_check(&cut.bytes(NAME)).unwrap().sound().unwrap();
                    let found = disk(&cut, &base);
                    assert!(found == before || found == after, "{kind:?} to {size} bytes, {how:?}, cut at {now}");
                    seen[usize::from(found == after)] += 1;
                }
            }
        }
    }
    assert!(seen[0] > 100 && seen[1] > 20, "{seen:?}");
}

#[test]
fn a_failed_operation_on_either_file_leaves_the_disk_before_or_the_disk_after() {
    let kinds = [OpKind::Read, OpKind::Write, OpKind::WriteZeroes, OpKind::Flush, OpKind::Discard, OpKind::SetLength];
    let directory = tempfile::tempdir().unwrap();
    let mut failures = 0;
    for (kind, (size, how)) in [1, 3, 4].into_iter().flat_map(|at| CHANGES.map(|change| (KINDS[at], change))) {
        let (original, base) = made(kind, directory.path());
        scribble(&original, &base, &mut Dice::new(4));
        let before = disk(&original, &base);
        let after = copy(&original);
        resized(&after, &base, size, how).unwrap();
        let after = disk(&after, &base);
        let names = [Some(NAME), kind.data_file.map(|_| DATA)];
        let all = names.into_iter().flatten().flat_map(|name| kinds.map(|op| (name, op)));
        for (name, op) in all {
            for nth in 0.. {
                let storage = copy(&original);
                let error = if nth % 2 == 0 { IoError::EIO } else { IoError::from_errno(28) };
                storage.inject(name, Fault::nth(op, nth, FaultAction::Fail(error)));
                let done = resized(&storage, &base, size, how);
                let reached = storage.pushed(name, op) > nth;
                storage.clear_faults();
                failures += u64::from(done.is_err());
                let what = format!("{kind:?} to {size} bytes, {name}: {op:?} number {nth}");
                sound_without_leaks(&storage, &what);
                let found = disk(&storage, &base);
                assert!(found == before || found == after, "{what}");
                assert!(done.is_err() || found == after, "{what} was not told of");
                // And again, without the fault.
                resized(&storage, &base, size, how).unwrap();
                assert!(disk(&storage, &base) == after, "{what}: the second time");
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(failures > 50, "only {failures} failed: the faults hit nothing");
}

#[test]
fn the_file_of_a_disk_that_became_shorter_ends_behind_what_is_left() {
    for (extended_l2, cluster_size) in [(false, 4096), (true, 16384)] {
        let options = CreateOptions::default().with(|options| {
            options.size_bytes = 4 << 20;
            options.cluster_size = cluster_size;
            options.extended_l2 = extended_l2;
        });
        let (storage, file) = created(&options, SimFileOptions::default());
        let data = stamped(1, 0, 4 << 20);
        block_on(async {
            let guest = open(&file, Base::default());
            guest.write(0, &data).await.unwrap();
            guest.close().await.unwrap();
        });
        let size_bytes = 10 * cluster_size;
        let options = ResizeOptions::to(size_bytes).with(|options| options.shrink = true);
        block_on(resize(&blocking(&file), file.as_ref(), NAME, &options, &mut |_, _| true)).unwrap();
        sound_without_leaks(&storage, "shorter");
        assert!(disk(&storage, &Base::default()) == data[..size_bytes as usize]);
        // Header, refcount table and block, L1, L2.
        assert_eq!(storage.bytes(NAME).len() as u64, (5 + 10) * cluster_size);
    }
}

const WHOLE: u64 = 512 << 10;

/// A disk of 512 KiB that is full, and whose file can only end where a half of it does once tables have moved.
fn full() -> SimStorage {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = WHOLE;
        options.cluster_size = 512;
    });
    let (storage, file) = created(&options, SimFileOptions::default());
    let guest = open(&file, Base::default());
    block_on(async {
        guest.write(0, &stamped(1, 0, WHOLE as usize)).await.unwrap();
        guest.close().await.unwrap();
    });
    storage
}

fn halved(storage: &SimStorage, watch: &mut EditWatch<'_>) -> Result<()> {
    let options = ResizeOptions::to(WHOLE / 2).with(|options| options.shrink = true);
    let file = storage.file(NAME).unwrap();
    block_on(resize(&blocking(&file), file.as_ref(), NAME, &options, watch))
}

/// Whether the disk is the one after; it is whole in any case, and what is wrong was told.
fn is_halved(original: &[u8], storage: &SimStorage, done: &Result<()>, shortest: usize, what: &str) -> bool {
    sound_without_leaks(storage, what);
    let found = disk(storage, &Base::default());
    assert!(found == original[..found.len()] && [WHOLE / 2, WHOLE].contains(&(found.len() as u64)), "{what}");
    let (is_after, length) = (found.len() as u64 == WHOLE / 2, storage.bytes(NAME).len());
    match done {
        Ok(()) => assert!(is_after && length == shortest, "{what}: {length} bytes of file, and nobody was told"),
        Err(error) if is_after && !error.to_string().contains("the image is as before, or changed") => {
            assert!(error.to_string().contains("has its new size"), "{what}: {error}");
        }
        Err(_) => {}
    }
    is_after
}

#[test]
fn a_shrink_that_is_given_up_leaves_the_disk_before_or_the_disk_after_and_says_which() {
    let original = full();
    let before = disk(&original, &Base::default());
    let (shortest, mut calls) = (copy(&original), 0);
    halved(&shortest, &mut |_, _| {
        calls += 1;
        true
    })
    .unwrap();
    let shortest = shortest.bytes(NAME).len();
    assert!(shortest < original.bytes(NAME).len() * 2 / 3, "{shortest}");
    let mut seen = [0; 2];
    for nth in 0..calls {
        let (storage, mut heard) = (copy(&original), 0);
        let done = halved(&storage, &mut |_, _| {
            heard += 1;
            heard <= nth
        });
        let what = format!("given up at {nth} of {calls}");
        assert!(done.as_ref().unwrap_err().to_string().contains("interrupted"), "{what}");
        seen[usize::from(is_halved(&before, &storage, &done, shortest, &what))] += 1;
    }
    assert!(seen[0] > 5 && seen[1] > 5, "{seen:?}");
}

#[test]
fn a_shrink_whose_file_stays_longer_than_it_has_to_be_says_so() {
    let original = full();
    let before = disk(&original, &Base::default());
    let shortest = copy(&original);
    halved(&shortest, &mut |_, _| true).unwrap();
    let shortest = shortest.bytes(NAME).len();
    let mut seen = [0; 2];
    for kind in [OpKind::Read, OpKind::Write, OpKind::Flush] {
        for nth in 0.. {
            let storage = copy(&original);
            let error = if nth % 2 == 0 { IoError::EIO } else { IoError::from_errno(28) };
            storage.inject(NAME, Fault::from_nth(kind, nth, FaultAction::Fail(error)));
            let done = halved(&storage, &mut |_, _| true);
            let reached = storage.pushed(NAME, kind) > nth;
            storage.clear_faults();
            let what = format!("{kind:?} from number {nth} on");
            let is_after = is_halved(&before, &storage, &done, shortest, &what);
            if done.is_err() {
                seen[usize::from(is_after)] += 1;
            }
            if !reached {
                break;
            }
        }
    }
    assert!(seen[0] > 5 && seen[1] > 5, "{seen:?}");
}
