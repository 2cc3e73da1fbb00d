//! A file's first read-modify-write, or the first after a calm, beside aligned writes in flight that nobody had reason to track.

mod common;

use block::{File, FileOp, IoResult};
use common::reactor;
use memory::{AlignedBuf, IoBuf};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use std::path::Path;
use std::sync::{Arc, Barrier, mpsc};

const BLOCKS: u64 = 32;

/// Pushes all of `writes` (offset, length, byte) at once and reports each end.
fn push_all(
    reactor: &ringdisk_engine::ReactorThread,
    file: &Arc<dyn File>,
    start: &Arc<Barrier>,
    writes: Vec<(u64, usize, u8)>,
) -> mpsc::Receiver<IoResult> {
    let (sender, receiver) = mpsc::channel();
    let (file, start) = (Arc::clone(file), Arc::clone(start));
    let job = move |ctx: &std::rc::Rc<dyn block::ReactorCtx>| {
        let queue = file.open_queue(ctx).unwrap();
        start.wait();
        for (offset, length, byte) in writes {
            let data = IoBuf::from_aligned(AlignedBuf::copy_of(&vec![byte; length])).whole();
            let end = queue.start(FileOp::Write { offset, data, fua: false });
            let sender = sender.clone();
            ctx.spawn(block::Task::new(async move { sender.send(end.await).unwrap() }));
        }
    };
    reactor.handle().run(Box::new(job)).unwrap();
    receiver
}

/// Whole blocks on one reactor, and a few bytes of each on the other, at the same time: whichever comes last, what only
/// the whole write touches must be there.
fn race(reactors: [&ringdisk_engine::ReactorThread; 2], file: &Arc<dyn File>, path: &Path, whole_byte: u8) {
    const PART_BYTE: u8 = 255;
    let unit = u64::from(file.info().offset_alignment_bytes);
    let start = Arc::new(Barrier::new(2));
    let whole = (0..BLOCKS).map(|block| (block * 4096, 4096, whole_byte)).collect();
    let parts = (0..BLOCKS).map(|block| (block * 4096 + unit - 7, 7, PART_BYTE)).collect();
    let ends = [push_all(reactors[0], file, &start, whole), push_all(reactors[1], file, &start, parts)];
    let ended: Vec<IoResult> = ends.into_iter().flatten().collect();
    assert_eq!(ended, vec![Ok(()); 2 * BLOCKS as usize]);
    for (at, byte) in std::fs::read(path).unwrap().iter().enumerate() {
        let in_both = (unit as usize - 7..unit as usize).contains(&(at % 4096));
        let fits = *byte == whole_byte || (in_both && *byte == PART_BYTE);
        assert!(fits, "byte {at} is {byte}, not {whole_byte}: {}", file.info().engine);
    }
}

fn open(path: &Path, engine: EngineKind) -> Option<Arc<dyn File>> {
    std::fs::write(path, vec![1; BLOCKS as usize * 4096]).unwrap();
    let options = OpenOptions::default().with(|options| {
        options.engine = engine;
        options.cache = CacheMode::None;
    });
    let file = ringdisk_engine::open(path, &options).unwrap();
    if file.info().offset_alignment_bytes == 1 {
        common::skip("direct I/O on this file system takes any alignment");
        return None;
    }
    Some(file)
}

#[test]
fn a_files_first_read_modify_write_does_not_undo_an_aligned_write_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (reactor("one"), reactor("two"));
    for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
        for round in 0..30 {
            let path = dir.path().join(format!("{engine}-{round}"));
            let Some(file) = open(&path, engine) else { return };
            race([&one, &two], &file, &path, round + 2);
        }
    }
    one.stop().unwrap();
    two.stop().unwrap();
}

#[test]
fn nor_does_the_first_after_a_calm() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (reactor("one"), reactor("two"));
    for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
        let path = dir.path().join(engine.to_string());
        let Some(file) = open(&path, engine) else { return };
        for round in 0..20 {
            race([&one, &two], &file, &path, round + 2);
            for calm in 0..10 {
                let alone = Arc::new(Barrier::new(1));
                let writes = (0..BLOCKS).map(|block| (block * 4096, 4096, 100 + calm)).collect();
                assert!(push_all(&one, &file, &alone, writes).into_iter().all(|result| result.is_ok()));
            }
        }
    }
    one.stop().unwrap();
    two.stop().unwrap();
}
