//! Copying a part of a disk to the start of a new one.

use crate::failure::failed;
use crate::pipeline::{Pipeline, Spread, Worker};
use crate::{Control, JobDisk};
use block::{DiskIo, Error, ErrorKind, ReactorHandle, Result};
use memory::AlignedBuf;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The most bytes that are read and written at once. Larger clusters are copied whole.
const PIECE_BYTES: u64 = 512 << 10;
const DEPTH: usize = 8;

/// Copies `part` of `source` to the start of `target`, and makes it durable. Zeros are left out if the target reads as
/// zeros already (`target_is_zero`). No queue of the target may be open.
pub fn dd(
    source: &JobDisk,
    part: Range<u64>,
    target: &JobDisk,
    target_is_zero: bool,
    reactors: &[Arc<dyn ReactorHandle>],
    control: &mut Control<'_>,
) -> Result<()> {
    let total = part.end.saturating_sub(part.start);
    if target.info().size_bytes < total {
        return Err(Error::new(ErrorKind::Io, "output file is smaller than what is copied"));
    }
    let piece = PIECE_BYTES.max(target.unit_bytes());
    let pipeline = {
        let (source, target, start) = (source.clone(), target.clone(), part.start);
        Pipeline::start(reactors, Spread::All, DEPTH, total, move |ctx| {
            let (source, target) = (source.open(ctx)?, target.open(ctx)?);
            Ok(Copier { source, target, target_is_zero, start, piece: piece as usize })
        })
    };
    let mut at = 0;
    while at < total {
        let end = total.min(at + piece);
        if !pipeline.push(at..end, end - at, control) {
            break;
        }
        at = end;
    }
    target.finish(pipeline.finish(control), false, reactors, control)
}

struct Copier {
    source: Rc<DiskIo>,
    target: Rc<DiskIo>,
    target_is_zero: bool,
    start: u64,
    piece: usize,
}

impl Worker for Copier {
    /// A range of the target.
    type Item = Range<u64>;
    type Scratch = AlignedBuf;

    fn scratch(&self) -> AlignedBuf {
        AlignedBuf::zeroed(self.piece)
    }

    async fn work(&self, range: Range<u64>, buf: &mut AlignedBuf) -> Result<()> {
        let length = (range.end - range.start) as usize;
        let from = self.start + range.start;
        self.source.read(from, buf, length).await.map_err(|error| failed("reading", from, error))?;
        if self.target_is_zero && crate::zeros::is_zero(&buf[..length]) {
            return Ok(());
        }
        self.target.write(range.start, buf, 0..length).await.map_err(|error| failed("writing", range.start, error))
    }
}
