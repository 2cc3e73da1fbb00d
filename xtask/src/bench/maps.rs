//! Instructions a request of a disk in this process: by maps (`ringdisk bench --maps`), and by reads and writes that copy.
//! The client makes the bytes of each write and looks at those of each read (`--touch`): in place, or in a buffer.
//!
//! Counted as in `profile`: one run under callgrind makes some requests, another makes more, and the difference counts, of
//! instructions and of maps. A busy machine does not disturb it. Valgrind's threads take fair turns: a reactor that always
//! has work would else keep the worker that reserves space from ever running.

use super::measure::{Tools, escaped, number};
use super::profile;
use crate::command::Program;
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// What is read and written, over and over: all of it lies in the overlay before anything is counted.
const SIZE: &str = "16M";
/// Requests of the two runs. The shorter one writes all of the range, so both have taken the space.
const COUNTS: [u64; 2] = [20_000, 60_000];

struct Access {
    name: &'static str,
    rw: &'static str,
    block: &'static str,
}

const ACCESSES: [Access; 4] = [
    Access { name: "4 KiB read", rw: "read", block: "4k" },
    Access { name: "4 KiB write", rw: "write", block: "4k" },
    Access { name: "64 KiB read", rw: "read", block: "64k" },
    Access { name: "64 KiB write", rw: "write", block: "64k" },
];

/// Where the bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Raw,
    Scratch,
}

impl Place {
    const ALL: [Self; 2] = [Self::Raw, Self::Scratch];

    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw file",
            Self::Scratch => "scratch overlay",
        }
    }
}

/// Instructions a request, and which part of the requests maps did, behind the first ones.
struct Cell {
    per_request: f64,
    by_maps: f64,
}

struct Counting<'a> {
    tools: &'a Tools,
    directory: &'a Path,
}

impl Counting<'_> {
    fn base(&self) -> PathBuf {
        self.directory.join("maps.raw")
    }

    fn run(&self, place: Place, access: &Access, maps: bool, count: u64) -> Result<(f64, f64)> {
        let scratch = if place == Place::Scratch { ",snapshot=on" } else { "" };
        let drive = format!("file={},format=raw,cache=writeback{scratch}", escaped(&self.base()));
        let output = self.directory.join("maps.callgrind");
        let mut words = vec!["--tool=callgrind".to_owned(), format!("--callgrind-out-file={}", output.display())];
        words.push("--fair-sched=yes".to_owned());
        words.push(self.tools.ringdisk.display().to_string());
        let count = count.to_string();
        let load = ["--rw", access.rw, "--bs", access.block, "--depth", "8", "--size", SIZE, "--count", &count];
        let more = ["--poll-max-us", "0", "--touch", "--output", "json"];
        words.extend(["bench", "--drive", &drive].iter().chain(&load).chain(&more).map(|word| (*word).to_owned()));
        if place == Place::Raw {
            words.push("--destroy".to_owned());
        }
        if maps {
            words.push("--maps".to_owned());
        }
        let program = Program::new("valgrind").args(words).env("TMPDIR", self.directory);
        let report: serde_json::Value =
            serde_json::from_str(&program.output_text()?).context("the report is no JSON")?;
        ensure!(number(&report["errors"])? == 0.0, "requests failed: {report}");
        let by_maps = if maps { number(&report["by_maps"])? } else { 0.0 };
        Ok((profile::instructions(&output)?, by_maps))
    }

    fn cell(&self, place: Place, access: &Access, maps: bool) -> Result<Cell> {
        let [few, many] = COUNTS;
        let (few_instructions, few_by_maps) = self.run(place, access, maps, few)?;
        let (many_instructions, many_by_maps) = self.run(place, access, maps, many)?;
        let of_more = |before: f64, all: f64| (all - before) / (many - few) as f64;
        let by_maps = of_more(few_by_maps, many_by_maps);
        Ok(Cell { per_request: of_more(few_instructions, many_instructions), by_maps })
    }
}

/// The table, for the page on scratch overlays. `directory` lies in memory.
pub(super) fn table(tools: &Tools, directory: &Path) -> Result<String> {
    profile::check_tools()?;
    let counting = Counting { tools, directory };
    std::fs::write(counting.base(), vec![5; 16 << 20])?;
    let mut text = "| place | access | by requests | by maps | maps to requests | done by maps |\n".to_owned();
    text += "|---|---|---|---|---|---|\n";
    for place in Place::ALL {
        for access in &ACCESSES {
            let requests = counting.cell(place, access, false)?;
            let maps = counting.cell(place, access, true)?;
            let (own, ratio) = (maps.per_request, maps.per_request / requests.per_request);
            let (name, percent) = (place.name(), maps.by_maps * 100.0);
            println!("{name}, {}: {ratio:.2} of the instructions by maps", access.name);
            let (what, before) = (access.name, requests.per_request);
            writeln!(text, "| {name} | {what} | {before:.0} | {own:.0} | {ratio:.2} | {percent:.0}% |")?;
        }
    }
    Ok(text)
}
