//! The driver's half of a ring, split or packed: descriptors out, used entries in.
//!
//! Requests are added, then published together; [`DriverRing::publish`] says whether the device wants to be kicked for
//! them. Used entries are popped without a system call. Callbacks are off from the start, so a driver is not
//! interrupted while it polls. Before it sleeps, it turns them on and looks once more
//! ([`DriverRing::enable_callbacks`]), so it misses nothing.
//!
//! Every head has a place of its own in an optional area of indirect tables, so an indirect request costs one
//! descriptor of the ring and no allocation. The device is not trusted: an impossible used entry breaks the ring for
//! good, with the reason.

mod packed;
mod split;
#[cfg(test)]
mod split_tests;
mod state;

use crate::ring_access::{LayoutError, RingAreas, SharedWords, descriptor_flags, full_fence};
use memory::GuestMemory;
use packed::PackedHalf;
use split::SplitHalf;
use state::State;
use std::sync::Arc;
use thiserror::Error;

/// One buffer of a request, by guest physical address. Buffers that the device reads come before those that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub length_bytes: u32,
    /// Whether the device writes it.
    pub device_writes: bool,
}

impl Buffer {
    fn write_flag(&self) -> u16 {
        if self.device_writes { descriptor_flags::WRITE } else { 0 }
    }
}

/// The places of indirect tables: one for each head, `stride_bytes` apart.
#[derive(Debug, Clone, Copy)]
pub struct IndirectLayout {
    /// Guest physical address of head 0's table, a multiple of 16.
    pub address: u64,
    /// The distance from one head's table to the next, a multiple of 16.
    pub stride_bytes: usize,
    /// The number of descriptors in each table.
    pub entries: u16,
}

/// A broken rule of the device. The ring cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingError {
    /// The used index moved past the requests in flight, or backwards.
    #[error("the device moved its used index from {from} to {to} with {in_flight} requests in flight")]
    UsedIndex {
        /// The used index before.
        from: u16,
        /// The used index as the device moved it.
        to: u16,
        /// Requests that it could have used.
        in_flight: u16,
    },
    /// The used entry names no descriptor (no buffer, in a packed ring).
    #[error("the device used descriptor {id} of a ring with {size}")]
    UsedId {
        /// The id in the entry.
        id: u32,
        /// The number of the ring's entries.
        size: u16,
    },
    /// The used entry names a descriptor that heads no request.
    #[error("the device used descriptor {head}, which heads no request in flight")]
    NotInFlight {
        /// The head in the entry.
        head: u16,
    },
}

/// The reason why a request was not added. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AddError {
    /// Too few descriptors are free now; used entries free more.
    #[error("the ring is full")]
    Full,
    /// No ring of this size and layout can hold the request.
    #[error("a request of {buffers} buffers where at most {most} fit")]
    TooLong {
        /// Buffers of the request.
        buffers: usize,
        /// The most that fit.
        most: u16,
    },
}

/// A request that the device is done with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Its head, as [`DriverRing::add`] returned it. In a packed ring that is the buffer's id.
    pub head: u16,
    /// The number of bytes that the device claims to have written.
    pub written_bytes: u32,
}

/// The area of indirect tables.
#[derive(Debug)]
struct Indirect {
    words: SharedWords,
    layout: IndirectLayout,
}

impl Indirect {
    fn find(memory: &Arc<GuestMemory>, layout: Option<IndirectLayout>, size: u16) -> Result<Option<Self>, LayoutError> {
        let Some(layout) = layout else { return Ok(None) };
        let length_bytes = layout.stride_bytes.saturating_mul(usize::from(size));
        let words = SharedWords::at_guest_address(Arc::clone(memory), layout.address, length_bytes)?;
        Ok(Some(Self { words, layout }))
    }

    /// Returns the offset of the table of `head`.
    fn start(&self, head: u16) -> usize {
        self.layout.stride_bytes.wrapping_mul(usize::from(head))
    }
}

/// The driver's half of a ring. Each call branches on the layout once.
#[derive(Debug)]
pub struct DriverRing {
    state: State,
    half: Half,
}

#[derive(Debug)]
enum Half {
    Split(SplitHalf),
    Packed(PackedHalf),
}

macro_rules! either {
    ($half:expr, $ring:ident => $call:expr) => {
        match $half {
            Half::Split($ring) => $call,
            Half::Packed($ring) => $call,
        }
    };
}

impl DriverRing {
    /// Makes a ring over unused areas. Positions start anew, and callbacks are off.
    pub fn new(
        areas: impl Into<RingAreas>,
        event_idx: bool,
        indirect: Option<IndirectLayout>,
    ) -> Result<Self, LayoutError> {
        let areas = areas.into();
        let state = State::new(areas.memory(), areas.size(), event_idx, indirect)?;
        let half = match areas {
            RingAreas::Split(areas) => Half::Split(SplitHalf::new(areas)),
            RingAreas::Packed(areas) => Half::Packed(PackedHalf::new(areas)),
        };
        let ring = Self { state, half };
        ring.disable_callbacks();
        Ok(ring)
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.state.size
    }

    /// Returns the most buffers that a request may have.
    #[must_use]
    pub fn max_buffers(&self) -> u16 {
        self.state.max_buffers()
    }

    /// Returns the head that the next successful [`DriverRing::add`] returns; `None` if the ring is full.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        let has_room = either!(&self.half, half => half.has_room(&self.state, 1));
        self.state.free.last().copied().filter(|_| has_room)
    }

    /// Returns how many requests were added and not popped.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.state.in_flight()
    }

    /// Returns the error that broke the ring, if any.
    #[must_use]
    pub fn broken(&self) -> Option<RingError> {
        self.state.broken
    }

    /// Adds a request and returns its head. The device sees it with the next [`DriverRing::publish`].
    #[inline]
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<u16, AddError> {
        let Self { state, half } = self;
        let descriptors = state.descriptors_for(buffers.len())?;
        if !either!(half, half => half.has_room(state, descriptors)) {
            return Err(AddError::Full);
        }
        let head = state.free.last().copied().ok_or(AddError::Full)?;
        either!(half, half => half.put(state, head, descriptors, buffers));
        state.begin(head, descriptors);
        Ok(head)
    }

    /// Returns how many requests were added since the last [`DriverRing::show`] or [`DriverRing::publish`].
    #[must_use]
    pub fn unshown(&self) -> u16 {
        low(self.state.added.wrapping_sub(self.state.shown))
    }

    /// Shows a polling device the requests added so far, in the middle of a batch. The barrier and the kick come with
    /// [`DriverRing::publish`] at its end.
    pub fn show(&mut self) {
        either!(&mut self.half, half => half.show(&self.state));
        self.state.shown = self.state.added;
    }

    /// Whether something was added since the last [`DriverRing::publish`].
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        self.state.is_unpublished()
    }

    /// Shows the device the added requests. Returns whether it must be kicked.
    pub fn publish(&mut self) -> bool {
        if !self.is_unpublished() {
            return false;
        }
        self.show();
        self.state.published = self.state.added;
        // 2.7.13.4.1, 2.8.21.3.1: requests must be visible before we look whether the device waits for them.
        full_fence();
        either!(&mut self.half, half => half.wants_kick(&self.state))
    }

    /// Whether the device has used something that was not popped yet.
    #[inline]
    #[must_use]
    pub fn has_used(&self) -> bool {
        either!(&self.half, half => half.has_used(&self.state))
    }

    /// Takes the next request that the device is done with. After an error the ring stays broken.
    #[inline]
    pub fn pop_used(&mut self) -> Result<Option<Used>, RingError> {
        if let Some(error) = self.state.broken {
            return Err(error);
        }
        let popped = self.try_pop();
        self.state.broken = popped.as_ref().err().copied();
        popped
    }

    #[inline]
    fn try_pop(&mut self) -> Result<Option<Used>, RingError> {
        let Self { state, half } = self;
        let Some((id, written_bytes)) = either!(half, half => half.next_used(state))? else { return Ok(None) };
        let (head, descriptors) = state.end(id)?;
        either!(half, half => half.release(state, head, descriptors));
        Ok(Some(Used { head, written_bytes }))
    }

    /// Asks the device for a callback when it uses the next entry. Returns true if it has used one already; then the
    /// caller should go on instead of sleeping.
    pub fn enable_callbacks(&mut self) -> bool {
        either!(&self.half, half => half.enable_callbacks(&self.state));
        // 2.7.14, 2.8.21.3.1: the wish must be visible before the second look.
        full_fence();
        self.has_used()
    }

    /// Turns callbacks off, because the driver looks by itself.
    pub fn disable_callbacks(&self) {
        either!(&self.half, half => half.disable_callbacks(&self.state));
    }
}

/// Returns a counter in the ring's form.
fn low(counter: u64) -> u16 {
    // The truncation is the ring's own: its indices are free-running 16-bit numbers.
    counter as u16
}
