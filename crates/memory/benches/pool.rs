//! What a request's context costs: from the pool, from the allocator, and from one pool behind a lock.
//!
//! `cargo bench -p ringdisk-memory --bench pool` prints nanoseconds per context (taken and given back), as the median of
//! interleaved rounds. The context is 512 bytes; the allocator is asked for the same and its contents are set up, as a
//! request would have to.

use ringdisk_memory::{PoolBox, PoolContext, pooled};
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

const ROUNDS: usize = 11;
const OPERATIONS: usize = 1 << 18;
const DEPTHS: [usize; 6] = [1, 32, 128, 256, 512, 1024];
/// Contexts that one thread passes to the other at a time, and how many such lots there are.
const LOT: usize = 32;
const LOTS: usize = 8;

struct Request {
    words: [u64; 64],
}

impl PoolContext for Request {
    fn create() -> Self {
        Self { words: [0; 64] }
    }
}

pooled!(Request);

/// A way to come by contexts.
trait Source {
    type Handle: Send + AsMut<Request>;
    fn take() -> Self::Handle;
}

struct Pooled;
struct Allocated;
struct Locked;

struct FromPool(PoolBox<Request>);

impl AsMut<Request> for FromPool {
    fn as_mut(&mut self) -> &mut Request {
        &mut self.0
    }
}

impl Source for Pooled {
    type Handle = FromPool;
    fn take() -> FromPool {
        FromPool(PoolBox::take())
    }
}

impl AsMut<Request> for Request {
    fn as_mut(&mut self) -> &mut Request {
        self
    }
}

struct FromAllocator(Box<Request>);

impl AsMut<Request> for FromAllocator {
    fn as_mut(&mut self) -> &mut Request {
        &mut self.0
    }
}

impl Source for Allocated {
    type Handle = FromAllocator;
    fn take() -> FromAllocator {
        FromAllocator(Box::new(Request::create()))
    }
}

// Boxes, as in the pool: what travels is a pointer, not 512 bytes.
#[allow(clippy::vec_box)]
static LOCKED: Mutex<Vec<Box<Request>>> = Mutex::new(Vec::new());

struct FromLock(Option<Box<Request>>);

impl AsMut<Request> for FromLock {
    fn as_mut(&mut self) -> &mut Request {
        self.0.as_mut().expect("there until it is dropped")
    }
}

impl Drop for FromLock {
    fn drop(&mut self) {
        LOCKED.lock().expect("no holder panics").extend(self.0.take());
    }
}

impl Source for Locked {
    type Handle = FromLock;
    fn take() -> FromLock {
        let idle = LOCKED.lock().expect("no holder panics").pop();
        FromLock(Some(idle.unwrap_or_else(|| Box::new(Request::create()))))
    }
}

fn use_it<S: Source>(number: usize) -> S::Handle {
    let mut handle = S::take();
    handle.as_mut().words[0] = number as u64;
    black_box(handle)
}

/// Takes `depth`, gives them back, and again.
fn same_thread<S: Source>(depth: usize) -> f64 {
    let mut held = Vec::with_capacity(depth);
    let round = |held: &mut Vec<S::Handle>| {
        held.extend((0..depth).map(use_it::<S>));
        held.clear();
    };
    round(&mut held);
    let start = Instant::now();
    for _ in 0..OPERATIONS / depth {
        round(&mut held);
    }
    start.elapsed().as_nanos() as f64 / OPERATIONS as f64
}

/// Both threads do the above at once: what a lock costs when it is shared.
fn both_threads<S: Source>(depth: usize) -> f64 {
    std::thread::scope(|scope| {
        let other = scope.spawn(move || same_thread::<S>(depth));
        let here = same_thread::<S>(depth);
        other.join().map_or(here, |there| (here + there) / 2.0)
    })
}

/// One thread takes, the other gives back. They pass contexts in lots; what that costs is in all three figures.
fn handed_over<S: Source>() -> f64 {
    let (send_full, full) = sync_channel::<Vec<S::Handle>>(LOTS);
    let (send_empty, empty) = sync_channel::<Vec<S::Handle>>(LOTS);
    for _ in 0..LOTS {
        send_empty.send(Vec::with_capacity(LOT)).expect("the receiver is here");
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for mut lot in full {
                lot.clear();
                // The taker is gone when the last lots come back.
                let _ = send_empty.send(lot);
            }
        });
        let start = Instant::now();
        for _ in 0..OPERATIONS / LOT {
            let mut lot = empty.recv().expect("the other thread sends every lot back");
            lot.extend((0..LOT).map(use_it::<S>));
            send_full.send(lot).expect("the other thread lives until we hang up");
        }
        let time = start.elapsed();
        drop(send_full);
        time.as_nanos() as f64 / OPERATIONS as f64
    })
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Measures the three in turn, so that a slow spell of the machine meets all of them.
fn compare(name: &str, measure: [&dyn Fn() -> f64; 3]) {
    let mut figures = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (figures, measure) in figures.iter_mut().zip(measure) {
            figures.push(measure());
        }
    }
    let [pool, allocator, lock] = figures.map(median);
    println!("{name:<44} {pool:>8.1} {allocator:>10.1} {lock:>11.1}");
}

fn main() {
    println!("{:<44} {:>8} {:>10} {:>11}", "ns per context, taken and given back", "pool", "allocator", "locked pool");
    for depth in DEPTHS {
        compare(
            &format!("one thread, {depth} at once"),
            [&|| same_thread::<Pooled>(depth), &|| same_thread::<Allocated>(depth), &|| same_thread::<Locked>(depth)],
        );
    }
    for depth in DEPTHS {
        compare(
            &format!("two threads at a time, {depth} at once each"),
            [&|| both_threads::<Pooled>(depth), &|| both_threads::<Allocated>(depth), &|| {
                both_threads::<Locked>(depth)
            }],
        );
    }
    compare(
        "one thread takes, the other gives back",
        [&handed_over::<Pooled>, &handed_over::<Allocated>, &handed_over::<Locked>],
    );
    println!("pool: {:?}", <Request as ringdisk_memory::Pooled>::pool().stats());
}
