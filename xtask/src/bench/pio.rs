//! `cargo xtask bench --pio`: what a word costs at a port of the crate `pio`, by its own benchmark.

use super::BenchArguments;
use super::measure::number;
use super::rounds::put_page;
use crate::command::Program;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;

const WORDS_A_SECTOR: f64 = 256.0;

/// A median in nanoseconds, with the interval that criterion trusts.
struct Figure {
    ns: f64,
    least_ns: f64,
    most_ns: f64,
}

impl Figure {
    /// Reads what criterion has written for a case, which counts as so many accesses.
    fn read(home: &Path, case: &str, accesses: f64) -> Result<Self> {
        let path = home.join(case).join("new/estimates.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let estimates: serde_json::Value = serde_json::from_str(&text)?;
        let (median, interval) = (&estimates["median"], &estimates["median"]["confidence_interval"]);
        let ns = |value| number(value).map(|ns| ns / accesses);
        let (least_ns, most_ns) = (ns(&interval["lower_bound"])?, ns(&interval["upper_bound"])?);
        Ok(Self { ns: ns(&median["point_estimate"])?, least_ns, most_ns })
    }

    fn row(&self, name: &str) -> String {
        let Self { ns, least_ns, most_ns } = self;
        let digits = if *ns < 1.0 { 2 } else { 1 };
        format!("| {name} | {ns:.digits$} | {least_ns:.digits$} to {most_ns:.digits$} |\n")
    }
}

pub(super) fn run(arguments: &BenchArguments) -> Result<()> {
    let home = tempfile::Builder::new().prefix("ringdisk-pio-").tempdir()?;
    let bench = Program::cargo().args(["bench", "--package", "ringdisk-pio", "--bench", "ports"]);
    bench.env("CRITERION_HOME", home.path()).output_text()?;
    let text = page(home.path())?;
    print!("{text}");
    put_page(&text, "benchmarks-pio.md", arguments)
}

fn page(home: &Path) -> Result<String> {
    let word = |case: &str| Figure::read(home, &format!("word/{case}"), WORDS_A_SECTOR);
    let (word_calls, string_calls) = (word("calls, word by word")?, word("calls, string")?);
    let (word_window, string_window) = (word("window, word by word")?, word("window, string")?);
    let plain = |case: &str| Figure::read(home, &format!("plain/{case}"), 1.0);
    let (without, with) = (plain("a bus without windows")?, plain("a bus with windows")?);
    let mut text = "# The port bus: figures\n\n\
         `cargo xtask bench --pio` has written this page. It shows what one word costs at a port of the crate `pio`. A device\n\
         gives sectors of 512 bytes through a port of 16 bits. With windows off, the bus calls the device for each word.\n\
         Figures are medians, and the spread is the interval that criterion gives.\n\n\
         | a word of a sector | ns | spread |\n|---|---|---|\n"
        .to_owned();
    text += &word_calls.row("word by word, with calls");
    text += &string_calls.row("string, a loop of calls");
    text += &word_window.row("word by word, through the window");
    text += &string_window.row("string, through the window");
    write!(
        text,
        "\n* A string through the window takes {:.2} of a loop of calls: it is a copy of a sector.\n\
         * The device is called once for a sector, when the window ends. With windows off it is called 256 times.\n\n\
         A plain access, such as a read of a status register, also asks whether a window is open:\n\n\
         | a plain access | ns | spread |\n|---|---|---|\n",
        string_window.ns / string_calls.ns,
    )?;
    text += &without.row("a bus without windows");
    text += &with.row("this bus");
    write!(
        text,
        "\n* The goal is 1.06 of the first bus. In this run it was {:.2}, or {:.1} ns more.\n\
         * [Decision 155](decisions/0155-plain-port-accesses.md) says what the difference is, and what was tried.\n",
        with.ns / without.ns,
        with.ns - without.ns,
    )?;
    Ok(text)
}
