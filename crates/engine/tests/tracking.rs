//! A file's first read-modify-write, or the first after a calm, beside aligned writes in flight that nobody had reason to track.

mod common;

use block::{FileOp, IoResult};
use common::reactor;
use engine::{CacheMode, EngineKind, OpenOptions};
use memory::{AlignedBuf, IoBuf};
use std::sync::{Arc, Barrier, mpsc};

const BLOCKS: u64 = 32;

/// Pushes all of `writes` (offset, length, byte) at once and reports each end.
fn push_all(
    reactor: &engine::ReactorThread,
    file: &Arc<dyn block::File>,
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
            ctx.spawn(Box::pin(async move { sender.send(end.await).unwrap() }));
        }
    };
    reactor.handle().run(Box::new(job)).unwrap();
    receiver
}

#[test]
fn a_read_modify_write_out_of_the_blue_does_not_undo_an_aligned_write_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (reactor("one"), reactor("two"));
    for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
        let path = dir.path().join(engine.to_string());
        std::fs::write(&path, vec![1; BLOCKS as usize * 4096]).unwrap();
        let file =
            engine::open(&path, &OpenOptions { engine, cache: CacheMode::None, ..OpenOptions::default() }).unwrap();
        if file.info().offset_alignment_bytes == 1 {
            return common::skip("direct I/O on this file system takes any alignment");
        }
        let unit = u64::from(file.info().offset_alignment_bytes);
        for round in 0..60_u8 {
            // Every few rounds it has been calm for long enough that the file is untracked again.
            for calm in 0..if round % 4 == 0 { 10 } else { 0 } {
                let alone = Arc::new(Barrier::new(1));
                let writes = (0..BLOCKS).map(|block| (block * 4096, 4096, calm)).collect();
                assert!(push_all(&one, &file, &alone, writes).into_iter().all(|result| result.is_ok()));
            }
            let (whole_byte, part_byte) = (100 + round, 200);
            let start = Arc::new(Barrier::new(2));
            let whole = (0..BLOCKS).map(|block| (block * 4096, 4096, whole_byte)).collect();
            let parts = (0..BLOCKS).map(|block| (block * 4096 + unit - 7, 7, part_byte)).collect();
            let ends = [push_all(&one, &file, &start, whole), push_all(&two, &file, &start, parts)];
            let ended: Vec<IoResult> = ends.into_iter().flatten().collect();
            assert_eq!(ended, vec![Ok(()); 2 * BLOCKS as usize]);
            let bytes = std::fs::read(&path).unwrap();
            for (at, byte) in bytes.iter().enumerate() {
                let in_both = (unit as usize - 7..unit as usize).contains(&(at % 4096));
                let fits = *byte == whole_byte || (in_both && *byte == part_byte);
                assert!(fits, "byte {at} is {byte}, {engine}, round {round}");
            }
        }
    }
    one.stop().unwrap();
    two.stop().unwrap();
}
