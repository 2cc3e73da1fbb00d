//! Discard, write-zeroes and changes of length, by `fallocate` or, if that is not supported, by other means.

use super::bounce;
use super::lane::Lane;
use crate::base::call::Action;
use block::{IoError, IoErrorKind, IoResult, RangeGuard};
use memory::IoBuf;
use std::ops::Range;
use std::sync::atomic::Ordering;

const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;

/// Bytes in one write, if zeros have to be written.
const CHUNK_BYTES: u64 = 1 << 20;

/// Ways to zero a range, best first. A file remembers the best one that it is not known to lack.
const RUNG_ZERO_RANGE: u8 = 0;
const RUNG_PUNCH: u8 = 1;
const RUNG_WRITE: u8 = 2;

fn is_unsupported(result: IoResult) -> bool {
    matches!(result, Err(error) if error.kind() == IoErrorKind::Unsupported)
}

impl Lane {
    async fn fallocate(&self, mode: i32, offset: u64, length: u64) -> IoResult {
        self.start(Action::Fallocate { mode, length }, offset, self.target.no_data.clone()).await
    }
}

/// Gives a range back to the host.
pub(crate) async fn discard(lane: Lane, offset: u64, length: u64) -> IoResult {
    let file = &lane.target.file;
    // A device takes only whole blocks. The rest may stay.
    let (offset, length) = inner(offset, length, u64::from(file.fallocate_unit_bytes));
    if length == 0 {
        return Ok(());
    }
    let _held = hold(&lane, offset..offset + length).await;
    let punched = lane.fallocate(PUNCH_HOLE, offset, length).await;
    // A plain discard promises no zeros, so it is not used if zeros were promised.
    match file.info.block_device && !file.info.discard_zeroes && is_unsupported(punched) {
        true => lane.start(Action::DiscardBlocks { length }, offset, lane.target.no_data.clone()).await,
        false => punched,
    }
}

/// Returns the part of a range that consists of whole units.
fn inner(offset: u64, length: u64, unit: u64) -> (u64, u64) {
    let start = offset.next_multiple_of(unit);
    let end = (offset + length) / unit * unit;
    (start, end.saturating_sub(start))
}

/// Locks a range against read-modify-writes, if the file can have any; see [`crate::file::rmw_lock`].
async fn hold(lane: &Lane, range: Range<u64>) -> Option<RangeGuard<'_>> {
    let file = &lane.target.file;
    match file.alignment.is_none() {
        true => None,
        false => Some(file.rmw_lock.ranges.lock(range).await),
    }
}

/// Makes the file exactly `length` bytes long.
pub(crate) async fn set_length(lane: Lane, length: u64) -> IoResult {
    if lane.target.file.info.block_device {
        return match lane.target.file.length_now()? == length {
            true => Ok(()),
            false => Err(IoError::new(IoErrorKind::Unsupported)),
        };
    }
    let _held = hold(&lane, length..u64::MAX).await;
    lane.start(Action::Truncate, length, lane.target.no_data.clone()).await?;
    sync_if_write_through(&lane).await
}

/// Makes a range read as zeros, and the file long enough to hold it.
pub(crate) async fn write_zeroes(lane: Lane, offset: u64, length: u64, may_unmap: bool) -> IoResult {
    // A device's `fallocate` takes only whole blocks. The rest is written.
    let (start, middle) = inner(offset, length, u64::from(lane.target.file.fallocate_unit_bytes));
    if middle == 0 {
        write(&lane, offset, length).await?;
    } else {
        write(&lane, offset, start - offset).await?;
        zero(&lane, start, middle, may_unmap).await?;
        write(&lane, start + middle, offset + length - start - middle).await?;
    }
    sync_if_write_through(&lane).await
}

async fn sync_if_write_through(lane: &Lane) -> IoResult {
    match lane.target.file.write_through {
        true => lane.start(Action::Sync, 0, lane.target.no_data.clone()).await,
        false => Ok(()),
    }
}

async fn zero(lane: &Lane, offset: u64, length: u64, may_unmap: bool) -> IoResult {
    let held = hold(lane, offset..offset + length).await;
    let zeroed = zero_by_fallocate(lane, offset, length, may_unmap).await;
    drop(held);
    if is_unsupported(zeroed) { write(lane, offset, length).await } else { zeroed }
}

async fn zero_by_fallocate(lane: &Lane, offset: u64, length: u64, may_unmap: bool) -> IoResult {
    let rung = &lane.target.file.zeroes_rung;
    if may_unmap && rung.load(Ordering::Relaxed) < RUNG_WRITE {
        let punched = punch(lane, offset, length).await;
        if !is_unsupported(punched) {
            return punched;
        }
    }
    if rung.load(Ordering::Relaxed) == RUNG_ZERO_RANGE {
        let zeroed = lane.fallocate(ZERO_RANGE, offset, length).await;
        if !is_unsupported(zeroed) {
            return zeroed;
        }
        rung.fetch_max(RUNG_PUNCH, Ordering::Relaxed);
    }
    if rung.load(Ordering::Relaxed) == RUNG_PUNCH {
        let punched = match punch(lane, offset, length).await {
            // The space is allocated again: it must stay reserved, as with written zeros.
            Ok(()) => lane.fallocate(0, offset, length).await,
            failed => failed,
        };
        if !is_unsupported(punched) {
            return punched;
        }
        rung.fetch_max(RUNG_WRITE, Ordering::Relaxed);
    }
    Err(IoError::new(IoErrorKind::Unsupported))
}

/// Punches a hole, and makes the file longer if the range ends behind its end.
async fn punch(lane: &Lane, offset: u64, length: u64) -> IoResult {
    // What lies behind the end reads as zeros once the file is longer, and may be space that was reserved.
    if lane.target.file.length_now()? > offset {
        lane.fallocate(PUNCH_HOLE, offset, length).await?;
    }
    let end = offset + length;
    if lane.target.file.length_now()? >= end {
        return Ok(());
    }
    // Allocating the last byte makes the file longer. Unlike a truncation it cannot cut the file if another writer
    // makes it grow meanwhile.
    lane.fallocate(0, end - 1, 1).await
}

thread_local! {
    static ZEROS: IoBuf = IoBuf::zeroed(CHUNK_BYTES as usize);
}

/// Returns a chunk of zeros that all requests of the thread share: a guest may have thousands in flight.
fn zeros() -> IoBuf {
    ZEROS.try_with(IoBuf::clone).unwrap_or_else(|_| IoBuf::zeroed(CHUNK_BYTES as usize))
}

async fn write(lane: &Lane, offset: u64, length: u64) -> IoResult {
    if length == 0 {
        return Ok(());
    }
    let zeros = zeros();
    let mut done = 0;
    while done < length {
        let count = (length - done).min(CHUNK_BYTES);
        let window = zeros.whole().slice(0, count as usize);
        match lane.target.file.alignment.is_none() {
            true => lane.start(Action::Write { durable: false }, offset + done, window).await?,
            false => bounce::write(lane.clone(), offset + done, window, false).await?,
        }
        done += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_write_zeros_share_them() {
        let (one, other) = (zeros(), zeros());
        assert_eq!(one.segments()[0].as_ptr(), other.segments()[0].as_ptr());
        assert!(one.whole().is_zero() && one.length_bytes() as u64 == CHUNK_BYTES);
    }
}
