//! `cargo xtask bench --jobs`: what a guest notices of a snapshot, a commit, a mirror and a backup of its disk, beside
//! qemu-storage-daemon doing the same by QMP.
//!
//! For each job, each side and each round, a fresh copy of one image is served, `ringdisk bench` loads it and keeps latency
//! over time, and the job begins after a while. A page has the figures, and a drawing of the first round for each job.

mod drawing;
mod events;
mod page;
mod qmp;
mod servers;

use super::BenchArguments;
use super::measure::{CLIENT_CORE, Tools, json_of, pinned};
use super::rounds::{in_turn, put_page};
use super::statistics::quantile;
use crate::command::Program;
use crate::workspace;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use servers::{Server, Side};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// The guest: so many requests of 4 KiB in flight, half of them reads.
const DEPTH: u32 = 8;
/// How long the guest runs alone before the job begins.
const LEAD: Duration = Duration::from_secs(2);
/// How long it goes on after the latest end of a job.
const TAIL: Duration = Duration::from_secs(1);
/// A job that takes longer is cancelled.
const LIMIT: Duration = Duration::from_secs(10);
/// Rounds, at most: a round takes two minutes.
const ROUNDS_MAX: usize = 3;
/// The beginning of the guest's run does not count: its caches fill.
const SETTLES_MS: f64 = 1000.0;
/// Size of the image where nobody says.
const SIZE_MIB: u64 = 1024;
/// Size of the disk of [`Job::LargeSnapshot`], whose clusters are small: its tables are those of 64 GiB in clusters of
/// 64 KiB.
const LARGE_MIB: u64 = 8192;
const LARGE_CLUSTER_BYTES: u64 = 8 << 10;

/// What is done to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    Snapshot,
    /// Of a disk with many clusters.
    LargeSnapshot,
    Commit,
    Mirror,
    Backup,
    /// To a target that takes 1 MB/s.
    SlowBackup,
}

impl Job {
    const ALL: [Self; 6] =
        [Self::Snapshot, Self::LargeSnapshot, Self::Commit, Self::Mirror, Self::Backup, Self::SlowBackup];

    fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::LargeSnapshot => "snapshot-large",
            Self::Commit => "commit",
            Self::Mirror => "mirror",
            Self::Backup => "backup",
            Self::SlowBackup => "slow-backup",
        }
    }

    fn limit(self) -> Duration {
        match self {
            Self::Snapshot | Self::LargeSnapshot => TAIL,
            _ => LIMIT,
        }
    }
}

/// What completed in ten milliseconds, as `ringdisk bench --series` writes it.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct Moment {
    start_ms: f64,
    requests: u64,
    p99_us: f64,
    max_us: f64,
}

/// The first line of it.
#[derive(Debug, Deserialize)]
struct Begun {
    begun_us: u64,
}

/// A job on one side.
#[derive(Debug, Clone, PartialEq)]
struct Course {
    moments: Vec<Moment>,
    /// When the job began and ended, on the clock of the moments.
    job_ms: (f64, f64),
    /// It did not come to its end in time.
    is_late: bool,
}

/// What a guest notices.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Figures {
    longest_before_ms: f64,
    longest_ms: f64,
    /// The slowest hundredth of the ten-millisecond pieces: half of them are slower.
    p99_before_us: f64,
    p99_us: f64,
    seconds: f64,
    /// The part of its rate that it kept; `None` where the job was too short to say.
    rate_kept: Option<f64>,
    is_late: bool,
}

impl Course {
    fn of(text: &str, job: (SystemTime, SystemTime), is_late: bool) -> Result<Self> {
        let mut lines = text.lines();
        let begun: Begun = serde_json::from_str(lines.next().context("the client wrote no series")?)?;
        let begun = SystemTime::UNIX_EPOCH + Duration::from_micros(begun.begun_us);
        let moments = lines.map(serde_json::from_str).collect::<Result<Vec<Moment>, _>>()?;
        ensure!(!moments.is_empty(), "the client measured nothing");
        let ms = |at: SystemTime| at.duration_since(begun).map_or(0.0, |since| since.as_secs_f64() * 1e3);
        Ok(Self { moments, job_ms: (ms(job.0), ms(job.1)), is_late })
    }

    fn figures(&self) -> Figures {
        let (begin, end) = self.job_ms;
        let before = self.between(SETTLES_MS, begin - 10.0);
        // A request that waited for the end of the job completes a little later.
        let during = self.between(begin - 10.0, end + 50.0);
        let longest = |moments: &[Moment]| moments.iter().map(|moment| moment.max_us / 1e3).fold(0.0, f64::max);
        let p99 = |moments: &[Moment]| {
            let served: Vec<f64> =
                moments.iter().filter(|moment| moment.requests > 0).map(|moment| moment.p99_us).collect();
            quantile(&served, 0.5)
        };
        let rate = |moments: &[Moment]| {
            let requests: u64 = moments.iter().map(|moment| moment.requests).sum();
            requests as f64 / moments.len().max(1) as f64
        };
        let is_long = end - begin >= 200.0 && rate(&before) > 0.0;
        Figures {
            longest_before_ms: longest(&before),
            longest_ms: longest(&during),
            p99_before_us: p99(&before),
            p99_us: p99(&during),
            seconds: (end - begin) / 1e3,
            rate_kept: is_long.then(|| rate(&during) / rate(&before)),
            is_late: self.is_late,
        }
    }

    fn between(&self, from_ms: f64, to_ms: f64) -> Vec<Moment> {
        let is_inside = |moment: &&Moment| moment.start_ms >= from_ms && moment.start_ms <= to_ms;
        self.moments.iter().filter(is_inside).copied().collect()
    }
}

/// The files of a run, removed when it ends.
struct Files {
    directory: tempfile::TempDir,
    image: PathBuf,
}

impl Files {
    fn create(directory: Option<&Path>, size_mib: u64) -> Result<Self> {
        let parent = directory.map_or_else(workspace::target, Path::to_path_buf);
        std::fs::create_dir_all(&parent)?;
        let directory = tempfile::Builder::new().prefix("ringdisk-bench-jobs-").tempdir_in(parent)?;
        let (raw, image) = (directory.path().join("noise.raw"), directory.path().join("image.qcow2"));
        super::files::write_noise(&raw, size_mib << 20)?;
        Program::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).args([&raw, &image]).output_text()?;
        std::fs::remove_file(raw)?;
        Ok(Self { directory, image })
    }

    /// A directory with the disk of a job: a copy of the image, or a large disk without data that has a place for each
    /// cluster.
    fn fresh(&self, job: Job) -> Result<tempfile::TempDir> {
        let fresh = tempfile::tempdir_in(self.directory.path())?;
        let disk = fresh.path().join("disk.qcow2");
        if job == Job::LargeSnapshot {
            let options = format!("preallocation=metadata,cluster_size={LARGE_CLUSTER_BYTES}");
            let create = Program::new("qemu-img").args(["create", "-q", "-f", "qcow2", "-o", &options]).args([&disk]);
            create.args([format!("{LARGE_MIB}M")]).output_text()?;
        } else {
            std::fs::copy(&self.image, disk)?;
        }
        Program::new("sync").output_text()?;
        Ok(fresh)
    }
}

/// Serves the disk, loads it, does the job.
fn measure(job: Job, side: Side, tools: &Tools, files: &Files) -> Result<Course> {
    let directory = files.fresh(job)?;
    let mut server = Server::start(side, tools, directory.path())?;
    match job {
        Job::Commit => server.snapshot()?,
        Job::SlowBackup => server.start_slow_target()?,
        _ => {}
    }
    let (socket, series) = (server.socket().to_owned(), directory.path().join("series"));
    let seconds = (LEAD + job.limit() + TAIL).as_secs_f64();
    let mut client = pinned(CLIENT_CORE, &tools.client);
    client.arg("bench").arg("--socket").arg(&socket).arg("--series").arg(&series);
    client.args(["--rw", "randrw", "--bs", "4k", "--destroy", "--output", "json"]);
    client.args(["--depth", &DEPTH.to_string(), "--time", &seconds.to_string()]);
    let client = std::thread::spawn(move || json_of(client));
    std::thread::sleep(LEAD);
    let (begin, deadline) = (SystemTime::now(), Instant::now() + job.limit());
    let done = server.carry_out(job, deadline);
    let end = SystemTime::now();
    let report = client.join().map_err(|_| anyhow::anyhow!("the client's thread panicked"));
    let said = server.end();
    let is_late = !done.with_context(|| format!("{side}, {}: {said}", job.name()))?;
    report?.with_context(|| format!("{side}, {}: {said}", job.name()))?;
    Course::of(&std::fs::read_to_string(series)?, (begin, end), is_late)
}

pub(super) fn run(ringdisk: PathBuf, arguments: &BenchArguments) -> Result<()> {
    let tools = Tools::find(ringdisk)?;
    let size_mib = arguments.size_mib.unwrap_or(SIZE_MIB);
    let files = Files::create(arguments.directory.as_deref(), size_mib)?;
    let output = arguments.output.clone().unwrap_or_else(|| workspace::root().join("docs/benchmarks-jobs.md"));
    let figures = output.parent().unwrap_or(Path::new(".")).join("figures");
    std::fs::create_dir_all(&figures)?;
    let rounds = arguments.pairs.clamp(1, ROUNDS_MAX);
    let mut rows = Vec::new();
    for job in Job::ALL {
        let mut courses = Side::ALL.map(|side| (side, Vec::new()));
        in_turn(rounds, Side::ALL.len(), |index| {
            let (side, courses) = &mut courses[index];
            println!("{} with {side}", job.name());
            let course = measure(job, *side, &tools, &files)?;
            println!("    {:?}", course.figures());
            courses.push(course);
            Ok(())
        })?;
        let first = courses.each_ref().map(|(side, courses)| (*side, courses[0].clone()));
        drawing::draw(&figures.join(format!("jobs-{}.svg", job.name())), job, &first)?;
        for (side, courses) in courses {
            rows.push(Row { job, side, figures: courses.iter().map(Course::figures).collect() });
        }
    }
    put_page(&page::text(&rows, rounds, size_mib)?, "benchmarks-jobs.md", arguments)
}

/// A job on one side: the figures of each round.
struct Row {
    job: Job,
    side: Side,
    figures: Vec<Figures>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_counts_for_the_job_it_falls_into() {
        let mut text = "{\"begun_us\":1000000,\"width_ms\":10}\n".to_owned();
        for piece in 0..600 {
            let (requests, max_us) = match piece {
                50 => (100, 9000.0),
                400 => (10, 30_000.0),
                300..500 => (50, 500.0),
                _ => (100, 400.0),
            };
            let start_ms = f64::from(piece) * 10.0;
            text += &format!(
                "{{\"start_ms\":{start_ms},\"requests\":{requests},\"p50_us\":1,\"p99_us\":200,\"max_us\":{max_us}}}\n"
            );
        }
        let at = |ms: u64| SystemTime::UNIX_EPOCH + Duration::from_millis(1000 + ms);
        let figures = Course::of(&text, (at(3000), at(5000)), false).unwrap().figures();
        assert!((figures.longest_ms - 30.0).abs() < 1e-9 && (figures.longest_before_ms - 0.4).abs() < 1e-9);
        assert!((figures.seconds - 2.0).abs() < 1e-9);
        let kept = figures.rate_kept.unwrap();
        assert!((0.48..0.55).contains(&kept), "{kept}");
        assert!(Course::of("", (at(0), at(1)), false).is_err());
    }
}
