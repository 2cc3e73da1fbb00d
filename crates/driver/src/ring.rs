//! One ring with what belongs to its descriptor heads: slots, status bytes, bounce buffers. Between queues it is parked
//! in the driver, so it can move to another thread; nothing in it counts references without atomics.

use crate::layout::{BOUNCE_BYTES, GUEST_BASE, QueueLayout};
use crate::queue_fds::QueueFds;
use block::{Error, ErrorKind, Result};
use memory::GuestMemory;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio::blk::{HEADER_BYTES, RANGE_SEGMENT_BYTES, RangeSegment, RequestHeader, Status, request_type};
use virtio::driver_ring::{AddError, Buffer, DriverRing, IndirectLayout, RingError};
use virtio::ring_access::{LayoutError, RingAreas, RingLayout, SharedWords};

/// The owner of a request whose queue was dropped.
pub(crate) const ORPHAN: u32 = u32::MAX;
/// The status byte before the device has written it. The specification has no such status.
const STATUS_UNWRITTEN: u8 = 0xff;

/// Requests are shown to the device in groups of this many, so that a device that polls begins with them while the
/// driver still adds the others.
const SHOW_EVERY: u16 = 8;

/// What a request in flight belongs to.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// The operation's index in its queue.
    pub(crate) owner: u32,
    /// Where in the operation's data this part begins, and its bytes.
    pub(crate) skip_bytes: usize,
    pub(crate) length_bytes: usize,
    /// Bytes that the device writes on success: data of a read, and the status.
    expected_bytes: u32,
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
pub(crate) struct Ring {
    pub(crate) index: usize,
    pub(crate) fds: Arc<QueueFds>,
    ring: DriverRing,
    slots: SharedWords,
    status: SharedWords,
    layout: QueueLayout,
    /// The parts, by head.
    parts: Vec<Part>,
    bounce_free: Vec<u16>,
    /// The most data buffers in a request, and the longest of them.
    pub(crate) max_segments: usize,
    pub(crate) max_segment_bytes: u32,
    /// The request being built: header, data, status.
    pub(crate) buffers: Vec<Buffer>,
    /// Requests that have ended, and whether the watch has still to be told.
    ended: u64,
    untold: bool,
    /// Requests in flight without an owner.
    orphans: usize,
    pub(crate) limits: Limits,
    /// Simulates a lack of memory: whether the next attempt to start a request is refused.
    #[cfg(test)]
    pub(crate) refuse: Option<Box<dyn FnMut() -> bool + Send>>,
}

/// The negotiated ring features, and the device's limits on requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) ring_layout: RingLayout,
    pub(crate) event_idx: bool,
    pub(crate) max_segments: u32,
    pub(crate) max_segment_bytes: u32,
}

const NO_BUFFER: Buffer = Buffer { address: 0, length_bytes: 0, device_writes: false };

/// Makes the ring in shared memory, before the device knows of it.
pub(crate) fn prepare(
    memory: &Arc<GuestMemory>,
    layout: &QueueLayout,
    size: u16,
    limits: Limits,
) -> Result<DriverRing, LayoutError> {
    let areas = RingAreas::at_guest_addresses(limits.ring_layout, Arc::clone(memory), layout.ring(GUEST_BASE), size)?;
    let indirect = (layout.entries > 0).then(|| IndirectLayout {
        address: GUEST_BASE + (layout.slots + QueueLayout::table_in_slot()) as u64,
        stride_bytes: layout.slot_bytes,
        entries: layout.entries,
    });
    DriverRing::new(areas, limits.event_idx, indirect)
}

impl Ring {
    /// Makes a ring. `ring` comes from [`prepare`], and the device was given `fds`.
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
            ended: 0,
            untold: false,
            orphans: 0,
            limits,
            #[cfg(test)]
            refuse: None,
            ring,
        })
    }

    /// Replaces the ring by a new one. The device is done with the old one.
    pub(crate) fn renew(&mut self, ring: DriverRing) {
        self.ring = ring;
        self.parts.iter_mut().for_each(|part| *part = Part::default());
        self.bounce_free = (0..self.layout.bounce_count).rev().collect();
        self.buffers.clear();
        self.tell_progress();
    }

    /// Tells the watch how far the ring is.
    pub(crate) fn tell_progress(&mut self) {
        self.untold = false;
        let progress = self.ended << 16 | u64::from(self.in_flight());
        self.fds.progress.store(progress, Ordering::Relaxed);
    }

    /// Tells the watch that nobody waits for requests in flight.
    pub(crate) fn tell_idle(&self) {
        self.fds.progress.store(self.ended << 16, Ordering::Relaxed);
    }

    /// Whether requests have ended since progress was told.
    pub(crate) fn has_untold_ends(&self) -> bool {
        self.untold
    }

    /// Begins to build a request; data buffers are pushed to `buffers` next.
    pub(crate) fn begin(&mut self) {
        self.buffers.clear();
        self.buffers.push(NO_BUFFER);
    }

    /// Returns how many data buffers were pushed so far.
    pub(crate) fn segments(&self) -> usize {
        self.buffers.len().saturating_sub(1)
    }

    /// Whether there is room for another request.
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
        #[cfg(test)]
        if self.refuse.as_mut().is_some_and(|refuse| refuse()) {
            return Err(AddError::Full);
        }
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
            // No request is longer than `MAX_REQUEST_BYTES`.
            part.expected_bytes = 1 + if header.kind == request_type::IN { length as u32 } else { 0 };
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

    /// Takes bounce buffers for the next request, for at most `length_bytes`. Returns how many bytes they hold.
    /// [`Ring::start`] finds them by the request's head.
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

    /// Gives back what [`Ring::push_bounce`] took, if the request was not started after all.
    pub(crate) fn unpush_bounce(&mut self) {
        if let Some(head) = self.ring.next_head() {
            self.free_bounce(head);
        }
    }

    /// Returns how many bounce buffers are free.
    pub(crate) fn bounce_left(&self) -> usize {
        self.bounce_free.len()
    }

    /// Returns the bounce buffers of the next request.
    pub(crate) fn next_bounce(&self) -> &[u16] {
        let part = self.ring.next_head().and_then(|head| self.parts.get(usize::from(head)));
        part.map_or(&[], |part| &part.bounce)
    }

    /// Returns where in the shared memory the first of them lies.
    pub(crate) fn next_bounce_offset(&self) -> Option<usize> {
        let first = self.next_bounce().first()?;
        Some(self.layout.bounce + usize::from(*first) * BOUNCE_BYTES)
    }

    /// Returns what the request at `head` belongs to.
    pub(crate) fn part(&self, head: u16) -> Option<&Part> {
        self.parts.get(usize::from(head))
    }

    /// Gives back the bounce buffers of the request at `head`, once their contents are copied.
    pub(crate) fn free_bounce(&mut self, head: u16) {
        if let Some(part) = self.parts.get_mut(usize::from(head)) {
            self.bounce_free.append(&mut part.bounce);
        }
    }

    /// Takes the next request that came back. A read has failed, whatever its status, if the device says that it wrote
    /// another length than was asked for: part of the buffer may be old (2.7.8.2).
    pub(crate) fn pop(&mut self) -> Result<Option<Ended>, RingError> {
        let Some(used) = self.ring.pop_used()? else { return Ok(None) };
        self.ended = self.ended.wrapping_add(1);
        self.untold = true;
        let expected = self.parts.get(usize::from(used.head)).map_or(0, |part| part.expected_bytes);
        let mut status = Status::from_byte(self.status.byte(usize::from(used.head)));
        if used.written_bytes != expected && expected > 1 && status == Status::Ok {
            tracing::error!(written = used.written_bytes, expected, "the device says that it read another length");
            status = Status::IoErr;
        }
        Ok(Some(Ended { head: used.head, status }))
    }

    /// Shows the device what was started, and kicks it if it waits. Returns whether there was anything.
    pub(crate) fn publish(&mut self) -> bool {
        if !self.ring.is_unpublished() {
            return false;
        }
        if self.ring.publish() {
            crate::queue_fds::notify(&self.fds.kick);
            self.fds.kicks.fetch_add(1, Ordering::Relaxed);
        }
        self.tell_progress();
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

    /// Makes requests in flight orphans, because their queue is dropped or has failed. Returns how many had an owner
    /// before.
    pub(crate) fn orphan_all(&mut self) -> usize {
        for part in &mut self.parts {
            part.owner = ORPHAN;
        }
        self.tell_idle();
        let all = usize::from(self.in_flight());
        let before = std::mem::replace(&mut self.orphans, all);
        self.orphans.saturating_sub(before)
    }

    /// Notes that an orphan has ended.
    pub(crate) fn orphan_done(&mut self) {
        self.orphans = self.orphans.saturating_sub(1);
    }

    /// Forgets all orphans, because the device is done with them. Returns how many there were.
    pub(crate) fn forget_orphans(&mut self) -> usize {
        std::mem::take(&mut self.orphans)
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ring {}, {} in flight", self.index, self.in_flight())
    }
}

/// Returns how much of a bounce buffer a segment uses: whole blocks, and no more than the device takes.
pub(crate) fn bounce_segment_bytes(max_segment_bytes: u32, block_bytes: usize) -> usize {
    let most = BOUNCE_BYTES.min(max_segment_bytes as usize);
    most - most % block_bytes.max(1)
}
