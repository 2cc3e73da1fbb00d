//! `ringdisk dd`: copies a part of a disk into a new image, in qemu-img's words.

use crate::images::{
    OpenArgs, create_target, file_name, holds_old_bytes, image_name, leave_page_cache, open_writable, opened_name,
    refuse_same_file, remove_target, sync_directory,
};
use crate::output::{self, ProgressArgs, Watch};
use crate::threads::Reactors;
use anyhow::{anyhow, bail};
use block::{Disk, SECTOR_BYTES};
use drive::parse_size;
use engine::CacheMode;
use image::{BackingPolicy, Format, Image};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Copy blocks of a disk into a new image.
///
/// Takes bs=SIZE count=BLOCKS skip=BLOCKS if=FILE of=FILE.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; by default guessed from its contents.
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the target: raw or qcow2.
    #[arg(short = 'O', long, value_name = "FORMAT", default_value = "raw")]
    output_format: String,
    /// Cache mode of the target: writeback, none, writethrough, directsync, unsafe (it is not made durable).
    #[arg(short = 't', long, value_name = "CACHE", default_value = "writeback")]
    target_cache: String,
    #[command(flatten)]
    open: OpenArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    /// if=FILE and of=FILE, and perhaps bs=SIZE (512), count=BLOCKS, skip=BLOCKS.
    #[arg(required = true, value_name = "KEY=VALUE")]
    operands: Vec<String>,
}

/// The largest bs: the largest int of C.
const BLOCK_BYTES_MAX: u64 = i32::MAX as u64;

struct Operands {
    source: PathBuf,
    target: PathBuf,
    block_bytes: u64,
    count: Option<u64>,
    skip: u64,
}

impl Operands {
    fn parse(words: &[String]) -> anyhow::Result<Self> {
        let (mut source, mut target, mut block_bytes, mut count, mut skip) = (None, None, 512, None, 0);
        let is_block = |bytes: &u64| (1..=BLOCK_BYTES_MAX).contains(bytes);
        for word in words {
            let invalid = || anyhow!("invalid number: '{word}'");
            let Some((key, value)) = word.split_once('=') else { bail!("unrecognized operand {word}") };
            match key {
                "if" => source = Some(PathBuf::from(value)),
                "of" => target = Some(file_name(Path::new(value))?),
                "bs" => block_bytes = parse_size(value).ok().filter(is_block).ok_or_else(invalid)?,
                "count" => count = Some(parse_size(value).map_err(|_| invalid())?),
                "skip" => skip = parse_size(value).map_err(|_| invalid())?,
                _ => bail!("unrecognized operand {word}"),
            }
        }
        match (source, target) {
            (Some(source), Some(target)) => Ok(Self { source, target, block_bytes, count, skip }),
            _ => bail!("Must specify both input and output files"),
        }
    }

    /// Returns the range to copy of a disk of `size_bytes`. As in qemu-img, skipped bytes count as copied.
    fn part(&self, size_bytes: u64) -> Option<std::ops::Range<u64>> {
        let counted = self.count.and_then(|count| count.checked_mul(self.block_bytes));
        let end = counted.map_or(size_bytes, |counted| counted.min(size_bytes));
        let start = self.skip.checked_mul(self.block_bytes)?;
        (start <= end).then_some(start..end)
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let operands = Operands::parse(&args.operands)?;
    // This comes before the target is emptied.
    args.target_cache.parse::<CacheMode>()?;
    let source = args.open.open(&operands.source, args.format.as_deref(), &[])?;
    let format: Format = args.output_format.parse()?;
    let named = image_name(&operands.source, args.format.as_deref(), args.open.image_opts)?;
    refuse_same_file(&source, &opened_name(&operands.target))?;
    let part = operands.part(source.info().size_bytes);
    if part.is_none() {
        output::warn(&format!("{}: cannot skip to specified offset", named.file));
    }
    let part = part.unwrap_or(0..0);
    let size = (part.end - part.start).next_multiple_of(SECTOR_BYTES);
    let mut watch = Watch::start(&args.progress)?;
    create_target(&operands.target, format, &[], None, None, size, &mut watch.before())?;
    if let Err(error) = copy(args, &operands.target, format, &source, part, &mut watch) {
        return Err(remove_target(&operands.target, error, watch.was_interrupted(), true));
    }
    sync_directory(&operands.target)
}

fn copy(
    args: &Args,
    target: &Path,
    format: Format,
    source: &Arc<Image>,
    part: Range<u64>,
    watch: &mut Watch,
) -> anyhow::Result<()> {
    let target_is_zero = !holds_old_bytes(target, Some(format));
    let image = open_writable(opened_name(target), Some(format), &args.target_cache, BackingPolicy::Deny, &[])?;
    let reactors = Reactors::start("dd")?;
    let (from, handles) = (source.into(), reactors.handles());
    let done = watch.run(|control| jobs::dd(&from, part, &(&image).into(), target_is_zero, &handles, control));
    reactors.stop()?;
    done?;
    drop(image);
    leave_page_cache(target, &args.target_cache)
}
