//! `ringdisk replay`: replays a write log onto a disk, or lists it.

use crate::images::{file_name, open_writable, opened_name};
use crate::output::{self, ProgressArgs, Watch};
use crate::threads::Reactors;
use anyhow::{Context, bail};
use image::{BackingPolicy, Format, LogReader, LoggedKind, LoggedRequest};
use jobs::JobDisk;
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Replay a write log onto a disk, up to any moment.
///
/// The log comes from a drive with filter=log:file=LOG, or from Linux's device-mapper target log-writes. The disk must
/// have the contents that the logged disk had when the log began.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the disk: raw or qcow2; guessed from its contents where not given.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// The first entry to replay.
    #[arg(long, value_name = "ENTRY", default_value_t = 0)]
    start: u64,
    /// Stop before this entry.
    #[arg(long, value_name = "ENTRY", conflicts_with = "flushes")]
    end: Option<u64>,
    /// Stop after this many flushes: a disk that loses power after them must have at least these contents.
    #[arg(long, value_name = "COUNT")]
    flushes: Option<u64>,
    /// List the entries instead of replaying them.
    #[arg(long, conflicts_with = "disk")]
    list: bool,
    /// Cache mode of the disk.
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The log.
    log: PathBuf,
    /// The disk.
    #[arg(required_unless_present = "list")]
    disk: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let end = match args.flushes {
        Some(flushes) => end_after(open_log(args)?, args.start, flushes)?,
        None => args.end.unwrap_or(u64::MAX),
    };
    let log = open_log(args)?;
    let entries = args.start..end.min(log.entries());
    match &args.disk {
        Some(disk) if !args.list => play(args, log, entries, disk),
        _ => list(log, entries),
    }
}

fn open_log(args: &Args) -> anyhow::Result<LogReader> {
    let name = || format!("'{}'", args.log.display());
    let file = File::open(&args.log).with_context(|| format!("cannot open {}", name()))?;
    LogReader::new(file).with_context(|| format!("cannot read {}", name()))
}

/// Returns the index of the entry behind the flush of this number, counted from `start`.
fn end_after(mut log: LogReader, start: u64, flushes: u64) -> anyhow::Result<u64> {
    let mut seen = 0;
    while let Some(request) = log.next_entry()? {
        if seen == flushes {
            return Ok(request.index);
        }
        seen += u64::from(request.index >= start && request.entry.kind == LoggedKind::Flush);
    }
    match seen == flushes {
        true => Ok(u64::MAX),
        false => bail!("the log has {seen} flushes from entry {start} on: --flushes {flushes} is too many"),
    }
}

fn play(args: &Args, log: LogReader, entries: std::ops::Range<u64>, disk: &Path) -> anyhow::Result<()> {
    let format = args.format.as_deref().map(str::parse::<Format>).transpose()?;
    let image = open_writable(opened_name(&file_name(disk)?), format, &args.cache, BackingPolicy::Deny, &[])?;
    let mut watch = Watch::start(&args.progress)?;
    let reactors = Reactors::start("replay")?;
    let handles = reactors.handles();
    let played = watch.run(|control| jobs::replay(log, entries, &JobDisk::from(&image), &handles, control));
    reactors.stop()?;
    Ok(played?)
}

fn list(mut log: LogReader, entries: std::ops::Range<u64>) -> anyhow::Result<()> {
    let mut text = String::new();
    while let Some(LoggedRequest { index, entry, .. }) = log.next_entry()? {
        if !entries.contains(&index) {
            continue;
        }
        let kind = match entry.kind {
            LoggedKind::Write { fua: false } => "write",
            LoggedKind::Write { fua: true } => "write,fua",
            LoggedKind::Flush => "flush",
            LoggedKind::Discard => "discard",
            LoggedKind::Mark => "mark",
        };
        writeln!(text, "{index} {kind} {} {}", entry.offset, entry.length_bytes)?;
        if text.len() > 1 << 16 {
            output::print(&text)?;
            text.clear();
        }
    }
    output::print(&text)
}
