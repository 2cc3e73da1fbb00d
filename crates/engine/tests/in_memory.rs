//! Files that lie in memory: bytes are only copied, through a mapping what is there, by calls the rest.

mod common;

use block::{FileOp, PastEnd};
use common::{reactor, with_queue};
use memory::IoBuf;
use ringdisk_engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig};
use std::future::{Future, poll_fn};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
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
    let file = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap();
    Some((dir, file))
}

/// As [`file`], where calls are counted: on a host with swap they are workers' (see `swapped_out.rs`).
fn file_without_swap() -> Option<(tempfile::TempDir, Arc<dyn block::File>)> {
    if rustix::system::sysinfo().totalswap > 0 {
        // Nothing is missing here that could be had.
        eprintln!("skipped: this host has swap");
        return None;
    }
    file()
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
fn what_a_task_awaits_has_ended_when_it_looks_unless_it_takes_a_call_or_long() {
    let Some((_dir, file)) = file_without_swap() else { return };
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        let buf = IoBuf::from_pool(LONGEST_BYTES).unwrap();
        let read = |data| queue.start(FileOp::Read { offset: 4096, data, past_end: PastEnd::Fails });
        // One call carries out what a turn has of those.
        assert_eq!(first_look(read(buf.whole())).await, (false, Ok(())));
        assert_eq!(buf.whole().to_vec(), vec![7; LONGEST_BYTES]);
        let mut is_mapped = false;
        for _ in 0..100 {
            is_mapped |= first_look(read(buf.whole())).await == (true, Ok(()));
        }
        assert!(is_mapped && first_look(read(buf.whole())).await == (true, Ok(())));
        let write = FileOp::Write { offset: 8192, data: buf.whole().slice(1, 5000), fua: false };
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
fn granules_with_data_are_those_in_which_anything_but_a_hole_is() {
    const GRANULE: u64 = 64 << 10;
    let Some((_dir, file)) = file() else { return };
    // Behind the first MiB, all of it data: a page at a granule's end, one that two granules share between them, the last.
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        let buf = IoBuf::zeroed(8192);
        for (offset, length) in [((1 << 20) + GRANULE - 4096, 4096), ((2 << 20) - 4096, 8192), ((3 << 20) + 4096, 100)]
        {
            let write = FileOp::Write { offset, data: buf.whole().slice(0, length), fua: false };
            queue.start(write).await.unwrap();
        }
    });
    reactor.stop().unwrap();
    let length = file.length_bytes().unwrap();
    let walk = |look: &dyn Fn(u64) -> (bool, u64)| {
        let (mut at, mut with_data) = (0, std::collections::BTreeSet::new());
        while at < length {
            let (hole, run) = look(at);
            assert!(run > 0 && run <= length - at);
            with_data.extend((!hole).then_some(at / GRANULE..=(at + run - 1) / GRANULE).into_iter().flatten());
            at += run;
        }
        with_data
    };
    let fine = walk(&|at| file.hole_at(at, length - at).unwrap());
    let coarse = walk(&|at| file.hole_or_granule_at(at, length - at, GRANULE).unwrap());
    assert_eq!(fine.len(), 16 + 1 + 2 + 1);
    assert_eq!(coarse, fine);
    assert_eq!(file.hole_or_granule_at(4096, length, GRANULE).unwrap(), (false, GRANULE - 4096));
}

#[test]
fn a_task_with_much_to_copy_lets_others_come_between() {
    let Some((_dir, file)) = file_without_swap() else { return };
    let reactor = reactor("memory");
    let waits = with_queue(&reactor, &file, |queue| async move {
        let buf = IoBuf::from_pool(LONGEST_BYTES).unwrap();
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
    let Some((_dir, file)) = file_without_swap() else { return };
    for inline_bytes in [1 << 20, LONGEST_BYTES] {
        let config = ReactorConfig::default().with(|config| {
            config.name = "job".into();
            config.inline_bytes = inline_bytes;
        });
        let reactor = Reactor::spawn(config).unwrap();
        let made = with_queue(&reactor, &file, |queue| async move {
            let buf = IoBuf::zeroed(1 << 20);
            let read = FileOp::Read { offset: 0, data: buf.whole(), past_end: PastEnd::Fails };
            let (read_itself, result) = first_look(queue.start(read)).await;
            assert_eq!(result, Ok(()));
            assert_eq!(buf.whole().to_vec(), vec![7; 1 << 20]);
            let write = FileOp::Write { offset: 0, data: buf.whole(), fua: false };
            let (written_itself, result) = first_look(queue.start(write)).await;
            assert_eq!(result, Ok(()));
            [read_itself, written_itself]
        });
        // A worker's calls are its own. What was read by a call, when the turn ended, is written through the mapping.
        assert_eq!(made, [false, inline_bytes == 1 << 20], "up to {inline_bytes} bytes");
        assert_eq!(reactor.stats().system_calls, u64::from(made[1]), "up to {inline_bytes} bytes");
        reactor.stop().unwrap();
    }
}

fn blocks(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks()
}

fn sparse(length_bytes: u64) -> Option<(tempfile::TempDir, PathBuf, Arc<dyn block::File>)> {
    let (dir, _) = file()?;
    let path = dir.path().join("sparse");
    ringdisk_engine::create(&path, length_bytes).unwrap();
    let file = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap();
    Some((dir, path, file))
}

#[test]
fn what_is_chosen_for_a_file_says_how_it_is_served() {
    let Some((dir, file)) = file_without_swap() else { return };
    let words = |path: &Path, engine| {
        let options = OpenOptions::default().with(|options| options.engine = engine);
        ringdisk_engine::open(path, &options).unwrap().info().engine.clone()
    };
    assert!(file.info().engine.ends_with("through a mapping, where that can be"), "{}", file.info().engine);
    let path = dir.path().join("long");
    ringdisk_engine::create(&path, 300 << 30).unwrap();
    let long = words(&path, EngineKind::Auto);
    assert!(
        long.contains("reactors copy what is there") && long.ends_with("by calls, as it cannot be mapped"),
        "{long}"
    );
    ringdisk_engine::create(&dir.path().join("short"), 1 << 20).unwrap();
    let ring = words(&dir.path().join("short"), EngineKind::IoUring);
    assert!(ring.ends_with("the options ask for it; through a mapping, where that can be"), "{ring}");
    let asked = words(&path, EngineKind::Threads);
    assert!(asked.ends_with("the options ask for it"), "{asked}");
    let on_disk = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let cached = words(on_disk.path(), EngineKind::Auto);
    assert!(!cached.starts_with("io_uring") || cached.contains("copies what the page cache holds"), "{cached}");
}

#[test]
fn a_batch_on_what_is_asked_for_again_and_again_takes_no_system_call() {
    let Some((_dir, file)) = file_without_swap() else { return };
    let reactor = reactor("memory");
    let sink_batch = |write: bool| {
        with_queue(&reactor, &file, move |queue| async move {
            let (sink, mut ended) = (block::Sink::new(), Vec::new());
            let bufs: Vec<_> = (0..32).map(|_| IoBuf::zeroed(4096)).collect();
            for (token, buf) in bufs.iter().enumerate() {
                let (offset, data) = (token as u64 * 32768, buf.whole());
                let op = match write {
                    true => FileOp::Write { offset, data, fua: false },
                    false => FileOp::Read { offset, data, past_end: PastEnd::Fails },
                };
                queue.push(block::FileIo::new(op, block::Done::Sink { sink: Rc::clone(&sink), token: token as _ }));
            }
            // Another task's turn: the batch was submitted and harvested.
            while ended.len() < 32 {
                let mut looked = false;
                poll_fn(|context| {
                    context.waker().wake_by_ref();
                    if std::mem::replace(&mut looked, true) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                sink.take(&mut ended);
            }
            assert!(ended.iter().all(|(_, result)| result.is_ok()));
            bufs.iter().all(|buf| buf.whole().to_vec() == vec![7; 4096])
        })
    };
    let calls = |write| {
        let before = reactor.stats();
        let same = sink_batch(write);
        assert!(write || same, "what was read is what the file holds");
        assert_eq!(reactor.stats().completions - before.completions, 32);
        reactor.stats().system_calls - before.system_calls
    };
    assert_eq!(calls(false), 1, "the first time");
    let batches = (1..).find(|_| calls(false) == 0).unwrap();
    assert!(batches <= 16, "only after {batches} batches all was mapped");
    assert_eq!(calls(true), 0);
    reactor.stop().unwrap();
}

#[test]
fn holes_that_are_read_stay_holes_and_what_is_given_back_stays_given_back() {
    let Some((_dir, path, file)) = sparse(64 << 20) else { return };
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        let everywhere = async |queue: &Rc<dyn block::FileQueue>| {
            for offset in (0..64 << 20).step_by(64 << 10) {
                let data = common::read(queue, offset, 64 << 10, PastEnd::Fails).await.unwrap();
                assert!(data.iter().all(|byte| *byte == u8::from((1 << 20..2 << 20).contains(&offset))), "{offset}");
            }
        };
        common::write(&queue, 1 << 20, &[1; 1 << 20]).await.unwrap();
        everywhere(&queue).await;
        everywhere(&queue).await;
        assert_eq!(blocks(&path), 2048, "reading holes fills nothing");
        // By calls, then through the mapping.
        for byte in 2..20 {
            common::write(&queue, (8 << 20) + 4096, &[byte; 69_632]).await.unwrap();
            let data = common::read(&queue, (8 << 20) + 4096, 69_632, PastEnd::Fails).await.unwrap();
            assert!(data.iter().all(|read| *read == byte));
        }
        queue.start(FileOp::Discard { offset: 8 << 20, length: 1 << 20 }).await.unwrap();
        let data = common::read(&queue, (8 << 20) + 4096, 8192, PastEnd::Fails).await.unwrap();
        assert_eq!(data, [0; 8192]);
        everywhere(&queue).await;
        assert_eq!(blocks(&path), 2048, "nor does reading what was discarded");
    });
    reactor.stop().unwrap();
}

#[test]
fn what_is_written_behind_the_end_makes_the_file_longer_and_a_cut_file_forgets() {
    let Some((_dir, path, _)) = sparse(0) else { return };
    std::fs::write(&path, [1; 5000]).unwrap();
    let file = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        let length = || std::fs::metadata(&path).unwrap().len();
        for _ in 0..2 {
            assert_eq!(common::read(&queue, 4096, 904, PastEnd::Fails).await.unwrap(), [1; 904]);
        }
        common::write(&queue, 5000, &[2; 1000]).await.unwrap();
        assert_eq!(length(), 6000);
        assert!(common::read(&queue, 5000, 2000, PastEnd::Fails).await.is_err());
        common::write(&queue, 4096, &[3; 8192]).await.unwrap();
        common::write(&queue, 4096, &[4; 8192]).await.unwrap();
        assert_eq!(length(), 12288);
        for (cut, then) in [(4500, 12288), (8192, 12288), (0, 8000)] {
            queue.start(FileOp::SetLength { length: cut }).await.unwrap();
            queue.start(FileOp::SetLength { length: then }).await.unwrap();
            let kept = common::read(&queue, cut, (then - cut) as usize, PastEnd::Fails).await.unwrap();
            assert!(kept.iter().all(|byte| *byte == 0), "cut at {cut}");
            common::write(&queue, then - 1, &[5; 10]).await.unwrap();
            assert_eq!(length(), then + 9);
            common::write(&queue, 0, &[6; 12288]).await.unwrap();
        }
    });
    reactor.stop().unwrap();
}

#[test]
fn a_file_that_another_program_cuts_gives_errors_and_works_again_when_it_is_long_enough() {
    let Some((_dir, path, file)) = sparse(1 << 20) else { return };
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        for byte in [0, 1] {
            common::write(&queue, 0, &vec![byte; 1 << 20]).await.unwrap();
        }
        let outside = std::fs::File::options().write(true).open(&path).unwrap();
        outside.set_len(8192).unwrap();
        assert!(common::read(&queue, 65536, 4096, PastEnd::Fails).await.is_err());
        assert_eq!(common::read(&queue, 0, 4096, PastEnd::Fails).await.unwrap(), [1; 4096]);
        common::write(&queue, 65536, &[2; 4096]).await.unwrap();
        assert_eq!(outside.metadata().unwrap().len(), 69632);
        assert_eq!(common::read(&queue, 65536, 4096, PastEnd::Fails).await.unwrap(), [2; 4096]);
        assert_eq!(common::read(&queue, 32768, 4096, PastEnd::Fails).await.unwrap(), [0; 4096]);
    });
    reactor.stop().unwrap();
}

#[test]
fn a_full_file_system_is_an_error_of_the_write_also_where_pages_were_taken_away() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = common::loop_device::Mounted::tmpfs(dir.path(), 1 << 20) else {
        return common::skip("a tmpfs cannot be mounted here (it takes root)");
    };
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 512 << 10).unwrap();
    let file = ringdisk_engine::open(&path, &OpenOptions::default()).unwrap();
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        for byte in [1, 2] {
            common::write(&queue, 0, &vec![byte; 512 << 10]).await.unwrap();
        }
        // Another program takes pages away that are known to be there, and the room for them.
        let outside = std::fs::File::options().write(true).open(&path).unwrap();
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&outside, mode, 0, 256 << 10).unwrap();
        let filler = path.with_file_name("filler");
        assert!(std::fs::write(&filler, vec![3; 1 << 20]).is_err(), "the file system is full");
        let error = common::write(&queue, 4096, &[4; 4096]).await.unwrap_err();
        assert_eq!(error.kind(), block::IoErrorKind::NoSpace);
        assert_eq!(common::read(&queue, 4096, 4096, PastEnd::Fails).await.unwrap(), [0; 4096]);
        assert_eq!(common::read(&queue, 256 << 10, 4096, PastEnd::Fails).await.unwrap(), [2; 4096]);
        std::fs::remove_file(&filler).unwrap();
        common::write(&queue, 4096, &[4; 4096]).await.unwrap();
        assert_eq!(common::read(&queue, 4096, 4096, PastEnd::Fails).await.unwrap(), [4; 4096]);
    });
    reactor.stop().unwrap();
}

#[test]
fn the_times_of_a_file_tell_of_writes_once_they_were_flushed_or_the_file_is_closed() {
    let Some((dir, file)) = file() else { return };
    let path = dir.path().join("image");
    let reactor = reactor("memory");
    let long_ago = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    let age = || {
        let outside = std::fs::File::options().write(true).open(&path).unwrap();
        let before = outside.metadata().unwrap().modified().unwrap();
        outside.set_modified(long_ago).unwrap();
        before
    };
    age();
    let flushes = |flush: bool| {
        with_queue(&reactor, &file, move |queue| async move {
            common::write(&queue, 0, &[1; 4096]).await.unwrap();
            if flush {
                queue.start(FileOp::Flush).await.unwrap();
            }
        });
    };
    flushes(true);
    assert!(age() > long_ago, "flushed");
    flushes(false);
    drop(file);
    // The reactor lets go of the file when its queue has gone.
    reactor.stop().unwrap();
    assert!(age() > long_ago, "closed");
    // Guests of these send no flush, or none that reaches the file.
    for cache in [CacheMode::Unsafe, CacheMode::Writethrough] {
        let file = ringdisk_engine::open(&path, &OpenOptions::default().with(|options| options.cache = cache)).unwrap();
        let reactor = common::reactor("memory");
        for _ in 0..20 {
            age();
            with_queue(&reactor, &file, move |queue| async move {
                common::write(&queue, 0, &[1; 4096]).await.unwrap();
                if cache == CacheMode::Unsafe {
                    queue.start(FileOp::Flush).await.unwrap();
                }
            });
            assert!(age() > long_ago, "{cache}");
        }
        reactor.stop().unwrap();
    }
}

#[test]
fn a_file_that_is_open_for_reading_only_is_read_through_its_mapping_too() {
    let Some((dir, _)) = file_without_swap() else { return };
    let options = OpenOptions::default().with(|options| options.read_only = true);
    let file = ringdisk_engine::open(&dir.path().join("image"), &options).unwrap();
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        for _ in 0..3 {
            assert_eq!(common::read(&queue, 5, 10_000, PastEnd::Fails).await.unwrap(), [7; 10_000]);
        }
        assert!(common::write(&queue, 5, &[1]).await.is_err());
    });
    assert_eq!(reactor.stats().system_calls, 1);
    reactor.stop().unwrap();
}

#[test]
fn what_a_call_has_written_needs_none_from_then_on() {
    let (Some(_), Some((_dir, _, file))) = (file_without_swap(), sparse(0)) else { return };
    let reactor = reactor("memory");
    with_queue(&reactor, &file, |queue| async move {
        for byte in 0..5 {
            common::write(&queue, 1 << 20, &[byte; 8192]).await.unwrap();
            assert_eq!(common::read(&queue, 1 << 20, 8192, PastEnd::Fails).await.unwrap(), [byte; 8192]);
        }
    });
    assert_eq!(reactor.stats().system_calls, 1);
    reactor.stop().unwrap();
}
