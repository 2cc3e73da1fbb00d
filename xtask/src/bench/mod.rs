//! `cargo xtask bench`: Ringdisk beside qemu-storage-daemon and the host's own rate, interleaved in one run.
//!
//! Each cell is a workload on a storage. In each round of a cell every server is started alone on the same file, pinned
//! to one core, measured by the same client (`ringdisk bench`) on the other core, and ended; fio measures the file
//! without a guest. Rounds alternate the order. What counts are medians over the rounds, the ratio of each round's two
//! servers, and CPU a request.

mod cells;
mod measure;
mod page;
mod statistics;

use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use cells::{Cell, Storage};
use measure::{Files, Sample, Tools};
use std::path::PathBuf;
use std::time::Instant;

/// What `cargo xtask bench` takes.
#[derive(clap::Args)]
pub(crate) struct BenchArguments {
    /// Rounds of each cell; in each, every server runs once.
    #[arg(long, default_value_t = 11)]
    pairs: usize,
    /// How long each measurement takes.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Only cells whose name contains this (may be given several times); see --list.
    #[arg(long, value_name = "TEXT")]
    filter: Vec<String>,
    /// Name the cells.
    #[arg(long)]
    list: bool,
    /// Size of the files.
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    size_mib: u64,
    /// Where the files on a disk are made [default: below the build directory].
    #[arg(long, value_name = "PATH")]
    directory: Option<PathBuf>,
    /// Measure this build of ringdisk instead of making one.
    #[arg(long, value_name = "PATH")]
    ringdisk: Option<PathBuf>,
    /// The page to write [default: docs/benchmarks.md; none where only some cells run].
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
}

/// The measurements of one cell: a sample a round for each side that takes part.
struct Outcome {
    cell: Cell,
    ringdisk: Vec<Sample>,
    peer: Vec<Sample>,
    host: Vec<Sample>,
}

pub(crate) fn run(arguments: &BenchArguments) -> Result<()> {
    let chosen = |cell: &Cell| {
        arguments.filter.is_empty() || arguments.filter.iter().any(|text| cell.name().contains(text.as_str()))
    };
    let cells: Vec<Cell> = cells::all().into_iter().filter(chosen).collect();
    if arguments.list {
        cells.iter().for_each(|cell| println!("{}", cell.name()));
        return Ok(());
    }
    ensure!(!cells.is_empty(), "no cell has such a name; --list names them");
    ensure!(arguments.pairs > 0 && arguments.seconds > 0.0, "at least one pair, and some time for each, are needed");
    let output = match (&arguments.output, arguments.filter.is_empty()) {
        (Some(path), _) => Some(path.clone()),
        (None, true) => Some(workspace::root().join("docs/benchmarks.md")),
        (None, false) => None,
    };

    let ringdisk = arguments.ringdisk.clone().map_or_else(build_ringdisk, Ok)?;
    let tools = Tools::find(ringdisk)?;
    let files = Files::create(arguments.directory.as_deref(), arguments.size_mib, &cells)?;
    let mut outcomes = Vec::new();
    let start = Instant::now();
    for (number, cell) in cells.iter().enumerate() {
        println!("[{}/{}, {:.0} s] {}", number + 1, cells.len(), start.elapsed().as_secs_f64(), cell.name());
        let outcome = measure_cell(cell, &tools, &files, arguments)?;
        println!("    {}", page::brief(&outcome));
        outcomes.push(outcome);
    }
    let text = page::write(&outcomes, &tools, &files, arguments)?;
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

fn measure_cell(cell: &Cell, tools: &Tools, files: &Files, arguments: &BenchArguments) -> Result<Outcome> {
    let mut outcome = Outcome { cell: *cell, ringdisk: Vec::new(), peer: Vec::new(), host: Vec::new() };
    if cell.storage == Storage::RawPageCache {
        files.warm(cell.storage)?;
    }
    for round in 0..arguments.pairs {
        let mut ringdisk = || -> Result<()> {
            outcome.ringdisk.push(measure::calm(cell, || measure::ringdisk(cell, tools, files, arguments.seconds))?);
            Ok(())
        };
        if round % 2 == 0 {
            ringdisk()?;
            outcome.peer.push(measure::calm(cell, || measure::peer(cell, tools, files, arguments.seconds))?);
        } else {
            outcome.peer.push(measure::calm(cell, || measure::peer(cell, tools, files, arguments.seconds))?);
            ringdisk()?;
        }
        if cell.storage != Storage::Null {
            outcome.host.push(measure::calm(cell, || measure::host(cell, tools, files, arguments.seconds))?);
        }
    }
    Ok(outcome)
}

/// The program as users run it.
fn build_ringdisk() -> Result<PathBuf> {
    let build = Program::cargo().args(["build", "--release", "--package", "ringdisk"]).watch()?;
    if !build.success() {
        bail!("ringdisk does not build");
    }
    Ok(workspace::target().join("release/ringdisk"))
}
