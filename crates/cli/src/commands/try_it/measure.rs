//! The four workloads, on either side.

use anyhow::bail;
use block::{Disk, ReactorHandle};
use load::{BenchSpec, Hooks, Initial, Outcome, Pattern, Stop, Verify, VerifyState};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The largest request of all workloads; sizes are multiples of it.
pub(super) const LARGEST_BLOCK_BYTES: u64 = 128 << 10;

/// One workload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    /// Its name in fio.
    pub(super) name: &'static str,
    pub(super) label: &'static str,
    pub(super) random: bool,
    pub(super) read_percent: u8,
    pub(super) block_bytes: u32,
    pub(super) queue_depth: u32,
}

/// The table's rows.
pub(super) const CELLS: [Cell; 4] = [
    cell("randread", "4 KiB random read, depth 32", true, 100),
    cell("randwrite", "4 KiB random write, depth 32", true, 0),
    cell("read", "128 KiB sequential read, depth 16", false, 100),
    cell("write", "128 KiB sequential write, depth 16", false, 0),
];

const fn cell(name: &'static str, label: &'static str, random: bool, read_percent: u8) -> Cell {
    let (block_bytes, queue_depth) = if random { (4 << 10, 32) } else { (128 << 10, 16) };
    Cell { name, label, random, read_percent, block_bytes, queue_depth }
}

/// Shared memory that the largest workload needs.
pub(super) const BUFFERS_BYTES: usize = 16 << 20;

/// A disk and the threads that load it.
pub(super) struct Side<'a> {
    pub(super) name: &'static str,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) reactors: &'a [Arc<dyn ReactorHandle>],
    pub(super) hooks: Hooks<'static>,
    pub(super) cancel: Arc<AtomicBool>,
}

/// A part of a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) offset_bytes: u64,
    pub(super) length_bytes: u64,
}

impl Side<'_> {
    /// Measures `cell` on the first `size_bytes`. Returns bytes a second.
    pub(super) fn rate(&self, cell: &Cell, size_bytes: u64, time: Duration) -> anyhow::Result<f64> {
        let spec = BenchSpec::default().with(|spec| {
            spec.queue_depth = cell.queue_depth;
            spec.block_bytes = cell.block_bytes;
            spec.read_percent = cell.read_percent;
            spec.pattern = if cell.random { Pattern::Random { seed: 1 } } else { Pattern::Sequential };
            spec.length_bytes = Some(size_bytes);
            spec.stop = Stop::Runtime(time);
            spec.warmup = time / 10;
        });
        let Outcome { report, .. } = self.run(cell.label, &spec)?;
        Ok(report.bytes_per_second)
    }

    /// Writes a pattern that depends on the place to `part`. Returns the state for `check_pattern`.
    pub(super) fn write_pattern(&self, part: Part, seed: u64) -> anyhow::Result<VerifyState> {
        let state = self.one_pass(part, 0, Verify::new(seed, Initial::Unknown))?;
        match state {
            Some(state) => Ok(state),
            None => bail!("the {} side gave no record of what it wrote", self.name),
        }
    }

    /// Reads `part` and compares it with the pattern.
    pub(super) fn check_pattern(&self, part: Part, seed: u64, state: VerifyState) -> anyhow::Result<()> {
        self.one_pass(part, 100, Verify::new(seed, Initial::State(state))).map(drop)
    }

    fn one_pass(&self, part: Part, read_percent: u8, verify: Verify) -> anyhow::Result<Option<VerifyState>> {
        let what = if read_percent == 0 { "writing patterned data" } else { "reading patterned data back" };
        let spec = BenchSpec::default().with(|spec| {
            spec.queue_depth = 16;
            spec.block_bytes = LARGEST_BLOCK_BYTES as u32;
            spec.read_percent = read_percent;
            spec.pattern = Pattern::Sequential;
            spec.offset_bytes = part.offset_bytes;
            spec.length_bytes = Some(part.length_bytes);
            spec.stop = Stop::OnePass;
            spec.verify = Some(verify);
        });
        Ok(self.run(what, &spec)?.state)
    }

    /// Runs a load. A failed request or a block with wrong data fails the run.
    fn run(&self, what: &str, spec: &BenchSpec) -> anyhow::Result<Outcome> {
        let hooks = self.hooks.clone().with(|hooks| hooks.cancel = Some(Arc::clone(&self.cancel)));
        let outcome = load::run(&self.disk, self.reactors, spec, &hooks)?;
        let report = &outcome.report;
        if report.cancelled {
            bail!("interrupted");
        }
        if let Some(first) = &report.first_mismatch {
            bail!("MISMATCH on the {} side, {what}: {} blocks hold wrong data: {first}", self.name, report.mismatches);
        }
        if let Some(first) = &report.first_error {
            bail!("{} requests failed on the {} side, {what}: {first}", report.errors, self.name);
        }
        Ok(outcome)
    }
}

/// Returns the median (the mean of the middle two).
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    let lower = values.len().saturating_sub(1) / 2;
    match (values.get(lower), values.get(upper)) {
        (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
        _ => 0.0,
    }
}
