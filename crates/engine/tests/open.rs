//! Opening: what is refused and how it is said, what a file says of itself, block devices.

mod common;

use block::{Error, ErrorKind, File, FileOp, IoErrorKind, PastEnd};
use common::loop_device::LoopDevice;
use common::model::Model;
use common::reactor;
use memory::IoBuf;
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions};
use rustix::fs::{FallocateFlags, fallocate, inotify};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

fn refused(path: &Path, options: &OpenOptions) -> Error {
    ringdisk_engine::open(path, options).map(|file| file.info().clone()).unwrap_err()
}

#[test]
fn what_is_no_disk_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let cases = [
        (dir.path().join("missing"), "No such file"),
        (dir.path().to_owned(), "a directory"),
        (PathBuf::from("/dev/null"), "a character device"),
        // Opening it would wait for its other end.
        (fifo, "a named pipe"),
    ];
    for (path, what) in cases {
        for read_only in [false, true] {
            let error =
                refused(&path, &OpenOptions::default().with(|options| options.read_only = read_only)).to_string();
            assert!(error.contains(what) && error.contains(path.to_str().unwrap()), "{error}");
        }
    }
    let contradiction = OpenOptions::default().with(|options| {
        options.sync = true;
        options.cache = CacheMode::Unsafe;
    });
    assert_eq!(refused(dir.path(), &contradiction).kind(), ErrorKind::BadOption);
}

#[test]
fn linux_aio_is_refused_on_a_cached_file_and_replaced_under_auto() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 20).unwrap();
    let options = OpenOptions::default().with(|options| options.engine = EngineKind::LinuxAio);
    assert!(refused(&path, &options).to_string().contains("cache=none"));
    for cache in CacheMode::NAMES {
        let options = OpenOptions::default().with(|options| options.cache = cache.parse().unwrap());
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let engine = &file.info().engine;
        assert!(engine.contains("because") && engine.contains(cache), "{engine}");
        assert_eq!(engine.contains("direct I/O"), options.cache.is_direct(), "{engine}");
    }
}

#[test]
fn a_file_that_exists_is_not_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, b"precious").unwrap();
    assert_eq!(ringdisk_engine::create(&path, 4096).unwrap_err().kind(), ErrorKind::BadOption);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_read_only_file_refuses_everything_that_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, [5; 4096]).unwrap();
    let file = ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.read_only = true)).unwrap();
    let reactor = reactor("read-only");
    common::with_queue(&reactor, &file, |queue| async move {
        let ops = [
            FileOp::Write { offset: 0, data: IoBuf::zeroed(512).whole(), fua: false },
            FileOp::WriteZeroes { offset: 0, length: 512, may_unmap: true },
            FileOp::Discard { offset: 0, length: 512 },
            FileOp::SetLength { length: 0 },
        ];
        for op in ops {
            assert_eq!(queue.start(op).await.unwrap_err().kind(), IoErrorKind::ReadOnly);
        }
        queue.start(FileOp::Flush).await.unwrap();
        let far = FileOp::Read { offset: u64::MAX - 3, data: IoBuf::zeroed(8).whole(), past_end: PastEnd::Zeros };
        assert_eq!(queue.start(far).await.unwrap_err().kind(), IoErrorKind::OutOfRange);
    });
    assert_eq!(std::fs::read(&path).unwrap(), [5; 4096]);
    reactor.stop().unwrap();
}

#[test]
fn blocking_queues_serve_any_alignment_too() {
    let dir = tempfile::tempdir().unwrap();
    for cache in CacheMode::NAMES {
        let path = dir.path().join(cache);
        ringdisk_engine::create(&path, 1000).unwrap();
        let options = OpenOptions::default().with(|options| options.cache = cache.parse().unwrap());
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let queue = file.open_blocking().unwrap();
        let bytes = block::block_on(async {
            common::write(&queue, 700, &[1; 5000]).await.unwrap();
            queue.start(FileOp::WriteZeroes { offset: 800, length: 100, may_unmap: false }).await.unwrap();
            queue.start(FileOp::WriteZeroes { offset: 5000, length: 2001, may_unmap: true }).await.unwrap();
            assert!(common::read(&queue, 7000, 2, PastEnd::Fails).await.is_err(), "{cache}");
            common::read(&queue, 1, 7000, PastEnd::Fails).await.unwrap()
        });
        assert_eq!(file.length_bytes().unwrap(), 7001, "{cache}");
        for (index, byte) in bytes.iter().enumerate() {
            let at = index + 1;
            let expected = u8::from((700..5000).contains(&at) && !(800..900).contains(&at));
            assert_eq!(*byte, expected, "offset {at}, {cache}");
        }
    }
}

#[test]
fn space_that_is_reserved_behind_the_end_of_a_file_stays_when_the_file_becomes_longer() {
    const BYTES: u64 = 1 << 20;
    // Here and on XFS, a hole also takes what is reserved behind the end.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else { return common::skip("there is no /dev/shm") };
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 4096).unwrap();
    let reserved = std::fs::File::options().write(true).open(&path).unwrap();
    fallocate(&reserved, FallocateFlags::KEEP_SIZE, 4096, BYTES).unwrap();
    let queue = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap().open_blocking().unwrap();
    let longer = FileOp::WriteZeroes { offset: 4096, length: BYTES, may_unmap: true };
    block::block_on(queue.start(longer)).unwrap();
    let found = reserved.metadata().unwrap();
    assert!(found.len() == 4096 + BYTES && found.blocks() * 512 >= BYTES, "{found:?}");
}

#[test]
fn block_devices_with_small_and_large_sectors_agree_with_the_model() {
    const BYTES: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (reactor("one"), reactor("two"));
    for (seed, sector_bytes) in [512, 4096].into_iter().enumerate() {
        let backing = dir.path().join(sector_bytes.to_string());
        ringdisk_engine::create(&backing, BYTES as u64).unwrap();
        let Some(device) = LoopDevice::over(&backing, sector_bytes) else {
            return common::skip("a loop device cannot be made here (it takes root and losetup)");
        };
        for engine in [EngineKind::IoUring, EngineKind::LinuxAio, EngineKind::Threads] {
            for cache in [CacheMode::None, CacheMode::Writeback] {
                if engine == EngineKind::LinuxAio && cache == CacheMode::Writeback {
                    continue;
                }
                let options = OpenOptions::default().with(|options| {
                    options.engine = engine;
                    options.cache = cache;
                });
                let file = ringdisk_engine::open(device.path(), &options).unwrap();
                check_device(&file, sector_bytes, cache);
                let mut model = Model::new(seed as u64, BYTES, BYTES as u64, true, 1);
                model.discard_unit = u64::from(sector_bytes);
                clear(&file, &one, BYTES as u64);
                for _ in 0..60 {
                    model.round(&file, [&one, &two]);
                }
                common::with_queue(&one, &file, |queue| async move { queue.start(FileOp::Flush).await.unwrap() });
                model.check_host(device.path(), &file);
            }
        }
    }
    one.stop().unwrap();
    two.stop().unwrap();
}

fn check_device(file: &Arc<dyn File>, sector_bytes: u32, cache: CacheMode) {
    let info = file.info();
    assert!(info.block_device && !info.can_grow && !info.read_only);
    assert_eq!(info.length_bytes, 1 << 20);
    let alignment = if cache.is_direct() { sector_bytes } else { 1 };
    assert_eq!(info.offset_alignment_bytes, alignment);
}

fn clear(file: &Arc<dyn File>, reactor: &ringdisk_engine::ReactorThread, length: u64) {
    common::with_queue(reactor, file, move |queue| async move {
        queue.start(FileOp::WriteZeroes { offset: 0, length, may_unmap: false }).await.unwrap();
        let error = queue.start(FileOp::SetLength { length: length + 1 }).await.unwrap_err();
        assert_eq!(error.kind(), IoErrorKind::Unsupported);
    });
}

#[test]
fn reading_does_not_change_when_a_file_was_read_last() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, vec![1; 1 << 16]).unwrap();
    // Before it was written: even file systems that note little would note a read.
    let read_last = std::time::SystemTime::now() - std::time::Duration::from_secs(3 * 24 * 60 * 60);
    let times = std::fs::FileTimes::new().set_accessed(read_last);
    std::fs::File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
    for cache in [CacheMode::Writeback, CacheMode::None] {
        let options = OpenOptions::default().with(|options| {
            options.cache = cache;
            options.engine = EngineKind::IoUring;
        });
        let file = ringdisk_engine::open(&path, &options).unwrap();
        let reactor = common::reactor("quiet");
        common::with_queue(&reactor, &file, |queue| async move {
            common::read(&queue, 0, 4096, PastEnd::Fails).await.unwrap();
        });
        reactor.stop().unwrap();
    }
    let after = std::fs::metadata(&path).unwrap().accessed().unwrap();
    assert_eq!(after, read_last);
}

#[test]
fn the_locks_of_a_file_that_is_open_for_reading_become_a_writers_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 4096).unwrap();
    let open = |read_only: bool| {
        let options = OpenOptions::default().with(|options| {
            options.read_only = read_only;
            options.lock_timeout = std::time::Duration::ZERO;
        });
        ringdisk_engine::open(&path, &options)
    };
    let ours = open(true).unwrap();
    let is_free = |read_only| match open(read_only) {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Locked);
            false
        }
    };
    let other = open(true).unwrap();
    let refused = ours.lock_again(true).unwrap_err();
    assert!(refused.kind() == ErrorKind::Locked && refused.to_string().contains("belongs to one alone"), "{refused}");
    assert!(is_free(true) && !is_free(false), "it is locked as before");
    drop(other);
    for _ in 0..2 {
        ours.lock_again(true).unwrap();
        assert!(!is_free(true) && !is_free(false));
        ours.lock_again(false).unwrap();
        ours.lock_again(false).unwrap();
        assert!(is_free(true) && !is_free(false));
    }
    drop(ours);
    assert!(is_free(false));
}

#[test]
fn a_new_empty_file_is_not_cut_after_others_can_have_found_and_filled_it() {
    let dir = tempfile::tempdir().unwrap();
    let events = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&events, dir.path(), inotify::WatchFlags::CREATE | inotify::WatchFlags::MODIFY).unwrap();
    ringdisk_engine::create(&dir.path().join("new"), 0).unwrap();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&events, &mut buffer);
    let seen: Vec<_> = std::iter::from_fn(|| reader.next().ok().map(|event| event.events())).collect();
    assert_eq!(seen, [inotify::ReadFlags::CREATE]);
}
