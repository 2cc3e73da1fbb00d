//! Makes one ring request of a part of an operation. Memory that the device shares is named directly; other memory goes
//! through bounce buffers. No request exceeds the device's limits.

use crate::layout::GUEST_BASE;
use crate::ring::Ring;
use crate::rules::{RangeRules, Rules};
use block::Priority;
use memory::{Segment, Window};
use virtio::blk::{RangeSegment, RequestHeader, SECTOR_SHIFT, request_type};
use virtio::driver_ring::{AddError, Buffer};

/// The most data in one ring request.
pub(crate) const MAX_REQUEST_BYTES: usize = 1 << 20;

/// Direction, first byte on the disk, priority, and the range of addresses that the device shares.
pub(crate) struct Way {
    pub(crate) kind: u32,
    pub(crate) offset: u64,
    pub(crate) priority: Priority,
    pub(crate) shared: (usize, usize),
}

/// Whether `segment` lies in the memory that the device shares.
pub(crate) fn is_shared(segment: &Segment, shared: (usize, usize)) -> bool {
    shared_address(segment, shared).is_some()
}

/// Returns the guest physical address of `segment`, if it lies in the shared memory.
fn shared_address(segment: &Segment, (start, length_bytes): (usize, usize)) -> Option<u64> {
    let skip = segment.as_ptr().addr().checked_sub(start)?;
    let fits = skip < length_bytes && segment.length_bytes() <= length_bytes - skip;
    fits.then(|| GUEST_BASE + skip as u64)
}

/// Issues one request for `data` from `skip` on. Returns its bytes.
pub(crate) fn issue_data(
    ring: &mut Ring,
    bounce: &[Window],
    rules: &Rules,
    way: Way,
    data: &Window,
    skip: usize,
    owner: u32,
) -> Result<u64, AddError> {
    ring.begin();
    let device_writes = way.kind == request_type::IN;
    let length = match push_direct(ring, rules, &way, data, skip) {
        0 => {
            let left = (data.length_bytes() - skip).min(MAX_REQUEST_BYTES);
            let length = ring.push_bounce(left, rules.block_bytes as usize, device_writes);
            if length == 0 {
                return Err(AddError::Full);
            }
            if !device_writes {
                copy_bounced(ring.next_bounce(), bounce, ring.max_segment_bytes, rules, |slot, at, most| {
                    slot.copy_from(0, &data.slice(skip + at, most.min(length - at)));
                    at + most < length
                });
            }
            length
        }
        length => length,
    };
    start_data(ring, (way.kind, way.priority), way.offset + skip as u64, owner, skip, length)
}

fn start_data(
    ring: &mut Ring,
    (kind, priority): (u32, Priority),
    at: u64,
    owner: u32,
    skip: usize,
    length: usize,
) -> Result<u64, AddError> {
    let header = RequestHeader { kind, priority: priority.ioprio().into(), sector: at >> SECTOR_SHIFT };
    match ring.start(header, owner, skip, length) {
        Ok(()) => Ok(length as u64),
        Err(error) => {
            ring.unpush_bounce();
            Err(error)
        }
    }
}

/// Pushes buffers for `data` from `skip` on, if the device shares that memory. Returns their bytes; zero if the data
/// must bounce.
fn push_direct(ring: &mut Ring, rules: &Rules, way: &Way, data: &Window, skip: usize) -> usize {
    let device_writes = way.kind == request_type::IN;
    if skip == 0
        && let Some(segment) = data.single_segment()
        && segment.length_bytes() <= MAX_REQUEST_BYTES.min(ring.max_segment_bytes as usize)
    {
        let Some(address) = shared_address(&segment, way.shared) else { return 0 };
        // It is no longer than the device's segments, so it fits.
        let length_bytes = segment.length_bytes() as u32;
        ring.buffers.push(Buffer { address, length_bytes, device_writes });
        return segment.length_bytes();
    }
    let left = (data.length_bytes() - skip).min(MAX_REQUEST_BYTES);
    let (mut total, mut shared) = (0, true);
    data.slice(skip, left).for_each_segment(|segment| {
        let Some(mut address) = shared_address(&segment, way.shared) else {
            shared = false;
            return;
        };
        let mut rest = segment.length_bytes();
        while rest > 0 && shared && ring.segments() < ring.max_segments {
            let length = rest.min(ring.max_segment_bytes as usize);
            ring.buffers.push(Buffer { address, length_bytes: length as u32, device_writes });
            address += length as u64;
            rest -= length;
            total += length;
        }
    });
    // A request consists of whole blocks: the excess is taken off its end.
    let mut excess = if shared { total % rules.block_bytes as usize } else { total };
    total -= excess;
    while excess > 0
        && let Some(last) = ring.buffers.last_mut()
    {
        let cut = excess.min(last.length_bytes as usize);
        last.length_bytes -= cut as u32;
        excess -= cut;
        if last.length_bytes == 0 {
            ring.buffers.pop();
        }
    }
    total
}

/// Writes zeros from bounce buffers, for a device without write-zeroes.
pub(crate) fn issue_zeros(
    ring: &mut Ring,
    bounce: &[Window],
    rules: &Rules,
    at: u64,
    left: usize,
    owner: u32,
) -> Result<u64, AddError> {
    ring.begin();
    let length = ring.push_bounce(left.min(MAX_REQUEST_BYTES), rules.block_bytes as usize, false);
    if length == 0 {
        return Err(AddError::Full);
    }
    for slot in ring.next_bounce().iter().filter_map(|index| bounce.get(usize::from(*index))) {
        slot.fill(0);
    }
    start_data(ring, (request_type::OUT, Priority::NONE), at, owner, 0, length)
}

/// Returns the first part of a range, as much as one request may name.
pub(crate) fn range_segment(offset: u64, length: u64, rules: RangeRules, block_bytes: u64, flags: u32) -> RangeSegment {
    let block_sectors = (block_bytes >> SECTOR_SHIFT).max(1);
    let most = (u64::from(rules.max_sectors) - u64::from(rules.max_sectors) % block_sectors).max(1);
    let (sector, left) = (offset >> SECTOR_SHIFT, length >> SECTOR_SHIFT);
    let mut sectors = left.min(most);
    if left > most {
        // The rest begins where the device can work in whole units (5.2.5, `..._sector_alignment`).
        let past = (sector + sectors) % u64::from(rules.align_sectors.max(1));
        let is_cut = past < sectors && (sectors - past).is_multiple_of(block_sectors);
        sectors -= if is_cut { past } else { 0 };
    }
    // At most a `u32`, by `most`.
    RangeSegment { sector, sector_count: sectors as u32, flags }
}

pub(crate) fn issue_range(ring: &mut Ring, kind: u32, range: RangeSegment, owner: u32) -> Result<u64, AddError> {
    ring.start_range(kind, range, owner)?;
    Ok(u64::from(range.sector_count) << SECTOR_SHIFT)
}

/// Calls `copy` for each bounce buffer of a request until it returns false. Its arguments are the buffer, where its
/// part of the data begins, and the most bytes of that.
pub(crate) fn copy_bounced(
    indices: &[u16],
    bounce: &[Window],
    max_segment_bytes: u32,
    rules: &Rules,
    mut copy: impl FnMut(&Window, usize, usize) -> bool,
) {
    let each = crate::ring::bounce_segment_bytes(max_segment_bytes, rules.block_bytes as usize);
    let mut at = 0;
    for slot in indices.iter().filter_map(|index| bounce.get(usize::from(*index))) {
        if !copy(slot, at, each) {
            return;
        }
        at += each;
    }
}
