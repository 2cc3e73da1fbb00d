//! `ringdisk bench`: the load generator, on any server's socket, on an image, or on the host's own file; once, over
//! depths, or on several targets in turn.

mod differences;
mod guest;
mod overwrite;
mod series;
mod served;
mod target;
mod text;

use crate::output::{self, Bar, usage};
use crate::signals;
use anyhow::{Context, bail};
use drive::parse_size;
use engine::ReactorConfig;
use guest::GuestOptions;
use load::{BenchReport, BenchSpec, Initial, Moment, Pattern, Plot, Stop, Verify};
use serde::Serialize;
use series::{Plan, Series};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};
use target::{Parsed, Target};

/// The time of a single measurement, and of one of several, in seconds.
const SINGLE_SECONDS: f64 = 5.0;
const SERIES_SECONDS: f64 = 1.0;
/// Rounds of a comparison.
const PAIRS: u32 = 5;
/// The default depths of `--plot`.
const PLOT_DEPTHS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// The length of time of a line of `--series`.
const MOMENT: Duration = Duration::from_millis(10);
/// The number of the plot's colours.
const TARGETS_MAX: usize = 8;
const NAMES: [&str; TARGETS_MAX] = ["A", "B", "C", "D", "E", "F", "G", "H"];

/// Measure a disk: requests a second, latency and CPU time.
///
/// A writing load overwrites the disk. It asks for --destroy on a device, on the disk of a server (--socket), on a kept
/// overlay (keep=), and if it sees data in a file.
///
/// One target is measured once, or at each of several depths (--depths, --plot). With --compare, several targets are
/// measured in turn under the same load.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("target").required(true)))]
pub(crate) struct Args {
    /// The socket of any vhost-user-blk server.
    #[arg(long, group = "target", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// An image, opened by this process.
    #[arg(long, group = "target", value_name = "FILE")]
    image: Option<PathBuf>,
    /// A file or block device of the host, whatever its format: the host's own rate.
    #[arg(long, group = "target", value_name = "FILE")]
    host: Option<PathBuf>,
    /// A disk with options, opened by this process (see `ringdisk serve --drive help`).
    #[arg(long, group = "target", value_name = "OPTIONS")]
    drive: Option<String>,
    /// A disk with options, which this process serves to a guest of its own over a vhost-user socket. The report also
    /// counts the server's work: batches, system calls, calls of its workers, harvests, sleeps, yields and notifications.
    /// For qcow2, it counts how often tables were found in memory. CPU time is that of both sides.
    #[arg(long, group = "target", value_name = "OPTIONS")]
    serve: Option<String>,
    /// Two or more targets: socket:PATH, image:FILE, host:FILE, drive:OPTIONS or serve:OPTIONS. They are called A, B, ...,
    /// or NAME in NAME=socket:PATH. The report has medians, and the ratio of the first target to each other with its
    /// minimum and maximum over the rounds. A target is open only during its turn.
    #[arg(long, group = "target", value_name = "TARGET", num_args = 2..)]
    compare: Vec<String>,
    /// Rounds of --compare. Each measures every target once; every other one in reverse order [default: 5].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: Option<u32>,
    /// The load.
    #[arg(long, value_enum, default_value = "randread")]
    rw: Mode,
    /// Share of reads for randrw, in percent.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rwmixread: Option<u8>,
    /// Bytes of each request.
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    bs: String,
    /// Requests in flight on each queue. A server's ring holds at most 1024 of them.
    #[arg(long, value_name = "N", default_value_t = 32)]
    depth: u32,
    /// Measure at each of these depths, one after the other.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', conflicts_with = "depth",
        value_parser = clap::value_parser!(u32).range(1..))]
    depths: Vec<u32>,
    /// Draw throughput and latency (p50, p99) over depth as SVG [depths: 1,2,4,...,128 unless --depths].
    #[arg(long, value_name = "FILE.svg", conflicts_with = "depth")]
    plot: Option<PathBuf>,
    /// Write latency over time to FILE: for each 10 ms, when they began, how many requests completed, and their p50, p99 and
    /// longest latency, as a line of JSON. The first line says when the measurement began, in microseconds since 1970. For one
    /// measurement.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["compare", "depths", "plot"])]
    series: Option<PathBuf>,
    /// Queues, each on a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    queues: u16,
    /// Use only the first SIZE bytes of the disk.
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Run for this many seconds [default: 5; with --compare, --depths or --plot 1 each time].
    #[arg(long, value_name = "SECONDS")]
    time: Option<f64>,
    /// Run for this many requests instead.
    #[arg(long, value_name = "N", conflicts_with = "time")]
    count: Option<u64>,
    /// Run this many seconds before anything is counted [default: 0; with --compare, --depths or --plot 0.1].
    #[arg(long, value_name = "SECONDS")]
    warmup: Option<f64>,
    /// Flush after each N writes of a queue.
    #[arg(long, value_name = "N")]
    flush_every: Option<u32>,
    /// Allow a writing load to overwrite a device, the disk of a server, a file that holds data, or a kept overlay.
    /// snapshot=on without keep= needs it never: the image stays as it is.
    #[arg(long)]
    destroy: bool,
    /// Write a pattern, and check what is read against what was written before.
    #[arg(long)]
    verify: bool,
    /// Read and write by maps instead of requests, where the disk gives them: a read looks at what lies in memory, and a
    /// write fills space that becomes the disk's own. For disks of this process.
    #[arg(long, conflicts_with_all = ["socket", "serve"])]
    maps: bool,
    /// Make the bytes of each write and look at those of each read, as a program that uses the disk does: in the requests'
    /// buffers, or with --maps in place.
    #[arg(long, conflicts_with = "verify")]
    touch: bool,
    /// Seed of offsets and patterns.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The server's process id: the report then has its CPU time and context switches. With --compare, TARGET:PID, where
    /// TARGET is A, B, ... or a name. May be repeated.
    #[arg(long, value_name = "PID")]
    server_pid: Vec<String>,
    /// How long an idle thread of the client looks for completions before it sleeps, in microseconds; 0 means not at all.
    /// With --drive, the drive's own poll-max-us= goes before it; with --serve, that one is the server's.
    #[arg(long, value_name = "US", default_value_t = ReactorConfig::default().poll_max_us)]
    poll_max_us: u32,
    /// How the guest of a --socket or --serve works: path=bio|request, callbacks=suppressed|kept, event-idx=on|off,
    /// indirect=on|off, packed=on|off. A target of --compare may say the same for itself among its options:
    /// guest.path=request. A --serve may also say server.harvest=idle: its reactors look for completions only in turns
    /// without new requests. And server.beside=FILE: a second disk, to which every second queue belongs.
    #[arg(long, value_name = "OPTIONS")]
    guest: Option<String>,
    /// Show all figures, not only rates, latencies and CPU time.
    #[arg(short, long)]
    verbose: bool,
    /// Form of the report.
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

impl Args {
    /// Whether more than one measurement is requested.
    fn is_series(&self) -> bool {
        !self.compare.is_empty() || !self.depths.is_empty() || self.plot.is_some()
    }

    fn all_depths(&self) -> Vec<u32> {
        let mut depths = match (self.depths.is_empty(), &self.plot) {
            (false, _) => self.depths.clone(),
            (true, Some(_)) => PLOT_DEPTHS.to_vec(),
            (true, None) => vec![self.depth],
        };
        depths.sort_unstable();
        depths.dedup();
        depths
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let spec = spec(args)?;
    if args.pairs.is_some() && args.compare.is_empty() {
        return Err(usage("--pairs is for --compare"));
    }
    let guest = args.guest.as_deref().map(GuestOptions::parse).transpose()?.unwrap_or_default();
    let mut targets = Vec::new();
    for asked in targets_of(args) {
        match asked? {
            Parsed::Target(mut target) => {
                target.poll_max_us = args.poll_max_us;
                target.guest = std::mem::take(&mut target.guest).or(&guest);
                targets.push(target);
            }
            Parsed::Help(help) => return output::print(&format!("{help}\n")),
        }
    }
    check_names(&targets)?;
    assign_servers(args, &mut targets)?;
    if let Some(plot) = &args.plot {
        check_plot(plot)?;
    }
    if spec.read_percent < 100 && !args.destroy {
        overwrite::refuse(&targets)?;
    }
    let cancel = signals::interrupted()?;
    let done = match targets.as_slice() {
        [target] if !args.is_series() => run_single(args, target, &spec, &cancel),
        targets => run_series(args, targets, &spec, &cancel),
    };
    if done.is_ok() {
        // The report already says that it was interrupted.
        signals::end_if_interrupted();
    }
    done
}

/// Returns the targets of the command line.
fn targets_of(args: &Args) -> Vec<anyhow::Result<Parsed>> {
    let alone = [
        ("socket", args.socket.as_ref().map(|path| path.as_os_str())),
        ("image", args.image.as_ref().map(|path| path.as_os_str())),
        ("host", args.host.as_ref().map(|path| path.as_os_str())),
        ("drive", args.drive.as_ref().map(OsStr::new)),
        ("serve", args.serve.as_ref().map(OsStr::new)),
    ];
    if args.compare.len() > TARGETS_MAX {
        return vec![Err(usage(format!("--compare takes at most {TARGETS_MAX} targets")))];
    }
    let alone = alone.into_iter().filter_map(|(kind, value)| Some(Target::of_kind("A", kind, value?)));
    let compared = args.compare.iter().zip(NAMES).map(|(text, name)| Target::parse(text, name));
    alone.chain(compared).collect()
}

fn check_names(targets: &[Target]) -> anyhow::Result<()> {
    for (index, target) in targets.iter().enumerate() {
        if targets.iter().take(index).any(|other| other.name == target.name) {
            return Err(usage(format!("two targets are called '{}': give them names of their own", target.name)));
        }
    }
    Ok(())
}

/// Assigns the processes of `--server-pid` to their targets.
fn assign_servers(args: &Args, targets: &mut [Target]) -> anyhow::Result<()> {
    let names = targets.iter().map(|target| target.name.clone()).collect::<Vec<_>>().join(", ");
    for text in &args.server_pid {
        let (name, pid) = match text.split_once(':') {
            Some((name, pid)) => (Some(name), pid),
            None => (None, text.as_str()),
        };
        let pid = pid.parse().map_err(|_| usage(format!("--server-pid {text}: '{pid}' is not a process id")))?;
        let target = match (name, &mut *targets) {
            (None, [target]) => Some(target),
            (None, _) => return Err(usage(format!("--server-pid {text}: say whose it is, as in A:{pid} ({names})"))),
            (Some(name), targets) => targets
                .iter_mut()
                .zip(NAMES)
                .find(|(target, letter)| target.name == name || *letter == name)
                .map(|(target, _)| target),
        };
        let unknown = || usage(format!("--server-pid {text}: no target is called that (there are {names})"));
        target.ok_or_else(unknown)?.add_server(pid)?;
    }
    Ok(())
}

/// Refuses a plot that cannot be written, before minutes of measuring.
fn check_plot(plot: &Path) -> anyhow::Result<()> {
    if plot.extension().is_none_or(|extension| extension != "svg") {
        return Err(usage(format!("--plot {}: what is drawn is SVG; give a name that ends in .svg", plot.display())));
    }
    let parent = plot.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(usage(format!("--plot {}: there is no directory {}", plot.display(), parent.display())));
    }
    Ok(())
}

fn run_single(args: &Args, target: &Target, spec: &BenchSpec, cancel: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let bar = Bar::start("measuring");
    let measured = target.measure(spec, cancel, &|fraction| bar.set(fraction));
    bar.finish();
    let target::Measured { report, moments, begun, pools, server_gone } = measured?;
    if let Some(path) = &args.series {
        write_series(path, &moments, begun).with_context(|| format!("cannot write to {}", path.display()))?;
    }
    match args.output {
        Output::Human => {
            let pools = pools.iter().map(|pool| pool.line() + "\n").collect::<String>();
            output::print(&(text::single(&report, args.verbose, server_gone) + &pools))?;
        }
        Output::Json => print_json(&WithPools { report: &report, pools })?,
    }
    if server_gone {
        bail!("the server ended the connection");
    }
    let first = report.first_mismatch.or(report.first_error).unwrap_or_default();
    if report.errors > 0 || report.mismatches > 0 {
        bail!("{} requests failed, {} blocks held wrong data: {first}", report.errors, report.mismatches);
    }
    Ok(())
}

/// A report with the pools of contexts of a server of this process.
#[derive(Serialize)]
struct WithPools<'a> {
    #[serde(flatten)]
    report: &'a BenchReport,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pools: Vec<served::Pool>,
}

/// As `--series` says.
fn write_series(path: &Path, moments: &[Moment], begun: SystemTime) -> anyhow::Result<()> {
    let begun_us = begun.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
    let mut lines =
        format!("{}\n", serde_json::json!({ "begun_us": begun_us as u64, "width_ms": MOMENT.as_millis() as u64 }));
    for moment in moments {
        lines += &serde_json::to_string(moment)?;
        lines.push('\n');
    }
    Ok(std::fs::write(path, lines)?)
}

fn run_series(args: &Args, targets: &[Target], spec: &BenchSpec, cancel: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let bar = Bar::start("measuring");
    let rounds = if targets.len() > 1 { args.pairs.unwrap_or(PAIRS) } else { 1 };
    let measured = Plan { targets, depths: &args.all_depths(), rounds, spec }.run(&bar, cancel);
    bar.finish();
    let series = measured?;
    if let Some(path) = &args.plot {
        let svg = plot(&series, spec).to_svg();
        std::fs::write(path, svg).with_context(|| format!("cannot write the plot to {}", path.display()))?;
    }
    match args.output {
        Output::Human => output::print(&text::series(&series, args.verbose)),
        Output::Json => print_json(&series),
    }
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    output::print(&format!("{}\n", serde_json::to_string_pretty(value)?))
}

fn plot(series: &Series, spec: &BenchSpec) -> Plot {
    let first = series.depths.first().and_then(|depth| depth.sides.first());
    let each = match spec.stop {
        Stop::Runtime(time) => format!("{} s", time.as_secs_f64()),
        Stop::Requests(count) => format!("{count} requests"),
        Stop::OnePass => "one pass".to_owned(),
    };
    let subtitle = match first.map_or(0, |side| side.runs.len()) {
        0 | 1 => format!("{each} at each depth"),
        runs => format!("Medians of {runs} interleaved rounds of {each} each; bands from least to most"),
    };
    Plot {
        title: first.and_then(|side| side.runs.first()).map(text::workload).unwrap_or_default(),
        subtitle,
        block_bytes: spec.block_bytes,
        curves: series.curves(),
    }
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
    let (time, warmup) = if args.is_series() { (SERIES_SECONDS, SERIES_SECONDS / 10.0) } else { (SINGLE_SECONDS, 0.0) };
    let runtime = Stop::Runtime(seconds("--time", args.time.unwrap_or(time))?);
    let mut spec = BenchSpec::default();
    spec.queue_depth = args.depth;
    spec.queues = args.queues.into();
    spec.block_bytes = block_bytes;
    spec.read_percent = read_percent;
    spec.pattern = if random { Pattern::Random { seed: args.seed } } else { Pattern::Sequential };
    spec.length_bytes = args.size.as_deref().map(parse_size).transpose()?;
    spec.stop = args.count.map_or(runtime, Stop::Requests);
    spec.warmup = seconds("--warmup", args.warmup.unwrap_or(warmup))?;
    spec.flush_every = args.flush_every;
    (spec.maps, spec.touch) = (args.maps, args.touch);
    spec.moments = args.series.as_ref().map(|_| MOMENT);
    spec.verify = args.verify.then_some(Verify::new(args.seed, Initial::Unknown));
    Ok(spec)
}
