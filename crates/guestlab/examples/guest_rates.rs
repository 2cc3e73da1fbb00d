//! Boots a guest on the sockets that it is given and prints a line of JSON for each disk and job:
//! `guest_rates uml|qemu|qemu-flags SECONDS RW:16k:DEPTH,... SOCKET...`. `cargo xtask bench --driver` runs it.

use anyhow::{Context, Result, bail};
use ringdisk_guestlab::{GuestKind, GuestOptions, GuestWork, MeasureJob, run};
use std::path::PathBuf;
use std::time::Duration;

/// How much of each disk is measured.
const MIB: u32 = 256;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kind, seconds, jobs, sockets @ ..] = arguments.as_slice() else {
        bail!("give a kind of guest, seconds, jobs and sockets");
    };
    let (kind, event_idx) = match kind.as_str() {
        "uml" => (GuestKind::Uml, true),
        "qemu" => (GuestKind::Qemu, true),
        "qemu-flags" => (GuestKind::Qemu, false),
        other => bail!("{other} is no kind of guest: uml, qemu, qemu-flags"),
    };
    let seconds = seconds.parse().context("the time is a number of seconds")?;
    let jobs = jobs.split(',').map(job).collect::<Result<Vec<_>>>()?;
    let mut options = GuestOptions::new(kind, sockets.iter().map(PathBuf::from).collect());
    (options.cpus, options.queues, options.event_idx) = (1, 1, event_idx);
    let measured = u64::from(seconds) * (sockets.len() * jobs.len()) as u64;
    options.time_limit = Duration::from_secs(300 + 3 * measured);
    let sizes: Vec<u64> = jobs.iter().map(|job| u64::from(job.block_kib) << 10).collect();
    options.work = GuestWork::Measure { jobs, seconds, mib: MIB };
    let report = run(&options, &mut |step| eprintln!("{step}"))?;
    for (number, disk) in report.disks.iter().enumerate() {
        for (job, size) in disk.measured.iter().zip(&sizes) {
            let requests = (job.read_bytes + job.written_bytes) / size;
            println!(
                "{{\"disk\": {number}, \"job\": \"{}\", \"iops\": {}, \"submission_us\": {}, \"completion_us\": {}, \
                 \"interrupts\": {}}}",
                job.name,
                job.iops,
                job.submission_us,
                job.completion_us,
                job.interrupts as f64 / requests.max(1) as f64
            );
        }
    }
    Ok(())
}

/// `randwrite:16k:74`.
fn job(text: &str) -> Result<MeasureJob> {
    let [rw, block, depth] = text.split(':').collect::<Vec<_>>()[..] else { bail!("{text} is no RW:BLOCK:DEPTH") };
    let block_kib = block.trim_end_matches('k').parse().with_context(|| format!("{text}: no size in KiB"))?;
    Ok(MeasureJob { rw: rw.to_owned(), block_kib, depth: depth.parse().with_context(|| format!("{text}: no depth"))? })
}
