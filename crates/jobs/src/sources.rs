//! Several disks, one behind the other, read as one.

use crate::JobDisk;
use crate::failure::failed;
use block::{DiskIo, IoError, ReactorCtx, Result, SECTOR_BYTES};
use memory::AlignedBuf;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// A range that could not be read and counts as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unreadable {
    /// The index of the source, from 0 on.
    pub source: usize,
    /// First byte of that source.
    pub offset: u64,
    /// The length in bytes: whole sectors.
    pub length_bytes: u64,
    /// The error.
    pub error: IoError,
}

/// Goes on where a source cannot be read. Called with each lost range, on the threads that read.
#[derive(Clone)]
pub struct Salvage(pub Arc<dyn Fn(Unreadable) + Send + Sync>);

impl fmt::Debug for Salvage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Salvage")
    }
}

/// Returns the range of each of `disks` when they are put one after another.
pub(crate) fn places(disks: &[JobDisk]) -> Vec<Range<u64>> {
    let mut end = 0;
    let place = |disk: &JobDisk| {
        let start = end;
        end += disk.info().size_bytes;
        start..end
    };
    disks.iter().map(place).collect()
}

/// Queues of all sources on one reactor.
pub(crate) struct Sources {
    disks: Vec<Rc<DiskIo>>,
    places: Vec<Range<u64>>,
    salvage: Option<Salvage>,
}

/// A part of a read that lies in one source.
struct Part {
    index: usize,
    /// The offset in the source.
    offset: u64,
    /// The place in the buffer.
    bytes: Range<usize>,
}

impl Sources {
    /// Opens queues of all sources. Called on the reactor's thread.
    pub(crate) fn open(sources: &[JobDisk], ctx: &Rc<dyn ReactorCtx>, salvage: Option<Salvage>) -> Result<Self> {
        let disks = sources.iter().map(|source| source.open(ctx)).collect::<Result<_>>()?;
        Ok(Self { disks, places: places(sources), salvage })
    }

    /// Returns the source that holds all of a range, and the offset in it.
    pub(crate) fn one_that_holds(&self, range: &Range<u64>) -> Option<(usize, u64)> {
        let index = self.places.partition_point(|place| place.end <= range.start);
        let place = self.places.get(index)?;
        (range.end <= place.end).then(|| (index, range.start - place.start))
    }

    /// Fills the first `length_bytes` of `buf`.
    pub(crate) async fn read(&self, offset: u64, buf: &mut AlignedBuf, length_bytes: usize) -> Result<()> {
        let mut done = 0;
        while done < length_bytes {
            let at = offset + done as u64;
            let index = self.places.partition_point(|place| place.end <= at);
            let place = self.places.get(index).ok_or_else(|| failed("reading", at, IoError::EIO))?;
            let count = ((place.end - at) as usize).min(length_bytes - done);
            let part = Part { index, offset: at - place.start, bytes: done..done + count };
            match self.disks[index].read_part(part.offset, buf, part.bytes.clone()).await {
                Ok(()) => {}
                Err(error) => match &self.salvage {
                    Some(salvage) => self.salvage(salvage, &part, buf).await,
                    None => return Err(failed("reading", at, error)),
                },
            }
            done += count;
        }
        Ok(())
    }

    /// Reads the readable sectors of a part that cannot be read as a whole: tries its halves, then the halves of those
    /// that fail.
    async fn salvage(&self, salvage: &Salvage, part: &Part, buf: &mut AlignedBuf) {
        let sector = SECTOR_BYTES as usize;
        let mut lost: Option<Unreadable> = None;
        let mut left = halves(part.bytes.clone());
        while let Some(bytes) = left.pop() {
            let offset = part.offset + (bytes.start - part.bytes.start) as u64;
            let Err(error) = self.disks[part.index].read_part(offset, buf, bytes.clone()).await else { continue };
            if bytes.len() > sector {
                left.extend(halves(bytes));
                continue;
            }
            let length_bytes = bytes.len() as u64;
            buf[bytes].fill(0);
            match &mut lost {
                Some(lost) if lost.offset + lost.length_bytes == offset && lost.error == error => {
                    lost.length_bytes += length_bytes;
                }
                _ => {
                    let next = Unreadable { source: part.index, offset, length_bytes, error };
                    lost.replace(next).into_iter().for_each(|lost| (salvage.0)(lost));
                }
            }
        }
        lost.into_iter().for_each(|lost| (salvage.0)(lost));
    }
}

/// Returns the halves of a range, whole sectors, the second one first; the range itself if it is a sector or less.
fn halves(range: Range<usize>) -> Vec<Range<usize>> {
    let sector = SECTOR_BYTES as usize;
    if range.len() <= sector {
        return vec![range];
    }
    let middle = range.start + (range.len() / 2).next_multiple_of(sector).min(range.len());
    [middle..range.end, range.start..middle].into_iter().filter(|half| !half.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halving_ends_with_every_sector_once_and_in_order() {
        for length in [512, 1024, 1536, 7 * 512, 65536] {
            let mut left = halves(1000..1000 + length);
            let mut at = 1000;
            while let Some(range) = left.pop() {
                if range.len() > 512 {
                    assert!(range.len() < length);
                    left.extend(halves(range));
                } else {
                    assert_eq!(range, at..at + 512);
                    at = range.end;
                }
            }
            assert_eq!(at, 1000 + length);
        }
    }
}
