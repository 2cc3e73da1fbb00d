//! `ringdisk bench`: the load generator, on any server's socket, on an image, or on the host's own file.

use crate::load;
use crate::output::{self, usage};
use crate::progress::Bar;
use crate::signals;
use anyhow::{Context, bail};
use block::{Disk, ReactorHandle};
use daemon::{DriveFormat, DriveOptions, OpenedDisk, ParsedDrive, open_drive, parse_size};
use driver::Driver;
use engine::ReactorThread;
use image::BackingPolicy;
use jobs::bench::{BenchReport, BenchSpec, Hooks, Initial, Latency, Pattern, Progress, Stop, Verify};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Measure a disk: requests a second, latency, CPU. Writing modes destroy what is on it.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("target").required(true)))]
pub(crate) struct Args {
    /// A vhost-user-blk server's socket, ours or another's.
    #[arg(long, group = "target", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// An image, opened in this process.
    #[arg(long, group = "target", value_name = "FILE")]
    image: Option<PathBuf>,
    /// A file or block device of the host, as it is: the rate to compare with.
    #[arg(long, group = "target", value_name = "FILE")]
    host: Option<PathBuf>,
    /// A disk with options, opened in this process (see `ringdisk serve --drive`).
    #[arg(long, group = "target", value_name = "OPTIONS")]
    drive: Option<String>,
    /// What to do.
    #[arg(long, value_enum, default_value = "randread")]
    rw: Mode,
    /// Share of reads for randrw, in percent.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: Option<u8>,
    /// Bytes a request.
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    bs: String,
    /// Requests in flight on each queue.
    #[arg(long, value_name = "N", default_value_t = 32)]
    depth: u32,
    /// Queues, each on a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Use only the first SIZE bytes of the disk.
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Run for this many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    time: f64,
    /// Run for this many requests instead.
    #[arg(long, value_name = "N", conflicts_with = "time")]
    count: Option<u64>,
    /// Run this many seconds before anything is counted.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    warmup: f64,
    /// Flush after each N writes of a queue.
    #[arg(long, value_name = "N")]
    flush_every: Option<u32>,
    /// Write a pattern, and check what is read against what was written before.
    #[arg(long)]
    verify: bool,
    /// Seed of offsets and patterns.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Process of the server, for its CPU time. May be repeated.
    #[arg(long, value_name = "PID")]
    server_pid: Vec<u32>,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Randread,
    Randwrite,
    Randrw,
    Read,
    Write,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let spec = spec(args)?;
    let target = match Target::open(args, &spec)? {
        Asked::Target(target) => target,
        Asked::Help(help) => return output::print(&format!("{help}\n")),
    };
    let reactors = load::reactors("bench", usize::from(args.queues))?;
    let handles: Vec<Arc<dyn ReactorHandle>> = reactors.iter().map(ReactorThread::handle).collect();
    let bar = Bar::start("measuring");
    let cancel = signals::interrupted()?;
    let progress = |progress: Progress| {
        bar.set(progress.fraction);
        if target.is_gone() {
            // Nothing but errors would come until the end.
            cancel.store(true, Ordering::Relaxed);
        }
    };
    let hooks = Hooks { progress: Some(&progress), cancel: Some(Arc::clone(&cancel)), ..target.hooks() };
    let measured = jobs::bench::run(&target.disk(), &handles, &spec, &hooks);
    bar.finish();
    let report = measured?.report;
    for reactor in reactors {
        reactor.stop()?;
    }
    let gone = target.is_gone();
    target.close()?;
    match args.output {
        Output::Human => output::print(&human(&report))?,
        Output::Json => output::print(&format!("{}\n", serde_json::to_string_pretty(&report)?))?,
    }
    if gone {
        bail!("the server ended the connection");
    }
    let first = report.first_mismatch.or(report.first_error).unwrap_or_default();
    if report.errors > 0 || report.mismatches > 0 {
        bail!("{} requests failed, {} blocks held wrong data: {first}", report.errors, report.mismatches);
    }
    Ok(())
}

fn spec(args: &Args) -> anyhow::Result<BenchSpec> {
    let is_mixed = matches!(args.rw, Mode::Randrw);
    if args.rwmixread.is_some() && !is_mixed {
        return Err(usage("--rwmixread is for --rw randrw"));
    }
    let (random, read_percent) = match args.rw {
        Mode::Randread => (true, 100),
        Mode::Randwrite => (true, 0),
        Mode::Randrw => (true, args.rwmixread.unwrap_or(50)),
        Mode::Read => (false, 100),
        Mode::Write => (false, 0),
    };
    let block_bytes =
        u32::try_from(parse_size(&args.bs)?).map_err(|_| usage(format!("--bs {} is too large", args.bs)))?;
    let seconds = |option: &str, value: f64| {
        Duration::try_from_secs_f64(value).map_err(|_| usage(format!("{option} {value} is not a time in seconds")))
    };
    let runtime = Stop::Runtime(seconds("--time", args.time)?);
    Ok(BenchSpec {
        queue_depth: args.depth,
        queues: args.queues.into(),
        block_bytes,
        read_percent,
        pattern: if random { Pattern::Random { seed: args.seed } } else { Pattern::Sequential },
        length_bytes: args.size.as_deref().map(parse_size).transpose()?,
        stop: args.count.map_or(runtime, Stop::Requests),
        warmup: seconds("--warmup", args.warmup)?,
        flush_every: args.flush_every,
        verify: args.verify.then_some(Verify { seed: args.seed, initial: Initial::Unknown }),
        server_pids: args.server_pid.clone(),
        ..BenchSpec::default()
    })
}

/// What is measured.
enum Target {
    Driver(Arc<Driver>),
    Opened(OpenedDisk),
}

enum Asked {
    Target(Target),
    Help(String),
}

impl Target {
    fn open(args: &Args, spec: &BenchSpec) -> anyhow::Result<Asked> {
        if let Some(socket) = &args.socket {
            let driver = load::connect(socket, spec.queues as u16, load::buffers_bytes(spec))?;
            return Ok(Asked::Target(Self::Driver(Arc::new(driver))));
        }
        let file = |file: &Option<PathBuf>, format| {
            file.as_ref().map(|file| DriveOptions { format, ..DriveOptions::of_file(file) })
        };
        let mut drive = match &args.drive {
            Some(text) => {
                match DriveOptions::parse(text).map_err(|error| error.in_context(format!("--drive {text}")))? {
                    ParsedDrive::Drive(drive) => *drive,
                    ParsedDrive::Help(help) => return Ok(Asked::Help(help)),
                }
            }
            None => file(&args.image, None)
                .or_else(|| file(&args.host, Some(DriveFormat::Raw)))
                .context("one of --socket, --image, --host, --drive has to be given")?,
        };
        // A measurement that only reads leaves the file alone, and shares it with other readers.
        drive.read_only |= spec.read_percent == 100 && drive.file.is_some();
        let opened = open_drive(&drive, BackingPolicy::default(), &[])?;
        Ok(Asked::Target(Self::Opened(opened)))
    }

    fn disk(&self) -> Arc<dyn Disk> {
        match self {
            Self::Driver(driver) => Arc::clone(driver) as Arc<dyn Disk>,
            Self::Opened(opened) => Arc::clone(&opened.disk),
        }
    }

    fn hooks(&self) -> Hooks<'static> {
        match self {
            Self::Driver(driver) => load::driver_hooks(driver),
            Self::Opened(_) => Hooks::default(),
        }
    }

    /// Whether the server ended the connection.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Driver(driver) if driver.is_disconnected())
    }

    fn close(&self) -> anyhow::Result<()> {
        match self {
            Self::Driver(driver) => Ok(driver.disconnect()?),
            Self::Opened(opened) => Ok(opened.close()?),
        }
    }
}

fn human(report: &BenchReport) -> String {
    let mib = report.bytes_per_second / f64::from(1 << 20);
    let mut text = format!(
        "{} {} bytes, {}% reads, depth {} x {} queues: {:.0} IOPS, {mib:.1} MiB/s ({} requests in {:.2} s)\n",
        report.pattern,
        report.block_bytes,
        report.read_percent,
        report.queue_depth,
        report.queues,
        report.iops,
        report.requests,
        report.elapsed_seconds,
    );
    let kinds = [
        ("reads", &report.read_latency_us),
        ("writes", &report.write_latency_us),
        ("flushes", &report.flush_latency_us),
    ];
    for (kind, latency) in kinds.into_iter().filter(|(_, latency)| latency.count > 0) {
        let Latency { mean, p50, p90, p99, p999, max, .. } = latency;
        let _ = writeln!(
            text,
            "{kind}: mean {mean:.1} us, p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}"
        );
    }
    let _ = writeln!(text, "client: {:.2} us of CPU a request", report.client_us_per_request);
    for server in &report.servers {
        let _ = writeln!(text, "server {}: {:.2} us of CPU a request", server.pid, server.us_per_request);
    }
    for counter in &report.counters {
        let _ = writeln!(text, "{}: {} ({:.3} a request)", counter.name, counter.total, counter.per_request);
    }
    if report.cancelled {
        text.push_str("interrupted: the figures are of the time until then\n");
    }
    text
}
