//! One request at a time.

use super::Guest;
use crate::model::stamped;
use crate::request::Request;
use block::{DiskInfo, DiskListener, IoErrorKind, OpFlags, Run, StatusQuery};
use std::sync::{Arc, Mutex, PoisonError};

/// The ways to write. The last has both flags.
const ALL_FLAGS: [OpFlags; 4] = [OpFlags::NONE, OpFlags::FUA, OpFlags::PREFLUSH, OpFlags::PREFLUSH.with(OpFlags::FUA)];

/// Returns how many bytes at the start of the disk a check may write.
fn playground(guest: &Guest<'_>) -> u64 {
    guest.info().size_bytes.min(1 << 20) / guest.block() * guest.block()
}

pub(super) fn tells_sane_sizes(guest: &mut Guest<'_>) -> Result<(), String> {
    let info = guest.info();
    let block = info.logical_block_bytes;
    if !block.is_power_of_two() || block < 512 {
        return Err(format!("a logical block of {block} bytes"));
    }
    if !info.size_bytes.is_multiple_of(u64::from(block)) || info.size_bytes < 1 << 16 {
        return Err(format!("a size of {} bytes with blocks of {block}", info.size_bytes));
    }
    if info.serial.len() > 20 {
        return Err(format!("a serial of {} bytes", info.serial.len()));
    }
    if info.discard && info.discard_granularity_bytes == 0 {
        return Err("discard without a granularity".to_owned());
    }
    if info.write_zeroes == info.read_only {
        return Err("write zeroes must be served exactly where writes are".to_owned());
    }
    Ok(())
}

/// Keeps the last change that was reported.
#[derive(Default)]
struct Hears(Mutex<Option<DiskInfo>>);

impl Hears {
    fn take(&self) -> Option<DiskInfo> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl DiskListener for Hears {
    fn info_changed(&self, info: &DiskInfo) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(info.clone());
    }
}

pub(super) fn tells_of_a_changed_cache(guest: &mut Guest<'_>) -> Result<(), String> {
    let hears = Arc::new(Hears::default());
    let listener: Arc<dyn DiskListener> = Arc::clone(&hears) as _;
    guest.disk.subscribe(Arc::downgrade(&listener));
    let first = guest.info().volatile_cache;
    for volatile in [!first, first] {
        let before = guest.info();
        guest.disk.set_volatile_cache(volatile);
        let (now, heard) = (guest.info(), hears.take());
        if now != before && heard.as_ref() != Some(&now) {
            return Err(format!("its cache changed to {volatile}, and a listener heard {heard:?}"));
        }
    }
    Ok(())
}

pub(super) fn reads_back_what_was_written(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let size = playground(guest);
    let mut image = guest.read(0, 0, size as usize)?;
    for (id, blocks) in [1, 3, 7, 8, 13, 1, 31, 64, 100, 127].into_iter().enumerate() {
        let length = (blocks * block).min(size);
        let offset = (id as u64 * 11 * block) % (size - length + block);
        let bytes = stamped(id as u64 + 1, offset, length as usize);
        guest.ok(0, Request::write(offset, &bytes[..]))?;
        image[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
        guest.expect(0, offset, &bytes, "the range just written")?;
    }
    guest.expect(0, 0, &image, "the whole playground")
}

pub(super) fn serves_memory_in_odd_pieces(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block() as usize;
    for (id, cuts) in
        [vec![1], vec![block], vec![7, 700], vec![block - 1, block + 1], vec![3, 4, 5, 6, 1500]].into_iter().enumerate()
    {
        let length = 8 * block;
        let mut pieces = Vec::new();
        let mut last = 0;
        for cut in cuts.into_iter().chain([length]) {
            pieces.push(cut - last);
            last = cut;
        }
        let offset = id as u64 * 3 * block as u64;
        let data = stamped(100 + id as u64, offset, length);
        guest.ok(0, Request::Write { offset, data: data[..].into(), pieces: pieces.clone(), flags: OpFlags::NONE })?;
        guest.expect(0, offset, &data, "a write from pieces")?;
        pieces.reverse();
        if guest.ok(0, Request::Read { offset, pieces })? != data {
            return Err("a read into pieces delivered something else".to_owned());
        }
    }
    Ok(())
}

pub(super) fn serves_the_last_sector(guest: &mut Guest<'_>) -> Result<(), String> {
    let (block, size) = (guest.block(), guest.info().size_bytes);
    let bytes = stamped(1, size - 2 * block, 2 * block as usize);
    guest.ok(0, Request::write(size - 2 * block, &bytes[..]))?;
    guest.expect(0, size - 2 * block, &bytes, "the end of the disk")?;
    guest.ok(0, Request::WriteZeroes { offset: size - block, length: block, may_unmap: true, flags: OpFlags::NONE })?;
    guest.expect(0, size - block, &vec![0; block as usize], "the last block")?;
    guest.expect(0, size - 2 * block, &bytes[..block as usize], "the last block but one")
}

pub(super) fn refuses_what_is_out_of_range(guest: &mut Guest<'_>) -> Result<(), String> {
    let (block, size) = (guest.block(), guest.info().size_bytes);
    let tail = guest.read(0, size - block, block as usize)?;
    let ranges = [
        (size, block),
        (size - block, 2 * block),
        (size + block, block),
        (u64::MAX, block),
        (u64::MAX - block + 1, block),
        (u64::MAX - 511, 512),
        (1 << 63, block),
    ];
    for (offset, length) in ranges {
        guest.refused(Request::read(offset, length as usize), IoErrorKind::OutOfRange)?;
        guest.refused(Request::write(offset, vec![1; length as usize]), IoErrorKind::OutOfRange)?;
    }
    let huge = [(0, u64::MAX), (block, u64::MAX - block + 1), (u64::MAX, u64::MAX), (0, size + block), (0, 1 << 63)];
    for (offset, length) in ranges.into_iter().chain(huge) {
        let zeroes = Request::WriteZeroes { offset, length, may_unmap: false, flags: OpFlags::NONE };
        guest.refused(zeroes, IoErrorKind::OutOfRange)?;
        if guest.info().discard {
            guest.refused(Request::Discard { offset, length }, IoErrorKind::OutOfRange)?;
        }
    }
    guest.expect(0, size - block, &tail, "the end of the disk after refused requests")?;
    // Not multiples of the block size: a disk may serve them, or refuse them as out of range.
    for (offset, length) in [(1, block), (0, block + 1), (block - 1, 2)] {
        match guest.call(0, Request::read(offset, length as usize))?.result {
            Err(error) if error.kind() != IoErrorKind::OutOfRange => {
                return Err(format!("read {offset}+{length}: {error}"));
            }
            _ => {}
        }
    }
    Ok(())
}

pub(super) fn completes_empty_requests(guest: &mut Guest<'_>) -> Result<(), String> {
    let size = guest.info().size_bytes;
    for offset in [0, guest.block()] {
        guest.ok(0, Request::read(offset, 0))?;
        guest.ok(0, Request::write(offset, Vec::new()))?;
        guest.ok(0, Request::WriteZeroes { offset, length: 0, may_unmap: true, flags: OpFlags::NONE })?;
    }
    // Behind the end either answer is right, but one must come.
    for offset in [size, size + 512, u64::MAX] {
        guest.call(0, Request::read(offset, 0))?;
        guest.call(0, Request::write(offset, Vec::new()))?;
        guest.call(0, Request::Discard { offset, length: 0 })?;
        guest.call(0, Request::WriteZeroes { offset, length: 0, may_unmap: true, flags: OpFlags::FUA })?;
    }
    Ok(())
}

pub(super) fn flushes_and_writes_through(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    guest.ok(0, Request::Flush)?;
    for (index, flags) in ALL_FLAGS.into_iter().enumerate() {
        let offset = 4 * block * index as u64;
        let data = stamped(1, offset, 3 * block as usize);
        guest.ok(0, Request::Write { offset, data: data[..].into(), pieces: Vec::new(), flags })?;
        guest.ok(0, Request::Flush)?;
        guest.ok(0, Request::Flush)?;
        guest.expect(0, offset, &data, "a flushed write")?;
        guest.ok(0, Request::Write { offset, data: Vec::new().into(), pieces: Vec::new(), flags })?;
        guest.ok(0, Request::WriteZeroes { offset, length: 0, may_unmap: false, flags })?;
        guest.expect(0, offset, &data, "after writes of nothing")?;
    }
    Ok(())
}

pub(super) fn discards_no_more_than_asked(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let size = playground(guest);
    let blocks = size / block;
    let image = stamped(1, 0, size as usize);
    // Ranges within others, the smallest range, and the whole.
    for (first, count) in [(1, 1), (3, blocks / 2), (blocks - 1, 1), (0, blocks)] {
        guest.ok(0, Request::write(0, &image[..]))?;
        let (offset, length) = (first * block, count * block);
        let result = guest.call(0, Request::Discard { offset, length })?.result;
        if let Err(error) = result
            && (guest.info().discard || error.kind() != IoErrorKind::Unsupported)
        {
            return Err(format!("discard {offset}+{length} failed: {error}"));
        }
        let found = guest.read(0, 0, size as usize)?;
        let sectors = found.chunks_exact(512).zip(image.chunks_exact(512));
        for (sector, (found, wanted)) in sectors.enumerate() {
            let at = sector as u64 * 512;
            let discarded = at >= offset && at < offset + length;
            if found != wanted && !(discarded && found.iter().all(|byte| *byte == 0)) {
                return Err(format!("discard {offset}+{length} left something else at byte {at}"));
            }
        }
    }
    Ok(())
}

pub(super) fn writes_zeroes_exactly(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let size = playground(guest);
    let blocks = size / block;
    for (case, (first, count)) in
        [(1, 1), (3, blocks / 2), (5, 7), (blocks - 1, 1), (0, blocks)].into_iter().enumerate()
    {
        for (may_unmap, flags) in
            [(false, OpFlags::NONE), (true, OpFlags::NONE), (true, OpFlags::FUA), (false, OpFlags::PREFLUSH)]
        {
            let mut image = stamped(case as u64 + 1, 0, size as usize);
            guest.ok(0, Request::write(0, &image[..]))?;
            let (offset, length) = (first * block, count * block);
            guest.ok(0, Request::WriteZeroes { offset, length, may_unmap, flags })?;
            image[offset as usize..][..length as usize].fill(0);
            guest.expect(0, 0, &image, "after write zeroes")?;
            let again = stamped(90, offset, block as usize);
            guest.ok(0, Request::write(offset, &again[..]))?;
            image[offset as usize..][..again.len()].copy_from_slice(&again);
            guest.expect(0, 0, &image, "after a write into zeroes")?;
        }
    }
    Ok(())
}

/// Returns the disk's block status of a range, after checking that its runs cover the range in order.
fn status_of(guest: &Guest<'_>, offset: u64, length: u64) -> Result<Vec<Run>, String> {
    let failed = |error| format!("block status of {offset}+{length}: {error}");
    let runs = guest.disk.block_status(&StatusQuery::of(offset, length)).map_err(failed)?;
    let runs = runs.collect::<block::Result<Vec<_>>>().map_err(failed)?;
    let end = offset.saturating_add(length).min(guest.info().size_bytes);
    let mut at = offset;
    for run in &runs {
        if run.start != at || run.length_bytes == 0 || run.end() > end {
            return Err(format!("block status of {offset}+{length}: {run:?} does not go on at {at}"));
        }
        at = run.end();
    }
    if at < end {
        return Err(format!("block status of {offset}+{length} ends at {at}, not at {end}"));
    }
    Ok(runs)
}

pub(super) fn block_status_tells_the_truth(guest: &mut Guest<'_>) -> Result<(), String> {
    let (block, size) = (guest.block(), guest.info().size_bytes);
    let span = playground(guest);
    let blocks = span / block;
    let (written, zeroed) = (blocks / 8 * block, blocks / 2 * block);
    guest.ok(0, Request::Discard { offset: 0, length: span }).or_else(|how| {
        // A disk without discard may refuse it.
        if guest.info().discard { Err(how) } else { Ok(Vec::new()) }
    })?;
    guest.ok(0, Request::write(written, stamped(1, written, 3 * block as usize)))?;
    guest.ok(0, Request::WriteZeroes { offset: zeroed, length: 5 * block, may_unmap: true, flags: OpFlags::NONE })?;
    guest.ok(0, Request::Flush)?;
    let contents = guest.read(0, 0, span as usize)?;
    let ranges =
        [(0, size), (0, u64::MAX), (written + block, block), (written - block, 2 * block), (size - block, size)];
    for (offset, length) in ranges.into_iter().chain([(0, 0), (size, block), (u64::MAX, 1)]) {
        for run in status_of(guest, offset, length)? {
            let range = run.start.min(span) as usize..run.end().min(span) as usize;
            let bytes = &contents[range];
            if run.zero && bytes.iter().any(|byte| *byte != 0) {
                return Err(format!("{run:?} does not read as zeros"));
            }
            if !run.zero && !run.data {
                return Err(format!("{run:?} is neither zeros nor data"));
            }
        }
    }
    Ok(())
}

pub(super) fn serves_large_requests(guest: &mut Guest<'_>) -> Result<(), String> {
    let length = guest.info().size_bytes.min(8 << 20) / guest.block() * guest.block();
    let image = stamped(1, 0, length as usize);
    guest.ok(0, Request::write(0, &image[..]))?;
    guest.expect(0, 0, &image, "a large write")
}

pub(super) fn a_read_only_disk_refuses_writes(guest: &mut Guest<'_>) -> Result<(), String> {
    if !guest.info().read_only {
        return Err("info() does not say that it is read-only".to_owned());
    }
    let block = guest.block();
    let before = guest.read(0, 0, 4 * block as usize)?;
    for flags in ALL_FLAGS {
        let data = vec![1; block as usize].into();
        guest.refused(Request::Write { offset: 0, data, pieces: Vec::new(), flags }, IoErrorKind::ReadOnly)?;
        let zeroes = Request::WriteZeroes { offset: block, length: block, may_unmap: flags.is_fua(), flags };
        guest.refused(zeroes, IoErrorKind::ReadOnly)?;
    }
    guest.refused(Request::Discard { offset: 2 * block, length: block }, IoErrorKind::ReadOnly)?;
    guest.ok(0, Request::Flush)?;
    guest.expect(0, 0, &before, "a read-only disk after refused writes")
}

/// The driver checks tags, memory and `in_flight()` at each step. Here it only gets something to check.
pub(super) fn delivers_only_what_completed(guest: &mut Guest<'_>) -> Result<(), String> {
    let block = guest.block();
    let mut requests = Vec::new();
    for index in 0..8 {
        requests.push(Request::write(index * block, vec![index as u8; block as usize]));
        requests.push(Request::read((8 + index) * block, block as usize));
        requests.push(Request::read(u64::MAX, block as usize));
        requests.push(Request::Flush);
    }
    let count = requests.len();
    guest.submit(0, requests);
    let replies = guest.drain()?;
    if replies.len() != count {
        return Err(format!("{count} requests brought {} replies", replies.len()));
    }
    let refused = replies.iter().filter(|reply| reply.result.is_err()).count();
    if refused != 8 { Err(format!("{refused} of 8 impossible requests were refused")) } else { Ok(()) }
}
