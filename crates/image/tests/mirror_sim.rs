//! Copies of a running disk on simulated storage: the power is cut at every write and flush while one disk after another
//! takes the former one's place, and the target of a copy runs full.

mod common;

use block::{
    Completion, Disk, DiskInfo, DiskQueue, Error, ErrorKind, File, IoError, IoErrorKind, MetaIo, Op, PastEnd,
    ReactorCtx, Result, Tag, Task,
};
use common::{Chain, Layer, SimOpener, name};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{
    BitmapAction, ClosedEdit, Copied, CopyWatch, CreateOptions, Format, Image, ImageOptions, LayerGoes, LayerOpeners,
    MirrorEnd, MirrorScope, MirrorTarget, NewBelow, NewSnapshot, OpenedBase, OpenedOverlay, PointInTime, SnapshotName,
};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use testkit::{
    FaultAction, FaultTest, OpKind, OpenedDisk, PowerCutTest, Request, Session, SimFileOptions, SimStorage, Workload,
    qcow2_check, stamped,
};

/// A file that names the disk's image, as whoever serves disks keeps it.
const RECORD: &str = "record";
const TARGETS: usize = 6;
/// An image that a disk may rest on as well.
const OTHER_BASE: &str = "other-base";
const OTHER_BASE_BYTES: usize = 70 << 10;

fn target_name(index: usize) -> String {
    format!("target{index}")
}

fn format_of(name: &str) -> Format {
    let index: usize = name.trim_start_matches(|char: char| char.is_alphabetic()).parse().unwrap();
    match (name.starts_with("target"), index % 2) {
        (true, 1) => Format::Raw,
        _ => Format::Qcow2,
    }
}

fn add_targets(storage: &SimStorage, size_bytes: u64, cluster_size: u64) {
    for index in 0..TARGETS {
        let file: Arc<dyn File> = storage.create(&target_name(index), 0, SimFileOptions::default());
        let options = match format_of(&target_name(index)) {
            Format::Raw => CreateOptions::raw(size_bytes),
            _ => CreateOptions::Qcow2(Qcow2Options::default().with(|options| {
                options.size_bytes = size_bytes;
                options.cluster_size = cluster_size;
            })),
        };
        ringdisk_image::create(&file, &options).unwrap();
    }
    let file: Arc<dyn File> = storage.create("overlay0", 0, SimFileOptions::default());
    add_overlay(file, size_bytes).unwrap();
    // It holds something else than what the disk rests on.
    let other = storage.create(OTHER_BASE, 0, SimFileOptions::default());
    let bytes = memory::AlignedBuf::copy_of(&stamped(5, 0, OTHER_BASE_BYTES));
    block::block_on(MetaIo::new(other.open_blocking().unwrap()).write(0, bytes)).unwrap();
    storage.create(RECORD, 512, SimFileOptions::default());
    record(storage, &name(0)).unwrap();
}

/// Makes an empty layer over the disk, whatever the file held.
fn add_overlay(file: Arc<dyn File>, size_bytes: u64) -> Result<()> {
    let failed = |error| Error::with_source(ErrorKind::Io, "cannot empty it", error);
    block::block_on(MetaIo::new(file.open_blocking()?).set_length(0)).map_err(failed)?;
    let options = Qcow2Options::default().with(|options| {
        options.size_bytes = size_bytes;
        options.cluster_size = 4096;
        options.backing_file = Some(name(0));
        options.backing_format = Some("qcow2".to_owned());
    });
    ringdisk_image::create(&file, &CreateOptions::Qcow2(options))
}

fn record(storage: &SimStorage, top: &str) -> Result<()> {
    let mut sector = top.as_bytes().to_vec();
    sector.resize(512, 0);
    let io = MetaIo::new(storage.file(RECORD).unwrap().open_blocking()?);
    let failed = |error| Error::with_source(ErrorKind::Io, "cannot record", error);
    block::block_on(io.write(0, memory::AlignedBuf::copy_of(&sector))).map_err(failed)?;
    block::block_on(io.flush()).map_err(failed)
}

fn recorded(storage: &SimStorage) -> String {
    let sector = storage.bytes(RECORD);
    String::from_utf8(sector.into_iter().take_while(|byte| *byte != 0).collect()).unwrap()
}

/// What is done to the disk, again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It goes over to one target after another.
    MoveOn,
    /// It is copied to the first target.
    Copy,
    /// A layer is put on it, and taken back.
    Commit,
    /// The layers between its top and the lowest go into that, one after the other.
    CommitBelow,
    /// Its top layer gets what lies below.
    Stream,
    /// Its top layer comes to rest on another image, and back.
    Rebase,
    /// Its file is made shorter.
    Compact,
    /// It is copied as it is at one moment, below a layer that takes what guests write.
    Backup,
    /// Its internal snapshot is taken and deleted, below such a layer.
    Snapshot,
}

struct Changing {
    storage: SimStorage,
    image: Arc<Image>,
    does: Does,
    every: u64,
    requests: AtomicU64,
    is_running: AtomicBool,
    done: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    moved: Arc<AtomicU64>,
}

impl Changing {
    async fn next(&self, ctx: &Rc<dyn ReactorCtx>) {
        // Every other job has one call in flight.
        let overlaps = (self.requests.load(Ordering::Relaxed) / self.every).is_multiple_of(2);
        ringdisk_image::overlap_calls_for_test(overlaps.then(|| Rc::clone(ctx)));
        let result = match self.does {
            Does::MoveOn => self.mirror(MirrorEnd::Switch).await,
            Does::Copy => self.mirror(MirrorEnd::Keep).await,
            Does::Commit => self.commit().await,
            Does::Compact => {
                // Requests of guests come further while something is read.
                let file = MetaIo::new(self.storage.file(&name(0)).unwrap().open_queue(ctx).unwrap());
                let nap = async || drop(file.read(0, 512, PastEnd::Zeros).await);
                let compacted = ringdisk_image::compact_async(&self.image, &CopyWatch::default(), nap).await;
                compacted.map(|compacted| {
                    self.moved.fetch_add(compacted.moved_bytes, Ordering::Relaxed);
                })
            }
            Does::CommitBelow => self.commit_below().await,
            Does::Rebase => self.rebase().await,
            Does::Backup => self.back_up().await,
            Does::Snapshot => self.change_snapshots().await,
            Does::Stream => {
                let watch = CopyWatch::default();
                ringdisk_image::move_onto_async(&self.image, NewBelow::Nothing, &watch, || Ok(()), || ()).await
            }
        };
        let count = if result.is_ok() { &self.done } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
    }

    async fn mirror(&self, end: MirrorEnd) -> Result<()> {
        let now = self.image.file_names().next().unwrap().to_string();
        let after = match now.strip_prefix("target") {
            Some(index) => index.parse::<usize>().unwrap() + 1,
            None => 0,
        };
        if after >= TARGETS {
            return Ok(());
        }
        let target = target_name(after);
        let file: Arc<dyn File> = self.storage.file(&target).unwrap();
        // It may hold what an earlier copy left there.
        let opened = MirrorTarget::open(&target.as_str().into(), file, format_of(&target), MirrorScope::Full, false)?;
        let watch = CopyWatch::default();
        ringdisk_image::mirror_async(&self.image, opened, end, &watch, || record(&self.storage, &target)).await?;
        assert_eq!(watch.done_bytes(), watch.total_bytes());
        // All of it, and what was written meanwhile, on both sides.
        assert!(watch.rounds().rounds >= 2);
        Ok(())
    }

    async fn commit_below(&self) -> Result<()> {
        let names: Vec<_> = self.image.layer_file_names().map(|(own, _)| own).collect();
        let Some(layer) = names.len().checked_sub(2).filter(|index| *index > 0).map(|index| &names[index]) else {
            return Ok(());
        };
        let opener = SimOpener(self.storage.clone());
        let openers = LayerOpeners { for_writing: &opener, for_reading: &opener };
        ringdisk_image::commit_layer_async(&self.image, layer, openers, &CopyWatch::default(), &mut Untold).await?;
        self.moved.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn rebase(&self) -> Result<()> {
        let below = self.image.layer_file_names().nth(1).unwrap().0.to_string();
        let base = if below == OTHER_BASE { name(1) } else { OTHER_BASE.to_owned() };
        let options = ImageOptions::new(base.as_str()).with(|options| options.format = Some(Format::Raw));
        let base = OpenedBase::open(&options, &SimOpener(self.storage.clone()))?;
        let watch = CopyWatch::default();
        ringdisk_image::move_onto_async(&self.image, NewBelow::Base(base), &watch, || Ok(()), || ()).await
    }

    /// Puts a layer on the disk for a while. If one was left there by a run that was broken off, only takes that back.
    async fn beside_guests(&self, work: impl AsyncFnOnce(&PointInTime<'_>) -> Result<()>) -> Result<()> {
        if self.image.layer_file_names().count() > 1 {
            let watch = CopyWatch::default();
            return ringdisk_image::take_back_async(&self.image, &watch, || record(&self.storage, &name(0))).await;
        }
        let fleece = self.storage.file("overlay0").unwrap();
        add_overlay(fleece.clone(), self.image.info().size_bytes)?;
        let overlay = OpenedOverlay::open(&"overlay0".into(), fleece)?;
        let named = || record(&self.storage, "overlay0");
        let point = match PointInTime::begin_async(&self.image, overlay, named).await {
            Ok(point) => point,
            Err(error) => {
                record(&self.storage, &name(0))?;
                return Err(error);
            }
        };
        let worked = work(&point).await;
        let ended = point.end_async(&CopyWatch::default(), || record(&self.storage, &name(0))).await;
        worked.and(ended)
    }

    async fn back_up(&self) -> Result<()> {
        let to = ImageOptions::new("target0").with(|options| options.format = Some(Format::Qcow2));
        let to = Arc::new(ringdisk_image::open(&to, &SimOpener(self.storage.clone()))?);
        let copy = async |point: &PointInTime<'_>| {
            point.copy_out(to, false)?.run_async(&Copied::All, &CopyWatch::default()).await
        };
        self.beside_guests(copy).await
    }

    async fn change_snapshots(&self) -> Result<()> {
        let edit = match self.image.online_snapshots()?.is_empty() {
            true => ClosedEdit::CreateSnapshot(NewSnapshot::new("one")),
            false => ClosedEdit::DeleteSnapshot(SnapshotName::named("one")),
        };
        self.beside_guests(async |point: &PointInTime<'_>| point.change_snapshots_async(&edit).await).await
    }

    async fn commit(&self) -> Result<()> {
        if self.image.layer_file_names().count() == 1 {
            let overlay = OpenedOverlay::open(&"overlay0".into(), self.storage.file("overlay0").unwrap())?;
            let disks = vec![(Arc::clone(&self.image), overlay)];
            ringdisk_image::put_overlay_async(disks, || record(&self.storage, "overlay0")).await?;
            return Ok(());
        }
        let watch = CopyWatch::default();
        ringdisk_image::take_back_async(&self.image, &watch, || record(&self.storage, &name(0))).await
    }
}

/// Keeps no record: the images say what they rest on.
struct Untold;

impl LayerGoes for Untold {
    fn goes(&mut self) -> Result<()> {
        Ok(())
    }

    fn is_gone(&mut self) {}

    fn stays(&mut self) {}
}

struct ChangingDisk(Arc<Changing>);

impl Disk for ChangingDisk {
    fn info(&self) -> DiskInfo {
        self.0.image.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let queue = self.0.image.open_queue(ctx)?;
        Ok(Box::new(ChangingQueue { queue, ctx: Rc::clone(ctx), disk: Arc::clone(&self.0) }))
    }
}

struct ChangingQueue {
    queue: Box<dyn DiskQueue>,
    ctx: Rc<dyn ReactorCtx>,
    disk: Arc<Changing>,
}

impl DiskQueue for ChangingQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let requests = self.disk.requests.fetch_add(1, Ordering::Relaxed);
        self.queue.submit(tag, op);
        if requests % self.disk.every == 3 && !self.disk.is_running.swap(true, Ordering::Relaxed) {
            let (disk, ctx) = (Arc::clone(&self.disk), Rc::clone(&self.ctx));
            self.ctx.spawn(Task::new(async move {
                disk.next(&ctx).await;
                disk.is_running.store(false, Ordering::Relaxed);
            }));
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.queue.harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }
}

struct Case {
    chain: Chain,
    does: Does,
    done: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    /// Bytes that compactions have moved.
    moved: Arc<AtomicU64>,
    keeps: Keeps,
    /// What the internal snapshots hold.
    snapshots_digest: Cell<u64>,
}

/// What the top layer has beside the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    Nothing,
    Snapshot,
    /// One that notes what is written, and one that does not any more.
    Bitmaps,
}

impl Case {
    fn new(chain: &Chain, does: Does, seed: u64) -> Self {
        let chain = Chain { seed, used: seed.is_multiple_of(2), ..chain.clone() };
        Self {
            chain,
            does,
            done: Arc::default(),
            failed: Arc::default(),
            moved: Arc::default(),
            keeps: Keeps::Nothing,
            snapshots_digest: Cell::new(0),
        }
    }

    fn storage(&self) -> SimStorage {
        let storage = self.chain.storage();
        add_targets(&storage, self.chain.top().size_bytes(), 4096);
        if self.does == Does::Compact {
            self.make_holes(&storage);
        }
        storage.process_killed(0)
    }

    /// Data everywhere, and most of it discarded again: the file has holes in front, and data at its end.
    fn make_holes(&self, storage: &SimStorage) {
        let open = |storage: &SimStorage| self.chain.open(storage);
        let mut session = Session::open(storage, &open, self.chain.seed, 1).unwrap();
        let top = self.chain.top();
        let (size, piece) = (top.size_bytes(), top.granule_bytes().max(4096) * 4);
        for at in (0..size).step_by(piece as usize) {
            let length = piece.min(size - at);
            session.call(Request::write(at, stamped(7, at, length as usize))).unwrap();
        }
        session.close().unwrap();
        self.add_what_it_keeps(storage);
        let mut session = Session::open(storage, &open, self.chain.seed, 1).unwrap();
        for at in
            (0..size / 4 * 3).step_by(piece as usize).filter(|at| !(at / piece + self.chain.seed).is_multiple_of(4))
        {
            session.call(Request::Discard { offset: at, length: piece.min(size - at) }).unwrap();
        }
        session.close().unwrap();
    }

    fn add_what_it_keeps(&self, storage: &SimStorage) {
        let options = ImageOptions::new(name(0).as_str()).with(|options| options.format = Some(Format::Qcow2));
        let image = ringdisk_image::open(&options, &SimOpener(storage.clone())).unwrap();
        let bitmap = |name: &str, action| (name.to_owned(), action);
        let add = BitmapAction::Add { granularity_bytes: Some(512) };
        match self.keeps {
            Keeps::Nothing => {}
            Keeps::Snapshot => image.edit_online(&ClosedEdit::CreateSnapshot(NewSnapshot::new("full"))).unwrap(),
            Keeps::Bitmaps => {
                let actions = vec![bitmap("on", add.clone()), bitmap("off", add), bitmap("off", BitmapAction::Disable)];
                image.edit_online(&ClosedEdit::Bitmaps(actions)).unwrap();
            }
        }
        image.close().unwrap();
        let report = qcow2_check(&storage.bytes(&name(0))).unwrap();
        self.snapshots_digest.set(report.snapshots_digest);
    }

    fn open(&self, storage: &SimStorage) -> Result<OpenedDisk> {
        let top = recorded(storage);
        let format =
            if top == name(0) && matches!(self.chain.top(), Layer::Raw(_)) { Format::Raw } else { format_of(&top) };
        let options = ImageOptions::new(&top).with(|options| {
            options.format = Some(format);
            options.former_tops = 1;
        });
        let image = Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone()))?);
        let disk = ChangingDisk(Arc::new(Changing {
            storage: storage.clone(),
            image: Arc::clone(&image),
            does: self.does,
            every: 9,
            requests: AtomicU64::new(0),
            is_running: AtomicBool::new(false),
            done: Arc::clone(&self.done),
            failed: Arc::clone(&self.failed),
            moved: Arc::clone(&self.moved),
        }));
        Ok(OpenedDisk { disk: Arc::new(disk), close: Box::new(move || image.close()) })
    }

    fn check(&self, storage: &SimStorage) -> std::result::Result<(), String> {
        let top = recorded(storage);
        let is_raw = top == name(0) && matches!(self.chain.top(), Layer::Raw(_));
        if is_raw || format_of(&top) == Format::Raw {
            return Ok(());
        }
        let report = qcow2_check(&storage.bytes(&top))?;
        if self.does == Does::Compact && report.snapshots_digest != self.snapshots_digest.get() {
            return Err("an internal snapshot holds something else".to_owned());
        }
        report.sound()?;
        if self.does == Does::Snapshot {
            qcow2_check(&storage.bytes(&name(0)))?.sound()?;
        }
        if self.does == Does::CommitBelow {
            // Those that have gone are valid, too.
            for (index, layer) in self.chain.layers.iter().enumerate().skip(1) {
                if !matches!(layer, Layer::Raw(_)) {
                    qcow2_check(&storage.bytes(&name(index)))?.sound()?;
                }
            }
        }
        Ok(())
    }

    fn workload(&self) -> Workload {
        let (size_bytes, granule_bytes) = (self.chain.top().size_bytes(), self.chain.top().granule_bytes());
        let workload = Workload::new(self.chain.seed, 60, size_bytes, granule_bytes);
        Workload { read_percent: 5, flush_percent: 20, ..workload }
    }
}

#[test]
fn the_power_may_be_cut_while_a_disk_goes_over_to_a_copy() {
    let chains = [
        Chain::of(vec![Layer::qcow2(128 << 10, 4096)]),
        Chain::of(vec![Layer::Raw(96 << 10)]),
        Chain::of(vec![Layer::qcow2(96 << 10, 65536), Layer::Raw(80 << 10)]),
    ];
    for (chain, seed) in chains.iter().flat_map(|chain| common::seeds(2).map(move |seed| (chain, seed))) {
        let case = Case::new(chain, Does::MoveOn, seed);
        let summary = PowerCutTest {
            storage: case.storage(),
            open: &|storage| case.open(storage),
            check: &|storage| case.check(storage),
            workload: case.workload(),
            queues: 2,
            outcomes: 2,
            stride: 1,
        }
        .run();
        let summary = summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", chain.layers));
        let done = case.done.load(Ordering::Relaxed);
        eprintln!("the power was cut at {} moments, {done} moves", summary.moments);
        assert!(done > 3 && case.failed.load(Ordering::Relaxed) == 0);
    }
}

#[test]
fn the_power_may_be_cut_while_the_top_gets_what_lies_below_or_another_base_or_a_moment_is_kept() {
    for (does, least) in [(Does::Stream, 1), (Does::Rebase, 3), (Does::Backup, 2), (Does::Snapshot, 3)] {
        let below = (!matches!(does, Does::Backup | Does::Snapshot)).then_some(Layer::Raw(100 << 10));
        let chain = Chain::of(std::iter::once(Layer::qcow2(128 << 10, 4096)).chain(below).collect());
        for seed in common::seeds(2) {
            let case = Case::new(&chain, does, seed);
            let summary = PowerCutTest {
                storage: case.storage(),
                open: &|storage| case.open(storage),
                check: &|storage| case.check(storage),
                workload: case.workload(),
                queues: 2,
                outcomes: 2,
                stride: if does == Does::Stream { 1 } else { 2 },
            }
            .run();
            let summary = summary.unwrap_or_else(|wrong| panic!("{does:?}, RINGDISK_SEED={seed}: {wrong}"));
            let done = case.done.load(Ordering::Relaxed);
            eprintln!("{does:?}: the power was cut at {} moments, {done} done", summary.moments);
            assert!(done >= least, "{does:?}: {done} done, {} failed", case.failed.load(Ordering::Relaxed));
        }
    }
}

/// Layers that are shorter and longer than the one that they take, which reach beyond the disk and end within it.
fn committable() -> Vec<Chain> {
    let of = |top, middle, below: Vec<Layer>| Chain::of([top, middle].into_iter().chain(below).collect());
    vec![
        of(Layer::qcow2(128 << 10, 4096), Layer::qcow2(96 << 10, 1024), vec![Layer::Raw(60 << 10)]),
        of(Layer::qcow2(128 << 10, 4096), Layer::qcow2((64 << 10) + 512, 4096), vec![Layer::Raw(100 << 10)]),
        of(
            Layer::qcow2(96 << 10, 16384),
            Layer::qcow2(128 << 10, 512),
            vec![Layer::qcow2(100 << 10, 16384), Layer::qcow2((70 << 10) + 512, 2048), Layer::Raw(80 << 10)],
        ),
    ]
}

#[test]
fn the_power_may_be_cut_while_layers_below_the_top_go_into_the_lowest() {
    for (chain, seed) in committable().iter().flat_map(|chain| common::seeds(2).map(move |seed| (chain, seed))) {
        let case = Case::new(chain, Does::CommitBelow, seed);
        let summary = PowerCutTest {
            storage: case.storage(),
            open: &|storage| case.open(storage),
            check: &|storage| case.check(storage),
            workload: case.workload(),
            queues: 2,
            outcomes: 2,
            stride: 1,
        }
        .run();
        let summary = summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", chain.layers));
        let gone = case.moved.load(Ordering::Relaxed);
        eprintln!("the power was cut at {} moments, {gone} layers had gone", summary.moments);
        assert!(gone > 0 && case.failed.load(Ordering::Relaxed) == 0);
    }
}

#[test]
fn a_full_layer_takes_no_other_layer_and_the_disk_stays_whole() {
    runs_full(Does::CommitBelow, &name(2), 2);
}

/// The layer below runs full while it is copied, or while what guests wrote meanwhile is taken back.
#[test]
fn a_full_layer_below_a_backup_leaves_the_disk_whole() {
    runs_full(Does::Backup, &name(0), 2);
}

#[test]
fn a_full_layer_below_breaks_a_change_of_snapshots_and_not_the_disk() {
    runs_full(Does::Snapshot, &name(0), 2);
}

#[test]
fn a_full_target_breaks_the_backup_and_not_the_disk() {
    runs_full(Does::Backup, "target0", 2);
}

/// Fills the file that a job copies to at each of its writes. Guests notice nothing, and the disk stays whole.
fn runs_full(does: Does, file: &str, stride: u64) {
    let no_space = FaultAction::Fail(IoError::new(IoErrorKind::NoSpace));
    let (mut moments, mut done, mut failed) = (0, 0, 0);
    // A few seeds together: one alone may bring its copies between requests that write nothing.
    for seed in common::seeds(4) {
        let below = match does {
            Does::Stream | Does::Rebase => vec![Layer::Raw(100 << 10)],
            Does::CommitBelow => vec![Layer::qcow2(96 << 10, 4096), Layer::qcow2(100 << 10, 16384)],
            _ => Vec::new(),
        };
        let chain = Chain::of(std::iter::once(Layer::qcow2(128 << 10, 4096)).chain(below).collect());
        let case = Case::new(&chain, does, seed);
        let summary = FaultTest {
            storage: &|| case.storage(),
            open: &|storage| case.open(storage),
            check: &|storage| case.check(storage),
            file,
            kind: OpKind::Write,
            action: no_space,
            persistent: true,
            workload: case.workload(),
            queues: 2,
            stride,
        }
        .run();
        let summary = summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}"));
        moments += summary.moments;
        done += case.done.load(Ordering::Relaxed);
        failed += case.failed.load(Ordering::Relaxed);
        if matches!(does, Does::Copy | Does::CommitBelow) || (does == Does::Backup && file == "target0") {
            assert_eq!(summary.errors, 0);
        }
    }
    eprintln!("{does:?}: full at {moments} moments, {done} done, {failed} failed");
    assert!(moments > 5 && failed > 5 && done > 0);
}

#[test]
fn a_full_target_breaks_the_copy_and_not_the_disk() {
    runs_full(Does::Copy, "target0", 1);
    runs_full(Does::MoveOn, "target0", 2);
}

#[test]
fn a_full_top_layer_breaks_the_stream_and_the_chain_stays_valid() {
    runs_full(Does::Stream, &name(0), 2);
}

#[test]
fn a_full_top_layer_breaks_the_rebase_and_the_chain_stays_valid() {
    runs_full(Does::Rebase, &name(0), 2);
}

#[test]
fn a_full_layer_below_breaks_the_commit_and_not_the_disk() {
    runs_full(Does::Commit, &name(0), 2);
}

/// Images whose clusters can move: plain ones, over another layer, of version 2, and with subclusters.
fn compactable() -> Vec<Chain> {
    let size_bytes = 128 << 10;
    vec![
        Chain::of(vec![Layer::qcow2(size_bytes, 512)]),
        Chain::of(vec![Layer::qcow2(size_bytes, 4096), Layer::Raw(80 << 10)]),
        Chain::of(vec![Layer::Qcow2 { size_bytes, cluster_size: 1024, version: 2, refcount_bits: 16 }]),
        Chain::of(vec![Layer::Extended { size_bytes: 512 << 10, cluster_size: 16 << 10 }]),
    ]
}

/// Cuts the power while clusters move, at every `stride`th write and flush. Returns how many bytes had moved.
fn compacts(chain: &Chain, keeps: Keeps, seed: u64, stride: u64) -> u64 {
    let case = Case { keeps, ..Case::new(chain, Does::Compact, seed) };
    let summary = PowerCutTest {
        storage: case.storage(),
        open: &|storage| case.open(storage),
        check: &|storage| case.check(storage),
        workload: case.workload(),
        queues: 2,
        outcomes: 2,
        stride,
    }
    .run();
    let summary = summary.unwrap_or_else(|wrong| panic!("RINGDISK_SEED={seed}: {wrong}\n{:?}", chain.layers));
    let moved = case.moved.load(Ordering::Relaxed);
    eprintln!("{keeps:?}: the power was cut at {} moments, {moved} bytes had moved", summary.moments);
    assert!(case.done.load(Ordering::Relaxed) > 0 && case.failed.load(Ordering::Relaxed) == 0);
    moved
}

#[test]
fn the_power_may_be_cut_while_clusters_move_to_the_start_of_the_file() {
    let mut moved = 0;
    for (chain, seed) in compactable().iter().flat_map(|chain| common::seeds(2).map(move |seed| (chain, seed))) {
        moved += compacts(chain, Keeps::Nothing, seed, 1);
    }
    assert!(moved > 64 << 10);
}

#[test]
fn the_power_may_be_cut_while_clusters_move_beside_snapshots_and_bitmaps() {
    // Images of version 2 have no bitmaps.
    let chains = compactable();
    let mut moved = 0;
    for (index, keeps) in [(0, Keeps::Snapshot), (0, Keeps::Bitmaps), (1, Keeps::Bitmaps), (2, Keeps::Snapshot)] {
        for seed in common::seeds(1) {
            moved += compacts(&chains[index], keeps, seed, 2);
        }
    }
    assert!(moved > 0);
}

#[test]
fn a_full_file_breaks_the_compaction_and_not_the_disk() {
    runs_full(Does::Compact, &name(0), 2);
}
