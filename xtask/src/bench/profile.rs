//! Instructions a request, by callgrind. A busy machine does not disturb these figures.
//!
//! One server under callgrind serves some requests, and another serves more. The difference of the two counts, divided
//! by the difference in requests, is the cost of one request. Starting and ending cancel out. The server is so slow
//! that its ring is never empty, and it does not spin. So only work is counted.

use super::BenchArguments;
use super::cells::{self, Cell, Storage};
use super::files::Files;
use super::measure::{self, Tools};
use crate::{packages, workspace};
use anyhow::{Context, Result, ensure};
use std::path::Path;

/// Numbers of requests of the two runs.
const COUNTS: [u64; 2] = [5_000, 25_000];
/// How many functions are shown for each cell.
const SHOWN: usize = 12;

/// Whether a cell can be counted. Work of the kernel and the disk cannot, and valgrind does not know io_uring's waits.
fn is_countable(cell: &Cell) -> bool {
    let storage = matches!(
        cell.storage,
        Storage::Null | Storage::RawTmpfs | Storage::Qcow2Tmpfs | Storage::ChainSpread | Storage::ChainBase
    );
    storage && cell.engine == cells::Engine::Auto && cell.block_kib == 4
}

/// Fails where nothing can be counted.
pub(super) fn check_tools() -> Result<()> {
    for program in ["valgrind", "callgrind_annotate"] {
        ensure!(
            packages::find_program(program).is_some(),
            "{program} is missing; it is in the Debian package valgrind"
        );
    }
    Ok(())
}

pub(super) fn run(cells: &[Cell], tools: &Tools, arguments: &BenchArguments) -> Result<()> {
    check_tools()?;
    let cells: Vec<Cell> = cells.iter().filter(|cell| is_countable(cell)).copied().collect();
    ensure!(!cells.is_empty(), "instructions are counted of 4 KiB requests on the null disk and on tmpfs only");
    let files = Files::create(arguments.directory.as_deref(), arguments.served_mib(), &cells)?;
    let directory = workspace::target().join("callgrind");
    std::fs::create_dir_all(&directory)?;
    println!("instructions a request in user space, and the functions that take most of them (with what they inline):");
    for cell in &cells {
        let outputs = COUNTS.map(|count| directory.join(format!("{}-{count}.out", cell.name())));
        for (count, output) in COUNTS.iter().zip(&outputs) {
            serve_counted(cell, tools, &files, *count, output)?;
        }
        let [few, many] = [self_costs(&outputs[0])?, self_costs(&outputs[1])?];
        let requests = (COUNTS[1] - COUNTS[0]) as f64;
        let total = (sum(&many) - sum(&few)) / requests;
        println!("\n{}: {total:.0}", cell.words_with_storage());
        let mut functions: Vec<(f64, &str)> = many
            .iter()
            .map(|(name, cost)| {
                let before = few.iter().find(|(other, _)| other == name).map_or(0.0, |(_, cost)| *cost);
                ((cost - before) / requests, name.as_str())
            })
            .collect();
        functions.sort_by(|one, other| other.0.total_cmp(&one.0));
        for (cost, name) in functions.iter().take(SHOWN) {
            println!("  {cost:7.1}  {name}");
        }
    }
    println!("\nmore: callgrind_annotate {}/NAME.out", directory.display());
    Ok(())
}

fn serve_counted(cell: &Cell, tools: &Tools, files: &Files, count: u64, output: &Path) -> Result<()> {
    let socket = measure::socket_path();
    let server = measure::serve_under(
        &["valgrind", "--tool=callgrind", &format!("--callgrind-out-file={}", output.display())],
        tools,
        &measure::drive(cell, files),
        &socket,
    );
    measure::with_server(server, &socket, |pid| {
        let depth = cell.depth.to_string();
        let count = count.to_string();
        let arguments = ["--rw", cell.access.name(), "--bs", "4k", "--depth", &depth, "--count", &count];
        measure::bench(tools, pid, &arguments.map(str::to_owned)).map(|_| ())
    })
}

/// Returns the instructions of a whole run.
pub(super) fn instructions(output: &Path) -> Result<f64> {
    Ok(sum(&self_costs(output)?))
}

/// Returns each function's own cost.
fn self_costs(output: &Path) -> Result<Vec<(String, f64)>> {
    let command =
        crate::command::Program::new("callgrind_annotate").args(["--auto=no", "--threshold=100", "--show-percs=no"]);
    let text = command.args([output]).output_text()?;
    let mut costs: Vec<(String, f64)> = Vec::new();
    for line in text.lines() {
        // "1,234,567  file.rs:path::to::function [program]"
        let Some((cost, place)) = line.trim_start().split_once(char::is_whitespace) else { continue };
        let Ok(cost) = cost.replace(',', "").parse::<f64>() else { continue };
        let place = place.trim();
        let Some((_, name)) = place.split_once(':') else { continue };
        let name = name.rsplit_once(" [").map_or(name, |(name, _)| name).to_owned();
        match costs.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += cost,
            None => costs.push((name, cost)),
        }
    }
    (!costs.is_empty()).then_some(costs).context("callgrind_annotate named no function")
}

fn sum(costs: &[(String, f64)]) -> f64 {
    costs.iter().map(|(_, cost)| cost).sum()
}
