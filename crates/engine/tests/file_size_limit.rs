//! A limit on the size of files (`ulimit -f`, systemd's `LimitFSIZE=`), which holds for the whole process.

mod common;

use block::{FileOp, IoErrorKind, PastEnd};
use common::{reactor, with_queue};
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};

const LIMIT: u64 = 1 << 20;

#[test]
fn what_goes_beyond_the_limit_fails_and_the_process_lives() {
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: libc::RLIM_INFINITY };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 2 * LIMIT).unwrap();
    // SAFETY: the call reads the limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    for (engine, cache) in [
        (EngineKind::IoUring, CacheMode::Writeback),
        (EngineKind::Threads, CacheMode::Writeback),
        (EngineKind::LinuxAio, CacheMode::None),
    ] {
        let file = ringdisk_engine::open(
            &path,
            &OpenOptions::default().with(|options| {
                options.engine = engine;
                options.cache = cache;
            }),
        )
        .unwrap();
        let reactor = reactor("limit");
        with_queue(&reactor, &file, move |queue| async move {
            let kind = |result: block::IoResult| result.unwrap_err().kind();
            let beyond = common::write(&queue, LIMIT + LIMIT / 2, &[1; 4096]).await;
            assert_eq!(kind(beyond), IoErrorKind::NoSpace, "{engine}");
            // Several at once, of which one crosses the limit.
            let ends: Vec<_> = (0..4)
                .map(|index| {
                    let data = memory::IoBuf::zeroed(8192).whole();
                    queue.start(FileOp::Write { offset: LIMIT - 12 * 1024 + index * 8192, data, fua: false })
                })
                .collect();
            let mut results = Vec::new();
            for end in ends {
                results.push(end.await.map_err(|error| error.kind()));
            }
            let no_space = Err(IoErrorKind::NoSpace);
            assert_eq!(results, [Ok(()), no_space, no_space, no_space], "{engine}");
            let longer = queue.start(FileOp::SetLength { length: 3 * LIMIT }).await;
            assert_eq!(kind(longer), IoErrorKind::NoSpace, "{engine}");
            common::write(&queue, 0, &[2; 4096]).await.unwrap();
            let data = common::read(&queue, LIMIT + LIMIT / 2, 4096, PastEnd::Fails).await.unwrap();
            assert_eq!(data, [0; 4096], "{engine}");
        });
        reactor.stop().unwrap();
    }
    let new = dir.path().join("new");
    assert!(ringdisk_engine::create(&new, 2 * LIMIT).is_err());
    assert!(!new.exists(), "nothing is left of it");
}
