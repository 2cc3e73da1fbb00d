//! The page with the measured figures.

use super::Outcome;
use super::cells::Storage;
use super::files::Files;
use super::measure::{Sample, version};
use super::opening::{self, Openings};
use super::results::Stamp;
use super::statistics::{median, quantile, ratios};
use crate::command::Program;
use anyhow::Result;
use std::fmt::Write;

/// How the figures were measured.
const METHOD: &str = "\
Written by `cargo xtask bench`; do not edit. [Why it is measured this way](decisions/0037-benchmarks.md).

Ringdisk, qemu-storage-daemon (*qemu*) and fio on the host use the same files.

* In each round every program runs once, alone. The order alternates.
* A server has one core, and so has fio. The client has the other; it is the same `ringdisk bench` for both servers.
* Each program is started anew for each measurement. A load runs before anything is counted: one second on files in
  memory, 0.3 s on others. Images that are made anew get none.
* A measurement during which the host took a tenth of the processors is made again, up to four times. The run that lost
  least counts. Direct and durable I/O is exempt, because the host works for the disk there.

The machine and the programs:
";

/// What the tables show.
const COLUMNS: &str = "
The columns:

* Rates are requests a second, medians of the rounds.
* A *ratio* is the median of the rounds' ratios. The brackets hold its middle half.
* *CPU* is the server's time for each request, user and system, in microseconds. The client spins.
* *p99* is the latency that one request in a hundred exceeds, as the client sees it, in microseconds.
* *CPU to reference* is Ringdisk's CPU time beside its own on another disk: the raw file for an allocated qcow2 image,
  one image for a chain.
* *at* is the commit.

If a row names no engine, Ringdisk chooses, and qemu and fio use io_uring. In rows with threads fio uses io_uring too.
Ringdisk and fio register files with io_uring; qemu registers nothing. Buffers are registered only in the rows that say
so. For qcow2, fio runs on a raw file of the same size.
";

/// Returns one line for a person who watches.
pub(super) fn brief(outcome: &Outcome) -> String {
    let row = Row::of(outcome);
    let side = |name: &str, side: &Option<Side>| {
        side.as_ref()
            .map_or_else(String::new, |side| format!(", {name} {} ({:.2})", rate(side.iops), side.ratio.middle))
    };
    let to_reference =
        row.cpu_to_reference.map_or_else(String::new, |ratio| format!(", CPU to its reference {:.2}", ratio.middle));
    format!(
        "ringdisk {} at {:.2} us{}{}{to_reference}",
        rate(row.iops),
        row.cpu_us,
        side("qemu", &row.peer),
        side("fio", &row.host)
    )
}

/// Returns the whole page.
pub(super) fn write(outcomes: &[Outcome], openings: Option<&Openings>, files: &Files) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "# The path of a guest's request, beside its peers\n")?;
    writeln!(text, "{METHOD}")?;
    machine(&mut text, outcomes, files)?;
    writeln!(text, "{COLUMNS}")?;
    for storage in Storage::ALL {
        let of_storage: Vec<_> = outcomes.iter().filter(|outcome| outcome.cell.storage == storage).collect();
        if !of_storage.is_empty() {
            table(&mut text, storage, &of_storage)?;
        }
    }
    if let Some(openings) = openings {
        opening::table(&mut text, openings)?;
    }
    Ok(text)
}

fn table(text: &mut String, storage: Storage, outcomes: &[&Outcome]) -> Result<()> {
    writeln!(text, "## {}\n", storage.title())?;
    writeln!(
        text,
        "| | Ringdisk | qemu | ratio | CPU Ringdisk | CPU qemu | CPU client | p99 Ringdisk | p99 qemu | fio | ratio to fio | \
         CPU to reference | at |"
    )?;
    writeln!(text, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|")?;
    for outcome in outcomes {
        let row = Row::of(outcome);
        let [peer, peer_ratio, peer_cpu, peer_p99] = row.peer.as_ref().map_or_else(Default::default, Side::cells);
        let [host, host_ratio, ..] = row.host.as_ref().map_or_else(Default::default, Side::cells);
        let reference = row.cpu_to_reference.map_or_else(String::new, |ratio| ratio.words());
        writeln!(
            text,
            "| {} | {} | {peer} | {peer_ratio} | {:.2} | {peer_cpu} | {:.2} | {} | {peer_p99} | {host} | {host_ratio} | \
             {reference} | {} |",
            outcome.cell.words(),
            rate(row.iops),
            row.cpu_us,
            row.client_us,
            digits(row.p99_us),
            outcome.stamp.commit,
        )?;
    }
    writeln!(text)?;
    Ok(())
}

/// Describes the processors, the memory and the kernel, without the host's name.
pub(super) fn hardware() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown");
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory_kib: u64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = Program::new("uname").args(["-r"]).output_text().unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']);
    format!("{model}, {cores} cores, {} GiB of memory, Linux {}", memory_kib >> 20, kernel.trim())
}

/// Writes the machine, the programs and the commits.
fn machine(text: &mut String, outcomes: &[Outcome], files: &Files) -> Result<()> {
    writeln!(text, "* {}", hardware())?;
    writeln!(text, "* files of {} MiB, on disk on {}", files.size_mib(), files.file_system())?;
    writeln!(text, "* {}, {}", version("qemu-storage-daemon"), version("fio"))?;
    let mut stamps: Vec<&Stamp> = outcomes.iter().map(|outcome| &outcome.stamp).collect();
    stamps.dedup();
    let mut said: Vec<String> = Vec::new();
    for Stamp { commit, rounds, seconds } in stamps {
        let words = format!("* Ringdisk at {commit}, {rounds} rounds of {seconds} s");
        if !said.contains(&words) {
            writeln!(text, "{words}")?;
            said.push(words);
        }
    }
    Ok(())
}

/// The median of a ratio over the rounds, with its middle half.
#[derive(Clone, Copy)]
struct Ratio {
    middle: f64,
    low: f64,
    high: f64,
}

impl Ratio {
    fn of(ours: &[f64], theirs: &[f64]) -> Self {
        let values = ratios(ours, theirs);
        Self { middle: median(&values), low: quantile(&values, 0.25), high: quantile(&values, 0.75) }
    }

    fn words(self) -> String {
        format!("{:.2} ({:.2}-{:.2})", self.middle, self.low, self.high)
    }
}

/// A program that Ringdisk is measured beside.
struct Side {
    iops: f64,
    cpu_us: f64,
    p99_us: f64,
    /// Ringdisk's rate divided by this one's.
    ratio: Ratio,
}

impl Side {
    fn of(ringdisk: &[Sample], samples: &[Sample]) -> Option<Self> {
        let theirs = of(samples, |sample| sample.iops);
        (!samples.is_empty()).then(|| Self {
            iops: median(&theirs),
            cpu_us: median(&of(samples, |sample| sample.cpu_us_per_request)),
            p99_us: median(&of(samples, |sample| sample.p99_us)),
            ratio: Ratio::of(&of(ringdisk, |sample| sample.iops), &theirs),
        })
    }

    fn cells(&self) -> [String; 4] {
        [rate(self.iops), self.ratio.words(), format!("{:.2}", self.cpu_us), digits(self.p99_us)]
    }
}

/// The figures of a cell.
struct Row {
    iops: f64,
    cpu_us: f64,
    client_us: f64,
    p99_us: f64,
    peer: Option<Side>,
    host: Option<Side>,
    cpu_to_reference: Option<Ratio>,
}

impl Row {
    fn of(outcome: &Outcome) -> Self {
        let Outcome { ringdisk, peer, host, reference, .. } = outcome;
        let cpu = |samples: &[Sample]| of(samples, |sample| sample.cpu_us_per_request);
        Self {
            iops: median(&of(ringdisk, |sample| sample.iops)),
            cpu_us: median(&cpu(ringdisk)),
            client_us: median(&of(ringdisk, |sample| sample.client_us_per_request)),
            p99_us: median(&of(ringdisk, |sample| sample.p99_us)),
            peer: Side::of(ringdisk, peer),
            host: Side::of(ringdisk, host),
            cpu_to_reference: (!reference.is_empty()).then(|| Ratio::of(&cpu(ringdisk), &cpu(reference))),
        }
    }
}

fn of(samples: &[Sample], field: impl Fn(&Sample) -> f64) -> Vec<f64> {
    samples.iter().map(field).collect()
}

/// Formats a time in microseconds with its significant digits.
fn digits(us: f64) -> String {
    if us >= 100.0 { format!("{us:.0}") } else { format!("{us:.1}") }
}

/// Formats a rate with three significant digits.
pub(super) fn rate(iops: f64) -> String {
    if iops >= 1e6 {
        format!("{:.2}M", iops / 1e6)
    } else if iops >= 1e5 {
        format!("{:.0}K", iops / 1e3)
    } else {
        format!("{:.1}K", iops / 1e3)
    }
}
