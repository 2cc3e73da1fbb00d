//! Rebasing: an overlay gets another backing file, and its guest sees no change.
//!
//! A rebase compares the data that the overlay leaves to the layers below with those of the new backing file. Where
//! they differ, it writes the old data to the overlay, which changes nothing for the guest. When all is durable, one
//! write of the header names the new file. An interrupted rebase is simply run again.

use crate::Control;
use crate::closed::closed;
use crate::failure::failed;
use crate::kept_snapshots::keep_snapshots;
use crate::pack::{Packer, Packing};
use crate::pipeline::{Pipeline, Spread, Worker};
use crate::runs::Cursor;
use crate::shared_opener::SharedOpener;
use block::{Disk, DiskIo, Error, ErrorKind, Op, OpFlags, ReactorHandle, Result, Run, StatusQuery};
use image::{Backing, BackingPolicy, FileName, Format, Image, ImageOptions, Opener, Role};
use memory::AlignedBuf;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most bytes that are compared at once.
const PIECE_BYTES: u64 = 512 << 10;
/// The unit of comparison. Larger clusters are compared whole.
const GRAIN_BYTES: u64 = 4096;
const DEPTH: usize = 8;

/// Options of a rebase.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebaseOptions {
    /// The overlay.
    pub top: FileName,
    /// The overlay's format, if the user named one.
    pub format: Option<Format>,
    /// The new backing file; `None` for none.
    pub backing: Option<Backing>,
    /// Trust that the new backing file has the same contents as the old one. Only the name changes, and neither file is
    /// opened.
    pub name_only: bool,
    /// Data written to the overlay are compressed, a cluster at a time, if that makes them smaller.
    pub compress: bool,
    /// The backing files that may be opened.
    pub allow_backing: BackingPolicy,
    /// Files that the user named.
    pub listed: Vec<PathBuf>,
    /// Go on although the overlay's internal snapshots will show something else.
    pub change_snapshots: bool,
}

impl RebaseOptions {
    /// Options for the overlay `top`, with everything else at its default.
    #[must_use]
    pub fn new(top: impl Into<FileName>) -> Self {
        Self {
            top: top.into(),
            format: None,
            backing: None,
            name_only: false,
            compress: false,
            allow_backing: BackingPolicy::default(),
            listed: Vec::new(),
            change_snapshots: false,
        }
    }

    /// Changes some options: `RebaseOptions::new(top).with(|options| options.compress = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Carries out a rebase; durable when it returns. `reading` opens the new backing file and the layers below it.
pub fn rebase(
    options: &RebaseOptions,
    opener: &dyn Opener,
    reading: &dyn Opener,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let opener = SharedOpener::new(opener);
    let file = opener.open(&options.top, Role::Writable)?;
    let description = image::inspect(options.top.clone(), &file, options.format)?;
    if !description.format.can_have_backing() {
        let what = match (&description.backing_file, &options.backing) {
            (Some(_), _) => "a scratch overlay keeps its backing file: convert it to qcow2 for another one",
            (None, Some(_)) => "a raw image cannot have a backing file",
            (None, None) => "a raw image cannot have a backing file, so there is none to take away",
        };
        return Err(Error::new(ErrorKind::Unsupported, format!("'{}': {what}", options.top)));
    }
    if !options.name_only {
        if !options.change_snapshots {
            keep_snapshots(&options.top, &description.snapshots)?;
        }
        // Copied data go to space that the refcounts call free.
        let mut go_on = |_, _| !control.cancel.load(Ordering::Relaxed);
        image::look_before_writing(&file, description.format, &mut go_on)?;
        copy_differences(options, description.format, &opener, reading, reactors, control)?;
    }
    control.check()?;
    image::set_backing(&file, description.format, options.backing.as_ref())
}

fn copy_differences(
    options: &RebaseOptions,
    format: Format,
    opener: &SharedOpener<'_>,
    reading: &dyn Opener,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let mut open = ImageOptions::new(options.top.clone());
    open.format = Some(format);
    open.allow_backing = options.allow_backing.clone();
    open.listed.clone_from(&options.listed);
    open.will_have_backing = options.backing.is_some();
    let top = Arc::new(image::open(&open, opener)?);
    let below = match &options.backing {
        None => None,
        Some(backing) => {
            let path = image::backing_path(&options.top, &backing.file)?;
            Some(Arc::new(open_new(options, path, backing, reading)?))
        }
    };
    if let Some(below) = &below
        && let Some(own) = top.file_names().next()
        && below.file_names().any(|name| name == own)
    {
        let what = format!("'{}' cannot be its own backing file", options.top);
        return Err(Error::new(ErrorKind::BadOption, what));
    }
    // Where an image cannot say that a cluster is zero, zeros are written, and packed.
    let says_zero = top.can_say_zero() || !options.compress;
    closed(copy(&top, below.as_ref(), (options.compress, says_zero), reactors, control), &top)
}

fn open_new(options: &RebaseOptions, name: FileName, backing: &Backing, reading: &dyn Opener) -> Result<Image> {
    let failed = |error: Error| error.in_context(format!("Could not open new backing file '{}'", backing.file));
    let mut open = ImageOptions::new(name);
    open.format = backing.format.as_deref().map(str::parse).transpose().map_err(failed)?;
    open.read_only = true;
    open.allow_backing = options.allow_backing.clone();
    open.listed.clone_from(&options.listed);
    image::open(&open, &BelowOpener(reading)).map_err(failed)
}

/// Opens all files as layers below the top.
struct BelowOpener<'a>(&'a dyn Opener);

impl Opener for BelowOpener<'_> {
    fn open(&self, name: &FileName, _role: Role) -> Result<Arc<dyn block::File>> {
        self.0.open(name, Role::Backing)
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.0.canonical(path)
    }
}

fn copy(
    top: &Arc<Image>,
    below: Option<&Arc<Image>>,
    (compress, says_zero): (bool, bool),
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let size = top.info().size_bytes;
    let cluster = u64::from(top.info().topology.optimal_io_bytes);
    let grain = GRAIN_BYTES.max(cluster);
    let piece = PIECE_BYTES.max(grain);
    let pipeline = {
        let (top, below) = (Arc::clone(top), below.map(Arc::clone));
        let below_bytes = below.as_ref().map_or(0, |below| below.info().size_bytes);
        Pipeline::start(reactors, Spread::All, DEPTH, size, move |ctx| {
            Ok(Rebaser {
                top: DiskIo::open(top.as_ref(), ctx)?,
                packer: compress.then(|| Packer::open(&(&top).into(), ctx, cluster)),
                below: below.as_ref().map(|below| DiskIo::open(below.as_ref(), ctx)).transpose()?,
                below_bytes,
                says_zero,
                grain: grain as usize,
                piece: piece as usize,
            })
        })
    };
    // Only whole clusters can be compressed, or marked as zero in an image that had no layer below.
    let is_whole = compress || top.formats().count() == 1;
    let pieces = Pieces { grain: if is_whole { cluster.max(1) } else { 1 }, piece, size, handed_out: 0 };
    let walked = walk(top, below, pieces, &pipeline, control);
    let finished = pipeline.finish(control);
    walked?;
    finished
}

/// The rules for splitting ranges into pieces.
struct Pieces {
    /// Each piece begins and ends at a multiple of this, or at the disk's end.
    grain: u64,
    /// A piece does not extend over a multiple of this.
    piece: u64,
    size: u64,
    /// Everything before this was handed out.
    handed_out: u64,
}

impl Pieces {
    /// Returns the first piece of the rest of `range`, and how much of the range it takes. A piece may extend beyond
    /// the range: those bytes stay the same for the guest, whether they are written or not.
    fn next(&mut self, range: Range<u64>) -> (Range<u64>, u64) {
        let end = range.end.min((range.start / self.piece + 1) * self.piece);
        let start = (range.start / self.grain * self.grain).max(self.handed_out);
        self.handed_out = end.next_multiple_of(self.grain).min(self.size).max(start);
        (start..self.handed_out, end - range.start)
    }
}

/// Hands out the ranges that the overlay leaves to the layers below, if the new layers may differ there.
fn walk(
    top: &Image,
    below: Option<&Arc<Image>>,
    mut pieces: Pieces,
    pipeline: &Pipeline<Range<u64>>,
    control: &mut Control<'_>,
) -> Result<()> {
    let data_names =
        |image: &Image| -> Vec<FileName> { image.layer_file_names().map(|(own, data)| data.unwrap_or(own)).collect() };
    let new_names = below.map(|below| data_names(below)).unwrap_or_default();
    let old_names = data_names(top);
    let mut new = below.map(|below| below.block_status(&StatusQuery::all()).map(Cursor::new)).transpose()?;
    let mut at = 0;
    for run in top.block_status(&StatusQuery::all())? {
        let run = run?;
        while at < run.end() {
            control.check()?;
            let other = new.as_mut().map(|new| new.at(at)).transpose()?.flatten();
            let end = other.map_or(run.end(), |other| other.end().min(run.end()));
            let own = run.depth == 0 && run.present;
            let same_place = |other: &Run| {
                let place = |run: &Run, names: &[FileName]| names.get(run.depth).cloned().zip(start_at(run, at));
                run.takes_read()
                    && other.takes_read()
                    && place(&run, &old_names).is_some_and(|old| Some(old) == place(other, &new_names))
            };
            let both_zero = !run.takes_read() && other.is_none_or(|other| !other.takes_read());
            if own || both_zero || other.as_ref().is_some_and(same_place) {
                pipeline.skip(end - at);
                at = end;
                continue;
            }
            while at < end {
                let (piece, taken) = pieces.next(at..end);
                if piece.is_empty() {
                    pipeline.skip(taken);
                } else if !pipeline.push(piece, taken, control) {
                    return Ok(());
                }
                at += taken;
            }
        }
    }
    Ok(())
}

/// Returns the place of the disk's byte `at` in the file of its layer.
fn start_at(run: &Run, at: u64) -> Option<u64> {
    run.offset.map(|offset| offset + (at - run.start))
}

struct Rebaser {
    top: Rc<DiskIo>,
    /// `None` if nothing is to be compressed; an error if compression is impossible.
    packer: Option<Result<Packer>>,
    below: Option<Rc<DiskIo>>,
    below_bytes: u64,
    says_zero: bool,
    grain: usize,
    piece: usize,
}

struct Scratch {
    /// The data that the guest sees, and those that it would see above the new backing file.
    old: AlignedBuf,
    new: AlignedBuf,
    packing: Option<Packing>,
}

impl Worker for Rebaser {
    type Item = Range<u64>;
    type Scratch = Scratch;

    fn scratch(&self) -> Scratch {
        let [old, new] = [(); 2].map(|()| AlignedBuf::zeroed(self.piece));
        Scratch { old, new, packing: self.packer.as_ref().map(|_| Packing::new(self.piece)) }
    }

    async fn work(&self, range: Range<u64>, scratch: &mut Scratch) -> Result<()> {
        let Scratch { old, new, packing } = scratch;
        let (offset, length) = (range.start, (range.end - range.start) as usize);
        self.top.read(offset, old, length).await.map_err(|error| failed("reading", offset, error))?;
        // Behind its end the new backing file reads as zeros.
        let inside = self.below_bytes.saturating_sub(offset).min(length as u64) as usize;
        if let (Some(below), true) = (&self.below, inside > 0) {
            let read = below.read(offset, new, inside).await;
            read.map_err(|error| failed("reading the new backing file", offset, error))?;
        }
        new[inside.min(length)..length].fill(0);
        // Differences are written in runs of whole clusters, all zeros or all data.
        let mut kept: Option<(Range<usize>, bool)> = None;
        let mut start = 0;
        while start < length {
            // Units end where the overlay's clusters end.
            let in_unit = (offset as usize + start) % self.grain;
            let end = length.min(start + self.grain - in_unit);
            if old[start..end] != new[start..end] {
                let zero = self.says_zero && crate::zeros::is_zero(&old[start..end]);
                match &mut kept {
                    Some((part, same)) if *same == zero && part.end == start => part.end = end,
                    kept => {
                        if let Some((part, zero)) = kept.replace((start..end, zero)) {
                            self.keep(offset, old, packing.as_mut(), part, zero).await?;
                        }
                    }
                }
            }
            start = end;
        }
        match kept {
            Some((part, zero)) => self.keep(offset, old, packing.as_mut(), part, zero).await,
            None => Ok(()),
        }
    }
}

impl Rebaser {
    /// Writes the data that the guest sees to the overlay.
    async fn keep(
        &self,
        offset: u64,
        old: &mut AlignedBuf,
        packing: Option<&mut Packing>,
        part: Range<usize>,
        zero: bool,
    ) -> Result<()> {
        let at = offset + part.start as u64;
        let written = match (&self.packer, packing) {
            _ if zero => {
                let op =
                    Op::WriteZeroes { offset: at, length: part.len() as u64, may_unmap: true, flags: OpFlags::NONE };
                self.top.run(op).await
            }
            (Some(Ok(packer)), Some(packing)) => return packer.write(&self.top, packing, offset, old, part).await,
            // As in qemu-img, this is an error only if data have to be written.
            (Some(Err(error)), _) => {
                let what = format!("Error while writing to COW image: Operation not supported: {error}");
                return Err(Error::new(error.kind(), what));
            }
            _ => self.top.write(at, old, part).await,
        };
        written.map_err(|error| failed("writing", at, error))
    }
}
