//! `ringdisk convert`: a disk copied into another image, in qemu-img's words.

use crate::tool::{OpenArgs, ProgressArgs, Reactors, Watch, open_writable, parse_format, sync_directory};
use anyhow::{Context, bail};
use block::Disk;
use daemon::parse_size;
use image::{Format, Image};
use jobs::ConvertOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Copy a disk into a new image, sparse where it is sparse. A target that exists is overwritten; half a target is
/// removed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; guessed from its contents where not given.
    #[arg(short, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the target: raw or qcow2.
    #[arg(short = 'O', value_name = "FORMAT", default_value = "raw")]
    output_format: String,
    /// Options of the target's format, key=value,...
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// The image that the target becomes an overlay of: only what the source's top layer holds is copied.
    #[arg(short = 'B', short_alias = 'b', long, value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    backing_format: Option<String>,
    /// Write into the target that exists; do not create it.
    #[arg(short = 'n')]
    no_create: bool,
    /// The existing target (-n) reads as zeros everywhere.
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Zeros from this length on (4k) are left out; 0 writes everything as data.
    #[arg(short = 'S', value_name = "SIZE")]
    sparse: Option<String>,
    /// Requests in flight, 1 to 16 on each thread.
    #[arg(short = 'm', value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    requests: u8,
    /// Write in any order (always so).
    #[arg(short = 'W')]
    any_order: bool,
    /// Cache mode of the target: writeback, none, writethrough, directsync, unsafe (it is not made durable).
    #[arg(short = 't', value_name = "CACHE", default_value = "writeback")]
    target_cache: String,
    /// Compress what gets smaller by it, cluster by cluster (qcow2).
    #[arg(short = 'c')]
    compress: bool,
    /// Copy the disk as it was at a snapshot: an id, a name, or snapshot.id=ID,snapshot.name=NAME.
    #[arg(short = 'l', value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Try to let the host copy (taken for a wish: the copy is made through memory).
    #[arg(short = 'C')]
    copy_offload: bool,
    /// At most so many bytes of data a second.
    #[arg(short = 'r', value_name = "RATE")]
    rate: Option<String>,
    /// Copy the persistent bitmaps of the source's top layer too.
    #[arg(long)]
    bitmaps: bool,
    /// Go on after errors (not supported).
    #[arg(long)]
    salvage: bool,
    /// TARGET is a description of an image (not supported).
    #[arg(long)]
    target_image_opts: bool,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The source.
    source: PathBuf,
    /// The target.
    target: PathBuf,
}

impl Args {
    fn refuse_unsupported(&self) -> anyhow::Result<()> {
        let unsupported = [(self.salvage, "--salvage"), (self.target_image_opts, "--target-image-opts")];
        match unsupported.iter().find(|(wanted, _)| *wanted) {
            Some((_, what)) => bail!("convert: {what} is not supported"),
            None => Ok(()),
        }
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    args.refuse_unsupported()?;
    let format: Format = args.output_format.parse()?;
    let backing_format = parse_format(args.backing_format.as_deref())?;
    let options = ConvertOptions {
        sparse_bytes: parse_size(args.sparse.as_deref().unwrap_or("4k"))?,
        target_is_new: !args.no_create,
        target_is_zero: !args.no_create || args.target_is_zero,
        top_only: args.backing.is_some(),
        compress: args.compress,
        depth: usize::from(args.requests),
        rate: args.rate.as_deref().map(parse_size).transpose().context("Invalid rate limit specified")?,
    };
    if args.copy_offload && args.sparse.is_some() {
        bail!("Cannot enable copy offloading when -S is used");
    }
    if args.no_create && !args.options.is_empty() {
        bail!("convert: -n takes the target as it is, -o has no meaning with it");
    }
    if args.compress && format != Format::Qcow2 {
        bail!("Compression not supported for this file format");
    }
    let source = args.open.open_at(&args.source, args.format.as_deref(), &[], args.snapshot.as_deref())?;
    refuse_same_file(&source, &args.target)?;
    if args.bitmaps {
        super::bitmap::refuse_without_bitmaps(&source, format)?;
    }
    let mut watch = Watch::start(&args.progress)?;
    if !args.no_create {
        let size = source.info().size_bytes;
        let backing = args.backing.as_deref();
        super::create::target(&args.target, format, &args.options, backing, backing_format, size)?;
    }
    let copied = copy(args, format, &source, &options, &mut watch);
    let Err(error) = copied else { return sync_directory(&args.target) };
    Err(match args.no_create {
        true => {
            let what = if watch.was_interrupted() { error.context("interrupted") } else { error };
            what.context(format!("'{}' is incomplete", args.target.display()))
        }
        false => remove_target(&args.target, error, watch.was_interrupted()),
    })
}

/// Half a target is of no use.
pub(super) fn remove_target(target: &Path, error: anyhow::Error, interrupted: bool) -> anyhow::Error {
    let what = if interrupted { error.context("interrupted") } else { error };
    match std::fs::metadata(target).is_ok_and(|meta| meta.is_file()) {
        false => what.context(format!("'{}' is incomplete", target.display())),
        true => match std::fs::remove_file(target) {
            Ok(()) => what.context(format!("'{}' was removed again", target.display())),
            Err(_) => what.context(format!("'{}' is incomplete and could not be removed", target.display())),
        },
    }
}

fn copy(
    args: &Args,
    format: Format,
    source: &Arc<Image>,
    options: &ConvertOptions,
    watch: &mut Watch,
) -> anyhow::Result<()> {
    // The user named the backing file and the data file, so they may be opened wherever they lie.
    let allow = if args.backing.is_some() || !args.no_create { "any" } else { &args.open.allow_backing };
    let target = open_writable(&args.target, format, &args.target_cache, allow)?;
    let reactors = Reactors::start("convert")?;
    let done = watch.run(|control| jobs::convert(source, &target, options, &reactors.handles(), control));
    reactors.stop()?;
    done?;
    drop(target);
    if args.bitmaps { super::bitmap::copy_all(source, &args.target) } else { Ok(()) }
}

/// A source that is overwritten would be lost.
pub(super) fn refuse_same_file(source: &Image, target: &Path) -> anyhow::Result<()> {
    if !target.exists() {
        return Ok(());
    }
    let target_path = target.canonicalize().with_context(|| format!("cannot find '{}'", target.display()))?;
    if source.paths().any(|path| path == target_path) {
        bail!("'{}' is the source, or a file that it rests on", target.display());
    }
    Ok(())
}
