//! `cargo xtask bench --contexts`: what the pool of requests' contexts is worth in the whole path. The program is built
//! with contexts from the pool, from the allocator, and from one list behind a lock, and serves a disk to its
//! own guest: two queues on two reactors, on a file in memory, as fast as it goes and with a delay of a millisecond.

use super::BenchArguments;
use super::measure::{escaped, json_of, number};
use super::statistics::{median, quantile, ratios};
use crate::command::Program;
use crate::workspace;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where contexts come from, and what `contexts_from` is for it.
const SOURCES: [(&str, Option<&str>); 3] = [("pool", None), ("allocator", Some("allocator")), ("lock", Some("lock"))];
const DEPTHS: [u32; 4] = [32, 128, 256, 512];
const DRIVES: [(&str, &str); 2] = [("raw in memory, io_uring", ""), ("the same, 1 ms late", ",delay-ms=1")];
const FILE_BYTES: usize = 256 << 20;

/// Requests a second, and CPU time of server and guest a request.
struct Sample {
    iops: f64,
    cpu_us: f64,
}

pub(super) fn run(arguments: &BenchArguments) -> Result<()> {
    let programs = SOURCES.map(|(_, source)| build(source));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let file = directory.path().join("disk.raw");
    std::fs::write(&file, vec![7; FILE_BYTES])?;
    println!("4 KiB random reads, two queues; medians of {} rounds of {} s", arguments.pairs, arguments.seconds);
    println!("| | pool | CPU, us | of the allocator | CPU | of the lock | CPU |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (words, options) in DRIVES {
        let drive = format!("file={},format=raw,engine=io_uring{options}", escaped(&file));
        for depth in DEPTHS {
            let mut samples = [const { Vec::new() }; SOURCES.len()];
            for round in 0..arguments.pairs {
                let mut sides: Vec<_> = samples.iter_mut().zip(&programs).collect();
                if round % 2 == 1 {
                    sides.reverse();
                }
                for (samples, program) in sides {
                    samples.push(measure(program, &drive, depth, arguments.seconds)?);
                }
            }
            println!("| {words}, {depth} | {}", row(&samples));
        }
    }
    Ok(())
}

fn row([pool, others @ ..]: &[Vec<Sample>; SOURCES.len()]) -> String {
    let iops = |samples: &[Sample]| samples.iter().map(|sample| sample.iops).collect::<Vec<_>>();
    let cpu = |samples: &[Sample]| samples.iter().map(|sample| sample.cpu_us).collect::<Vec<_>>();
    let words = |ours: &[f64], theirs: &[f64]| {
        let all = ratios(ours, theirs);
        format!("{:.2} ({:.2}-{:.2})", median(&all), quantile(&all, 0.25), quantile(&all, 0.75))
    };
    let mut text = format!("{:.0}K | {:.2} |", median(&iops(pool)) / 1e3, median(&cpu(pool)));
    for other in others {
        text += &format!(" {} | {} |", words(&iops(pool), &iops(other)), words(&cpu(pool), &cpu(other)));
    }
    text
}

fn measure(program: &Path, drive: &str, depth: u32, seconds: f64) -> Result<Sample> {
    let mut command = Command::new(program);
    command.args(["bench", "--serve", drive, "--queues", "2", "--depth", &depth.to_string(), "--warmup", "0.3"]);
    command.args(["--time", &seconds.to_string(), "--output", "json"]);
    let report = json_of(command)?;
    Ok(Sample { iops: number(&report["iops"])?, cpu_us: number(&report["client_us_per_request"])? })
}

/// A build of its own where contexts do not come from the pool.
fn build(source: Option<&str>) -> Result<PathBuf> {
    let target = match source {
        None => workspace::target(),
        Some(source) => workspace::target().join(format!("contexts-{source}")),
    };
    let mut cargo = Program::cargo().args(["build", "--release", "--package", "ringdisk"]);
    if let Some(source) = source {
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        let flags = format!("{flags} --cfg contexts_from=\"{source}\"");
        cargo = cargo.env("RUSTFLAGS", flags.trim_start()).env("CARGO_TARGET_DIR", &target);
    }
    if !cargo.watch()?.success() {
        bail!("ringdisk does not build with contexts from {}", source.unwrap_or("the pool"));
    }
    Ok(target.join("release/ringdisk"))
}
