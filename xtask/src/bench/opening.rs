//! A large, nearly full image: how soon it is served, and how soon it gives its first answers.

use super::files::Files;
use super::measure::{self, Tools};
use super::qcow2_file::{self, Image, L2_ENTRIES};
use super::statistics::median;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The name for `--filter`.
pub(super) const NAME: &str = "open-16t-full";
const SIZE_BYTES: u64 = 16 << 40;
/// Unused clusters of each L2 table: the first tenth, so that a write to the disk's beginning allocates.
const EMPTY_OF_TABLE: u64 = L2_ENTRIES / 10;

/// The figures of one server.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Opened {
    /// The time from the start of the program until it accepts a connection.
    served_ms: f64,
    /// Its peak memory after both requests.
    memory_mib: f64,
    first_read_ms: f64,
    first_allocation_ms: f64,
}

/// Measures one round of each server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Openings {
    ringdisk: Vec<Opened>,
    peer: Vec<Opened>,
}

/// Makes the image. Only tables are written: the file is sparse.
fn make(files: &Files) -> Result<PathBuf> {
    let path = files.tmpfs()?.join("large.qcow2");
    println!("making a qcow2 image of 16 TiB, 90% in use (2.3 GiB of tables)");
    let in_use = |cluster: u64| cluster % L2_ENTRIES >= EMPTY_OF_TABLE;
    qcow2_file::write(&path, Image { size_bytes: SIZE_BYTES, backing: None, in_use: &in_use, data: None })?;
    Ok(path)
}

pub(super) fn measure(tools: &Tools, files: &Files, rounds: usize) -> Result<Openings> {
    let path = make(files)?;
    let mut openings = Openings::default();
    let socket = measure::socket_path();
    for round in 0..rounds {
        let drive = format!("file={},format=qcow2", measure::escaped(&path));
        openings.ringdisk.push(one(tools, measure::serve(tools, &drive, &socket), &socket)?);
        qcow2_file::drop_first_cluster(&path)?;
        let disk = measure::qemu_disk(&path, "qcow2", "io_uring", false);
        openings.peer.push(one(tools, measure::qemu(&disk, measure::QemuOptions::default(), &socket), &socket)?);
        qcow2_file::drop_first_cluster(&path)?;
        println!("    {}/{rounds}", round + 1);
    }
    std::fs::remove_file(path)?;
    Ok(openings)
}

fn one(tools: &Tools, server: std::process::Command, socket: &Path) -> Result<Opened> {
    let start = Instant::now();
    measure::with_server(server, socket, |pid| {
        let served_ms = start.elapsed().as_secs_f64() * 1e3;
        let first_read_ms = first_request(tools, pid, "randread")?;
        let first_allocation_ms = first_request(tools, pid, "write")?;
        Ok(Opened { served_ms, memory_mib: peak_memory_mib(pid)?, first_read_ms, first_allocation_ms })
    })
}

/// Measures a single request.
fn first_request(tools: &Tools, pid: u32, access: &str) -> Result<f64> {
    let arguments = ["--rw", access, "--bs", "4k", "--depth", "1", "--count", "1"].map(str::to_owned);
    let report = measure::bench(tools, pid, &arguments)?;
    Ok(measure::number(&report["latency_us"]["max"])? / 1e3)
}

fn peak_memory_mib(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: f64 = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).context("no VmHWM")?;
    Ok(kib / 1024.0)
}

/// Returns the page's table.
pub(super) fn table(text: &mut String, openings: &Openings) -> Result<()> {
    writeln!(text, "## A qcow2 image of 16 TiB, 90% in use, on tmpfs\n")?;
    writeln!(text, "Medians of {} rounds; memory is the most that was resident.\n", openings.ringdisk.len())?;
    writeln!(text, "| | served after | memory | first read | first allocation |")?;
    writeln!(text, "|---|--:|--:|--:|--:|")?;
    for (name, opened) in [("Ringdisk", &openings.ringdisk), ("qemu", &openings.peer)] {
        let of = |field: fn(&Opened) -> f64| median(&opened.iter().map(field).collect::<Vec<_>>());
        writeln!(
            text,
            "| {name} | {:.1} ms | {:.0} MiB | {:.2} ms | {:.2} ms |",
            of(|opened| opened.served_ms),
            of(|opened| opened.memory_mib),
            of(|opened| opened.first_read_ms),
            of(|opened| opened.first_allocation_ms),
        )?;
    }
    writeln!(text)?;
    Ok(())
}
