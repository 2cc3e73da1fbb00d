//! A disk that is copied, committed, moved and kept while guests use it, again and again.

use super::common::{SimOpener, name};
use block::{
    Completion, Disk, DiskInfo, DiskQueue, Error, ErrorKind, File, MetaIo, Op, PastEnd, ReactorCtx, Result, Tag, Task,
};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{
    ClosedEdit, Copied, CopyWatch, CreateOptions, Format, Image, ImageOptions, LayerGoes, LayerOpeners, MirrorEnd,
    MirrorScope, MirrorTarget, NewBelow, NewSnapshot, OpenedBase, OpenedOverlay, PointInTime, SnapshotName,
};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use testkit::{SimFileOptions, SimStorage, stamped};

/// A file that names the disk's image, as whoever serves disks keeps it.
const RECORD: &str = "record";
const TARGETS: usize = 6;
/// An image that a disk may rest on as well.
const OTHER_BASE: &str = "other-base";
const OTHER_BASE_BYTES: usize = 70 << 10;

fn target_name(index: usize) -> String {
    format!("target{index}")
}

pub(super) fn format_of(name: &str) -> Format {
    let index: usize = name.trim_start_matches(|char: char| char.is_alphabetic()).parse().unwrap();
    match (name.starts_with("target"), index % 2) {
        (true, 1) => Format::Raw,
        _ => Format::Qcow2,
    }
}

pub(super) fn add_targets(storage: &SimStorage, size_bytes: u64, cluster_size: u64) {
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

pub(super) fn recorded(storage: &SimStorage) -> String {
    let sector = storage.bytes(RECORD);
    String::from_utf8(sector.into_iter().take_while(|byte| *byte != 0).collect()).unwrap()
}

/// What is done to the disk, again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Does {
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

pub(super) struct Changing {
    pub(super) storage: SimStorage,
    pub(super) image: Arc<Image>,
    pub(super) does: Does,
    pub(super) every: u64,
    pub(super) requests: AtomicU64,
    pub(super) is_running: AtomicBool,
    pub(super) done: Arc<AtomicU64>,
    pub(super) failed: Arc<AtomicU64>,
    pub(super) moved: Arc<AtomicU64>,
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
        self.beside_guests(async |point: &PointInTime<'_>| point.change_snapshots_async(&edit, &mut || true).await)
            .await
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
pub(super) struct Untold;

impl LayerGoes for Untold {
    fn goes(&mut self) -> Result<()> {
        Ok(())
    }

    fn is_gone(&mut self) {}

    fn stays(&mut self) {}
}

pub(super) struct ChangingDisk(pub(super) Arc<Changing>);

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
