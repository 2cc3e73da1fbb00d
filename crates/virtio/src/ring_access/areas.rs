//! A ring's memory, whatever its layout.

use super::{LayoutError, PackedAreas, RingAddresses, SplitAreas};
use crate::blk::features::RING_PACKED;
use memory::GuestMemory;
use std::sync::Arc;

/// The layout of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RingLayout {
    /// Descriptors, available ring and used ring (2.7).
    #[default]
    Split,
    /// One ring of descriptors (2.8).
    Packed,
}

impl RingLayout {
    /// Reads the layout from the negotiated feature bits.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        if bits & RING_PACKED != 0 { Self::Packed } else { Self::Split }
    }
}

/// The areas of a ring of either layout.
#[derive(Debug)]
pub enum RingAreas {
    /// The areas of a split ring.
    Split(SplitAreas),
    /// The areas of a packed ring.
    Packed(PackedAreas),
}

impl RingAreas {
    /// Finds a ring whose areas are named in the peer's own address space (vhost-user).
    pub fn at_user_addresses(
        layout: RingLayout,
        memory: Arc<GuestMemory>,
        at: RingAddresses,
        size: u16,
    ) -> Result<Self, LayoutError> {
        match layout {
            RingLayout::Split => SplitAreas::at_user_addresses(memory, at, size).map(Self::Split),
            RingLayout::Packed => PackedAreas::at_user_addresses(memory, at, size).map(Self::Packed),
        }
    }

    /// Finds a ring whose areas are named by guest physical address (a driver's own ring).
    pub fn at_guest_addresses(
        layout: RingLayout,
        memory: Arc<GuestMemory>,
        at: RingAddresses,
        size: u16,
    ) -> Result<Self, LayoutError> {
        match layout {
            RingLayout::Split => SplitAreas::at_guest_addresses(memory, at, size).map(Self::Split),
            RingLayout::Packed => PackedAreas::at_guest_addresses(memory, at, size).map(Self::Packed),
        }
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(areas) => areas.size(),
            Self::Packed(areas) => areas.size(),
        }
    }

    /// Returns the memory that the areas, and the buffers that descriptors name, lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        match self {
            Self::Split(areas) => areas.memory(),
            Self::Packed(areas) => areas.memory(),
        }
    }
}

impl From<SplitAreas> for RingAreas {
    fn from(areas: SplitAreas) -> Self {
        Self::Split(areas)
    }
}

impl From<PackedAreas> for RingAreas {
    fn from(areas: PackedAreas) -> Self {
        Self::Packed(areas)
    }
}
