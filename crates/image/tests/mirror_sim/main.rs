//! Copies of a running disk on simulated storage: the power is cut at every write and flush while one disk after another
//! takes the former one's place, and the target of a copy runs full.

mod changing;
#[path = "../common/mod.rs"]
mod common;
mod held_read;

use block::{IoError, IoErrorKind, Result};
use changing::{Changing, ChangingDisk, Does, add_targets, format_of, recorded};
use common::{Chain, Layer, SimOpener, name};
use ringdisk_image::{BitmapAction, ClosedEdit, Format, ImageOptions, NewSnapshot};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use testkit::{
    FaultAction, FaultTest, OpKind, OpenedDisk, PowerCutTest, Request, Session, SimStorage, Workload, qcow2_check,
    stamped,
};

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

    /// Cuts the power at every `stride`th write and flush. Returns at how many moments that was.
    fn cut_power(&self, stride: u64) -> u64 {
        let test = PowerCutTest {
            storage: self.storage(),
            open: &|storage| self.open(storage),
            check: &|storage| self.check(storage),
            workload: self.workload(),
            queues: 2,
            outcomes: 2,
            stride,
        };
        let Chain { seed, layers, .. } = &self.chain;
        let summary = test.run();
        summary.unwrap_or_else(|wrong| panic!("{:?}, RINGDISK_SEED={seed}: {wrong}\n{layers:?}", self.does)).moments
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
        let moments = case.cut_power(1);
        let done = case.done.load(Ordering::Relaxed);
        eprintln!("the power was cut at {moments} moments, {done} moves");
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
            let moments = case.cut_power(if does == Does::Stream { 1 } else { 2 });
            let done = case.done.load(Ordering::Relaxed);
            eprintln!("{does:?}: the power was cut at {moments} moments, {done} done");
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
        let moments = case.cut_power(1);
        let gone = case.moved.load(Ordering::Relaxed);
        eprintln!("the power was cut at {moments} moments, {gone} layers had gone");
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

/// One operation on the top layer's file fails once while the disk changes, and guests go on. Requests may fail, or all of
/// them from then on. What was flushed is there, and the image is sound.
fn fails_once(does: Does, chain: &Chain, stride: u64) {
    let eio = IoError::EIO;
    let kinds = [
        (OpKind::Read, FaultAction::Fail(eio)),
        (OpKind::Write, FaultAction::Scatter(eio)),
        (OpKind::Flush, FaultAction::Fail(eio)),
        (OpKind::Discard, FaultAction::Scatter(eio)),
        (OpKind::SetLength, FaultAction::Fail(eio)),
    ];
    let (mut moments, mut failed) = (0, 0);
    for (seed, (kind, action)) in common::seeds(1).flat_map(|seed| kinds.map(|kind| (seed, kind))) {
        let case = Case::new(chain, does, seed);
        let summary = FaultTest {
            storage: &|| case.storage(),
            open: &|storage| case.open(storage),
            check: &|storage| case.check(storage),
            file: &name(0),
            kind,
            action,
            persistent: false,
            workload: case.workload(),
            queues: 2,
            stride,
        }
        .run();
        let summary = summary.unwrap_or_else(|wrong| panic!("{does:?}, RINGDISK_SEED={seed}: {wrong}"));
        moments += summary.moments;
        failed += case.failed.load(Ordering::Relaxed);
    }
    eprintln!("{does:?}: {moments} faults, {failed} changes failed");
    assert!(moments > 2 && failed > 0, "{does:?}: {moments} faults, {failed} changes failed");
}

#[test]
fn a_fault_while_clusters_move_breaks_the_compaction_and_not_the_disk() {
    for chain in compactable() {
        fails_once(Does::Compact, &chain, 5);
    }
}

#[test]
fn a_fault_while_layers_change_breaks_the_change_and_not_the_disk() {
    let over = |below| Chain::of(std::iter::once(Layer::qcow2(128 << 10, 4096)).chain(below).collect());
    fails_once(Does::Stream, &over(vec![Layer::Raw(100 << 10)]), 4);
    fails_once(Does::Rebase, &over(vec![Layer::Raw(100 << 10)]), 5);
    fails_once(Does::Commit, &over(Vec::new()), 4);
    fails_once(Does::Snapshot, &over(Vec::new()), 5);
    fails_once(Does::Backup, &over(Vec::new()), 5);
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
    let moments = case.cut_power(stride);
    let moved = case.moved.load(Ordering::Relaxed);
    eprintln!("{keeps:?}: the power was cut at {moments} moments, {moved} bytes had moved");
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
