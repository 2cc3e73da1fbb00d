//! Starts the generators on their reactors, conducts them, and adds up their measurements.

use crate::cpu::CpuSample;
use crate::evenness::Evenness;
use crate::generator::{Conductor, Generator, Parts, Phase, QueueResult};
use crate::moments::{Moment, Moments};
use crate::range::Range;
use crate::report::{BatchCounts, BenchReport, CounterGrowth, EngineHarvests, ProcessCpu, Timings};
use crate::spec::{Alloc, BenchSpec, Hooks, Initial, Pattern, Progress, Stop};
use crate::verify::{Tracker, VerifyState};
use block::{Disk, Error, ErrorKind, ReactorCtx, ReactorHandle, Result, run_and_wait};
use memory::IoBuf;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

/// How often to report progress and check the caller's cancel flag.
const TICK: Duration = Duration::from_millis(50);

/// A report, and the history of the range if the run was verified.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The figures.
    pub report: BenchReport,
    /// The range's history; `None` if the run was not verified.
    pub state: Option<VerifyState>,
    /// Latency over time, if [`BenchSpec::moments`] asks for it.
    pub moments: Vec<Moment>,
    /// The beginning of the measurement.
    pub begun: SystemTime,
}

/// Runs `spec` on `disk`, one queue on each of the first reactors. Waits for the end, so do not call it on a reactor.
///
/// Requests that fail and blocks with wrong data are counted; they do not fail the run.
pub fn run(
    disk: &Arc<dyn Disk>,
    reactors: &[Arc<dyn ReactorHandle>],
    spec: &BenchSpec,
    hooks: &Hooks<'_>,
) -> Result<Outcome> {
    let range = spec.check(&disk.info(), reactors.len())?;
    let reactors = reactors.get(..spec.queues as usize).unwrap_or(reactors);
    let conductor = Arc::new(Conductor::default());
    if spec.warmup.is_zero() {
        conductor.set(Phase::Measure);
    }
    let (results, received) = channel();
    let (finished, begun) = (Vec::new(), SystemTime::now());
    let mut run = Run { spec, hooks, range, reactors, conductor, received, finished, cancelled: false, begun };
    // A sample before any request; another follows after the warm-up.
    let mut before = Sample::take(spec, hooks);
    let started = run.start(disk, &results);
    drop(results);
    if started.is_ok() && !spec.warmup.is_zero() {
        run.wait(Instant::now() + spec.warmup);
        before = Sample::take(spec, hooks);
        run.begun = SystemTime::now();
        run.enter(Phase::Measure);
    }
    if started.is_ok() {
        let limit = match spec.stop {
            Stop::Runtime(time) => Instant::now() + time,
            Stop::Requests(_) | Stop::OnePass => Instant::now() + Duration::from_secs(u64::from(u32::MAX)),
        };
        run.wait(limit);
    }
    run.drain();
    let after = Sample::take(spec, hooks);
    started?;
    run.outcome(&before, &after)
}

struct Run<'a> {
    spec: &'a BenchSpec,
    hooks: &'a Hooks<'a>,
    range: Range,
    reactors: &'a [Arc<dyn ReactorHandle>],
    conductor: Arc<Conductor>,
    received: Receiver<QueueResult>,
    finished: Vec<QueueResult>,
    cancelled: bool,
    begun: SystemTime,
}

/// Counters read before and after the measurement.
struct Sample {
    client: CpuSample,
    servers: Vec<(u32, CpuSample)>,
    counters: Vec<(&'static str, u64)>,
    harvests: Vec<u64>,
}

impl Sample {
    fn take(spec: &BenchSpec, hooks: &Hooks<'_>) -> Self {
        Self {
            client: CpuSample::take(std::process::id()),
            servers: spec.server_pids.iter().map(|pid| (*pid, CpuSample::take(*pid))).collect(),
            counters: hooks.counters.as_ref().map(|counters| counters()).unwrap_or_default(),
            harvests: hooks.harvests.as_ref().map(|harvests| harvests()).unwrap_or_default(),
        }
    }
}

impl Run<'_> {
    fn start(&self, disk: &Arc<dyn Disk>, results: &Sender<QueueResult>) -> Result<()> {
        let spec = Arc::new(self.spec.clone());
        for (index, reactor) in self.reactors.iter().enumerate() {
            let blocks = self.range.part(index as u64, self.reactors.len() as u64);
            let parts = Parts {
                queue_index: index as u32,
                tracker: self.tracker(&blocks),
                spec: Arc::clone(&spec),
                range: self.range,
                blocks: match (spec.pattern, &spec.verify) {
                    // Without verification, several queues may write a block.
                    (Pattern::Random { .. }, None) => 0..self.range.blocks(),
                    _ => blocks,
                },
                conductor: Arc::clone(&self.conductor),
                results: results.clone(),
                maps: spec.maps.then(|| Arc::clone(disk)),
            };
            let (disk, alloc) = (Arc::clone(disk), self.hooks.alloc.clone());
            run_and_wait(reactor.as_ref(), move |ctx| start_queue(&disk, ctx, alloc.as_ref(), parts))??;
        }
        Ok(())
    }

    fn tracker(&self, blocks: &std::ops::Range<u64>) -> Option<Tracker> {
        let verify = self.spec.verify.as_ref()?;
        let count = (blocks.end - blocks.start) as usize;
        let (zeros, states) = match &verify.initial {
            Initial::Unknown => (false, vec![Default::default(); count]),
            Initial::Zeros => (true, vec![Default::default(); count]),
            Initial::State(state) => (state.zeros(), state.part(blocks.clone())),
        };
        Some(Tracker::new(verify.seed, zeros, blocks.start, states))
    }

    /// Sets the phase and wakes the generators' reactors.
    fn enter(&self, phase: Phase) {
        self.conductor.set(phase);
        for reactor in self.reactors {
            // The reactor of a generator that has ended may be gone.
            let _ = reactor.run(Box::new(|_| {}));
        }
    }

    /// Waits until `limit`, until all generators have finished, or until the caller cancels.
    fn wait(&mut self, limit: Instant) {
        let started = Instant::now();
        while self.finished.len() < self.reactors.len() && !self.cancelled {
            let now = Instant::now();
            if now >= limit {
                return;
            }
            match self.received.recv_timeout(TICK.min(limit - now)) {
                Ok(result) => self.finished.push(result),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.tell_progress(started, limit);
            self.cancelled |= self.hooks.cancel.as_ref().is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        }
    }

    fn tell_progress(&self, started: Instant, limit: Instant) {
        let Some(progress) = self.hooks.progress else { return };
        let requests = self.conductor.requests.load(Ordering::Relaxed);
        let fraction = match self.spec.stop {
            Stop::Runtime(_) => {
                started.elapsed().as_secs_f64() / limit.saturating_duration_since(started).as_secs_f64().max(1e-9)
            }
            Stop::Requests(total) => requests as f64 / total.max(1) as f64,
            Stop::OnePass => requests as f64 / self.range.blocks().max(1) as f64,
        };
        let failures = self.conductor.failures.load(Ordering::Relaxed);
        progress(Progress { fraction: fraction.clamp(0.0, 1.0), requests, failures });
    }

    /// Waits for requests in flight, then gives them up.
    fn drain(&mut self) {
        for (phase, patience) in [(Phase::Drain, self.spec.drain_timeout), (Phase::Abandon, self.spec.drain_timeout)] {
            self.enter(phase);
            let until = Instant::now() + patience;
            while self.finished.len() < self.reactors.len() {
                match self.received.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(result) => self.finished.push(result),
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        }
    }

    fn outcome(mut self, before: &Sample, after: &Sample) -> Result<Outcome> {
        let abandoned: usize = self.finished.iter().map(|result| result.abandoned).sum();
        if self.finished.len() < self.reactors.len() || abandoned > 0 {
            let waited = self.spec.drain_timeout.as_secs_f64();
            let message = format!("{abandoned} requests did not complete within {waited} s after the end of the run");
            return Err(Error::new(ErrorKind::Io, message));
        }
        self.finished.sort_by_key(|result| result.queue);
        let state = self.spec.verify.as_ref().map(|verify| {
            let zeros = match &verify.initial {
                Initial::Unknown => false,
                Initial::Zeros => true,
                Initial::State(state) => state.zeros(),
            };
            let blocks = self.finished.iter_mut().filter_map(|result| result.blocks.take()).flatten().collect();
            VerifyState::new(self.range, verify.seed, zeros, blocks)
        });
        let mut moments: Option<Moments> = None;
        for queue in self.finished.iter_mut().filter_map(|result| result.moments.take()) {
            match &mut moments {
                Some(moments) => moments.merge(&queue),
                None => moments = Some(queue),
            }
        }
        let moments = moments.map(Moments::summary).unwrap_or_default();
        Ok(Outcome { report: self.report(before, after), state, moments, begun: self.begun })
    }

    fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for result in &self.finished {
            let seconds = result.elapsed_seconds.max(1e-9);
            totals.iops += (result.reads.count() + result.writes.count()) as f64 / seconds;
            totals.bytes_per_second += result.bytes as f64 / seconds;
            totals.elapsed_seconds += seconds / self.finished.len() as f64;
            totals.longest_seconds = totals.longest_seconds.max(seconds);
            totals.reads.merge(&result.reads);
            totals.writes.merge(&result.writes);
            totals.flushes.merge(&result.flushes);
            totals.batches.merge(&result.batches);
            totals.evenness.merge(&result.evenness);
        }
        totals
    }

    fn report(&self, before: &Sample, after: &Sample) -> BenchReport {
        let totals = self.totals();
        let mut all = Timings::new();
        all.merge(&totals.reads);
        all.merge(&totals.writes);
        let requests = all.count();
        let client = after.client.seconds_since(&before.client);
        BenchReport {
            queue_depth: self.spec.queue_depth,
            queues: self.spec.queues,
            block_bytes: self.spec.block_bytes,
            read_percent: self.spec.read_percent,
            pattern: match self.spec.pattern {
                Pattern::Random { .. } => "random".to_owned(),
                Pattern::Sequential => "sequential".to_owned(),
            },
            elapsed_seconds: totals.elapsed_seconds,
            requests,
            reads: totals.reads.count(),
            writes: totals.writes.count(),
            flushes: totals.flushes.count(),
            by_maps: self.spec.maps.then(|| self.finished.iter().map(|result| result.by_maps).sum()),
            iops: totals.iops,
            bytes_per_second: totals.bytes_per_second,
            per_second: totals.evenness.whole_seconds(totals.longest_seconds),
            longest_gap_us: totals.evenness.longest_gap_us(),
            latency_us: all.summary(),
            read_latency_us: totals.reads.summary(),
            write_latency_us: totals.writes.summary(),
            flush_latency_us: totals.flushes.summary(),
            errors: self.finished.iter().map(|result| result.errors).sum(),
            first_error: self.finished.iter().find_map(|result| result.first_error.clone()),
            mismatches: self.finished.iter().map(|result| result.mismatches).sum(),
            first_mismatch: self.finished.iter().find_map(|result| result.first_mismatch.clone()),
            batches: totals.batches.summary(),
            client_cpu_seconds: client,
            client_us_per_request: us_per_request(client, requests),
            client_voluntary_switches_per_request: after.client.voluntary_switches_since(&before.client) as f64
                / requests.max(1) as f64,
            engine_harvests: self.hooks.harvests.is_some().then(|| {
                let pairs = after.harvests.iter().zip(&before.harvests);
                let grown: Vec<u64> = pairs.map(|(after, before)| after.saturating_sub(*before)).collect();
                EngineHarvests::of(&grown, self.spec.queue_depth)
            }),
            servers: servers_growth(before, after, requests),
            counters: counters_growth(before, after, requests),
            cancelled: self.cancelled,
        }
    }
}

/// The sums over all queues.
struct Totals {
    reads: Timings,
    writes: Timings,
    flushes: Timings,
    batches: BatchCounts,
    evenness: Evenness,
    iops: f64,
    bytes_per_second: f64,
    /// The mean of the queues' times.
    elapsed_seconds: f64,
    /// The longest of them.
    longest_seconds: f64,
}

impl Default for Totals {
    fn default() -> Self {
        Self {
            reads: Timings::new(),
            writes: Timings::new(),
            flushes: Timings::new(),
            batches: BatchCounts::default(),
            evenness: Evenness::default(),
            iops: 0.0,
            bytes_per_second: 0.0,
            elapsed_seconds: 0.0,
            longest_seconds: 0.0,
        }
    }
}

fn us_per_request(seconds: f64, requests: u64) -> f64 {
    seconds * 1e6 / requests.max(1) as f64
}

fn servers_growth(before: &Sample, after: &Sample, requests: u64) -> Vec<ProcessCpu> {
    let pairs = before.servers.iter().zip(&after.servers);
    let growth = pairs.map(|((pid, before), (_, after))| {
        let cpu_seconds = after.seconds_since(before);
        let voluntary_switches = after.voluntary_switches_since(before);
        ProcessCpu {
            pid: *pid,
            cpu_seconds,
            us_per_request: us_per_request(cpu_seconds, requests),
            voluntary_switches,
            voluntary_switches_per_request: voluntary_switches as f64 / requests.max(1) as f64,
        }
    });
    growth.collect()
}

fn counters_growth(before: &Sample, after: &Sample, requests: u64) -> Vec<CounterGrowth> {
    let pairs = before.counters.iter().zip(&after.counters);
    let growth = pairs.map(|((name, before), (_, after))| {
        let total = after.saturating_sub(*before);
        CounterGrowth { name: (*name).to_owned(), total, per_request: total as f64 / requests.max(1) as f64 }
    });
    growth.collect()
}

/// Opens the queue, allocates the buffers, and begins. Called on the reactor's thread.
fn start_queue(disk: &Arc<dyn Disk>, ctx: &Rc<dyn ReactorCtx>, alloc: Option<&Alloc>, parts: Parts) -> Result<()> {
    let queue = disk.open_queue(ctx)?;
    let length = parts.spec.block_bytes as usize;
    let buffer = |_| match alloc {
        Some(alloc) => alloc(length),
        None => Ok(IoBuf::zeroed(length)),
    };
    let buffers = (0..parts.spec.queue_depth).map(buffer).collect::<Result<Vec<_>>>()?;
    let generator = Rc::new(RefCell::new(Generator::new(queue, ctx, buffers, parts)));
    let poller = ctx.add_poller(generator.clone())?;
    generator.borrow_mut().poller = Some(poller);
    Ok(())
}
