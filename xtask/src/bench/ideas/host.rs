//! The host's own rate on a file, measured with fio.

use crate::command::Program;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;

/// fio's figures of a job that writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rate {
    pub(super) iops: f64,
    /// Mean times.
    pub(super) submission_us: f64,
    pub(super) completion_us: f64,
}

/// Writes to `file` with direct I/O for so many seconds, at this depth. The engine `psync` has a thread for each request in
/// flight.
pub(super) fn measure(file: &Path, engine: &str, rw: &str, block: &str, depth: u32, seconds: u32) -> Result<Rate> {
    let (jobs, depth) = if engine == "psync" { (depth, 1) } else { (1, depth) };
    let mut fio = Program::new("fio").args(["--name=host", "--thread", "--direct=1", "--time_based"]);
    fio = fio.args(["--group_reporting", "--output-format=json", "--filename"]).args([file]);
    fio = fio.args([format!("--ioengine={engine}"), format!("--rw={rw}"), format!("--bs={block}")]);
    fio = fio.args([format!("--iodepth={depth}"), format!("--numjobs={jobs}"), format!("--runtime={seconds}")]);
    parse(&fio.output_text().context("fio cannot measure the host")?)
}

fn parse(text: &str) -> Result<Rate> {
    // fio may say something before its report.
    let report: Value = serde_json::from_str(text.get(text.find('{').unwrap_or(0)..).unwrap_or_default())?;
    let write = &report["jobs"][0]["write"];
    let number = |pointer: &str| write.pointer(pointer).and_then(Value::as_f64).context("fio's report has no figure");
    Ok(Rate {
        iops: number("/iops")?,
        submission_us: number("/slat_ns/mean")? / 1e3,
        completion_us: number("/clat_ns/mean")? / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_a_report_are_found() {
        let text = r#"note: something
            {"jobs": [{"write": {"iops": 1234.5, "slat_ns": {"mean": 2500.0}, "clat_ns": {"mean": 81000.0}}}]}"#;
        let rate = Rate { iops: 1234.5, submission_us: 2.5, completion_us: 81.0 };
        assert_eq!(parse(text).unwrap(), rate);
        assert!(parse("{}").is_err());
    }
}
