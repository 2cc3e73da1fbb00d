//! Writes patterned data to a range, makes them durable, and reads them back.

use crate::report::BenchReport;
use crate::run::{Outcome, run};
use crate::spec::{BenchSpec, Hooks, Initial, Pattern, Progress, Stop, Verify};
use block::{Completion, Disk, DiskQueue, Error, ErrorKind, IoResult, Op, Poller, ReactorHandle, Result, run_and_wait};
use serde::Serialize;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// The range to fill, and the load.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FillSpec {
    /// Start of the range.
    pub offset_bytes: u64,
    /// Length of the range. `None` means to the end of the disk.
    pub length_bytes: Option<u64>,
    /// Bytes a request.
    pub block_bytes: u32,
    /// Requests in flight on each queue.
    pub queue_depth: u32,
    /// The number of queues, each on its own reactor.
    pub queues: u32,
    /// A number that goes into every sector's data.
    pub seed: u64,
    /// How long the flush, and requests in flight at the end, may take.
    pub drain_timeout: Duration,
}

impl Default for FillSpec {
    fn default() -> Self {
        Self {
            offset_bytes: 0,
            length_bytes: None,
            block_bytes: 128 << 10,
            queue_depth: 16,
            queues: 1,
            seed: 1,
            drain_timeout: Duration::from_secs(60),
        }
    }
}

impl FillSpec {
    /// Changes some of the options: `FillSpec::default().with(|fill| fill.queues = 2)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// The result. Without errors and mismatches, every sector of the range was written, flushed and read back right.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FillReport {
    /// Figures of the writes.
    pub fill: BenchReport,
    /// Figures of the reads.
    pub verify: BenchReport,
    /// Requests that failed, including the flush.
    pub errors: u64,
    /// Blocks that did not hold the written data.
    pub mismatches: u64,
    /// The first failure.
    pub first_failure: Option<String>,
}

/// Fills the range of `spec` with data that name their place, flushes, and compares. Waits for the end, so do not call
/// it on a reactor.
pub fn fill_and_verify(
    disk: &Arc<dyn Disk>,
    reactors: &[Arc<dyn ReactorHandle>],
    spec: &FillSpec,
    hooks: &Hooks<'_>,
) -> Result<FillReport> {
    let pass = |read_percent: u8, initial: Initial| {
        let bench = BenchSpec {
            queue_depth: spec.queue_depth,
            queues: spec.queues,
            block_bytes: spec.block_bytes,
            read_percent,
            pattern: Pattern::Sequential,
            offset_bytes: spec.offset_bytes,
            length_bytes: spec.length_bytes,
            stop: Stop::OnePass,
            verify: Some(Verify { seed: spec.seed, initial }),
            drain_timeout: spec.drain_timeout,
            ..BenchSpec::default()
        };
        // Each of the two passes is half of the work.
        let from = if read_percent == 0 { 0.0 } else { 0.5 };
        let halved = |progress: Progress| {
            if let Some(tell) = hooks.progress {
                tell(Progress { fraction: from + progress.fraction / 2.0, ..progress });
            }
        };
        run(disk, reactors, &bench, &Hooks { progress: Some(&halved), ..hooks.clone() })
    };
    let Outcome { report: fill, state, .. } = pass(0, Initial::Unknown)?;
    let flushed = flush(disk, reactors, spec.drain_timeout)?;
    let state = state.ok_or_else(|| Error::new(ErrorKind::Io, "a verified run gave no state"))?;
    // Blocks whose write failed may hold anything. The failed write itself is counted.
    let verify = if fill.cancelled {
        BenchReport { cancelled: true, ..BenchReport::default() }
    } else {
        pass(100, Initial::State(state))?.report
    };
    let flush_failure = flushed.err().map(|error| format!("flush: {error}"));
    let failures = [&fill.first_error, &flush_failure, &verify.first_error, &verify.first_mismatch];
    let first_failure = failures.into_iter().flatten().next().cloned();
    Ok(FillReport {
        errors: fill.errors + verify.errors + u64::from(flush_failure.is_some()),
        mismatches: verify.mismatches,
        first_failure,
        fill,
        verify,
    })
}

/// Waits for one request and sends its result.
struct OneRequest {
    queue: Option<Box<dyn DiskQueue>>,
    done: Vec<Completion>,
    result: Sender<IoResult>,
}

impl Poller for OneRequest {
    fn poll(&mut self) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        if queue.harvest(&mut self.done) == 0 {
            return false;
        }
        self.queue = None;
        if let Some(completion) = self.done.first() {
            // The receiver is gone only if the wait was given up.
            let _ = self.result.send(completion.result);
        }
        true
    }
}

/// Sends one flush on a queue of its own: it covers the writes of all queues.
fn flush(disk: &Arc<dyn Disk>, reactors: &[Arc<dyn ReactorHandle>], timeout: Duration) -> Result<IoResult> {
    let no_reactor = || Error::new(ErrorKind::BadOption, "a run needs at least one reactor");
    let reactor = reactors.first().ok_or_else(no_reactor)?;
    let (sender, receiver) = channel();
    let disk = Arc::clone(disk);
    let poller = run_and_wait(reactor.as_ref(), move |ctx| {
        let mut queue = disk.open_queue(ctx)?;
        queue.submit(0, Op::Flush);
        let request = OneRequest { queue: Some(queue), done: Vec::new(), result: sender };
        ctx.add_poller(Rc::new(RefCell::new(request)))
    })??;
    let result = receiver.recv_timeout(timeout);
    reactor.run(Box::new(move |ctx| ctx.remove_poller(poller)))?;
    let late = |_| Error::new(ErrorKind::Io, format!("a flush did not complete within {} s", timeout.as_secs_f64()));
    result.map_err(late)
}
