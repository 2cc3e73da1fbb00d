//! Copying a disk into another image, keeping what is sparse sparse.

use crate::Control;
use crate::disk_tasks::{DiskTasks, closed};
use crate::pack::{Packer, Packing};
use crate::pipeline::{Pipeline, Worker};
use block::{Disk, Error, ErrorKind, IoError, Op, ReactorHandle, Result};
use image::{Format, Image};
use memory::AlignedBuf;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Read and written at once, but for larger clusters.
const PIECE_BYTES: u64 = 512 << 10;
/// Zeroed at once: metadata mostly.
const ZERO_PIECE_BYTES: u64 = 64 << 20;
/// Zeros are looked for in units of this.
const GRAIN_BYTES: u64 = 4096;

/// How to copy.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Runs of zeros from this length on are not written as data; zero: everything is written as data.
    pub sparse_bytes: u64,
    /// The target was made for this copy.
    pub target_is_new: bool,
    /// The target reads as zeros everywhere.
    pub target_is_zero: bool,
    /// The target has a backing file that holds what the source's top layer leaves to the layers below it.
    pub top_only: bool,
    /// Whole clusters are compressed, where that makes them smaller.
    pub compress: bool,
    /// Requests in flight on each reactor.
    pub depth: usize,
    /// At most so many bytes of data a second.
    pub rate: Option<u64>,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self {
            sparse_bytes: GRAIN_BYTES,
            target_is_new: true,
            target_is_zero: true,
            top_only: false,
            compress: false,
            depth: 8,
            rate: None,
        }
    }
}

/// Copies `source` to the start of `target`, and makes it durable. No queue of the target may be open.
pub fn convert(
    source: &Arc<Image>,
    target: &Arc<Image>,
    options: &ConvertOptions,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let total = source.info().size_bytes;
    if target.info().size_bytes < total {
        return Err(Error::new(ErrorKind::BadOption, "output file is smaller than input file"));
    }
    // A cluster is written by one task, at once where it can be.
    let cluster = match target.format() {
        Some(Format::Qcow2) => u64::from(target.info().topology.optimal_io_bytes),
        _ => GRAIN_BYTES,
    };
    let plan =
        Plan { alignment: cluster.max(GRAIN_BYTES), piece: PIECE_BYTES.max(cluster), total, options: options.clone() };
    let pipeline = {
        let (source, target, plan) = (Arc::clone(source), Arc::clone(target), plan.clone());
        Pipeline::start(reactors, options.depth.max(1), total, move |ctx| {
            let compress = plan.options.compress;
            Ok(Copier {
                source: DiskTasks::open(source.as_ref(), ctx)?,
                target: DiskTasks::open(target.as_ref(), ctx)?,
                packer: compress.then(|| Packer::open(&target, ctx, cluster)).transpose()?,
                plan: plan.clone(),
            })
        })?
    };
    let pipeline = pipeline.limited(options.rate);
    let handed_out = plan.hand_out(source, &pipeline, control);
    let finished = pipeline.finish(control);
    let done = handed_out.and(finished);
    if !options.target_is_new {
        return closed(done, target);
    }
    done?;
    target.close_new()
}

/// What goes where in which pieces.
#[derive(Clone)]
struct Plan {
    alignment: u64,
    piece: u64,
    total: u64,
    options: ConvertOptions,
}

enum Piece {
    Copy(Range<u64>),
    Zero(Range<u64>),
}

impl Plan {
    /// Copies are whole clusters (zeros beside the data are read with them); zeros are what is left.
    fn hand_out(&self, source: &Image, pipeline: &Pipeline<Piece>, control: &mut Control<'_>) -> Result<()> {
        if self.options.sparse_bytes == 0 {
            self.copy(0..self.total, pipeline, control);
            return Ok(());
        }
        let runs = if self.options.top_only { source.top_extents()? } else { source.extents()? };
        // Everything before this was handed out; `pending` was not yet, and begins there if it is not empty.
        let mut covered = 0u64;
        let mut pending = 0..0;
        for run in runs {
            let run = run?;
            control.check()?;
            if run.data {
                let start = (run.start / self.alignment * self.alignment).max(covered);
                let end = run.end().next_multiple_of(self.alignment).min(self.total);
                if start > pending.end || pending.is_empty() {
                    self.copy(pending, pipeline, control);
                    pending = start..start;
                }
                pending.end = pending.end.max(end);
                covered = pending.end;
                // What is long enough goes at once.
                let whole = (pending.end - pending.start) / self.piece * self.piece;
                if whole > 0 && !self.copy(pending.start..pending.start + whole, pipeline, control) {
                    return Ok(());
                }
                pending.start += whole;
                continue;
            }
            let (start, end) = (run.start.max(covered), run.end());
            if start >= end {
                continue;
            }
            covered = end;
            let leave = if self.options.top_only { !run.zero } else { self.options.target_is_zero };
            if leave {
                pipeline.skip(end - start);
            } else if !self.zero(start..end, pipeline, control) {
                return Ok(());
            }
        }
        self.copy(pending, pipeline, control);
        Ok(())
    }

    fn copy(&self, mut range: Range<u64>, pipeline: &Pipeline<Piece>, control: &mut Control<'_>) -> bool {
        while !range.is_empty() {
            let end = range.end.min((range.start / self.piece + 1) * self.piece);
            pipeline.pass(end - range.start, control);
            if !pipeline.push(Piece::Copy(range.start..end), end - range.start, control) {
                return false;
            }
            range.start = end;
        }
        true
    }

    fn zero(&self, mut range: Range<u64>, pipeline: &Pipeline<Piece>, control: &mut Control<'_>) -> bool {
        while !range.is_empty() {
            let end = range.end.min(range.start + ZERO_PIECE_BYTES);
            if !pipeline.push(Piece::Zero(range.start..end), end - range.start, control) {
                return false;
            }
            range.start = end;
        }
        true
    }
}

struct Copier {
    source: Rc<DiskTasks>,
    target: Rc<DiskTasks>,
    packer: Option<Packer>,
    plan: Plan,
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
        let Scratch { buf, parts, packing } = scratch;
        self.source.read(offset, buf, length).await.map_err(|error| failed("reading", offset, error))?;
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

    /// The parts of `bytes` that are not long runs of zeros.
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
        let known_zero = self.plan.options.target_is_zero && !self.plan.options.top_only;
        if start >= end || known_zero {
            return Ok(());
        }
        self.zero(offset + start as u64..offset + end as u64).await
    }

    async fn zero(&self, range: Range<u64>) -> Result<()> {
        let (offset, length) = (range.start, range.end - range.start);
        let op = Op::WriteZeroes { offset, length, may_unmap: true, fua: false };
        self.target.run(op).await.map_err(|error| failed("writing", offset, error))
    }
}

pub(crate) fn failed(what: &str, offset: u64, error: IoError) -> Error {
    Error::with_source(ErrorKind::Io, format!("error while {what} at byte {offset}"), error)
}
