//! What requests take of memory and of a reactor's turn: copies wait for room, and what takes the processor long is done
//! elsewhere or in steps.

mod common;

use block::{Disk, File, FileIo, FileQueue, Op, ReactorCtx, Result, Task, Work, run_and_wait};
use common::{Chain, Layer, name};
use engine::{OpenOptions, Reactor, ReactorConfig};
use memory::{AlignedBuf, BufferAccount, BufferBudget, IoBuf};
use ringdisk_image::{CreateOptions, FileName, Format, Image, ImageOptions, NullDisk, Opener, PackedCluster, Role};
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::ThreadId;
use testkit::{Fault, FaultAction, Harness, OpKind, Request, Session, SimFileOptions, SimReactor, SimStorage, stamped};

const CLUSTER: u64 = 64 << 10;
const COUNT: u64 = 64;

/// An overlay over data, whose disk has this part of a budget.
fn overlay(buffers: BufferAccount) -> (Chain, SimStorage) {
    let chain = Chain::of(vec![Layer::qcow2(COUNT * CLUSTER, CLUSTER), Layer::Raw(COUNT * CLUSTER)]);
    let chain = Chain { file: SimFileOptions { buffers, ..SimFileOptions::default() }, ..chain };
    let storage = chain.storage();
    (chain, storage)
}

/// Small writes, each to a cluster of its own, which is copied.
fn submit_copies(session: &mut Session) {
    let queue = session.queues[0];
    let request = |index: u64| Request::write(index * CLUSTER + 512, stamped(7, index * CLUSTER + 512, 512));
    session.harness.submit(queue, (0..COUNT).map(|index| (index, request(index))).collect());
}

/// How many requests end before nothing happens any more.
fn ended(session: &mut Session) -> usize {
    let mut count = 0;
    loop {
        let turn = session.harness.turn();
        turn.replies.iter().for_each(|(_, reply)| assert_eq!(reply.result, Ok(())));
        count += turn.replies.len();
        if turn.idle && turn.replies.is_empty() {
            return count;
        }
    }
}

#[test]
fn copies_of_a_disk_whose_storage_hangs_wait_for_room_and_leave_other_disks_theirs() {
    let budget = BufferBudget::new(1 << 20);
    let [(slow, slow_storage), (quick, quick_storage)] = [budget.account(), budget.account()].map(overlay);
    slow_storage.inject(&name(1), Fault::from_nth(OpKind::Read, 0, FaultAction::Stall));
    let open = |chain: Chain| move |storage: &SimStorage| chain.open(storage);
    let mut hung = Session::open(&slow_storage, &open(slow), 1, 1).unwrap();
    submit_copies(&mut hung);
    assert_eq!(ended(&mut hung), 0);
    let stats = budget.stats();
    assert!(stats.used_bytes >= 256 << 10 && stats.used_bytes <= 512 << 10 && stats.waiting > 32, "{stats:?}");

    let mut other = Session::open(&quick_storage, &open(quick), 1, 1).unwrap();
    submit_copies(&mut other);
    assert_eq!(ended(&mut other), COUNT as usize);
    assert!(budget.stats().peak_bytes <= 1 << 20, "{:?}", budget.stats());

    slow_storage.clear_faults();
    assert_eq!(ended(&mut hung), COUNT as usize);
    for (session, storage) in [(&mut hung, &slow_storage), (&mut other, &quick_storage)] {
        let (bytes, base) = (session.read_all().unwrap(), storage.bytes(&name(1)));
        for (index, cluster) in bytes.chunks(CLUSTER as usize).enumerate() {
            let at = index as u64 * CLUSTER;
            let from = |skip: usize| &base[at as usize + skip..];
            assert!(cluster[..512] == from(0)[..512] && cluster[512..1024] == stamped(7, at + 512, 512));
            assert!(cluster[1024..] == from(1024)[..cluster.len() - 1024]);
        }
    }
    hung.close().unwrap();
    other.close().unwrap();
    assert_eq!((budget.stats().used_bytes, budget.stats().waiting), (0, 0));
}

#[test]
fn a_long_read_of_data_and_zeros_by_turns_zeroes_a_part_of_them_at_a_time() {
    const LARGE: u64 = 256 << 10;
    let chain = Chain::of(vec![Layer::qcow2(COUNT * LARGE, LARGE)]);
    let storage = chain.storage();
    let open = |storage: &SimStorage| chain.open(storage);
    let mut session = Session::open(&storage, &open, 1, 1).unwrap();
    for index in (0..COUNT).step_by(2) {
        session.call(Request::write(index * LARGE, vec![0x11; LARGE as usize])).unwrap();
    }
    session.close().unwrap();

    let reactor = SimReactor::new(1);
    reactor.complete_inline(0);
    let opened = chain.open(&storage).unwrap();
    let mut queue = opened.disk.open_queue(&reactor.ctx()).unwrap();
    let mut done = Vec::new();
    let mut finish = |queue: &mut Box<dyn block::DiskQueue>, mut look: Box<dyn FnMut()>| {
        while queue.harvest(&mut done) == 0 {
            reactor.step();
            look();
        }
        assert_eq!(done.pop().unwrap().result, Ok(()));
    };
    // The tables are in memory then.
    queue.submit(0, Op::read(0, IoBuf::zeroed(512).whole()));
    finish(&mut queue, Box::new(|| ()));
    let window = IoBuf::zeroed((COUNT * LARGE) as usize).whole();
    window.fill(0xee);
    let zeros = |window: &memory::Window| window.to_vec().iter().filter(|byte| **byte == 0).count();
    queue.submit(1, Op::read(0, window.clone()));
    let mut before = zeros(&window);
    assert!(before <= 2 << 20, "{before} bytes are zeroed at once");
    let watched = window.clone();
    finish(
        &mut queue,
        Box::new(move || {
            let now = zeros(&watched);
            assert!(now - before <= 2 << 20, "{} bytes are zeroed in a turn", now - before);
            before = now;
        }),
    );
    for (index, cluster) in window.to_vec().chunks(LARGE as usize).enumerate() {
        let expected = if index % 2 == 0 { 0x11 } else { 0 };
        assert!(cluster.iter().all(|byte| *byte == expected), "cluster {index}");
    }
}

/// Computations wait here while it is closed.
#[derive(Debug, Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opens: Condvar,
}

impl Gate {
    fn close(&self, close: bool) {
        *self.is_closed.lock().unwrap() = close;
        self.opens.notify_all();
    }

    fn pass(&self) {
        drop(self.opens.wait_while(self.is_closed.lock().unwrap(), |is_closed| *is_closed).unwrap());
    }
}

/// A file that tells where its queues' computations run.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn File>,
    threads: Arc<Mutex<HashSet<ThreadId>>>,
    count: Arc<AtomicUsize>,
    gate: Arc<Gate>,
}

impl File for Watched {
    fn info(&self) -> &block::FileInfo {
        self.inner.info()
    }

    fn length_bytes(&self) -> Result<u64> {
        self.inner.length_bytes()
    }

    fn buffers(&self) -> &BufferAccount {
        self.inner.buffers()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> Result<Rc<dyn FileQueue>> {
        let (threads, count, gate) = (Arc::clone(&self.threads), Arc::clone(&self.count), Arc::clone(&self.gate));
        Ok(Rc::new(WatchedQueue { inner: self.inner.open_queue(ctx)?, threads, count, gate }))
    }

    fn open_blocking(&self) -> Result<Rc<dyn FileQueue>> {
        self.inner.open_blocking()
    }
}

struct WatchedQueue {
    inner: Rc<dyn FileQueue>,
    threads: Arc<Mutex<HashSet<ThreadId>>>,
    count: Arc<AtomicUsize>,
    gate: Arc<Gate>,
}

impl FileQueue for WatchedQueue {
    fn push(&self, io: FileIo) {
        self.inner.push(io);
    }

    fn run_aside(&self, work: Work) {
        let (threads, count, gate) = (Arc::clone(&self.threads), Arc::clone(&self.count), Arc::clone(&self.gate));
        self.inner.run_aside(Box::new(move || {
            gate.pass();
            threads.lock().unwrap().insert(std::thread::current().id());
            count.fetch_add(1, Ordering::Relaxed);
            work();
        }));
    }
}

impl Opener for Watched {
    fn open(&self, _name: &FileName, _role: Role) -> Result<Arc<dyn File>> {
        let (threads, count, gate) = (Arc::clone(&self.threads), Arc::clone(&self.count), Arc::clone(&self.gate));
        Ok(Arc::new(Self { inner: Arc::clone(&self.inner), threads, count, gate }))
    }
}

/// What a cluster of the image holds.
fn content(index: u64) -> Vec<u8> {
    (0..CLUSTER).map(|at| (at / 16 % 13 + index) as u8).collect()
}

/// Fills an image with compressed clusters.
fn compress_all(image: &Arc<Image>, reactor: &engine::ReactorThread) {
    let (sender, written) = mpsc::channel();
    let image = Arc::clone(image);
    let write = move |ctx: &Rc<dyn ReactorCtx>| {
        let writer = image.compressed_writer(ctx).unwrap();
        ctx.spawn(Task::new(async move {
            let (mut compressor, mut output) = (writer.compressor().unwrap(), vec![0; CLUSTER as usize]);
            for index in 0..COUNT {
                let length = compressor.compress(&content(index), &mut output).unwrap();
                let cluster = PackedCluster { guest_offset: index * CLUSTER, length_bytes: length as u32 };
                let data = IoBuf::from_aligned(AlignedBuf::copy_of(&output[..length])).whole();
                writer.write(&[cluster], &data).await.unwrap();
            }
            sender.send(()).unwrap();
        }));
    };
    run_and_wait(&*reactor.handle(), write).unwrap();
    written.recv().unwrap();
}

/// An image of compressed clusters, whose disk has all of a budget.
struct Packed {
    budget: BufferBudget,
    opener: Watched,
    image: Arc<Image>,
    reactor: engine::ReactorThread,
    _directory: tempfile::TempDir,
}

impl Packed {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("compressed");
        engine::create(&path, 0).unwrap();
        let budget = BufferBudget::new(1 << 20);
        let options = OpenOptions::default().with(|options| options.buffers = budget.account());
        let inner = engine::open(&path, &options).unwrap();
        let options = format_qcow2::CreateOptions::default().with(|options| {
            options.size_bytes = COUNT * CLUSTER;
            options.cluster_size = CLUSTER;
        });
        ringdisk_image::create(&inner, &CreateOptions::Qcow2(options)).unwrap();
        let opener = Watched { inner, threads: Arc::default(), count: Arc::default(), gate: Arc::default() };
        let options = ImageOptions::new(&path).with(|options| options.format = Some(Format::Qcow2));
        let image = Arc::new(ringdisk_image::open(&options, &opener).unwrap());
        let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
        compress_all(&image, &reactor);
        Self { budget, opener, image, reactor, _directory: directory }
    }
}

#[test]
fn clusters_are_decompressed_beside_the_reactor_within_the_budget() {
    let Packed { budget, opener, image, reactor, _directory } = Packed::new();
    let disk = Arc::clone(&image) as Arc<dyn Disk>;
    let (sender, results) = mpsc::channel();
    let read = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = block::DiskIo::open(&*disk, ctx).unwrap();
        // Odd parts of all clusters at once.
        for index in 0..COUNT {
            let (io, sender) = (Rc::clone(&io), sender.clone());
            ctx.spawn(Task::new(async move {
                let mut buf = AlignedBuf::zeroed(CLUSTER as usize - 1024);
                let length = buf.len();
                let result = io.read(index * CLUSTER + 512, &mut buf, length).await;
                sender.send((index, result, buf.to_vec())).unwrap();
            }));
        }
        std::thread::current().id()
    };
    let reactor_thread = run_and_wait(&*reactor.handle(), read).unwrap();
    for (index, result, bytes) in results.iter().take(COUNT as usize) {
        assert!(result.is_ok() && bytes == content(index)[512..CLUSTER as usize - 512], "cluster {index}: {result:?}");
    }
    assert_eq!(opener.count.load(Ordering::Relaxed), COUNT as usize);
    // And in one request.
    let (disk, (sender, results)) = (Arc::clone(&image) as Arc<dyn Disk>, mpsc::channel());
    let read = move |ctx: &Rc<dyn ReactorCtx>| {
        let io = block::DiskIo::open(&*disk, ctx).unwrap();
        ctx.spawn(Task::new(async move {
            let mut buf = AlignedBuf::zeroed((COUNT * CLUSTER) as usize);
            let length = buf.len();
            let result = io.read(0, &mut buf, length).await;
            sender.send((result, buf.to_vec())).unwrap();
        }));
    };
    run_and_wait(&*reactor.handle(), read).unwrap();
    let (result, bytes) = results.recv().unwrap();
    assert!(result.is_ok() && bytes == (0..COUNT).flat_map(content).collect::<Vec<_>>());
    assert_eq!(opener.count.load(Ordering::Relaxed), 2 * COUNT as usize);
    assert!(!opener.threads.lock().unwrap().contains(&reactor_thread), "the reactor decompresses");
    reactor.stop().unwrap();
    image.close().unwrap();
    let stats = budget.stats();
    assert!(stats.peak_bytes <= 1 << 20 && stats.used_bytes == 0 && stats.peak_bytes > 256 << 10, "{stats:?}");
}

/// Only a part of them is at work, as many as take 64 MiB: the others wait in a line.
#[test]
fn full_queues_of_reads_of_compressed_clusters_wait_in_a_line_and_another_disk_waits_for_none_of_them() {
    const ALL: u64 = 3000;
    const PART: u64 = 512;
    /// A read at work takes a cluster, and its compressed form.
    const AT_WORK_MAX: usize = (64 << 20) / CLUSTER as usize;
    let Packed { opener, image, reactor, budget, _directory } = Packed::new();
    let room = budget.clone();
    let (gate, disk) = (Arc::clone(&opener.gate), Arc::clone(&image) as Arc<dyn Disk>);
    let (sender, results) = mpsc::channel();
    let at = |tag: u64| tag % COUNT * CLUSTER + PART;
    let test = move |ctx: &Rc<dyn ReactorCtx>| {
        let quiet = NullDisk::new(1 << 20, String::new());
        let (mut queue, mut quiet) = (disk.open_queue(ctx).unwrap(), quiet.open_queue(ctx).unwrap());
        ctx.spawn(Task::new(async move {
            let memory = IoBuf::zeroed((ALL * PART) as usize);
            let read = |tag: u64| Op::read(at(tag), memory.whole().slice((tag * PART) as usize, PART as usize));
            let mut done = Vec::new();
            // The tables are in memory then.
            queue.submit(0, read(0));
            while queue.harvest(&mut done) == 0 {
                block::yield_now().await;
            }
            done.clear();
            gate.close(true);
            (0..ALL).for_each(|tag| queue.submit(tag, read(tag)));
            // Not one cluster is decompressed while another disk serves a thousand requests.
            let mut answered = 0;
            for tag in 0..1000 {
                quiet.submit(tag, Op::read(0, IoBuf::zeroed(512).whole()));
                // The reads' tasks get their turn in between.
                block::yield_now().await;
                while quiet.harvest(&mut done) == 0 {
                    block::yield_now().await;
                }
                answered += done.drain(..).filter(|completion| completion.result.is_ok()).count();
            }
            let early = queue.harvest(&mut done);
            let in_flight = queue.in_flight() as u64;
            // Those at work have room in the budget, or wait for it there. The line asks for none.
            let at_budget = room.stats().waiting;
            gate.close(false);
            while queue.in_flight() > 0 {
                queue.harvest(&mut done);
                block::yield_now().await;
            }
            sender.send((answered, early, in_flight, at_budget, done, memory.whole().to_vec())).unwrap();
        }));
    };
    run_and_wait(&*reactor.handle(), test).unwrap();
    let (answered, early, in_flight, at_budget, mut done, bytes) = results.recv().unwrap();
    assert_eq!((answered, early), (1000, 0), "answers of the other disk, and clusters before them");
    assert_eq!(in_flight, ALL);
    assert!(at_budget > AT_WORK_MAX / 2 && at_budget <= AT_WORK_MAX, "{at_budget} reads wait for room");
    done.sort_by_key(|completion| completion.tag);
    assert!(done.iter().all(|completion| completion.result.is_ok()));
    assert!(done.iter().map(|completion| completion.tag).eq(0..ALL), "each ends once");
    for (tag, part) in (0..ALL).zip(bytes.chunks(PART as usize)) {
        assert!(part == &content(tag % COUNT)[PART as usize..2 * PART as usize], "read {tag}");
    }
    reactor.stop().unwrap();
    image.close().unwrap();
    assert_eq!((budget.stats().used_bytes, budget.stats().waiting), (0, 0));
}
