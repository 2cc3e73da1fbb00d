//! One slow operation on the storage holds up nobody who does not need it, on real reactors: four queues on two of them,
//! on one qcow2 image whose file holds up one operation. (`stalls` asks the same of the simulator, which takes turns.)

use block::{Disk, Error, File, FileIo, FileOp, FileQueue, OpFlags, ReactorCtx, Result, Task};
use engine::{CacheMode, OpenOptions, Reactor, ReactorConfig};
use format_qcow2::CreateOptions as Qcow2Options;
use ringdisk_image::{CreateOptions, FileName, Format, Image, ImageOptions, Opener, Role};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use testkit::{Harness, Request, ThreadHarness, qcow2_check, stamped};

const CLUSTER: u64 = 4096;
/// What one L2 table maps.
const TABLE: u64 = CLUSTER / 8 * CLUSTER;
const QUEUES: u64 = 4;
/// The first table is the slow request's, the next are a queue's each.
const SIZE: u64 = (1 + QUEUES) * TABLE;
/// Requests of each queue, a few at a time, while one is held up.
const ROUNDS: u64 = 24;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    /// A write of a guest's data.
    Data,
    /// A write of a table.
    Table,
    Flush,
}

fn kind_of(op: &FileOp) -> Option<Kind> {
    match op {
        FileOp::Read { .. } => Some(Kind::Read),
        // What `stamped` begins with.
        FileOp::Write { data, .. } if data.to_vec().starts_with(b"testkit") => Some(Kind::Data),
        FileOp::Write { .. } => Some(Kind::Table),
        FileOp::Flush => Some(Kind::Flush),
        _ => None,
    }
}

#[derive(Debug)]
enum State {
    Open,
    /// The next operation of this kind is held up.
    Armed(Kind),
    /// One is; who waits for the gate to open.
    Holds(Option<Waker>),
}

#[derive(Debug)]
struct Gate(Mutex<State>);

impl Gate {
    fn arm(&self, kind: Kind) {
        *self.0.lock().unwrap() = State::Armed(kind);
    }

    fn open(&self) {
        let before = std::mem::replace(&mut *self.0.lock().unwrap(), State::Open);
        if let State::Holds(Some(waker)) = before {
            waker.wake();
        }
    }

    fn has_one(&self) -> bool {
        matches!(*self.0.lock().unwrap(), State::Holds(_))
    }

    /// Whether the gate holds `op` from now on.
    fn holds(&self, op: &FileOp) -> bool {
        let mut state = self.0.lock().unwrap();
        let takes = matches!(*state, State::Armed(kind) if kind_of(op) == Some(kind));
        if takes {
            *state = State::Holds(None);
        }
        takes
    }

    fn is_passed(&self, waker: &Waker) -> Poll<()> {
        match &mut *self.0.lock().unwrap() {
            State::Holds(waits) => {
                *waits = Some(waker.clone());
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }
}

#[derive(Debug)]
struct SlowFile {
    inner: Arc<dyn File>,
    gate: Arc<Gate>,
}

impl File for SlowFile {
    fn info(&self) -> &block::FileInfo {
        self.inner.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.inner.length_bytes()
    }

    fn hole_at(&self, offset: u64, length: u64) -> Result<(bool, u64)> {
        self.inner.hole_at(offset, length)
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        let (inner, gate) = (self.inner.open_queue(ctx)?, Arc::clone(&self.gate));
        Ok(Rc::new(SlowQueue { inner, gate, ctx: Rc::clone(ctx) }))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.inner.open_blocking()
    }
}

struct SlowQueue {
    inner: Rc<dyn FileQueue>,
    gate: Arc<Gate>,
    ctx: Rc<dyn ReactorCtx>,
}

impl FileQueue for SlowQueue {
    fn push(&self, io: FileIo) {
        if !self.gate.holds(&io.op) {
            return self.inner.push(io);
        }
        let (inner, gate) = (Rc::clone(&self.inner), Arc::clone(&self.gate));
        self.ctx.spawn(Task::new(async move {
            poll_fn(|context| gate.is_passed(context.waker())).await;
            inner.push(io);
        }));
    }
}

/// The gates of the files, by name.
struct SlowOpener(BTreeMap<&'static str, Arc<Gate>>);

impl Opener for SlowOpener {
    fn open(&self, name: &FileName, role: Role) -> Result<Arc<dyn File>> {
        let path = name.path().unwrap();
        let options = OpenOptions::default().with(|options| {
            options.cache = CacheMode::Writeback;
            options.read_only = role != Role::Writable;
        });
        let inner = engine::open(path, &options)?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let gate = self.0.get(name).ok_or_else(|| Error::new(block::ErrorKind::Io, "no such file here"))?;
        Ok(Arc::new(SlowFile { inner, gate: Arc::clone(gate) }))
    }
}

/// An image over a base full of data, with some clusters of its own in each table.
fn make(directory: &Path) {
    std::fs::write(directory.join("base"), stamped(1, 0, SIZE as usize)).unwrap();
    let options = Qcow2Options::default().with(|options| {
        options.size_bytes = SIZE;
        options.cluster_size = CLUSTER;
        options.backing_file = Some("base".to_owned());
        options.backing_format = Some("raw".to_owned());
    });
    let top = directory.join("top");
    engine::create(&top, 0).unwrap();
    ringdisk_image::create(&engine::open(&top, &OpenOptions::default()).unwrap(), &CreateOptions::Qcow2(options))
        .unwrap();
}

struct Setup {
    directory: tempfile::TempDir,
    gates: BTreeMap<&'static str, Arc<Gate>>,
}

impl Setup {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path());
        let gates = ["top", "base"].map(|name| (name, Arc::new(Gate(Mutex::new(State::Open)))));
        let this = Self { directory, gates: gates.into() };
        this.with_queues(|_, harness, queues| {
            for table in 0..=QUEUES {
                let data = stamped(2, table * TABLE, 8 * CLUSTER as usize);
                call(harness, queues[0], Request::write(table * TABLE, data));
            }
        });
        this
    }

    /// Opens the image anew (no table is loaded) with two queues on each of two reactors; closes it, and looks whether it
    /// is sound.
    fn with_queues(&self, work: impl FnOnce(&Image, &mut ThreadHarness, &[u64])) {
        let path = self.directory.path().join("top");
        let options = ImageOptions::new(&path).with(|options| options.format = Some(Format::Qcow2));
        let image: Arc<Image> = Arc::new(ringdisk_image::open(&options, &SlowOpener(self.gates.clone())).unwrap());
        let disk = Arc::clone(&image) as Arc<dyn Disk>;
        let config = |index| ReactorConfig::default().with(|config| config.name = format!("test-{index}"));
        let reactors: Vec<_> = (0..2).map(|index| Reactor::spawn(config(index)).unwrap()).collect();
        let mut harness = ThreadHarness::new(reactors.iter().map(|reactor| reactor.handle()).collect());
        let queues: Vec<_> = (0..QUEUES as usize).map(|index| harness.open(&disk, index).unwrap()).collect();
        work(&image, &mut harness, &queues);
        let violations: Vec<_> = queues.iter().flat_map(|queue| harness.violations(*queue)).collect();
        assert!(violations.is_empty(), "{violations:?}");
        queues.into_iter().for_each(|queue| harness.close(queue));
        drop((harness, disk));
        reactors.into_iter().for_each(|reactor| reactor.stop().unwrap());
        image.close().unwrap();
        let report = qcow2_check(&std::fs::read(&path).unwrap()).unwrap();
        report.sound().unwrap();
        assert_eq!(report.leaked_clusters, 0);
    }
}

const FIRST: u64 = u64::MAX;

fn call(harness: &mut ThreadHarness, queue: u64, request: Request) -> Vec<u8> {
    harness.submit(queue, vec![(0, request)]);
    let turn = harness.turn();
    let (_, reply) = turn.replies.into_iter().next().expect("a reply");
    reply.result.unwrap();
    reply.data
}

/// So many requests end, none of them that which is held up.
fn all_end(harness: &mut ThreadHarness, mut due: usize, wait_for: &str) {
    while due > 0 {
        let turn = harness.turn();
        assert!(!turn.idle, "{due} requests wait, {wait_for}");
        for (_, reply) in turn.replies {
            assert_ne!(reply.tag, FIRST, "it was held up");
            reply.result.unwrap();
            due -= 1;
        }
    }
}

/// Where a queue's table begins.
fn table_of(queue: usize) -> u64 {
    (1 + queue as u64) * TABLE
}

/// What a queue asks for in a round, in its own table: reads and overwrites of what is allocated, reads of the layer below,
/// allocations with and without a copy, zeroes, and now and then a discard.
fn others(queue: usize, round: u64) -> Vec<Request> {
    let at = |cluster: u64| table_of(queue) + cluster * CLUSTER;
    let new = 16 + round * 8;
    let mut requests = vec![
        Request::read(at(0), CLUSTER as usize),
        Request::write(at(1), stamped(10 + round, at(1), CLUSTER as usize)),
        Request::read(at(new), CLUSTER as usize),
        Request::write(at(new + 1), stamped(10 + round, at(new + 1), CLUSTER as usize)),
        Request::write(at(new + 2) + 512, stamped(10 + round, at(new + 2) + 512, 512)),
        Request::WriteZeroes { offset: at(new + 3), length: 2 * CLUSTER, may_unmap: true, flags: OpFlags::NONE },
    ];
    if round.is_multiple_of(4) {
        requests.push(Request::Discard { offset: at(2 + round / 4), length: CLUSTER });
    }
    requests
}

/// Holds up the first operation of `kind` that `slow` needs of `file`; meanwhile all queues get what they ask for.
fn holds_nobody_up(file: &'static str, kind: Kind, before: &[Request], slow: &Request, and: &[Request]) {
    for slow_queue in 0..QUEUES as usize {
        let setup = Setup::new();
        setup.with_queues(|_, harness, queues| {
            before.iter().for_each(|request| drop(call(harness, queues[slow_queue], request.clone())));
            let gate = &setup.gates[file];
            gate.arm(kind);
            harness.submit(queues[slow_queue], vec![(FIRST, slow.clone())]);
            let deadline = Instant::now() + Duration::from_secs(60);
            while !gate.has_one() {
                assert!(Instant::now() < deadline, "what is slow needs no {kind:?} of '{file}'");
                std::thread::yield_now();
            }
            for round in 0..ROUNDS {
                let mut due = 0;
                for (index, queue) in queues.iter().enumerate() {
                    let asked = others(index, round).into_iter().chain(and.iter().cloned());
                    let requests: Vec<_> = (0..).zip(asked).collect();
                    due += requests.len();
                    harness.submit(*queue, requests);
                }
                all_end(harness, due, &format!("round {round}: for a {kind:?} of '{file}'"));
            }
            gate.open();
            let turn = harness.turn();
            assert_eq!(turn.replies.iter().map(|(_, reply)| reply.tag).collect::<Vec<_>>(), [FIRST]);
            assert!(turn.replies.iter().all(|(_, reply)| reply.result.is_ok()));
            check(harness, queues);
        });
        // And of what was written nothing is lost.
        setup.with_queues(|_, harness, queues| check(harness, queues));
    }
}

/// What the queues have written is there, and what they have not is what it was.
fn check(harness: &mut ThreadHarness, queues: &[u64]) {
    for (index, queue) in queues.iter().enumerate() {
        let start = table_of(index);
        let found = call(harness, *queue, Request::read(start, TABLE as usize));
        let mut expected = stamped(1, start, TABLE as usize);
        expected[..8 * CLUSTER as usize].copy_from_slice(&stamped(2, start, 8 * CLUSTER as usize));
        for request in (0..ROUNDS).flat_map(|round| others(index, round)) {
            let (offset, length) = request.range();
            let range = (offset - start) as usize..(offset - start + length) as usize;
            match request {
                Request::Write { data, .. } => expected[range].copy_from_slice(&data),
                Request::WriteZeroes { .. } | Request::Discard { .. } => expected[range].fill(0),
                _ => {}
            }
        }
        let differs = (0..expected.len()).find(|at| found[*at] != expected[*at]);
        assert_eq!(differs, None, "in queue {index}'s table");
    }
}

/// The slow request's own table.
fn write_at(cluster: u64, length: usize) -> Request {
    Request::write(cluster * CLUSTER, stamped(9, cluster * CLUSTER, length))
}

#[test]
fn an_allocation_whose_table_takes_long_to_load() {
    holds_nobody_up("top", Kind::Read, &[], &write_at(8, CLUSTER as usize), &[]);
}

#[test]
fn an_allocation_that_takes_long_to_copy_what_is_below() {
    let same_table = Request::read(0, 512);
    holds_nobody_up("base", Kind::Read, &[], &write_at(8, 512), &[same_table, Request::Flush]);
}

#[test]
fn an_allocation_whose_data_take_long_to_write() {
    let loaded = [Request::read(0, 512)];
    let and = [Request::read(512, 512), Request::Flush];
    holds_nobody_up("top", Kind::Data, &loaded, &write_at(8, CLUSTER as usize), &and);
}

#[test]
fn tables_of_allocations_that_take_long_to_write() {
    let allocated = [write_at(8, CLUSTER as usize), write_at(9, 512)];
    holds_nobody_up("top", Kind::Table, &allocated, &Request::Flush, &[Request::read(512, 512)]);
}

#[test]
fn a_flush_of_allocations_that_takes_long() {
    let allocated = [write_at(8, CLUSTER as usize), write_at(9, 512)];
    holds_nobody_up("top", Kind::Flush, &allocated, &Request::Flush, &[Request::read(512, 512)]);
}

#[test]
fn reads_and_overwrites_of_what_is_allocated_end_while_somebody_holds_the_image_s_lock() {
    let setup = Setup::new();
    setup.with_queues(|image, harness, queues| {
        let asked = |index: usize, fua: bool| {
            let at = |cluster: u64| table_of(index) + cluster * CLUSTER;
            let write = |offset: u64, length: u64| Request::Write {
                offset,
                data: stamped(3, offset, length as usize).into(),
                pieces: Vec::new(),
                flags: OpFlags::from_fua(fua),
            };
            vec![
                Request::read(at(0), 512),
                // Two clusters, which lie apart or together; and what is below.
                Request::read(at(1) + 512, CLUSTER as usize),
                Request::read(at(20), CLUSTER as usize),
                write(at(3), 512),
                write(at(4) + 512, CLUSTER),
            ]
        };
        // The first write of an image, and tables that are not in memory yet, go the long way.
        for (index, queue) in queues.iter().enumerate() {
            asked(index, false).into_iter().for_each(|request| drop(call(harness, *queue, request)));
        }
        call(harness, queues[0], Request::Flush);
        let (begun, has_begun) = mpsc::channel();
        let (over, is_over) = mpsc::channel();
        std::thread::scope(|scope| {
            let holder = scope.spawn(move || {
                image.hold_lock_for_test(|| {
                    begun.send(()).unwrap();
                    // Let go in the end also where all wait for it.
                    is_over.recv_timeout(Duration::from_secs(20)).is_ok()
                })
            });
            has_begun.recv().unwrap();
            for fua in [false, true] {
                let mut due = 0;
                for (index, queue) in queues.iter().enumerate() {
                    let requests: Vec<_> = (0..).zip(asked(index, fua)).collect();
                    due += requests.len();
                    harness.submit(*queue, requests);
                }
                all_end(harness, due, &format!("for the image's lock; durable: {fua}"));
            }
            let _ = over.send(());
            assert!(holder.join().unwrap(), "somebody waited for the image's lock");
        });
    });
}
