//! Persistent bitmaps while the image is written to: every change is marked, and whatever ends us, no bitmap that missed
//! one is believed.
#![allow(clippy::unwrap_used)]

mod common;

use block::{ErrorKind, File, IoError, IoResult, block_on};
use common::{Base, Guest, NAME, blocking, created, has_tool, judged_by_qemu, open, open_options, run};
use ringdisk_format_qcow2::{
    Barrier, Bitmap, BitmapAction, BitmapBits, CreateOptions, Qcow2, bitmaps, edit_bitmaps, read_bitmap,
};
use std::ops::Range;
use std::slice::from_ref;
use testkit::{Dice, Fault, FaultAction, OpKind, SimFileOptions, SimStorage, mix, qcow2_check, stamped};

const SECTOR: u64 = 512;

fn edit(storage: &SimStorage, actions: Vec<(&str, BitmapAction)>) {
    let file = storage.file(NAME).unwrap();
    let actions: Vec<_> = actions.into_iter().map(|(name, action)| (name.to_owned(), action)).collect();
    block_on(edit_bitmaps(&blocking(&file), file.as_ref(), NAME, &actions, &mut |_, _| true)).unwrap();
}

fn add(granularity_bytes: u64) -> BitmapAction {
    BitmapAction::Add { granularity_bytes: Some(granularity_bytes) }
}

fn listed(storage: &SimStorage) -> Vec<Bitmap> {
    block_on(bitmaps(&blocking(&storage.file(NAME).unwrap()), NAME)).unwrap()
}

fn in_use(storage: &SimStorage, name: &str) -> bool {
    listed(storage).iter().find(|bitmap| bitmap.name == name).unwrap().in_use
}

fn bits(storage: &SimStorage, name: &str) -> BitmapBits {
    block_on(read_bitmap(&blocking(&storage.file(NAME).unwrap()), NAME, name)).unwrap()
}

fn sound(storage: &SimStorage, leaks_allowed: bool) {
    let report = qcow2_check(&storage.bytes(NAME)).unwrap();
    report.sound().unwrap();
    assert!(leaks_allowed || report.leaked_clusters == 0, "{} clusters leaked", report.leaked_clusters);
}

fn guest(storage: &SimStorage) -> Guest {
    open(&storage.file(NAME).unwrap(), Base::default())
}

fn autoclear(storage: &SimStorage) -> u8 {
    storage.bytes(NAME)[95]
}

/// An image with data in its first half, and with bitmaps: two that are enabled, one of which has bits, and one that is
/// not.
fn image(size_bytes: u64, cluster_size: u64, extended_l2: bool) -> SimStorage {
    image_of(&CreateOptions::default().with(|options| {
        options.size_bytes = size_bytes;
        options.cluster_size = cluster_size;
        options.extended_l2 = extended_l2;
    }))
}

fn image_of(options: &CreateOptions) -> SimStorage {
    let size_bytes = options.size_bytes;
    let (storage, file) = created(options, SimFileOptions::default());
    let filled = open(&file, Base::default());
    block_on(async {
        filled.write(0, &stamped(1, 0, (size_bytes / 1024 * 512) as usize)).await.unwrap();
        filled.close().await.unwrap();
    });
    edit(
        &storage,
        vec![
            ("fine", add(512)),
            ("off", add(4096)),
            ("off", BitmapAction::Merge(BitmapBits::of_ranges(12, size_bytes, from_ref(&old(size_bytes))))),
            ("off", BitmapAction::Disable),
            ("coarse", add(65536)),
            ("coarse", BitmapAction::Merge(BitmapBits::of_ranges(16, size_bytes, from_ref(&old(size_bytes))))),
        ],
    );
    storage.process_killed(0)
}

/// What was written before.
fn old(size_bytes: u64) -> Range<u64> {
    size_bytes - 512..size_bytes
}

/// One random change of the disk; returns which bytes it is to be noted for.
async fn change(guest: &Guest, dice: &mut Dice, compress: bool) -> IoResult<Range<u64>> {
    let size = guest.qcow2.size_bytes();
    let cluster = 1u64 << guest.qcow2.header().cluster_bits;
    let start = dice.below(size / SECTOR) * SECTOR;
    let most = if dice.chance(8) { 200 << 10 } else { 9 << 10 };
    let length = ((1 + dice.below(most / SECTOR)) * SECTOR).min(size - start);
    match dice.below(8) {
        0 => guest.discard(start, length).await?,
        1 => guest.write_zeroes(start, length, true).await?,
        2 => guest.write_zeroes(start, length, false).await?,
        3 if compress => {
            let start = start - start % cluster;
            let length = cluster.min(size - start);
            guest.write_compressed(start, &vec![dice.below(200) as u8; length as usize]).await?;
            return Ok(start..start + length);
        }
        _ => guest.write(start, &stamped(dice.seed(), start, length as usize)).await?,
    }
    Ok(start..start + length)
}

#[test]
fn every_change_marks_what_it_touches_and_nothing_else_and_later_writers_go_on_with_it() {
    for (seed, (cluster_size, extended_l2)) in
        [(512, false), (4096, false), (65536, false), (16384, true)].into_iter().enumerate()
    {
        let size = (1 << 20) + SECTOR * (1 + seed as u64);
        let mut storage = image(size, cluster_size, extended_l2);
        let (off, before) = (bits(&storage, "off"), storage.bytes(NAME));
        // An image that nobody writes to stays as it is.
        block_on(guest(&storage).close()).unwrap();
        assert!(storage.bytes(NAME) == before);
        let mut written = Vec::new();
        let mut dice = Dice::new(seed as u64);
        for round in 0..3 {
            let guest = guest(&storage);
            for part in 0..2 {
                for _ in 0..6 {
                    written.push(block_on(change(&guest, &mut dice, true)).unwrap());
                }
                assert!(in_use(&storage, "fine") && in_use(&storage, "coarse") && !in_use(&storage, "off"));
                // It can go on after a close.
                block_on(guest.close()).unwrap();
                let at = format!("seed {seed}, round {round}, part {part}");
                let with_old: Vec<_> = std::iter::once(old(size)).chain(written.iter().cloned()).collect();
                assert!(bits(&storage, "fine") == BitmapBits::of_ranges(9, size, &written), "{at}");
                assert!(bits(&storage, "coarse") == BitmapBits::of_ranges(16, size, &with_old), "{at}");
                assert!(bits(&storage, "off") == off, "{at}");
                sound(&storage, false);
            }
            storage = storage.process_killed(0);
        }
        assert_eq!(autoclear(&storage), 1);
    }
}

/// Writes, and then closes; says how the disk was before.
fn play(storage: &SimStorage, seed: u64, skip: Option<Barrier>) -> (Vec<u8>, Guest, IoResult) {
    let guest = guest(storage);
    let contents = block_on(guest.read_all()).unwrap();
    if let Some(barrier) = skip {
        guest.qcow2.skip_barrier_for_test(barrier);
    }
    let mut dice = Dice::new(seed);
    let result = block_on(async {
        for _ in 0..4 {
            change(&guest, &mut dice, false).await?;
        }
        Ok(())
    });
    (contents, guest, result)
}

/// No bitmap that is not in use misses what differs from `before`; returns how many there are.
fn none_misses(storage: &SimStorage, before: &[u8]) -> Result<usize, String> {
    let now = block_on(guest(storage).read_all()).map_err(|error| error.to_string())?;
    let differ = |sector: &usize| now[sector * 512..][..512] != before[sector * 512..][..512];
    let changed: Vec<usize> = (0..now.len() / 512).filter(differ).collect();
    let mut believed = 0;
    for bitmap in listed(storage).into_iter().filter(|bitmap| bitmap.enabled && !bitmap.in_use) {
        believed += 1;
        let bits = bits(storage, &bitmap.name);
        if let Some(missed) = changed.iter().find(|sector| !bits.is_set(**sector as u64 * SECTOR)) {
            return Err(format!("bitmap '{}' misses sector {missed}", bitmap.name));
        }
    }
    Ok(believed)
}

/// Cuts the power at every moment from open to close; how many bitmaps were believed at how many cuts.
fn cut_everywhere(storage: &SimStorage, seed: u64, skip: Option<Barrier>) -> Result<[usize; 3], String> {
    cut_and_judge(storage, seed, skip, &mut |_| {})
}

/// As `cut_everywhere`; shows what each cut left, too.
fn cut_and_judge(
    storage: &SimStorage,
    seed: u64,
    skip: Option<Barrier>,
    judge: &mut dyn FnMut(&SimStorage),
) -> Result<[usize; 3], String> {
    let off = bits(storage, "off");
    storage.record();
    let (before, guest, result) = play(storage, seed, skip);
    result.and_then(|()| block_on(guest.close())).map_err(|error| error.to_string())?;
    let mut outcomes = [0; 3];
    let mut replay = storage.take_recording().replay();
    while let Some(now) = replay.advance() {
        for outcome in 0..2 {
            let cut = replay.power_cut(mix(outcome, now));
            judge(&cut);
            let left = qcow2_check(&cut.bytes(NAME))?;
            left.sound()?;
            outcomes[none_misses(&cut, &before)?] += 1;
            let opened = qcow2_check(&cut.bytes(NAME))?;
            opened.sound()?;
            // Counts of clusters that lie behind the end of the file may stay, as with qemu-img.
            if left.dirty && (opened.dirty || opened.leaked_clusters > left.leaked_clusters) {
                return Err(format!("cut at {now}: {left:?} was not repaired by whoever opened it: {opened:?}"));
            }
            assert!(bits(&cut, "off") == off);
            assert_eq!(autoclear(&cut), 1);
        }
    }
    Ok(outcomes)
}

#[test]
fn after_a_power_cut_no_bitmap_that_missed_a_write_is_believed() {
    for seed in 0..6 {
        let storage = image(96 << 10, [512, 4096, 16384][seed as usize % 3], seed == 5);
        let outcomes = cut_everywhere(&storage, seed, None).unwrap();
        assert!(outcomes[0] > 0 && outcomes[2] > 0, "{outcomes:?}");
        sound(&storage, false);
    }
}

#[test]
fn leaving_a_barrier_of_the_bitmaps_out_is_found_by_a_power_cut() {
    for barrier in [Barrier::InUse, Barrier::Bits] {
        let found = (0..40).any(|seed| cut_everywhere(&image(96 << 10, 4096, false), seed, Some(barrier)).is_err());
        assert!(found, "nothing noticed that {barrier:?} is missing");
    }
}

#[test]
fn bitmaps_that_cannot_be_written_stay_in_use_and_the_disk_is_whole() {
    const ENOSPC: i32 = 28;
    let original = image(96 << 10, 1024, false);
    let (mut lost, mut whole) = (0, 0);
    for kind in OpKind::ALL {
        for nth in 0.. {
            let storage = original.process_killed(0);
            let pushed = storage.pushed(NAME, kind);
            // After the data and before the end: everything from the so-manieth on fails, as on a full disk.
            let (before, guest, result) = play(&storage, nth, None);
            result.unwrap();
            block_on(guest.flush()).unwrap();
            let expected = block_on(guest.read_all()).unwrap();
            let start = storage.pushed(NAME, kind);
            assert!(start >= pushed);
            let fail = FaultAction::Scatter(IoError::from_errno(ENOSPC));
            let fault =
                if nth % 2 == 0 { Fault::nth(kind, nth / 2, fail) } else { Fault::from_nth(kind, nth / 2, fail) };
            storage.inject(NAME, fault);
            let closed = block_on(guest.close());
            let hit = storage.pushed(NAME, kind) > start + nth / 2;
            storage.clear_faults();
            assert_nothing_is_left(&storage, &guest, closed, &format!("{kind:?} {nth}"));
            drop(guest);
            let found = storage.process_killed(nth);
            sound(&found, true);
            let believed = none_misses(&found, &before).unwrap_or_else(|wrong| panic!("{kind:?} {nth}: {wrong}"));
            lost += usize::from(closed.is_ok() && believed < 2);
            whole += usize::from(believed == 2);
            assert!(block_on(self::guest(&found).read_all()).unwrap() == expected, "{kind:?} {nth}");
            if !hit {
                break;
            }
        }
    }
    assert!(lost > 4 && whole > 4, "{lost} lost, {whole} whole");
}

/// A close that did not fail leaves nothing for the next one.
fn assert_nothing_is_left(storage: &SimStorage, guest: &Guest, closed: IoResult, what: &str) {
    if closed.is_ok() {
        let before = storage.bytes(NAME);
        block_on(guest.close()).unwrap();
        assert!(storage.bytes(NAME) == before, "{what}: the close left something to write, and did not say so");
    }
}

#[test]
fn a_lazy_image_with_bitmaps_survives_a_power_cut_at_any_moment_and_qemu_agrees() {
    let qemu = has_tool("qemu-img");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cut.qcow2");
    let (mut dirty, mut judged) = (0, 0);
    for seed in 0..6 {
        let storage = image_of(&CreateOptions::default().with(|options| {
            options.size_bytes = 96 << 10;
            options.cluster_size = [512, 4096, 16384][seed as usize % 3];
            options.refcount_bits = [16, 1, 64, 16, 64, 16][seed as usize];
            options.extended_l2 = seed == 5;
            options.lazy_refcounts = true;
        }));
        let mut judge = |cut: &SimStorage| {
            if !qcow2_check(&cut.bytes(NAME)).unwrap().dirty {
                return;
            }
            dirty += 1;
            if !qemu || dirty % 150 != 0 {
                return;
            }
            judged += 1;
            // Repaired by QEMU, and by us: both are clean, and hold the same.
            std::fs::write(&path, cut.bytes(NAME)).unwrap();
            run("qemu-img", &["check", "-q", "-r", "all", path.to_str().unwrap()]);
            let theirs = judged_by_qemu(directory.path(), &std::fs::read(&path).unwrap());
            let ours = cut.process_killed(0);
            drop(guest(&ours));
            assert!(judged_by_qemu(directory.path(), &ours.bytes(NAME)) == theirs);
        };
        let outcomes = cut_and_judge(&storage, seed, None, &mut judge).unwrap();
        assert!(outcomes[0] > 0 && outcomes[2] > 0, "{outcomes:?}");
        sound(&storage, false);
        assert!(!is_dirty(&storage));
        if qemu {
            judged_by_qemu(directory.path(), &storage.bytes(NAME));
        }
    }
    assert!(dirty > 100, "{dirty} of the cuts left a dirty image");
    assert!(!qemu || judged > 0, "qemu-img saw none of {dirty} dirty images");
}

fn is_dirty(storage: &SimStorage) -> bool {
    qcow2_check(&storage.bytes(NAME)).unwrap().dirty
}

#[test]
fn space_for_bitmaps_leaves_a_lazy_image_clean_at_every_moment_of_its_close_whatever_fails() {
    let original = image_of(&CreateOptions::default().with(|options| {
        options.size_bytes = 96 << 10;
        options.cluster_size = 1024;
        options.lazy_refcounts = true;
    }));
    // In place, so that bits are all that needs space.
    let overwritten = |storage: &SimStorage| {
        let guest = guest(storage);
        block_on(async {
            guest.write(0, &stamped(9, 0, 20 << 10)).await.unwrap();
            guest.flush().await.unwrap();
        });
        guest
    };
    let storage = original.process_killed(0);
    let guest = overwritten(&storage);
    let used = || qcow2_check(&storage.bytes(NAME)).unwrap().used_clusters;
    let before = used();
    storage.record();
    block_on(guest.close()).unwrap();
    let mut replay = storage.take_recording().replay();
    while let Some(now) = replay.advance() {
        for outcome in 0..2 {
            let cut = replay.power_cut(mix(outcome, now));
            sound(&cut, true);
            assert!(!is_dirty(&cut), "cut at {now}");
        }
    }
    sound(&storage, false);
    assert!(bits(&storage, "fine") == BitmapBits::of_ranges(9, 96 << 10, from_ref(&(0..20 << 10))));
    assert!(used() > before, "the bits needed no space, so this shows nothing");

    let mut failed = 0;
    for kind in OpKind::ALL {
        for nth in 0.. {
            let (storage, what) = (original.process_killed(0), format!("{kind:?} from number {nth} on"));
            let guest = overwritten(&storage);
            let start = storage.pushed(NAME, kind);
            storage.inject(NAME, Fault::from_nth(kind, nth, FaultAction::Fail(IoError::from_errno(28))));
            let closed = block_on(guest.close());
            let hit = storage.pushed(NAME, kind) > start + nth;
            storage.clear_faults();
            failed += u32::from(closed.is_err());
            sound(&storage, true);
            assert!(!is_dirty(&storage), "{what}");
            assert_nothing_is_left(&storage, &guest, closed, &what);
            if !hit {
                break;
            }
        }
    }
    assert!(failed > 2, "{failed} closes said that they failed");
}

/// Where the disk has data: the bits of each part fill a cluster.
const PARTS: u64 = 96;

fn write_parts(guest: &Guest, byte: u8) {
    (0..PARTS).for_each(|part| block_on(guest.write(part << 21, &[byte; 512])).unwrap());
}

fn refcount_table(storage: &SimStorage) -> usize {
    u64::from_be_bytes(storage.bytes(NAME)[48..56].try_into().unwrap()) as usize
}

/// An image whose refcount table moves when the bits of its bitmap are stored: 64 refcounts a block and 64 blocks a
/// table reach 2 MiB of the file.
fn about_to_move(lazy_refcounts: bool) -> SimStorage {
    let options = CreateOptions::default().with(|options| {
        options.size_bytes = PARTS << 21;
        options.cluster_size = 512;
        options.refcount_bits = 64;
        options.lazy_refcounts = lazy_refcounts;
    });
    let (storage, _) = created(&options, SimFileOptions::default());
    let filled = guest(&storage);
    write_parts(&filled, 1);
    block_on(filled.close()).unwrap();
    edit(&storage, vec![("fine", add(512))]);
    // Nothing is free in front of the end but what the first blocks have left.
    with_bytes(&storage, |bytes| bytes.resize(4090 * 512, 0))
}

#[test]
fn a_refcount_table_that_moves_for_the_bits_of_a_bitmap_leaves_nothing_behind() {
    for lazy_refcounts in [false, true] {
        let storage = about_to_move(lazy_refcounts);
        let place = refcount_table(&storage);
        let guest = guest(&storage);
        write_parts(&guest, 2);
        assert!(refcount_table(&storage) == place, "it moved too early");
        block_on(guest.close()).unwrap();
        assert!(refcount_table(&storage) != place, "the table did not move");
        sound(&storage, false);
        let written: Vec<_> = (0..PARTS).map(|part| part << 21..(part << 21) + 512).collect();
        assert!(bits(&storage, "fine") == BitmapBits::of_ranges(9, PARTS << 21, &written));
    }
}

/// After a close that failed, guests may go on. What they write may set the dirty bit, in the header.
#[test]
fn no_header_names_a_refcount_table_that_could_not_be_written() {
    let original = about_to_move(true);
    let place = refcount_table(&original);
    let (mut failed, mut writes) = (0, u64::MAX);
    // The table is among the last that is written. The first round counts.
    for left in 0..12 {
        let storage = original.process_killed(0);
        let guest = guest(&storage);
        write_parts(&guest, 2);
        let (start, nth) = (storage.pushed(NAME, OpKind::Write), writes.saturating_sub(left));
        storage.inject(NAME, Fault::from_nth(OpKind::Write, nth, FaultAction::Fail(IoError::from_errno(28))));
        failed += u32::from(block_on(guest.close()).is_err());
        writes = if left == 0 { storage.pushed(NAME, OpKind::Write) - start } else { writes };
        storage.clear_faults();
        storage.record();
        block_on(guest.write(1 << 20, &[3; 512])).unwrap();
        block_on(guest.flush()).unwrap();
        let mut replay = storage.take_recording().replay();
        while let Some(now) = replay.advance() {
            let cut = replay.power_cut(mix(nth, now));
            let (bytes, table) = (cut.bytes(NAME), refcount_table(&cut));
            let is_written = bytes.get(table..table + 8).is_some_and(|entry| *entry != [0; 8]);
            assert!(table == place || is_written, "fault {nth}, cut at {now}: the header names {table:#x}");
        }
    }
    assert!(failed > 2, "{failed} closes said that they failed");
}

#[test]
fn a_bitmap_that_somebody_did_not_bring_to_an_end_is_never_taken_up_again() {
    let storage = image(1 << 20, 4096, false);
    let killed = guest(&storage);
    block_on(killed.write(0, &[7; 512])).unwrap();
    let storage = storage.process_killed(0);
    drop(killed);
    let before = listed(&storage);
    assert_eq!(before.iter().map(|bitmap| bitmap.in_use).collect::<Vec<_>>(), [true, false, true]);
    edit(&storage, vec![("new", add(4096))]);
    let guest = guest(&storage);
    block_on(async {
        guest.write(8192, &[8; 512]).await.unwrap();
        guest.close().await.unwrap();
    });
    let after = listed(&storage);
    assert_eq!(after[..3], before[..]);
    assert!(!after[3].in_use);
    assert_eq!(bits(&storage, "new"), BitmapBits::of_ranges(12, 1 << 20, from_ref(&(8192..8704))));
    sound(&storage, false);
    edit(&storage, vec![("fine", BitmapAction::Remove), ("coarse", BitmapAction::Remove)]);
    sound(&storage, false);
}

/// Where the row of a bitmap starts.
fn row_of(bytes: &[u8], name: &str) -> usize {
    bytes.windows(name.len()).position(|found| found == name.as_bytes()).unwrap() - 24
}

fn with_bytes(storage: &SimStorage, change: impl Fn(&mut Vec<u8>)) -> SimStorage {
    let mut bytes = storage.bytes(NAME);
    change(&mut bytes);
    let changed = SimStorage::new(3);
    changed.create_with(NAME, &bytes, SimFileOptions::default());
    changed
}

/// Done to an image's bytes; the rows of "fine" and "coarse" are given.
type Damage<'a> = dyn Fn(&mut Vec<u8>, usize, usize) + 'a;

#[test]
fn what_a_damaged_image_calls_a_bitmap_is_not_written_over_and_its_disk_goes_on() {
    let storage = image(1 << 20, 4096, false);
    let be64 = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let put = |bytes: &mut Vec<u8>, at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    let l1 = be64(&storage.bytes(NAME), 40);
    // The table of "fine" lies in the L1 table; its bits do; it leads nowhere; it shares its table with "coarse".
    let damages: [&Damage<'_>; 4] = [
        &|bytes, fine, _| put(bytes, fine, l1),
        &|bytes, fine, _| {
            let table = be64(bytes, fine) as usize;
            put(bytes, table, l1);
        },
        &|bytes, fine, _| {
            let table = be64(bytes, fine) as usize;
            put(bytes, table, 77);
        },
        &|bytes, fine, coarse| {
            let (table, entries) = (be64(bytes, coarse), bytes[coarse + 8..coarse + 12].to_vec());
            put(bytes, fine, table);
            bytes[fine + 8..fine + 12].copy_from_slice(&entries);
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let damaged = with_bytes(&storage, |bytes| {
            let rows = (row_of(bytes, "fine"), row_of(bytes, "coarse"));
            damage(bytes, rows.0, rows.1);
        });
        let guest = guest(&damaged);
        block_on(async {
            guest.write(700 << 10, &[9; 4096]).await.unwrap();
            guest.close().await.unwrap();
        });
        let bytes = damaged.bytes(NAME);
        // The lowest byte of its flags.
        assert_eq!(bytes[row_of(&bytes, "fine") + 15] & 1, u8::from(number != 3), "{number}");
        let reopened = self::guest(&damaged);
        assert_eq!(block_on(reopened.read(700 << 10, 4096)).unwrap(), [9; 4096]);
        assert_eq!(be64(&bytes, l1 as usize), be64(&storage.bytes(NAME), l1 as usize), "{number}");
        if number == 2 {
            drop((guest, reopened));
            // What the message advises.
            edit(&damaged, vec![("fine", BitmapAction::Remove)]);
            assert!(listed(&damaged).iter().all(|bitmap| bitmap.name != "fine"));
        }
    }
}

#[test]
fn an_image_with_more_enabled_bitmaps_than_a_write_can_be_noted_in_is_refused_for_writing() {
    let options = CreateOptions::default().with(|options| options.size_bytes = 1 << 20);
    let (storage, file) = created(&options, SimFileOptions::default());
    let names: Vec<String> = (0..65).map(|number| format!("b{number}")).collect();
    edit(&storage, names.iter().map(|name| (name.as_str(), add(65536))).collect());
    let opened = |read_only| {
        let io = blocking(&file);
        block_on(Qcow2::open(&io, file.info(), ringdisk_format_qcow2::OpenOptions::new(NAME, read_only)))
    };
    let error = opened(false).map(|_| ()).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("--disable"), "{error}");
    opened(true).unwrap();
    edit(&storage, vec![("b0", BitmapAction::Disable)]);
    opened(false).unwrap();
}

#[test]
fn bitmaps_whose_directory_is_damaged_are_given_up_by_the_first_write() {
    let storage = image(1 << 20, 4096, false);
    let damaged = with_bytes(&storage, |bytes| {
        // A type that nobody knows.
        let row = row_of(bytes, "coarse");
        bytes[row + 16] = 9;
    });
    let guest = guest(&damaged);
    assert_eq!(autoclear(&damaged), 1);
    block_on(async {
        guest.write(700 << 10, &[9; 4096]).await.unwrap();
        guest.close().await.unwrap();
    });
    assert!(listed(&damaged).is_empty());
}

#[test]
fn bitmaps_that_take_too_much_memory_keep_an_image_from_being_written_not_from_being_read() {
    let options = CreateOptions::default().with(|options| options.size_bytes = 600 << 30);
    let (storage, _) = created(&options, SimFileOptions::default());
    edit(&storage, vec![("some", add(1 << 20))]);
    let storage = with_bytes(&storage, |bytes| {
        let row = row_of(bytes, "some");
        bytes[row + 17] = 9;
    });
    let file = storage.file(NAME).unwrap();
    let opened = |read_only| block_on(Qcow2::open(&blocking(&file), file.info(), open_options(read_only)));
    let error = opened(false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("bitmap --disable"), "{error}");
    opened(true).unwrap();
}
