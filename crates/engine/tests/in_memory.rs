//! Files that lie in memory, where the kernel only copies.

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use engine::{OpenOptions, Reactor, ReactorConfig};
use memory::IoBuf;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

const LONGEST_BYTES: usize = 128 << 10;

fn file() -> Option<(tempfile::TempDir, Arc<dyn block::File>)> {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        common::skip("there is no tmpfs at /dev/shm");
        return None;
    };
    let path = dir.path().join("image");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let file = engine::open(&path, &OpenOptions::default()).unwrap();
    Some((dir, file))
}

/// The end of an operation, if its first look finds one.
async fn first_look<T>(end: impl Future<Output = T>) -> (bool, T) {
    let mut end = pin!(end);
    match poll_fn(|context| Poll::Ready(end.as_mut().poll(context))).await {
        Poll::Ready(value) => (true, value),
        Poll::Pending => (false, end.await),
    }
}

#[test]
fn what_a_task_awaits_has_ended_when_it_looks_unless_it_takes_long() {
    let Some((_dir, file)) = file() else { return };
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        let buf = IoBuf::from_pool(LONGEST_BYTES);
        let read = |data| queue.start(FileOp::Read { offset: 4096, data, past_end: PastEnd::Fails });
        assert_eq!(first_look(read(buf.whole())).await, (true, Ok(())));
        assert_eq!(buf.whole().to_vec(), vec![7; LONGEST_BYTES]);
        let write = FileOp::Write { offset: 2 << 20, data: buf.whole().slice(1, 5000), fua: true };
        assert_eq!(first_look(queue.start(write)).await, (true, Ok(())));
        assert_eq!(first_look(queue.start(FileOp::Flush)).await, (true, Ok(())));
        // Behind the end there is nothing to free.
        let zeroes = FileOp::WriteZeroes { offset: 4 << 20, length: 64 << 20, may_unmap: true };
        assert_eq!(first_look(queue.start(zeroes)).await.1, Ok(()));
        let longer = IoBuf::zeroed(LONGEST_BYTES + 1);
        assert_eq!(first_look(read(longer.whole())).await, (false, Ok(())));
        assert_eq!(longer.whole().to_vec(), vec![7; LONGEST_BYTES + 1]);
    });
    let stats = reactor.stats();
    assert_eq!(stats.requests, stats.completions, "each is counted once: {stats:?}");
    assert_eq!(file.length_bytes().unwrap(), 68 << 20);
    reactor.stop().unwrap();
}

#[test]
fn a_task_with_much_to_copy_lets_others_come_between() {
    let Some((_dir, file)) = file() else { return };
    let reactor = reactor("memory");
    let waits = with_queue(&reactor, &file, |queue| async move {
        let buf = IoBuf::from_pool(LONGEST_BYTES);
        let mut waits = 0;
        for _ in 0..128 {
            let read = FileOp::Read { offset: 0, data: buf.whole(), past_end: PastEnd::Fails };
            let (at_once, result) = first_look(queue.start(read)).await;
            result.unwrap();
            waits += u32::from(!at_once);
        }
        waits
    });
    assert!((2..32).contains(&waits), "16 MiB were copied in {waits} turns");
    reactor.stop().unwrap();
}

#[test]
fn a_reactor_without_rings_may_make_long_copies_itself_and_needs_no_worker() {
    let Some((_dir, file)) = file() else { return };
    for (inline_bytes, own_calls) in [(1 << 20, 2), (LONGEST_BYTES, 0)] {
        let config = ReactorConfig { name: "job".into(), inline_bytes, ..ReactorConfig::default() };
        let reactor = Reactor::spawn(config).unwrap();
        with_queue(&reactor, &file, |queue| async move {
            let buf = IoBuf::zeroed(1 << 20);
            let read = FileOp::Read { offset: 0, data: buf.whole(), past_end: PastEnd::Fails };
            assert_eq!(queue.start(read).await, Ok(()));
            assert_eq!(buf.whole().to_vec(), vec![7; 1 << 20]);
            assert_eq!(queue.start(FileOp::Write { offset: 0, data: buf.whole(), fua: false }).await, Ok(()));
        });
        // A worker's calls are its own.
        assert_eq!(reactor.stats().system_calls, own_calls, "up to {inline_bytes} bytes");
        reactor.stop().unwrap();
    }
}
