//! Tests of what results mean for requests.

use super::*;
use crate::base::call::MAX_SEGMENTS;
use crate::base::options::{CacheMode, EngineKind, OpenOptions};
use crate::request::segments::buffers_of;
use crate::request::slab::Slab;
use memory::IoBuf;
use std::io::Write;

/// A read or write of `length` bytes at 0 of a file of 5000 bytes, in memory cut at byte 700.
fn request(cache: CacheMode, action: Action, length: usize) -> Request {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 5000]).unwrap();
    let options = OpenOptions { engine: EngineKind::Threads, cache, lock: false, ..OpenOptions::default() };
    let file = crate::open::opening::open_file(file.into(), "test", &options).unwrap();
    let memory = IoBuf::zeroed(length).whole();
    memory.fill(0xee);
    let window = IoBuf::gather(vec![memory.slice(0, 700), memory.slice(700, length - 700)]).whole();
    let target = Rc::new(QueueFile::blocking(std::sync::Arc::new(file)));
    let done = Done::Sink { sink: block::Sink::new(), token: 0 };
    Request { target, action, offset: 0, window, progress: 0, counted: false, priority: Priority::NONE, done }
}

fn bytes_listed(request: &Request) -> usize {
    let mut scratch = Vec::new();
    match buffers_of(request, &mut scratch) {
        Buffers::Single { length_bytes, .. } => length_bytes,
        Buffers::Vector { ptr, count } => {
            // SAFETY: the list has `count` entries, in the window or in `scratch`.
            unsafe { std::slice::from_raw_parts(ptr, count) }.iter().map(|iovec| iovec.iov_len).sum()
        }
    }
}

#[test]
fn only_reads_and_writes_are_tried_again_by_who_may_wait() {
    let needs_to_wait = |action, errno: i32| request(CacheMode::Writeback, action, 4096).needs_to_wait(-errno);
    for errno in [libc::ENOMEM, libc::EOPNOTSUPP] {
        assert!(needs_to_wait(Action::Read { need_bytes: 0 }, errno));
        assert!(needs_to_wait(Action::Write { durable: true }, errno));
        assert!(!needs_to_wait(Action::Sync, errno), "it may say only once that data were lost");
    }
    assert!(!needs_to_wait(Action::Read { need_bytes: 0 }, libc::EIO));
}

#[test]
fn a_short_transfer_goes_on_where_it_stopped_until_all_is_moved() {
    for action in [Action::Read { need_bytes: 4096 }, Action::Write { durable: false }] {
        let mut request = request(CacheMode::Writeback, action, 4096);
        let mut left = 4096;
        for moved in [1, 698, 1, 300, 3000] {
            assert_eq!(bytes_listed(&request), left);
            assert_eq!(request.advance(moved), Step::Again);
            left -= moved as usize;
            assert_eq!(request.file_offset(), 4096 - left as u64);
        }
        assert_eq!(request.advance(-libc::EINTR), Step::Again);
        assert_eq!(request.advance(-libc::EAGAIN), Step::ToWorker);
        assert_eq!(request.advance(left as i32), Step::Finished(Ok(())));
    }
}

#[test]
fn what_makes_data_durable_fails_once_a_sync_was_told_of_lost_ones() {
    for (cache, action, expected) in [
        (CacheMode::Writeback, Action::Sync, Err(IoError::EIO)),
        (CacheMode::Writeback, Action::Write { durable: true }, Err(IoError::EIO)),
        (CacheMode::Writeback, Action::Write { durable: false }, Ok(())),
        // A ring that failed for good has left writes behind that may land on this one.
        (CacheMode::None, Action::Write { durable: true }, Err(IoError::EIO)),
    ] {
        let request = request(cache, action, 4096);
        request.target.file.sync_lost.store(true, Ordering::Relaxed);
        let Done::Sink { sink, .. } = &request.done else { unreachable!("made so above") };
        let (sink, mut ended) = (Rc::clone(sink), Vec::new());
        request.finish(Ok(()));
        sink.take(&mut ended);
        assert_eq!(ended, [(0, expected)], "{cache}, {action:?}");
    }
}

#[test]
fn nothing_moved_is_the_end_of_the_file_for_a_read_and_a_full_disk_for_a_write() {
    let mut enough = request(CacheMode::Writeback, Action::Read { need_bytes: 4000 }, 4096);
    assert_eq!(enough.advance(4000), Step::Again);
    assert_eq!(enough.advance(0), Step::Finished(Ok(())));
    assert_eq!(enough.window.to_vec()[3999..4001], [0xee, 0], "what lies behind the end reads as zeros");
    let mut too_short = request(CacheMode::Writeback, Action::Read { need_bytes: 4000 }, 4096);
    assert_eq!(too_short.advance(3999), Step::Again);
    assert_eq!(too_short.advance(0), Step::Finished(Err(IoError::EIO)));
    let mut write = request(CacheMode::Writeback, Action::Write { durable: false }, 4096);
    assert_eq!(write.advance(512), Step::Again);
    assert!(matches!(write.advance(0), Step::Finished(Err(error)) if error.kind() == IoErrorKind::NoSpace));
}

#[test]
fn results_that_cannot_be_true_are_errors() {
    for action in [Action::Read { need_bytes: 0 }, Action::Write { durable: false }] {
        let mut request = request(CacheMode::Writeback, action, 4096);
        assert_eq!(request.advance(4097), Step::Finished(Err(IoError::EIO)));
        assert!(matches!(request.advance(-libc::ENOSPC), Step::Finished(Err(e)) if e.kind() == IoErrorKind::NoSpace));
    }
}

#[test]
fn a_short_direct_read_stays_aligned_and_believes_only_the_true_end() {
    let mut request = request(CacheMode::None, Action::Read { need_bytes: 5000 }, 8192);
    let unit = request.target.file.alignment.offset_bytes as i32;
    if unit < 2 {
        eprintln!("skipped: direct I/O on this file system takes any alignment");
        return;
    }
    assert_eq!(request.advance(unit + 1), Step::Again, "half a unit in the middle of the file is read again");
    assert_eq!(request.file_offset(), unit as u64);
    assert_eq!(request.advance(5000 - unit), Step::Finished(Ok(())), "the file's own end");
    assert_eq!(request.window.to_vec()[4999..5001], [0xee, 0]);
}

#[test]
fn more_segments_than_a_call_takes_go_in_several_calls() {
    let one = IoBuf::zeroed(1).whole();
    let count = MAX_SEGMENTS * 2 + 5;
    let mut request = request(CacheMode::Writeback, Action::Write { durable: false }, 4096);
    request.window = IoBuf::gather(vec![one; count]).whole();
    let mut moved = 0;
    while request.left_bytes() > 0 {
        let now = bytes_listed(&request);
        assert!(now > 0 && now <= MAX_SEGMENTS);
        moved += now;
        request.advance(now as i32);
    }
    assert_eq!(moved, count);
}

#[test]
fn the_slab_grows_to_the_peak_only() {
    let mut slab = Slab::default();
    let new = || request(CacheMode::Writeback, Action::Sync, 4096);
    let held: Vec<_> = (0..4).map(|_| slab.insert(new())).collect();
    for index in &held {
        assert!(slab.remove(*index).is_some());
        assert!(slab.remove(*index).is_none());
        assert!(slab.insert(new()) < 4);
    }
    assert_eq!(slab.live(), 4);
}

#[test]
fn memory_that_a_guest_has_taken_away_says_nothing_of_the_storage() {
    let failing = request(CacheMode::Writeback, Action::Write { durable: true }, 4096);
    let file = Rc::clone(&failing.target);
    failing.finish(Err(IoError::from_errno(libc::EFAULT)));
    assert!(!file.file.sync_lost.load(Ordering::Relaxed));
    let failing = request(CacheMode::Writeback, Action::Write { durable: true }, 4096);
    let file = Rc::clone(&failing.target);
    failing.finish(Err(IoError::EIO));
    assert!(file.file.sync_lost.load(Ordering::Relaxed));
}

#[test]
fn only_a_write_says_that_there_is_no_space() {
    let no_space = IoError::new(IoErrorKind::NoSpace);
    for (action, expected) in [(Action::Sync, IoError::EIO), (Action::Write { durable: true }, no_space)] {
        let failing = request(CacheMode::Writeback, action, 4096);
        let Done::Sink { sink, .. } = &failing.done else { unreachable!("made so above") };
        let sink = Rc::clone(sink);
        failing.finish(Err(no_space));
        let mut ended = Vec::new();
        sink.take(&mut ended);
        assert_eq!(ended, [(0, Err(expected))], "{action:?}");
    }
}

#[test]
fn after_a_failed_sync_of_the_page_cache_no_flush_is_believed() {
    for (cache, lost) in [(CacheMode::Writeback, true), (CacheMode::None, false)] {
        let failing = request(cache, Action::Sync, 4096);
        let file = Rc::clone(&failing.target);
        failing.finish(Err(IoError::EIO));
        let queue = crate::queue::host_queue::HostQueue::blocking(std::sync::Arc::clone(&file.file));
        let queue: Rc<dyn block::FileQueue> = Rc::new(queue);
        let flushed = block::block_on(queue.start(block::FileOp::Flush));
        assert_eq!(flushed.is_err(), lost, "{cache}");
    }
}
