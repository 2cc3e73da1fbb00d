//! `cargo xtask bench --scratch`: a scratch overlay (`snapshot=on`) beside QEMU's temporary qcow2 overlay, which is
//! what its `snapshot=on` makes, and beside a qcow2 overlay of ours. All have the same client, interleaved, over one
//! raw file in memory; writes go to memory as well. Every side is made anew for each measurement.

use super::BenchArguments;
use super::maps;
use super::measure::{Tools, bench, escaped, number, qemu, serve, socket_path, version, with_server};
use super::rounds::{chosen, in_turn, put_page};
use super::statistics::{Spread, median};
use crate::command::Program;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const BASE_BYTES: usize = 1 << 30;

/// What `--filter` calls the table of `maps`.
const MAPS: &str = "maps";
const MAPS_INTRODUCTION: &str = "
## Maps

Instructions a request in user space, as callgrind counts them, of a disk in the same process: `Disk::map_read` and
`Disk::map_write` ([how](decisions/0095-maps.md)) beside reads and writes. The client makes each word of a write, and adds up the
words of a read. With maps it does so in place, with requests in a buffer. Where the disk gives no map, a request does it:
a raw file has no space beside the disk, so all its writes are requests.

";

/// Stands below the table of loads.
const PROFILE: &str = "
Sequential writes of 128 KiB are bound by the kernel's page cache of tmpfs, as QEMU's are. Under `perf`, a third of the
reactor's time is the copy into new pages, a third the kernel's work for each page around it, and a tenth copies of ours to
pages written before. A sixth of all time reserves space (`fallocate`), on a worker. Space is reserved ahead, so that
writes go on meanwhile.
";

/// A load: an unmeasured part, and the measured part.
struct Load {
    name: &'static str,
    /// The unmeasured part, which runs first.
    before: Option<&'static [&'static str]>,
    arguments: &'static [&'static str],
    warm_up: &'static str,
    /// The least ratio to QEMU that it should reach.
    goal: f64,
}

const RANDOM: &[&str] = &["--rw", "randwrite", "--bs", "4k", "--depth", "32", "--size", "512M"];
const LOADS: [Load; 4] = [
    Load { name: "4 KiB random write", before: None, arguments: RANDOM, warm_up: "0", goal: 3.0 },
    Load {
        name: "4 KiB random read of what was written",
        before: Some(RANDOM),
        arguments: &["--rw", "randread", "--bs", "4k", "--depth", "32", "--size", "512M"],
        warm_up: "0.3",
        goal: 3.0,
    },
    Load {
        name: "4 KiB overwrites of 64 MiB (a swap file)",
        before: None,
        arguments: &["--rw", "randwrite", "--bs", "4k", "--depth", "32", "--size", "64M"],
        warm_up: "1",
        goal: 5.0,
    },
    Load {
        name: "128 KiB sequential write",
        before: None,
        arguments: &["--rw", "write", "--bs", "128k", "--depth", "16"],
        warm_up: "0",
        goal: 1.5,
    },
];

/// The servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Scratch,
    Qemu,
    Qcow2,
}

const SIDES: [Side; 3] = [Side::Scratch, Side::Qemu, Side::Qcow2];

struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn create() -> Result<Self> {
        let directory = tempfile::tempdir_in("/dev/shm").context("files in memory need /dev/shm")?;
        std::fs::write(directory.path().join("base.raw"), vec![7; BASE_BYTES])?;
        Ok(Self { directory })
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base.raw")
    }

    /// Makes a new, empty qcow2 overlay of the base.
    fn overlay(&self) -> Result<PathBuf> {
        let overlay = self.directory.path().join("overlay.qcow2");
        let _ = std::fs::remove_file(&overlay);
        let create = Program::new("qemu-img").args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
        create.args([self.base(), overlay.clone()]).output_text()?;
        Ok(overlay)
    }

    fn server(&self, side: Side, tools: &Tools, socket: &Path) -> Result<Command> {
        Ok(match side {
            Side::Scratch => {
                let mut command =
                    serve(tools, &format!("file={},format=raw,snapshot=on", escaped(&self.base())), socket);
                command.env("TMPDIR", self.directory.path());
                command
            }
            Side::Qcow2 => {
                let overlay = self.overlay()?;
                serve(tools, &format!("file={},format=qcow2,cache=unsafe", escaped(&overlay)), socket)
            }
            Side::Qemu => {
                // Flushes do nothing, as in the temporary overlay of `snapshot=on`.
                let (base, overlay) = (escaped(&self.base()), escaped(&self.overlay()?));
                let disk = [
                    format!("driver=file,node-name=below,filename={base},read-only=on,aio=io_uring"),
                    "driver=raw,node-name=base,file=below,read-only=on".to_owned(),
                    format!("driver=file,node-name=file,filename={overlay},aio=io_uring,cache.no-flush=on"),
                    "driver=qcow2,node-name=disk,file=file,backing=base,cache.no-flush=on".to_owned(),
                ];
                qemu(&disk, super::measure::QemuOptions::default(), socket)
            }
        })
    }
}

/// Measures one side. Returns requests a second.
fn measure(load: &Load, side: Side, tools: &Tools, files: &Files, seconds: f64) -> Result<f64> {
    let socket = socket_path();
    let arguments = |words: &[&str], time: f64, warm_up: &str| -> Vec<String> {
        let more = ["--time".to_owned(), time.to_string(), "--warmup".to_owned(), warm_up.to_owned()];
        words.iter().map(|word| (*word).to_owned()).chain(more).collect()
    };
    with_server(files.server(side, tools, &socket)?, &socket, |pid| {
        if let Some(before) = load.before {
            bench(tools, pid, &arguments(before, seconds, "0"))?;
        }
        let report = bench(tools, pid, &arguments(load.arguments, seconds, load.warm_up))?;
        number(&report["iops"])
    })
}

/// The samples of one load, side by side.
struct Row<'a> {
    load: &'a Load,
    samples: [Vec<f64>; 3],
}

impl Row<'_> {
    fn rate(&self, side: usize) -> f64 {
        median(&self.samples[side])
    }

    /// Returns the ratio of the scratch overlay's rate to that of `side`.
    fn ratio(&self, side: usize) -> Spread {
        Spread::of_ratios(&self.samples[0], &self.samples[side])
    }
}

pub(super) fn run(ringdisk: PathBuf, arguments: &BenchArguments) -> Result<()> {
    let tools = Tools::find(ringdisk)?;
    let parts: Vec<Option<&Load>> = LOADS.iter().map(Some).chain([None]).collect();
    let Some(parts) = chosen(&parts, |part| part.map_or(MAPS, |load| load.name), arguments)? else { return Ok(()) };
    let with_maps = parts.iter().any(|part| part.is_none());
    let files = Files::create()?;
    let mut rows = Vec::new();
    for load in parts.into_iter().copied().flatten() {
        let mut samples = [Vec::new(), Vec::new(), Vec::new()];
        in_turn(arguments.pairs, SIDES.len(), |side| {
            samples[side].push(measure(load, SIDES[side], &tools, &files, arguments.seconds)?);
            Ok(())
        })?;
        let row = Row { load, samples };
        println!("{}: {:.2} of QEMU, {:.2} of qcow2", load.name, row.ratio(1).middle, row.ratio(2).middle);
        rows.push(row);
    }
    let mut text = if rows.is_empty() { String::new() } else { page(&rows, arguments)? };
    if with_maps {
        text += MAPS_INTRODUCTION;
        text += &maps::table(&tools, files.directory.path())?;
    }
    put_page(&text, "benchmarks-scratch.md", arguments)
}

fn page(rows: &[Row<'_>], arguments: &BenchArguments) -> Result<String> {
    let mut text = "# Scratch overlays: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --scratch` has written this page. Each load ran {} times for {} s on each side, in turn, with the\n\
         same client; every side was made anew each time, over a raw file of 1 GiB in memory. The peer is {}\n\
         with a qcow2 overlay that is never flushed, which is what QEMU's `snapshot=on` makes.\n\n\
         Requests a second are medians. Ratios are medians of the rounds, with the least and the most.\n",
        arguments.pairs,
        arguments.seconds,
        version("qemu-storage-daemon"),
    )?;
    text += "| load | scratch | QEMU | our qcow2 overlay | scratch to QEMU | goal | scratch to qcow2 |\n";
    text += "|---|---|---|---|---|---|---|\n";
    for row in rows {
        let [own, qemu, qcow2] = [0, 1, 2].map(|side| row.rate(side));
        let [of_qemu, of_qcow2] = [1, 2].map(|side| row.ratio(side));
        let (name, goal) = (row.load.name, row.load.goal);
        writeln!(text, "| {name} | {own:.0} | {qemu:.0} | {qcow2:.0} | {of_qemu} | {goal} | {of_qcow2} |")?;
    }
    text += PROFILE;
    Ok(text)
}
