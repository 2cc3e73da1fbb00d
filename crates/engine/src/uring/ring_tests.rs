//! Tests of a ring by itself, without a reactor.

use super::*;
use crate::base::call::Action;
use crate::base::options::{CacheMode, OpenOptions};
use crate::request::queue_file::QueueFile;
use block::{Done, Priority, Sink};
use memory::{IoBuf, Mapping, Window};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

const COUNT: u64 = 700;
const SETUPS: [Setup; 3] = [Setup::Deferred, Setup::Cooperative, Setup::Plain];

struct Bench {
    uring: Uring,
    workers: Rc<Workers>,
    wakeup: Arc<Wakeup>,
    counters: Arc<Counters>,
    batch_end: BatchEnd,
    target: Rc<QueueFile>,
    sink: Rc<Sink>,
}

/// A file that is written where it lies.
fn file_in_place() -> crate::file::open_file::OpenFile {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&vec![9; COUNT as usize * 512], 0).unwrap();
    file.sync_all().unwrap();
    let engine = crate::base::options::EngineKind::IoUring;
    let options = OpenOptions { lock: false, engine, cache: CacheMode::None, ..OpenOptions::default() };
    let mut file = crate::open::opening::open_file(file.into(), "test", &options).unwrap();
    file.extents = crate::file::extent_preload::ExtentPreload::new(false);
    file
}

impl Bench {
    fn new(setup: Setup) -> Self {
        let (wakeup, counters) = (Arc::new(Wakeup::new().unwrap()), Arc::new(Counters::default()));
        let workers =
            Rc::new(Workers::new(Arc::clone(&wakeup), Arc::clone(&counters), None, 0, std::time::Duration::ZERO));
        let ring = setup.build(SUBMISSION_ENTRIES, COMPLETION_ENTRIES).unwrap();
        let batch_end = BatchEnd::default();
        let theirs = (Rc::clone(&workers), Arc::clone(&counters));
        let uring = Uring::with_ring((ring, setup), theirs.0, &wakeup, theirs.1, batch_end.clone()).unwrap();
        let target = Rc::new(QueueFile::blocking(Arc::new(file_in_place())));
        Self { uring, workers, wakeup, counters, batch_end, target, sink: Sink::new() }
    }

    fn push(&self, token: u64, action: Action, offset: u64, window: Window) {
        let (done, target) = (Done::Sink { sink: Rc::clone(&self.sink), token }, Rc::clone(&self.target));
        self.uring.push(Request {
            target,
            action,
            offset,
            window,
            progress: 0,
            counted: false,
            priority: Priority::NONE,
            done,
        });
    }

    /// Waits until `count` requests have succeeded. The caller sleeps on the wake-up alone.
    fn sleep_until_ended(&self, count: usize) {
        let mut ended = Vec::new();
        while ended.len() < count {
            // A worker carries out what a busy device refuses.
            let _ = (self.uring.submit(), self.workers.submit());
            let _ = (self.uring.harvest(), self.workers.harvest());
            self.wakeup.about_to_sleep();
            self.uring.signal(true);
            let idle = !self.uring.has_work() && !self.workers.has_work();
            if idle && self.uring.in_flight() + self.workers.in_flight() > 0 {
                poll(&mut [PollFd::new(&self.wakeup.fd(), PollFlags::IN)], None).unwrap();
                rustix::io::read(self.wakeup.fd(), &mut [0; 8]).unwrap();
            }
            self.uring.signal(false);
            self.wakeup.awake();
            let mut some = Vec::new();
            self.sink.take(&mut some);
            ended.extend(some);
        }
        ended.sort_by_key(|(token, _)| *token);
        assert!(ended.iter().enumerate().all(|(at, end)| *end == (at as u64, Ok(()))), "{ended:?}");
    }
}

#[test]
fn every_way_to_set_a_ring_up_tells_of_every_completion() {
    for setup in SETUPS {
        let bench = Bench::new(setup);
        for token in 0..COUNT {
            let window = IoBuf::zeroed(512).whole();
            bench.push(token, Action::Write { durable: false }, token * 512, window);
        }
        bench.sleep_until_ended(COUNT as usize);
    }
}

#[test]
fn batches_are_short_while_the_disk_is_idle_and_long_for_the_page_cache_and_each_is_one_call() {
    let page_cache = Storage::PageCache { reads_later: true, takes_nowait_writes: false, writes_end_in_call: true };
    for (storage, expected) in [(Storage::Direct, vec![1, 1, 2, 4, 8, 15]), (page_cache, vec![31])] {
        let mut bench = Bench::new(Setup::Deferred);
        Rc::get_mut(&mut bench.target).unwrap().traits.storage = storage;
        let (mut batches, mut batch) = (Vec::new(), 0);
        for token in 0..31 {
            bench.push(token, Action::Read { need_bytes: 512 }, token * 512, IoBuf::zeroed(512).whole());
            batch += 1;
            assert_eq!(bench.counters.snapshot().system_calls, batches.len() as u64, "pushing only queues");
            if bench.batch_end.take() || token == 30 {
                assert!(bench.uring.submit());
                batches.push(std::mem::take(&mut batch));
            }
        }
        assert_eq!((batches.len() as u64, batches), (bench.counters.snapshot().system_calls, expected));
        bench.sleep_until_ended(31);
    }
}

#[test]
fn what_must_not_wait_and_is_refused_for_that_is_carried_out_by_one_who_may() {
    for errno in [libc::EAGAIN, libc::ENOMEM, libc::EOPNOTSUPP] {
        let bench = Bench::new(Setup::Deferred);
        let (sink, target) = (Rc::clone(&bench.sink), Rc::clone(&bench.target));
        let (done, window) = (Done::Sink { sink, token: 0 }, IoBuf::zeroed(512).whole());
        let action = Action::Read { need_bytes: 512 };
        let request =
            Request { target, action, offset: 0, window, progress: 0, counted: false, priority: Priority::NONE, done };
        let index = bench.uring.state.borrow_mut().as_mut().unwrap().slab.insert(request);
        bench.uring.complete(u64::from(index), -errno);
        assert_eq!((bench.uring.in_flight(), bench.workers.in_flight()), (0, 1));
        bench.sleep_until_ended(1);
        assert_eq!(bench.target.file.takes_nowait.load(Ordering::Relaxed), errno != libc::EOPNOTSUPP);
    }
}

#[test]
fn a_registered_file_is_named_by_its_place_in_the_table() {
    let mut bench = Bench::new(Setup::Deferred);
    let (plain, file) = (Rc::clone(&bench.target), Arc::clone(&bench.target.file));
    let uring = Rc::new(std::mem::replace(&mut bench.uring, Bench::new(Setup::Deferred).uring));
    let fixed = uring.register_file(file.raw_fd());
    assert!(fixed.is_some(), "this kernel registers files");
    let registered = Rc::new(QueueFile::on_reactor(file, fixed));
    for (target, is_fixed) in [(&plain, false), (&registered, true)] {
        let (done, window) = (Done::Sink { sink: Sink::new(), token: 0 }, Window::empty());
        let target = Rc::clone(target);
        let request = Request {
            target,
            action: Action::Write { durable: false },
            offset: 0,
            window,
            progress: 0,
            counted: false,
            priority: Priority::best_effort(1),
            done,
        };
        let none = crate::base::call::Buffers::Vector { ptr: std::ptr::null(), count: 0 };
        // `IOSQE_FIXED_FILE`.
        let words = format!("{:?}", entry_of(&request, none, None));
        assert!(words.contains(&format!("flags: {}", u8::from(is_fixed))), "{words}");
        let entry = entry_of(&request, none, None);
        // SAFETY: an entry is a `struct io_uring_sqe`: its priority lies behind the bytes of the opcode and the flags.
        let ioprio = unsafe { (&raw const entry).cast::<u16>().add(1).read() };
        assert_eq!(ioprio, request.priority.ioprio());
    }
}

/// Writes a pattern and reads it back, in one segment and in two, in memory of which the first half is registered;
/// `meanwhile` happens when half of it was pushed.
fn write_and_read_back(bench: &Bench, meanwhile: impl Fn()) {
    let (_, mapping) = Mapping::anonymous_file(c"guest", 1 << 16).unwrap();
    let mapping = Arc::new(mapping);
    let memory = IoBuf::in_mapping(&mapping, 0, 1 << 16, Box::new(())).unwrap().whole();
    let slot = bench.uring.register_buffer(mapping.as_ptr().as_ptr(), 1 << 15);
    let slot = slot.expect("this kernel registers shared memory");
    memory.copy_from_slice(0, &(0..1 << 16).map(|at| (at % 251) as u8).collect::<Vec<_>>());
    let expected = memory.to_vec();
    let parts = |at: usize| match at % 2 {
        0 => memory.slice(at * 4096, 4096),
        _ => IoBuf::gather(vec![memory.slice(at * 4096, 512), memory.slice(at * 4096 + 512, 3584)]).whole(),
    };
    for action in [Action::Write { durable: false }, Action::Read { need_bytes: 4096 }] {
        for at in 0..16 {
            bench.push(at as u64, action, at as u64 * 4096, parts(at));
            if at == 7 {
                meanwhile();
            }
        }
        bench.sleep_until_ended(16);
        assert_eq!(memory.to_vec(), expected);
        memory.fill(if matches!(action, Action::Write { .. }) { 0 } else { 1 });
    }
    bench.uring.unregister_buffer(slot);
}

#[test]
fn requests_in_registered_memory_name_it_and_others_go_the_plain_way() {
    for setup in SETUPS {
        let bench = Bench::new(setup);
        let vectors = bench.uring.state.borrow().as_ref().unwrap().has_fixed_vectors;
        for round in 1..4 {
            write_and_read_back(&bench, || ());
            let expected = round * if vectors { 16 } else { 8 };
            assert_eq!(bench.counters.snapshot().fixed, expected, "{setup:?}");
        }
    }
}

#[test]
fn memory_that_is_given_back_before_the_kernel_looks_fails_no_request() {
    for setup in SETUPS {
        let bench = Bench::new(setup);
        for _ in 0..3 {
            write_and_read_back(&bench, || bench.uring.unregister_buffer(0));
        }
    }
}

#[test]
fn memory_that_cannot_be_registered_is_an_error_that_changes_nothing() {
    let bench = Bench::new(Setup::Deferred);
    let nowhere = std::ptr::without_provenance_mut(1 << 30);
    assert!((0..=SLOTS).all(|_| bench.uring.register_buffer(nowhere, 1 << 16).is_err()));
    write_and_read_back(&bench, || ());
}

impl Uring {
    /// As after a failure that did not go away.
    pub(crate) fn fail_for_good(&self) {
        self.fail(None);
        self.give_up();
    }
}

/// Calls on the ring fail from here on, as if the kernel had lost it: another file takes the place of its descriptor.
fn lose(bench: &Bench) {
    let raw = bench.uring.state.borrow().as_ref().unwrap().ring.as_raw_fd();
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: the call touches no memory. The ring's owner closes what is there then, once.
    assert!(unsafe { libc::dup3(other.as_raw_fd(), raw, libc::O_CLOEXEC) } >= 0);
}

#[test]
fn requests_of_a_ring_that_failed_for_good_fail_and_nothing_waits_for_them_for_ever() {
    for ends_at_once in [false, true] {
        let mut bench = Bench::new(Setup::Deferred);
        bench.uring.patience = std::time::Duration::from_millis(50);
        let write = |token: u64| {
            bench.push(token, Action::Write { durable: false }, token * 512, IoBuf::zeroed(512).whole());
        };
        write(0);
        bench.uring.submit();
        lose(&bench);
        // The kernel has the first, and never gets the second.
        write(1);
        assert!(!bench.uring.submit());
        write(2);
        match ends_at_once {
            true => bench.uring.shut_down(),
            false => {
                while bench.uring.in_flight() > 0 {
                    bench.uring.submit();
                    bench.uring.harvest();
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                bench.uring.shut_down();
            }
        }
        let mut ended = Vec::new();
        bench.sink.take(&mut ended);
        // The first may have gone to a worker: the kernel refuses what would have to wait.
        ended.retain(|(token, _)| *token > 0);
        ended.sort_by_key(|(token, _)| *token);
        assert_eq!(ended, [(1, Err(IoError::EIO)), (2, Err(IoError::EIO))]);
        assert_eq!((bench.uring.in_flight(), bench.uring.has_failed()), (0, false), "nobody has to look again");
        assert!(bench.target.file.sync_lost.load(Ordering::Relaxed), "a write may land later");
    }
}
