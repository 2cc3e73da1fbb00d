//! Where a part of a disk lies.

use block::Extent;

/// A place in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    pub(crate) extent: Extent,
    pub(crate) length_bytes: u64,
}
