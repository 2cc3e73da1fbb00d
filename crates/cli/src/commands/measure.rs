//! `ringdisk measure`: how large a file a new image would be, as qemu-img tells it.

use crate::output;
use crate::tool::{OpenArgs, ProgressArgs, Watch};
use anyhow::bail;
use daemon::{parse_key_values, parse_size};
use image::Format;
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
    /// Measure a snapshot (not supported yet).
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
    if args.snapshot.is_some() {
        bail!("measure: -l (snapshots) is not supported");
    }
    let format: Format = args.output_format.parse()?;
    let target = target(format, &args.options)?;
    let Measure { required_bytes, fully_allocated_bytes } = match (&args.size, &args.file) {
        (Some(size), _) => jobs::measure_size(parse_size(size)?.next_multiple_of(block::SECTOR_BYTES), target),
        (None, Some(file)) => {
            let image = args.open.open(file, args.format.as_deref(), &[])?;
            Watch::start(&args.progress)?.run(|control| jobs::measure(&image, target, control))?
        }
        (None, None) => bail!("measure: give --size or an image"),
    };
    output::print(&match args.output {
        Output::Human => format!("required size: {required_bytes}\nfully allocated size: {fully_allocated_bytes}\n"),
        Output::Json => {
            format!("{{\n    \"required\": {required_bytes},\n    \"fully-allocated\": {fully_allocated_bytes}\n}}\n")
        }
    })
}

fn target(format: Format, options: &[String]) -> anyhow::Result<Target> {
    let (mut cluster_bytes, mut refcount_bits, mut has_backing) = (64 << 10, 16, false);
    for text in options {
        for pair in parse_key_values(text)? {
            match pair.key.as_str() {
                "cluster_size" => cluster_bytes = parse_size(&pair.value)?,
                "refcount_bits" => refcount_bits = parse_size(&pair.value)?,
                "backing_file" => has_backing = true,
                "compat" | "compression_type" | "backing_fmt" => {}
                other => bail!("measure: option '{other}' is not supported"),
            }
        }
    }
    if format == Format::Raw {
        return Ok(Target::Raw);
    }
    if !cluster_bytes.is_power_of_two() || !(512..=2 << 20).contains(&cluster_bytes) {
        bail!("measure: cluster_size takes a power of two from 512 to 2M");
    }
    if !refcount_bits.is_power_of_two() || refcount_bits > 64 {
        bail!("measure: refcount_bits takes 1, 2, 4, 8, 16, 32 or 64");
    }
    Ok(Target::Qcow2 { cluster_bytes, refcount_bits, has_backing })
}
