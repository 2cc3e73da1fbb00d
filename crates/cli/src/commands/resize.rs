//! `ringdisk resize`: changes the size of a disk that nobody uses.

use crate::images::{BackingArgs, files, image_name};
use crate::output::{self, ProgressArgs, Watch};
use anyhow::{Context, bail};
use block::Disk;
use drive::parse_size;
use image::{GrowBy, ImageOptions};
use std::path::PathBuf;

/// Change the size of a disk that nobody uses.
///
/// Growing adds zeros; --shrink allows cutting data off. A power cut leaves the old disk or the new one.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Allow the image to lose the data behind its new end.
    #[arg(long)]
    shrink: bool,
    /// What to do with added space: off, metadata (qcow2), falloc, full.
    #[arg(long, value_name = "MODE", default_value = "off")]
    preallocation: String,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    gate: BackingArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: PathBuf,
    /// The new size, or with + or - the change.
    #[arg(allow_hyphen_values = true)]
    size: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let preallocation = match args.preallocation.as_str() {
        "off" => GrowBy::Nothing,
        "metadata" => GrowBy::Tables,
        "falloc" => GrowBy::Space,
        "full" => GrowBy::Zeros,
        other => bail!("Invalid preallocation mode '{other}'"),
    };
    let (file, format) = image_name(&args.file, args.format.as_deref(), args.image_opts)?.whole()?;
    let mut options = ImageOptions::new(file);
    options.format = format;
    options.allow_backing = args.gate.policy()?;
    let image = image::open(&options, &files())?;
    let size = new_size(&args.size, image.info().size_bytes)?;
    if size < image.info().size_bytes && !args.shrink {
        bail!("Use the --shrink option to perform a shrink operation.");
    }
    let mut watch = Watch::start(&args.progress)?;
    watch.run(|control| jobs::resize(image, size, args.shrink, preallocation, control))?;
    if args.progress.quiet { Ok(()) } else { output::print("Image resized.\n") }
}

fn new_size(text: &str, old: u64) -> anyhow::Result<u64> {
    let size = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => old.checked_add(parse_size(more)?).context("the new size is too large")?,
        (_, Some(less)) => old.saturating_sub(parse_size(less)?),
        _ => parse_size(text)?,
    };
    match size {
        0 => bail!("New image size must be positive"),
        size => Ok(size),
    }
}
