//! Tests of workers by themselves, without a reactor.

use super::*;
use crate::base::call::{Buffers, Call};
use crate::base::io_submit;
use crate::base::options::{EngineKind, OpenOptions};
use crate::file::mapped::host_has_swap;
use crate::request::queue_file::QueueFile;
use block::{Priority, Sink};
use memory::{IoBuf, Window};
use std::os::fd::AsRawFd;
use std::rc::Rc;

fn workers(spin_limit: Duration) -> Workers {
    Workers::new(Arc::new(Wakeup::new().unwrap()), Arc::default(), None, 0, spin_limit)
}

fn target() -> Rc<QueueFile> {
    let options = OpenOptions { lock: false, engine: EngineKind::Threads, ..OpenOptions::default() };
    let file = crate::open::opening::open_file(tempfile::tempfile().unwrap().into(), "test", &options).unwrap();
    Rc::new(QueueFile::blocking(Arc::new(file)))
}

fn has_io_submit() -> bool {
    IoSubmit::new(1).is_some()
}

fn ends_in_call(target: &QueueFile) -> bool {
    matches!(target.traits.storage, Storage::PageCache { writes_end_in_call: true, .. })
}

fn write(target: &Rc<QueueFile>, sink: &Rc<Sink>, token: u64, window: Window) -> Request {
    Request {
        target: Rc::clone(target),
        action: Action::Write { durable: false },
        offset: token * 512,
        window,
        progress: 0,
        counted: false,
        priority: Priority::NONE,
        done: Done::Sink { sink: Rc::clone(sink), token },
    }
}

#[test]
fn writes_of_a_batch_to_the_page_cache_are_one_call_and_signalled_at_once() {
    let (workers, target) = (workers(Duration::ZERO), target());
    let (memory, sink) = (IoBuf::zeroed(128 * 512), Sink::new());
    let (mut ended, mut some) = (Vec::new(), Vec::new());
    for round in 1..=20 {
        for token in 0..128 {
            workers.push(write(&target, &sink, token, memory.whole().slice(token as usize * 512, 512)));
        }
        assert!(workers.submit());
        while ended.len() < 128 {
            workers.harvest();
            sink.take(&mut some);
            ended.append(&mut some);
        }
        assert!(ended.iter().enumerate().all(|(at, end)| *end == (at as u64, Ok(()))), "in turn: {ended:?}");
        ended.clear();
        let stats = workers.counters.snapshot();
        let one_call = has_io_submit() && ends_in_call(&target);
        let calls = if one_call { round } else { 128 * round };
        assert_eq!((stats.completions, stats.system_calls, stats.worker_calls), (128 * round, 0, calls));
        assert!(!one_call || stats.harvests == round, "{stats:?}");
    }
}

/// Has workers carry out other jobs in place of those that wait.
fn replace_jobs(workers: &Workers, mut by: impl FnMut(Job) -> Job) {
    for job in &mut *workers.taken.borrow_mut() {
        *job = by(*job);
    }
    workers.submit();
}

fn wait_until(is_so: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
}

#[test]
fn what_wants_to_be_repeated_is_a_call_of_its_own_and_what_ends_by_itself_is_not_signalled_once_more() {
    let (workers, target) = (workers(Duration::ZERO), target());
    let (data, sink) = (IoBuf::from_aligned(memory::AlignedBuf::copy_of(&[7; 512])), Sink::new());
    workers.push(write(&target, &sink, 0, data.whole()));
    if !workers.pool.prepare(How::Begin) {
        return;
    }
    // Linux AIO reads pipes, too, and repeats nothing.
    let (empty, _writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let fd = empty.as_raw_fd();
    replace_jobs(&workers, |job| {
        let call = Call { fd, action: Action::Read { need_bytes: 0 }, ..job.call };
        Job { how: How::Begin, call, ..job }
    });
    wait_until(|| workers.pool.has_signalled());
    std::thread::sleep(Duration::from_millis(5));
    assert!(!workers.pool.has_been_signalled(), "its event says all there is to say");
    assert_eq!((workers.harvest(), workers.in_flight()), (1, 1));
    assert!(workers.taken.borrow().iter().all(|job| job.serialized && job.how == How::Call));
    workers.submit();
    wait_until(|| workers.harvest() > 0);
    let mut ended = Vec::new();
    sink.take(&mut ended);
    assert_eq!((ended, workers.may_be_unsignalled(), workers.in_turn.get()), (vec![(0, Ok(()))], false, 0));
    let mut bytes = [0; 512];
    rustix::io::pread(&target.file.fd, &mut bytes, 0).unwrap();
    assert_eq!(bytes, [7; 512]);
}

#[test]
fn what_the_kernel_refuses_to_begin_does_not_wait_for_what_it_begins_next() {
    let (workers, target) = (workers(Duration::ZERO), target());
    let (data, sink, mut ended) = (IoBuf::zeroed(512), Sink::new(), Vec::new());
    for token in 0..2 {
        workers.push(write(&target, &sink, token, data.whole()));
    }
    if !workers.pool.prepare(How::Begin) {
        return;
    }
    let (reader, full) = rustix::pipe::pipe().unwrap();
    let mut room = vec![0; rustix::pipe::fcntl_setpipe_size(&full, 4096).unwrap()];
    rustix::io::write(&full, &room).unwrap();
    // In one batch: memory that cannot be, and a write that has to wait.
    let (mut first, fd) = (true, full.as_raw_fd());
    replace_jobs(&workers, |job| {
        let buffers = match job.call.buffers {
            Buffers::Single { ptr, .. } if std::mem::take(&mut first) => {
                Buffers::Single { ptr, length_bytes: usize::MAX }
            }
            buffers => buffers,
        };
        Job { how: How::Begin, call: Call { fd, buffers, ..job.call }, ..job }
    });
    wait_until(|| workers.pool.has_signalled());
    workers.harvest();
    sink.take(&mut ended);
    assert_eq!(ended, [(0, Err(IoError::from_errno(libc::ESPIPE)))]);
    rustix::io::read(&reader, &mut room).unwrap();
    wait_until(|| workers.harvest() > 0);
    ended.clear();
    sink.take(&mut ended);
    assert_eq!(ended, [(1, Ok(()))]);
}

#[test]
fn writes_that_end_after_the_call_that_was_to_end_them_are_found_by_who_looks() {
    let (workers, target) = (workers(Duration::ZERO), target());
    let (data, sink) = (IoBuf::zeroed(2 * 4096), Sink::new());
    let dir = tempfile::tempdir().unwrap();
    let direct = rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CREATE;
    let Ok(direct) = rustix::fs::open(dir.path().join("direct"), direct, 0o600.into()) else { return };
    rustix::fs::ftruncate(&direct, 8192).unwrap();
    for token in 0..2 {
        workers.push(write(&target, &sink, token, data.whole().slice(token as usize * 4096, 4096)));
        assert!(workers.may_be_unsignalled(), "also the last one");
    }
    let mut offset = 0;
    replace_jobs(&workers, |job| {
        offset += 4096;
        let call = Call { fd: direct.as_raw_fd(), offset: offset - 4096, ..job.call };
        Job { how: How::Batch, call, ..job }
    });
    wait_until(|| {
        assert!(workers.in_flight() == 0 || workers.may_be_unsignalled());
        workers.look_for_unsignalled();
        workers.harvest();
        workers.in_flight() == 0
    });
    assert!(!workers.may_be_unsignalled());
}

/// A file in memory of two workers' reactors, which copy up to 4 KiB themselves.
struct InMemory {
    _dir: tempfile::TempDir,
    path: std::path::PathBuf,
    reactors: [(Workers, Rc<QueueFile>); 2],
}

impl InMemory {
    /// `None` if there is no tmpfs, or the host has swap, which adds calls to the count.
    fn new() -> Option<Self> {
        if host_has_swap() {
            return None;
        }
        let dir = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = dir.path().join("image");
        std::fs::write(&path, vec![7; 1 << 20]).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let file =
            crate::open::opening::open_file(file.into(), "test", &OpenOptions { lock: false, ..Default::default() });
        let file = Arc::new(file.unwrap());
        let reactors = [(); 2].map(|()| {
            let wakeup = Arc::new(Wakeup::new().unwrap());
            let workers = Workers::new(wakeup, Arc::default(), None, 4096, Duration::ZERO);
            (workers, Rc::new(QueueFile::blocking(Arc::clone(&file))))
        });
        Some(Self { _dir: dir, path, reactors })
    }

    fn file(&self) -> &crate::file::open_file::OpenFile {
        &self.reactors[0].1.file
    }

    /// Gives a reactor a request. On return its worker has it, if it is for one.
    fn give(&self, reactor: usize, action: Action, offset: u64, length_bytes: usize) {
        let (workers, target) = &self.reactors[reactor];
        let window = if length_bytes > 0 { IoBuf::zeroed(length_bytes).whole() } else { Window::empty() };
        let (target, done) = (Rc::clone(target), Done::Sink { sink: Sink::new(), token: 0 });
        workers.push(Request {
            target,
            action,
            offset,
            window,
            progress: 0,
            counted: false,
            priority: Priority::NONE,
            done,
        });
        workers.submit();
    }

    /// Waits for all of a reactor's requests. Returns the calls that workers have made so far.
    fn finish(&self, reactor: usize) -> u64 {
        let (workers, _) = &self.reactors[reactor];
        while workers.in_flight() > 0 {
            workers.harvest();
            workers.submit();
            std::thread::yield_now();
        }
        workers.counters.snapshot().worker_calls
    }

    fn modified(&self) -> std::time::SystemTime {
        std::fs::metadata(&self.path).unwrap().modified().unwrap()
    }
}

const SMALL_WRITE: Action = Action::Write { durable: false };

#[test]
fn writes_of_a_batch_to_what_is_not_mapped_of_a_file_in_memory_are_one_call() {
    let Some(memory) = InMemory::new().filter(|_| has_io_submit()) else { return };
    let (workers, target) = &memory.reactors[0];
    let (data, sink) = (IoBuf::zeroed(4096), Sink::new());
    for (round, count) in [1, 32, 200].into_iter().enumerate() {
        let before = workers.counters.snapshot();
        for token in 0..count {
            // No page is written twice: from then on it might be mapped.
            let place = (round as u64 + 1) * (4 << 20) + token * 4096;
            workers.push(Request { offset: place, ..write(target, &sink, token, data.whole()) });
        }
        workers.submit();
        assert_eq!(workers.harvest() as u64, count);
        let now = workers.counters.snapshot();
        assert_eq!(now.completions - before.completions, count);
        assert_eq!(now.system_calls - before.system_calls, count.div_ceil(io_submit::MOST as u64));
        let mut ended = Vec::new();
        sink.take(&mut ended);
        ended.sort_unstable_by_key(|end| end.0);
        assert!(ended.into_iter().eq((0..count).map(|token| (token, Ok(())))));
    }
    assert_eq!(std::fs::metadata(&memory.path).unwrap().len(), (12 << 20) + 200 * 4096);
}

#[test]
fn beside_a_workers_change_of_a_file_in_memory_other_reactors_leave_theirs_to_workers_too() {
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    for (change, length_bytes) in [
        (Action::Write { durable: false }, 64 << 10),
        (Action::Write { durable: true }, 64 << 10),
        (Action::Fallocate { mode: punch, length: 64 << 10 }, 0),
        (Action::Truncate, 0),
    ] {
        let Some(memory) = InMemory::new() else { return };
        let offset = if change == Action::Truncate { 2 << 20 } else { 0 };
        memory.give(1, SMALL_WRITE, 128 << 10, 4096);
        assert_eq!(memory.finish(1), 0, "alone it is copied");
        // Whether the worker is at it, or done, counts only when its reactor has seen the end.
        memory.give(0, change, offset, length_bytes);
        assert!(memory.file().is_changed_by_workers(), "{change:?}");
        memory.give(1, SMALL_WRITE, 512 << 10, 4096);
        memory.give(1, Action::Read { need_bytes: 4096 }, 512 << 10, 4096);
        assert_eq!(memory.finish(1), 1, "{change:?}: a write is a worker's, a read is not");
        assert_eq!(memory.finish(0), 1);
        assert!(!memory.file().is_changed_by_workers(), "{change:?}");
        memory.give(1, SMALL_WRITE, 768 << 10, 4096);
        assert_eq!(memory.finish(1), 1, "{change:?}: then it copies again");
        // A request that its reactor waits for while it ends.
        memory.give(0, change, offset, length_bytes);
        memory.reactors[0].0.shut_down();
        assert!(!memory.file().is_changed_by_workers(), "{change:?}");
    }
}

#[test]
fn what_is_mapped_is_copied_beside_a_workers_change_and_the_files_time_is_set_after_it() {
    let Some(memory) = InMemory::new() else { return };
    // The second time its page is mapped, the third it is copied without a call.
    for _ in 0..3 {
        memory.give(1, SMALL_WRITE, 512 << 10, 4096);
        memory.finish(1);
    }
    let calls = || memory.reactors[1].0.counters.snapshot().system_calls;
    let before = calls();
    memory.give(0, SMALL_WRITE, 0, 64 << 10);
    let (_, target) = &memory.reactors[0];
    std::thread::sleep(Duration::from_millis(20));
    let modified = memory.modified();
    memory.give(1, SMALL_WRITE, 512 << 10, 4096);
    assert_eq!((memory.finish(1), calls()), (0, before), "neither a worker nor a call");
    target.file.stamp();
    assert_eq!(memory.modified(), modified, "whoever sets a time would wait for the worker");
    memory.finish(0);
    target.file.stamp();
    assert!(memory.modified() > modified);
}

#[test]
fn what_has_ended_does_not_wait_for_what_workers_do_to_a_file_in_memory() {
    let Some(memory) = InMemory::new() else { return };
    let (workers, target) = &memory.reactors[0];
    workers.push(write(target, &Sink::new(), 0, IoBuf::zeroed(64 << 10).whole()));
    assert_eq!(
        workers.taken.borrow().iter().map(|job| (job.serialized, job.how)).collect::<Vec<_>>(),
        [(true, How::Call)]
    );
    let page_cached = self::target();
    workers.push(write(&page_cached, &Sink::new(), 0, IoBuf::zeroed(512).whole()));
    assert!(
        workers
            .taken
            .borrow()
            .last()
            .is_some_and(|job| job.serialized && (job.how == How::Batch) == ends_in_call(&page_cached))
    );
}
