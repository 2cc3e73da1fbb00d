//! One request is held up: what goes on meanwhile, and what must not.

mod common;

use block::{File, FileOp, FileQueue, PastEnd, ReactorCtx};
use common::fuse::{FILE_BYTES, STALL_FROM, StallingFile, content};
use common::loop_device::{LoopDevice, Mounted};
use common::{reactor, run_task};
use memory::{IoBuf, Mapping, Segment};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions, ReactorThread};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
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
        let options = OpenOptions::default().with(|options| {
            options.engine = engine;
            options.cache = cache;
            options.read_only = true;
            options.lock = false;
        });
        let path = if cache == CacheMode::None { stalling.path() } else { stalling.mappable() };
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let (told, takes_none) = (&file.info().engine, "takes nothing that must not wait");
        let chosen = if engine == EngineKind::Auto { EngineKind::Threads } else { engine };
        assert!(told.starts_with(&chosen.to_string()), "{told}");
        let is_of_ring = matches!(engine, EngineKind::Auto | EngineKind::IoUring);
        assert_eq!(told.contains(takes_none), is_of_ring, "{told}");
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

/// Pushes reads of the whole file that nobody waits for.
fn push_reads(reactor: &ReactorThread, file: &Arc<dyn File>, count: u64) {
    common::with_queue(reactor, file, move |queue| async move {
        for index in 0..count {
            drop(queue.start(read_op(index % 100 * 512, &IoBuf::zeroed(512))));
        }
    });
}

#[test]
fn files_whose_reads_hang_leave_workers_for_others() {
    let Some(stalling) = (0..3).map(|_| StallingFile::mount()).collect::<Option<Vec<_>>>() else {
        return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
    };
    let options = OpenOptions::default().with(|options| {
        (options.engine, options.read_only, options.lock) = (EngineKind::Threads, true, false);
    });
    let reactor = reactor("shared");
    for mounted in &stalling {
        let file = ringdisk_engine::open(&mounted.path(), &options).unwrap();
        warm_up(&reactor, &file);
        mounted.hold();
        push_reads(&reactor, &file, 200);
    }
    // The first has all that is nobody's, the others what is theirs.
    for (mounted, count) in stalling.iter().zip([40, 8, 8]) {
        mounted.wait_for_stalled(count);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("quick");
    std::fs::write(&path, [7; 51_200]).unwrap();
    let quick = ringdisk_engine::open(&path, &options).unwrap();
    let (sender, ended) = mpsc::channel();
    let read = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = quick.open_queue(ctx).unwrap();
        ctx.spawn(block::Task::new(async move {
            let bufs: Vec<_> = (0..100).map(|_| IoBuf::zeroed(512)).collect();
            let started = bufs.iter().enumerate().map(|(index, buf)| queue.start(read_op(index as u64 * 512, buf)));
            for read in started.collect::<Vec<_>>() {
                read.await.unwrap();
            }
            sender.send(queue.start(FileOp::Flush).await).unwrap();
        }));
    };
    block::run_and_wait(&*reactor.handle(), read).unwrap();
    let result = ended.recv_timeout(Duration::from_secs(60));
    stalling.iter().for_each(StallingFile::release);
    assert_eq!(result, Ok(Ok(())), "others wait for workers that a slow file has");
    reactor.stop().unwrap();
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

/// A reactor that reads a cached file again and again, until this is dropped.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn with(reactor: &ReactorThread, path: &Path) -> Self {
        let file = ringdisk_engine::open(path, &OpenOptions::default().with(|options| options.lock = false)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        let job = move |ctx: &Rc<dyn ReactorCtx>| {
            let queue = file.open_queue(ctx).unwrap();
            ctx.spawn(block::Task::new(async move {
                while !theirs.load(Ordering::Relaxed) {
                    common::read(&queue, 0, 4096, PastEnd::Fails).await.unwrap();
                }
            }));
        };
        block::run_and_wait(&*reactor.handle(), job).unwrap();
        Self(stop)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn writes_that_have_ended_are_told_while_one_that_follows_them_in_turn_is_stalled() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("image"), dir.path().join("other"));
    std::fs::write(&other, vec![7; 1 << 16]).unwrap();
    let of = |engine| [(engine, false), (engine, true)];
    // A reactor that sleeps, and one that another disk keeps busy.
    for (engine, is_busy) in [EngineKind::Threads, EngineKind::Auto].into_iter().flat_map(of) {
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let file =
            ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.engine = engine)).unwrap();
        if engine == EngineKind::Auto && !file.info().engine.contains("go to threads") {
            continue;
        }
        // Goes last: what stalls is let go before.
        let reactor = reactor("in turn");
        let Some(stalling) = StallingFile::mount() else {
            return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
        };
        // Memory that takes its time, as a guest's may while it is being migrated.
        let ended = start_writes(&reactor, file, map_whole(&stalling.mappable()).expose_provenance());
        let busy = is_busy.then(|| Busy::with(&reactor, &other));
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
        drop(busy);
        reactor.stop().unwrap();
        let written = std::fs::read(&path).unwrap();
        assert_eq!([written[0], written[8 * 4096]], SLOW.map(content));
    }
}

/// Blocks with data in a file, and as many holes between them: more than one block of its file system's tables names.
const BLOCKS: u64 = 600;

/// An ext4 file system of one file like that.
fn make_ext4(dir: &Path) -> Option<Vec<u8>> {
    let (files, image) = (dir.join("files"), dir.join("image"));
    std::fs::create_dir(&files).unwrap();
    let file = std::fs::File::create(files.join("cold")).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&[content(block * 512); 4096], block * 8192).unwrap();
    }
    let made = Command::new("mkfs.ext4").args(["-q", "-b", "4096", "-d"]).arg(&files).arg(&image).arg("16M").output();
    made.ok().filter(|made| made.status.success()).map(|_| std::fs::read(image).unwrap())
}

#[test]
fn a_file_system_that_would_have_to_read_its_tables_first_holds_up_no_reactor() {
    let dir = tempfile::tempdir().unwrap();
    let (at, warm) = (dir.path().join("mounted"), dir.path().join("warm"));
    std::fs::create_dir(&at).unwrap();
    std::fs::write(&warm, vec![7; 1 << 16]).unwrap();
    let image = make_ext4(dir.path());
    for (cache, at_once) in
        [CacheMode::Writeback, CacheMode::None].into_iter().flat_map(|cache| [(cache, false), (cache, true)])
    {
        let stalling = image.clone().and_then(|image| StallingFile::mount_of(image, u64::MAX));
        let device = stalling.as_ref().and_then(|stalling| LoopDevice::read_only(&stalling.path()));
        let mounted = device.as_ref().and_then(|device| Mounted::read_only(device, &at));
        let (Some(stalling), Some(mounted)) = (stalling, mounted) else {
            return common::skip("ext4 over FUSE cannot be had here (it takes root, /dev/fuse, losetup and mkfs.ext4)");
        };
        let options = OpenOptions::default().with(|options| {
            options.cache = cache;
            options.read_only = true;
            options.lock = false;
        });
        let cold = ringdisk_engine::open(&at.join("cold"), &options).unwrap();
        let other = options.with(|options| options.cache = CacheMode::Writeback);
        let warm = ringdisk_engine::open(&warm, &other).unwrap();
        assert!(cold.info().engine.starts_with("io_uring"));
        let reactor = reactor("cold");
        warm_up(&reactor, &warm);
        if !at_once {
            common::wait_until_a_ring_reads(&reactor, &cold);
        }

        stalling.hold();
        let (over, is_over) = mpsc::channel();
        std::thread::scope(|scope| {
            let stalling = &stalling;
            let watch = scope.spawn(move || {
                // Also where the reactor waits.
                let in_time = is_over.recv_timeout(Duration::from_secs(20)).is_ok();
                stalling.release();
                in_time
            });
            let theirs = Arc::clone(&cold);
            let (sender, ended) = mpsc::channel();
            let last = (BLOCKS - 1) * 8192;
            let others = run_task(&reactor, move |ctx| async move {
                let (cold, warm) = (theirs.open_queue(&ctx).unwrap(), warm.open_queue(&ctx).unwrap());
                let buf = IoBuf::zeroed(4096);
                let stalled = cold.start(read_op(last, &buf));
                ctx.spawn(block::Task::new(
                    async move { sender.send((stalled.await, buf.whole().to_vec()[0])).unwrap() },
                ));
                common::read(&warm, 4096, 4096, PastEnd::Fails).await
            });
            assert_eq!(others.unwrap()[0], 7);
            assert!(ended.try_recv().is_err(), "it was to be held up");
            let _ = over.send(());
            assert!(watch.join().unwrap(), "{cache}, at once: {at_once}: the reactor waited for a table");
            assert_eq!(ended.recv().unwrap(), (Ok(()), content((BLOCKS - 1) * 512)));
        });
        // Nobody has it open any more then.
        common::wait_until_a_ring_reads(&reactor, &cold);
        reactor.stop().unwrap();
        drop((cold, mounted, device));
    }
}
