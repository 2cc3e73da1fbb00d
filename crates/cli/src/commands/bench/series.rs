//! Several measurements that belong together: each depth, and at each depth each target, in turn.

use super::differences::differences;
use super::target::{Measured, Target};
use crate::output::Bar;
use anyhow::{Context, bail};
use load::{BenchReport, BenchSpec, Comparison, Curve, Point, compare};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The targets, depths and rounds of a series.
pub(super) struct Plan<'a> {
    pub(super) targets: &'a [Target],
    pub(super) depths: &'a [u32],
    /// Measurements of each target at each depth.
    pub(super) rounds: u32,
    /// The rest of the workload.
    pub(super) spec: &'a BenchSpec,
}

/// A target in the JSON.
#[derive(Debug, Serialize)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) target: String,
    pub(super) server_pids: Vec<u32>,
}

/// The results.
#[derive(Debug, Serialize)]
pub(super) struct Series {
    pub(super) targets: Vec<Named>,
    /// The options in which the targets differ.
    pub(super) differences: Vec<String>,
    /// One comparison for each depth.
    pub(super) depths: Vec<Comparison>,
    /// Whether a signal ended it early. The results were measured before.
    pub(super) interrupted: bool,
}

impl Plan<'_> {
    /// Measures all targets. They take turns within a depth, in alternating order, so that drift and warm-up favour
    /// none.
    pub(super) fn run(&self, bar: &Bar, cancel: &Arc<AtomicBool>) -> anyhow::Result<Series> {
        let names: Vec<String> = self.targets.iter().map(|target| target.name.clone()).collect();
        let mut depths = Vec::new();
        for (index, depth) in self.depths.iter().enumerate() {
            let spec = self.spec.clone().with(|spec| spec.queue_depth = *depth);
            let mut rounds = Vec::new();
            for round in 0..self.rounds {
                let done = (index as u32 * self.rounds + round) as f64;
                match self.round(&spec, round, done, bar, cancel)? {
                    Some(reports) => rounds.push(reports),
                    None => break,
                }
            }
            if !rounds.is_empty() {
                depths.push(compare(&names, &rounds));
            }
            if cancel.load(Ordering::Relaxed) {
                break;
            }
        }
        let interrupted = cancel.load(Ordering::Relaxed);
        if depths.is_empty() {
            bail!("not every target was measured once");
        }
        let named = |target: &Target| Named {
            name: target.name.clone(),
            target: target.text.clone(),
            server_pids: target.server_pids.clone(),
        };
        let differences = differences(self.targets);
        Ok(Series { targets: self.targets.iter().map(named).collect(), differences, depths, interrupted })
    }

    /// Measures each target once; returns `None` if it was interrupted.
    fn round(
        &self,
        spec: &BenchSpec,
        round: u32,
        rounds_done: f64,
        bar: &Bar,
        cancel: &Arc<AtomicBool>,
    ) -> anyhow::Result<Option<Vec<BenchReport>>> {
        let count = self.targets.len();
        let all = (self.depths.len() * count) as f64 * f64::from(self.rounds);
        let mut reports: Vec<(usize, BenchReport)> = Vec::new();
        for turn in 0..count {
            let index = if round.is_multiple_of(2) { turn } else { count - 1 - turn };
            let Some(target) = self.targets.get(index) else { continue };
            bar.say(&format!("depth {}, round {} of {}, {}", spec.queue_depth, round + 1, self.rounds, target.name));
            let before = rounds_done * count as f64 + turn as f64;
            let measured = target.measure(spec, cancel, &|fraction| bar.set((before + fraction) / all));
            let measured = measured.with_context(|| target.text.clone())?;
            if cancel.load(Ordering::Relaxed) {
                return Ok(None);
            }
            check(target, spec, &measured)?;
            reports.push((index, measured.report));
        }
        reports.sort_by_key(|(index, _)| *index);
        Ok(Some(reports.into_iter().map(|(_, report)| report).collect()))
    }
}

/// Fails if requests failed: such figures cannot be compared.
fn check(target: &Target, spec: &BenchSpec, measured: &Measured) -> anyhow::Result<()> {
    let (report, at) = (&measured.report, format!("{} at depth {}", target.text, spec.queue_depth));
    if measured.server_gone {
        bail!("{at}: the server ended the connection");
    }
    if report.errors > 0 || report.mismatches > 0 {
        let first = report.first_mismatch.as_ref().or(report.first_error.as_ref()).cloned().unwrap_or_default();
        bail!("{at}: {} requests failed, {} blocks held wrong data: {first}", report.errors, report.mismatches);
    }
    if report.requests == 0 {
        bail!("{at}: no request completed in the measured time; give it longer (--time)");
    }
    Ok(())
}

impl Series {
    /// Returns one curve for each target.
    pub(super) fn curves(&self) -> Vec<Curve> {
        let curve = |(index, named): (usize, &Named)| {
            let label = match self.targets.len() {
                1 => named.target.clone(),
                _ => format!("{}: {}", named.name, named.target),
            };
            let sides = self.depths.iter().filter_map(|depth| Some((depth.queue_depth, depth.sides.get(index)?)));
            let point = |(queue_depth, side): (u32, &load::Side)| Point {
                queue_depth,
                iops: side.figure("iops").unwrap_or_default(),
                p50_us: side.figure("p50_us").unwrap_or_default(),
                p99_us: side.figure("p99_us").unwrap_or_default(),
            };
            Curve { label, points: sides.map(point).collect() }
        };
        self.targets.iter().enumerate().map(curve).collect()
    }
}
