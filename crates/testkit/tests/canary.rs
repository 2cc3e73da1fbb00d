//! The test of the tests: a plain disk passes everything, and each way of breaking it is noticed.

use block::{
    Completion, Disk, DiskInfo, DiskQueue, Done, File, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, Op,
    PastEnd, ReactorCtx, Result, Run, Runs, Sink, StatusQuery, Tag, Topology,
};
use ringdisk_testkit::conformance::{self, Report, Subject};
use ringdisk_testkit::{
    FaultAction, FaultTest, OpKind, OpenedDisk, PowerCutTest, SimFileOptions, SimHarness, SimStorage, Workload,
};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const SIZE: u64 = 1 << 18;

/// What is wrong with the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    None,
    /// A write goes out in parts that cut through sectors.
    Tears,
    /// A flush does nothing.
    IgnoresFlush,
    /// FUA does nothing.
    IgnoresFua,
    /// PREFLUSH does nothing.
    IgnoresPreflush,
    /// A write completes before it has happened.
    CompletesEarly,
    /// A failed write is told as a success.
    HidesErrors,
    /// A zeroing is rounded up to 4 KiB.
    ZeroesTooMuch,
    /// A discard leaves garbage.
    DiscardsIntoGarbage,
    /// Ranges are checked with arithmetic that wraps.
    WrapsAround,
    /// Writes pass a read-only disk.
    IgnoresReadOnly,
    /// Some completion is forgotten.
    LosesACompletion,
    /// What is in flight is counted too early.
    Miscounts,
    /// Each queue has reads of its own that it never refreshes.
    CachesPerQueue,
    /// Writes rewrite the sector before them with what it was when they began.
    TouchesNeighbours,
    /// Its cache can be switched, and nobody hears of it.
    KeepsNews,
    /// The block status knows of no data.
    HidesData,
    /// The block status ends early.
    ForgetsTheEnd,
}

#[derive(Debug)]
struct PlainDisk {
    file: Arc<dyn File>,
    defect: Defect,
    read_only: bool,
    is_durable: AtomicBool,
    submitted: Arc<AtomicU64>,
}

impl Disk for PlainDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: SIZE,
            logical_block_bytes: 512,
            topology: Topology::default(),
            read_only: self.read_only,
            volatile_cache: !self.is_durable.load(Ordering::Relaxed),
            discard: !self.read_only,
            discard_granularity_bytes: 512,
            write_zeroes: !self.read_only,
            serial: String::new(),
        }
    }

    fn set_volatile_cache(&self, volatile: bool) {
        if self.defect == Defect::KeepsNews {
            self.is_durable.store(!volatile, Ordering::Relaxed);
        }
    }

    fn block_status(&self, query: &StatusQuery) -> Result<Runs<'_>> {
        let lost = if self.defect == Defect::ForgetsTheEnd { 512 } else { 0 };
        let run = if self.defect == Defect::HidesData { Run::of_nothing } else { Run::of_data };
        Ok(query.answered_with(SIZE - lost, run))
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(PlainQueue {
            file: self.file.open_queue(ctx)?,
            sink: Sink::new(),
            flying: BTreeMap::new(),
            refused: Vec::new(),
            cache: BTreeMap::new(),
            defect: self.defect,
            read_only: self.read_only,
            submitted: Arc::clone(&self.submitted),
        }))
    }
}

struct PlainQueue {
    file: Rc<dyn FileQueue>,
    sink: Rc<Sink>,
    /// Parts in flight, the result so far, the request.
    flying: BTreeMap<Tag, (usize, IoResult, Op)>,
    refused: Vec<Completion>,
    cache: BTreeMap<u64, Vec<u8>>,
    defect: Defect,
    read_only: bool,
    submitted: Arc<AtomicU64>,
}

impl PlainQueue {
    fn validate(&self, op: &Op) -> IoResult {
        let Some((offset, length)) = op.range() else { return Ok(()) };
        if op.is_write() && self.read_only && self.defect != Defect::IgnoresReadOnly {
            return Err(IoError::new(IoErrorKind::ReadOnly));
        }
        let end = match self.defect {
            Defect::WrapsAround => Some(offset.wrapping_add(length)),
            _ => offset.checked_add(length),
        };
        let aligned = (offset | length) % 512 == 0;
        let inside = end.is_some_and(|end| end <= SIZE);
        if length == 0 || (aligned && inside) { Ok(()) } else { Err(IoError::new(IoErrorKind::OutOfRange)) }
    }

    fn parts(&self, op: &Op) -> Vec<FileOp> {
        let is_preflush = op.flags().is_preflush() && self.defect != Defect::IgnoresPreflush;
        let mut parts = if is_preflush { vec![FileOp::Flush] } else { Vec::new() };
        parts.extend(self.own_parts(op));
        parts
    }

    fn own_parts(&self, op: &Op) -> Vec<FileOp> {
        match op.clone() {
            Op::Read { offset, data, .. } => vec![FileOp::Read { offset, data, past_end: PastEnd::Zeros }],
            Op::Write { offset, data, .. } if self.defect == Defect::Tears => {
                let length = data.length_bytes();
                let parts = (0..length).step_by(384).map(|skip| FileOp::Write {
                    offset: offset + skip as u64,
                    data: data.slice(skip, 384.min(length - skip)),
                    fua: false,
                });
                parts.collect()
            }
            Op::Write { offset, data, flags, .. } => {
                let mut parts = Vec::new();
                if self.defect == Defect::TouchesNeighbours && offset >= 512 {
                    let old = memory::IoBuf::zeroed(512).whole();
                    let read = FileOp::Read { offset: offset - 512, data: old.clone(), past_end: PastEnd::Zeros };
                    parts.push(read);
                    parts.push(FileOp::Write { offset: offset - 512, data: old, fua: false });
                }
                parts.push(FileOp::Write { offset, data, fua: flags.is_fua() && self.defect != Defect::IgnoresFua });
                parts
            }
            Op::Flush if self.defect == Defect::IgnoresFlush => Vec::new(),
            Op::Flush => vec![FileOp::Flush],
            Op::Discard { offset, length } if self.defect == Defect::DiscardsIntoGarbage => {
                let data = memory::IoBuf::from_aligned(memory::AlignedBuf::copy_of(&vec![7; length as usize])).whole();
                vec![FileOp::Write { offset, data, fua: false }]
            }
            Op::Discard { offset, length } => vec![FileOp::Discard { offset, length }],
            Op::SecureErase { .. } => unreachable!("the suite asks for none"),
            Op::WriteZeroes { offset, length, may_unmap, flags } => {
                let rounded = if self.defect == Defect::ZeroesTooMuch { length.next_multiple_of(4096) } else { length };
                let length = rounded.min(SIZE.saturating_sub(offset));
                let data = memory::IoBuf::zeroed(length as usize).whole();
                let fua_write = FileOp::Write { offset, data, fua: true };
                vec![if flags.is_fua() { fua_write } else { FileOp::WriteZeroes { offset, length, may_unmap } }]
            }
        }
    }

    fn end(&mut self, tag: Tag, result: IoResult, done: &mut Vec<Completion>) {
        let Some((left, sum, _)) = self.flying.get_mut(&tag) else { return };
        *left -= 1;
        *sum = sum.and(result);
        if *left > 0 {
            return;
        }
        let Some((_, sum, op)) = self.flying.remove(&tag) else { return };
        let hides = self.defect == Defect::HidesErrors && op.is_write();
        if let (Op::Read { offset, data, .. }, Defect::CachesPerQueue) = (&op, self.defect) {
            let bytes = self.cache.entry(*offset).or_insert_with(|| data.to_vec());
            data.copy_from_slice(0, bytes);
        }
        drop(op);
        done.push(Completion { tag, result: if hides { Ok(()) } else { sum } });
    }
}

impl DiskQueue for PlainQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let number = self.submitted.fetch_add(1, Ordering::Relaxed);
        let valid = self.validate(&op);
        let parts = if valid.is_ok() { self.parts(&op) } else { Vec::new() };
        let early = self.defect == Defect::CompletesEarly && op.is_write();
        if parts.is_empty() || early {
            self.refused.push(Completion { tag, result: valid });
        } else {
            self.flying.insert(tag, (parts.len(), Ok(()), op));
        }
        if self.defect == Defect::LosesACompletion && number % 19 == 7 {
            return;
        }
        for op in parts {
            let token = if early { Tag::MAX - 1 } else { tag };
            self.file.push(FileIo::new(op, Done::Sink { sink: Rc::clone(&self.sink), token }));
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        done.append(&mut self.refused);
        let mut ended = Vec::new();
        self.sink.take(&mut ended);
        for (token, result) in ended {
            self.end(token, result, done);
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        let refused = if self.defect == Defect::Miscounts { 0 } else { self.refused.len() };
        self.flying.len() + refused
    }
}

fn open(storage: &SimStorage, defect: Defect, read_only: bool) -> Arc<dyn Disk> {
    let file = storage.file("disk").unwrap();
    Arc::new(PlainDisk { file, defect, read_only, is_durable: AtomicBool::new(false), submitted: Arc::default() })
}

fn storage() -> SimStorage {
    let storage = SimStorage::new(1);
    storage.create("disk", SIZE, SimFileOptions::default());
    storage
}

fn conform(defect: Defect) -> Report {
    let mut make = |read_only| Some(open(&storage(), defect, read_only));
    let mut subject = Subject { make: &mut make, keeps_data: true, seed: 1 };
    conformance::run(&mut SimHarness::new(1, 2), &mut subject)
}

fn cut(defect: Defect, seed: u64) -> std::result::Result<ringdisk_testkit::Summary, String> {
    PowerCutTest {
        storage: storage(),
        open: &|storage| Ok(OpenedDisk::from(open(storage, defect, false))),
        check: &|_| Ok(()),
        workload: Workload::new(seed, 60, 1 << 15, 4096),
        queues: 2,
        outcomes: 4,
        stride: 1,
    }
    .run()
}

fn break_storage(
    defect: Defect,
    kind: OpKind,
    action: FaultAction,
) -> std::result::Result<ringdisk_testkit::Summary, String> {
    FaultTest {
        storage: &storage,
        open: &|storage| Ok(OpenedDisk::from(open(storage, defect, false))),
        check: &|_| Ok(()),
        file: "disk",
        kind,
        action,
        persistent: false,
        workload: Workload::new(1, 40, 1 << 15, 4096),
        queues: 2,
        stride: 1,
    }
    .run()
}

#[test]
fn a_plain_disk_passes_everything() {
    let report = conform(Defect::None);
    report.assert_passed();
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
    for seed in 0..5 {
        let summary = cut(Defect::None, seed).unwrap();
        assert!(summary.moments > 50, "{summary:?}");
    }
    for kind in OpKind::ALL {
        for action in
            [FaultAction::Fail(IoError::EIO), FaultAction::Short(IoError::EIO), FaultAction::Scatter(IoError::EIO)]
        {
            let summary = break_storage(Defect::None, kind, action).unwrap();
            assert!(summary.errors >= summary.moments, "{kind:?} {action:?} {summary:?}");
        }
    }
}

#[test]
fn the_suite_notices_each_defect_that_a_guest_could_see() {
    for defect in [
        Defect::Tears,
        Defect::CompletesEarly,
        Defect::ZeroesTooMuch,
        Defect::DiscardsIntoGarbage,
        Defect::WrapsAround,
        Defect::IgnoresReadOnly,
        Defect::LosesACompletion,
        Defect::Miscounts,
        Defect::CachesPerQueue,
        Defect::TouchesNeighbours,
        Defect::KeepsNews,
        Defect::HidesData,
        Defect::ForgetsTheEnd,
    ] {
        assert!(!conform(defect).failures.is_empty(), "{defect:?} passed");
    }
}

#[test]
fn power_cuts_notice_each_defect_that_only_they_could() {
    for defect in [
        Defect::IgnoresFlush,
        Defect::IgnoresFua,
        Defect::IgnoresPreflush,
        Defect::TouchesNeighbours,
        Defect::CompletesEarly,
    ] {
        assert!((0..5).any(|seed| cut(defect, seed).is_err()), "{defect:?} passed");
    }
    conform(Defect::IgnoresFlush).assert_passed();
}

#[test]
fn faults_notice_an_error_that_is_hidden() {
    assert!(break_storage(Defect::HidesErrors, OpKind::Write, FaultAction::Fail(IoError::EIO)).is_err());
}
