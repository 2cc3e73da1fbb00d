//! `cargo xtask bench --driver`: the gain of single ideas, each beside the same program with the idea off.
//!
//! An idea has cells, a cell has two or more sides, and `ringdisk bench --compare` measures these in turn. A table for
//! each idea goes into the page `docs/benchmarks-driver.md`. Tables are kept in the build directory as they are
//! measured, so ideas and guests can be measured one at a time (`--filter paths`, `--filter "guest, uml"`); the page is made
//! of all kept tables.

mod cells;
mod guest;
mod host;
mod storage;
mod table;

use super::results::Stamp;
use super::statistics::median;
use super::{BenchArguments, page};
use crate::workspace;
use anyhow::{Context, Result, ensure};
use cells::{Cell, Idea};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;
use storage::Storages;

/// The name of the guests for `--filter`.
const GUESTS: &str = "guest";
/// The time around a measurement.
const AROUND_SECONDS: f64 = 0.5;
const WARM_UP_SECONDS: f64 = 0.2;

/// A part of a run: the chosen cells of an idea, or a guest.
enum Part {
    Idea(Idea),
    Guest(guest::Kind),
}

impl Part {
    fn name(&self) -> &'static str {
        match self {
            Self::Idea(idea) => idea.name,
            Self::Guest(kind) => kind.part_name(),
        }
    }

    fn seconds(&self, arguments: &BenchArguments) -> f64 {
        match self {
            Self::Idea(idea) => idea.cells.iter().map(|cell| cell_seconds(idea, cell, arguments)).sum(),
            Self::Guest(kind) => kind.seconds(arguments.seconds),
        }
    }

    /// Whether all of its cells were chosen.
    fn is_whole(&self) -> bool {
        match self {
            Self::Idea(idea) => idea.is_whole,
            Self::Guest(_) => true,
        }
    }
}

fn cell_seconds(idea: &Idea, cell: &Cell, arguments: &BenchArguments) -> f64 {
    let (sides, pairs) = (cell.sides.len() as f64, arguments.pairs as f64);
    sides * pairs * (arguments.seconds + WARM_UP_SECONDS + AROUND_SECONDS + idea.around_seconds)
}

pub(super) fn run(ringdisk: impl FnOnce() -> Result<PathBuf>, arguments: &BenchArguments) -> Result<()> {
    let is_chosen =
        |name: &str| arguments.filter.is_empty() || arguments.filter.iter().any(|text| name.contains(text.as_str()));
    let mut parts: Vec<Part> = cells::ideas().into_iter().filter_map(|idea| chosen(idea, is_chosen)).collect();
    parts.extend(guest::Kind::ALL.into_iter().filter(|kind| is_chosen(&kind.cell_name())).map(Part::Guest));
    ensure!(!parts.is_empty(), "no cell has such a name; --list names them");
    if arguments.list {
        list(&parts, arguments);
        return Ok(());
    }
    let ringdisk = ringdisk()?;
    let storages = Storages::new(arguments)?;
    let start = Instant::now();
    let mut printed = String::new();
    for part in &parts {
        println!("[{:.0} s] {}, about {:.0} s", start.elapsed().as_secs_f64(), part.name(), part.seconds(arguments));
        let text = match part {
            Part::Idea(idea) => measure(idea, &ringdisk, &storages, arguments)?,
            Part::Guest(kind) => guest::measure(*kind, &ringdisk, &storages, arguments)?,
        };
        let stamp = Stamp::of(arguments);
        let text = format!("{text}\n{} at {}\n", how(part, &stamp), stamp.commit);
        if part.is_whole() {
            std::fs::create_dir_all(kept_directory())?;
            std::fs::write(kept_path(part.name()), &text)?;
        }
        println!("\n{text}");
        printed += &text;
    }
    match &arguments.output {
        Some(path) => write_page(path),
        None if arguments.filter.is_empty() => write_page(&workspace::root().join("docs/benchmarks-driver.md")),
        None => Ok(()),
    }
}

/// Returns the idea with its chosen cells; `None` if there are none.
fn chosen(mut idea: Idea, is_chosen: impl Fn(&str) -> bool) -> Option<Part> {
    let all = idea.cells.len();
    idea.cells.retain(|cell| is_chosen(&format!("{}, {}", idea.name, cell.name)));
    idea.is_whole = idea.cells.len() == all;
    (!idea.cells.is_empty()).then_some(Part::Idea(idea))
}

fn how(part: &Part, stamp: &Stamp) -> String {
    match part {
        Part::Idea(_) => format!("Medians of {} rounds of {} s,", stamp.rounds, stamp.seconds),
        Part::Guest(_) => format!("One boot, {} s a figure,", guest::seconds_each(stamp.seconds)),
    }
}

fn list(parts: &[Part], arguments: &BenchArguments) {
    let mut total = 0.0;
    for part in parts {
        match part {
            Part::Idea(idea) => idea.cells.iter().for_each(|cell| {
                let name = format!("{}, {}", idea.name, cell.name);
                println!("{name:48} {:5.0} s", cell_seconds(idea, cell, arguments));
            }),
            Part::Guest(kind) => println!("{:48} {:5.0} s", kind.cell_name(), kind.seconds(arguments.seconds)),
        }
        total += part.seconds(arguments);
    }
    let (pairs, seconds) = (arguments.pairs, arguments.seconds);
    println!("about {:.0} minutes, with {pairs} rounds of {seconds} s", (total / 60.0).ceil());
}

fn measure(idea: &Idea, ringdisk: &Path, storages: &Storages, arguments: &BenchArguments) -> Result<String> {
    let mut rows = Vec::new();
    for cell in &idea.cells {
        let Some(drives) = storages.drives(cell)? else {
            println!("  {}: left out, {}", cell.name, storages.why_not(cell));
            continue;
        };
        let report = storage::compare(cell, &drives, ringdisk, arguments)
            .with_context(|| format!("{}, {}", idea.name, cell.name))?;
        let figures = Figures::of(&report)?;
        println!("  {}: {}", cell.name, table::brief(idea, &figures));
        rows.push((cell.name.clone(), figures));
    }
    Ok(table::write(idea, &rows))
}

/// The runs of each side, in order.
pub(super) struct Figures(Vec<Vec<Value>>);

impl Figures {
    fn of(series: &Value) -> Result<Self> {
        let sides = series["depths"][0]["sides"].as_array().context("the comparison has no sides")?;
        Ok(Self(sides.iter().map(|side| side["runs"].as_array().cloned().unwrap_or_default()).collect()))
    }

    /// Returns a figure of each run of a side. `what` is a pointer into the report's JSON, or a counter's name for its
    /// value a request.
    fn values(&self, side: usize, what: &str) -> Vec<f64> {
        let of = |run: &Value| match what.starts_with('/') {
            true => run.pointer(what).and_then(Value::as_f64),
            false => {
                let counters = run["counters"].as_array()?;
                counters.iter().find(|counter| counter["name"] == what)?["per_request"].as_f64()
            }
        };
        self.0.get(side).map(|runs| runs.iter().filter_map(of).collect()).unwrap_or_default()
    }

    fn median(&self, side: usize, what: &str) -> f64 {
        median(&self.values(side, what))
    }
}

fn kept_directory() -> PathBuf {
    workspace::target().join("benchmarks-driver")
}

fn kept_path(name: &str) -> PathBuf {
    kept_directory().join(format!("{name}.md"))
}

/// Writes a page of all kept tables, in order.
fn write_page(path: &Path) -> Result<()> {
    let mut text = String::from(
        "# Benchmarks: single ideas\n\n`cargo xtask bench --driver` writes this page. Each idea is measured beside the same \
         program with the idea off.\nA ratio is the median over the rounds, with the middle half of them. \
         [Measuring](measuring.md) explains the\ncommands.\n\n",
    );
    writeln!(text, "* {}", page::hardware())?;
    for name in cells::ideas().iter().map(|idea| idea.name).chain(guest::Kind::ALL.map(guest::Kind::part_name)) {
        if let Ok(kept) = std::fs::read_to_string(kept_path(name)) {
            write!(text, "\n{kept}")?;
        }
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("written: {}", path.display());
    Ok(())
}
