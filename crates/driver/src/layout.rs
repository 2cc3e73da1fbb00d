//! The layout of the shared memory: a part for each queue, then the memory for buffers.
//!
//! Each descriptor head has a slot: the request's header, its indirect table, and the range of a discard. The header
//! and the first three descriptors, which are all that most requests have, share a cache line. Status bytes lie apart,
//! because the device writes them, and side by side, because it writes those of a batch one after the other.

use crate::transport::QueueSetup;
use memory::Mapping;
use virtio::blk::{HEADER_BYTES, RANGE_SEGMENT_BYTES};
use virtio::ring_access::{DESCRIPTOR_BYTES, PackedPosition, RingAddresses, RingLayout, area_bytes};

/// Guest physical address of the first byte: not zero, so that a forgotten address is noticed.
pub(crate) const GUEST_BASE: u64 = 1 << 32;

/// Bytes of a bounce buffer.
pub(crate) const BOUNCE_BYTES: usize = 64 << 10;

const PAGE_BYTES: usize = memory::PAGE_BYTES;
const LINE_BYTES: usize = 64;

/// Offsets of one queue's parts in the shared memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLayout {
    table: usize,
    avail: usize,
    used: usize,
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    /// Descriptors in each slot's table.
    pub(crate) entries: u16,
    pub(crate) status: usize,
    pub(crate) bounce: usize,
    pub(crate) bounce_count: u16,
    /// The offset behind the last byte.
    pub(crate) end: usize,
}

/// Hands out offsets from low to high.
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, length_bytes: usize, alignment_bytes: usize) -> usize {
        let start = self.0.next_multiple_of(alignment_bytes);
        self.0 = start + length_bytes;
        start
    }
}

impl QueueLayout {
    /// Lays out a queue of `size` entries from `start` on. Each head's table has `entries` descriptors (zero: no
    /// indirect requests). There are `bounce_bytes` of bounce buffers.
    pub(crate) fn new(start: usize, size: u16, entries: u16, bounce_bytes: usize) -> Self {
        let mut cursor = Cursor(start);
        let (table_bytes, avail_bytes, used_bytes) = area_bytes(size);
        let table = cursor.take(table_bytes, PAGE_BYTES);
        let avail = cursor.take(avail_bytes, LINE_BYTES);
        let used = cursor.take(used_bytes, PAGE_BYTES);
        let slot = HEADER_BYTES + usize::from(entries) * DESCRIPTOR_BYTES + RANGE_SEGMENT_BYTES;
        let slot_bytes = slot.next_multiple_of(LINE_BYTES);
        let slots = cursor.take(slot_bytes * usize::from(size), PAGE_BYTES);
        let status = cursor.take(usize::from(size), LINE_BYTES);
        let bounce_count = u16::try_from(bounce_bytes / BOUNCE_BYTES).unwrap_or(u16::MAX);
        let bounce = cursor.take(usize::from(bounce_count) * BOUNCE_BYTES, PAGE_BYTES);
        let end = cursor.take(0, PAGE_BYTES);
        Self { table, avail, used, slots, slot_bytes, entries, status, bounce, bounce_count, end }
    }

    /// Returns the ring's areas, counted from `base`.
    pub(crate) fn ring(&self, base: u64) -> RingAddresses {
        let at = |offset: usize| base + offset as u64;
        RingAddresses { table: at(self.table), avail: at(self.avail), used: at(self.used) }
    }

    pub(crate) fn table_in_slot() -> usize {
        HEADER_BYTES
    }

    /// Returns where a slot keeps the range of a discard or write-zeroes.
    pub(crate) fn range_in_slot(&self) -> usize {
        HEADER_BYTES + usize::from(self.entries) * DESCRIPTOR_BYTES
    }
}

/// Returns the setup of the ring at `layout`.
pub(crate) fn queue_setup(layout: &QueueLayout, size: u16, ring: RingLayout, mapping: &Mapping) -> QueueSetup {
    let base = mapping.as_ptr().as_ptr().addr() as u64;
    // Zero, and the wrap counter of the first turn (2.8.1).
    let first_position = if ring == RingLayout::Packed { PackedPosition::START.to_bits() } else { 0 };
    QueueSetup { size, first_position, guest_addresses: layout.ring(GUEST_BASE), user_addresses: layout.ring(base) }
}
