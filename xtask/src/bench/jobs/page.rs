//! The page.

use super::super::measure::version;
use super::super::statistics::median;
use super::{DEPTH, Figures, Job, LARGE_CLUSTER_BYTES, LARGE_MIB, LEAD, LIMIT, Row};
use anyhow::Result;
use std::fmt::Write as _;

pub(super) fn text(rows: &[Row], rounds: usize, size_mib: u64) -> Result<String> {
    let mut text = "# Jobs on running disks: figures\n\n".to_owned();
    let large_clusters = (LARGE_MIB << 20) / LARGE_CLUSTER_BYTES;
    writeln!(
        text,
        "`cargo xtask bench --jobs` has written this page. A guest reads and writes 4 KiB at random, {DEPTH} requests in flight,\n\
         while its disk is changed. The disk is a full qcow2 image of {size_mib} MiB, past the page cache. The peer is\n\
         {}, steered by QMP: `blockdev-snapshot`, `block-commit`, `blockdev-mirror` (`copy-mode=write-blocking`, so that it ends),\n\
         `blockdev-backup`. It serves from its main loop: with a thread for the disk, it ends with an assertion when a layer is\n\
         put on the disk under load. The server and the guest have a core each, and the guest is the same program for both.\n\n\
         * Each job ran {rounds} times on each side, in turn.\n\
         * The guest runs alone for {} s. Then the job begins. One that takes longer than {} s is cancelled.\n\
         * Figures are medians of the rounds. The stall is the longest request that completed during the job: the median, and\n  \
         the worst round; in brackets, the longest before the job.\n\
         * p99 is that of ten milliseconds, the median over them; in brackets, before the job.\n\
         * Both sides tell of a job's end by an event. Nobody asks them meanwhile, which would take processor time.\n\
         * `snapshot-large` is a snapshot of a disk of {LARGE_MIB} MiB in {} clusters. All have a place in the file,\n  \
         and few hold data. Its tables are as large as those of {} GiB in clusters of 64 KiB.\n\
         * `slow-backup` has an NBD server for its target that takes 1 MB/s. It is cancelled, and says what the guest\n  \
         notices meanwhile.\n\
         * The rate kept is the guest's rate during the job, of its rate before.\n",
        version("qemu-storage-daemon"),
        LEAD.as_secs(),
        LIMIT.as_secs(),
        large_clusters,
        (large_clusters * (64 << 10)) >> 30,
    )?;
    text += "| job | side | took | stall | worst stall | p99 | rate kept |\n|---|---|---|---|---|---|---|\n";
    for Row { job, side, figures } in rows {
        let of = |field: fn(&Figures) -> f64| median(&figures.iter().map(field).collect::<Vec<_>>());
        let kept: Vec<f64> = figures.iter().filter_map(|figures| figures.rate_kept).collect();
        writeln!(
            text,
            "| {} | {side} | {} | {:.1} ms ({:.1}) | {:.1} ms | {:.0} µs ({:.0}) | {} |",
            job.name(),
            took(figures),
            of(|figures| figures.longest_ms),
            of(|figures| figures.longest_before_ms),
            figures.iter().map(|figures| figures.longest_ms).fold(0.0, f64::max),
            of(|figures| figures.p99_us),
            of(|figures| figures.p99_before_us),
            if kept.is_empty() { "-".to_owned() } else { format!("{:.0}%", median(&kept) * 100.0) },
        )?;
    }
    for job in Job::ALL.into_iter().filter(|job| rows.iter().any(|row| row.job == *job)) {
        writeln!(text, "\n## The guest's latency during a {0}\n\n![{0}](figures/jobs-{0}.svg)", job.name())?;
    }
    Ok(text)
}

/// How long it took, and how often it did not come to its end.
fn took(figures: &[Figures]) -> String {
    let seconds = median(&figures.iter().map(|figures| figures.seconds).collect::<Vec<_>>());
    let late = figures.iter().filter(|figures| figures.is_late).count();
    match late {
        0 if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        0 => format!("{seconds:.1} s"),
        late if late == figures.len() => format!("not done in {} s", LIMIT.as_secs()),
        late => format!("{seconds:.1} s, not done {late} of {} times", figures.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Side;
    use super::*;

    #[test]
    fn the_page_has_medians_the_worst_stall_and_says_what_did_not_end() {
        let figures = |seconds: f64, longest_ms: f64, is_late| Figures {
            longest_before_ms: 1.0,
            longest_ms,
            p99_before_us: 200.0,
            p99_us: 300.0,
            seconds,
            rate_kept: (seconds > 1.0).then_some(0.5),
            is_late,
        };
        let late = vec![figures(2.0, 30.0, false), figures(10.0, 7.0, true), figures(3.0, 9.0, false)];
        let rows = [
            Row { job: Job::Snapshot, side: Side::Ringdisk, figures: vec![figures(0.014, 3.0, false)] },
            Row { job: Job::Backup, side: Side::Qemu, figures: late },
        ];
        let text = text(&rows, 3, 64).unwrap();
        for line in [
            "* Each job ran 3 times on each side",
            "| snapshot | Ringdisk | 14 ms | 3.0 ms (1.0) | 3.0 ms | 300 µs (200) | - |",
            "| backup | qemu-storage-daemon | 3.0 s, not done 1 of 3 times | 9.0 ms (1.0) | 30.0 ms | 300 µs (200) | 50% |",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(text.matches("## The guest's latency").count(), 2);
    }
}
