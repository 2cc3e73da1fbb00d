//! The measurements of a run.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Number of requests measured.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

/// Sizes of harvests: how many completions came at once. Empty harvests do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Batches {
    /// Harvests with at least one completion.
    pub harvests: u64,
    /// The number of polls of the generator, with or without completions.
    pub polls: u64,
    /// Mean completions a harvest.
    pub mean: f64,
    /// Median.
    pub median: u64,
    /// Most.
    pub max: u64,
}

/// Sizes of the harvests of the server's engines. Empty harvests do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct EngineHarvests {
    /// Harvests with at least one completion.
    pub harvests: u64,
    /// Mean completions a harvest.
    pub mean: f64,
    /// 10th percentile of completions a harvest.
    pub p10: u64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// Most.
    pub max: u64,
    /// Share of harvests as large as the deepest queue, in percent.
    pub full_percent: f64,
}

impl EngineHarvests {
    /// Computes this from the number of harvests of each size, on queues of `depth`.
    pub(crate) fn of(by_length: &[u64], depth: u32) -> Self {
        let sum = |counts: &[u64]| counts.iter().sum::<u64>();
        let harvests = sum(by_length);
        if harvests == 0 {
            return Self::default();
        }
        let completions: u64 = by_length.iter().zip(0..).map(|(count, length): (&u64, u64)| count * length).sum();
        let at = |percent: u64| {
            let mut seen = 0;
            let place = by_length.iter().position(|count| {
                seen += count;
                seen * 100 >= harvests * percent
            });
            place.unwrap_or(0) as u64
        };
        let full = sum(by_length.get(depth as usize..).unwrap_or_default());
        Self {
            harvests,
            mean: completions as f64 / harvests as f64,
            p10: at(10),
            p50: at(50),
            p90: at(90),
            max: by_length.iter().rposition(|count| *count > 0).unwrap_or(0) as u64,
            full_percent: full as f64 * 100.0 / harvests as f64,
        }
    }
}

/// The CPU use of a process during the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ProcessCpu {
    /// The process's id.
    pub pid: u32,
    /// CPU seconds, all threads.
    pub cpu_seconds: f64,
    /// CPU microseconds per request of this run.
    pub us_per_request: f64,
    /// The number of times that its threads went to sleep.
    pub voluntary_switches: u64,
    /// The number of times that its threads went to sleep, per request.
    pub voluntary_switches_per_request: f64,
}

/// The growth of a counter during the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CounterGrowth {
    /// The counter's name.
    pub name: String,
    /// The growth.
    pub total: u64,
    /// The growth per request.
    pub per_request: f64,
}

/// The figures of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct BenchReport {
    /// Requests in flight on each queue.
    pub queue_depth: u32,
    /// Number of queues.
    pub queues: u32,
    /// Bytes a request.
    pub block_bytes: u32,
    /// Percentage of reads among reads and writes.
    pub read_percent: u8,
    /// "random" or "sequential".
    pub pattern: String,
    /// Time from the beginning to the last completion, the mean over the queues.
    pub elapsed_seconds: f64,
    /// Reads and writes completed.
    pub requests: u64,
    /// The number of reads among them.
    pub reads: u64,
    /// The number of writes among them.
    pub writes: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Reads and writes by maps, if the run asked for maps; the others were requests.
    pub by_maps: Option<u64>,
    /// Reads and writes a second.
    pub iops: f64,
    /// Bytes a second of reads and writes.
    pub bytes_per_second: f64,
    /// Requests of all kinds in each whole second, up to the last completion of any queue. Later seconds may cover only
    /// some of the queues.
    pub per_second: Vec<u64>,
    /// The longest time without a completion, on any queue.
    pub longest_gap_us: f64,
    /// Latencies of reads and writes together.
    pub latency_us: Latency,
    /// Latencies of reads.
    pub read_latency_us: Latency,
    /// Latencies of writes.
    pub write_latency_us: Latency,
    /// Latencies of flushes.
    pub flush_latency_us: Latency,
    /// Requests that failed.
    pub errors: u64,
    /// The first failure.
    pub first_error: Option<String>,
    /// Blocks that held wrong data.
    pub mismatches: u64,
    /// The first wrong block.
    pub first_mismatch: Option<String>,
    /// Sizes of harvests.
    pub batches: Batches,
    /// CPU seconds of this process. A reactor that spins counts in full.
    pub client_cpu_seconds: f64,
    /// CPU microseconds of this process per request.
    pub client_us_per_request: f64,
    /// The number of times that threads of this process went to sleep, per request.
    pub client_voluntary_switches_per_request: f64,
    /// CPU use of the server's processes.
    pub servers: Vec<ProcessCpu>,
    /// Harvests of the server's engines, if the caller knows them.
    pub engine_harvests: Option<EngineHarvests>,
    /// Growth of the caller's counters.
    pub counters: Vec<CounterGrowth>,
    /// Whether the caller ended the run early.
    pub cancelled: bool,
}

const SLOWEST_NS: u64 = 1_000_000_000_000;
const DIGITS: u8 = 3;
/// Longer batches count as this length.
const MAX_BATCH: usize = 4096;

/// Latencies of one kind of request.
pub(crate) struct Timings(Histogram<u64>);

impl Timings {
    pub(crate) fn new() -> Self {
        // The bounds and digits are valid constants. If the crate disagrees, use a histogram that resizes itself.
        let histogram = Histogram::new_with_bounds(1, SLOWEST_NS, DIGITS)
            .or_else(|_| Histogram::new(DIGITS))
            .unwrap_or_else(|error| unreachable!("a histogram of {DIGITS} digits: {error}"));
        Self(histogram)
    }

    #[inline]
    pub(crate) fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    pub(crate) fn clear(&mut self) {
        self.0.reset();
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        // All histograms have the same bounds, so this cannot fail.
        let _ = self.0.add(&other.0);
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn summary(&self) -> Latency {
        if self.0.is_empty() {
            return Latency::default();
        }
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |quantile: f64| us(self.0.value_at_quantile(quantile));
        Latency {
            count: self.0.len(),
            mean: self.0.mean() / 1000.0,
            deviation: self.0.stdev() / 1000.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: us(self.0.max()),
        }
    }
}

/// Counts harvests by their size.
#[derive(Debug, Default)]
pub(crate) struct BatchCounts {
    by_length: Vec<u64>,
    pub(crate) polls: u64,
}

impl BatchCounts {
    /// Makes counts with room for harvests of up to `length` completions.
    pub(crate) fn up_to(length: usize) -> Self {
        Self { by_length: vec![0; length.min(MAX_BATCH) + 1], polls: 0 }
    }

    pub(crate) fn record(&mut self, length: usize) {
        let length = length.min(MAX_BATCH);
        if length >= self.by_length.len() {
            self.by_length.resize(length + 1, 0);
        }
        if let Some(count) = self.by_length.get_mut(length) {
            *count += 1;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.by_length.fill(0);
        self.polls = 0;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        if self.by_length.len() < other.by_length.len() {
            self.by_length.resize(other.by_length.len(), 0);
        }
        for (mine, theirs) in self.by_length.iter_mut().zip(&other.by_length) {
            *mine += theirs;
        }
        self.polls += other.polls;
    }

    pub(crate) fn summary(&self) -> Batches {
        let harvests: u64 = self.by_length.iter().sum();
        let completions: u64 = self.by_length.iter().zip(0u64..).map(|(count, length)| count * length).sum();
        let mut seen = 0;
        let median = self.by_length.iter().position(|count| {
            seen += count;
            harvests > 0 && seen * 2 >= harvests
        });
        let max = self.by_length.iter().rposition(|count| *count > 0);
        Batches {
            harvests,
            polls: self.polls,
            mean: completions as f64 / harvests.max(1) as f64,
            median: median.unwrap_or(0) as u64,
            max: max.unwrap_or(0) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harvests_of_engines_become_percentiles() {
        let mut by_length = [0; 9];
        (by_length[1], by_length[4], by_length[8]) = (2, 6, 2);
        let found = EngineHarvests::of(&by_length, 8);
        assert_eq!((found.harvests, found.p10, found.p50, found.p90, found.max), (10, 1, 4, 8, 8));
        assert!((found.mean - 4.2).abs() < 1e-9 && (found.full_percent - 20.0).abs() < 1e-9);
        assert_eq!(EngineHarvests::of(&[0; 4], 8), EngineHarvests::default());
    }

    #[test]
    fn batches_are_summed_over_queues() {
        let (mut one, mut two) = (BatchCounts::default(), BatchCounts::default());
        for length in [1, 1, 8] {
            one.record(length);
        }
        two.record(10);
        two.record(2);
        one.merge(&two);
        let summary = one.summary();
        assert_eq!((summary.harvests, summary.median, summary.max), (5, 2, 10));
        assert!((summary.mean - 4.4).abs() < 1e-9);
        assert_eq!(BatchCounts::default().summary(), Batches::default());
    }

    #[test]
    fn percentiles_come_in_microseconds() {
        let mut timings = Timings::new();
        (1..=1000).for_each(|us| timings.record(us * 1000));
        let summary = timings.summary();
        assert_eq!(summary.count, 1000);
        for (found, expected) in [(summary.p50, 500.0), (summary.p99, 990.0), (summary.max, 1000.0)] {
            assert!((found / expected - 1.0).abs() < 0.002, "{found} for {expected}");
        }
    }
}
