//! Damage of every kind: whatever could be read of an image before a repair reads the same afterwards.
//!
//! Small images that hold one of everything get one field after the other damaged, and random pairs of fields. What a
//! reader finds is compared before and after `check -r all`, after a repair at open, and after writes to an image that
//! the repair called whole.
//!
//! `RINGDISK_DAMAGE_ONE_IN=1` damages every field in every way, `RINGDISK_DAMAGE_PAIRS=1000` so many pairs in each of
//! the images, and `RINGDISK_SEED` chooses others.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod harm;
mod images;

use block::{File, PastEnd, block_on};
use common::{Base, DATA, Guest, NAME, blocking, open_options};
use harm::Harm;
use images::{Image, SHAPES, Shape};
use ringdisk_format_qcow2::{CheckReport, Qcow2, Repair, SnapshotName, bitmaps, check, read_bitmap, repair, snapshots};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use testkit::{Dice, SimFileOptions, SimStorage};

/// So many snapshots and bitmaps are read at most: damaged tables may name thousands.
const LISTED_MAX: usize = 4;

/// What can be read: of the disk (number 0) and each snapshot, by offset; then of each bitmap.
type Seen = BTreeMap<(usize, u64), Vec<u8>>;

fn storage_of(image: &Image, bytes: &[u8]) -> SimStorage {
    let storage = SimStorage::new(5);
    let options = SimFileOptions { grows_with_zeros: true, ..SimFileOptions::default() };
    storage.create_with(NAME, bytes, options.clone());
    if let Some(data) = &image.data {
        storage.create_with(DATA, data, options);
    }
    storage
}

/// The offsets that are looked at: around everything that the image has, and some where it has nothing.
fn offsets(image: &Image) -> impl Iterator<Item = u64> {
    let (cluster, per_l2) = (image.cluster(), image.l2_entries());
    (0..3).flat_map(move |table| (0..12).map(move |index| (table * per_l2 + index) * cluster))
}

fn base() -> Base {
    Arc::new(vec![0xb7; 16 << 10])
}

/// What our reader finds, whatever the header says of damage. The file may be long and sparse.
fn seen(image: &Image, storage: &SimStorage) -> Seen {
    let storage = storage.process_killed(0);
    let file = storage.file(NAME).unwrap();
    let io = blocking(&file);
    let mut sector = block_on(io.read(0, 512, PastEnd::Zeros)).unwrap();
    if sector[7] == 3 {
        sector[79] &= !3;
        block_on(io.write(0, sector)).unwrap();
    }
    let mut seen = Seen::new();
    let Ok(disk) = block_on(Qcow2::open(&io, file.info(), open_options(true))) else { return seen };
    let header = disk.header().clone();
    let mut read = |number: usize, qcow2: Qcow2| {
        let guest = Guest { qcow2: Arc::new(qcow2), io: io.clone(), base: base() };
        for offset in offsets(image) {
            if let Ok(data) = block_on(guest.read(offset, image.cluster() as usize)) {
                seen.insert((number, offset), data);
            }
        }
    };
    read(0, disk);
    let list = block_on(snapshots(&io, &header, NAME)).unwrap_or_default();
    for (index, snapshot) in list.into_iter().take(LISTED_MAX).enumerate() {
        let which = SnapshotName::Exactly { id: Some(snapshot.id), name: Some(snapshot.name) };
        let opened = Qcow2::open_snapshot(&io, file.info(), open_options(true), &which);
        if let Ok(qcow2) = block_on(opened) {
            read(index + 1, qcow2);
        }
    }
    let list = block_on(bitmaps(&io, NAME)).unwrap_or_default();
    for (index, bitmap) in list.into_iter().take(LISTED_MAX).enumerate() {
        if let Ok(bits) = block_on(read_bitmap(&io, NAME, &bitmap.name)) {
            seen.insert((100 + index, 0), format!("{bits:?}").into_bytes());
        }
    }
    seen
}

/// What was there before and is not there afterwards.
fn lost(before: &Seen, after: &Seen) -> Option<String> {
    let different = |(place, data): &(&(usize, u64), &Vec<u8>)| after.get(place) != Some(*data);
    let lost: Vec<_> = before.iter().filter(different).collect();
    let (place, old) = lost.first()?;
    let start = |bytes: &[u8]| format!("{:02x?}", &bytes[..bytes.len().min(16)]);
    let new = after.get(place).map_or("cannot be read".to_owned(), |bytes| start(bytes));
    Some(format!("{} places, at {place:x?}: {} is {new}", lost.len(), start(old)))
}

fn repaired(storage: &SimStorage, what: Repair) -> block::Result<CheckReport> {
    let file = storage.file(NAME).unwrap();
    let length = file.length_bytes().unwrap();
    block_on(repair(&blocking(&file), length, NAME, what, &mut |_| true))
}

/// Without the places that show a table of the image: what is written elsewhere may show there, rightly.
fn without_tables(image: &Image, damaged: &[u8], mut seen: Seen) -> Seen {
    let cluster = image.cluster() as usize;
    let tables = image.places.iter().filter(|(kind, _)| *kind != "data").map(|(_, place)| *place as usize);
    let tables: Vec<&[u8]> = tables.filter_map(|place| damaged.get(place..place + cluster)).collect();
    seen.retain(|_, data| data.iter().all(|byte| *byte == 0) || !tables.contains(&data.as_slice()));
    seen
}

/// Writes to an image that was repaired; returns what must not have changed of what was `seen`.
fn written(image: &Image, storage: &SimStorage, mut seen: Seen) -> Seen {
    let file = storage.file(NAME).unwrap();
    let io = blocking(&file);
    let Ok(qcow2) = block_on(Qcow2::open(&io, file.info(), open_options(false))) else { return seen };
    let guest = Guest { qcow2: Arc::new(qcow2), io, base: base() };
    let (cluster, per_l2) = (image.cluster(), image.l2_entries());
    for index in [0, 3, 8, 11, per_l2, per_l2 + 5, 2 * per_l2 + 1] {
        let offset = index * cluster;
        // The image may still turn out to contradict itself.
        let _ = block_on(guest.write(offset, &vec![0xee; cluster as usize]));
        seen.remove(&(0, offset));
    }
    let _ = block_on(guest.close());
    // They say what was written.
    seen.retain(|(number, _), _| *number < 100);
    seen
}

/// Damages an image, repairs it in each way, and complains about what is lost.
fn trial(image: &Image, harms: &[&Harm]) -> Vec<String> {
    let mut damaged = image.bytes.clone();
    harms.iter().for_each(|harm| harm.apply(&mut damaged));
    let storage = storage_of(image, &damaged);
    let before = seen(image, &storage);
    let mut complaints = Vec::new();
    if let Ok(report) = repaired(&storage, Repair::All) {
        complaints
            .extend(lost(&before, &seen(image, &storage)).map(|what| format!("by check -r all: {what} {report:?}")));
        if (report.corruptions, report.check_errors) == (0, 0) {
            let file = storage.file(NAME).unwrap();
            let again = block_on(check(&blocking(&file), file.length_bytes().unwrap(), NAME, &mut |_| true));
            if again.as_ref().map_or(true, |report| (report.corruptions, report.check_errors) != (0, 0)) {
                complaints.push(format!("called whole, and is not: {again:?}"));
            }
            let kept = written(image, &storage, without_tables(image, &damaged, before.clone()));
            let lost = lost(&kept, &seen(image, &storage));
            complaints.extend(lost.map(|what| format!("by a write after check -r all: {what} {report:?}")));
        }
    } else {
        let untouched = storage.bytes(NAME) == damaged;
        complaints.extend((!untouched).then(|| "a repair that failed has changed the image".to_owned()));
    }
    let storage = storage_of(image, &damaged);
    if repaired(&storage, Repair::Leaks).is_ok() {
        complaints.extend(lost(&before, &seen(image, &storage)).map(|what| format!("by check -r leaks: {what}")));
    }
    if image.shape.is_old() || damaged[7] != 3 {
        return complaints;
    }
    damaged[79] |= 1;
    let storage = storage_of(image, &damaged);
    let kept = written(image, &storage, without_tables(image, &damaged, before));
    complaints.extend(lost(&kept, &seen(image, &storage)).map(|what| format!("by a repair at open: {what}")));
    complaints
}

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

fn names(harms: &[&Harm]) -> String {
    harms.iter().map(|harm| harm.what.as_str()).collect::<Vec<_>>().join("; ")
}

/// One in `one_in` of the ways in which one field can be damaged, and so many random pairs.
fn chosen(harms: &[Harm], one_in: u64, pairs: u64) -> Vec<Vec<&Harm>> {
    let mut dice = Dice::new(setting("RINGDISK_SEED", 1));
    let mut chosen: Vec<Vec<&Harm>> = harms.iter().filter(|_| dice.below(one_in) == 0).map(|harm| vec![harm]).collect();
    chosen.extend((0..pairs).map(|_| vec![&harms[dice.index(harms.len())], &harms[dice.index(harms.len())]]));
    chosen
}

/// The number of damaged images, and what is wrong with the repair of which.
fn explored(shape: Shape, one_in: u64, pairs: u64) -> (u64, Vec<String>) {
    let image = Image::made(shape);
    let intact = trial(&image, &[]);
    assert!(intact.is_empty(), "{}: undamaged: {intact:?}", shape.name);
    let harms = harm::all(&image);
    let trials = chosen(&harms, one_in, pairs);
    let mut complaints = Vec::new();
    for harms in &trials {
        let found = catch_unwind(AssertUnwindSafe(|| trial(&image, harms)));
        let found = found.unwrap_or_else(|_| vec!["panics".to_owned()]);
        complaints.extend(found.into_iter().map(|found| format!("{}: {}: {found}", shape.name, names(harms))));
    }
    (trials.len() as u64, complaints)
}

fn nothing_is_lost(one_in: u64, pairs: u64) {
    let one_in = setting("RINGDISK_DAMAGE_ONE_IN", one_in).max(1);
    let pairs = setting("RINGDISK_DAMAGE_PAIRS", pairs);
    let found: Vec<_> = std::thread::scope(|scope| {
        let threads = SHAPES.map(|shape| scope.spawn(move || explored(shape, one_in, pairs)));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let trials: u64 = found.iter().map(|(trials, _)| trials).sum();
    let complaints: Vec<_> = found.into_iter().flat_map(|(_, complaints)| complaints).collect();
    println!("{trials} images, of which {} lose something", complaints.len());
    let first: Vec<_> = complaints.iter().take(40).cloned().collect();
    assert!(complaints.is_empty(), "{} complaints, {trials} images:\n{}", complaints.len(), first.join("\n"));
    assert!(trials > 100 || one_in > 100, "{trials} images");
}

#[test]
fn a_repair_changes_nothing_that_could_be_read_before() {
    nothing_is_lost(100, 50);
}

#[test]
#[ignore = "takes a minute"]
fn a_repair_changes_nothing_that_could_be_read_before_in_many_images() {
    nothing_is_lost(12, 600);
}

/// What qemu reads: the lines of a dump of the disk, and the disks of snapshots as far as all of one can be read.
fn seen_by_qemu(image: &Image, directory: &Path, bytes: &[u8]) -> BTreeSet<Vec<u8>> {
    let (path, raw) = (directory.join("image.qcow2"), directory.join("image.raw"));
    std::fs::write(&path, bytes).unwrap();
    let mut dump = Command::new("qemu-io");
    dump.args(["-r", "-f", "qcow2"]);
    for offset in offsets(image) {
        dump.args(["-c", &format!("read -v {offset} {}", image.cluster())]);
    }
    let dump = dump.arg(&path).output().unwrap().stdout;
    let lines = dump.split(|byte| *byte == b'\n').filter(|line| line.get(8) == Some(&b':'));
    let mut seen: BTreeSet<Vec<u8>> = lines.map(<[u8]>::to_vec).collect();
    for name in ["one", "two"] {
        let snapshot = format!("snapshot.name={name}");
        let arguments = ["convert", "-f", "qcow2", "-l", snapshot.as_str(), "-O", "raw"];
        let converted = Command::new("qemu-img").args(arguments).arg(&path).arg(&raw).output().unwrap();
        if converted.status.success() {
            seen.insert(std::fs::read(&raw).unwrap());
        }
    }
    seen
}

#[test]
#[ignore = "takes a minute"]
fn qemu_reads_the_same_after_a_repair() {
    if !common::has_tool("qemu-io") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for shape in SHAPES.into_iter().filter(|shape| !shape.has_data_file()) {
        let image = Image::made(shape);
        let harms = harm::all(&image);
        let one_in = harms.len() as u64 / 30;
        for harms in chosen(&harms, one_in, 10) {
            let mut damaged = image.bytes.clone();
            harms.iter().for_each(|harm| harm.apply(&mut damaged));
            let storage = storage_of(&image, &damaged);
            let done = repaired(&storage, Repair::All);
            let length = storage.file(NAME).unwrap().length_bytes().unwrap();
            if done.is_err() || length > 16 << 20 {
                continue;
            }
            let before = seen_by_qemu(&image, directory.path(), &damaged);
            let after = seen_by_qemu(&image, directory.path(), &storage.bytes(NAME));
            let lost = before.difference(&after).count();
            assert_eq!(lost, 0, "{}: {}: {done:?}", shape.name, names(&harms));
        }
    }
}
