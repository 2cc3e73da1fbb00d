//! Copies disks into another image, and keeps sparse parts sparse.

use crate::convert_options::{ConvertOptions, GRAIN_BYTES};
use crate::convert_plan::{Piece, Plan};
use crate::failure::failed;
use crate::pack::{Packer, Packing};
use crate::pipeline::{Pipeline, Spread, Worker};
use crate::sources::{Sources, places};
use crate::{Control, JobDisk};
use block::{DiskIo, Error, ErrorKind, Op, OpFlags, ReactorCtx, ReactorHandle, Result};
use image::CopyOffload;
use memory::AlignedBuf;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most bytes that are read and written at once. Larger clusters are copied whole.
const PIECE_BYTES: u64 = 512 << 10;

/// The result of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Converted {
    /// Bytes of the disk that the host copied by itself.
    pub offloaded_bytes: u64,
}

/// Copies `sources`, one behind the other, to the start of `target`, and makes it durable. No queue of the target may
/// be open.
pub fn convert(
    sources: &[JobDisk],
    target: &JobDisk,
    options: &ConvertOptions,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<Converted> {
    let places = places(sources);
    let total = places.last().map_or(0, |last| last.end);
    if target.info().size_bytes < total {
        return Err(Error::new(ErrorKind::Io, "output file is smaller than input file"));
    }
    // One task writes a cluster, and in one piece if possible.
    let cluster = target.unit_bytes();
    let alignment = cluster.max(GRAIN_BYTES);
    let shows_zeros_from = match target.backing_bytes() {
        Some(bytes) if options.target_is_new => bytes,
        None if options.target_is_zero => 0,
        _ => u64::MAX,
    };
    let piece = PIECE_BYTES.max(cluster);
    let plan = Plan { alignment, piece, total, shows_zeros_from, options: options.clone() };
    let offloaded = Arc::new(AtomicU64::new(0));
    let spread = match options.compress {
        true => Spread::All,
        false => Spread::of_copies(sources.iter().chain([target])),
    };
    let pipeline = {
        let (sources, target, plan) = (sources.to_vec(), target.clone(), plan.clone());
        let offloaded = Arc::clone(&offloaded);
        Pipeline::start(reactors, spread, options.depth.max(1), total, move |ctx| {
            let Plan { options, .. } = &plan;
            let offload = options.offload.then(|| Offload::open(&sources, &target, ctx, &offloaded)).transpose()?;
            Ok(Copier {
                sources: Sources::open(&sources, ctx, options.salvage.clone())?,
                target: target.open(ctx)?,
                packer: options.compress.then(|| Packer::open(&target, ctx, cluster)).transpose()?,
                offload,
                plan: plan.clone(),
            })
        })
    };
    let pipeline = pipeline.limited(options.rate);
    let handed_out = plan.hand_out(sources, &places, &pipeline, control);
    let finished = pipeline.finish(control);
    target.finish(handed_out.and(finished), options.target_is_new, reactors, control)?;
    Ok(Converted { offloaded_bytes: offloaded.load(Ordering::Relaxed) })
}

struct Copier {
    sources: Sources,
    target: Rc<DiskIo>,
    packer: Option<Packer>,
    offload: Option<Offload>,
    plan: Plan,
}

/// Lets the host copy (`copy_file_range`), until it refuses once.
struct Offload {
    /// One for each source from which the host can copy.
    from: Vec<Option<CopyOffload>>,
    refused: Cell<bool>,
    offloaded: Arc<AtomicU64>,
}

impl Offload {
    fn open(
        sources: &[JobDisk],
        target: &JobDisk,
        ctx: &Rc<dyn ReactorCtx>,
        offloaded: &Arc<AtomicU64>,
    ) -> Result<Self> {
        let from = sources.iter().map(|source| target.copy_offload(source, ctx)).collect::<Result<_>>()?;
        Ok(Self { from, refused: Cell::new(false), offloaded: Arc::clone(offloaded) })
    }

    /// Whether the host has copied this range of a source.
    async fn copy(&self, (index, from): (usize, u64), range: &Range<u64>) -> bool {
        let length = range.end - range.start;
        let Some(offload) = self.from[index].as_ref().filter(|_| !self.refused.get()) else { return false };
        match offload.copy(from, range.start, length).await {
            Ok(true) => {
                self.offloaded.fetch_add(length, Ordering::Relaxed);
                true
            }
            Ok(false) => false,
            // Reading and writing will meet the same error, or can do without the host's help.
            Err(_) => {
                self.refused.set(true);
                false
            }
        }
    }
}

struct Scratch {
    buf: AlignedBuf,
    parts: Vec<Range<usize>>,
    packing: Option<Packing>,
}

impl Worker for Copier {
    type Item = Piece;
    type Scratch = Scratch;

    fn scratch(&self) -> Scratch {
        let length = self.plan.piece as usize;
        let packing = self.packer.as_ref().map(|_| Packing::new(length));
        Scratch { buf: AlignedBuf::zeroed(length), parts: Vec::new(), packing }
    }

    async fn work(&self, piece: Piece, scratch: &mut Scratch) -> Result<()> {
        match piece {
            Piece::Copy(range) => self.copy(range, scratch).await,
            Piece::Zero(range) => self.zero(range).await,
        }
    }
}

impl Copier {
    async fn copy(&self, range: Range<u64>, scratch: &mut Scratch) -> Result<()> {
        let (offset, length) = (range.start, (range.end - range.start) as usize);
        if let Some(offload) = &self.offload
            && let Some(place) = self.sources.one_that_holds(&range)
            && offload.copy(place, &range).await
        {
            return Ok(());
        }
        let Scratch { buf, parts, packing } = scratch;
        self.sources.read(offset, buf, length).await?;
        parts.clear();
        self.parts_to_write(&buf[..length], parts);
        let mut written = 0usize;
        for part in parts.iter() {
            self.zero_between(offset, written, part.start).await?;
            match (&self.packer, &mut *packing) {
                (Some(packer), Some(packing)) => packer.write(&self.target, packing, offset, buf, part.clone()).await?,
                _ => {
                    let at = offset + part.start as u64;
                    self.target.write(at, buf, part.clone()).await.map_err(|error| failed("writing", at, error))?;
                }
            }
            written = part.end;
        }
        self.zero_between(offset, written, length).await
    }

    /// Lists the parts of `bytes` that are not long runs of zeros.
    fn parts_to_write(&self, bytes: &[u8], parts: &mut Vec<Range<usize>>) {
        let sparse = self.plan.options.sparse_bytes as usize;
        if sparse == 0 {
            parts.push(0..bytes.len());
            return;
        }
        let grain = self.plan.alignment as usize;
        for (index, block) in bytes.chunks(grain).enumerate() {
            if crate::zeros::is_zero(block) {
                continue;
            }
            let start = index * grain;
            let end = start + block.len();
            match parts.last_mut() {
                Some(last) if start == last.end || start - last.end < sparse => last.end = end,
                _ => parts.push(start..end),
            }
        }
    }

    async fn zero_between(&self, offset: u64, start: usize, end: usize) -> Result<()> {
        let (start, end) = (offset + start as u64, (offset + end as u64).min(self.plan.shows_zeros_from));
        if start >= end {
            return Ok(());
        }
        self.zero(start..end).await
    }

    async fn zero(&self, range: Range<u64>) -> Result<()> {
        let (offset, length) = (range.start, range.end - range.start);
        let op = Op::WriteZeroes { offset, length, may_unmap: true, flags: OpFlags::NONE };
        self.target.run(op).await.map_err(|error| failed("writing", offset, error))
    }
}
