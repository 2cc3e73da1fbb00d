//! Bounce buffers: how much memory they take, and what happens where there is none.

mod common;

use block::{File, FileOp, FileQueue, IoError, IoResult, PastEnd, ReactorCtx, Task, run_and_wait};
use common::{reactor, read, run_task, with_queue};
use memory::{BufferAccount, BufferBudget, IoBuf, Window};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

thread_local! {
    /// Buffers cannot be allocated by this thread.
    static IS_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// What buffers take now, and took at most, in bytes.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Watching;

fn is_buffer(layout: Layout) -> bool {
    layout.align() >= memory::PAGE_BYTES
}

// SAFETY: every call is the system allocator's; the counters are plain cells and atomics without destructors.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_buffer(layout) {
            if IS_SHORT.try_with(Cell::get).unwrap_or(false) {
                return std::ptr::null_mut();
            }
            let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
            PEAK.fetch_max(live, Ordering::Relaxed);
        }
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if is_buffer(layout) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        }
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// The tests of this program count the same memory.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const ENGINES: [EngineKind; 3] = [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads];

fn content(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 3 % 251) as u8).collect()
}

/// A file past the page cache; `None` where memory needs no alignment, so that nothing is bounced.
fn open(dir: &Path, length: usize, engine: EngineKind, buffers: BufferAccount) -> Option<Arc<dyn File>> {
    let path = dir.join(engine.to_string());
    std::fs::write(&path, content(length)).unwrap();
    let options = OpenOptions::default().with(|options| {
        options.engine = engine;
        options.cache = CacheMode::None;
        options.buffers = buffers;
    });
    let file = ringdisk_engine::open(&path, &options).unwrap();
    if file.info().memory_alignment_bytes > 1 {
        return Some(file);
    }
    common::skip("direct I/O takes any memory here");
    None
}

/// So many bytes at an odd address.
fn odd(length: usize) -> Window {
    IoBuf::zeroed(length + 1).whole().slice(1, length)
}

/// Pushes `count` reads of the whole file into one window, all at once, and tells the end of each.
fn push_reads(ctx: &Rc<dyn ReactorCtx>, file: &Arc<dyn File>, count: u64, length: usize, ends: mpsc::Sender<IoResult>) {
    let (queue, data) = (file.open_queue(ctx).unwrap(), odd(length));
    let started: Vec<_> = (0..count)
        .map(|_| queue.start(FileOp::Read { offset: 0, data: data.clone(), past_end: PastEnd::Fails }))
        .collect();
    ctx.spawn(Task::new(async move {
        for read in started {
            ends.send(read.await).unwrap();
        }
        assert!(data.to_vec() == content(length));
    }));
}

#[test]
fn thousands_of_reads_at_odd_addresses_take_no_more_than_the_budget() {
    const LENGTH: usize = 256 << 10;
    const QUEUES: u64 = 4;
    const DEPTH: u64 = 1024;
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let dir = tempfile::tempdir().unwrap();
    for engine in ENGINES {
        let budget = BufferBudget::new(8 << 20);
        let Some(file) = open(dir.path(), LENGTH, engine, budget.account()) else { return };
        let reactors = [reactor("one"), reactor("two")];
        let (sender, ends) = mpsc::channel();
        memory::trim_pools();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        for queue in 0..QUEUES {
            let (file, sender) = (Arc::clone(&file), sender.clone());
            let push = move |ctx: &Rc<dyn ReactorCtx>| push_reads(ctx, &file, DEPTH, LENGTH, sender);
            run_and_wait(&*reactors[queue as usize % 2].handle(), push).unwrap();
        }
        for end in ends.iter().take((QUEUES * DEPTH) as usize) {
            end.unwrap();
        }
        let stats = budget.stats();
        assert!(stats.peak_bytes > 4 << 20 && stats.peak_bytes <= 8 << 20, "{engine}: {stats:?}");
        // The pool keeps some more, so that threads rarely trade; each queue has a window.
        let grown = PEAK.load(Ordering::Relaxed) - before;
        assert!(grown <= 32 << 20, "{engine}: buffers took {grown} bytes");
        reactors.into_iter().for_each(|reactor| reactor.stop().unwrap());
        assert_eq!((budget.stats().used_bytes, budget.stats().waiting), (0, 0));
    }
}

/// Carries out `op` on the reactor's thread while there is no memory for a buffer, nor one in the pool.
async fn without_memory(queue: &Rc<dyn FileQueue>, op: FileOp) -> IoResult {
    IS_SHORT.set(true);
    let idle: Vec<_> = std::iter::from_fn(|| IoBuf::from_pool(LONGEST).ok()).collect();
    let result = queue.start(op).await;
    IS_SHORT.set(false);
    drop(idle);
    result
}

/// Beyond a quarter of this, buffers have this size. Longer ones are mappings, which the allocator does not make.
const LONGEST: usize = 256 << 10;

#[test]
fn a_request_for_which_there_is_no_memory_fails_and_the_next_does_not() {
    const LENGTH: usize = 200 << 10;
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let dir = tempfile::tempdir().unwrap();
    for engine in ENGINES {
        let budget = BufferBudget::new(8 << 20);
        let Some(file) = open(dir.path(), LENGTH, engine, budget.account()) else { return };
        let reactor = reactor("short of memory");
        with_queue(&reactor, &file, |queue| async move {
            let data = odd(LENGTH);
            let read = || FileOp::Read { offset: 0, data: data.clone(), past_end: PastEnd::Fails };
            let write = || FileOp::Write { offset: 0, data: data.clone(), fua: false };
            for _ in 0..3 {
                let failed = [without_memory(&queue, read()).await, without_memory(&queue, write()).await];
                assert_eq!(failed, [Err(IoError::from_errno(libc::ENOMEM)); 2]);
                data.fill(0);
                assert_eq!(queue.start(read()).await, Ok(()));
                assert!(data.to_vec() == content(LENGTH));
                assert_eq!(queue.start(write()).await, Ok(()));
            }
        });
        assert_eq!(budget.stats().used_bytes, 0, "{engine}: what failed gave its room back");
        reactor.stop().unwrap();
    }
}

#[test]
fn what_a_file_has_computed_is_not_computed_by_the_reactor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    let reactor = reactor("computes nothing");
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let file =
            ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.engine = engine)).unwrap();
        let (own, others) = run_task(&reactor, move |ctx| async move {
            let queue = file.open_queue(&ctx).unwrap();
            let started: Vec<_> = (0..100).map(|_| queue.compute(|| std::thread::current().id())).collect();
            // The reactor goes on meanwhile.
            assert!(read(&queue, 0, 512, PastEnd::Fails).await.is_ok());
            let mut threads = Vec::new();
            for thread in started {
                threads.push(thread.await.unwrap());
            }
            let panics = queue.compute(|| assert!(std::hint::black_box(false), "on purpose")).await;
            assert_eq!(panics, Err(block::IoError::EIO));
            (std::thread::current().id(), threads)
        });
        assert!(!others.contains(&own));
    }
    reactor.stop().unwrap();
}

/// A guest that has gone may have left more clusters to decompress than anybody waits for.
#[test]
fn a_reactor_that_ends_does_not_wait_for_computations_that_have_not_begun() {
    /// Lets the computations end that have begun.
    struct Releases(Arc<(Mutex<bool>, Condvar)>);
    impl Drop for Releases {
        fn drop(&mut self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_all();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    let reactor = reactor("ends");
    let file = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap();
    let (begun, computed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (theirs, (sender, has_queued)) = ([Arc::clone(&begun), Arc::clone(&computed)], mpsc::channel());
    let job = move |ctx: &Rc<dyn ReactorCtx>| {
        let queue = file.open_queue(ctx).unwrap();
        ctx.spawn(Task::new(async move {
            let gate = Arc::new((Mutex::new(false), Condvar::new()));
            // Dropped after the futures.
            let _release = Releases(Arc::clone(&gate));
            let [begun, computed] = theirs;
            let wait = || {
                let (gate, begun) = (Arc::clone(&gate), Arc::clone(&begun));
                queue.compute(move || {
                    begun.fetch_add(1, Ordering::Relaxed);
                    drop(gate.1.wait_while(gate.0.lock().unwrap(), |is_open| !*is_open).unwrap());
                })
            };
            // At least as many as run at once.
            let most = std::thread::available_parallelism().map_or(1, usize::from);
            let blocked: Vec<_> = (0..2 * most).map(|_| wait()).collect();
            let count = || {
                let computed = Arc::clone(&computed);
                queue.compute(move || computed.fetch_add(1, Ordering::Relaxed))
            };
            let queued: Vec<_> = (0..1000).map(|_| count()).collect();
            sender.send(()).unwrap();
            for waits in blocked {
                waits.await.unwrap();
            }
            drop(queued);
        }));
    };
    reactor.handle().run(Box::new(job)).unwrap();
    has_queued.recv().unwrap();
    while begun.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    reactor.stop_within(Duration::from_secs(60)).unwrap();
    assert_eq!(computed.load(Ordering::Relaxed), 0);
}
