//! `ringdisk measure`: how large a file a new image would be, as qemu-img tells it.

use crate::images::{NewImage, OpenArgs};
use crate::output::{self, ProgressArgs, Watch, usage};
use anyhow::bail;
use block::Disk;
use drive::parse_size;
use format_qcow2::Preallocation;
use image::{Format, Image};
use jobs::{Measure, Target};
use std::path::PathBuf;

/// Tell how much space a new image would take, for a disk of some size or for a copy of an image.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; guessed from its contents where not given.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the new image: raw or qcow2.
    #[arg(short = 'O', long, alias = "target-format", value_name = "FORMAT", default_value = "raw")]
    output_format: String,
    /// Options of the new image, key=value,..., as create takes them. A size among them changes nothing.
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

const EXTENDED_L2_CLUSTER_BYTES_MIN: u64 = 16 << 10;

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
    let new = NewImage::parse(args.output_format.parse()?, &args.options)?;
    let target = target(&new)?;
    // Whatever the source holds.
    let is_full = matches!(new.preallocation()?, Preallocation::Falloc | Preallocation::Full);
    let mut bitmaps = None;
    let Measure { mut required_bytes, fully_allocated_bytes } = match (&args.size, &args.file) {
        (Some(size), _) => jobs::measure_size(parse_size(size)?.next_multiple_of(block::SECTOR_BYTES), target)?,
        (None, Some(file)) => {
            let image = args.open.open_at(file, args.format.as_deref(), &[], args.snapshot.as_deref())?;
            if let (Target::Qcow2 { cluster_bytes, .. }, 3) = (target, new.version) {
                bitmaps = bitmaps_bytes(&image, cluster_bytes)?;
            }
            match is_full {
                true => jobs::measure_size(image.info().size_bytes, target)?,
                false => Watch::start(&args.progress)?.run(|control| jobs::measure(&image, target, control))?,
            }
        }
        (None, None) => bail!("measure: give --size or an image"),
    };
    if is_full {
        required_bytes = fully_allocated_bytes;
    }
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

/// What the source's bitmaps would take; `None` where it is of a kind that keeps none.
fn bitmaps_bytes(source: &Image, cluster_bytes: u64) -> anyhow::Result<Option<u64>> {
    const ROW_BYTES: u64 = 24;
    if source.qcow2_header().is_none_or(|header| header.version < 3) {
        return Ok(None);
    }
    let (mut total, mut rows) = (0, 0);
    for bitmap in source.bitmaps()? {
        let bits = source.info().size_bytes.div_ceil(bitmap.granularity_bytes()).div_ceil(8);
        let clusters = bits.div_ceil(cluster_bytes);
        total += (clusters + (clusters * 8).div_ceil(cluster_bytes)) * cluster_bytes;
        rows += (ROW_BYTES + bitmap.name.len() as u64).next_multiple_of(8);
    }
    Ok(Some(total + rows.next_multiple_of(cluster_bytes)))
}

/// What is to be measured, in qemu-img's terms: only what changes the sizes has to go together.
fn target(image: &NewImage) -> anyhow::Result<Target> {
    if image.format == Format::Raw {
        return Ok(Target::Raw);
    }
    if image.version == 2 && image.refcount_bits != 16 {
        return Err(usage("refcount_bits other than 16 needs compat=1.1"));
    }
    let (cluster_bytes, extended_l2) = (1 << image.cluster_bits, image.extended_l2.is_on);
    if extended_l2 && cluster_bytes < EXTENDED_L2_CLUSTER_BYTES_MIN {
        return Err(usage(format!("extended_l2 needs a cluster_size of at least {EXTENDED_L2_CLUSTER_BYTES_MIN}")));
    }
    let refcount_bits = u64::from(image.refcount_bits);
    Ok(Target::Qcow2 { cluster_bytes, refcount_bits, has_backing: image.backing_file.is_some(), extended_l2 })
}
