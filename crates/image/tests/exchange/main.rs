//! Chains that are exchanged while guests use the disk: the conformance suite and power cuts with a new top layer put on
//! and taken back over and over, on simulated and on real reactors; several disks behind one barrier; more room.

#[path = "../common/mod.rs"]
mod common;
mod exchanging;
mod handing_over;

use block::{Disk, DiskInfo, DiskListener, Error, ErrorKind, File, FileInfo, FileQueue, ReactorCtx, Result, Task};
use common::{Chain, Layer, SimOpener, name};
use exchanging::{Pace, format_of, open_exchanging};
use format_qcow2::{BitmapAction, CreateOptions as Qcow2Options};
use ringdisk_image::{
    Backing, ClosedEdit, CopyWatch, CreateOptions, FileName, Format, Image, ImageOptions, NewSnapshot, OpenedOverlay,
    SnapshotName,
};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use testkit::conformance::{Subject, run};
use testkit::{Harness, PowerCutTest, Request, SimFileOptions, SimHarness, SimStorage, Workload, qcow2_check, stamped};

/// A file that names the top of the chain, as whoever serves disks keeps it.
const RECORD: &str = "record";
const SIZE: u64 = 1 << 20;

fn overlay_name(index: usize) -> String {
    format!("overlay{index}")
}

/// Empty overlays to put on top, and a record of what is the top.
fn add_overlays(storage: &SimStorage, count: usize, size_bytes: u64, cluster_size: u64) {
    for index in 0..count {
        let file: Arc<dyn File> = storage.create(&overlay_name(index), 0, SimFileOptions::default());
        let backing_file = Some(name(0));
        let options = Qcow2Options::default().with(|options| {
            options.size_bytes = size_bytes;
            options.cluster_size = cluster_size;
            options.backing_file = backing_file;
        });
        ringdisk_image::create(&file, &CreateOptions::Qcow2(options)).unwrap();
    }
    storage.create(RECORD, 512, SimFileOptions::default());
    record(storage, &name(0)).unwrap();
}

fn record(storage: &SimStorage, top: &str) -> Result<()> {
    let mut sector = top.as_bytes().to_vec();
    sector.resize(512, 0);
    let io = block::MetaIo::new(storage.file(RECORD).unwrap().open_blocking()?);
    let failed = |error| Error::with_source(ErrorKind::Io, "cannot record", error);
    block::block_on(io.write(0, memory::AlignedBuf::copy_of(&sector))).map_err(failed)?;
    block::block_on(io.flush()).map_err(failed)
}

fn recorded(storage: &SimStorage) -> String {
    let sector = storage.bytes(RECORD);
    String::from_utf8(sector.into_iter().take_while(|byte| *byte != 0).collect()).unwrap()
}

fn is_unused(storage: &SimStorage, overlay: &str) -> bool {
    let opened = OpenedOverlay::open(&overlay.into(), storage.file(overlay).unwrap());
    opened.map_err(|error| error.to_string()).inspect_err(|error| assert!(error.contains("holds data"))).is_ok()
}

fn open_overlay(storage: &SimStorage, overlay: &str, below: &str, format: Format) -> OpenedOverlay {
    let file: Arc<dyn File> = storage.file(overlay).unwrap();
    let backing = Backing { file: below.to_owned(), format: Some(format.to_string()) };
    ringdisk_image::set_backing(&file, Format::Qcow2, Some(&backing)).unwrap();
    OpenedOverlay::open(&overlay.into(), file).unwrap()
}

fn conforms(chain: &Chain, cluster_size: u64) {
    conforms_with(chain, cluster_size, false);
}

fn conforms_with(chain: &Chain, cluster_size: u64, edits: bool) {
    for seed in common::seeds(1) {
        let done = Arc::new(AtomicU64::new(0));
        let pace = Pace { overlays: 60, most: 3, every: 4, grow_to: None, edits };
        let mut make = |read_only: bool| {
            let storage = Chain { seed, ..chain.clone() }.storage();
            add_overlays(&storage, pace.overlays, chain.top().size_bytes(), cluster_size);
            let opened = open_exchanging(chain, &storage, pace, &done);
            (!read_only).then(|| opened.unwrap_or_else(|error| panic!("{chain:?}: {error}")).disk)
        };
        let mut subject = Subject { make: &mut make, keeps_data: true, seed };
        let report = run(&mut SimHarness::new(seed, 3), &mut subject);
        assert!(report.failures.is_empty(), "RINGDISK_SEED={seed} {chain:?}: {:#?}", report.failures);
        let done = done.load(Ordering::Relaxed);
        eprintln!("{done} exchanges");
        assert!(done > 30, "only {done} exchanges");
    }
}

#[test]
fn a_raw_disk_conforms_while_its_chain_is_exchanged() {
    conforms(&Chain::of(vec![Layer::Raw(SIZE)]), 4096);
    conforms(&Chain::of(vec![Layer::Raw(SIZE + 100)]), 512);
}

#[test]
fn a_qcow2_disk_conforms_while_its_chain_is_exchanged() {
    conforms(&Chain::of(vec![Layer::qcow2(SIZE, 4096)]), 65536);
    conforms(&Chain::of(vec![Layer::qcow2(SIZE, 65536)]), 4096);
    conforms(&Chain::of(vec![Layer::Extended { size_bytes: SIZE + 1536, cluster_size: 16384 }]), 1024);
}

#[test]
fn a_chain_conforms_while_it_is_exchanged() {
    conforms(&Chain::of(vec![Layer::qcow2(SIZE, 4096), Layer::qcow2(SIZE / 2, 65536), Layer::Raw(SIZE)]), 8192);
    let external = Layer::External { size_bytes: SIZE + 1536, cluster_size: 16384, raw: false, extended: false };
    conforms(&Chain::of(vec![external, Layer::Raw(SIZE / 2 + 100)]), 4096);
    let tiny = Chain::of(vec![Layer::qcow2(SIZE, 512), Layer::qcow2(SIZE / 2 + 512, 4096)]);
    conforms(&Chain { table_cache_bytes: Some(0), ..tiny }, 1024);
}

#[test]
fn a_disk_conforms_while_bitmaps_and_internal_snapshots_come_and_go() {
    conforms_with(&Chain::of(vec![Layer::qcow2(SIZE, 4096)]), 4096, true);
    conforms_with(&Chain::of(vec![Layer::qcow2(SIZE, 65536), Layer::Raw(SIZE)]), 4096, true);
    conforms_with(&Chain::of(vec![Layer::Extended { size_bytes: SIZE + 1536, cluster_size: 16384 }]), 4096, true);
}

#[test]
fn the_power_may_be_cut_while_bitmaps_and_internal_snapshots_come_and_go() {
    let pace = Pace { overlays: 0, most: 0, every: 9, grow_to: None, edits: true };
    survives(Chain::of(vec![Layer::qcow2(256 << 10, 4096)]), 4096, pace, 2);
    survives(Chain::of(vec![Layer::qcow2(64 << 10, 512), Layer::Raw(60 << 10)]), 4096, pace, 2);
}

const EXCHANGES: Pace = Pace { overlays: 6, most: 2, every: 9, grow_to: None, edits: false };

fn survives(chain: Chain, cluster_size: u64, pace: Pace, seeds: u64) {
    for seed in common::seeds(seeds) {
        let chain = Chain { seed, used: seed.is_multiple_of(2), ..chain.clone() };
        let storage = chain.storage();
        add_overlays(&storage, pace.overlays, chain.top().size_bytes(), cluster_size);
        let storage = storage.process_killed(0);
        let done = Arc::new(AtomicU64::new(0));
        let summary = PowerCutTest {
            storage,
            open: &|storage| open_exchanging(&chain, storage, pace, &done),
            check: &|storage| {
                let top = recorded(storage);
                match format_of(&chain, &top) {
                    Format::Raw | Format::Scratch => Ok(()),
                    Format::Qcow2 => qcow2_check(&storage.bytes(&top))?.sound(),
                }
            },
            workload: Workload {
                read_percent: 5,
                flush_percent: 20,
                ..Workload::new(seed, 60, chain.top().size_bytes(), chain.top().granule_bytes())
            },
            queues: 2,
            outcomes: 2,
            stride: 1,
        }
        .run();
        let summary = summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", chain.layers));
        eprintln!("the power was cut at {} moments, {} exchanges", summary.moments, done.load(Ordering::Relaxed));
        assert!(done.load(Ordering::Relaxed) > 3 || pace.grow_to.is_some_and(|_| done.load(Ordering::Relaxed) > 0));
    }
}

#[test]
fn the_power_may_be_cut_while_the_chain_is_exchanged() {
    survives(Chain::of(vec![Layer::qcow2(256 << 10, 4096)]), 16384, EXCHANGES, 2);
    survives(Chain::of(vec![Layer::Raw(256 << 10)]), 4096, EXCHANGES, 2);
    survives(Chain::of(vec![Layer::qcow2(256 << 10, 65536), Layer::Raw(200 << 10)]), 4096, EXCHANGES, 1);
}

#[test]
fn the_power_may_be_cut_while_the_disk_grows() {
    let pace = Pace { overlays: 0, most: 0, every: 12, grow_to: Some(5 << 20), edits: false };
    survives(Chain::of(vec![Layer::qcow2(100 << 10, 512)]), 512, pace, 2);
    survives(Chain::of(vec![Layer::qcow2((100 << 10) + 512, 4096), Layer::Raw(6 << 20)]), 4096, pace, 2);
    let file = SimFileOptions { grows_with_zeros: true, ..SimFileOptions::default() };
    survives(Chain { file, ..Chain::of(vec![Layer::Raw(100 << 10)]) }, 4096, pace, 1);
}

fn image_of(storage: &SimStorage, file: &str, format: Format) -> Arc<Image> {
    let options = ImageOptions::new(file).with(|options| options.format = Some(format));
    Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone())).unwrap())
}

/// Writes a number to one disk after the other, each when the one before was acknowledged, on queues of all reactors. The
/// former tops of all disks are one moment: one that has a number has all before it.
#[test]
fn several_disks_pass_one_barrier() {
    const WRITERS: usize = 3;
    for seed in common::seeds(20) {
        let storage = SimStorage::new(seed);
        let disks: Vec<Arc<Image>> = (0..2)
            .map(|index| {
                storage.create(&name(index), 64 << 10, SimFileOptions::default());
                image_of(&storage, &name(index), Format::Raw)
            })
            .collect();
        add_overlays(&storage, 2, 64 << 10, 4096);
        let mut harness = SimHarness::new(seed, WRITERS);
        let mut open =
            |disk: &Arc<Image>, reactor| harness.open(&(Arc::clone(disk) as Arc<dyn Disk>), reactor).unwrap();
        // A writer's queue of the second disk is on another reactor than its queue of the first.
        let queues: Vec<[u64; 2]> =
            (0..WRITERS).map(|writer| [open(&disks[0], writer), open(&disks[1], (writer + 1) % WRITERS)]).collect();
        let write = |writer: usize, number: u64| {
            let mut sector = vec![0; 512];
            sector[..8].copy_from_slice(&number.to_le_bytes());
            Request::write(writer as u64 * 4096, sector)
        };
        let mut numbers = [1u64; WRITERS];
        for (writer, queues) in queues.iter().enumerate() {
            harness.submit(queues[1], vec![(writer as u64, write(writer, 1))]);
        }
        let finished = Arc::new(AtomicBool::new(false));
        for turn in 0.. {
            if turn == 40 + seed {
                let overlays = disks.iter().enumerate().map(|(index, disk)| {
                    (Arc::clone(disk), open_overlay(&storage, &overlay_name(index), &name(index), Format::Raw))
                });
                let (overlays, finished) = (overlays.collect(), Arc::clone(&finished));
                harness.reactor().ctx().spawn(Task::new(async move {
                    let results = ringdisk_image::put_overlay_async(overlays, || Ok(())).await.unwrap();
                    results.into_iter().for_each(Result::unwrap);
                    finished.store(true, Ordering::Relaxed);
                }));
            }
            for (_, reply) in harness.turn().replies {
                reply.result.unwrap();
                let writer = reply.tag as usize;
                numbers[writer] += 1;
                let disk = (numbers[writer] % 2) as usize;
                harness.submit(queues[writer][disk], vec![(reply.tag, write(writer, numbers[writer]))]);
            }
            if finished.load(Ordering::Relaxed) {
                break;
            }
            assert!(turn < 100_000, "the exchange does not end");
        }
        for (writer, last) in numbers.iter().enumerate() {
            let found = |disk: usize| {
                let bytes = storage.bytes(&name(disk));
                u64::from_le_bytes(bytes[writer * 4096..][..8].try_into().unwrap())
            };
            let (even, odd) = (found(0), found(1));
            assert!(even.abs_diff(odd) == 1, "seed {seed}: writer {writer} has {even} on one disk, {odd} on the other");
            assert!(even.max(odd) < *last, "seed {seed}: nothing went to the new layers");
        }
    }
}

/// A file that cannot be opened on more reactors than one.
#[derive(Debug)]
struct OpensOnce(Arc<dyn File>, AtomicBool);

impl File for OpensOnce {
    fn info(&self) -> &FileInfo {
        self.0.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.0.length_bytes()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        match self.1.swap(true, Ordering::Relaxed) {
            false => self.0.open_queue(ctx),
            true => Err(Error::new(ErrorKind::Io, "no more reactors")),
        }
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.0.open_blocking()
    }
}

#[test]
fn where_a_queue_cannot_open_the_new_layer_or_nobody_can_record_it_all_goes_on_as_before() {
    let storage = SimStorage::new(1);
    storage.create_with(&name(0), &stamped(1, 0, 64 << 10), SimFileOptions::default());
    add_overlays(&storage, 2, 64 << 10, 4096);
    let image = image_of(&storage, &name(0), Format::Raw);
    let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
    // Three of them cannot open it, and the next exchange hears of none.
    let mut harness = SimHarness::new(1, 4);
    let queues: Vec<u64> = (0..4).map(|queue| harness.open(&disk, queue).unwrap()).collect();
    for case in 0..2 {
        let mut overlay = open_overlay(&storage, &overlay_name(case), &name(0), Format::Raw);
        if case == 0 {
            let file = Arc::new(OpensOnce(storage.file(&overlay_name(0)).unwrap(), AtomicBool::new(false)));
            overlay = OpenedOverlay::open(&"overlay".into(), file).unwrap();
        }
        let commit = move || match case {
            0 => Ok(()),
            _ => Err(Error::new(ErrorKind::Io, "the record cannot be written")),
        };
        let reactor = Rc::clone(harness.reactor());
        // Requests come in while the queues hold.
        let write = Request::write(0, stamped(2, 0, 4096));
        harness.submit(queues[1], vec![(1, write)]);
        let result = reactor.run(ringdisk_image::put_overlay_async(vec![(Arc::clone(&image), overlay)], commit));
        let error = result.unwrap_err().to_string();
        assert!(error.contains(["no more reactors", "cannot be written"][case]), "{error}");
        harness.settle();
        let replies = harness.turn().replies;
        assert!(replies.len() <= 1 && harness.in_flight(queues[1]) == 0);
        assert_eq!(image.formats().count(), 1);
        assert_eq!(storage.bytes(&name(0))[..4096], stamped(2, 0, 4096));
    }
}

struct Hears(AtomicU64);

impl DiskListener for Hears {
    fn info_changed(&self, info: &DiskInfo) {
        self.0.store(info.size_bytes, Ordering::Relaxed);
    }
}

/// Runs a task to its end while the queues are looked at.
fn while_served(harness: &mut SimHarness, task: impl Future<Output = ()> + 'static) {
    let finished = Rc::new(Cell::new(false));
    let its = Rc::clone(&finished);
    harness.reactor().ctx().spawn(Task::new(async move {
        task.await;
        its.set(true);
    }));
    for turn in 0.. {
        if finished.get() {
            return;
        }
        harness.turn();
        assert!(turn < 100_000, "the task does not end");
    }
}

fn call(harness: &mut SimHarness, queue: u64, request: Request) -> std::result::Result<Vec<u8>, block::IoError> {
    harness.submit(queue, vec![(7, request)]);
    loop {
        let turn = harness.turn();
        if let Some((_, reply)) = turn.replies.into_iter().find(|(_, reply)| reply.tag == 7) {
            return reply.result.map(|()| reply.data);
        }
        assert!(!turn.idle, "a request was lost");
    }
}

#[test]
fn a_disk_grows_while_it_is_used_and_what_is_added_is_zero_whatever_lies_below() {
    const OLD: u64 = (100 << 10) + 512;
    const NEW: u64 = 3 << 20;
    let longer = Layer::Raw(NEW * 2);
    for layers in [
        vec![Layer::Raw(OLD)],
        vec![Layer::qcow2(OLD, 512)],
        vec![Layer::qcow2(OLD, 4096), longer.clone()],
        vec![Layer::Extended { size_bytes: OLD, cluster_size: 16384 }, longer.clone()],
        vec![Layer::External { size_bytes: OLD, cluster_size: 16384, raw: false, extended: false }, longer],
    ] {
        let file = SimFileOptions { grows_with_zeros: matches!(layers[0], Layer::Raw(_)), ..SimFileOptions::default() };
        let chain = Chain { used: true, file, ..Chain::of(layers) };
        let storage = chain.storage();
        let original = storage.process_killed(0);
        let image = image_of(&storage, &name(0), format_of(&chain, &name(0)));
        let hears = Arc::new(Hears(AtomicU64::new(0)));
        image.subscribe(Arc::downgrade(&hears) as Weak<dyn DiskListener>);
        let disk: Arc<dyn Disk> = Arc::clone(&image) as _;
        let mut harness = SimHarness::new(1, 2);
        let queues = [harness.open(&disk, 0).unwrap(), harness.open(&disk, 1).unwrap()];
        let before = call(&mut harness, queues[0], Request::read(0, OLD as usize)).unwrap();
        let data = stamped(9, OLD - 512, 512);
        harness.submit(queues[1], vec![(1, Request::write(OLD - 512, &data[..]))]);
        call(&mut harness, queues[0], Request::read(OLD, 512)).unwrap_err();
        let grown = Arc::clone(&image);
        while_served(&mut harness, async move { grown.grow_async(NEW).await.unwrap() });
        harness.settle();
        assert_eq!((image.info().size_bytes, hears.0.load(Ordering::Relaxed)), (NEW, NEW), "{chain:?}");
        for queue in queues {
            let all = call(&mut harness, queue, Request::read(0, NEW as usize)).unwrap();
            assert_eq!(all[..OLD as usize - 512], before[..OLD as usize - 512], "{chain:?}");
            assert_eq!(all[OLD as usize - 512..][..512], data, "{chain:?}");
            assert!(all[OLD as usize..].iter().all(|byte| *byte == 0), "{chain:?}: something lies behind the old end");
        }
        let end = stamped(10, NEW - 1024, 1024);
        call(&mut harness, queues[1], Request::write(NEW - 1024, &end[..])).unwrap();
        assert_eq!(call(&mut harness, queues[0], Request::read(NEW - 1024, 1024)).unwrap(), end);
        let error = image.grow(OLD).unwrap_err().to_string();
        assert!(error.contains("cannot be made smaller"), "{error}");
        queues.into_iter().for_each(|queue| harness.close(queue));
        harness.settle();
        image.close().unwrap();
        let after = storage.process_killed(0);
        let image = image_of(&after, &name(0), format_of(&chain, &name(0)));
        assert_eq!(image.info().size_bytes, NEW);
        chain.check(&after, &original).unwrap();
    }
}

/// The bits of the one bitmap of an image, which has to be in good order.
fn marked(storage: &SimStorage) -> Vec<bool> {
    let file: Arc<dyn File> = storage.process_killed(0).file(&name(0)).unwrap();
    let bitmaps = ringdisk_image::bitmaps(&file, Format::Qcow2).unwrap();
    assert!(!bitmaps[0].in_use && bitmaps[0].enabled);
    let bits = ringdisk_image::read_bitmap(&file, Format::Qcow2, "changes").unwrap();
    (0..8).map(|granule| bits.is_set(granule * 65536)).collect()
}

#[test]
fn bitmaps_stay_in_the_former_top_in_good_order_and_go_on_when_it_is_the_top_again() {
    const GRANULE: u64 = 65536;
    let chain = Chain::of(vec![Layer::qcow2(8 * GRANULE, 65536)]);
    let storage = chain.storage();
    let file: Arc<dyn File> = storage.file(&name(0)).unwrap();
    let add = BitmapAction::Add { granularity_bytes: Some(GRANULE) };
    ringdisk_image::edit_bitmaps(&file, Format::Qcow2, &[("changes".to_owned(), add)], &mut |_, _| true).unwrap();
    drop(file);
    let storage = storage.process_killed(0);
    add_overlays(&storage, 1, 8 * GRANULE, 65536);
    let image = image_of(&storage, &name(0), Format::Qcow2);
    let mut harness = SimHarness::new(1, 2);
    let queue = harness.open(&(Arc::clone(&image) as Arc<dyn Disk>), 0).unwrap();
    let write =
        |harness: &mut SimHarness, granule: u64| call(harness, queue, Request::write(granule * GRANULE, vec![1; 512]));
    write(&mut harness, 2).unwrap();
    let overlay = open_overlay(&storage, &overlay_name(0), &name(0), Format::Qcow2);
    let its = Arc::clone(&image);
    while_served(&mut harness, async move {
        let results = ringdisk_image::put_overlay_async(vec![(its, overlay)], || Ok(())).await.unwrap();
        results.into_iter().for_each(Result::unwrap);
    });
    let is_marked = |granules: &[u64]| (0..8).map(|granule| granules.contains(&granule)).collect::<Vec<_>>();
    assert_eq!(marked(&storage), is_marked(&[2]));
    write(&mut harness, 5).unwrap();
    call(&mut harness, queue, Request::Flush).unwrap();
    assert_eq!(marked(&storage), is_marked(&[2]), "the former top is only read");
    let its = Arc::clone(&image);
    while_served(&mut harness, async move {
        ringdisk_image::take_back_async(&its, &CopyWatch::default(), || Ok(())).await.unwrap()
    });
    write(&mut harness, 7).unwrap();
    harness.close(queue);
    harness.settle();
    image.close().unwrap();
    assert_eq!(marked(&storage), is_marked(&[2, 5, 7]));
}

#[test]
fn a_layer_with_internal_snapshots_is_not_taken_back_until_they_are_deleted() {
    let chain = Chain::of(vec![Layer::qcow2(SIZE, 4096)]);
    let storage = chain.storage();
    add_overlays(&storage, 1, SIZE, 4096);
    let image = image_of(&storage, &name(0), Format::Qcow2);
    let overlay = open_overlay(&storage, &overlay_name(0), &name(0), Format::Qcow2);
    let results = ringdisk_image::put_overlay(vec![(Arc::clone(&image), overlay)], || Ok(()));
    results.unwrap().into_iter().for_each(Result::unwrap);
    image.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("kept"))).unwrap();
    let refused = ringdisk_image::take_back(&image, &CopyWatch::default(), || Ok(())).unwrap_err().to_string();
    assert!(refused.contains("internal snapshots ('kept'"), "{refused}");
    assert_eq!((image.formats().count(), image.online_snapshots().unwrap().len()), (2, 1));
    image.edit_online(&ClosedEdit::DeleteSnapshot(SnapshotName::named("kept"))).unwrap();
    // Those of the layer below stay what they are.
    ringdisk_image::take_back(&image, &CopyWatch::default(), || Ok(())).unwrap();
    assert_eq!(image.formats().count(), 1);
    image.close().unwrap();
    qcow2_check(&storage.process_killed(0).bytes(&name(0))).unwrap().sound().unwrap();
}

#[test]
fn what_cannot_be_put_on_top_or_taken_back_is_refused_and_an_overlay_that_has_grown_is_taken_back_into_a_larger_layer()
{
    let chain = Chain::of(vec![Layer::qcow2(SIZE, 4096), Layer::qcow2(SIZE, 4096)]);
    let storage = chain.storage();
    add_overlays(&storage, 2, SIZE, 4096);
    let image = image_of(&storage, &name(0), Format::Qcow2);
    let put = |overlay: OpenedOverlay| {
        let results = ringdisk_image::put_overlay(vec![(Arc::clone(&image), overlay)], || Ok(()));
        results.map(|results| results.into_iter().for_each(Result::unwrap)).map_err(|error| error.to_string())
    };
    let refused = ringdisk_image::take_back(&image, &CopyWatch::default(), || Ok(())).unwrap_err().to_string();
    assert!(refused.contains("open for reading only"), "{refused}");
    let own = OpenedOverlay::open(&FileName::from(&name(0)), storage.file(&name(0)).unwrap());
    assert!(own.is_ok_and(|own| put(own).is_err()), "it is part of the chain");
    storage.create(&name(9), 0, SimFileOptions::default());
    let small = Qcow2Options::default().with(|options| {
        options.size_bytes = SIZE / 2;
        options.backing_file = Some(name(0));
    });
    let file: Arc<dyn File> = storage.file(&name(9)).unwrap();
    ringdisk_image::create(&file, &CreateOptions::Qcow2(small)).unwrap();
    let error = put(OpenedOverlay::open(&FileName::from(&name(9)), file).unwrap()).unwrap_err();
    assert!(error.contains("bytes"), "{error}");

    put(open_overlay(&storage, &overlay_name(0), &name(0), Format::Qcow2)).unwrap();
    image.grow(3 * SIZE).unwrap();
    let mut harness = SimHarness::new(1, 2);
    let queue = harness.open(&(Arc::clone(&image) as Arc<dyn Disk>), 0).unwrap();
    let data = stamped(4, 3 * SIZE - 8192, 8192);
    call(&mut harness, queue, Request::write(3 * SIZE - 8192, &data[..])).unwrap();
    let its = Arc::clone(&image);
    while_served(&mut harness, async move {
        ringdisk_image::take_back_async(&its, &CopyWatch::default(), || Ok(())).await.unwrap()
    });
    assert_eq!((image.info().size_bytes, image.formats().count()), (3 * SIZE, 2));
    assert_eq!(call(&mut harness, queue, Request::read(3 * SIZE - 8192, 8192)).unwrap(), data);
    harness.close(queue);
    harness.settle();
    image.close().unwrap();
    let after = storage.process_killed(0);
    qcow2_check(&after.bytes(&name(0))).unwrap().sound().unwrap();
    let again = image_of(&after, &name(0), Format::Qcow2);
    assert_eq!(again.info().size_bytes, 3 * SIZE);
}
