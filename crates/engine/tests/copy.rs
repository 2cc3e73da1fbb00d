//! Copies that the kernel makes by itself, from file to file.

use block::{CopyRange, File, FileOp, IoErrorKind, IoResult, block_on, run_and_wait};
use ringdisk_engine::{CacheMode, OpenOptions, Reactor, ReactorConfig};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

fn open(path: &Path, cache: CacheMode, read_only: bool) -> Arc<dyn File> {
    ringdisk_engine::open(
        path,
        &OpenOptions::default().with(|options| {
            options.cache = cache;
            options.read_only = read_only;
            options.lock = false;
        }),
    )
    .unwrap()
}

fn range(source: &Arc<dyn File>, source_offset: u64, offset: u64, length_bytes: u64) -> CopyRange {
    CopyRange { source: Arc::clone(source), source_offset, offset, length_bytes }
}

fn copy(target: &Arc<dyn File>, range: CopyRange) -> IoResult {
    block_on(target.open_blocking().unwrap().start_copy(range, Rc::new(())))
}

#[test]
fn bytes_arrive_at_any_offset_and_make_the_target_longer() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|index| (index / 1000) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    std::fs::write(&to, [9; 100]).unwrap();
    let (source, target) = (open(&from, CacheMode::Writeback, true), open(&to, CacheMode::Writeback, false));
    copy(&target, range(&source, 1001, 77, 2_000_003)).unwrap();
    let written = std::fs::read(&to).unwrap();
    assert!(written[..77] == [9; 77] && written[77..] == bytes[1001..2_001_004]);
    // On a reactor it is a worker that waits for the kernel.
    let reactor = Reactor::spawn(ReactorConfig::default()).unwrap();
    let (sender, ended) = mpsc::channel();
    let (on, wanted) = (Arc::clone(&target), range(&source, 0, 0, 3_000_000));
    run_and_wait(reactor.handle().as_ref(), move |ctx| {
        let queue = on.open_queue(ctx).unwrap();
        ctx.spawn(block::Task::new(async move {
            let copied = queue.start_copy(wanted, Rc::new(())).await;
            sender.send(copied.and(queue.start(FileOp::Flush).await)).unwrap();
        }));
    })
    .unwrap();
    ended.recv().unwrap().unwrap();
    reactor.stop().unwrap();
    assert!(std::fs::read(&to).unwrap() == bytes);
}

#[test]
fn what_the_kernel_should_not_copy_is_refused_and_a_source_that_ends_early_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    std::fs::write(&from, vec![1; 8192]).unwrap();
    std::fs::write(&to, vec![2; 8192]).unwrap();
    let source = open(&from, CacheMode::Writeback, true);
    let refused = |target: Arc<dyn File>, source: &Arc<dyn File>| {
        copy(&target, range(source, 0, 0, 4096)).map_err(|error| error.kind())
    };
    assert_eq!(refused(open(&to, CacheMode::Writeback, true), &source), Err(IoErrorKind::Unsupported));
    // Each write is to be durable when it completes: the kernel's copy would not be.
    assert_eq!(refused(open(&to, CacheMode::Writethrough, false), &source), Err(IoErrorKind::Unsupported));
    let target = open(&to, CacheMode::Writeback, false);
    assert_eq!(copy(&target, range(&source, 4096, 0, 8192)).map_err(|error| error.kind()), Err(IoErrorKind::Io));
    let far = copy(&target, range(&source, 0, u64::MAX - 10, 4096));
    assert_eq!(far.map_err(|error| error.kind()), Err(IoErrorKind::OutOfRange));
    let direct = OpenOptions::default().with(|options| {
        options.cache = CacheMode::None;
        options.read_only = true;
        options.lock = false;
    });
    if let Ok(direct) = ringdisk_engine::open(&from, &direct) {
        assert_eq!(refused(target, &direct), Err(IoErrorKind::Unsupported));
    }
}
