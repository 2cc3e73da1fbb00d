//! The suite that every disk must pass.
//!
//! It uses only [`block::Disk`]'s contract, so it runs on images over the simulator, on real engines, and on the driver
//! over a socket. Each check gets a fresh disk.

mod basic;
mod concurrent;
mod maps;

use crate::harness::{Harness, QueueId};
use crate::request::{Reply, Request};
use crate::workload::brief;
use block::{Disk, DiskInfo, IoErrorKind};
use std::sync::Arc;

/// The subject of the suite.
pub struct Subject<'a> {
    /// Makes a fresh disk of at least 64 KiB; read-only if asked. `None` if such a disk cannot be made: those checks
    /// count as skipped.
    pub make: &'a mut dyn FnMut(bool) -> Option<Arc<dyn Disk>>,
    /// Whether the disk stores written data. The null disk does not.
    pub keeps_data: bool,
    /// Seed of the random checks.
    pub seed: u64,
}

/// The results of the suite.
#[derive(Debug, Default)]
pub struct Report {
    /// Checks that passed.
    pub passed: Vec<&'static str>,
    /// Checks for which no disk could be made, or that do not apply.
    pub skipped: Vec<&'static str>,
    /// Checks that failed, and why.
    pub failures: Vec<(&'static str, String)>,
}

impl Report {
    /// Panics with the failures if there are any, or if nothing was checked.
    ///
    /// # Panics
    /// If a check failed, or none passed.
    pub fn assert_passed(&self) {
        let failures: Vec<_> = self.failures.iter().map(|(name, how)| format!("  {name}: {how}\n")).collect();
        assert!(failures.is_empty(), "the disk does not conform:\n{}", failures.concat());
        assert!(!self.passed.is_empty(), "nothing was checked");
    }
}

type Check = fn(&mut Guest<'_>) -> Result<(), String>;

/// Each check's name, whether it needs a disk that keeps data, whether it needs a read-only disk, and its function.
const CHECKS: &[(&str, bool, bool, Check)] = &[
    ("tells sane sizes", false, false, basic::tells_sane_sizes),
    ("tells of a changed cache", false, false, basic::tells_of_a_changed_cache),
    ("reads back what was written", true, false, basic::reads_back_what_was_written),
    ("serves memory in odd pieces", true, false, basic::serves_memory_in_odd_pieces),
    ("serves the last sector", true, false, basic::serves_the_last_sector),
    ("refuses what is out of range", false, false, basic::refuses_what_is_out_of_range),
    ("completes empty requests", false, false, basic::completes_empty_requests),
    ("flushes and writes through", true, false, basic::flushes_and_writes_through),
    ("discards no more than asked", true, false, basic::discards_no_more_than_asked),
    ("writes zeroes exactly", true, false, basic::writes_zeroes_exactly),
    ("block status tells the truth", true, false, basic::block_status_tells_the_truth),
    ("maps show what is read", true, false, maps::maps_show_what_is_read),
    ("a cancelled map was never there", true, false, maps::a_cancelled_map_was_never_there),
    ("a committed map is seen by all", true, false, maps::a_committed_map_is_seen_by_all),
    ("a read-only disk gives no space", true, true, maps::a_read_only_disk_gives_no_space),
    ("serves large requests", true, false, basic::serves_large_requests),
    ("a read-only disk refuses writes", false, true, basic::a_read_only_disk_refuses_writes),
    ("delivers only what completed", false, false, basic::delivers_only_what_completed),
    ("one queue, many requests", true, false, concurrent::one_queue_many_requests),
    ("several queues, many requests", true, false, concurrent::several_queues_many_requests),
    ("overlapping writes tear no sector", true, false, concurrent::overlapping_writes_tear_no_sector),
    ("a queue dropped in flight harms nobody", true, false, concurrent::a_queue_dropped_in_flight_harms_nobody),
];

/// Runs every check.
pub fn run(harness: &mut dyn Harness, subject: &mut Subject<'_>) -> Report {
    let mut report = Report::default();
    for (name, needs_data, read_only, check) in CHECKS {
        let applies = subject.keeps_data || !needs_data;
        let Some(disk) = applies.then(|| (subject.make)(*read_only)).flatten() else {
            report.skipped.push(name);
            continue;
        };
        let mut guest = Guest { harness, queues: Vec::new(), disk, next_tag: 1, seed: subject.seed };
        let result = guest.open(0).and_then(|_| check(&mut guest)).and_then(|()| guest.violations());
        guest.leave();
        match result {
            Ok(()) => report.passed.push(name),
            Err(how) => report.failures.push((name, how)),
        }
    }
    report
}

/// A guest with queues on the disk under test.
struct Guest<'a> {
    harness: &'a mut dyn Harness,
    queues: Vec<QueueId>,
    disk: Arc<dyn Disk>,
    next_tag: u64,
    seed: u64,
}

impl Guest<'_> {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    /// Returns the unit of offsets and lengths.
    fn block(&self) -> u64 {
        u64::from(self.info().logical_block_bytes)
    }

    fn open(&mut self, reactor: usize) -> Result<usize, String> {
        let queue = self.harness.open(&self.disk, reactor).map_err(|error| format!("cannot open a queue: {error}"))?;
        self.queues.push(queue);
        Ok(self.queues.len() - 1)
    }

    fn submit(&mut self, queue: usize, requests: Vec<Request>) -> u64 {
        let first = self.next_tag;
        self.next_tag += requests.len() as u64;
        self.harness.submit(self.queues[queue], (first..).zip(requests).collect());
        first
    }

    /// Waits for everything in flight on all queues, and returns the replies.
    fn drain(&mut self) -> Result<Vec<Reply>, String> {
        let mut replies = Vec::new();
        while self.queues.iter().any(|queue| self.harness.in_flight(*queue) > 0) {
            let turn = self.harness.turn();
            let idle = turn.idle && turn.replies.is_empty();
            replies.extend(turn.replies.into_iter().map(|(_, reply)| reply));
            if idle {
                let left: usize = self.queues.iter().map(|queue| self.harness.in_flight(*queue)).sum();
                return Err(format!("{left} requests were never completed"));
            }
        }
        Ok(replies)
    }

    /// Makes one request alone and waits for its reply.
    fn call(&mut self, queue: usize, request: Request) -> Result<Reply, String> {
        let name = brief(&request);
        let tag = self.submit(queue, vec![request]);
        let replies = self.drain().map_err(|how| format!("{name}: {how}"))?;
        replies.into_iter().find(|reply| reply.tag == tag).ok_or_else(|| format!("{name} was never completed"))
    }

    /// Makes one request that must succeed.
    fn ok(&mut self, queue: usize, request: Request) -> Result<Vec<u8>, String> {
        let name = brief(&request);
        let reply = self.call(queue, request)?;
        reply.result.map_err(|error| format!("{name} failed: {error}"))?;
        Ok(reply.data)
    }

    fn read(&mut self, queue: usize, offset: u64, length: usize) -> Result<Vec<u8>, String> {
        self.ok(queue, Request::read(offset, length))
    }

    /// Makes one request that must fail with `kind`.
    fn refused(&mut self, request: Request, kind: IoErrorKind) -> Result<(), String> {
        let name = brief(&request);
        match self.call(0, request)?.result {
            Err(error) if error.kind() == kind => Ok(()),
            Err(error) => Err(format!("{name} failed with {:?}, not {kind:?}", error.kind())),
            Ok(()) => Err(format!("{name} succeeded; it must fail with {kind:?}")),
        }
    }

    fn expect(&mut self, queue: usize, offset: u64, bytes: &[u8], what: &str) -> Result<(), String> {
        let found = self.read(queue, offset, bytes.len())?;
        match found.iter().zip(bytes).position(|(found, wanted)| found != wanted) {
            None => Ok(()),
            Some(index) => Err(format!(
                "{what}: byte {} reads {:#04x}, not {:#04x}",
                offset + index as u64,
                found[index],
                bytes[index]
            )),
        }
    }

    fn violations(&mut self) -> Result<(), String> {
        for queue in self.queues.clone() {
            if let Some(violation) = self.harness.violations(queue).first() {
                return Err(violation.clone());
            }
        }
        Ok(())
    }

    fn leave(&mut self) {
        for queue in std::mem::take(&mut self.queues) {
            self.harness.close(queue);
        }
        self.harness.settle();
    }
}
