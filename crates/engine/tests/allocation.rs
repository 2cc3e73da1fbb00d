//! After warm-up a request allocates nothing on the reactor's thread.

mod common;

use block::{Done, File, FileIo, FileOp, FileQueue, IoResult, PastEnd, Poller, ReactorCtx};
use common::reactor;
use memory::{IoBuf, Window};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, mpsc};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is the system allocator's; the count is a plain cell without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: usize = 64;
const WARM_UP: u64 = 4_000;
const MEASURED: u64 = 20_000;

/// Keeps requests of every plain kind in flight, and counts what they allocate once it is warm.
struct Load {
    queue: Rc<dyn FileQueue>,
    sink: Rc<block::Sink>,
    windows: Vec<Window>,
    idle: Vec<usize>,
    ended: Vec<(u64, IoResult)>,
    pushed: u64,
    done: u64,
    before: Option<u64>,
    result: mpsc::Sender<u64>,
}

impl Load {
    fn op(&self, index: usize) -> FileOp {
        let (offset, data) = (self.pushed % 256 * 4096, self.windows[index].clone());
        match self.pushed % 16 {
            // As many tasks as there can ever be at once, first.
            _ if self.pushed < WARM_UP / 2 => FileOp::Write { offset, data, fua: true },
            0 => FileOp::Flush,
            1..8 => FileOp::Write { offset, data, fua: self.pushed.is_multiple_of(5) },
            _ => FileOp::Read { offset, data, past_end: PastEnd::Fails },
        }
    }
}

impl Poller for Load {
    fn poll(&mut self) -> bool {
        if !self.sink.is_empty() {
            self.sink.take(&mut self.ended);
        }
        for (token, result) in self.ended.drain(..) {
            result.unwrap();
            self.idle.push(token as usize);
            self.done += 1;
        }
        if self.done >= WARM_UP && self.before.is_none() {
            self.before = Some(ALLOCATIONS.get());
        }
        if self.done >= WARM_UP + MEASURED
            && let Some(before) = self.before
        {
            self.result.send(ALLOCATIONS.get() - before).unwrap();
            self.done = 0;
        }
        let any = !self.idle.is_empty();
        while let Some(index) = self.idle.pop() {
            let done = Done::Sink { sink: Rc::clone(&self.sink), token: index as u64 };
            self.queue.push(FileIo::new(self.op(index), done));
            self.pushed += 1;
        }
        any
    }
}

fn allocations(file: Arc<dyn File>) -> u64 {
    let reactor = reactor("load");
    if !file.info().engine.starts_with("threads") {
        // What a ring needs it allocates with its first requests.
        common::wait_until_a_ring_reads(&reactor, &file);
    }
    let (result, received) = mpsc::channel();
    let add = move |ctx: &Rc<dyn ReactorCtx>| {
        // Every other buffer in two segments.
        let whole = (0..DEPTH).map(|_| IoBuf::zeroed(4096).whole());
        let windows = whole.enumerate().map(|(index, window)| match index % 2 {
            0 => window,
            _ => IoBuf::gather(vec![window.slice(2048, 2048), window.slice(0, 2048)]).whole(),
        });
        let load = Load {
            queue: file.open_queue(ctx).unwrap(),
            sink: {
                let sink = block::Sink::new();
                sink.reserve(DEPTH);
                sink
            },
            windows: windows.collect(),
            idle: (0..DEPTH).collect(),
            ended: Vec::with_capacity(DEPTH),
            pushed: 0,
            done: 0,
            before: None,
            result,
        };
        ctx.add_poller(Rc::new(RefCell::new(load))).unwrap();
    };
    block::run_and_wait(&*reactor.handle(), add).unwrap();
    let count = received.recv().unwrap();
    reactor.stop().unwrap();
    count
}

#[test]
fn requests_allocate_nothing_after_warm_up() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (EngineKind::IoUring, CacheMode::None),
        (EngineKind::IoUring, CacheMode::Unsafe),
        (EngineKind::LinuxAio, CacheMode::None),
        (EngineKind::Threads, CacheMode::Unsafe),
        (EngineKind::Auto, CacheMode::Writeback),
    ];
    for (engine, cache) in cases {
        let path = dir.path().join(format!("{engine}-{cache}"));
        std::fs::write(&path, vec![9; 1 << 20]).unwrap();
        let file = ringdisk_engine::open(
            &path,
            &OpenOptions::default().with(|options| {
                options.engine = engine;
                options.cache = cache;
            }),
        )
        .unwrap();
        let count = allocations(file);
        assert_eq!(count, 0, "allocations in {MEASURED} requests, {engine}, cache={cache}");
    }
}
