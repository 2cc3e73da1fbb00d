//! Times a fixed number of requests at growing offsets: the load of `qemu-img bench`.

use block::{Disk, DiskIo, Error, ErrorKind, IoError, Op, OpFlags, ReactorCtx, ReactorHandle, Result, run_and_wait};
use memory::{AlignedBuf, IoBuf};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(50);

/// The requests to make.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RequestBench {
    /// Number of requests.
    pub count: u64,
    /// Requests in flight at once.
    pub depth: usize,
    /// Offset of the first request.
    pub offset: u64,
    /// Bytes a request.
    pub size_bytes: usize,
    /// Bytes from one offset to the next; offsets wrap at the end of the disk.
    pub step_bytes: u64,
    /// Whether to write instead of read.
    pub write: bool,
    /// The byte to write.
    pub pattern: u8,
    /// Number of writes between two flushes; zero for no flushes.
    pub flush_interval: u64,
    /// Whether a flush waits for the writes before it, and later writes for the flush.
    pub drain: bool,
}

impl Default for RequestBench {
    fn default() -> Self {
        Self {
            count: 75_000,
            depth: 64,
            offset: 0,
            size_bytes: 4096,
            step_bytes: 4096,
            write: false,
            pattern: 0,
            flush_interval: 0,
            drain: true,
        }
    }
}

impl RequestBench {
    /// Changes some of the options: `RequestBench::default().with(|bench| bench.write = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Makes the requests on one reactor, and returns the time they took. Fails when a request fails, and soon after
/// `cancel` is set. Waits for the end, so do not call it on a reactor.
pub fn request_bench(
    disk: &Arc<dyn Disk>,
    bench: &RequestBench,
    reactor: &Arc<dyn ReactorHandle>,
    cancel: &AtomicBool,
) -> Result<Duration> {
    let size = disk.info().size_bytes;
    if bench.size_bytes == 0 || bench.offset.checked_add(bench.size_bytes as u64).is_none_or(|end| end > size) {
        return Err(Error::new(ErrorKind::BadOption, "the requests do not fit the image"));
    }
    let outcome = Arc::new(Outcome::default());
    let (sender, ended) = channel();
    let started = Instant::now();
    let (disk, bench, shared) = (Arc::clone(disk), bench.clone(), Arc::clone(&outcome));
    run_and_wait(reactor.as_ref(), move |ctx| start(&disk, &bench, size, shared, sender, ctx))??;
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(TICK) {
        if cancel.load(Ordering::Relaxed) {
            outcome.stop.store(true, Ordering::Relaxed);
        }
    }
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(ErrorKind::Io, "interrupted"));
    }
    let failed = outcome.error.lock().unwrap_or_else(PoisonError::into_inner).take();
    match failed {
        Some(error) => Err(Error::with_source(ErrorKind::Io, "Failed request", error)),
        None => Ok(started.elapsed()),
    }
}

/// The state that the calling thread and the tasks share.
#[derive(Default)]
struct Outcome {
    stop: AtomicBool,
    error: Mutex<Option<IoError>>,
}

/// The state that the tasks of a run share.
struct Shared {
    disk: Rc<DiskIo>,
    bench: RequestBench,
    size_bytes: u64,
    started: Cell<u64>,
    /// Requests in flight, counted for a flush that drains.
    flying: Cell<usize>,
    flushing: Cell<bool>,
    calm: block::WaitList,
    outcome: Arc<Outcome>,
    /// Dropped last, after the queue was closed. The calling thread waits for that.
    _ended: Sender<()>,
}

fn start(
    disk: &Arc<dyn Disk>,
    bench: &RequestBench,
    size_bytes: u64,
    outcome: Arc<Outcome>,
    ended: Sender<()>,
    ctx: &Rc<dyn ReactorCtx>,
) -> Result<()> {
    let shared = Rc::new(Shared {
        disk: DiskIo::open(disk.as_ref(), ctx)?,
        bench: bench.clone(),
        size_bytes,
        started: Cell::new(0),
        flying: Cell::new(0),
        flushing: Cell::new(false),
        calm: block::WaitList::default(),
        outcome,
        _ended: ended,
    });
    for _ in 0..bench.depth.max(1) {
        let mut memory = AlignedBuf::zeroed(bench.size_bytes);
        memory.fill(bench.pattern);
        ctx.spawn(block::Task::new(run_task(Rc::clone(&shared), IoBuf::from_aligned(memory))));
    }
    Ok(())
}

async fn run_task(shared: Rc<Shared>, buf: IoBuf) {
    let bench = &shared.bench;
    loop {
        shared.calm.until(|| (!shared.flushing.get()).then_some(())).await;
        let index = shared.started.get();
        if index >= bench.count || shared.outcome.stop.load(Ordering::Relaxed) {
            return;
        }
        shared.started.set(index + 1);
        let offset = shared.offset_of(index);
        let op = match bench.write {
            true => Op::write(offset, buf.whole(), OpFlags::NONE),
            false => Op::read(offset, buf.whole()),
        };
        shared.flying.set(shared.flying.get() + 1);
        let result = shared.disk.run(op).await;
        shared.flying.set(shared.flying.get() - 1);
        shared.calm.wake_all();
        let result = match result {
            Ok(()) if shared.flush_is_due(index) => shared.flush().await,
            other => other,
        };
        if let Err(error) = result {
            shared.outcome.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            shared.outcome.stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Shared {
    fn offset_of(&self, index: u64) -> u64 {
        let bench = &self.bench;
        let at = u128::from(bench.offset) + u128::from(index) * u128::from(bench.step_bytes);
        let at = (at % u128::from(self.size_bytes)) as u64;
        // A request that would pass the end starts at the beginning.
        if at + bench.size_bytes as u64 > self.size_bytes { 0 } else { at }
    }

    fn flush_is_due(&self, index: u64) -> bool {
        self.bench.flush_interval > 0 && (index + 1).is_multiple_of(self.bench.flush_interval)
    }

    async fn flush(&self) -> block::IoResult {
        if self.bench.drain {
            // Flushes run one at a time.
            self.calm.until(|| (!self.flushing.replace(true)).then_some(())).await;
            self.calm.until(|| (self.flying.get() == 0).then_some(())).await;
        }
        let result = self.disk.run(Op::Flush).await;
        if self.bench.drain {
            self.flushing.set(false);
            self.calm.wake_all();
        }
        result
    }
}
