//! `cargo xtask bench --contexts`: the gain of the pool of request contexts in the whole path.
//!
//! The program is built with contexts from the pool, from the allocator, and from one list behind a lock. It serves two
//! disks on two reactors, each to a client of its own: files in memory, at full speed and with a delay of a
//! millisecond.

use super::BenchArguments;
use super::measure::{escaped, json_of, number, with_server};
use super::statistics::{median, quantile, ratios};
use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The sources of contexts, each with its value of `contexts_from`.
const SOURCES: [(&str, Option<&str>); 3] = [("pool", None), ("allocator", Some("allocator")), ("lock", Some("lock"))];
const DEPTHS: [u32; 4] = [32, 128, 256, 512];
const DRIVES: [(&str, &str); 2] = [("raw in memory, io_uring", ""), ("the same, 1 ms late", ",delay-ms=1")];
const FILE_BYTES: usize = 128 << 20;

/// The names of the disks.
const DISKS: [&str; 2] = ["a", "b"];

struct Disk {
    file: PathBuf,
    socket: PathBuf,
}

/// Requests a second of both disks, and the server's CPU time for each request.
struct Sample {
    iops: f64,
    cpu_us: f64,
}

pub(super) fn run(arguments: &BenchArguments) -> Result<()> {
    let programs = SOURCES.map(|(_, source)| build(source));
    let programs = programs.into_iter().collect::<Result<Vec<_>>>()?;
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let disks = DISKS.map(|name| Disk {
        file: directory.path().join(format!("{name}.raw")),
        socket: directory.path().join(format!("{name}.sock")),
    });
    for disk in &disks {
        std::fs::write(&disk.file, vec![7; FILE_BYTES])?;
    }
    println!("4 KiB random reads, two disks; medians of {} rounds of {} s", arguments.pairs, arguments.seconds);
    println!("| | pool | CPU, us | of the allocator | CPU | of the lock | CPU |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (words, options) in DRIVES {
        for depth in DEPTHS {
            let mut samples = [const { Vec::new() }; SOURCES.len()];
            for round in 0..arguments.pairs {
                let mut sides: Vec<_> = samples.iter_mut().zip(&programs).collect();
                if round % 2 == 1 {
                    sides.reverse();
                }
                for (samples, program) in sides {
                    samples.push(measure(program, &disks, options, depth, arguments.seconds)?);
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

fn measure(program: &Path, disks: &[Disk], options: &str, depth: u32, seconds: f64) -> Result<Sample> {
    let mut server = Command::new(program);
    server.args(["serve", "--reactors", "2", "--queues", "1"]);
    for Disk { file, socket } in disks {
        let (file, socket) = (escaped(file), escaped(socket));
        server.args(["--drive", &format!("file={file},format=raw,engine=io_uring,socket={socket}{options}")]);
    }
    let last = disks.last().context("there are disks")?;
    let reports = with_server(server, &last.socket, |pid| {
        let client = |disk: &Disk| {
            let mut command = Command::new(program);
            command.arg("bench").arg("--socket").arg(&disk.socket).args(["--depth", &depth.to_string()]);
            command.args(["--warmup", "0.3", "--time", &seconds.to_string()]);
            command.args(["--server-pid", &pid.to_string(), "--output", "json"]);
            json_of(command)
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = disks.iter().map(|disk| scope.spawn(move || client(disk))).collect();
            clients.into_iter().map(|client| client.join().expect("a client panicked")).collect::<Result<Vec<_>>>()
        })
    })?;
    let (mut iops, mut requests_per_us) = (0.0, 0.0);
    for report in &reports {
        iops += number(&report["iops"])?;
        // Each client sees all of the server's time, but only its own requests.
        requests_per_us += 1.0 / number(&report["servers"][0]["us_per_request"])?;
    }
    Ok(Sample { iops, cpu_us: 1.0 / requests_per_us })
}

/// Builds the program, in a directory of its own if contexts do not come from the pool.
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
