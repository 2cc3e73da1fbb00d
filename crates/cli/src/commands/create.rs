//! `ringdisk create`: makes an image, in qemu-img's words.

use crate::arguments::name_text;
use crate::images::{NewImage, asks_for_help, create, file_name, opened_name, options_help};
use crate::output::{self, ProgressArgs, Watch, usage};
use drive::parse_size;
use image::Format;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Create an image.
///
/// An existing file is overwritten, unless it is in use. Ctrl-C removes new files.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the new image: raw or qcow2.
    #[arg(short, long, value_name = "FORMAT", default_value = "raw")]
    format: String,
    /// Options of the format, key=value,...: "help" lists them, and needs no FILE.
    #[arg(short, long, value_name = "OPTIONS", value_parser = name_text())]
    options: Vec<String>,
    /// The backing file: the new image becomes an overlay of it. A relative name is relative to FILE.
    #[arg(short, long, value_name = "FILE", value_parser = name_text())]
    backing: Option<String>,
    /// Format of the backing file.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    backing_format: Option<String>,
    /// Do not open the backing file; it may be missing, and SIZE has to be given.
    #[arg(short = 'u', long, alias = "backing-unsafe")]
    unsafe_backing: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    /// The image to create.
    #[arg(required_unless_present = "options")]
    file: Option<PathBuf>,
    /// Size of the disk: bytes, or with k, M, G, T; by default the backing file's.
    size: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let format: Format = args.format.parse()?;
    if asks_for_help(&args.options) {
        return output::print(&options_help(format, args.file.is_some()));
    }
    let Some(said) = &args.file else { return Err(usage("Expecting image file name")) };
    let file = &file_name(said)?;
    let size_bytes = args.size.as_deref().map(parse_size).transpose()?;
    let mut wanted = NewImage::parse(format, &args.options)?;
    if size_bytes.is_some() {
        if wanted.size_bytes.is_some() {
            return Err(usage(format!("{}: The image size must be specified only once", opened_name(file))));
        }
        wanted.size_bytes = size_bytes;
    }
    wanted.backing_file = args.backing.clone().or(wanted.backing_file);
    wanted.backing_format = args.backing_format.clone().or(wanted.backing_format);
    let mut announce = |new: &NewImage| match args.progress.quiet {
        true => Ok(()),
        false => output::print(&announcement(new, said)),
    };
    create(file, &mut wanted, !args.unsafe_backing, &mut announce, &mut Watch::start(&args.progress)?)?;
    Ok(())
}

/// Returns qemu-img's message; the size is the requested one.
fn announcement(new: &NewImage, file: &Path) -> String {
    let mut text = format!("Formatting '{}', fmt={}", opened_name(file), new.format);
    let mut say = |key: &str, value: Option<&str>| {
        if let Some(value) = value {
            let _ = write!(text, " {key}={}", output::with_bytes_shown(value));
        }
    };
    let is_qcow2 = new.format == Format::Qcow2;
    let hint = new.extent_size_hint.map(|bytes| bytes.to_string());
    if is_qcow2 {
        say("encryption", new.encryption.said());
        say("cluster_size", Some(&new.cluster_bytes.to_string()));
        say("extended_l2", new.extended_l2.said().or(Some("off")));
        say("preallocation", new.preallocation.as_deref());
        say("compression_type", Some(new.compression.as_deref().unwrap_or("zlib")));
    }
    say("size", Some(&new.size_bytes.unwrap_or(0).to_string()));
    if !is_qcow2 {
        say("nocow", new.nocow.said());
        say("preallocation", new.preallocation.as_deref());
    }
    say("backing_file", new.backing_file.as_deref().map(image::shown).as_deref());
    say("backing_fmt", new.backing_format.as_deref());
    if is_qcow2 {
        say("compat", new.compat.as_deref());
        say("data_file", new.data_file.as_deref());
        say("data_file_raw", new.data_file_raw.said());
        say("lazy_refcounts", new.lazy_refcounts.said().or(Some("off")));
        say("refcount_bits", Some(&new.refcount_bits.to_string()));
        say("nocow", new.nocow.said());
    }
    say("extent_size_hint", hint.as_deref());
    text.push('\n');
    text
}
