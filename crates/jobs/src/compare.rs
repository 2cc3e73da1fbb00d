//! Compares two disks, as their guests see them.

use crate::pipeline::{Pipeline, Spread, Worker};
use crate::runs::Cursor;
use crate::{Control, JobDisk};
use block::{DiskIo, Error, ErrorKind, IoError, ReactorHandle, Result, Run, SECTOR_BYTES, StatusQuery};
use memory::AlignedBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most bytes that are read at once from each disk.
const PIECE_BYTES: u64 = 256 << 10;
/// Pieces in flight on each reactor.
const DEPTH: usize = 8;
const NOWHERE: u64 = u64::MAX;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// A guest sees the same data. One may be longer, by zeros.
    Same,
    /// The disks differ.
    Different(Difference),
}

/// The first difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// The sector at this offset.
    Content(u64),
    /// Whether the range at this offset is allocated (strict comparison only).
    Allocation(u64),
    /// The sizes (strict comparison only).
    Size,
}

/// The stage at which a comparison failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading the tables.
    Tables,
    /// Reading data.
    Data,
}

/// The reason why two disks could not be compared.
#[derive(Debug)]
pub struct CompareError {
    /// The failed stage.
    pub stage: Stage,
    /// The error.
    pub error: Error,
}

/// The disks that a piece is read from.
#[derive(Clone, Copy)]
enum Sides {
    Both,
    /// The other one is zeros.
    Left,
    Right,
}

struct Piece {
    start: u64,
    length_bytes: u64,
    sides: Sides,
}

/// Compares two disks. With `strict`, sizes and allocation count too.
///
/// Bytes behind the end of the shorter disk count as zeros.
pub fn compare(
    left: &JobDisk,
    right: &JobDisk,
    strict: bool,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<Comparison, CompareError> {
    let tables = |error| CompareError { stage: Stage::Tables, error };
    let data = |error| CompareError { stage: Stage::Data, error };
    let (left_bytes, right_bytes) = (left.info().size_bytes, right.info().size_bytes);
    if strict && left_bytes != right_bytes {
        return Ok(Comparison::Different(Difference::Size));
    }
    let mismatch = Arc::new(AtomicU64::new(NOWHERE));
    let pipeline = {
        let (left, right, mismatch) = (left.clone(), right.clone(), Arc::clone(&mismatch));
        Pipeline::start(reactors, Spread::All, DEPTH, left_bytes.max(right_bytes), move |ctx| {
            Ok(Comparer {
                left: left.open(ctx)?,
                right: right.open(ctx)?,
                names: [&left, &right].map(|disk| disk.name().to_owned()),
                mismatch: Arc::clone(&mismatch),
            })
        })
    };
    let walked = walk(left, right, strict, &pipeline, &mismatch, control);
    let finished = pipeline.finish(control);
    let allocation = walked.map_err(tables)?;
    finished.map_err(data)?;
    Ok(match (mismatch.load(Ordering::Acquire), allocation) {
        (NOWHERE, None) => Comparison::Same,
        // Pieces that were handed out lie before the place where the walk ended.
        (NOWHERE, Some(offset)) => Comparison::Different(Difference::Allocation(offset)),
        (offset, _) => Comparison::Different(Difference::Content(offset)),
    })
}

/// Hands out the ranges to be read. Returns where a strict comparison found different allocation.
fn walk(
    left: &JobDisk,
    right: &JobDisk,
    strict: bool,
    pipeline: &Pipeline<Piece>,
    mismatch: &AtomicU64,
    control: &mut Control<'_>,
) -> Result<Option<u64>> {
    let mut left = Cursor::new(left.block_status(&StatusQuery::all())?);
    let mut right = Cursor::new(right.block_status(&StatusQuery::all())?);
    let mut at = 0u64;
    loop {
        let (one, other) = (left.at(at)?, right.at(at)?);
        let end = match (&one, &other) {
            (None, None) => return Ok(None),
            (Some(run), None) | (None, Some(run)) => run.end(),
            (Some(one), Some(other)) => one.end().min(other.end()),
        };
        if let (true, Some(one), Some(other)) = (strict, &one, &other)
            && status(one) != status(other)
        {
            return Ok(Some(at));
        }
        let reads = |run: &Option<Run>| run.is_some_and(|run| run.takes_read());
        let sides = match (reads(&one), reads(&other)) {
            (true, true) => Some(Sides::Both),
            (true, false) => Some(Sides::Left),
            (false, true) => Some(Sides::Right),
            (false, false) => None,
        };
        let Some(sides) = sides else {
            pipeline.skip(end - at);
            control.check()?;
            at = end;
            continue;
        };
        while at < end {
            // Pieces end at fixed places, whatever the runs are, so that reads stay aligned.
            let next = (at / PIECE_BYTES + 1) * PIECE_BYTES;
            let length_bytes = next.min(end) - at;
            let piece = Piece { start: at, length_bytes, sides };
            if mismatch.load(Ordering::Acquire) != NOWHERE || !pipeline.push(piece, length_bytes, control) {
                return Ok(None);
            }
            at += length_bytes;
        }
    }
}

/// Returns the status that a strict comparison compares.
fn status(run: &Run) -> (bool, bool, bool, bool, bool) {
    (run.present, run.zero, run.data, run.compressed, run.offset.is_some())
}

struct Comparer {
    left: std::rc::Rc<DiskIo>,
    right: std::rc::Rc<DiskIo>,
    names: [String; 2],
    mismatch: Arc<AtomicU64>,
}

impl Worker for Comparer {
    type Item = Piece;
    type Scratch = [AlignedBuf; 2];

    fn scratch(&self) -> Self::Scratch {
        [AlignedBuf::zeroed(PIECE_BYTES as usize), AlignedBuf::zeroed(PIECE_BYTES as usize)]
    }

    async fn work(&self, piece: Piece, [left, right]: &mut Self::Scratch) -> Result<()> {
        if piece.start > self.mismatch.load(Ordering::Acquire) {
            return Ok(());
        }
        let length = piece.length_bytes as usize;
        let failed = |name: usize| {
            let what = format!("Error while reading offset {} of {}", piece.start, self.names[name]);
            move |error: IoError| Error::with_source(ErrorKind::Io, what, error)
        };
        if matches!(piece.sides, Sides::Left | Sides::Both) {
            self.left.read(piece.start, left, length).await.map_err(failed(0))?;
        }
        if matches!(piece.sides, Sides::Right | Sides::Both) {
            self.right.read(piece.start, right, length).await.map_err(failed(1))?;
        }
        let different = match piece.sides {
            Sides::Both => first_difference(&left[..length], &right[..length]),
            Sides::Left => first_nonzero(&left[..length]),
            Sides::Right => first_nonzero(&right[..length]),
        };
        if let Some(at) = different {
            self.mismatch.fetch_min(piece.start + at as u64, Ordering::AcqRel);
        }
        Ok(())
    }
}

/// Returns the first sector that differs.
fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    if left == right {
        return None;
    }
    let sector = SECTOR_BYTES as usize;
    let index = left.chunks(sector).zip(right.chunks(sector)).position(|(left, right)| left != right)?;
    Some(index * sector)
}

/// Returns the first sector that is not all zeros.
fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    let sector = SECTOR_BYTES as usize;
    bytes.chunks(sector).position(|bytes| !crate::zeros::is_zero(bytes)).map(|index| index * sector)
}
