//! `cargo xtask bench`: Ringdisk beside qemu-storage-daemon and the host's own rate, interleaved in one run.
//!
//! Each cell is a workload on a storage. In each round of a cell every server is started alone on the same file, pinned
//! to one core, measured by the same client (`ringdisk bench`) on the other core, and ended; fio measures the file
//! without a guest. Rounds alternate the order. The results are medians over the rounds, the ratio of each round's two
//! servers, and CPU time a request. With `--before` the other side is another build of Ringdisk.

mod before;
mod cells;
mod contexts;
mod files;
mod gaps;
mod half_full;
mod ideas;
mod images;
mod jobs;
mod maps;
mod measure;
mod nbd;
mod nbd_client;
mod opening;
mod page;
mod pio;
mod profile;
mod qcow2_file;
mod results;
mod rounds;
mod scrape;
mod scratch;
mod statistics;
mod stolen;
mod throttle;

use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use cells::{Cell, Storage};
use files::Files;
use measure::{Sample, Tools};
use opening::Openings;
use results::{Results, Stamp};
use std::path::PathBuf;
use std::time::Instant;

/// The arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArguments {
    /// Rounds of each cell; in each, every server runs once.
    #[arg(long, default_value_t = 11)]
    pairs: usize,
    /// How long each measurement takes.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Only cells whose name contains this (may be given several times); see --list.
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Name the cells, and how long they take.
    #[arg(long)]
    list: bool,
    /// Count instructions a request with callgrind instead (4 KiB cells on the null disk and on tmpfs).
    #[arg(long)]
    profile: bool,
    /// Measure the image tool beside qemu-img instead; prints its table, or writes it to --output.
    #[arg(long)]
    images: bool,
    /// Compare the pool of requests' contexts with the allocator and with a list behind a lock instead: builds the program
    /// with each.
    #[arg(long, conflicts_with_all = ["images", "profile", "list", "filter", "resume", "output", "ringdisk", "size_mib", "directory"])]
    contexts: bool,
    /// Measure single ideas instead, each beside the program without it: the driver's paths and callbacks, when
    /// reactors look for completions, durable writes, contexts, packed rings, and real guests. Writes
    /// docs/benchmarks-driver.md; with --filter only prints, and with --filter and --output also writes the kept tables
    /// of earlier runs.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "resume", "size_mib", "before"])]
    driver: bool,
    /// Measure scratch overlays (snapshot=on) instead, beside QEMU's and beside a qcow2 overlay; writes
    /// docs/benchmarks-scratch.md, or the page of --output.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "resume", "size_mib", "directory", "before"])]
    scratch: bool,
    /// Measure the filter throttle instead, beside qemu-storage-daemon's; writes docs/benchmarks-throttle.md, or the
    /// page of --output.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "scratch", "resume", "size_mib", "directory", "before", "filter", "list"])]
    throttle: bool,
    /// Measure how long it takes to scrape a hundred disks instead, and what that costs a guest; writes
    /// docs/benchmarks-scrape.md, or where --output says.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "scratch", "throttle", "resume", "size_mib", "directory", "before", "filter", "list"])]
    scrape: bool,
    /// Measure disks for NBD clients instead, beside nbdkit and qemu-nbd, and with TLS; at most five rounds. Writes
    /// docs/benchmarks-nbd.md, or the page of --output.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "scratch", "throttle", "scrape", "resume", "size_mib", "before"])]
    nbd: bool,
    /// Measure what guests notice of a snapshot, a commit, a mirror and a backup instead, beside qemu-storage-daemon. Writes
    /// docs/benchmarks-jobs.md, or where --output says, and drawings to figures/ beside it. At most three
    /// rounds, of two minutes each.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "scratch", "throttle", "scrape", "nbd", "resume", "before", "filter", "list"])]
    jobs: bool,
    /// Measure the port bus of the crate `pio` instead, which takes a minute; writes docs/benchmarks-pio.md, or where
    /// --output says.
    #[arg(long, conflicts_with_all = ["images", "profile", "contexts", "driver", "scratch", "throttle", "scrape", "nbd", "jobs", "resume", "size_mib", "directory", "before", "ringdisk", "filter", "list"])]
    pio: bool,
    /// Size of the files [default: 1024; 4096 with --images].
    #[arg(long, value_name = "MIB")]
    size_mib: Option<u64>,
    /// The directory for files on a disk [default: below the build directory].
    #[arg(long, value_name = "PATH")]
    directory: Option<PathBuf>,
    /// Compare with another build of ringdisk instead: each cell in turn with both, and the ratios, the lowest first.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["images", "profile", "contexts", "resume", "output"])]
    before: Option<PathBuf>,
    /// Measure this build of ringdisk instead of making one.
    #[arg(long, value_name = "PATH")]
    ringdisk: Option<PathBuf>,
    /// Continue an interrupted run: keep each measured cell, leave out those that this commit has figures of, and write
    /// the page from all kept cells.
    #[arg(long)]
    resume: bool,
    /// The page to write [default: docs/benchmarks-fast-path.md; none if only some cells run, unless with --resume].
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
}

/// The measurements of one cell: one sample for each round and side.
#[derive(Default)]
struct Outcome {
    cell: Cell,
    stamp: Stamp,
    ringdisk: Vec<Sample>,
    peer: Vec<Sample>,
    host: Vec<Sample>,
    /// Ringdisk on the storage's reference.
    reference: Vec<Sample>,
}

impl BenchArguments {
    /// Size of the files that are served.
    fn served_mib(&self) -> u64 {
        self.size_mib.unwrap_or(1024)
    }
}

/// The time around a measurement: starting and ending a server and a client.
const AROUND_SECONDS: f64 = 0.4;
/// The times for the large image: to make it, and a round.
const OPENING_SECONDS: (f64, f64) = (20.0, 3.0);

const NOTHING_TO_MEASURE: &str = "at least one pair, and some time for each, are needed";

pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    if arguments.images {
        return images::run(arguments, || ringdisk_of(arguments));
    }
    if arguments.contexts {
        ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
        return contexts::run(arguments);
    }
    if arguments.driver {
        ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
        return ideas::run(|| ringdisk_of(arguments), arguments);
    }
    if arguments.scratch {
        ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
        return scratch::run(ringdisk_of(arguments)?, arguments);
    }
    if arguments.throttle {
        return throttle::run(ringdisk_of(arguments)?, arguments);
    }
    if arguments.scrape {
        ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
        return scrape::run(ringdisk_of(arguments)?, arguments);
    }
    if arguments.jobs {
        return jobs::run(ringdisk_of(arguments)?, arguments);
    }
    if arguments.pio {
        return pio::run(arguments);
    }
    if arguments.nbd {
        ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
        return nbd::run(ringdisk_of(arguments)?, arguments);
    }
    let is_chosen =
        |name: &str| arguments.filter.is_empty() || arguments.filter.iter().any(|text| name.contains(text.as_str()));
    let cells: Vec<Cell> = cells::all().into_iter().filter(|cell| is_chosen(&cell.name())).collect();
    let opens = is_chosen(opening::NAME);
    if arguments.list {
        list(&cells, opens, arguments);
        return Ok(());
    }
    ensure!(opens || !cells.is_empty(), "no cell has such a name; --list names them");
    ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, NOTHING_TO_MEASURE);
    let output = match (&arguments.output, arguments.filter.is_empty() || arguments.resume) {
        (Some(path), _) => Some(path.clone()),
        (None, true) => Some(workspace::root().join("docs/benchmarks-fast-path.md")),
        (None, false) => None,
    };

    let tools = Tools::find(ringdisk_of(arguments)?)?;
    if arguments.profile {
        return profile::run(&cells, &tools, arguments);
    }
    if let Some(before) = &arguments.before {
        return before::run(&cells, &tools, before, arguments);
    }
    let (outcomes, openings, files) = measure_all(cells, opens, &tools, arguments)?;
    let text = page::write(&outcomes, openings.as_ref(), &files)?;
    match output {
        Some(path) => {
            if let Some(directory) = path.parent() {
                std::fs::create_dir_all(directory)?;
            }
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            println!("written: {}", path.display());
        }
        None => println!("\n{text}"),
    }
    Ok(())
}

/// Measures the cells, and keeps each if the run may be resumed.
fn measure_all(
    mut cells: Vec<Cell>,
    mut opens: bool,
    tools: &Tools,
    arguments: &BenchArguments,
) -> Result<(Vec<Outcome>, Option<Openings>, Files)> {
    let stamp = Stamp::of(arguments);
    let mut kept = if arguments.resume { Some(Results::load()?) } else { None };
    if let Some(kept) = &kept {
        cells.retain(|cell| !kept.has(&cell.name(), &stamp));
        opens &= !kept.has(opening::NAME, &stamp);
    }
    let files = Files::create(arguments.directory.as_deref(), arguments.served_mib(), &cells)?;
    let mut outcomes = Vec::new();
    let start = Instant::now();
    for (number, cell) in cells.iter().enumerate() {
        println!("[{}/{}, {:.0} s] {}", number + 1, cells.len(), start.elapsed().as_secs_f64(), cell.name());
        let outcome = measure_cell(cell, tools, &files, &stamp, arguments)?;
        println!("    {}", page::brief(&outcome));
        if let Some(kept) = &mut kept {
            kept.keep(&outcome)?;
        }
        outcomes.push(outcome);
    }
    let mut openings = if opens { Some(opening::measure(tools, &files, arguments.pairs)?) } else { None };
    if let Some(kept) = &mut kept {
        if let Some(openings) = &openings {
            kept.keep_openings(openings, &stamp)?;
        }
        (outcomes, openings) = (kept.outcomes(), kept.openings());
    }
    Ok((outcomes, openings, files))
}

/// Prints the cells' names, with an estimate of the time.
fn list(cells: &[Cell], opens: bool, arguments: &BenchArguments) {
    let round =
        |cell: &Cell| f64::from(cell.sides()) * (arguments.seconds + measure::warm_up_seconds(cell) + AROUND_SECONDS);
    let mut total_seconds = 0.0;
    for cell in cells {
        let seconds = round(cell) * arguments.pairs as f64;
        total_seconds += seconds;
        println!("{:48} {seconds:5.0} s", cell.name());
    }
    if opens {
        let seconds = OPENING_SECONDS.0 + OPENING_SECONDS.1 * arguments.pairs as f64;
        total_seconds += seconds;
        println!("{:48} {seconds:5.0} s", opening::NAME);
    }
    let (pairs, seconds) = (arguments.pairs, arguments.seconds);
    println!("about {:.0} minutes, with {pairs} rounds of {seconds} s", total_seconds / 60.0);
}

fn measure_cell(
    cell: &Cell,
    tools: &Tools,
    files: &Files,
    stamp: &Stamp,
    arguments: &BenchArguments,
) -> Result<Outcome> {
    let mut outcome = Outcome { cell: *cell, stamp: stamp.clone(), ..Outcome::default() };
    if matches!(cell.storage, Storage::RawPageCache | Storage::RawSync) {
        files.warm(cell.storage)?;
    }
    type Measure = fn(&Cell, &Tools, &Files, f64) -> Result<Sample>;
    for round in 0..arguments.pairs {
        let mut sides: Vec<(&mut Vec<Sample>, Measure)> = vec![(&mut outcome.ringdisk, measure::ringdisk)];
        if cell.has_peer() {
            sides.push((&mut outcome.peer, measure::peer));
        }
        if cell.storage.reference().is_some() {
            sides.push((&mut outcome.reference, measure::reference));
        }
        if cell.has_host() {
            sides.push((&mut outcome.host, measure::host));
        }
        // The order alternates: the first side gets the machine as the last round left it.
        if round % 2 == 1 {
            sides.reverse();
        }
        for (samples, measure) in sides {
            samples.push(measure::calm(cell, || measure(cell, tools, files, arguments.seconds))?);
        }
    }
    Ok(outcome)
}

/// Returns the program to measure by an absolute path, because it is also run in other directories.
fn ringdisk_of(arguments: &BenchArguments) -> Result<PathBuf> {
    match &arguments.ringdisk {
        Some(path) => std::path::absolute(path).with_context(|| format!("there is no {}", path.display())),
        None => build_ringdisk(),
    }
}

/// Builds the program as users run it.
fn build_ringdisk() -> Result<PathBuf> {
    let build = Program::cargo().args(["build", "--release", "--package", "ringdisk"]).watch()?;
    if !build.success() {
        bail!("ringdisk does not build");
    }
    Ok(workspace::target().join("release/ringdisk"))
}
