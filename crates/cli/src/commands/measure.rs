//! `ringdisk measure`: how large a file a new image would be, as qemu-img tells it.

use crate::output;
use crate::tool::{OpenArgs, ProgressArgs, Watch};
use anyhow::bail;
use block::Disk;
use daemon::{parse_key_values, parse_size};
use image::{Format, Image};
use jobs::{Measure, Target};
use std::path::PathBuf;

/// Tell how much space a new image would take, for a disk of some size or for a copy of an image.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; guessed from its contents where not given.
    #[arg(short, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the new image: raw or qcow2.
    #[arg(short = 'O', value_name = "FORMAT", default_value = "raw")]
    output_format: String,
    /// Options of the new image: cluster_size, refcount_bits, compat, backing_file.
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Size of the disk, instead of an image.
    #[arg(long, value_name = "SIZE", conflicts_with = "file", required_unless_present = "file")]
    size: Option<String>,
    /// Measure the disk as it was at a snapshot: an id, a name, or snapshot.id=ID,snapshot.name=NAME.
    #[arg(short = 'l', value_name = "SNAPSHOT")]
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
    let format: Format = args.output_format.parse()?;
    let (target, version) = target(format, &args.options)?;
    let mut bitmaps = None;
    let Measure { required_bytes, fully_allocated_bytes } = match (&args.size, &args.file) {
        (Some(size), _) => jobs::measure_size(parse_size(size)?.next_multiple_of(block::SECTOR_BYTES), target),
        (None, Some(file)) => {
            let image = args.open.open_at(file, args.format.as_deref(), &[], args.snapshot.as_deref())?;
            if let (Target::Qcow2 { cluster_bytes, .. }, 3) = (target, version) {
                bitmaps = bitmaps_bytes(&image, cluster_bytes)?;
            }
            Watch::start(&args.progress)?.run(|control| jobs::measure(&image, target, control))?
        }
        (None, None) => bail!("measure: give --size or an image"),
    };
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

/// The new image, and its version.
fn target(format: Format, options: &[String]) -> anyhow::Result<(Target, u32)> {
    let mut version = 3;
    let (mut cluster_bytes, mut refcount_bits, mut has_backing, mut extended_l2) = (64 << 10, 16, false, false);
    for text in options {
        for pair in parse_key_values(text)? {
            match pair.key.as_str() {
                "cluster_size" => cluster_bytes = parse_size(&pair.value)?,
                "refcount_bits" => refcount_bits = parse_size(&pair.value)?,
                "backing_file" => has_backing = true,
                "compat" => version = if matches!(pair.value.as_str(), "0.10" | "v2") { 2 } else { 3 },
                "extended_l2" => extended_l2 = pair.value == "on",
                "compression_type" | "backing_fmt" | "lazy_refcounts" => {}
                other => bail!("measure: option '{other}' is not supported"),
            }
        }
    }
    if format == Format::Raw {
        return Ok((Target::Raw, version));
    }
    if !cluster_bytes.is_power_of_two() || !(512..=2 << 20).contains(&cluster_bytes) {
        bail!("measure: cluster_size takes a power of two from 512 to 2M");
    }
    if !refcount_bits.is_power_of_two() || refcount_bits > 64 {
        bail!("measure: refcount_bits takes 1, 2, 4, 8, 16, 32 or 64");
    }
    if extended_l2 && (cluster_bytes < 16384 || version == 2) {
        bail!("measure: extended_l2 needs a cluster_size of at least 16384 and compat=1.1");
    }
    Ok((Target::Qcow2 { cluster_bytes, refcount_bits, has_backing, extended_l2 }, version))
}
