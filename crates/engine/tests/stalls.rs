//! One request is held up: what goes on meanwhile, and what must not.

mod common;

use block::{File, FileOp, FileQueue, PastEnd, ReactorCtx};
use common::fuse::{FILE_BYTES, STALL_FROM, StallingFile, content};
use common::{reactor, run_task};
use engine::{CacheMode, EngineKind, OpenOptions, ReactorThread};
use memory::{IoBuf, Mapping, Segment};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];

/// Runs `test` on each engine with a fresh file; skipped where FUSE cannot be mounted.
fn for_each_engine(test: impl Fn(EngineKind, &StallingFile, &Arc<dyn File>)) {
    for_each(&ENGINES, CacheMode::None, test);
}

/// As [`for_each_engine`]; what is not direct goes through the page cache, which has nothing of the file.
fn for_each(engines: &[EngineKind], cache: CacheMode, test: impl Fn(EngineKind, &StallingFile, &Arc<dyn File>)) {
    for &engine in engines {
        let Some(stalling) = StallingFile::mount() else {
            return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
        };
        let options = OpenOptions { engine, cache, read_only: true, lock: false, ..OpenOptions::default() };
        let path = if cache == CacheMode::None { stalling.path() } else { stalling.mappable() };
        let file = engine::open(&path, &options).unwrap();
        assert!(engine == EngineKind::Auto || file.info().engine.starts_with(&engine.to_string()));
        test(engine, &stalling, &file);
    }
}

fn read_op(offset: u64, data: &IoBuf) -> FileOp {
    FileOp::Read { offset, data: data.whole(), past_end: PastEnd::Fails }
}

/// Some engines learn from their first request that the file system does not take their flags.
fn warm_up(reactor: &ReactorThread, file: &Arc<dyn File>) {
    common::with_queue(reactor, file, |queue| async move {
        common::read(&queue, 0, 4096, PastEnd::Fails).await.unwrap();
    });
}

/// Starts a read of the stalling part into `mapping` and leaves it to itself.
fn start_stalled_read(reactor: &ReactorThread, file: &Arc<dyn File>, mapping: &Arc<Mapping>) {
    let (file, mapping) = (Arc::clone(file), Arc::clone(mapping));
    run_task(reactor, move |ctx| async move {
        let queue = file.open_queue(&ctx).unwrap();
        let mut buf = IoBuf::empty();
        let segment = Segment::new(mapping.as_ptr(), 4096);
        // SAFETY: the test keeps the mapping until the reactor has stopped.
        assert!(unsafe { buf.refill(std::iter::once(segment)) });
        drop(queue.start(read_op(STALL_FROM, &buf)));
        // Queue, future and buffer go here; the engine keeps what the kernel needs.
    });
}

fn first_byte(mapping: &Mapping) -> u8 {
    // SAFETY: the mapping has 4096 bytes.
    unsafe { mapping.as_ptr().read_volatile() }
}

#[test]
fn others_on_the_same_file_finish_while_one_request_is_stalled() {
    for_each_engine(others_finish);
}

#[test]
fn a_read_that_the_page_cache_has_to_wait_for_holds_up_no_other() {
    for_each(&[EngineKind::Auto, EngineKind::IoUring, EngineKind::Threads], CacheMode::Writeback, others_finish);
}

fn others_finish(engine: EngineKind, stalling: &StallingFile, file: &Arc<dyn File>) {
    let reactor = reactor("parallel");
    warm_up(&reactor, file);
    let (sender, stalled_end) = mpsc::channel();
    let theirs = Arc::clone(file);
    let others = run_task(&reactor, move |ctx| async move {
        let queue = theirs.open_queue(&ctx).unwrap();
        let buf = IoBuf::zeroed(4096);
        let stalled = queue.start(read_op(STALL_FROM, &buf));
        ctx.spawn(block::Task::new(async move { sender.send((stalled.await, buf.whole().to_vec()[0])).unwrap() }));
        let mut ends = Vec::new();
        let bufs: Vec<_> = (0..16).map(|_| IoBuf::zeroed(4096)).collect();
        for (index, buf) in bufs.iter().enumerate() {
            ends.push(queue.start(read_op(index as u64 * 8192, buf)));
        }
        for end in ends {
            end.await.unwrap();
        }
        bufs.iter().map(|buf| buf.whole().to_vec()[0]).collect::<Vec<_>>()
    });
    stalling.wait_for_stalled(1);
    // With a request in flight and nothing else to do it sleeps, and the completion will wake it.
    common::wait_until_idle(&reactor);
    assert!(stalled_end.try_recv().is_err(), "{engine}");
    assert_eq!(others, (0..16).map(|index| content(index * 8192)).collect::<Vec<_>>(), "{engine}");
    stalling.release();
    assert_eq!(stalled_end.recv().unwrap(), (Ok(()), content(STALL_FROM)), "{engine}");
    let stats = reactor.stats();
    assert_eq!((stats.requests, stats.completions), (18, 18), "{engine}: each request is counted once");
    reactor.stop().unwrap();
}

#[test]
fn a_dropped_future_leaves_its_memory_with_the_engine_until_the_kernel_is_done() {
    for_each_engine(|engine, stalling, file| {
        let reactor = reactor("dropped");
        warm_up(&reactor, file);
        let theirs = Arc::clone(file);
        let (sender, let_go) = mpsc::channel();
        let job = move |ctx: &Rc<dyn ReactorCtx>| {
            let queue: Rc<dyn FileQueue> = theirs.open_queue(ctx).unwrap();
            let mut buf = IoBuf::zeroed(4096);
            drop(queue.start(read_op(STALL_FROM, &buf)));
            drop(queue);
            // SAFETY: an empty list names no memory.
            assert!(!unsafe { buf.refill(std::iter::empty()) }, "the memory was free for reuse");
            ctx.spawn(block::Task::new(async move {
                // Looks again with each of the reactor's turns.
                std::future::poll_fn(|context| {
                    context.waker().wake_by_ref();
                    if buf.is_unique() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                sender.send(buf.whole().to_vec()[0]).unwrap();
            }));
        };
        block::run_and_wait(&*reactor.handle(), job).unwrap();
        stalling.wait_for_stalled(1);
        assert!(let_go.try_recv().is_err(), "{engine}: the engine let go of memory that is being read into");
        stalling.release();
        assert_eq!(let_go.recv().unwrap(), content(STALL_FROM), "{engine}");
        reactor.stop().unwrap();
    });
}

#[test]
fn a_reactor_stops_only_after_its_requests_have_ended() {
    for_each_engine(|engine, stalling, file| {
        let reactor = reactor("stopped");
        warm_up(&reactor, file);
        let (_fd, mapping) = Mapping::anonymous_file(c"stop", 4096).unwrap();
        let mapping = Arc::new(mapping);
        start_stalled_read(&reactor, file, &mapping);
        stalling.wait_for_stalled(1);
        let (sender, stopped) = mpsc::channel();
        let stopper = std::thread::spawn(move || {
            let handle = reactor.handle();
            reactor.stop().unwrap();
            assert!(handle.run(Box::new(|_| {})).is_err(), "a job for a reactor that has ended is refused");
            sender.send(()).unwrap();
        });
        assert!(
            stopped.recv_timeout(Duration::from_millis(100)).is_err(),
            "{engine}: it stopped with a read in flight"
        );
        assert_eq!(first_byte(&mapping), 0);
        stalling.release();
        stopped.recv().unwrap();
        stopper.join().unwrap();
        assert_eq!(first_byte(&mapping), content(STALL_FROM), "{engine}");
    });
}

/// Maps the stalling file to be read, and leaves it mapped.
fn map_whole(path: &std::path::Path) -> *mut libc::c_void {
    let file = std::fs::File::open(path).unwrap();
    let length = FILE_BYTES as usize;
    // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory.
    let mapped =
        unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped
}

/// Starts a write of each page of 17, in turn; two of them, the first and the one in the middle, of memory that stalls.
fn start_writes(reactor: &ReactorThread, file: Arc<dyn File>, slow: usize) -> mpsc::Receiver<(u64, block::IoResult)> {
    let (sender, ended) = mpsc::channel();
    let job = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = file.open_queue(ctx).unwrap();
        let quick = IoBuf::zeroed(4096);
        for index in 0..17 {
            let mut data = IoBuf::empty();
            let place = match index {
                0 => Some(SLOW[0]),
                8 => Some(SLOW[1]),
                _ => None,
            };
            if let Some(place) = place {
                let page = std::ptr::with_exposed_provenance_mut::<u8>(slow + place as usize);
                let segment = Segment::new(NonNull::new(page).unwrap(), 4096);
                // SAFETY: the test keeps the mapping, which is only read, for ever.
                assert!(unsafe { data.refill(std::iter::once(segment)) });
            }
            let data = if place.is_some() { data.whole() } else { quick.whole() };
            let write = queue.start(FileOp::Write { offset: index * 4096, data, fua: false });
            let sender = sender.clone();
            ctx.spawn(block::Task::new(async move { sender.send((index, write.await)).unwrap() }));
        }
    };
    block::run_and_wait(&*reactor.handle(), job).unwrap();
    ended
}

/// The kernel reads around what is touched: that is to stall, and not to be what the other one needs.
const SLOW: [u64; 2] = [STALL_FROM + (128 << 10), STALL_FROM + (384 << 10)];

#[test]
fn writes_that_have_ended_are_told_while_one_that_follows_them_in_turn_is_stalled() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    for engine in [EngineKind::Threads, EngineKind::Auto] {
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let file = engine::open(&path, &OpenOptions { engine, ..OpenOptions::default() }).unwrap();
        if engine == EngineKind::Auto && !file.info().engine.contains("go to a thread") {
            continue;
        }
        // Goes last: what stalls is let go before.
        let reactor = reactor("in turn");
        let Some(stalling) = StallingFile::mount() else {
            return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
        };
        // Memory that takes its time, as a guest's may while it is being migrated.
        let ended = start_writes(&reactor, file, map_whole(&stalling.mappable()).expose_provenance());
        let next = || ended.recv_timeout(Duration::from_secs(20)).expect("told, though one is stalled");
        stalling.wait_for_stalled(1);
        // It sleeps, and nobody wakes it up for the eight that end then.
        std::thread::sleep(Duration::from_millis(5));
        stalling.let_go();
        assert!((0..8).all(|index| next() == (index, Ok(()))));
        stalling.wait_for_stalled(1);
        assert!(ended.try_recv().is_err());
        stalling.release();
        assert!((8..17).all(|index| next() == (index, Ok(()))));
        reactor.stop().unwrap();
        let written = std::fs::read(&path).unwrap();
        assert_eq!([written[0], written[8 * 4096]], SLOW.map(content));
    }
}
