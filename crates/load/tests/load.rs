//! The load generator over disks in memory, honest and lying: it must count right, and it must not be lied to.

use block::{Completion, Disk, DiskInfo, DiskQueue, IoError, IoErrorKind, Op, ReactorCtx, ReactorHandle, Topology};
use engine::{Reactor, ReactorConfig, ReactorThread};
use ringdisk_load::{
    BenchSpec, FillSpec, Hooks, Initial, Outcome, Pattern, Progress, Stop, Verify, fill_and_verify, run,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const DISK_BYTES: usize = 1 << 20;

/// What a disk does wrong, once in a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Acknowledges a write and drops it.
    LosesWrites,
    /// Writes one sector too far.
    Misplaces,
    /// Leaves out the last sector of a write.
    Tears,
    /// Flips a bit on the way to the reader.
    FlipsBits,
    /// Fails a request, without carrying it out.
    Fails,
    /// Takes requests and never completes them.
    Swallows,
    /// Acknowledges flushes without making anything durable.
    IgnoresFlush,
    /// Completes nothing until it is let go, on any queue but the first.
    Holds,
}

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    durable: Vec<u8>,
}

/// A disk in memory. What was flushed survives [`RamDisk::crash`]; of the rest every other sector does.
#[derive(Debug, Clone)]
struct RamDisk {
    state: Arc<Mutex<State>>,
    fault: Fault,
    requests: Arc<AtomicU64>,
    queues: Arc<AtomicU64>,
    is_holding: Arc<AtomicBool>,
    let_go: Arc<AtomicBool>,
}

impl RamDisk {
    fn new(fault: Fault) -> Self {
        let state = State { bytes: vec![0; DISK_BYTES], durable: vec![0; DISK_BYTES] };
        let (queues, is_holding, let_go) = Default::default();
        Self { state: Arc::new(Mutex::new(state)), fault, requests: Arc::default(), queues, is_holding, let_go }
    }

    fn crash(&self) {
        let mut state = self.state.lock().unwrap();
        let State { bytes, durable } = &mut *state;
        for (index, (new, old)) in bytes.chunks_mut(512).zip(durable.chunks(512)).enumerate() {
            if index % 2 == 0 {
                new.copy_from_slice(old);
            }
        }
    }
}

impl Disk for RamDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: DISK_BYTES as u64,
            logical_block_bytes: 512,
            topology: Topology::default(),
            read_only: false,
            volatile_cache: true,
            discard: false,
            discard_granularity_bytes: 0,
            write_zeroes: true,
            serial: String::new(),
        }
    }

    fn open_queue(&self, _: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        let holds = self.queues.fetch_add(1, Ordering::Relaxed) > 0 && self.fault == Fault::Holds;
        Ok(Box::new(RamQueue { disk: self.clone(), holds, ready: Vec::new(), in_flight: 0, turn: 0 }))
    }
}

struct RamQueue {
    disk: RamDisk,
    holds: bool,
    ready: Vec<Completion>,
    in_flight: usize,
    turn: usize,
}

impl DiskQueue for RamQueue {
    fn submit(&mut self, tag: u64, op: Op) {
        self.in_flight += 1;
        let number = self.disk.requests.fetch_add(1, Ordering::Relaxed);
        let fault = if number % 97 == 50 { self.disk.fault } else { Fault::None };
        if self.disk.fault == Fault::Swallows {
            return;
        }
        let mut state = self.disk.state.lock().unwrap();
        let mut result = Ok(());
        match op {
            _ if fault == Fault::Fails => result = Err(IoError::new(IoErrorKind::Io)),
            Op::Read { offset, data, .. } => {
                data.copy_from_slice(0, &state.bytes[offset as usize..]);
                if fault == Fault::FlipsBits {
                    let mut byte = [0];
                    data.copy_to_slice(300, &mut byte);
                    data.copy_from_slice(300, &[byte[0] ^ 0x10]);
                }
            }
            Op::Write { offset, data, .. } => {
                let (mut at, mut length) = (offset as usize, data.length_bytes());
                match fault {
                    Fault::LosesWrites => length = 0,
                    Fault::Misplaces if at >= 512 => at -= 512,
                    Fault::Tears => length -= 512,
                    _ => {}
                }
                data.copy_to_slice(0, &mut state.bytes[at..at + length]);
            }
            Op::Flush if self.disk.fault == Fault::IgnoresFlush => {}
            Op::Flush => state.durable = state.bytes.clone(),
            other => panic!("{other:?}"),
        }
        self.ready.push(Completion { tag, result });
        self.disk.is_holding.fetch_or(self.holds, Ordering::Relaxed);
    }

    /// Some now, some later, the youngest first.
    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.holds && !self.disk.let_go.load(Ordering::Relaxed) {
            return 0;
        }
        self.turn += 1;
        let count = if self.turn.is_multiple_of(3) { self.ready.len() } else { self.ready.len() / 2 };
        let count = count.max(self.ready.len().min(1));
        done.extend(self.ready.drain(self.ready.len() - count..).rev());
        self.in_flight -= count;
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

struct Reactors {
    handles: Vec<Arc<dyn ReactorHandle>>,
    _threads: Vec<ReactorThread>,
}

fn reactors(count: usize) -> Reactors {
    let config = || ReactorConfig::default().with(|config| config.name = "bench".into());
    let threads: Vec<_> = (0..count).map(|_| Reactor::spawn(config()).unwrap()).collect();
    Reactors { handles: threads.iter().map(ReactorThread::handle).collect(), _threads: threads }
}

fn mixed(initial: Initial) -> BenchSpec {
    BenchSpec::default().with(|spec| {
        spec.queue_depth = 8;
        spec.queues = 2;
        spec.read_percent = 50;
        spec.pattern = Pattern::Random { seed: 7 };
        spec.stop = Stop::Requests(10_001);
        spec.flush_every = Some(20);
        spec.verify = Some(Verify::new(99, initial));
    })
}

fn bench(disk: &RamDisk, spec: &BenchSpec) -> Outcome {
    let disk: Arc<dyn Disk> = Arc::new(disk.clone());
    run(&disk, &reactors(spec.queues as usize).handles, spec, &Hooks::default()).unwrap()
}

#[test]
fn an_honest_disk_passes_and_every_request_is_counted() {
    let disk = RamDisk::new(Fault::None);
    let Outcome { report, state, .. } = bench(&disk, &mixed(Initial::Zeros));
    assert_eq!((report.errors, report.mismatches, report.requests), (0, 0, 10_001));
    assert_eq!(report.reads + report.writes, 10_001);
    assert_eq!(disk.requests.load(Ordering::Relaxed), 10_001 + report.flushes);
    assert_eq!(report.latency_us.count, 10_001);
    assert_eq!(report.flush_latency_us.count, report.flushes);
    assert!(report.writes / 20 - report.flushes <= 2, "a flush after every 20 writes of a queue");
    assert!(report.iops > 0.0 && report.bytes_per_second > report.iops * 4095.0);
    let written: u64 = state.unwrap().blocks().iter().map(|block| u64::from(block.issued)).sum();
    assert_eq!(written, report.writes);
}

#[test]
fn a_lying_disk_is_caught() {
    for fault in [Fault::LosesWrites, Fault::Misplaces, Fault::Tears, Fault::FlipsBits] {
        let report = bench(&RamDisk::new(fault), &mixed(Initial::Unknown)).report;
        assert!(report.mismatches > 0, "{fault:?} went unseen");
        assert!(report.first_mismatch.is_some_and(|what| what.contains("offset")));
        assert_eq!(report.errors, 0);
    }
}

#[test]
fn failed_requests_are_counted_and_the_run_goes_on() {
    let disk = RamDisk::new(Fault::Fails);
    let report = bench(&disk, &mixed(Initial::Zeros)).report;
    assert_eq!(report.errors, (disk.requests.load(Ordering::Relaxed) + 46) / 97);
    assert_eq!(report.mismatches, 0, "a failed write may have happened or not");
    assert!(report.first_error.is_some());
}

#[test]
fn what_a_flush_promised_is_asked_for_after_a_crash() {
    for (fault, kept) in [(Fault::None, true), (Fault::IgnoresFlush, false)] {
        let disk = RamDisk::new(fault);
        let writes = mixed(Initial::Zeros).with(|spec| spec.read_percent = 0);
        let state = bench(&disk, &writes).state.unwrap().after_crash();
        assert!(state.blocks().iter().any(|block| block.durable > 0));
        disk.crash();
        let look = mixed(Initial::State(state)).with(|spec| {
            spec.read_percent = 100;
            spec.pattern = Pattern::Sequential;
            spec.stop = Stop::OnePass;
            spec.flush_every = None;
        });
        let report = bench(&disk, &look).report;
        assert_eq!((report.mismatches == 0, report.reads), (kept, DISK_BYTES as u64 / 4096), "{fault:?}");
    }
}

#[test]
fn a_filled_range_is_compared_to_its_last_sector() {
    let spec = FillSpec::default().with(|fill| {
        fill.offset_bytes = 512;
        fill.length_bytes = Some(300 * 1024 + 512);
        fill.block_bytes = 16 << 10;
        fill.queue_depth = 4;
        fill.queues = 2;
    });
    let told = RefCell::new(Vec::new());
    let tell = |progress: Progress| told.borrow_mut().push(progress.fraction);
    let hooks = Hooks::default().with(|hooks| hooks.progress = Some(&tell));
    let ram = RamDisk::new(Fault::None);
    let disk: Arc<dyn Disk> = Arc::new(ram.clone());
    let report = fill_and_verify(&disk, &reactors(2).handles, &spec, &hooks).unwrap();
    assert_eq!((report.errors, report.mismatches, report.fill.writes, report.verify.reads), (0, 0, 19, 19));
    let state = ram.state.lock().unwrap();
    let written = |at: usize| state.durable[at..at + 512].iter().any(|byte| *byte != 0);
    let end = 512 + 300 * 1024 + 512;
    assert!(!written(0) && written(512) && written(end - 512) && !written(end));
    drop(state);
    assert!(told.borrow().is_sorted() && told.borrow().last().is_some_and(|last| *last > 0.9));

    let small = spec.clone().with(|fill| fill.block_bytes = 512);
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(Fault::Tears));
    let report = fill_and_verify(&disk, &reactors(2).handles, &small, &Hooks::default()).unwrap();
    assert!(report.mismatches > 0 && report.first_failure.is_some());
}

#[test]
fn a_run_can_be_cancelled_and_a_dead_disk_does_not_hold_it_for_ever() {
    let cancel = Arc::new(AtomicBool::new(true));
    let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
    let spec = BenchSpec::default().with(|spec| spec.stop = Stop::Runtime(Duration::from_secs(1000)));
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(Fault::None));
    assert!(run(&disk, &reactors(1).handles, &spec, &hooks).unwrap().report.cancelled);

    let (ram, cancel) = (RamDisk::new(Fault::Swallows), Arc::new(AtomicBool::new(false)));
    let disk: Arc<dyn Disk> = Arc::new(ram.clone());
    let spec = spec.with(|spec| spec.drain_timeout = Duration::from_secs(2));
    let all_are_swallowed = |_| cancel.store(ram.requests.load(Ordering::Relaxed) == 32, Ordering::Relaxed);
    let hooks = Hooks::default().with(|hooks| {
        hooks.progress = Some(&all_are_swallowed);
        hooks.cancel = Some(Arc::clone(&cancel));
    });
    let error = run(&disk, &reactors(1).handles, &spec, &hooks).unwrap_err().to_string();
    assert!(error.contains("32 requests did not complete"), "{error}");
}

#[test]
fn requests_that_outlast_the_run_count_with_their_time() {
    let ram = RamDisk::new(Fault::Holds);
    let (disk, reactors): (Arc<dyn Disk>, _) = (Arc::new(ram.clone()), reactors(2));
    let spec = BenchSpec::default().with(|spec| {
        (spec.queues, spec.queue_depth, spec.stop) = (2, 1, Stop::Runtime(Duration::from_secs(1000)));
        spec.moments = Some(Duration::from_millis(10));
    });
    // The run is over as soon as a request is held.
    let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(Arc::clone(&ram.is_holding)));
    let Outcome { report, moments, .. } = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ram.is_holding.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // The queue's whole second begins before its request.
            std::thread::sleep(Duration::from_secs(1));
            ram.let_go.store(true, Ordering::Relaxed);
            reactors.handles[1].run(Box::new(|_| {})).unwrap();
        });
        run(&disk, &reactors.handles, &spec, &hooks).unwrap()
    });
    // On each queue one request follows the other, so their times together are no longer than the queues'.
    let together_us = report.latency_us.mean * report.latency_us.count as f64;
    let queues_us = report.elapsed_seconds * 1e6 * 2.0;
    assert!(together_us <= queues_us * 1.01, "{together_us} us of requests in {queues_us} us");
    let (gap_us, longest_us) = (report.longest_gap_us, report.latency_us.max);
    assert!(gap_us * 1.01 >= longest_us, "a gap of {gap_us} us, a request of {longest_us} us");
    assert_eq!(moments.iter().map(|moment| moment.requests).sum::<u64>(), report.requests);
    // The other queue has ended in the first second.
    assert!(report.per_second.first().is_some_and(|first| *first > 0), "{:?}", report.per_second);
}

#[test]
fn impossible_workloads_are_refused_with_the_reason() {
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(Fault::None));
    let handles = reactors(1).handles;
    let refused = |change: fn(&mut BenchSpec)| {
        let mut spec = BenchSpec::default().with(|spec| spec.stop = Stop::Requests(1));
        change(&mut spec);
        run(&disk, &handles, &spec, &Hooks::default()).unwrap_err().to_string()
    };
    assert!(refused(|spec| spec.block_bytes = 1000).contains("multiples of the disk's block of 512"));
    assert!(refused(|spec| spec.queue_depth = 0).contains("depth 0"));
    assert!(refused(|spec| spec.queues = 2).contains("there are 1"));
    assert!(refused(|spec| spec.read_percent = 101).contains("101"));
    assert!(refused(|spec| spec.offset_bytes = 1 << 20).contains("must lie in the disk"));
    assert!(refused(|spec| spec.length_bytes = Some(2 << 20)).contains("must lie in the disk"));
    assert!(refused(|spec| spec.stop = Stop::OnePass).contains("sequential"));
    let cramped = |spec: &mut BenchSpec| {
        spec.length_bytes = Some(32 * 4096);
        spec.verify = Some(Verify::new(1, Initial::Zeros));
    };
    assert!(refused(cramped).contains("more blocks a queue"));
}
