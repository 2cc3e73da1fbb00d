//! `ringdisk commit`: writes an overlay's data into the image below it, in qemu-img's words.

use crate::images::{BackingArgs, image_name, opener};
use crate::output::{self, ProgressArgs, Watch};
use crate::threads::Reactors;
use drive::parse_size;
use jobs::CommitOptions;
use std::path::PathBuf;

/// Write the data of an overlay to its backing file, then empty the overlay.
///
/// The contents of the overlay never change. If a commit was interrupted, run it again.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the overlay; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Cache mode for writing: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// The file of the chain that takes the data; the overlay is not emptied then.
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Do not empty the overlay.
    #[arg(short = 'd', long = "drop")]
    keep: bool,
    /// At most this many bytes a second.
    #[arg(short, long, value_name = "RATE")]
    rate: Option<String>,
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
    let (file, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    let opener = opener(&args.cache)?;
    let mut options = CommitOptions::new(file);
    options.format = format;
    options.base = args.base.clone();
    options.keep = args.keep || args.base.is_some();
    options.allow_backing = args.gate.policy()?;
    options.listed = args.base.iter().cloned().collect();
    options.change_snapshots = args.change_snapshots;
    options.rate = args.rate.as_deref().map(parse_size).transpose()?;
    let reactors = Reactors::start("commit")?;
    let mut watch = Watch::start(&args.progress)?;
    let done = watch.run(|control| jobs::commit(&options, &opener, &reactors.handles(), control));
    reactors.stop()?;
    watch.resumable(done, &args.file)?;
    if args.progress.quiet { Ok(()) } else { output::print("Image committed.\n") }
}
