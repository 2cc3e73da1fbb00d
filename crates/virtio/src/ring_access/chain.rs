//! The resolved buffers of a descriptor chain and, for each head, those that a request in flight still needs.

use crate::fault::FaultReason;
use memory::{GuestMemory, IoBuf, MemoryError, Segment, Window};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// The most memory segments in one chain: the kernel's limit for one vectored call.
pub const MAX_CHAIN_SEGMENTS: usize = 1024;

/// The most bytes in one chain: the largest requests seen (firmware loading a gigabyte), with header and status.
pub const MAX_CHAIN_BYTES: u32 = (1 << 30) + 4096;

/// The memory of a request in flight.
#[derive(Default)]
struct Slot {
    data: IoBuf,
    status: Option<NonNull<u8>>,
}

/// Scratch space for the current chain, and one slot for each head for chains in flight.
///
/// Holds the guest's memory, so every segment in it is mapped. If it is dropped while a window of a slot is still held
/// (the kernel may be writing), the memory is never unmapped. So owners wait for their requests in flight first.
pub struct ChainMemory {
    memory: Arc<GuestMemory>,
    /// The region found last.
    hint: usize,
    /// The segments of the current chain, readable ones first.
    segments: Vec<Segment>,
    readable_segments: usize,
    readable_bytes: u32,
    writable_bytes: u32,
    slots: Box<[Slot]>,
    /// A window was still held when its slot was reused.
    outlived: bool,
}

impl ChainMemory {
    /// Makes the space for a ring with `size` descriptors over `memory`.
    #[must_use]
    pub fn new(memory: Arc<GuestMemory>, size: u16) -> Self {
        let slots = std::iter::repeat_with(Slot::default).take(usize::from(size)).collect();
        let segments = Vec::with_capacity(usize::from(size).min(MAX_CHAIN_SEGMENTS));
        Self {
            memory,
            hint: 0,
            segments,
            readable_segments: 0,
            readable_bytes: 0,
            writable_bytes: 0,
            slots,
            outlived: false,
        }
    }

    /// Forgets the current chain.
    #[inline]
    pub fn begin(&mut self) {
        self.segments.clear();
        self.readable_segments = 0;
        self.readable_bytes = 0;
        self.writable_bytes = 0;
    }

    /// Adds a buffer to the chain.
    // Called three times for a usual request: a call would save and restore as many registers as it uses.
    #[inline(always)]
    pub fn push(&mut self, address: u64, length_bytes: u32, writable: bool) -> Result<(), FaultReason> {
        if length_bytes == 0 {
            return Err(FaultReason::ZeroLength);
        }
        let (own_bytes, other_bytes) = match writable {
            true => (&mut self.writable_bytes, self.readable_bytes),
            false if self.writable_bytes > 0 => return Err(FaultReason::WrongOrder),
            false => (&mut self.readable_bytes, 0),
        };
        // Neither can wrap: the sum so far is capped below.
        *own_bytes = own_bytes.saturating_add(length_bytes);
        if own_bytes.saturating_add(other_bytes) > MAX_CHAIN_BYTES {
            return Err(FaultReason::TooManyBytes { limit: MAX_CHAIN_BYTES });
        }
        match self.memory.segment(address, length_bytes, &mut self.hint) {
            Ok(segment) => self.put(segment)?,
            Err(_) => self.push_across_regions(address, length_bytes)?,
        }
        if !writable {
            self.readable_segments = self.segments.len();
        }
        Ok(())
    }

    #[inline(always)]
    fn put(&mut self, segment: Segment) -> Result<(), FaultReason> {
        if self.segments.len() >= MAX_CHAIN_SEGMENTS {
            return Err(FaultReason::ChainTooLong { limit: MAX_CHAIN_SEGMENTS as u32 });
        }
        self.segments.push(segment);
        Ok(())
    }

    /// Adds a buffer that spans adjacent regions (two memory modules in a row), as one segment for each region.
    #[cold]
    fn push_across_regions(&mut self, address: u64, length_bytes: u32) -> Result<(), FaultReason> {
        let outside = MemoryError::Outside { address, length_bytes: u64::from(length_bytes) };
        let (mut at, mut left) = (address, u64::from(length_bytes));
        while left > 0 {
            let here = self
                .memory
                .region_at(at)
                .map(|(_, region)| region.length_bytes().saturating_sub(at.saturating_sub(region.guest_address())));
            let take = here.map_or(0, |rest| rest.min(left));
            let (Ok(length), Some(next)) = (u32::try_from(take), at.checked_add(take)) else {
                return Err(outside.into());
            };
            if take == 0 {
                return Err(outside.into());
            }
            let segment = self.memory.segment(at, length, &mut self.hint)?;
            self.put(segment)?;
            (at, left) = (next, left.saturating_sub(take));
        }
        Ok(())
    }

    /// Returns the number of segments of the current chain: at least one for each of its descriptors that is not a
    /// table.
    #[inline]
    #[must_use]
    pub fn segment_count(&self) -> usize {
        self.segments.len()
    }

    /// Returns how many bytes of the current chain the device may read.
    #[must_use]
    pub fn readable_bytes(&self) -> u32 {
        self.readable_bytes
    }

    /// Returns how many bytes of the current chain the device may write.
    #[must_use]
    pub fn writable_bytes(&self) -> u32 {
        self.writable_bytes
    }

    /// Copies the first `N` readable bytes out; `None` if there are fewer.
    #[inline]
    #[must_use]
    pub fn copy_header<const N: usize>(&self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        if let Some(first) = self.segments.first()
            && self.readable_segments > 0
            && first.length_bytes() >= N
        {
            // SAFETY: the segment is mapped while `self.memory` lives and has at least `N` bytes; a driver that writes
            // meanwhile changes only what is copied.
            unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), bytes.as_mut_ptr(), N) }
            return Some(bytes);
        }
        self.copy_header_scattered(&mut bytes).then_some(bytes)
    }

    #[cold]
    fn copy_header_scattered(&self, target: &mut [u8]) -> bool {
        let mut target = target;
        for segment in self.segments.iter().take(self.readable_segments) {
            let length = segment.length_bytes().min(target.len());
            let Some((part, rest)) = std::mem::take(&mut target).split_at_mut_checked(length) else {
                return false;
            };
            // SAFETY: the segment is mapped while `self.memory` lives and has at least `length` bytes.
            unsafe { std::ptr::copy_nonoverlapping(segment.as_ptr(), part.as_mut_ptr(), length) }
            target = rest;
        }
        target.is_empty()
    }

    /// Keeps the chain's last writable byte as the place for the status of `head`. Returns false if there is none.
    #[inline]
    #[must_use]
    pub fn keep_status(&mut self, head: u16) -> bool {
        let last = match self.segments.len() > self.readable_segments {
            true => self.segments.last(),
            false => None,
        };
        // A segment has at least one byte, so it has a last byte.
        let status =
            last.and_then(|last| NonNull::new(last.as_ptr().wrapping_add(last.length_bytes().saturating_sub(1))));
        match self.slots.get_mut(usize::from(head)) {
            Some(slot) => slot.status = status,
            None => return false,
        }
        status.is_some()
    }

    /// Keeps the readable bytes behind the first `skip_bytes` as the data of `head`, and returns them. The current chain
    /// cannot be used afterwards; the same holds for the next two functions.
    #[inline]
    pub fn keep_readable(&mut self, head: u16, skip_bytes: u32) -> Window {
        let mut skip = skip_bytes as usize;
        let mut from = 0_usize;
        while let Some(segment) = self.segments.get_mut(from).filter(|_| from < self.readable_segments) {
            let length = segment.length_bytes();
            if skip < length {
                *segment = cut(*segment, skip, length.saturating_sub(skip));
                break;
            }
            skip = skip.saturating_sub(length);
            from = from.saturating_add(1);
        }
        self.refill(head, from..self.readable_segments)
    }

    /// Keeps all writable bytes but the last (the status) as the data of `head`, and returns them.
    #[inline]
    pub fn keep_writable_without_status(&mut self, head: u16) -> Window {
        let mut to = self.segments.len();
        if let Some(last) = self.segments.last_mut() {
            match last.length_bytes() {
                0 | 1 => to = to.saturating_sub(1),
                length => *last = cut(*last, 0, length.saturating_sub(1)),
            }
        }
        self.refill(head, self.readable_segments..to)
    }

    /// Keeps no data for `head`.
    #[inline]
    pub fn keep_nothing(&mut self, head: u16) {
        self.refill(head, 0..0);
    }

    /// Returns the data kept for `head`.
    #[inline]
    #[must_use]
    pub fn data(&self, head: u16) -> Window {
        self.slots.get(usize::from(head)).map_or_else(Window::empty, |slot| slot.data.whole())
    }

    /// Writes the status of `head`, once: the driver may reuse the byte as soon as the chain is used.
    #[inline]
    pub fn write_status(&mut self, head: u16, status: u8) {
        if let Some(ptr) = self.slots.get_mut(usize::from(head)).and_then(|slot| slot.status.take()) {
            // SAFETY: the byte lies in a segment of guest memory, mapped while `self.memory` lives.
            unsafe { ptr.as_ptr().write_volatile(status) }
        }
    }

    #[inline]
    fn refill(&mut self, head: u16, range: Range<usize>) -> Window {
        let segments = self.segments.get(range).unwrap_or_default();
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Window::empty() };
        // SAFETY: the segments were resolved in `self.memory`, which keeps them mapped for as long as the slots exist,
        // and forever if a window outlives them (see `Drop`).
        if !unsafe { slot.data.refill(segments.iter().copied()) } {
            // A window was kept past its request's completion, and still uses the old list.
            self.outlived = true;
            slot.data = IoBuf::empty();
            // SAFETY: as above.
            let fresh = unsafe { slot.data.refill(segments.iter().copied()) };
            debug_assert!(fresh, "a new buffer has one handle");
        }
        slot.data.whole()
    }

    /// Returns the memory that the segments lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

/// Returns a part of a segment. The caller knows that it lies inside.
fn cut(segment: Segment, skip_bytes: usize, length_bytes: usize) -> Segment {
    match NonNull::new(segment.as_ptr().wrapping_add(skip_bytes)) {
        Some(ptr) => Segment::new(ptr, length_bytes),
        None => segment,
    }
}

impl Drop for ChainMemory {
    fn drop(&mut self) {
        if self.outlived || self.slots.iter().any(|slot| !slot.data.is_unique()) {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl std::fmt::Debug for ChainMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChainMemory")
            .field("slots", &self.slots.len())
            .field("readable_bytes", &self.readable_bytes)
            .field("writable_bytes", &self.writable_bytes)
            .finish_non_exhaustive()
    }
}
