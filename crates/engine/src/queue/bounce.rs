//! Bounce buffers and read-modify-write. With them a queue takes any memory, offset and length, although direct I/O
//! needs aligned ones. The buffers come from the pool, in a few sizes. Each takes room from the disk's part of the
//! budget first. A task with a buffer waits only for the storage: it takes range locks before.

use super::lane::Lane;
use crate::base::call::Action;
use crate::file::rmw_lock;
use block::{IoResult, turn};
use memory::{BufferUse, Window};
use std::ops::Range;

/// Cuts an aligned range into steps, each as long as the disk's part of the budget allows a bounce buffer to be.
fn steps(lane: &Lane, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let step = lane.target.file.buffers.piece_bytes();
    (range.start..range.end).step_by(step).map(move |start| start..(start + step as u64).min(range.end))
}

/// Waits until there is room for a step's buffer, and returns it.
async fn buffer_for(lane: &Lane, step: &Range<u64>) -> IoResult<Window> {
    let buf = lane.target.file.buffers.buffer(BufferUse::Bounce, length_of(step)).await?;
    Ok(buf.whole())
}

fn length_of(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

/// Returns the part of the request at `offset` that lies in `step`: where it starts in the step and in the request, and
/// its length.
fn overlap(step: &Range<u64>, offset: u64, length: u64) -> (usize, usize, usize) {
    let (start, end) = (step.start.max(offset), step.end.min(offset + length));
    ((start - step.start) as usize, (start - offset) as usize, end.saturating_sub(start) as usize)
}

/// Reads through a bounce buffer when direct I/O does not take the request as it is.
pub(crate) async fn read(lane: Lane, offset: u64, data: Window, need_bytes: usize) -> IoResult {
    let length = data.length_bytes() as u64;
    for step in steps(&lane, lane.target.file.alignment.widen(offset, length)) {
        let (in_step, in_data, count) = overlap(&step, offset, length);
        let window = buffer_for(&lane, &step).await?;
        // The file may end within the last unit, behind the requested range.
        let need_bytes = if need_bytes == 0 { 0 } else { in_step + count };
        lane.start(Action::Read { need_bytes }, step.start, window.clone()).await?;
        window.slice(in_step, count).copy_to(&data.slice(in_data, count));
        turn::note_moved(count);
    }
    Ok(())
}

/// Carries out a write that must hold its range, because the file is tracked or because direct I/O does not take it as
/// it is.
pub(crate) async fn write(lane: Lane, offset: u64, data: Window, durable: bool) -> IoResult {
    let file = &lane.target.file;
    let length = data.length_bytes() as u64;
    if file.alignment.fits_range(offset, length) {
        let _held = file.rmw_lock.ranges.lock(offset..offset + length).await;
        let written = match file.alignment.fits(offset, &data) {
            true => lane.start(Action::Write { durable }, offset, data).await,
            false => write_steps(&lane, offset, &data, durable, u64::MAX).await,
        };
        file.rmw_lock.aligned_write_ended();
        return written;
    }
    let _at_work = rmw_lock::settle(&file.rmw_lock).await;
    read_modify_write(&lane, offset, &data, durable).await
}

/// Writes a range that covers only parts of some units. The file is settled.
///
/// If the last unit reaches behind the end of a regular file, writing it makes the file too long, and the file is cut
/// back afterwards. Until then the file's length must not change otherwise. So the lock covers everything behind the
/// range. Every write that could make the file longer, and every change of its length, must lock a part of that.
async fn read_modify_write(lane: &Lane, offset: u64, data: &Window, durable: bool) -> IoResult {
    let file = &lane.target.file;
    let end = offset + data.length_bytes() as u64;
    let units = file.alignment.widen(offset, data.length_bytes() as u64);
    let held = file.rmw_lock.ranges.lock(units.clone()).await;
    if file.info.block_device || lane.target.file.length_now()? >= units.end {
        return write_steps(lane, offset, data, durable, u64::MAX).await;
    }
    drop(held);
    let _held = file.rmw_lock.ranges.lock(units.start..u64::MAX).await;
    let old_length = lane.target.file.length_now()?;
    let written = write_steps(lane, offset, data, durable, old_length).await;
    let length = old_length.max(end);
    if lane.target.file.length_now()? > length {
        lane.start(Action::Truncate, length, lane.target.no_data.clone()).await?;
        if durable {
            lane.start(Action::Sync, 0, lane.target.no_data.clone()).await?;
        }
    }
    written
}

/// Writes through bounce buffers, in whole units. The parts of the first and last unit that the request does not cover
/// are read first. `file_length` limits that reading. The caller has locked the units.
async fn write_steps(lane: &Lane, offset: u64, data: &Window, durable: bool, file_length: u64) -> IoResult {
    let alignment = lane.target.file.alignment;
    let (length, unit) = (data.length_bytes() as u64, alignment.unit());
    for step in steps(lane, alignment.widen(offset, length)) {
        let (in_step, in_data, count) = overlap(&step, offset, length);
        let window = buffer_for(lane, &step).await?;
        let last = step.end - unit;
        if in_step > 0 {
            fill_unit(lane, &window, &step, step.start, file_length).await?;
        }
        if in_step + count < length_of(&step) && (in_step == 0 || last != step.start) {
            fill_unit(lane, &window, &step, last, file_length).await?;
        }
        data.slice(in_data, count).copy_to(&window.slice(in_step, count));
        data.check()?;
        turn::note_moved(count);
        lane.start(Action::Write { durable }, step.start, window).await?;
    }
    Ok(())
}

/// Reads the unit at `at` into its place in the step's window; the unit is zeros behind the end of the file.
async fn fill_unit(lane: &Lane, window: &Window, step: &Range<u64>, at: u64, file_length: u64) -> IoResult {
    let unit = lane.target.file.alignment.unit() as usize;
    let place = window.slice((at - step.start) as usize, unit);
    if at >= file_length {
        place.fill(0);
        return Ok(());
    }
    lane.start(Action::Read { need_bytes: 0 }, at, place).await
}
