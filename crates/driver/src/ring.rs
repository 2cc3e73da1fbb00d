//! One ring with what belongs to its descriptor heads: slots, status bytes, bounce buffers. Between queues it is parked
//! in the driver, so it can move to another thread; nothing in it counts references without atomics.

use crate::layout::{BOUNCE_BYTES, GUEST_BASE, QueueLayout};
use crate::watch::QueueFds;
use block::{Error, ErrorKind, Result};
use memory::GuestMemory;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio::blk::{HEADER_BYTES, RANGE_SEGMENT_BYTES, RangeSegment, RequestHeader, Status};
use virtio::driver_ring::{AddError, Buffer, DriverRing, IndirectLayout, RingError};
use virtio::ring_access::{LayoutError, SharedWords, SplitAreas};

/// Stands for the owner of a request whose queue was dropped.
pub(crate) const ORPHAN: u32 = u32::MAX;
/// What a status byte holds before the device has written it: no status of the specification.
const STATUS_UNWRITTEN: u8 = 0xff;

/// A device that polls begins with the first requests of a batch while the driver still adds the others.
const SHOW_EVERY: u16 = 8;

/// What a request in flight belongs to.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// The queue's name for the operation.
    pub(crate) owner: u32,
    /// Where in the operation's data this part begins, and its bytes.
    pub(crate) skip_bytes: usize,
    pub(crate) length_bytes: usize,
    /// The bounce buffers it uses, in order.
    pub(crate) bounce: Vec<u16>,
}

/// A request that came back.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) head: u16,
    pub(crate) status: Status,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) index: usize,
    pub(crate) fds: Arc<QueueFds>,
    ring: DriverRing,
    slots: SharedWords,
    status: SharedWords,
    layout: QueueLayout,
    /// By head.
    parts: Vec<Part>,
    bounce_free: Vec<u16>,
    /// The most data buffers in a request, and the longest of them.
    pub(crate) max_segments: usize,
    pub(crate) max_segment_bytes: u32,
    /// The request being built: header, data, status.
    pub(crate) buffers: Vec<Buffer>,
}

/// What the device said about requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) event_idx: bool,
    pub(crate) max_segments: u32,
    pub(crate) max_segment_bytes: u32,
}

const NO_BUFFER: Buffer = Buffer { address: 0, length_bytes: 0, device_writes: false };

/// The ring's own memory, before the device knows of it.
pub(crate) fn prepare(
    memory: &Arc<GuestMemory>,
    layout: &QueueLayout,
    size: u16,
    event_idx: bool,
) -> Result<DriverRing, LayoutError> {
    let areas = SplitAreas::at_guest_addresses(Arc::clone(memory), layout.ring(GUEST_BASE), size)?;
    let indirect = (layout.entries > 0).then(|| IndirectLayout {
        address: GUEST_BASE + (layout.slots + QueueLayout::table_in_slot()) as u64,
        stride_bytes: layout.slot_bytes,
        entries: layout.entries,
    });
    DriverRing::new(areas, event_idx, indirect)
}

impl Ring {
    /// Puts the parts together. `ring` comes from [`prepare`], `fds` from starting it.
    pub(crate) fn new(
        index: usize,
        ring: DriverRing,
        fds: Arc<QueueFds>,
        memory: &Arc<GuestMemory>,
        layout: QueueLayout,
        limits: Limits,
    ) -> Result<Self> {
        let size = ring.size();
        let words = |offset: usize, length: usize| {
            SharedWords::at_guest_address(Arc::clone(memory), GUEST_BASE + offset as u64, length)
                .map_err(|error| Error::with_source(ErrorKind::Io, "the driver's shared memory", error))
        };
        let most = usize::from(ring.max_buffers()).saturating_sub(2).min(limits.max_segments as usize).max(1);
        Ok(Self {
            index,
            fds,
            slots: words(layout.slots, layout.slot_bytes * usize::from(size))?,
            status: words(layout.status, usize::from(size).next_multiple_of(8))?,
            layout,
            parts: std::iter::repeat_with(Part::default).take(usize::from(size)).collect(),
            bounce_free: (0..layout.bounce_count).rev().collect(),
            max_segments: most,
            max_segment_bytes: limits.max_segment_bytes,
            buffers: Vec::with_capacity(most + 2),
            ring,
        })
    }

    /// Begins to build a request; data buffers are pushed to `buffers` next.
    pub(crate) fn begin(&mut self) {
        self.buffers.clear();
        self.buffers.push(NO_BUFFER);
    }

    /// Data buffers pushed so far.
    pub(crate) fn segments(&self) -> usize {
        self.buffers.len().saturating_sub(1)
    }

    /// Whether another request can be started now.
    pub(crate) fn has_room(&self) -> bool {
        self.ring.next_head().is_some()
    }

    /// Adds the request that was built. On error (the ring is full) nothing has changed.
    pub(crate) fn start(
        &mut self,
        header: RequestHeader,
        owner: u32,
        skip: usize,
        length: usize,
    ) -> Result<(), AddError> {
        let head = self.ring.next_head().ok_or(AddError::Full)?;
        let slot = usize::from(head) * self.layout.slot_bytes;
        let address = self.slots.address() + slot as u64;
        self.slots.set_word(slot, u64::from(header.kind) | u64::from(header.priority) << 32);
        self.slots.set_word(slot + 8, header.sector);
        self.status.set_byte(usize::from(head), STATUS_UNWRITTEN);
        if let Some(first) = self.buffers.first_mut() {
            *first = Buffer { address, length_bytes: HEADER_BYTES as u32, device_writes: false };
        }
        let status = self.status.address() + u64::from(head);
        self.buffers.push(Buffer { address: status, length_bytes: 1, device_writes: true });
        if let Err(error) = self.ring.add(&self.buffers) {
            self.buffers.pop();
            return Err(error);
        }
        if let Some(part) = self.parts.get_mut(usize::from(head)) {
            (part.owner, part.skip_bytes, part.length_bytes) = (owner, skip, length);
        }
        if self.ring.unshown() >= SHOW_EVERY {
            self.ring.show();
        }
        Ok(())
    }

    /// As [`Ring::start`], with a discard's or write-zeroes' range as the data.
    pub(crate) fn start_range(&mut self, kind: u32, range: RangeSegment, owner: u32) -> Result<(), AddError> {
        let head = self.ring.next_head().ok_or(AddError::Full)?;
        let at = usize::from(head) * self.layout.slot_bytes + self.layout.range_in_slot();
        self.slots.set_word(at, range.sector);
        self.slots.set_word(at + 8, u64::from(range.sector_count) | u64::from(range.flags) << 32);
        self.begin();
        let address = self.slots.address() + at as u64;
        self.buffers.push(Buffer { address, length_bytes: RANGE_SEGMENT_BYTES as u32, device_writes: false });
        self.start(RequestHeader { kind, priority: 0, sector: 0 }, owner, 0, 0)
    }

    /// Takes bounce buffers for the request that starts next, for at most `length_bytes`. Returns for how many bytes
    /// there were buffers. [`Ring::start`] finds them by the request's head.
    pub(crate) fn push_bounce(&mut self, length_bytes: usize, block_bytes: usize, device_writes: bool) -> usize {
        let Some(head) = self.ring.next_head() else { return 0 };
        let Some(part) = self.parts.get_mut(usize::from(head)) else { return 0 };
        let most = bounce_segment_bytes(self.max_segment_bytes, block_bytes);
        let mut done = 0;
        while done < length_bytes && self.buffers.len() <= self.max_segments {
            let Some(index) = self.bounce_free.pop() else { break };
            let length = most.min(length_bytes - done);
            part.bounce.push(index);
            let address = GUEST_BASE + (self.layout.bounce + usize::from(index) * BOUNCE_BYTES) as u64;
            self.buffers.push(Buffer { address, length_bytes: length as u32, device_writes });
            done += length;
        }
        done
    }

    /// Gives back what [`Ring::push_bounce`] took, where the request was not started after all.
    pub(crate) fn unpush_bounce(&mut self) {
        if let Some(head) = self.ring.next_head() {
            self.free_bounce(head);
        }
    }

    /// The bounce buffers of the request that starts next.
    pub(crate) fn next_bounce(&self) -> &[u16] {
        let part = self.ring.next_head().and_then(|head| self.parts.get(usize::from(head)));
        part.map_or(&[], |part| &part.bounce)
    }

    /// Where in the shared memory the first of them lies.
    pub(crate) fn next_bounce_offset(&self) -> Option<usize> {
        let first = self.next_bounce().first()?;
        Some(self.layout.bounce + usize::from(*first) * BOUNCE_BYTES)
    }

    /// What the request at `head` belongs to.
    pub(crate) fn part(&self, head: u16) -> Option<&Part> {
        self.parts.get(usize::from(head))
    }

    /// Gives back the bounce buffers of the request at `head`, once their contents are copied.
    pub(crate) fn free_bounce(&mut self, head: u16) {
        if let Some(part) = self.parts.get_mut(usize::from(head)) {
            self.bounce_free.append(&mut part.bounce);
        }
    }

    /// The next request that came back.
    pub(crate) fn pop(&mut self) -> Result<Option<Ended>, RingError> {
        let Some(used) = self.ring.pop_used()? else { return Ok(None) };
        let status = Status::from_byte(self.status.byte(usize::from(used.head)));
        Ok(Some(Ended { head: used.head, status }))
    }

    /// Shows the device what was started, and kicks it if it waits. Returns whether there was anything.
    pub(crate) fn publish(&mut self) -> bool {
        if !self.ring.is_unpublished() {
            return false;
        }
        if self.ring.publish() {
            crate::watch::notify(&self.fds.kick);
            self.fds.kicks.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    pub(crate) fn has_used(&self) -> bool {
        self.ring.has_used()
    }

    pub(crate) fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    pub(crate) fn enable_callbacks(&mut self) -> bool {
        self.ring.enable_callbacks()
    }

    pub(crate) fn disable_callbacks(&self) {
        self.ring.disable_callbacks();
    }

    /// The queue is dropped: requests in flight have no owner from now on. Returns how many there are.
    pub(crate) fn orphan_all(&mut self) -> usize {
        for part in &mut self.parts {
            part.owner = ORPHAN;
        }
        usize::from(self.in_flight())
    }
}

/// How much of a bounce buffer a segment uses: whole blocks, no more than the device takes.
pub(crate) fn bounce_segment_bytes(max_segment_bytes: u32, block_bytes: usize) -> usize {
    let most = BOUNCE_BYTES.min(max_segment_bytes as usize);
    most - most % block_bytes.max(1)
}
