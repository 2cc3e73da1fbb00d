//! `ringdisk resize`: more or less room on a disk that nobody uses.

use crate::image_name::ImageName;
use crate::output;
use anyhow::{Context, bail};
use daemon::{EngineOpener, parse_size};
use image::{Format, Opener, Role, inspect};
use std::path::PathBuf;

/// Change the size of a raw image. Growing adds zeros; --shrink allows to cut data off.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image; guessed from its contents where not given.
    #[arg(short, value_name = "FORMAT")]
    format: Option<String>,
    /// Allow the image to lose what lies behind its new end.
    #[arg(long)]
    shrink: bool,
    /// What to do with added space: off (others are not supported).
    #[arg(long, value_name = "MODE", default_value = "off")]
    preallocation: String,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    /// Say nothing.
    #[arg(short, long)]
    quiet: bool,
    /// The image.
    file: PathBuf,
    /// The new size, or with + or - how much more or less.
    #[arg(allow_hyphen_values = true)]
    size: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.preallocation != "off" {
        bail!("resize: --preallocation={} is not supported", args.preallocation);
    }
    let ImageName { path, format } = ImageName::of(&args.file, args.format.as_deref(), args.image_opts)?;
    let file = EngineOpener::default().open(&path, Role::Writable)?;
    let description = inspect(&path, &file, format)?;
    if description.format != Format::Raw {
        bail!("resize: {} images are not supported yet", description.format);
    }
    let old = description.virtual_size_bytes;
    let size = match (args.size.strip_prefix('+'), args.size.strip_prefix('-')) {
        (Some(more), _) => old.checked_add(parse_size(more)?).context("the new size is too large")?,
        (_, Some(less)) => match old.checked_sub(parse_size(less)?) {
            Some(size) => size,
            None => bail!("resize: New image size must be positive"),
        },
        _ => parse_size(&args.size)?,
    };
    jobs::resize_raw(file.as_ref(), size, args.shrink)?;
    if args.quiet { Ok(()) } else { output::print("Image resized.\n") }
}
