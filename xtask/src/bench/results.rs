//! Keeps the measurements cell by cell, so that an interrupted run can be resumed.
//!
//! Each cell is a line of JSON, in the order of measuring. The last line of a cell counts.

use super::cells::{self, Cell};
use super::measure::Sample;
use super::opening::{self, Openings};
use super::{BenchArguments, Outcome};
use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// What was measured, and how often.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Stamp {
    pub(super) commit: String,
    pub(super) rounds: usize,
    pub(super) seconds: f64,
}

impl Stamp {
    pub(super) fn of(arguments: &BenchArguments) -> Self {
        let commit = Program::new("git").args(["rev-parse", "--short=9", "HEAD"]).output_text().unwrap_or_default();
        Self { commit: commit.trim().to_owned(), rounds: arguments.pairs, seconds: arguments.seconds }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Record {
    cell: String,
    stamp: Stamp,
    ringdisk: Vec<Sample>,
    peer: Vec<Sample>,
    host: Vec<Sample>,
    reference: Vec<Sample>,
    openings: Option<Openings>,
}

/// The file of records, in the build directory.
pub(super) struct Results {
    path: PathBuf,
    records: Vec<Record>,
}

impl Results {
    pub(super) fn load() -> Result<Self> {
        let path = workspace::target().join("benchmarks.jsonl");
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.with_context(|| format!("cannot read {}", path.display()))?,
        };
        // The last line may have been cut short with the run.
        let records = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Self { path, records })
    }

    /// Whether the cell of this name was already measured in this way.
    pub(super) fn has(&self, name: &str, stamp: &Stamp) -> bool {
        self.records.iter().any(|record| record.cell == name && record.stamp == *stamp)
    }

    pub(super) fn keep(&mut self, outcome: &Outcome) -> Result<()> {
        let Outcome { cell, stamp, ringdisk, peer, host, reference } = outcome;
        let [ringdisk, peer, host, reference] = [ringdisk, peer, host, reference].map(Vec::clone);
        let stamp = stamp.clone();
        self.append(Record { cell: cell.name(), stamp, ringdisk, peer, host, reference, openings: None })
    }

    pub(super) fn keep_openings(&mut self, openings: &Openings, stamp: &Stamp) -> Result<()> {
        let (cell, stamp, openings) = (opening::NAME.to_owned(), stamp.clone(), Some(openings.clone()));
        self.append(Record { cell, stamp, openings, ..Record::default() })
    }

    fn append(&mut self, record: Record) -> Result<()> {
        let mut line = serde_json::to_string(&record)?;
        line.push('\n');
        let opened = OpenOptions::new().create(true).append(true).open(&self.path);
        opened
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .with_context(|| format!("cannot write {}", self.path.display()))?;
        self.records.push(record);
        Ok(())
    }

    /// Returns the last outcome of each cell, if there is one, in the order of the cells.
    pub(super) fn outcomes(&self) -> Vec<Outcome> {
        let last = |cell: Cell| {
            let name = cell.name();
            let Record { stamp, ringdisk, peer, host, reference, .. } =
                self.records.iter().rev().find(|record| record.cell == name)?;
            let [ringdisk, peer, host, reference] = [ringdisk, peer, host, reference].map(Vec::clone);
            Some(Outcome { cell, stamp: stamp.clone(), ringdisk, peer, host, reference })
        };
        cells::all().into_iter().filter_map(last).collect()
    }

    pub(super) fn openings(&self) -> Option<Openings> {
        self.records.iter().rev().find_map(|record| record.openings.clone())
    }
}
