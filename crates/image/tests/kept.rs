//! Scratch overlays that are kept: the conformance suite, the power cut, opening them as images, and damaged ones.

mod common;
#[path = "kept/making.rs"]
mod making;

use block::{Disk, ErrorKind, IoError, IoErrorKind, Locks, OpFlags, Result};
use common::{Chain, Layer, SimOpener, name};
use making::{Making, Slower};
use ringdisk_image::{BackingPolicy, Format, Image, ImageOptions};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use testkit::conformance::{Subject, run};
use testkit::{
    Fault, FaultAction, FaultTest, OpKind, OpenedDisk, PowerCutTest, Request, Session, SimFileOptions, SimHarness,
    SimStorage, Workload, mix, stamped,
};

const INDEX: &str = "disk.scratch";
const DATA: &str = "disk.scratch.data";
const SIZE: u64 = 1 << 20;

fn opened(options: &ImageOptions, storage: &SimStorage) -> Result<OpenedDisk> {
    let image: Arc<Image> = Arc::new(ringdisk_image::open(options, &Making::of(storage))?);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as Arc<dyn Disk>;
    Ok(OpenedDisk { disk, close: Box::new(move || image.close()) })
}

fn options_on(chain: &Chain) -> ImageOptions {
    ImageOptions::new(&name(0)).with(|options| {
        options.format = Some(match chain.top() {
            Layer::Raw(_) => Format::Raw,
            _ => Format::Qcow2,
        });
        options.scratch = true;
        options.keep = Some(INDEX.into());
    })
}

/// The disk of the image, under an overlay that is kept.
fn open_on(chain: &Chain, storage: &SimStorage) -> Result<OpenedDisk> {
    opened(&options_on(chain), storage)
}

/// The overlay as an image of its own.
fn overlay() -> ImageOptions {
    ImageOptions::new(INDEX).with(|options| options.allow_backing = BackingPolicy::Any)
}

fn chains() -> Vec<Chain> {
    let two = vec![Layer::qcow2(SIZE + 1536, 65536), Layer::Raw(SIZE / 2 + 100)];
    vec![
        Chain::of(vec![Layer::Raw(SIZE)]),
        Chain::of(vec![Layer::Raw(SIZE + 1636)]),
        Chain { used: true, ..Chain::of(vec![Layer::qcow2(SIZE, 4096)]) },
        Chain::of(two),
    ]
}

#[test]
fn a_kept_overlay_conforms_and_changes_nothing_below() {
    for chain in chains() {
        for seed in common::seeds(1) {
            let mut made = Vec::new();
            let mut make = |read_only: bool| {
                let storage = chain.storage();
                let own = open_on(&chain, &storage).unwrap();
                made.push(storage.clone());
                if !read_only {
                    return Some(own.disk);
                }
                drop(own);
                let options = overlay().with(|options| options.read_only = true);
                Some(opened(&options, &storage).unwrap().disk)
            };
            let mut subject = Subject { make: &mut make, keeps_data: true, seed };
            run(&mut SimHarness::new(seed, 3), &mut subject).assert_passed();
            for storage in made {
                let original = chain.storage();
                for index in 0..chain.layers.len() {
                    assert!(storage.bytes(&name(index)) == original.bytes(&name(index)), "'{}' changed", name(index));
                }
            }
        }
    }
}

/// Whether the power is cut at any write and flush, or the process is killed there and the power is cut later.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loss {
    Power,
    ProcessFirst,
}

/// What was flushed is there afterwards, and what was not touched is as it was.
fn survives(loss: Loss, chain: &Chain, queues: usize, volatile_cache: bool, seeds: u64) {
    let size = chain.top().size_bytes();
    // All of a disk is read after each cut.
    let (requests, stride) = if size > 1 << 20 { (30, 5) } else { (50, 1) };
    for seed in common::seeds(seeds) {
        let chain = Chain { seed, ..chain.clone() };
        let test = PowerCutTest {
            storage: chain.storage(),
            open: &|storage| {
                let opened = open_on(&chain, storage)?;
                opened.disk.set_volatile_cache(volatile_cache);
                Ok(opened)
            },
            check: &|_| Ok(()),
            workload: Workload { read_percent: 5, flush_percent: 20, ..Workload::new(seed, requests, size, 4096) },
            queues,
            outcomes: 2,
            stride,
        };
        let ran = if loss == Loss::Power { test.run() } else { test.run_with_kills() };
        assert!(ran.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}")).moments > 0);
    }
}

#[test]
fn what_was_flushed_survives_a_power_cut_at_any_moment() {
    let small = Chain::of(vec![Layer::Raw(200 << 10)]);
    survives(Loss::Power, &small, 1, true, 1);
    survives(Loss::Power, &small, 3, true, 2);
    survives(Loss::Power, &Chain { used: true, ..Chain::of(vec![Layer::qcow2(128 << 10, 4096)]) }, 2, true, 1);
    // Two parts, each with a table of its own.
    survives(Loss::Power, &Chain::of(vec![Layer::Raw((4 << 20) + (64 << 10) + 512)]), 2, true, 1);
}

#[test]
fn without_a_volatile_cache_what_completed_survives() {
    survives(Loss::Power, &Chain::of(vec![Layer::Raw(100 << 10)]), 2, false, 1);
}

/// The next process finds an index that is in the host's cache only.
#[test]
fn what_the_process_after_a_killed_one_has_flushed_survives_a_power_cut() {
    let small = Chain::of(vec![Layer::Raw(100 << 10)]);
    survives(Loss::ProcessFirst, &small, 1, true, 2);
    survives(Loss::ProcessFirst, &small, 2, false, 1);
    survives(Loss::ProcessFirst, &Chain::of(vec![Layer::Raw((4 << 20) + (64 << 10) + 512)]), 2, true, 1);
}

#[test]
fn what_a_killed_process_has_freed_without_a_sync_is_never_shown_as_what_others_write_there() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    session.call(Request::write(0, vec![1; 8 * 4096])).unwrap();
    session.call(Request::Flush).unwrap();
    session.call(Request::Discard { offset: 0, length: 4 * 4096 }).unwrap();
    storage.inject(INDEX, Fault::nth(OpKind::Flush, 0, FaultAction::Fail(IoError::EIO)));
    session.call(Request::Flush).unwrap_err();
    for seed in 0..20 {
        let left = storage.left_by_killed(seed);
        let mut next = Session::open(&left, &|storage| open_on(&chain, storage), seed, 1).unwrap();
        next.call(Request::write(30 * 4096, vec![3; 8 * 4096])).unwrap();
        let mut last = Session::open(&left.power_cut(seed), &|storage| open_on(&chain, storage), seed, 1).unwrap();
        let disk = last.read_all().unwrap();
        assert!(disk[..4 * 4096].iter().all(|byte| [0, 1].contains(byte)), "seed {seed}");
        assert!(disk[4 * 4096..8 * 4096].iter().all(|byte| *byte == 1), "seed {seed}");
    }
}

/// Writes, zeroes and reads back; returns the contents.
fn use_it(session: &mut Session, size: u64, tag: u64) -> Vec<u8> {
    for step in 0..24 {
        let at = mix(tag, step) % (size / 512 - 40) * 512;
        let length = 512 * (1 + mix(step, tag) % 40);
        session.call(Request::write(at, stamped(tag + step, at, length as usize))).unwrap();
    }
    let zeroes = |offset, length| Request::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
    session.call(zeroes(64 << 10, 20 << 10)).unwrap();
    session.read_all().unwrap()
}

#[test]
fn it_is_an_image_and_goes_on_where_it_was() {
    let size = (9 << 20) + 1536;
    let chain = Chain::of(vec![Layer::Raw(size)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 2).unwrap();
    // All of a part, which then has no table.
    let part = Request::WriteZeroes { offset: 4 << 20, length: 4 << 20, may_unmap: true, flags: OpFlags::NONE };
    session.call(part).unwrap();
    let first = use_it(&mut session, 4 << 20, 10);
    session.call(Request::Flush).unwrap();
    let killed = storage.process_killed(3);
    session.close().unwrap();

    for (storage, what) in [(&killed, "after a kill"), (&storage, "after its end")] {
        let read = |options: ImageOptions| {
            let mut session = Session::open(storage, &|storage| opened(&options, storage), 1, 1).unwrap();
            session.read_all().unwrap()
        };
        assert!(read(overlay().with(|options| options.read_only = true)) == first, "{what}");
        // By itself, and under the image again.
        for (round, options) in [(1, overlay()), (2, options_on(&chain)), (3, overlay())] {
            let mut session = Session::open(storage, &|storage| opened(&options, storage), round, 2).unwrap();
            let before = session.read_all().unwrap();
            let after = use_it(&mut session, size, 100 * round);
            assert!(before != after);
            session.close().unwrap();
            assert!(read(options) == after, "{what}, round {round}");
        }
    }
}

#[test]
fn emptied_it_shows_what_is_below() {
    let size = (9 << 20) + 1536;
    let chain = Chain::of(vec![Layer::Raw(size)]);
    let storage = chain.storage();
    let below = storage.bytes(&name(0));
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    let part = Request::WriteZeroes { offset: 4 << 20, length: 4 << 20, may_unmap: true, flags: OpFlags::NONE };
    session.call(part).unwrap();
    use_it(&mut session, size, 7);
    session.close().unwrap();
    let image = ringdisk_image::open(&overlay(), &Making::of(&storage)).unwrap();
    assert!(image.can_reveal());
    image.reveal(0, size).unwrap();
    // The index that names the data is still the durable one.
    image.give_back_if_empty().unwrap();
    assert!(!storage.bytes(DATA).is_empty());
    image.close().unwrap();
    image.give_back_if_empty().unwrap();
    drop(image);
    assert!(storage.bytes(DATA).is_empty(), "it holds nothing");
    let mut session = Session::open(&storage, &|storage| opened(&overlay(), storage), 1, 1).unwrap();
    assert!(session.read_all().unwrap() == below);
    let after = use_it(&mut session, size, 9);
    session.close().unwrap();
    let image = ringdisk_image::open(&overlay(), &Making::of(&storage)).unwrap();
    image.give_back_if_empty().unwrap();
    drop(image);
    let mut session = Session::open(&storage, &|storage| opened(&overlay(), storage), 1, 1).unwrap();
    assert!(session.read_all().unwrap() == after, "one that holds something keeps it");
}

/// What `kill -9` and a power cut leave of an overlay that was being made.
#[test]
fn an_overlay_whose_making_was_broken_off_is_made_anew() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    for index in [vec![], vec![0; 8192]] {
        for data in [None, Some(vec![]), Some(vec![7; 4096])] {
            let storage = chain.storage();
            storage.create_with(INDEX, &index, SimFileOptions::default());
            let has_data = data.as_ref().is_some_and(|data| !data.is_empty());
            data.iter().for_each(|data| drop(storage.create_with(DATA, data, SimFileOptions::default())));
            let what = format!("{} bytes, {:?}", index.len(), data.map(|data| data.len()));
            if has_data {
                let opener = Making::of(&storage);
                let error = ringdisk_image::open(&options_on(&chain), &opener).map(drop).unwrap_err();
                assert!(error.to_string().contains("without the index"), "{what}: {error}");
                assert!(opener.1.lock().unwrap().is_empty() && storage.bytes(DATA) == [7; 4096], "{what}");
                continue;
            }
            let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
            session.call(Request::write(4096, vec![1; 4096])).unwrap();
            let disk = session.read_all().unwrap();
            session.close().unwrap();
            let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
            assert!(session.read_all().unwrap() == disk, "{what}");
        }
    }
}

#[test]
fn an_overlay_that_another_has_made_meanwhile_is_used() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let opener = Slower { files: Making::of(&storage), chain: chain.clone(), written: Mutex::default() };
    drop(ringdisk_image::open(&options_on(&chain), &opener).unwrap());
    assert!(opener.files.1.lock().unwrap().is_empty(), "it belongs to others, too");
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    assert!(session.read_all().unwrap() == *opener.written.lock().unwrap());
}

#[test]
fn another_image_or_another_size_below_is_refused() {
    let chain = Chain::of(vec![Layer::Raw(SIZE), Layer::Raw(SIZE)]);
    let storage = chain.storage();
    drop(open_on(&chain, &storage).unwrap());
    let other = options_on(&chain).with(|options| options.name = name(1).as_str().into());
    let error = opened(&other, &storage).map(drop).unwrap_err();
    assert!(error.kind() == ErrorKind::BadOption && error.to_string().contains("another image"), "{error}");
    let denied = overlay().with(|options| options.allow_backing = BackingPolicy::Deny);
    assert!(opened(&denied, &storage).is_err(), "what it names passes the gate");
    let shorter = SimStorage::new(1);
    for file in [INDEX, DATA] {
        shorter.create_with(file, &storage.bytes(file), SimFileOptions::default());
    }
    shorter.create(&name(0), SIZE - 512, SimFileOptions::default());
    for options in [overlay(), options_on(&chain)] {
        let error = opened(&options, &shorter).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::BadImage && error.to_string().contains("has 1048064 bytes now"), "{error}");
    }
}

#[test]
fn only_what_was_made_and_nobody_else_can_use_is_removed_when_an_overlay_cannot_be_made() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    for (locks, removed) in [(Locks::Held, &[PathBuf::from(INDEX)][..]), (Locks::Lacking, &[])] {
        let storage = chain.storage();
        storage.create_with(DATA, &[7; 4096], SimFileOptions::default());
        let opener = Making(SimOpener(storage.clone()), Mutex::default(), locks);
        let error = ringdisk_image::open(&options_on(&chain), &opener).map(drop).unwrap_err();
        assert!(error.to_string().contains("without the index"), "{error}");
        assert!(!error.to_string().contains("remove"), "{error}");
        // The data are not ours. Without locks, others may have made them, and use the index.
        assert_eq!(*opener.1.lock().unwrap(), removed, "{locks:?}");
    }
}

#[test]
fn an_overlay_that_names_other_data_or_no_image_is_refused() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    drop(open_on(&chain, &storage).unwrap());
    // Under another name it still names the data of the first.
    storage.create_with("other.scratch", &storage.bytes(INDEX), SimFileOptions::default());
    let other = ImageOptions::new("other.scratch").with(|options| {
        options.allow_backing = BackingPolicy::Any;
        options.read_only = true;
    });
    let error = opened(&other, &storage).map(drop).unwrap_err();
    assert!(error.to_string().contains("does not have its data"), "{error}");
}

#[test]
fn a_damaged_index_is_an_error_or_another_content_and_never_a_panic() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    for page in 0..4 {
        session.call(Request::write(page * 4096, vec![page as u8; 4096])).unwrap();
    }
    session.close().unwrap();
    let (index, data) = (storage.bytes(INDEX), storage.bytes(DATA));
    let damaged = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut index = index.clone();
        change(&mut index);
        let storage = chain.storage();
        storage.create_with(INDEX, &index, SimFileOptions::default());
        storage.create_with(DATA, &data, SimFileOptions::default());
        storage
    };
    let refused = |change: &dyn Fn(&mut Vec<u8>)| opened(&overlay(), &damaged(change)).map(drop).unwrap_err();
    // Header, bits of zero parts, owners, one table: a page each.
    let table = 3 * 4096;
    let error = refused(&|index| index.copy_within(table..table + 4, table + 4));
    assert!(error.to_string().contains("share the data"), "{error}");
    assert!(refused(&|index| index.truncate(table)).to_string().contains("shorter"));
    assert!(refused(&|index| index[2 * 4096] = 9).to_string().contains("behind the end of the disk"));
    for at in
        (0..40).step_by(2).chain(512..540).chain(4096..4100).chain(2 * 4096..2 * 4096 + 8).chain(table..table + 12)
    {
        for flip in [1, 0x80] {
            let storage = damaged(&|index| index[at] ^= flip);
            let Ok(mut session) = Session::open(&storage, &|storage| opened(&overlay(), storage), 1, 1) else {
                continue;
            };
            // What it says lies behind the end of the data is an error.
            let _ = session.read_all();
            let _ = session.call(Request::write(8192, vec![1; 8192]));
            let _ = session.close();
        }
    }
}

/// Where bytes are changed, and to what.
type Changes<'a> = &'a [(usize, &'a [u8])];

/// An index that somebody made to do harm: it is refused in words that say why, or shows what belongs to the disk.
#[test]
fn a_hostile_index_is_refused_in_words_or_shows_nothing_but_the_disks_own() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    for page in 0..4 {
        session.call(Request::write(page * 4096, vec![0x11 * (1 + page as u8); 4096])).unwrap();
    }
    let before = session.read_all().unwrap();
    session.close().unwrap();
    let (index, data) = (storage.bytes(INDEX), storage.bytes(DATA));
    // Header, bits of zero parts, owners, one table: a page each.
    let (owners, table) = (2 * 4096, 3 * 4096);
    let with = |changes: Changes<'_>| {
        let mut index = index.clone();
        for (at, bytes) in changes {
            index[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        let storage = chain.storage();
        let bounded = || SimFileOptions { max_length_bytes: 64 << 20, ..SimFileOptions::default() };
        storage.create_with(INDEX, &index, bounded());
        storage.create_with(DATA, &data, bounded());
        storage
    };
    let huge = (u64::MAX / 2).to_le_bytes();
    let refused: [(&str, Changes<'_>); 11] = [
        ("so large none can be", &[(16, &huge)]),
        ("has 1048576 bytes now", &[(16, &(SIZE - 4096).to_le_bytes())]),
        ("shorter than its header says", &[(16, &(64u64 << 40).to_le_bytes())]),
        ("shorter than its header says", &[(32, &huge)]),
        ("shorter than its header says", &[(32, &[0; 8])]),
        ("version 2 of scratch overlays", &[(8, &[2])]),
        ("impossible names", &[(24, &[0xff, 0xff])]),
        ("impossible names", &[(512, &[0xff])]),
        ("does not say what it rests on", &[(24, &[0; 6])]),
        ("a part that has one", &[(owners + 4, &[1, 0, 0, 0])]),
        ("behind the end of the disk", &[(owners, &[0xff, 0xff, 0xff, 0x7f])]),
    ];
    for (wanted, changes) in refused {
        let error = opened(&overlay(), &with(changes)).map(drop).unwrap_err().to_string();
        assert!(error.contains(wanted) && error.contains(INDEX), "{wanted}: {error}");
    }
    // A sparse file that is as long as it says, and has no more than the disk needs.
    let mut long = index.clone();
    long[32..40].copy_from_slice(&(8u64 << 10).to_le_bytes());
    long.resize(32 << 20, 0);
    let sparse = chain.storage();
    sparse.create_with(INDEX, &long, SimFileOptions::default());
    sparse.create_with(DATA, &data, SimFileOptions::default());
    let error = opened(&overlay(), &sparse).map(drop).unwrap_err().to_string();
    assert!(error.contains("more than a disk of its size can need") && error.contains(INDEX), "{error}");
    // Data behind the end of its file, far and near, and at the last number that there is.
    let end = (data.len() / 4096 + 2) as u32;
    for place in [end, end + 1, end + 4096, u32::MAX, 1 << 31] {
        for read_only in [true, false] {
            let storage = with(&[(table, &place.to_le_bytes())]);
            let options = overlay().with(|options| options.read_only = read_only);
            if !read_only {
                // Its data would grow again, and what is lost would be zeros.
                let error = opened(&options, &storage).map(drop).unwrap_err().to_string();
                assert!(error.contains("names data up to byte") && error.contains(DATA), "{place:#x}: {error}");
                continue;
            }
            let mut session = Session::open(&storage, &|storage| opened(&options, storage), 1, 1).unwrap();
            let first = session.call(Request::read(0, 4096));
            assert!(first.is_err(), "{place:#x}: the page that lies nowhere shows {:?}", first.map(|bytes| bytes[0]));
            assert!(session.call(Request::read(4096, SIZE as usize - 4096)).unwrap() == before[4096..], "{place:#x}");
            session.close().unwrap();
            assert!(storage.bytes(&name(0)) == chain.storage().bytes(&name(0)), "the image below was written");
        }
    }
}

/// One after the other, both files find no space at each step by which they grow.
#[test]
fn no_space_at_any_step_of_growth_fails_what_needs_it_and_what_was_flushed_stays() {
    const PART: u64 = 4 << 20;
    const LENGTH: usize = 512 << 10;
    let chain = Chain::of(vec![Layer::qcow2(40 * PART, 65536)]);
    let at = |part: u64| part * PART + 8192;
    let assert_holds = |session: &mut Session, done: &[bool], what: &str| {
        for (part, done) in (0..).zip(done) {
            let found = session.call(Request::read(at(part), LENGTH)).unwrap();
            let wanted = stamped(part, at(part), LENGTH);
            let is_old = |sector: &[u8]| !done && sector.iter().all(|byte| *byte == 0);
            let mut sectors = found.chunks(512).zip(wanted.chunks(512));
            assert!(sectors.all(|(found, wanted)| found == wanted || is_old(found)), "{what}, part {part}");
        }
    };
    for full in [INDEX, DATA] {
        let mut steps = 0;
        for after in 0.. {
            let storage = chain.storage();
            let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
            // A step is tried three times, for less each time: ahead of requests, and then by the one that needs it.
            let no_space = FaultAction::Fail(IoError::new(IoErrorKind::NoSpace));
            storage.inject(full, Fault { kind: Some(OpKind::WriteZeroes), after, count: 6, action: no_space });
            let write = |part: u64| Request::write(at(part), stamped(part, at(part), LENGTH));
            let mut done: Vec<bool> = (0..40).map(|part| session.call(write(part)).is_ok()).collect();
            let what = format!("{full}, after {after}");
            session.call(Request::Flush).unwrap();
            assert_holds(&mut session, &done, &what);
            let cut = storage.power_cut(after);
            let mut other = Session::open(&cut, &|storage| opened(&overlay(), storage), 1, 1).unwrap();
            assert_holds(&mut other, &done, &format!("{what}, after a power cut"));
            other.close().unwrap();
            let all_done = done.iter().all(|done| *done);
            storage.clear_faults();
            for (part, done) in (0..).zip(&mut done).filter(|(_, done)| !**done) {
                session.call(write(part)).expect("there is space again");
                *done = true;
            }
            assert_holds(&mut session, &done, &what);
            session.close().unwrap();
            if all_done {
                break;
            }
            steps += 1;
        }
        assert!(steps >= 3, "{full}: {steps} steps");
    }
}

#[test]
fn a_guest_that_frees_and_never_flushes_gets_its_space_back_when_the_host_is_full() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    let storage = chain.storage();
    let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
    // There is one step of space, of 1024 pages.
    let no_space = FaultAction::Fail(IoError::new(IoErrorKind::NoSpace));
    storage.inject(DATA, Fault::from_nth(OpKind::WriteZeroes, 1, no_space));
    for round in 0..2500_u32 {
        session.call(Request::write(4096, vec![round as u8; 4096])).unwrap_or_else(|error| panic!("{round}: {error}"));
        session.call(Request::Discard { offset: 4096, length: 4096 }).unwrap();
    }
    session.call(Request::write(4096, vec![7; 4096])).unwrap();
    let disk = session.read_all().unwrap();
    let below = storage.bytes(&name(0));
    assert!(disk[..4096] == below[..4096] && disk[4096..8192] == [7; 4096] && disk[8192..] == below[8192..]);
    assert!(storage.pushed(DATA, OpKind::Flush) <= 3, "{}", storage.pushed(DATA, OpKind::Flush));
    session.close().unwrap();
}

#[test]
fn a_flush_that_fails_is_told_and_the_next_one_takes_its_changes_along() {
    let chain = Chain::of(vec![Layer::Raw(SIZE)]);
    for (file, kind) in [(INDEX, OpKind::Write), (DATA, OpKind::Flush), (INDEX, OpKind::Flush)] {
        let storage = chain.storage();
        let mut session = Session::open(&storage, &|storage| open_on(&chain, storage), 1, 1).unwrap();
        session.call(Request::write(4096, vec![1; 4096])).unwrap();
        storage.inject(file, Fault::nth(kind, 0, FaultAction::Fail(IoError::EIO)));
        assert!(session.call(Request::Flush).is_err(), "{file}, {kind:?}");
        session.call(Request::Flush).unwrap();
        let expected = session.read_all().unwrap();
        let cut = storage.power_cut(1);
        let mut session = Session::open(&cut, &|storage| opened(&overlay(), storage), 1, 1).unwrap();
        assert!(session.read_all().unwrap() == expected, "{file}, {kind:?}");
    }
}

/// Each operation on one of the two files fails once, and the guest goes on.
#[test]
fn a_fault_in_any_operation_fails_requests_only_and_what_was_flushed_stays() {
    let eio = IoError::EIO;
    let kinds = [
        (OpKind::Read, FaultAction::Fail(eio)),
        (OpKind::Write, FaultAction::Scatter(eio)),
        (OpKind::Flush, FaultAction::Fail(eio)),
        (OpKind::WriteZeroes, FaultAction::Scatter(eio)),
    ];
    // The larger one has two parts, each with a table of its own.
    for (size, requests, stride) in [(200 << 10, 50, 1), ((4 << 20) + (64 << 10) + 512, 25, 5)] {
        let chain = Chain::of(vec![Layer::Raw(size)]);
        for (seed, (kind, action)) in common::seeds(1).flat_map(|seed| kinds.map(|kind| (seed, kind))) {
            let mut errors = 0;
            for file in [INDEX, DATA] {
                let workload =
                    Workload { read_percent: 15, flush_percent: 20, ..Workload::new(seed, requests, size, 4096) };
                let test = FaultTest {
                    storage: &|| chain.storage(),
                    open: &|storage| open_on(&chain, storage),
                    check: &|_| Ok(()),
                    file,
                    kind,
                    action,
                    persistent: false,
                    workload,
                    queues: 2,
                    stride,
                };
                errors += test.run().unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}")).errors;
            }
            // Where zeros cannot be made, they are written.
            let must_fail = stride == 1 && !matches!(kind, OpKind::WriteZeroes);
            assert!(errors > 0 || !must_fail, "{kind:?}: no request failed, so this shows little");
        }
    }
}
