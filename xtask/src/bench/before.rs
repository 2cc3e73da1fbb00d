//! `cargo xtask bench --before OLD`: two builds of Ringdisk side by side, cell by cell.

use super::BenchArguments;
use super::cells::{Cell, Storage};
use super::files::Files;
use super::measure::{self, Sample, Tools};
use super::statistics::{median, quantile, ratios};
use anyhow::{Context, Result};
use std::path::Path;
use std::time::Instant;

/// Below this ratio, a cell has lost speed.
const FLOOR: f64 = 0.97;

/// The new build's figures divided by the old one's, round by round.
struct Compared {
    name: String,
    iops: f64,
    rate_ratios: Vec<f64>,
    cpu_ratios: Vec<f64>,
}

/// Measures each cell with both builds in turn, and prints the ratios, the lowest first.
pub(super) fn run(cells: &[Cell], tools: &Tools, before: &Path, arguments: &BenchArguments) -> Result<()> {
    let before = std::path::absolute(before).with_context(|| format!("there is no {}", before.display()))?;
    let old = tools.with_server(before);
    let files = Files::create(arguments.directory.as_deref(), arguments.served_mib(), cells)?;
    let start = Instant::now();
    let mut all = Vec::new();
    for (number, cell) in cells.iter().enumerate() {
        println!("[{}/{}, {:.0} s] {}", number + 1, cells.len(), start.elapsed().as_secs_f64(), cell.name());
        let compared = compare(cell, tools, &old, &files, arguments)?;
        println!("    {}", compared.words());
        all.push(compared);
    }
    all.sort_by(|one, other| one.rate().total_cmp(&other.rate()));
    println!("\nnew by old, the lowest rate first:");
    for compared in &all {
        println!("{:48} {}", compared.name, compared.words());
    }
    let below = all.iter().filter(|compared| compared.rate() < FLOOR).count();
    println!("{below} of {} cells below {FLOOR}", all.len());
    Ok(())
}

fn compare(cell: &Cell, new: &Tools, old: &Tools, files: &Files, arguments: &BenchArguments) -> Result<Compared> {
    if matches!(cell.storage, Storage::RawPageCache | Storage::RawSync) {
        files.warm(cell.storage)?;
    }
    let sample = |tools| measure::calm(cell, || measure::ringdisk(cell, tools, files, arguments.seconds));
    let (mut ours, mut theirs): (Vec<Sample>, Vec<Sample>) = Default::default();
    for round in 0..arguments.pairs {
        // The order alternates: the first side gets the machine as the last round left it.
        if round % 2 == 0 {
            ours.push(sample(new)?);
            theirs.push(sample(old)?);
        } else {
            theirs.push(sample(old)?);
            ours.push(sample(new)?);
        }
    }
    let of = |samples: &[Sample], field: fn(&Sample) -> f64| samples.iter().map(field).collect::<Vec<_>>();
    let ratio = |field| ratios(&of(&ours, field), &of(&theirs, field));
    Ok(Compared {
        name: cell.name(),
        iops: median(&of(&ours, |sample| sample.iops)),
        rate_ratios: ratio(|sample| sample.iops),
        cpu_ratios: ratio(|sample| sample.cpu_us_per_request),
    })
}

impl Compared {
    fn rate(&self) -> f64 {
        median(&self.rate_ratios)
    }

    /// Describes the rate's ratio with the middle half of the rounds, the CPU time's ratio, and the rate itself.
    fn words(&self) -> String {
        let [low, high] = [0.25, 0.75].map(|part| quantile(&self.rate_ratios, part));
        let (rate, cpu, iops) = (self.rate(), median(&self.cpu_ratios), self.iops);
        format!("rate {rate:.3} ({low:.2}-{high:.2}), CPU {cpu:.2}, {iops:.0} a second")
    }
}
