//! `ringdisk amend`: changes options of an existing image, with qemu-img's output and exit codes.

use crate::images::{BackingArgs, asks_for_help, image_name, opener, parse_format, switch};
use crate::output::{self, ProgressArgs, Watch};
use anyhow::bail;
use drive::{parse_integer, parse_options, parse_size};
use image::{Amend, Format, ImageOptions};
use std::path::PathBuf;

/// Change options of a disk that nobody uses.
///
/// These are compat, data_file, data_file_raw, lazy_refcounts, refcount_bits and size. A power cut leaves the old image
/// or the new one.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// The options to change, key=value,...; `help` lists them.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Cache mode: writeback, none, writethrough, directsync, unsafe.
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    cache: String,
    /// Allow changes that could lose access to an encrypted image (not supported here).
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    gate: BackingArgs,
    /// FILE is a description of an image: driver=FORMAT,file.filename=FILE.
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image.
    file: Option<PathBuf>,
}

/// Options that exist only when an image is created.
const FOR_CREATION: [&str; 9] = [
    "cluster_size",
    "preallocation",
    "compression_type",
    "extended_l2",
    "encryption",
    "nocow",
    "extent_size_hint",
    "encrypt.format",
    "encrypt.key-secret",
];

const HELP: &str = "\
Amend options for 'qcow2':
  compat=<str>           - Compatibility level (v2 [0.10] or v3 [1.1])
  data_file=<str>        - File name of an external data file
  data_file_raw=<bool (on/off)> - The external data file must stay valid as a raw image
  lazy_refcounts=<bool (on/off)> - Postpone refcount updates
  refcount_bits=<num>    - Width of a reference count entry in bits
  size=<size>            - Virtual disk size
";

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.options.is_empty() {
        return Err(output::usage_of("amend", "Must specify options (-o)"));
    }
    let asks_for_help = asks_for_help(&args.options);
    if let Some(format) = parse_format(args.format.as_deref())?.filter(|_| asks_for_help) {
        return help(Some(format));
    }
    let Some(file) = &args.file else { return Err(output::usage("Expecting one image file name")) };
    let (file, format) = image_name(file, args.format.as_deref(), args.image_opts)?.whole()?;
    let mut options = ImageOptions::new(file);
    options.format = format;
    options.allow_backing = args.gate.policy()?;
    let image = image::open(&options, &opener(&args.cache)?)?;
    if asks_for_help || !image.format().is_some_and(Format::can_be_amended) {
        return help(image.format());
    }
    let amend = parse(&args.options)?;
    let mut watch = Watch::start(&args.progress)?;
    Ok(watch.run(|control| jobs::amend(image, &amend, control))?)
}

fn help(format: Option<Format>) -> anyhow::Result<()> {
    match format {
        Some(format) if format.can_be_amended() => output::print(HELP),
        _ => bail!("Format driver 'raw' does not support option amendment"),
    }
}

fn parse(options: &[String]) -> anyhow::Result<Amend> {
    let mut amend = Amend::default();
    for text in options {
        for pair in parse_options(text)? {
            let (key, value) = (pair.key.as_str(), pair.value.as_str());
            match key {
                "compat" => {
                    amend.version = Some(match value {
                        "0.10" | "v2" => 2,
                        "1.1" | "v3" => 3,
                        _ => bail!("Unknown compatibility level {value}"),
                    });
                }
                "refcount_bits" => match parse_integer(value).map(u32::try_from) {
                    Ok(Ok(bits)) => amend.refcount_bits = Some(bits),
                    _ => bail!("Parameter 'refcount_bits' expects a number"),
                },
                "lazy_refcounts" => amend.lazy_refcounts = Some(switch(key, value)?),
                // As in qemu-img, zero means that the size stays.
                "size" => amend.size_bytes = Some(parse_size(value)?).filter(|bytes| *bytes > 0),
                "backing_file" | "backing_fmt" => {
                    bail!("Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.")
                }
                "data_file" => amend.data_file = Some(value.to_owned()),
                "data_file_raw" => amend.data_file_raw = Some(switch(key, value)?),
                _ if FOR_CREATION.contains(&key) => {
                    bail!("Invalid parameter '{key}'\nThis option is only supported for image creation")
                }
                _ if key.starts_with("encrypt.") => bail!("{key}: encrypted images are not supported"),
                _ => bail!("Invalid parameter '{key}'"),
            }
        }
    }
    Ok(amend)
}
