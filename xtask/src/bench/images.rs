//! `cargo xtask bench --images`: the image tool beside qemu-img, on a disk that is half full.
//!
//! The two run in turn. Each is timed from its start to the end of an fsync of its target. qemu-img has the flags that
//! were quickest for it in a round of its own. The sizes of the targets are compared, too.

use super::BenchArguments;
use super::half_full::write_half_full;
use super::page::hardware;
use super::results::Stamp;
use super::statistics::{median, quantile, ratios};
use super::stolen::least_stolen;
use crate::packages;
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The default size of the disk.
const DEFAULT_MIB: u64 = 4096;
/// The text of the page before its table.
const METHOD: &str = "\
Half of the disk is data (three parts of four text, one noise), in runs of 64 KiB to 2 MiB. Sources are in the page cache.
The two programs run in turn. Each is timed from its start to the end of an fsync of its target. qemu-img has the flags
that were quickest for it in a round of its own; Ringdisk has its defaults.

* Times are medians. The *ratio* is qemu-img's time by Ringdisk's; the brackets hold its middle half.
* *length* and *allocated* are Ringdisk's sizes by qemu-img's.
* *uncached* is `-t none -T none` on both sides, where the disk takes most of the time.
* zlib is level 6 with the whole window of 32 KiB, where qemu-img uses 4 KiB. zstd has qemu-img's level.
* A host may give memory to a file on tmpfs only while it is written. Rows of large disks then spread.
";
/// Roughly how long one run takes on a disk of that size, for an estimate.
const RUN_SECONDS: f64 = 4.0;

/// The measured work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    ToQcow2,
    ToRaw,
    Direct,
    Zlib,
    Zstd,
    Unpack,
    Compare,
    Check,
    Map,
    Measure,
}

impl Work {
    const ALL: [Self; 10] = [
        Self::ToQcow2,
        Self::ToRaw,
        Self::Direct,
        Self::Zlib,
        Self::Zstd,
        Self::Unpack,
        Self::Compare,
        Self::Check,
        Self::Map,
        Self::Measure,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ToQcow2 => "raw-to-qcow2",
            Self::ToRaw => "qcow2-to-raw",
            Self::Direct => "raw-to-qcow2-uncached",
            Self::Zlib => "compress-zlib",
            Self::Zstd => "compress-zstd",
            Self::Unpack => "zstd-to-raw",
            Self::Compare => "compare",
            Self::Check => "check",
            Self::Map => "map",
            Self::Measure => "measure",
        }
    }

    /// Returns the command line of both sides.
    fn words(self) -> &'static [&'static str] {
        match self {
            Self::ToQcow2 => &["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "TARGET"],
            Self::ToRaw => &["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "TARGET"],
            Self::Direct => &["convert", "-t", "none", "-T", "none", "-f", "raw", "-O", "qcow2", "disk.raw", "TARGET"],
            Self::Zlib => &["convert", "-c", "-f", "raw", "-O", "qcow2", "disk.raw", "TARGET"],
            Self::Zstd => {
                &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd", "disk.raw", "TARGET"]
            }
            Self::Unpack => &["convert", "-f", "qcow2", "-O", "raw", "packed.qcow2", "TARGET"],
            Self::Compare => &["compare", "-f", "raw", "-F", "qcow2", "disk.raw", "disk.qcow2"],
            Self::Check => &["check", "-f", "qcow2", "disk.qcow2"],
            Self::Map => &["map", "--output=json", "-f", "qcow2", "disk.qcow2"],
            Self::Measure => &["measure", "-f", "raw", "-O", "qcow2", "disk.raw"],
        }
    }

    fn writes(self) -> bool {
        self.words().contains(&"TARGET")
    }

    /// Returns flags with which qemu-img may be quicker.
    fn settings(self) -> &'static [&'static [&'static str]] {
        match self {
            // Long runs: only flags that can be quickest.
            Self::Direct | Self::Zlib | Self::Zstd => &[&[], &["-m", "16", "-W"]],
            _ if self.writes() => &[&[], &["-m", "16"], &["-W"], &["-m", "16", "-W"]],
            _ => &[&[]],
        }
    }

    /// Returns the highest number of attempts if the host takes the processors away.
    fn attempts(self) -> usize {
        match self {
            // In these long runs both sides keep all processors busy, so both lose the same.
            Self::Zlib | Self::Zstd => 1,
            _ => 3,
        }
    }

    /// Returns the ratio that Ringdisk should reach: qemu-img's time divided by ours.
    fn aim(self) -> f64 {
        if self.writes() { 1.3 } else { 1.5 }
    }
}

/// Work on a disk in memory or on storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ImageCell {
    work: Work,
    on_disk: bool,
}

impl ImageCell {
    fn name(self) -> String {
        format!("image-{}-{}", self.work.name(), if self.on_disk { "disk" } else { "tmpfs" })
    }
}

fn all() -> Vec<ImageCell> {
    let on = |on_disk| Work::ALL.into_iter().map(move |work| ImageCell { work, on_disk });
    // On tmpfs there is no page cache to bypass.
    on(false).chain(on(true)).filter(|cell| cell.on_disk || cell.work != Work::Direct).collect()
}

/// The time of one run, and the size of its result.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    seconds: f64,
    length_bytes: f64,
    allocated_bytes: f64,
}

struct Row {
    cell: ImageCell,
    settings: &'static [&'static str],
    ours: Vec<Taken>,
    theirs: Vec<Taken>,
}

/// The directory of the images; removed on drop.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn run(arguments: &BenchArguments, ringdisk: impl FnOnce() -> Result<PathBuf>) -> Result<()> {
    let is_chosen =
        |name: &str| arguments.filter.is_empty() || arguments.filter.iter().any(|text| name.contains(text.as_str()));
    let cells: Vec<ImageCell> = all().into_iter().filter(|cell| is_chosen(&cell.name())).collect();
    ensure!(!cells.is_empty(), "no cell has such a name; --images --list names them");
    let size_mib = arguments.size_mib.unwrap_or(DEFAULT_MIB);
    if arguments.list {
        let seconds = 2.0 * (arguments.pairs + 1) as f64 * RUN_SECONDS * size_mib as f64 / DEFAULT_MIB as f64;
        cells.iter().for_each(|cell| println!("{:48} {seconds:5.0} s", cell.name()));
        return Ok(());
    }
    ensure!(arguments.pairs > 0, "at least one pair is needed");
    ensure!(packages::find_program("qemu-img").is_some(), "qemu-img is missing; it is in the package qemu-utils");
    let ringdisk = ringdisk()?;
    let mut rows = Vec::new();
    for on_disk in [false, true] {
        let of_place: Vec<ImageCell> = cells.iter().filter(|cell| cell.on_disk == on_disk).copied().collect();
        if of_place.is_empty() {
            continue;
        }
        let place = make(on_disk, size_mib, arguments.directory.as_deref())?;
        for cell in of_place {
            let row = measure(cell, &place.0, &ringdisk, arguments.pairs)?;
            println!("{}", line(&row));
            rows.push(row);
        }
    }
    let text = page(&rows, size_mib, &Stamp::of(arguments))?;
    match &arguments.output {
        Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display())),
        None => {
            println!("\n{text}");
            Ok(())
        }
    }
}

/// Makes the sources: a raw disk, the same as qcow2, and compressed.
fn make(on_disk: bool, size_mib: u64, directory: Option<&Path>) -> Result<Place> {
    let name = format!("ringdisk-bench-images-{}", std::process::id());
    let below = match on_disk {
        true => directory.map_or_else(workspace::target, Path::to_path_buf),
        false => PathBuf::from("/dev/shm"),
    };
    let place = Place(below.join(name));
    std::fs::create_dir_all(&place.0).with_context(|| format!("cannot create {}", place.0.display()))?;
    println!("making {size_mib} MiB, half full, {}", if on_disk { "on disk" } else { "on tmpfs" });
    write_half_full(&place.0.join("disk.raw"), size_mib << 20)?;
    for words in [
        &["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.qcow2"][..],
        &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd", "disk.raw", "packed.qcow2"],
    ] {
        timed(Path::new("qemu-img"), words, &place.0)?;
    }
    timed(Path::new("sync"), &["disk.raw", "disk.qcow2", "packed.qcow2"], &place.0)?;
    Ok(place)
}

fn measure(cell: ImageCell, place: &Path, ringdisk: &Path, pairs: usize) -> Result<Row> {
    let work = cell.work;
    let peer = Path::new("qemu-img");
    let mut settings = work.settings()[0];
    if work.settings().len() > 1 {
        let mut quickest = f64::INFINITY;
        for candidate in work.settings() {
            let taken = match least_stolen(work.attempts(), || one(peer, work, candidate, place)) {
                Ok(taken) => taken,
                // Some versions do not compress out of order.
                Err(_) if !candidate.is_empty() => continue,
                Err(error) => return Err(error),
            };
            if taken.seconds < quickest {
                (quickest, settings) = (taken.seconds, candidate);
            }
        }
    }
    let mut row = Row { cell, settings, ours: Vec::new(), theirs: Vec::new() };
    for round in 0..pairs {
        // The order alternates: the first side gets the machine as the last round left it.
        for ours in [round % 2 == 0, round % 2 == 1] {
            match ours {
                true => row.ours.push(least_stolen(work.attempts(), || one(ringdisk, work, &[], place))?),
                false => row.theirs.push(least_stolen(work.attempts(), || one(peer, work, settings, place))?),
            }
        }
    }
    Ok(row)
}

/// Runs one side once, to the end of the fsync.
fn one(program: &Path, work: Work, flags: &[&str], place: &Path) -> Result<Taken> {
    let target = place.join("target");
    let _ = std::fs::remove_file(&target);
    let words: Vec<&str> = work.words().iter().map(|word| if *word == "TARGET" { "target" } else { word }).collect();
    let words = [&words[..1], flags, &words[1..]].concat();
    let mut seconds = timed(program, &words, place)?;
    if !work.writes() {
        return Ok(Taken { seconds, ..Taken::default() });
    }
    seconds += timed(Path::new("sync"), &["target"], place)?;
    let meta = std::fs::metadata(&target)?;
    let taken = Taken { seconds, length_bytes: meta.len() as f64, allocated_bytes: (meta.blocks() * 512) as f64 };
    std::fs::remove_file(&target)?;
    Ok(taken)
}

fn timed(program: &Path, words: &[&str], place: &Path) -> Result<f64> {
    let start = Instant::now();
    let mut command = Command::new(program);
    command.args(words).current_dir(place).stdin(Stdio::null()).stdout(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {}", program.display()))?;
    let seconds = start.elapsed().as_secs_f64();
    if !output.status.success() {
        bail!("{} {words:?}: {}\n{}", program.display(), output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(seconds)
}

fn of(taken: &[Taken], field: fn(&Taken) -> f64) -> Vec<f64> {
    taken.iter().map(field).collect()
}

/// Returns the median ratio of our size to theirs.
fn size_ratio(row: &Row, field: fn(&Taken) -> f64) -> Option<f64> {
    row.cell.work.writes().then(|| median(&ratios(&of(&row.ours, field), &of(&row.theirs, field))))
}

fn speed(row: &Row) -> Vec<f64> {
    ratios(&of(&row.theirs, |taken| taken.seconds), &of(&row.ours, |taken| taken.seconds))
}

fn line(row: &Row) -> String {
    let seconds = |taken: &[Taken]| median(&of(taken, |taken| taken.seconds));
    let sizes = match (size_ratio(row, |taken| taken.length_bytes), size_ratio(row, |taken| taken.allocated_bytes)) {
        (Some(length), Some(allocated)) => format!(", length {length:.3}, allocated {allocated:.3}"),
        _ => String::new(),
    };
    let (ours, theirs) = (seconds(&row.ours), seconds(&row.theirs));
    format!("{:40} {ours:.3} s, qemu-img {theirs:.3} s, {:.2}{sizes}", row.cell.name(), median(&speed(row)))
}

fn page(rows: &[Row], size_mib: u64, Stamp { commit, rounds: pairs, .. }: &Stamp) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "# The image tool beside qemu-img\n")?;
    writeln!(
        text,
        "Written by `cargo xtask bench --images`; do not edit.\n\n* {}\n* {}\n* Ringdisk at {commit}, {pairs} rounds, a \
         disk of {size_mib} MiB\n",
        hardware(),
        super::measure::version("qemu-img"),
    )?;
    writeln!(text, "{METHOD}")?;
    writeln!(text, "| | Ringdisk | qemu-img | flags | ratio | aim | length | allocated |")?;
    writeln!(text, "|---|--:|--:|---|--:|--:|--:|--:|")?;
    for row in rows {
        let seconds = |taken: &[Taken]| median(&of(taken, |taken| taken.seconds));
        let speed = speed(row);
        let size = |field| size_ratio(row, field).map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        writeln!(
            text,
            "| {} | {:.3} s | {:.3} s | {} | {:.2} ({:.2}-{:.2}) | {:.1} | {} | {} |",
            row.cell.name(),
            seconds(&row.ours),
            seconds(&row.theirs),
            row.settings.join(" "),
            median(&speed),
            quantile(&speed, 0.25),
            quantile(&speed, 0.75),
            row.cell.work.aim(),
            size(|taken| taken.length_bytes),
            size(|taken| taken.allocated_bytes),
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_image_cells_have_one_name() {
        let mut names: Vec<String> = all().into_iter().map(ImageCell::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
