//! Real guests: 16 KiB writes at depth 74 by engine, beside the host's own fio on the same file, and beside disks that
//! cost nothing, which show the guest's highest rate. One boot of a guest measures all of its disks in turn.

use super::cells::Storage;
use super::host::{self, Rate};
use super::storage::{Storages, file_of};
use super::table::wrapped;
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

/// A disk of the guest.
struct GuestDisk {
    name: &'static str,
    storage: Storage,
    options: &'static str,
    /// What the host's fio does with its file; `None` for a disk that costs nothing.
    host_engine: Option<&'static str>,
}

const fn disk(
    name: &'static str,
    storage: Storage,
    options: &'static str,
    host_engine: Option<&'static str>,
) -> GuestDisk {
    GuestDisk { name, storage, options, host_engine }
}

const DISKS: [GuestDisk; 5] = [
    disk("null disk", Storage::Null, "", None),
    disk("null disk, 0.5 ms late", Storage::Null, "filter=delay:us=500", None),
    disk("io_uring", Storage::Disk, "engine=io_uring,cache=none", Some("io_uring")),
    disk("linux-aio", Storage::Disk, "engine=linux-aio,cache=none", Some("libaio")),
    disk("threads", Storage::Disk, "engine=threads,cache=none", Some("psync")),
];
const BLOCK: &str = "16k";
const DEPTH: u32 = 74;
const ACCESSES: [(&str, &str); 2] = [("randwrite", "random"), ("write", "sequential")];
const WORDS: &str = "16 KiB writes at depth 74 with fio's libaio in the guest, by engine, `cache=none` on the disk; above, the \
                     host's own fio on the same file (io_uring, libaio, and 74 threads that write one by one). Mean times in \
                     us: to submit, and from there to the end. The null disks cost nothing; the faster of the two is the \
                     guest's ceiling. The one ends each request at once and alone, which interrupts a guest more often; the \
                     late one ends them in batches, as storage does. Interrupts a request are the guest's own count \
                     (`/proc/interrupts`).";
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
            Self::QemuFlags => "QEMU (TCG) without EVENT_IDX",
        }
    }

    /// Returns the name for `--filter`.
    pub(super) fn cell_name(self) -> String {
        format!("{}, {}", super::GUESTS, self.name())
    }

    /// Returns the name of its kept table.
    pub(super) fn part_name(self) -> &'static str {
        match self {
            Self::Uml => "guest-uml",
            Self::Qemu => "guest-qemu",
            Self::QemuFlags => "guest-qemu-flags",
        }
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
        let of_host = DISKS.iter().filter(|disk| disk.host_engine.is_some()).count();
        self.boot_seconds() + each * ((DISKS.len() + of_host) * ACCESSES.len()) as f64
    }
}

/// Returns the time for each job: ten times a round elsewhere, because a guest is booted only once.
pub(super) fn seconds_each(asked: f64) -> u32 {
    (asked * 10.0).max(SECONDS_MIN).ceil() as u32
}

/// The output of the example `guest_rates` for each disk and job.
#[derive(Debug, Clone, Deserialize)]
struct Measured {
    disk: usize,
    job: String,
    iops: f64,
    submission_us: f64,
    completion_us: f64,
    /// Interrupts for each request.
    interrupts: f64,
}

/// The host's own figures for a disk and a job.
struct OfHost {
    disk: usize,
    job: &'static str,
    rate: Rate,
}

/// Measures the host, then a guest of this kind. Returns the table.
pub(super) fn measure(kind: Kind, ringdisk: &Path, storages: &Storages, arguments: &BenchArguments) -> Result<String> {
    let runner = build()?;
    let drives = DISKS.iter().enumerate().map(|(number, disk)| drive(disk, number, storages));
    let drives = drives.collect::<Result<Vec<_>>>()?;
    let seconds = seconds_each(arguments.seconds);
    let mut of_host = Vec::new();
    for (disk, drive) in DISKS.iter().zip(&drives).enumerate().map(|(number, (disk, drive))| ((number, disk), drive)) {
        let (number, Some(engine)) = (disk.0, disk.1.host_engine) else { continue };
        let file = file_of(drive).context("a disk on storage has a file")?;
        for (job, _) in ACCESSES {
            let rate = host::measure(Path::new(file), engine, job, BLOCK, DEPTH, seconds)?;
            of_host.push(OfHost { disk: number, job, rate });
        }
    }
    let measured = boot(kind, &runner, ringdisk, storages, &drives, arguments)?;
    Ok(table(kind, &measured, &of_host))
}

/// Returns the options of a disk. Each disk on storage gets its own copy of the file, because each server locks its file.
fn drive(disk: &GuestDisk, number: usize, storages: &Storages) -> Result<String> {
    let base = storages.base(disk.storage)?.context("this machine has no such storage")?;
    let drive = if disk.options.is_empty() { base } else { format!("{base},{}", disk.options) };
    match file_of(&drive) {
        Some(path) => Ok(drive.replacen(path, &storages.beside(path, number)?, 1)),
        None => Ok(drive),
    }
}

fn boot(
    kind: Kind,
    runner: &Path,
    ringdisk: &Path,
    storages: &Storages,
    drives: &[String],
    arguments: &BenchArguments,
) -> Result<Vec<Measured>> {
    let mut server = Command::new(ringdisk);
    server.args(["serve", "--reactors", "1", "--queues", "1"]);
    let mut sockets: Vec<PathBuf> = Vec::new();
    for (number, drive) in drives.iter().enumerate() {
        let socket = storages.sockets().join(format!("{number}.sock"));
        server.args(["--drive", drive, "--socket"]).arg(&socket);
        sockets.push(socket);
    }
    let last = sockets.last().context("there are disks")?;
    let seconds = seconds_each(arguments.seconds);
    let jobs = ACCESSES.map(|(rw, _)| format!("{rw}:{BLOCK}:{DEPTH}")).join(",");
    let limit = Duration::from_secs_f64(kind.seconds(arguments.seconds) * 4.0 + 120.0);
    let said = with_server(server, last, |_| {
        let mut program = Program::new(runner).args([kind.name(), &seconds.to_string(), &jobs]);
        program = program.args(&sockets).limit(limit);
        if kind != Kind::Uml {
            program = program.env("RINGDISK_GUEST_KERNEL", packages::guest_kernel()?);
        }
        let watched = program.watch()?;
        ensure!(watched.success(), "the guest failed");
        Ok(watched.lines)
    })?;
    let measured: Vec<Measured> = said.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let all = DISKS.len() * ACCESSES.len();
    if measured.len() != all {
        bail!("the guest measured {} of {all} figures", measured.len());
    }
    Ok(measured)
}

fn table(kind: Kind, measured: &[Measured], of_host: &[OfHost]) -> String {
    let mut text = format!(
        "## A real guest: {}\n\n{}\n\n\
         | | rate | by the host's | of the ceiling | to submit | to complete | interrupts |\n|---|--:|--:|--:|--:|--:|--:|\n",
        kind.title(),
        wrapped(WORDS)
    );
    for (job, words) in ACCESSES {
        let of = |disk: usize| measured.iter().find(|one| one.disk == disk && one.job == job);
        let free = (0..DISKS.len()).filter(|disk| DISKS[*disk].host_engine.is_none()).filter_map(of);
        let ceiling = free.map(|one| one.iops).fold(0.0, f64::max);
        for (number, GuestDisk { name, .. }) in DISKS.iter().enumerate() {
            let host = of_host.iter().find(|host| host.disk == number && host.job == job).map(|host| &host.rate);
            if let Some(Rate { iops, submission_us, completion_us }) = host {
                let _ = writeln!(
                    text,
                    "| host, {words}, {name} | {} | 1.00 | | {submission_us:.0} | {completion_us:.0} | |",
                    rate(*iops)
                );
            }
            let Some(Measured { iops, submission_us, completion_us, interrupts, .. }) = of(number) else { continue };
            let by_host = host.map_or_else(String::new, |host| format!("{:.2}", iops / host.iops.max(1.0)));
            let share = if ceiling > 0.0 { iops / ceiling } else { 0.0 };
            let _ = writeln!(
                text,
                "| guest, {words}, {name} | {} | {by_host} | {share:.2} | {submission_us:.0} | {completion_us:.0} | {interrupts:.2} |",
                rate(*iops)
            );
        }
    }
    text
}

/// Builds the program that boots a guest and prints its figures.
fn build() -> Result<PathBuf> {
    let arguments = ["build", "--release", "--package", "ringdisk-guestlab", "--example", "guest_rates"];
    ensure!(Program::cargo().args(arguments).watch()?.success(), "the guests' program does not build");
    Ok(workspace::target().join("release/examples/guest_rates"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_beside_its_host_and_under_the_higher_of_its_ceilings() {
        let one = |disk: usize, job: &str, iops| Measured {
            disk,
            job: job.to_owned(),
            iops,
            submission_us: 1.0,
            completion_us: 2.0,
            interrupts: 0.5,
        };
        let rates = [8000.0, 16000.0, 12000.0, 4000.0, 2000.0];
        let measured: Vec<_> = ACCESSES
            .iter()
            .flat_map(|(job, _)| rates.iter().enumerate().map(move |(disk, iops)| one(disk, job, *iops)))
            .collect();
        let rate = Rate { iops: 48000.0, submission_us: 5.0, completion_us: 60.0 };
        let text = table(Kind::Uml, &measured, &[OfHost { disk: 2, job: "write", rate }]);
        assert!(text.contains("| guest, random, io_uring | 12.0K |  | 0.75 |"), "{text}");
        assert!(text.contains("| host, sequential, io_uring | 48.0K | 1.00 | | 5 | 60 | |"), "{text}");
        assert!(text.contains("| guest, sequential, io_uring | 12.0K | 0.25 | 0.75 | 1 | 2 | 0.50 |"), "{text}");
        assert!(text.lines().all(|line| line.starts_with('|') || line.chars().count() <= 120), "{text}");
    }
}
