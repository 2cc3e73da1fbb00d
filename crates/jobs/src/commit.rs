//! Committing: the contents of an overlay go into a layer below it.
//!
//! Seen through the overlay the disk never changes, not even after a power cut. A commit writes to the base only ranges
//! that the layers above it hold. These layers go on hiding them until the base is durable. Then the top is emptied,
//! and the disk shows the same. A commit that was broken off is simply run again.

use crate::closed::closed;
use crate::failure::failed;
use crate::kept_snapshots::keep_snapshots;
use crate::pipeline::{Pipeline, Spread, Worker};
use crate::rate::RateLimit;
use crate::shared_opener::SharedOpener;
use crate::{Control, JobDisk};
use block::{Disk, DiskIo, Error, ErrorKind, Op, OpFlags, ReactorHandle, Result, StatusQuery};
use image::{BackingPolicy, FileName, Format, GrowBy, Image, ImageOptions, Opener, Role};
use memory::AlignedBuf;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most bytes that are read and written at once.
const PIECE_BYTES: u64 = 512 << 10;
/// The most bytes that are zeroed at once.
const ZERO_PIECE_BYTES: u64 = 64 << 20;
/// The most bytes that are emptied at once.
const REVEAL_BYTES: u64 = 64 << 20;
const DEPTH: usize = 8;

/// Options of a commit.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CommitOptions {
    /// The overlay.
    pub top: FileName,
    /// The overlay's format, if the user named one.
    pub format: Option<Format>,
    /// The layer that takes its contents, as the user or the images name it; the one right below by default.
    pub base: Option<PathBuf>,
    /// Keep the contents in the overlay, too.
    pub keep: bool,
    /// The backing files that may be opened.
    pub allow_backing: BackingPolicy,
    /// Files that the user named.
    pub listed: Vec<PathBuf>,
    /// The most bytes in a second.
    pub rate: Option<u64>,
    /// Go on although internal snapshots of the layers above the base will show something else.
    pub change_snapshots: bool,
}

impl CommitOptions {
    /// Options for the overlay `top`, with everything else at its default.
    #[must_use]
    pub fn new(top: impl Into<FileName>) -> Self {
        Self {
            top: top.into(),
            format: None,
            base: None,
            keep: false,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            rate: None,
            change_snapshots: false,
        }
    }

    /// Changes some options: `CommitOptions::new(top).with(|options| options.keep = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Carries out a commit; everything is durable when it returns.
pub fn commit(
    options: &CommitOptions,
    opener: &dyn Opener,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let found = find_base(options, opener)?;
    let opener = SharedOpener::new(opener);
    let base_file = opener.open(&found.name, Role::Writable)?;
    // Copied data go to space that the base's refcounts call free.
    let mut go_on = |_, _| !control.cancel.load(Ordering::Relaxed);
    image::look_before_writing(&base_file, found.format, &mut go_on)?;
    if let Some(data_file) = &found.data_file {
        opener.open(data_file, Role::Writable)?;
    }
    let top = Arc::new(image::open(&open_options(options, &options.top, found.top_format, false), &opener)?);
    let base_options = open_options(options, &found.name, found.said_format, true);
    let size = top.info().size_bytes;
    if image::open(&base_options, &opener)?.info().size_bytes < size {
        let growth = Growth { top: &top, base: &base_options, depth: found.depth };
        grow(&growth, &opener, reactors, control)?;
    }
    let base = Arc::new(image::open(&base_options, &opener)?);
    let copied = copy(&top, &base, found.depth, options.rate, reactors, control);
    closed(copied, &base)?;
    if options.keep || found.depth != 1 || !top.can_reveal() {
        return Ok(());
    }
    closed(empty(&top, size, control), &top)?;
    // Space that a durable index names must not be cut off.
    top.give_back_if_empty()
}

fn empty(top: &Image, size: u64, control: &mut Control<'_>) -> Result<()> {
    let mut at = 0;
    while at < size {
        control.check()?;
        let length = REVEAL_BYTES.min(size - at);
        top.reveal(at, length)?;
        at += length;
    }
    Ok(())
}

/// The base of a commit.
struct Found {
    /// The name as it was given: files that the base names are relative to it.
    name: FileName,
    data_file: Option<FileName>,
    /// The base's format, or `None` if it was only guessed. Then the data of the overlay's guest must not form another
    /// format's header.
    said_format: Option<Format>,
    format: Format,
    top_format: Option<Format>,
    /// The number of layers above the base.
    depth: usize,
}

fn find_base(options: &CommitOptions, opener: &dyn Opener) -> Result<Found> {
    let mut reading = open_options(options, &options.top, options.format, false);
    reading.read_only = true;
    let chain = image::open(&reading, opener)?;
    let layers: Vec<(FileName, Option<FileName>)> = chain.layer_file_names().collect();
    let missing = || {
        let name = options.base.as_deref().unwrap_or(Path::new(""));
        let what = format!("Did not find '{}' in the backing chain of '{}'", name.display(), options.top);
        Error::new(ErrorKind::BadOption, what)
    };
    if layers.len() < 2 {
        if options.format.is_none() && chain.format().is_some_and(|format| !format.can_have_backing()) {
            drop(chain);
            // The user learns that its format was only guessed, as from qemu-img, which opens it for writing first.
            image::open(&open_options(options, &options.top, None, false), opener)?;
        }
        return Err(match &options.base {
            None => Error::new(ErrorKind::BadOption, "Image does not have a backing file"),
            Some(_) => missing(),
        });
    }
    let depth = match &options.base {
        None => Some(1),
        Some(name) => {
            let named = chain.said_file_names().skip(1).position(|said| said.path() == Some(name));
            let is_layer = |path: PathBuf| layers.iter().skip(1).position(|(own, _)| own.path() == Some(&path));
            let same = || opener.canonical(name).ok().and_then(is_layer);
            named.or_else(same).map(|index| index + 1)
        }
    };
    let at = |depth: usize| Some((depth, chain.said_image_names().nth(depth)?, layers.get(depth)?.1.clone()));
    let found = depth.and_then(at);
    let Some((depth, name, data_file)) = found else { return Err(missing()) };
    if !options.change_snapshots {
        for (layer, format) in chain.said_image_names().zip(chain.formats()).take(depth) {
            let description = image::inspect(layer.clone(), &opener.open(&layer, Role::ReadOnly)?, Some(format))?;
            keep_snapshots(layer, &description.snapshots)?;
        }
    }
    let said_format = chain.said_formats().nth(depth).flatten();
    let format = chain.formats().nth(depth).ok_or_else(|| Error::new(ErrorKind::Io, "a layer without a format"))?;
    Ok(Found { name, data_file, said_format, format, top_format: chain.format(), depth })
}

fn open_options(options: &CommitOptions, name: &FileName, format: Option<Format>, is_base: bool) -> ImageOptions {
    let mut open = ImageOptions::new(name.clone());
    open.format = format;
    open.listed.clone_from(&options.listed);
    // The base passed the gate when the chain was opened from the top. Its own directory may be another one.
    open.allow_backing = if is_base { BackingPolicy::Any } else { options.allow_backing.clone() };
    open
}

/// A base that is shorter than the overlay.
struct Growth<'a> {
    top: &'a Arc<Image>,
    base: &'a ImageOptions,
    depth: usize,
}

/// Makes the base as long as the top, with zeros: the guest sees zeros there wherever the top holds nothing.
fn grow(
    growth: &Growth<'_>,
    opener: &SharedOpener<'_>,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let size = growth.top.info().size_bytes;
    let base = image::open(growth.base, opener)?;
    let (old, rests_on_another) = (base.info().size_bytes, base.formats().count() > 1);
    let cancel = control.cancel;
    let watch = &mut |_: u64, _: u64| !cancel.load(Ordering::Relaxed);
    if base.can_say_zero() || !rests_on_another {
        // In one step, which hides the data below the base.
        return base.resize(size, false, GrowBy::Nothing, watch);
    }
    // In the added part of the base, the layer below it would show. The top hides that part until it is zeros.
    let mut ranges = Vec::new();
    for run in growth.top.block_status(&above(growth.depth))? {
        let run = run?;
        let range = run.start.max(old)..run.end();
        if !run.present && !range.is_empty() {
            ranges.push(range);
        }
    }
    closed(zero(growth.top, &ranges, reactors, control), growth.top)?;
    base.resize_showing_below(size, watch)?;
    let base = Arc::new(image::open(growth.base, opener)?);
    closed(zero(&base, std::slice::from_ref(&(old..size)), reactors, control), &base)
}

/// Zeroes ranges of an image.
fn zero(
    image: &Arc<Image>,
    ranges: &[Range<u64>],
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let total = ranges.iter().map(|range| range.end - range.start).sum();
    let disk = Arc::clone(image);
    let pipeline = Pipeline::start(reactors, Spread::First, 1, total, move |ctx| {
        Ok(Committer { top: DiskIo::open(disk.as_ref(), ctx)?, base: DiskIo::open(disk.as_ref(), ctx)?, piece: 0 })
    });
    for range in ranges {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / ZERO_PIECE_BYTES + 1) * ZERO_PIECE_BYTES);
            if !pipeline.push(Piece::Zero(at..end), end - at, control) {
                break;
            }
            at = end;
        }
    }
    pipeline.finish(control)
}

fn copy(
    top: &Arc<Image>,
    base: &Arc<Image>,
    depth: usize,
    rate: Option<u64>,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let size = top.info().size_bytes;
    // One task writes a whole cluster of the base.
    let piece = PIECE_BYTES.max(u64::from(base.info().topology.optimal_io_bytes));
    let pipeline = {
        let spread = Spread::of_copies([top, base].map(JobDisk::from).iter());
        let (top, base) = (Arc::clone(top), Arc::clone(base));
        Pipeline::start(reactors, spread, DEPTH, size, move |ctx| {
            Ok(Committer { top: DiskIo::open(top.as_ref(), ctx)?, base: DiskIo::open(base.as_ref(), ctx)?, piece })
        })
    };
    let handed_out = hand_out(top, depth, piece, rate, &pipeline, control);
    let finished = pipeline.finish(control);
    handed_out?;
    finished
}

/// Returns a query for the layers above the base.
fn above(depth: usize) -> StatusQuery {
    StatusQuery::all().with(|query| query.layers = depth)
}

/// Hands out the data of the layers above the base, split at the ends of the base's clusters.
fn hand_out(
    top: &Image,
    depth: usize,
    piece: u64,
    rate: Option<u64>,
    pipeline: &Pipeline<Piece>,
    control: &mut Control<'_>,
) -> Result<()> {
    let mut limit = RateLimit::new(rate);
    for run in top.block_status(&above(depth))? {
        let run = run?;
        control.check()?;
        // A shorter layer above the base hides the base's data behind its end.
        let cut_off = run.zero && run.depth + 1 < depth;
        if !run.present && !cut_off {
            pipeline.skip(run.length_bytes);
            continue;
        }
        if run.compressed {
            pipeline.widen();
        }
        let longest = if run.takes_read() { piece } else { ZERO_PIECE_BYTES };
        let mut at = run.start;
        while at < run.end() {
            let end = run.end().min((at / longest + 1) * longest);
            limit.pass(if run.takes_read() { end - at } else { 0 }, control);
            let item = if run.takes_read() { Piece::Copy(at..end) } else { Piece::Zero(at..end) };
            if !pipeline.push(item, end - at, control) {
                return Ok(());
            }
            at = end;
        }
    }
    Ok(())
}

enum Piece {
    Copy(Range<u64>),
    Zero(Range<u64>),
}

struct Committer {
    top: Rc<DiskIo>,
    base: Rc<DiskIo>,
    piece: u64,
}

impl Worker for Committer {
    type Item = Piece;
    type Scratch = AlignedBuf;

    fn scratch(&self) -> AlignedBuf {
        AlignedBuf::zeroed(self.piece as usize)
    }

    async fn work(&self, piece: Piece, buf: &mut AlignedBuf) -> Result<()> {
        match piece {
            Piece::Zero(range) => self.zero(range).await,
            Piece::Copy(range) => {
                let length = (range.end - range.start) as usize;
                let read = self.top.read(range.start, buf, length).await;
                read.map_err(|error| failed("reading", range.start, error))?;
                if crate::zeros::is_zero(&buf[..length]) {
                    return self.zero(range).await;
                }
                let written = self.base.write(range.start, buf, 0..length).await;
                written.map_err(|error| failed("writing", range.start, error))
            }
        }
    }
}

impl Committer {
    async fn zero(&self, range: Range<u64>) -> Result<()> {
        let (offset, length) = (range.start, range.end - range.start);
        let op = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
        self.base.run(op).await.map_err(|error| failed("writing", offset, error))
    }
}
