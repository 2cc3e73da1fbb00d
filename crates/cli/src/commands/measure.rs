//! `ringdisk measure`: how large a new image's file would be, in qemu-img's words.

use crate::images::{NewImage, OpenArgs};
use crate::output::{self, ProgressArgs, Watch, usage};
use anyhow::bail;
use block::Disk;
use drive::parse_size;
use image::Measure;
use std::path::PathBuf;

/// Show how much space a new image would take.
///
/// The new image is an empty disk of some size, or a copy of an image.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the new image: raw or qcow2.
    #[arg(short = 'O', long, alias = "target-format", value_name = "FORMAT", default_value = "raw")]
    output_format: String,
    /// Options of the new image, key=value,..., as create takes them. A size among them has no effect.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Size of the disk, instead of an image.
    #[arg(short, long, value_name = "SIZE", conflicts_with = "file", required_unless_present = "file")]
    size: Option<String>,
    /// Measure the disk as it was at a snapshot: an id, a name, or snapshot.id=ID,snapshot.name=NAME.
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// How to print.
    #[arg(long, value_enum, default_value = "human")]
    output: Output,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image to copy.
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Human,
    Json,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let said_of_image = args.format.is_some() || args.snapshot.is_some() || args.open.image_opts;
    if args.file.is_none() && said_of_image {
        return Err(usage("--image-opts, -f, and -l require a filename argument."));
    }
    let format = args.output_format.parse()?;
    let open = |file| args.open.open_at(file, args.format.as_deref(), &[], args.snapshot.as_deref());
    let image = args.file.as_deref().map(open).transpose()?;
    let new = NewImage::parse(format, &args.options)?;
    let mut bitmaps = None;
    let measured = match (&args.size, image) {
        (Some(size), _) => new.options_of_size(parse_size(size)?)?.measure(0)?,
        (None, Some(image)) => {
            let target = new.options_of_size(image.info().size_bytes)?;
            // Bitmaps are reported only if the source's format has them.
            if image.qcow2_header().is_some_and(|header| header.version >= 3) {
                bitmaps = target.measure_bitmaps(&image.bitmaps()?);
            }
            Watch::start(&args.progress)?.run(|control| jobs::measure(image.as_ref(), &target, control))?
        }
        (None, None) => bail!("measure: give --size or an image"),
    };
    let Measure { required_bytes, fully_allocated_bytes } = measured;
    output::print(&match args.output {
        Output::Human => {
            let bitmaps = bitmaps.map(|bytes| format!("bitmaps size: {bytes}\n")).unwrap_or_default();
            format!("required size: {required_bytes}\nfully allocated size: {fully_allocated_bytes}\n{bitmaps}")
        }
        Output::Json => {
            let bitmaps = bitmaps.map(|bytes| format!("    \"bitmaps\": {bytes},\n")).unwrap_or_default();
            format!(
                "{{\n{bitmaps}    \"required\": {required_bytes},\n    \"fully-allocated\": {fully_allocated_bytes}\n}}\n"
            )
        }
    })
}
