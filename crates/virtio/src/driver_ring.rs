//! The driver's half of a ring, split or packed: descriptors out, used entries in.
//!
//! Requests are added, then published together; [`DriverRing::publish`] says whether the device
//! wants to be kicked for them. Used entries are popped without a system call. Callbacks are off from the start: a
//! driver that is about to sleep turns them on and looks once more ([`DriverRing::enable_callbacks`]), so that nothing
//! is missed and nobody is interrupted while it polls.
//!
//! Every head has a place of its own in an optional area of indirect tables, so an indirect request costs
//! one descriptor of the ring and no allocation. The device is not trusted: an entry that it cannot have used breaks
//! the ring for good, with the reason.

mod packed;
mod split;

pub use packed::PackedDriverRing;
pub use split::SplitDriverRing;

use crate::ring_access::{LayoutError, RingAreas, SharedWords};
use memory::GuestMemory;
use std::sync::Arc;
use thiserror::Error;

/// One buffer of a request, by guest physical address. Those that the device reads come before those that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Where.
    pub address: u64,
    /// How long.
    pub length_bytes: u32,
    /// Whether the device writes it.
    pub device_writes: bool,
}

/// Where indirect tables lie: one for each head, `stride_bytes` apart.
#[derive(Debug, Clone, Copy)]
pub struct IndirectLayout {
    /// Guest physical address of head 0's table, a multiple of 16.
    pub address: u64,
    /// From one head's table to the next, a multiple of 16.
    pub stride_bytes: usize,
    /// Descriptors in each.
    pub entries: u16,
}

/// How the device broke the rules. The ring is of no use after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingError {
    /// The used index moved past what is in flight, or backwards.
    #[error("the device moved its used index from {from} to {to} with {in_flight} requests in flight")]
    UsedIndex {
        /// Where it was.
        from: u16,
        /// Where it is now.
        to: u16,
        /// What it could have used.
        in_flight: u16,
    },
    /// The used entry names no descriptor (no buffer, in a packed ring).
    #[error("the device used descriptor {id} of a ring with {size}")]
    UsedId {
        /// What it named.
        id: u32,
        /// Entries of the ring.
        size: u16,
    },
    /// The used entry names a descriptor that heads no request.
    #[error("the device used descriptor {head}, which heads no request in flight")]
    NotInFlight {
        /// What it named.
        head: u16,
    },
}

/// Why a request was not added. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AddError {
    /// Too few descriptors are free now; they come back with used entries.
    #[error("the ring is full")]
    Full,
    /// No ring of this size and layout can hold the request.
    #[error("a request of {buffers} buffers where at most {most} fit")]
    TooLong {
        /// Asked for.
        buffers: usize,
        /// Possible.
        most: u16,
    },
}

/// A request that the device is done with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Its head, as [`DriverRing::add`] returned it. In a packed ring it is the buffer's id.
    pub head: u16,
    /// How many bytes the device says that it wrote.
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

    /// Where the table of `head` begins.
    fn start(&self, head: u16) -> usize {
        self.layout.stride_bytes.wrapping_mul(usize::from(head))
    }
}

/// The driver's half of a ring. One look at its layout for each call.
#[derive(Debug)]
pub enum DriverRing {
    /// Split.
    Split(SplitDriverRing),
    /// Packed.
    Packed(PackedDriverRing),
}

macro_rules! either {
    ($self:expr, $ring:ident => $call:expr) => {
        match $self {
            DriverRing::Split($ring) => $call,
            DriverRing::Packed($ring) => $call,
        }
    };
}

impl DriverRing {
    /// A ring over areas that nobody uses yet: positions begin anew, callbacks are off.
    pub fn new(
        areas: impl Into<RingAreas>,
        event_idx: bool,
        indirect: Option<IndirectLayout>,
    ) -> Result<Self, LayoutError> {
        match areas.into() {
            RingAreas::Split(areas) => SplitDriverRing::new(areas, event_idx, indirect).map(Self::Split),
            RingAreas::Packed(areas) => PackedDriverRing::new(areas, event_idx, indirect).map(Self::Packed),
        }
    }

    /// Entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// The most buffers that a request may have.
    #[must_use]
    pub fn max_buffers(&self) -> u16 {
        either!(self, ring => ring.max_buffers())
    }

    /// The head that the next successful [`DriverRing::add`] returns.
    #[inline]
    #[must_use]
    pub fn next_head(&self) -> Option<u16> {
        either!(self, ring => ring.next_head())
    }

    /// Requests added and not popped.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// What broke the ring, if something has.
    #[must_use]
    pub fn broken(&self) -> Option<RingError> {
        either!(self, ring => ring.broken())
    }

    /// Adds a request; the device sees it with the next [`DriverRing::publish`].
    #[inline]
    pub fn add(&mut self, buffers: &[Buffer]) -> Result<u16, AddError> {
        either!(self, ring => ring.add(buffers))
    }

    /// Requests added since the device was last shown any.
    #[must_use]
    pub fn unshown(&self) -> u16 {
        either!(self, ring => ring.unshown())
    }

    /// Lets a device that polls see what was added so far, in the middle of a batch: no barrier and no kick, both of
    /// which come with [`DriverRing::publish`] at its end.
    pub fn show(&mut self) {
        either!(self, ring => ring.show());
    }

    /// Whether something was added since the last [`DriverRing::publish`].
    #[must_use]
    pub fn is_unpublished(&self) -> bool {
        either!(self, ring => ring.is_unpublished())
    }

    /// Shows the device what was added. Returns whether it must be kicked for it.
    pub fn publish(&mut self) -> bool {
        either!(self, ring => ring.publish())
    }

    /// Whether the device has used something that was not popped yet.
    #[inline]
    #[must_use]
    pub fn has_used(&self) -> bool {
        either!(self, ring => ring.has_used())
    }

    /// Takes the next request that the device is done with. After an error the ring stays broken.
    #[inline]
    pub fn pop_used(&mut self) -> Result<Option<Used>, RingError> {
        either!(self, ring => ring.pop_used())
    }

    /// Asks the device to call when it uses the next entry. Returns true if it has used one already; then the caller
    /// should go on instead of sleeping.
    pub fn enable_callbacks(&mut self) -> bool {
        either!(self, ring => ring.enable_callbacks())
    }

    /// The device need not call: the driver looks by itself.
    pub fn disable_callbacks(&self) {
        either!(self, ring => ring.disable_callbacks());
    }
}

/// A counter as the ring shows it.
fn low(counter: u64) -> u16 {
    // The truncation is the ring's own: its indices are free-running 16-bit numbers.
    counter as u16
}
