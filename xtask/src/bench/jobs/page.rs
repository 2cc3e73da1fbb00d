//! The page.

use super::super::measure::version;
use super::servers::Side;
use super::{DEPTH, Figures, Job, LEAD, LIMIT};
use anyhow::Result;
use std::fmt::Write as _;

pub(super) fn text(rows: &[(Job, Vec<(Side, Figures)>)], size_mib: u64) -> Result<String> {
    let mut text = "# Jobs on running disks: figures\n\n".to_owned();
    writeln!(
        text,
        "`cargo xtask bench --jobs` has written this page. A guest reads and writes 4 KiB at random, {DEPTH} requests in flight,\n\
         while its disk is changed. The disk is a full qcow2 image of {size_mib} MiB, past the page cache. The peer is\n\
         {}, steered by QMP: `blockdev-snapshot`, `block-commit`,\n\
         `blockdev-mirror` (`copy-mode=write-blocking`, so that it ends), `blockdev-backup`. It serves from its\n\
         main loop: with a thread for the disk, it ends with an assertion when a layer is put on the disk under load. The server and the guest have a\n\
         core each, and the guest is the same program for both. Each job ran once on each side.\n\n\
         * The guest runs alone for {} s. Then the job begins. One that takes longer than {} s is cancelled.\n\
         * The longest stall is the longest request that completed during the job; in brackets, the longest before.\n\
         * p99 is that of ten milliseconds, the median over them; in brackets, before the job.\n\
         * The rate kept is the guest's rate during the job, of its rate before.\n",
        version("qemu-storage-daemon"),
        LEAD.as_secs(),
        LIMIT.as_secs(),
    )?;
    text += "| job | side | took | longest stall | p99 | rate kept |\n|---|---|---|---|---|---|\n";
    for (job, sides) in rows {
        for (side, figures) in sides {
            let took = match figures.is_late {
                true => format!("not done in {} s", LIMIT.as_secs()),
                false if figures.seconds < 1.0 => format!("{:.0} ms", figures.seconds * 1e3),
                false => format!("{:.1} s", figures.seconds),
            };
            writeln!(
                text,
                "| {} | {side} | {took} | {:.1} ms ({:.1}) | {:.0} µs ({:.0}) | {} |",
                job.name(),
                figures.longest_ms,
                figures.longest_before_ms,
                figures.p99_us,
                figures.p99_before_us,
                figures.rate_kept.map_or_else(|| "-".to_owned(), |kept| format!("{:.0}%", kept * 100.0)),
            )?;
        }
    }
    for (job, _) in rows {
        writeln!(text, "\n## The guest's latency during a {0}\n\n![{0}](figures/jobs-{0}.svg)", job.name())?;
    }
    Ok(text)
}
