//! The page that keeps what was measured.

use super::cells::Storage;
use super::measure::{Files, Sample, Tools, version};
use super::statistics::{median, quantile, ratios};
use super::{BenchArguments, Outcome};
use crate::command::Program;
use anyhow::Result;
use std::fmt::Write;

/// One line for whoever watches.
pub(super) fn brief(outcome: &Outcome) -> String {
    let row = Row::of(outcome);
    let host = row.host.map_or_else(String::new, |host| format!(", fio {}", rate(host)));
    format!("ringdisk {}, qemu {}, ratio {:.2}{host}", rate(row.ringdisk), rate(row.peer), row.ratio)
}

/// The whole page.
pub(super) fn write(outcomes: &[Outcome], _: &Tools, files: &Files, arguments: &BenchArguments) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "# Benchmarks\n")?;
    writeln!(
        text,
        "Written by `cargo xtask bench`; do not edit. Ringdisk, qemu-storage-daemon and fio on the host, on the same \
         files, interleaved: in each round of a cell each runs once, alone, the servers in alternating order. Servers \
         (and fio) have one core, their client, the same `ringdisk bench` for both, the other.\n"
    )?;
    machine(&mut text, files, arguments)?;
    writeln!(
        text,
        "\nIOPS are medians. A ratio is the median of the rounds' ratios, in brackets its middle half. CPU is the \
         server's time a request, user and system, in microseconds. Both servers use io_uring unless a row names \
         another engine; fio uses it with registered files and buffers (for the rows with threads, too; for linux-aio \
         it uses that), for qcow2 on a raw file of the same size beside it.\n"
    )?;
    for storage in Storage::ALL {
        let of_storage: Vec<_> = outcomes.iter().filter(|outcome| outcome.cell.storage == storage).collect();
        if !of_storage.is_empty() {
            table(&mut text, storage, &of_storage)?;
        }
    }
    Ok(text)
}

fn table(text: &mut String, storage: Storage, outcomes: &[&Outcome]) -> Result<()> {
    writeln!(text, "## {}\n", storage.title())?;
    writeln!(text, "| | Ringdisk | qemu | ratio | CPU Ringdisk | CPU qemu | fio | ratio to fio |")?;
    writeln!(text, "|---|--:|--:|--:|--:|--:|--:|--:|")?;
    for outcome in outcomes {
        let row = Row::of(outcome);
        let (host, to_host) = row.host.map_or_else(
            || (String::new(), String::new()),
            |host| {
                (rate(host), format!("{:.2} ({:.2}-{:.2})", row.to_host, row.to_host_spread.0, row.to_host_spread.1))
            },
        );
        writeln!(
            text,
            "| {} | {} | {} | {:.2} ({:.2}-{:.2}) | {:.2} | {:.2} | {host} | {to_host} |",
            outcome.cell.words(),
            rate(row.ringdisk),
            rate(row.peer),
            row.ratio,
            row.ratio_spread.0,
            row.ratio_spread.1,
            row.ringdisk_cpu,
            row.peer_cpu,
        )?;
    }
    writeln!(text)?;
    Ok(())
}

/// The machine, as far as it matters, without a name.
fn machine(text: &mut String, files: &Files, arguments: &BenchArguments) -> Result<()> {
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
    let commit = Program::new("git").args(["rev-parse", "--short=12", "HEAD"]).output_text().unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']);
    writeln!(text, "* {model}, {cores} cores, {} GiB of memory, Linux {}", memory_kib >> 20, kernel.trim())?;
    writeln!(text, "* files of {} MiB, on disk on {}", files.size_mib(), files.file_system())?;
    writeln!(text, "* {}, {}", version("qemu-storage-daemon"), version("fio"))?;
    writeln!(text, "* Ringdisk at {}", commit.trim())?;
    writeln!(text, "* {} rounds of {} s", arguments.pairs, arguments.seconds)?;
    Ok(())
}

/// The figures of a cell.
struct Row {
    ringdisk: f64,
    peer: f64,
    host: Option<f64>,
    ratio: f64,
    ratio_spread: (f64, f64),
    to_host: f64,
    to_host_spread: (f64, f64),
    ringdisk_cpu: f64,
    peer_cpu: f64,
}

impl Row {
    fn of(outcome: &Outcome) -> Self {
        let iops = |samples: &[Sample]| samples.iter().map(|sample| sample.iops).collect::<Vec<_>>();
        let cpu =
            |samples: &[Sample]| median(&samples.iter().map(|sample| sample.cpu_us_per_request).collect::<Vec<_>>());
        let [ringdisk, peer, host] = [&outcome.ringdisk, &outcome.peer, &outcome.host].map(|samples| iops(samples));
        let (to_peer, to_host) = (ratios(&ringdisk, &peer), ratios(&ringdisk, &host));
        let spread = |values: &[f64]| (quantile(values, 0.25), quantile(values, 0.75));
        Self {
            ringdisk: median(&ringdisk),
            peer: median(&peer),
            host: (!host.is_empty()).then(|| median(&host)),
            ratio: median(&to_peer),
            ratio_spread: spread(&to_peer),
            to_host: median(&to_host),
            to_host_spread: spread(&to_host),
            ringdisk_cpu: cpu(&outcome.ringdisk),
            peer_cpu: cpu(&outcome.peer),
        }
    }
}

/// Three digits that count.
fn rate(iops: f64) -> String {
    if iops >= 1e6 {
        format!("{:.2}M", iops / 1e6)
    } else if iops >= 1e5 {
        format!("{:.0}K", iops / 1e3)
    } else {
        format!("{:.1}K", iops / 1e3)
    }
}
