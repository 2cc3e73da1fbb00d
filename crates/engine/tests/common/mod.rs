//! What the engine's tests share.

#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod fuse;
pub(crate) mod loop_device;
pub(crate) mod model;

use block::{File, FileOp, FileQueue, IoResult, PastEnd, ReactorCtx};
use memory::{AlignedBuf, IoBuf, Window};
use ringdisk_engine::{Reactor, ReactorConfig, ReactorStats, ReactorThread};
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

pub(crate) fn reactor(name: &str) -> ReactorThread {
    Reactor::spawn(ReactorConfig::default().with(|config| config.name = name.into())).unwrap()
}

/// Runs a task on the reactor and waits for what it returns.
pub(crate) fn run_task<T, F>(reactor: &ReactorThread, task: impl FnOnce(Rc<dyn ReactorCtx>) -> F + Send + 'static) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let job = move |ctx: &Rc<dyn ReactorCtx>| {
        let task = task(Rc::clone(ctx));
        ctx.spawn(block::Task::new(async move {
            let value = task.await;
            let _ = sender.send(value);
        }));
    };
    reactor.handle().run(Box::new(job)).unwrap();
    receiver.recv().expect("the task was dropped before its end")
}

/// As [`run_task`], with a queue of `file`.
pub(crate) fn with_queue<T, F>(
    reactor: &ReactorThread,
    file: &Arc<dyn File>,
    task: impl FnOnce(Rc<dyn FileQueue>) -> F + Send + 'static,
) -> T
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
{
    let file = Arc::clone(file);
    run_task(reactor, move |ctx| task(file.open_queue(&ctx).unwrap()))
}

pub(crate) async fn read(
    queue: &Rc<dyn FileQueue>,
    offset: u64,
    length: usize,
    past_end: PastEnd,
) -> IoResult<Vec<u8>> {
    let buf = IoBuf::from_aligned(AlignedBuf::copy_of(&vec![0xee; length]));
    queue.start(FileOp::Read { offset, data: buf.whole(), past_end }).await?;
    Ok(buf.whole().to_vec())
}

pub(crate) async fn write(queue: &Rc<dyn FileQueue>, offset: u64, bytes: &[u8]) -> IoResult {
    let data = IoBuf::from_aligned(AlignedBuf::copy_of(bytes)).whole();
    queue.start(FileOp::Write { offset, data, fua: false }).await
}

/// `bytes` in memory that is cut at odd places, in segments that are aligned to nothing; for one seed in four, whole.
pub(crate) fn scattered(bytes: AlignedBuf, seed: u64) -> Window {
    if seed.is_multiple_of(4) {
        return IoBuf::from_aligned(bytes).whole();
    }
    let length = bytes.len();
    let mut parts = Vec::new();
    let (mut done, mut step) = (0, (seed % 5000) as usize + 1);
    while done < length {
        let count = step.min(length - done);
        let part = IoBuf::zeroed(count + 3).whole().slice(3, count);
        part.copy_from_slice(0, &bytes[done..done + count]);
        parts.push(part);
        done += count;
        step = step * 3 % 7001 + 1;
    }
    IoBuf::gather(parts).whole()
}

/// Says that a test was skipped, and why; an error where CI asks for every test.
pub(crate) fn skip(reason: &str) {
    assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "{reason}");
    eprintln!("skipped: {reason}");
}

/// Waits until the reactor reads `file` by itself: workers do while the file system reads its tables.
pub(crate) fn wait_until_a_ring_reads(reactor: &ReactorThread, file: &Arc<dyn File>) {
    if file.info().engine.contains("all goes to threads") {
        return;
    }
    for _ in 0..1000 {
        let before = reactor.stats().worker_calls;
        with_queue(reactor, file, |queue| async move {
            read(&queue, 0, 4096, PastEnd::Fails).await.unwrap();
        });
        if reactor.stats().worker_calls == before {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    panic!("workers never end to read '{}'", file.info().name);
}

/// Waits until the reactor sleeps: looks, some time apart, see the same counters, several times in a row.
pub(crate) fn wait_until_idle(reactor: &ReactorThread) -> ReactorStats {
    let (mut before, mut same) = (reactor.stats(), 0);
    for _ in 0..1000 {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let now = reactor.stats();
        same = if now == before { same + 1 } else { 0 };
        if same == 3 {
            return now;
        }
        before = now;
    }
    panic!("the reactor never sleeps: {before:?}");
}
