//! The reactor: sleeping, waking, stopping.

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use engine::{CacheMode, EngineKind, OpenOptions};

fn options(engine: EngineKind, cache: CacheMode) -> OpenOptions {
    OpenOptions { engine, cache, ..OpenOptions::default() }
}

#[test]
fn what_was_written_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    for engine in [EngineKind::IoUring, EngineKind::Threads] {
        let path = dir.path().join(engine.to_string());
        engine::create(&path, 1 << 20).unwrap();
        let file = engine::open(&path, &options(engine, CacheMode::Writeback)).unwrap();
        let reactor = reactor("smoke");
        let bytes = with_queue(&reactor, &file, |queue| async move {
            common::write(&queue, 4096, &[7; 10000]).await.unwrap();
            queue.start(FileOp::Flush).await.unwrap();
            queue.start(FileOp::WriteZeroes { offset: 5000, length: 1000, may_unmap: true }).await.unwrap();
            queue.start(FileOp::SetLength { length: 12000 }).await.unwrap();
            common::read(&queue, 4096, 10000, PastEnd::Zeros).await.unwrap()
        });
        for (index, byte) in bytes.iter().enumerate() {
            let at = index + 4096;
            let expected = if (5000..6000).contains(&at) || at >= 12000 { 0 } else { 7 };
            assert_eq!(*byte, expected, "offset {at}, {engine}");
        }
        reactor.stop().unwrap();
    }
}
