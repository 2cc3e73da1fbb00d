//! The reactor: sleeping, waking, pollers that come and go.

mod common;

use block::{BatchEnd, Done, FileIo, FileOp, FileQueue, PastEnd, Poller, PollerId, ReactorCtx, Sink, run_and_wait};
use common::{reactor, run_task, wait_until_idle, with_queue};
use ringdisk_engine::{EngineKind, OpenOptions, Reactor, ReactorConfig};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Shared {
    work: AtomicU64,
    armed: AtomicBool,
}

/// Work that another thread makes and announces, only while it is asked to, through a descriptor nobody reads.
struct Bell {
    shared: Arc<Shared>,
    event: OwnedFd,
    done: mpsc::Sender<u64>,
}

impl Poller for Bell {
    fn poll(&mut self) -> bool {
        let work = self.shared.work.swap(0, Ordering::SeqCst);
        if work > 0 {
            self.done.send(work).unwrap();
        }
        work > 0
    }

    fn arm(&mut self) -> bool {
        self.shared.armed.store(true, Ordering::SeqCst);
        self.shared.work.load(Ordering::SeqCst) > 0
    }

    fn disarm(&mut self) {
        self.shared.armed.store(false, Ordering::SeqCst);
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

#[test]
fn an_idle_reactor_makes_no_turns_and_a_poller_in_need_gets_it_out_of_sleep_every_time() {
    let reactor = reactor("bell");
    let shared = Arc::new(Shared::default());
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let bell = event.try_clone().unwrap();
    let (done, received) = mpsc::channel();
    let theirs = Arc::clone(&shared);
    let add = move |ctx: &Rc<dyn ReactorCtx>| {
        ctx.add_poller(Rc::new(RefCell::new(Bell { shared: theirs, event, done }))).unwrap();
    };
    run_and_wait(&*reactor.handle(), add).unwrap();
    for round in 0..200 {
        if round % 50 == 0 {
            wait_until_idle(&reactor);
            let deadline = Instant::now() + Duration::from_secs(60);
            while !shared.armed.load(Ordering::SeqCst) {
                assert!(Instant::now() < deadline, "it does not fall asleep");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        shared.work.store(1, Ordering::SeqCst);
        if shared.armed.load(Ordering::SeqCst) {
            rustix::io::write(&bell, &1_u64.to_ne_bytes()).unwrap();
        }
        assert_eq!(received.recv(), Ok(1));
    }
    assert!(reactor.stats().sleeps > 0);
    reactor.stop().unwrap();
}

#[test]
fn a_sleeping_reactor_is_woken_by_jobs_by_wakers_and_by_completions() {
    let dir = tempfile::tempdir().unwrap();
    let reactor = reactor("sleeper");
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let path = dir.path().join(engine.to_string());
        ringdisk_engine::create(&path, 1 << 16).unwrap();
        let file =
            ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.engine = engine)).unwrap();
        for round in 0..20 {
            if round % 10 == 0 {
                wait_until_idle(&reactor);
            }
            // A flush always goes to another thread: the reactor sleeps over it, or spins.
            with_queue(&reactor, &file, |queue| async move {
                common::write(&queue, 0, &[1; 4096]).await.unwrap();
                queue.start(FileOp::Flush).await.unwrap();
            });
        }
    }
    let list = Arc::new(block::WaitList::default());
    let open = Arc::new(AtomicBool::new(false));
    let (their_list, their_open) = (Arc::clone(&list), Arc::clone(&open));
    let (sender, ended) = mpsc::channel();
    let spawn = move |ctx: &Rc<dyn ReactorCtx>| {
        ctx.spawn(block::Task::new(async move {
            their_list.until(|| their_open.load(Ordering::SeqCst).then_some(())).await;
            sender.send(()).unwrap();
        }));
    };
    run_and_wait(&*reactor.handle(), spawn).unwrap();
    wait_until_idle(&reactor);
    open.store(true, Ordering::SeqCst);
    list.wake_all();
    ended.recv().unwrap();
    reactor.stop().unwrap();
}

/// Polls until told to leave; tells when it is dropped.
struct Guest {
    ctx: Rc<dyn ReactorCtx>,
    id: Rc<Cell<Option<PollerId>>>,
    polls_left: u32,
    dropped: mpsc::Sender<u32>,
}

impl Poller for Guest {
    fn poll(&mut self) -> bool {
        if self.polls_left == 0 {
            if let Some(id) = self.id.get() {
                self.ctx.remove_poller(id);
            }
            return false;
        }
        self.polls_left -= 1;
        true
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.dropped.send(self.polls_left).unwrap();
    }
}

#[test]
fn a_poller_that_removes_itself_is_dropped_and_one_that_stays_goes_with_the_reactor() {
    let reactor = reactor("guests");
    let (dropped, drops) = mpsc::channel();
    for polls in [3, u32::MAX] {
        let dropped = dropped.clone();
        let add = move |ctx: &Rc<dyn ReactorCtx>| {
            let id = Rc::new(Cell::new(None));
            let guest = Guest { ctx: Rc::clone(ctx), id: Rc::clone(&id), polls_left: polls, dropped };
            id.set(Some(ctx.add_poller(Rc::new(RefCell::new(guest))).unwrap()));
        };
        run_and_wait(&*reactor.handle(), add).unwrap();
    }
    assert_eq!(drops.recv(), Ok(0));
    assert!(drops.try_recv().is_err());
    reactor.stop().unwrap();
    assert!(drops.try_recv().is_ok_and(|left| left > 0));
}

#[test]
fn a_panic_in_a_poller_ends_the_reactor_with_an_error_after_its_requests() {
    struct Panics;
    impl Poller for Panics {
        fn poll(&mut self) -> bool {
            panic!("as the test wants it")
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 16).unwrap();
    let options = OpenOptions::default().with(|options| options.cache = ringdisk_engine::CacheMode::None);
    let file = ringdisk_engine::open(&path, &options).unwrap();
    let reactor = reactor("panics");
    let theirs = Arc::clone(&file);
    let add = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = theirs.open_queue(ctx).unwrap();
        let data = memory::IoBuf::from_aligned(memory::AlignedBuf::copy_of(&[7; 4096])).whole();
        drop(queue.start(FileOp::Write { offset: 0, data, fua: true }));
        ctx.add_poller(Rc::new(RefCell::new(Panics))).unwrap();
    };
    run_and_wait(&*reactor.handle(), add).unwrap();
    let handle = reactor.handle();
    assert!(reactor.stop().is_err());
    assert!(run_and_wait(&*handle, |_| ()).is_err(), "nobody waits for a job that never runs");
    assert_eq!(std::fs::read(&path).unwrap()[..4096], [7; 4096]);
}

/// Tasks keep others away from what they write, by locks for example: these must not go while a request is in flight.
#[test]
fn after_a_panic_tasks_are_dropped_only_when_their_requests_have_ended() {
    struct Lock(Arc<AtomicBool>);
    impl Drop for Lock {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let Some(storage) = common::fuse::StallingFile::mount() else {
        return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
    };
    let file = ringdisk_engine::open(&storage.path(), &OpenOptions::default().with(|options| options.read_only = true));
    let (file, reactor, is_free) = (file.unwrap(), reactor("panics"), Arc::new(AtomicBool::new(false)));
    let lock = Lock(Arc::clone(&is_free));
    let work = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = file.open_queue(ctx).unwrap();
        ctx.spawn(block::Task::new(async move {
            let _lock = lock;
            let data = memory::IoBuf::zeroed(4096).whole();
            let offset = common::fuse::STALL_FROM;
            let _ = queue.start(FileOp::Read { offset, data, past_end: block::PastEnd::Fails }).await;
        }));
    };
    reactor.handle().run(Box::new(work)).unwrap();
    storage.wait_for_stalled(1);
    reactor.handle().run(Box::new(|_| panic!("as the test wants it"))).unwrap();
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| reactor.stop());
        std::thread::sleep(Duration::from_millis(200));
        assert!(!is_free.load(Ordering::SeqCst), "the request is still in flight");
        storage.release();
        assert!(stopping.join().unwrap().is_err(), "it panicked");
    });
    assert!(is_free.load(Ordering::SeqCst));
}

/// What an owner drops when it is told may panic: with it go the owner's own affairs, not those of the other requests that
/// ended in the same turn.
#[test]
fn a_panic_of_who_is_told_of_an_end_ends_the_reactor_and_no_request_is_waited_for_in_vain() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("as the test wants it")
        }
    }
    for (engine, cache) in [
        (EngineKind::IoUring, ringdisk_engine::CacheMode::None),
        (EngineKind::LinuxAio, ringdisk_engine::CacheMode::None),
        (EngineKind::Threads, ringdisk_engine::CacheMode::Writeback),
    ] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, vec![7; 1 << 16]).unwrap();
        let options = OpenOptions::default().with(|options| (options.engine, options.cache) = (engine, cache));
        let Ok(file) = ringdisk_engine::open(&path, &options) else { continue };
        let reactor = reactor("panics");
        let add = move |ctx: &Rc<dyn ReactorCtx>| {
            let queue = file.open_queue(ctx).unwrap();
            for index in 0..16 {
                let data = memory::IoBuf::from_aligned(memory::AlignedBuf::zeroed(4096)).whole();
                let write = FileOp::Write { offset: index * 4096, data, fua: false };
                match index {
                    // Nobody awaits it, so what it keeps is dropped with its end.
                    0 => drop(queue.start_keeping(write, Rc::new(Panics))),
                    _ => drop(queue.start(write)),
                }
            }
        };
        run_and_wait(&*reactor.handle(), add).unwrap();
        assert!(reactor.stop().is_err(), "{engine}");
        assert_eq!(std::fs::read(&path).unwrap(), vec![0; 1 << 16], "{engine}");
    }
}

#[test]
fn a_blocking_queue_works_on_a_reactors_own_thread_beside_its_requests() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 16).unwrap();
    let options = OpenOptions::default().with(|options| options.cache = ringdisk_engine::CacheMode::None);
    let file = ringdisk_engine::open(&path, &options).unwrap();
    let reactor = reactor("blocking");
    let bytes = run_task(&reactor, move |ctx| async move {
        let queue = file.open_queue(&ctx).unwrap();
        let blocking = file.open_blocking().unwrap();
        let data = memory::IoBuf::from_aligned(memory::AlignedBuf::copy_of(&[1; 4096])).whole();
        let in_flight = queue.start(FileOp::Write { offset: 0, data, fua: false });
        // Its first read-modify-write: it waits for the aligned write, on the thread that has to complete it.
        common::write(&blocking, 100, &[2; 50]).await.unwrap();
        in_flight.await.unwrap();
        common::read(&queue, 0, 4096, PastEnd::Fails).await.unwrap()
    });
    for (at, byte) in bytes.iter().enumerate() {
        assert!(*byte == 1 || ((100..150).contains(&at) && *byte == 2), "byte {at} is {byte}");
    }
    reactor.stop().unwrap();
}

#[test]
fn more_requests_at_once_than_the_rings_hold_all_end_and_go_in_few_calls() {
    const COUNT: u64 = 6000;
    let dir = tempfile::tempdir().unwrap();
    for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
        let path = dir.path().join(engine.to_string());
        std::fs::write(&path, vec![9; 1 << 20]).unwrap();
        let options = OpenOptions::default().with(|options| {
            options.engine = engine;
            options.cache = ringdisk_engine::CacheMode::None;
        });
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let reactor = reactor("flood");
        with_queue(&reactor, &file, |queue| async move {
            let bufs: Vec<_> = (0..COUNT).map(|_| memory::IoBuf::zeroed(4096)).collect();
            let start = |(index, buf): (usize, &memory::IoBuf)| {
                let offset = index as u64 % 256 * 4096;
                queue.start(FileOp::Read { offset, data: buf.whole(), past_end: PastEnd::Fails })
            };
            let ends: Vec<_> = bufs.iter().enumerate().map(start).collect();
            for end in ends {
                end.await.unwrap();
            }
            assert!(bufs.iter().all(|buf| buf.whole().to_vec() == [9; 4096]));
        });
        let stats = reactor.stats();
        assert_eq!((stats.requests, stats.completions), (COUNT, COUNT), "{engine}");
        assert!(stats.system_calls < COUNT, "{engine}: {stats:?}");
        reactor.stop().unwrap();
    }
}

/// Keeps a file busy, and looks what the turn before has taken of the kernel.
struct Load {
    reactor: Arc<ringdisk_engine::ReactorThread>,
    queue: Rc<dyn FileQueue>,
    batch_end: BatchEnd,
    sink: Rc<Sink>,
    bufs: Vec<memory::IoBuf>,
    idle: Vec<u64>,
    left: usize,
    calls: u64,
    most_calls: u64,
    done: Option<mpsc::Sender<u64>>,
}

impl Poller for Load {
    fn poll(&mut self) -> bool {
        let calls = self.reactor.stats().system_calls;
        self.most_calls = self.most_calls.max(calls - std::mem::replace(&mut self.calls, calls));
        let mut ended = Vec::new();
        self.sink.take(&mut ended);
        self.idle.extend(ended.iter().map(|(token, result)| {
            assert_eq!(*result, Ok(()));
            *token
        }));
        let mut batch = 0;
        while self.left > 0
            && let Some(token) = self.idle.pop()
        {
            let op = FileOp::Read {
                offset: self.left as u64 % 256 * 4096,
                data: self.bufs[token as usize].whole(),
                past_end: PastEnd::Fails,
            };
            let done = Done::Sink { sink: Rc::clone(&self.sink), token };
            self.queue.push(FileIo::new(op, done));
            (self.left, batch) = (self.left - 1, batch + 1);
            if self.batch_end.take() {
                break;
            }
        }
        if self.left == 0
            && self.idle.len() == self.bufs.len()
            && let Some(done) = self.done.take()
        {
            done.send(self.most_calls).unwrap();
        }
        batch > 0
    }
}

#[test]
fn a_turn_takes_one_system_call_at_most_whatever_a_poller_pushes() {
    let dir = tempfile::tempdir().unwrap();
    for (engine, cache) in [
        (EngineKind::IoUring, ringdisk_engine::CacheMode::None),
        (EngineKind::LinuxAio, ringdisk_engine::CacheMode::None),
        (EngineKind::IoUring, ringdisk_engine::CacheMode::Writeback),
        // In memory, as most of `/dev/shm` is: holes, which are not copied through a mapping.
        (EngineKind::Auto, ringdisk_engine::CacheMode::Writeback),
    ] {
        let in_memory = (engine == EngineKind::Auto).then(|| tempfile::tempdir_in("/dev/shm").unwrap());
        let path = in_memory.as_ref().unwrap_or(&dir).path().join("load");
        match in_memory {
            Some(_) => ringdisk_engine::create(&path, 1 << 20).unwrap(),
            None => std::fs::write(&path, vec![9; 1 << 20]).unwrap(),
        }
        let file = ringdisk_engine::open(
            &path,
            &OpenOptions::default().with(|options| {
                options.engine = engine;
                options.cache = cache;
            }),
        )
        .unwrap();
        let reactor = Arc::new(reactor("load"));
        let (done, ended) = mpsc::channel();
        let theirs = Arc::clone(&reactor);
        let add = move |ctx: &Rc<dyn ReactorCtx>| {
            let load = Load {
                queue: file.open_queue(ctx).unwrap(),
                batch_end: ctx.batch_end(),
                sink: Sink::new(),
                bufs: (0..64).map(|_| memory::IoBuf::zeroed(4096)).collect(),
                idle: (0..64).collect(),
                left: 20_000,
                calls: theirs.stats().system_calls,
                most_calls: 0,
                done: Some(done),
                reactor: theirs,
            };
            ctx.add_poller(Rc::new(RefCell::new(load))).unwrap()
        };
        let id = run_and_wait(&*reactor.handle(), add).unwrap();
        assert_eq!(ended.recv().unwrap(), 1, "{engine}, {cache}");
        run_and_wait(&*reactor.handle(), move |ctx| ctx.remove_poller(id)).unwrap();
        // The turn in which the poller is dropped has ended then; it must not be the last to hold the reactor.
        run_and_wait(&*reactor.handle(), |_| ()).unwrap();
    }
}

#[test]
fn under_cache_unsafe_a_flush_reaches_no_engine_and_elsewhere_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 16).unwrap();
    for cache in ringdisk_engine::CacheMode::NAMES {
        let options = OpenOptions::default().with(|options| options.cache = cache.parse().unwrap());
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let reactor = reactor("flush");
        with_queue(&reactor, &file, |queue| async move { queue.start(FileOp::Flush).await.unwrap() });
        assert_eq!(reactor.stats().requests, u64::from(cache != "unsafe"), "{cache}");
        reactor.stop().unwrap();
    }
}

#[test]
fn durable_writes_in_flight_at_once_share_syncs_and_one_alone_needs_none() {
    const COUNT: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let engines = [EngineKind::IoUring, EngineKind::Threads];
    // Because of the drive, or of each request.
    for (engine, sync) in engines.into_iter().flat_map(|engine| [(engine, true), (engine, false)]) {
        let path = dir.path().join(format!("{engine}-{sync}"));
        ringdisk_engine::create(&path, 1 << 20).unwrap();
        let options = OpenOptions::default().with(|options| {
            options.engine = engine;
            options.sync = sync;
        });
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let reactor = reactor("durable");
        let write = |offset, bytes: &[u8]| FileOp::Write {
            offset,
            data: memory::IoBuf::from_aligned(memory::AlignedBuf::copy_of(bytes)).whole(),
            fua: true,
        };
        with_queue(&reactor, &file, move |queue| async move { queue.start(write(0, &[1; 4096])).await.unwrap() });
        // Beside writes that are not to be durable it leaves the news that data were lost to a sync.
        let alone = if sync { 1 } else { 2 };
        assert_eq!(reactor.stats().requests, alone, "{engine}");
        with_queue(&reactor, &file, move |queue| async move {
            let byte = |index: usize| [index as u8; 4096];
            let all: Vec<_> = (0..COUNT).map(|index| queue.start(write(index as u64 * 4096, &byte(index)))).collect();
            for write in all {
                write.await.unwrap();
            }
            let bytes = common::read(&queue, 0, COUNT * 4096, PastEnd::Fails).await.unwrap();
            assert!(bytes.chunks(4096).enumerate().all(|(index, chunk)| chunk == byte(index)));
        });
        let syncs = reactor.stats().requests - alone - COUNT as u64 - 1;
        assert!((1..=COUNT as u64 / 2).contains(&syncs), "{engine}: {syncs} syncs for {COUNT} writes");
        reactor.stop().unwrap();
    }
}

/// Of `linux/magic.h`.
const XFS: i64 = 0x5846_5342;
const BTRFS: i64 = 0x9123_683e;
const TMPFS: i64 = 0x0102_1994;

#[test]
fn writes_that_the_page_cache_takes_one_by_one_go_to_threads_and_the_file_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 20).unwrap();
    // XFS and btrfs take them without waiting, and files in memory are copied from and to.
    let file_system = rustix::fs::statfs(&path).unwrap().f_type;
    let takes_them = [XFS, BTRFS, TMPFS].contains(&(file_system as i64));
    for engine in [EngineKind::Auto, EngineKind::IoUring] {
        let file = ringdisk_engine::open(
            &path,
            &OpenOptions::default().with(|options| {
                options.engine = engine;
            }),
        )
        .unwrap();
        let by_thread = file.info().engine.contains("; writes go to threads");
        let has_uring = file.info().engine.starts_with("io_uring") && !file.info().engine.contains("all goes to");
        let expected = has_uring && !takes_them;
        assert_eq!(by_thread, expected, "{}, on {file_system:x}", file.info().engine);
        let reactor = reactor("writes");
        if has_uring {
            common::wait_until_a_ring_reads(&reactor, &file);
        }
        let before = reactor.stats().worker_calls;
        with_queue(&reactor, &file, |queue| async move {
            common::write(&queue, 8192, &[7; 4096]).await.unwrap();
            assert_eq!(common::read(&queue, 8192, 4096, PastEnd::Fails).await.unwrap(), [7; 4096]);
        });
        // A file in memory is neither's.
        if has_uring {
            assert_eq!(reactor.stats().worker_calls - before, u64::from(by_thread), "{}", file.info().engine);
        }
        reactor.stop().unwrap();
    }
}

#[test]
fn a_thread_that_spins_or_sleeps_misses_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 20).unwrap();
    let options = OpenOptions::default().with(|options| options.engine = EngineKind::Threads);
    let file = ringdisk_engine::open(&path, &options).unwrap();
    for poll_max_us in [0, 20, 100] {
        let config = ReactorConfig::default().with(|config| {
            config.name = "pauses".into();
            config.poll_max_us = poll_max_us;
        });
        let reactor = Reactor::spawn(config).unwrap();
        with_queue(&reactor, &file, |queue| async move {
            for round in 0..2000_u64 {
                // Some two at a time, one of which goes in turn; pauses to either side of how long a thread spins.
                let write = queue.start(FileOp::Write {
                    offset: round % 256 * 4096,
                    data: memory::IoBuf::zeroed(4096).whole(),
                    fua: false,
                });
                if round % 3 == 0 {
                    common::read(&queue, 0, 512, PastEnd::Fails).await.unwrap();
                }
                write.await.unwrap();
                std::thread::sleep(Duration::from_micros(round * 7 % 120 * (round % 2)));
            }
        });
        assert_eq!(reactor.stats().worker_calls, 2000 + 667);
        reactor.stop().unwrap();
    }
}
