//! `ringdisk rebase`: gives an overlay another backing file, in qemu-img's words.

use crate::arguments::name_text;
use crate::images::{BackingArgs, backing_name, check_backing_format, image_name, opener};
use crate::output::{ProgressArgs, Watch};
use crate::threads::Reactors;
use anyhow::bail;
use image::Backing;
use jobs::RebaseOptions;
use std::path::PathBuf;

/// Give an overlay another backing file.
///
/// The contents of the overlay never change: data that the new file holds differently are copied into the overlay
/// first. If a rebase was interrupted, run it again.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the overlay; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Cache mode for writing: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Cache mode for reading the new backing file.
    #[arg(short = 'T', long = "backing-cache", value_name = "CACHE", default_value = "writeback")]
    source_cache: String,
    /// The new backing file; a relative name is relative to FILE, an empty one means none.
    #[arg(short, long, value_name = "FILE", value_parser = name_text())]
    backing: Option<String>,
    /// Format of the new backing file.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    backing_format: Option<String>,
    /// Only change the name: both backing files are trusted to hold the same data. Neither is opened.
    #[arg(short = 'u', long = "backing-unsafe")]
    unsafe_backing: bool,
    /// Compress the data that are copied into the overlay.
    #[arg(short, long)]
    compress: bool,
    /// Read the new backing file even if another process writes it.
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    gate: BackingArgs,
    /// Go on although internal snapshots of the overlay will show other contents.
    #[arg(long)]
    change_snapshots: bool,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The overlay.
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.backing.is_none() && !args.unsafe_backing {
        bail!("Must specify backing file (-b) or use unsafe mode (-u)");
    }
    let (file, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    let backing = match args.backing.as_deref().unwrap_or_default() {
        "" => None,
        name => {
            let Some(format) = &args.backing_format else {
                bail!("Could not change the backing file to '{name}': backing format must be specified");
            };
            match args.unsafe_backing {
                true => check_backing_format(format)?,
                // An unsupported format is refused before anything is copied.
                false => drop(format.parse::<image::Format>()?),
            }
            Some(Backing { file: backing_name(name, !args.unsafe_backing)?, format: Some(format.clone()) })
        }
    };
    let (writing, reading) = (opener(&args.cache)?, opener(&args.source_cache)?);
    let reading = if args.force_share { reading.without_locks() } else { reading };
    let mut options = RebaseOptions::new(file);
    options.format = format;
    options.backing = backing;
    options.name_only = args.unsafe_backing;
    options.compress = args.compress;
    options.allow_backing = args.gate.policy()?;
    options.change_snapshots = args.change_snapshots;
    let reactors = Reactors::start("rebase")?;
    let mut watch = Watch::start(&args.progress)?;
    let done = watch.run(|control| jobs::rebase(&options, &writing, &reading, &reactors.handles(), control));
    reactors.stop()?;
    watch.resumable(done, &args.file)
}
