//! A disk whose chain is exchanged, grows or is edited while a guest uses it.

use super::common::{Chain, Layer, SimOpener, name};
use super::{is_unused, open_overlay, overlay_name, record, recorded};
use block::{Completion, Disk, DiskInfo, DiskQueue, ErrorKind, Op, ReactorCtx, Result, StatusQuery, Tag, Task};
use format_qcow2::BitmapAction;
use ringdisk_image::{ClosedEdit, CopyWatch, Format, Image, ImageOptions, NewSnapshot, SnapshotName};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use testkit::{OpenedDisk, SimStorage, mix};

/// What is done to a disk while it is used.
struct Changes {
    storage: SimStorage,
    image: Arc<Image>,
    /// The layers' names, top first, as far down as they can be taken back.
    stack: Mutex<Vec<(String, Format)>>,
    unused: Mutex<Vec<String>>,
    most: usize,
    every: u64,
    grow_to: Option<u64>,
    edits: bool,
    requests: AtomicU64,
    is_running: AtomicBool,
    done: Arc<AtomicU64>,
}

impl Changes {
    async fn next(&self) {
        if let Some(size_bytes) = self.grow_to.filter(|size_bytes| self.image.info().size_bytes < *size_bytes) {
            self.image.grow_async(size_bytes).await.unwrap();
            self.done.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let dice = mix(self.done.load(Ordering::Relaxed), self.requests.load(Ordering::Relaxed));
        if self.edits {
            self.image.edit_online_async(&self.edit(dice)).await.unwrap();
            self.done.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let stack = self.stack.lock().unwrap().clone();
        let unused = if stack.len() == 1 || (stack.len() <= self.most && dice.is_multiple_of(2)) {
            // Those that were on top before a power cut hold data.
            let mut unused = self.unused.lock().unwrap();
            std::iter::from_fn(|| unused.pop()).find(|overlay| is_unused(&self.storage, overlay))
        } else {
            None
        };
        match unused {
            Some(overlay) => {
                let (below, format) = &stack[0];
                let opened = open_overlay(&self.storage, &overlay, below, *format);
                let commit = || record(&self.storage, &overlay);
                let results = ringdisk_image::put_overlay_async(vec![(Arc::clone(&self.image), opened)], commit).await;
                results.unwrap().into_iter().for_each(Result::unwrap);
                self.stack.lock().unwrap().insert(0, (overlay, Format::Qcow2));
            }
            None if stack.len() > 1 => {
                let commit = || record(&self.storage, &stack[1].0);
                let watch = CopyWatch::default();
                if dice.is_multiple_of(5) {
                    watch.cancel();
                    let cancelled = ringdisk_image::take_back_async(&self.image, &watch, commit).await.unwrap_err();
                    assert_eq!(cancelled.kind(), ErrorKind::Cancelled, "{cancelled}");
                    return;
                }
                ringdisk_image::take_back_async(&self.image, &watch, commit).await.unwrap();
                assert!(watch.total_bytes() > 0);
                assert_eq!(watch.done_bytes(), watch.total_bytes());
                self.stack.lock().unwrap().remove(0);
            }
            None => return,
        }
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bitmaps and internal snapshots.
impl Changes {
    fn edit(&self, dice: u64) -> ClosedEdit {
        let snapshots = self.image.online_snapshots().unwrap();
        let bitmaps = self.image.online_bitmaps().unwrap();
        let of_bitmap = |action| ClosedEdit::Bitmaps(vec![("b".to_owned(), action)]);
        match (dice % 6, bitmaps.first()) {
            (0 | 1, _) if snapshots.len() < 3 => ClosedEdit::CreateSnapshot(NewSnapshot::new(format!("s{dice}"))),
            (0..3, _) if !snapshots.is_empty() => {
                ClosedEdit::DeleteSnapshot(SnapshotName::Any(snapshots[dice as usize / 8 % snapshots.len()].id.clone()))
            }
            (_, None) => of_bitmap(BitmapAction::Add { granularity_bytes: Some(512) }),
            (3, Some(bitmap)) if !bitmap.inconsistent => of_bitmap(BitmapAction::Clear),
            (4, Some(bitmap)) if bitmap.recording => of_bitmap(BitmapAction::Disable),
            (4, Some(bitmap)) if !bitmap.inconsistent => of_bitmap(BitmapAction::Enable),
            _ => of_bitmap(BitmapAction::Remove),
        }
    }
}

/// A disk whose chain is exchanged while requests come in. Its guest goes on with the size that it knows.
struct Exchanging(Arc<Changes>, u64);

impl Disk for Exchanging {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.1, ..self.0.image.info() }
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let queue = self.0.image.open_queue(ctx)?;
        Ok(Box::new(ExchangingQueue { queue, ctx: Rc::clone(ctx), changes: Arc::clone(&self.0) }))
    }
}

struct ExchangingQueue {
    queue: Box<dyn DiskQueue>,
    ctx: Rc<dyn ReactorCtx>,
    changes: Arc<Changes>,
}

impl DiskQueue for ExchangingQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let requests = self.changes.requests.fetch_add(1, Ordering::Relaxed);
        self.queue.submit(tag, op);
        if requests % self.changes.every == 3 && !self.changes.is_running.swap(true, Ordering::Relaxed) {
            let changes = Arc::clone(&self.changes);
            self.ctx.spawn(Task::new(async move {
                changes.next().await;
                changes.is_running.store(false, Ordering::Relaxed);
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

/// What a test wants of the exchanges.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) overlays: usize,
    pub(super) most: usize,
    pub(super) every: u64,
    pub(super) grow_to: Option<u64>,
    /// Bitmaps and internal snapshots come and go instead.
    pub(super) edits: bool,
}

pub(super) fn format_of(chain: &Chain, top: &str) -> Format {
    match chain.top() {
        Layer::Raw(_) if top == name(0) => Format::Raw,
        _ => Format::Qcow2,
    }
}

pub(super) fn open_exchanging(
    chain: &Chain,
    storage: &SimStorage,
    pace: Pace,
    done: &Arc<AtomicU64>,
) -> Result<OpenedDisk> {
    let top = recorded(storage);
    let format = format_of(chain, &top);
    let table_cache_bytes = chain.table_cache_bytes;
    let options = ImageOptions::new(&top).with(|options| {
        options.format = Some(format);
        options.table_cache_bytes = table_cache_bytes;
    });
    let image = Arc::new(ringdisk_image::open(&options, &SimOpener(storage.clone()))?);
    if format == Format::Qcow2
        && let Some(size_bytes) = pace.grow_to
    {
        // The old size or the new one, and nothing comes to light in between.
        let old_bytes = chain.top().size_bytes();
        assert!([old_bytes, size_bytes].contains(&image.info().size_bytes));
        let runs = image.block_status(&StatusQuery::all())?.map(Result::unwrap);
        let added = runs.filter(|run| run.start >= old_bytes.next_multiple_of(4096));
        added.for_each(|run| assert!(run.zero, "{run:?}"));
    }
    let unused = (0..pace.overlays).map(overlay_name).filter(|overlay| *overlay > top || top == name(0));
    let changes = Changes {
        storage: storage.clone(),
        image: Arc::clone(&image),
        stack: Mutex::new(vec![(top.clone(), format)]),
        unused: Mutex::new(unused.rev().collect()),
        most: pace.most,
        every: pace.every,
        grow_to: pace.grow_to,
        edits: pace.edits,
        requests: AtomicU64::new(0),
        is_running: AtomicBool::new(false),
        done: Arc::clone(done),
    };
    Ok(OpenedDisk {
        disk: Arc::new(Exchanging(Arc::new(changes), chain.top().size_bytes())),
        close: Box::new(move || image.close()),
    })
}
