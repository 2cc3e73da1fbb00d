//! Direct writes that the kernel would have to find space for first.
//!
//! One test in a program of its own: it counts the process's threads.

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use memory::{AlignedBuf, IoBuf};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};

const COUNT: u64 = 256;
const STEP_BYTES: u64 = 64 << 10;

fn workers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "io-worker").count()
}

fn is_on_ext4(path: &std::path::Path) -> bool {
    rustix::fs::statfs(path).unwrap().f_type == 0xef53
}

fn pattern(index: u64) -> [u8; 4096] {
    [index as u8 ^ 0x5a; 4096]
}

#[test]
fn a_worker_begins_all_direct_writes_to_holes_and_waits_for_the_end_of_none() {
    let dir = tempfile::tempdir().unwrap();
    for (engine, fua) in
        [EngineKind::IoUring, EngineKind::LinuxAio].into_iter().flat_map(|kind| [(kind, false), (kind, true)])
    {
        let path = dir.path().join(format!("{engine}-{fua}"));
        ringdisk_engine::create(&path, COUNT * STEP_BYTES).unwrap();
        let Ok(file) = ringdisk_engine::open(
            &path,
            &OpenOptions::default().with(|options| {
                options.engine = engine;
                options.cache = CacheMode::None;
            }),
        ) else {
            return common::skip("direct I/O, or an engine, is not to be had here");
        };
        if !file.info().engine.contains("direct I/O") || file.info().engine.contains("all goes to threads") {
            return common::skip("this file system takes no direct I/O that must not wait");
        }
        let reactor = reactor("holes");
        common::wait_until_a_ring_reads(&reactor, &file);
        let before = reactor.stats();
        with_queue(&reactor, &file, move |queue| async move {
            let write = |index: u64| {
                let data = IoBuf::from_aligned(AlignedBuf::copy_of(&pattern(index))).whole();
                queue.start(FileOp::Write { offset: index * STEP_BYTES, data, fua })
            };
            let ends: Vec<_> = (0..COUNT).map(write).collect();
            for end in ends {
                end.await.unwrap();
            }
        });
        let (after, workers) = (reactor.stats(), workers());
        assert_eq!((after.requests - before.requests, after.completions - before.completions), (COUNT, COUNT));
        let by_workers = after.worker_calls - before.worker_calls;
        // They are refused together, and begun together.
        assert!(by_workers <= COUNT / 2, "{engine}: {by_workers} calls");
        assert!(by_workers > 0 || !is_on_ext4(&path), "{engine}: nothing was refused");
        // Some may be left of those that read before the file's tables were ready; each write for itself has dozens.
        assert!(workers <= 12, "{engine}, durable: {fua}: {workers} workers");
        with_queue(&reactor, &file, |queue| async move {
            for index in 0..COUNT {
                let bytes = common::read(&queue, index * STEP_BYTES, 8192, PastEnd::Fails).await.unwrap();
                assert_eq!((&bytes[..4096], &bytes[4096..]), (&pattern(index)[..], &[0; 4096][..]), "{index}");
            }
        });
        reactor.stop().unwrap();
    }
}
