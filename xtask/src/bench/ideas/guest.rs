//! Real guests: 16 KiB writes at depth 74 by engine, beside the null disk, which shows the guest's highest rate. One
//! boot of a guest measures all of its disks in turn.

use super::cells::Storage;
use super::storage::Storages;
use crate::bench::BenchArguments;
use crate::bench::measure::with_server;
use crate::bench::page::rate;
use crate::command::Program;
use crate::{packages, workspace};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A kind of guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Uml,
    Qemu,
    /// QEMU without EVENT_IDX.
    QemuFlags,
}

/// The disks; the first is the ceiling.
const DISKS: [(&str, Storage, &str); 4] = [
    ("null disk", Storage::Null, ""),
    ("io_uring", Storage::Disk, "engine=io_uring,cache=none"),
    ("linux-aio", Storage::Disk, "engine=linux-aio,cache=none"),
    ("threads", Storage::Disk, "engine=threads,cache=none"),
];
const JOBS: [&str; 2] = ["randwrite:16k:74", "write:16k:74"];
/// fio in a guest needs some time to begin.
const SECONDS_MIN: f64 = 1.0;

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Uml, Self::Qemu, Self::QemuFlags];

    fn name(self) -> &'static str {
        match self {
            Self::Uml => "uml",
            Self::Qemu => "qemu",
            Self::QemuFlags => "qemu-flags",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Uml => "User Mode Linux",
            Self::Qemu => "QEMU (TCG)",
            Self::QemuFlags => "QEMU, no EVENT_IDX",
        }
    }

    pub(super) fn cell_name(self) -> String {
        format!("{}, {}", super::GUESTS, self.name())
    }

    /// Returns the time within which this kind boots, in seconds.
    fn boot_seconds(self) -> f64 {
        match self {
            Self::Uml => 8.0,
            Self::Qemu | Self::QemuFlags => 40.0,
        }
    }

    pub(super) fn seconds(self, asked: f64) -> f64 {
        let each = f64::from(seconds_each(asked)) + 2.0;
        self.boot_seconds() + each * (DISKS.len() * JOBS.len()) as f64
    }
}

/// Returns the time for each job: ten times a round elsewhere, because a guest is booted only once.
pub(super) fn seconds_each(asked: f64) -> u32 {
    (asked * 10.0).max(SECONDS_MIN).ceil() as u32
}

/// The output of the example `guest_rates` for each disk and job.
#[derive(Debug, Deserialize)]
struct Measured {
    disk: usize,
    job: String,
    iops: f64,
    submission_us: f64,
    completion_us: f64,
    /// Interrupts for each request.
    interrupts: f64,
}

pub(super) fn measure(
    kinds: &[Kind],
    ringdisk: &Path,
    storages: &Storages,
    arguments: &BenchArguments,
) -> Result<String> {
    let runner = build()?;
    let mut text = String::from(
        "## Real guests\n\n16 KiB writes at depth 74 with fio's libaio in the guest, by engine, `cache=none` on the disk. The null \
         disk is the\nceiling: what is missing to it is the storage's. fio's mean times in us: to submit, and from there to \
         the end.\nInterrupts a request are the guest's own count (`/proc/interrupts`).\n\n\
         | | rate | of the ceiling | to submit | to complete | interrupts |\n|---|--:|--:|--:|--:|--:|\n",
    );
    for kind in kinds {
        for job in rows(*kind, &runner, ringdisk, storages, arguments)? {
            text += &job;
        }
    }
    Ok(text)
}

fn rows(
    kind: Kind,
    runner: &Path,
    ringdisk: &Path,
    storages: &Storages,
    arguments: &BenchArguments,
) -> Result<Vec<String>> {
    let mut server = Command::new(ringdisk);
    server.args(["serve", "--reactors", "1", "--queues", "1"]);
    let mut sockets: Vec<PathBuf> = Vec::new();
    for (number, (_, storage, options)) in DISKS.iter().enumerate() {
        let base = storages.base(*storage)?.context("this machine has no such storage")?;
        let drive = if options.is_empty() { base } else { format!("{base},{options}") };
        // Each disk on storage gets its own copy of the file.
        let drive = if *storage == Storage::Disk { own_file(&drive, number, storages)? } else { drive };
        let socket = storages.sockets().join(format!("{number}.sock"));
        server.args(["--drive", &drive, "--socket"]).arg(&socket);
        sockets.push(socket);
    }
    let last = sockets.last().context("there are disks")?;
    let seconds = seconds_each(arguments.seconds);
    let limit = Duration::from_secs_f64(kind.seconds(arguments.seconds) * 4.0 + 120.0);
    let said = with_server(server, last, |_| {
        let mut program = Program::new(runner).args([kind.name(), &seconds.to_string(), &JOBS.join(",")]);
        program = program.args(&sockets).limit(limit);
        if kind != Kind::Uml {
            program = program.env("RINGDISK_GUEST_KERNEL", packages::guest_kernel()?);
        }
        let watched = program.watch()?;
        ensure!(watched.success(), "the guest failed");
        Ok(watched.lines)
    })?;
    let measured: Vec<Measured> = said.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if measured.len() != DISKS.len() * JOBS.len() {
        bail!("the guest measured {} of {} figures", measured.len(), DISKS.len() * JOBS.len());
    }
    Ok(JOBS.iter().map(|job| rows_of(kind, job.split(':').next().unwrap_or(job), &measured)).collect())
}

fn rows_of(kind: Kind, job: &str, measured: &[Measured]) -> String {
    let words = if job == "write" { "sequential" } else { "random" };
    let of = |disk: usize| measured.iter().find(|one| one.disk == disk && one.job == job);
    let ceiling = of(0).map_or(0.0, |one| one.iops);
    let mut text = String::new();
    for (disk, (name, ..)) in DISKS.iter().enumerate() {
        let Some(Measured { iops, submission_us, completion_us, interrupts, .. }) = of(disk) else { continue };
        let share = if ceiling > 0.0 { iops / ceiling } else { 0.0 };
        let _ = writeln!(
            text,
            "| {}, {words}, {name} | {} | {share:.2} | {submission_us:.0} | {completion_us:.0} | {interrupts:.2} |",
            kind.title(),
            rate(*iops)
        );
    }
    text
}

/// Gives a disk a copy of the file, because each server locks its file.
fn own_file(drive: &str, number: usize, storages: &Storages) -> Result<String> {
    let path =
        drive.strip_prefix("file=").and_then(|rest| rest.split(",format=").next()).context("a drive has a file")?;
    let copy = storages.beside(path, number)?;
    Ok(drive.replacen(path, &copy, 1))
}

/// Builds the program that boots a guest and prints its figures.
fn build() -> Result<PathBuf> {
    let arguments = ["build", "--release", "--package", "ringdisk-guestlab", "--example", "guest_rates"];
    ensure!(Program::cargo().args(arguments).watch()?.success(), "the guests' program does not build");
    Ok(workspace::target().join("release/examples/guest_rates"))
}
