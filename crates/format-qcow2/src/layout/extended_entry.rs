//! Extended L2 entries: each of a cluster's 32 parts (subclusters) is allocated, zero, or left to the layer below
//! (qcow2 specification, "Extended L2 Entries").
//!
//! An entry is two words. The first is a standard cluster descriptor without the zero flag. The second is a bitmap: its
//! low half marks the parts in the host cluster, its high half those that read as zeros.

use crate::layout::entry::{BadEntry, Cluster};
use crate::layout::geometry::Geometry;

/// Parts of a cluster.
pub(crate) const PARTS: u32 = 32;
/// All parts read as zeros.
pub(crate) const ALL_ZERO: u64 = 0xffff_ffff_0000_0000;
/// All parts lie in the host cluster.
pub(crate) const ALL_DATA: u64 = 0x0000_0000_ffff_ffff;
/// Descriptor of an entry whose two words are being replaced: readers must not use it. Sets a reserved bit.
pub(crate) const CHANGING: u64 = 1 << 1;

/// Returns a descriptor from a file as it is kept in memory. [`CHANGING`] in a file becomes another invalid value, so
/// that no reader waits for it.
pub(crate) fn never_changing(raw: u64) -> u64 {
    if raw == CHANGING { CHANGING << 1 } else { raw }
}

/// The state of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Unallocated,
    Zero,
    Data,
    Compressed,
}

/// A decoded extended entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extended {
    /// `Unallocated` (no host cluster), `Data` (with a host cluster) or `Compressed`.
    pub(crate) cluster: Cluster,
    pub(crate) alloc: u32,
    pub(crate) zero: u32,
}

impl Extended {
    pub(crate) fn decode(descriptor: u64, bitmap: u64, geometry: &Geometry) -> Result<Self, BadEntry> {
        let cluster = Cluster::decode(descriptor, geometry)?;
        let (alloc, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        match cluster {
            // The bitmap of a compressed cluster means nothing.
            Cluster::Compressed { .. } => return Ok(Self { cluster, alloc: 0, zero: 0 }),
            Cluster::Unallocated if alloc != 0 => return Err(BadEntry),
            _ if alloc & zero != 0 => return Err(BadEntry),
            _ => {}
        }
        Ok(Self { cluster, alloc, zero })
    }

    pub(crate) fn bitmap(&self) -> u64 {
        u64::from(self.zero).wrapping_shl(32) | u64::from(self.alloc)
    }

    /// Returns where its host cluster starts.
    pub(crate) fn host(&self) -> Option<u64> {
        match self.cluster {
            Cluster::Data { host, .. } => Some(host),
            _ => None,
        }
    }

    pub(crate) fn part(&self, index: u32) -> Part {
        let bit = 1u32.wrapping_shl(index);
        match self.cluster {
            Cluster::Compressed { .. } => Part::Compressed,
            _ if self.alloc & bit != 0 => Part::Data,
            _ if self.zero & bit != 0 => Part::Zero,
            _ => Part::Unallocated,
        }
    }

    /// Returns how many parts from `index` on have the same state.
    pub(crate) fn run(&self, index: u32) -> u32 {
        let kind = self.part(index);
        let end = (index..PARTS).find(|other| self.part(*other) != kind).unwrap_or(PARTS);
        end.saturating_sub(index)
    }

    /// Returns how many parts from `index` on are not in the host cluster.
    pub(crate) fn missing_run(&self, index: u32) -> u32 {
        let end = (index..PARTS).find(|other| self.part(*other) == Part::Data).unwrap_or(PARTS);
        end.saturating_sub(index)
    }
}

/// Returns a mask of a cluster's parts from `first` to `end`.
pub(crate) fn mask(first: u32, end: u32) -> u32 {
    let below = |index: u32| u64::MAX.wrapping_shl(index.min(PARTS)) as u32;
    let from_end = if end >= PARTS { 0 } else { below(end) };
    below(first.min(PARTS.saturating_sub(1))) & !from_end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            version: 3,
            size_bytes: 1 << 30,
            cluster_bits: 16,
            refcount_order: 4,
            has_backing: false,
            extended_l2: true,
            data_file: false,
        }
    }

    #[test]
    fn entries_decode_as_the_specification_says() {
        let decode = |descriptor, bitmap| Extended::decode(descriptor, bitmap, &geometry());
        let host = 1 << 63 | 0x50000;
        let entry = decode(host, 0x0000_00f0_0000_000f).unwrap();
        let kinds: Vec<_> = [0, 3, 4, 7, 8, 31].map(|index| entry.part(index)).into();
        assert_eq!(kinds, [Part::Data, Part::Data, Part::Zero, Part::Zero, Part::Unallocated, Part::Unallocated]);
        assert_eq!((entry.run(1), entry.run(4), entry.run(8)), (3, 4, 24));
        assert_eq!((entry.missing_run(4), entry.missing_run(2)), (28, 0));
        assert_eq!(entry.host(), Some(0x50000));
        assert_eq!(decode(0, 0x1_0000_0000).unwrap().part(0), Part::Zero);
        assert_eq!(decode(1 << 62 | 0x50000, 0).unwrap().part(9), Part::Compressed);
        for (descriptor, bitmap) in [(host, 0x1_0000_0001), (0, 1), (host | 1, 0), (CHANGING, 0)] {
            assert_eq!(decode(descriptor, bitmap), Err(BadEntry), "{descriptor:#x} {bitmap:#x}");
        }
    }

    #[test]
    fn masks_cover_the_parts_between() {
        assert_eq!(mask(0, 32), u32::MAX);
        assert_eq!(mask(0, 1), 1);
        assert_eq!(mask(31, 32), 1 << 31);
        assert_eq!(mask(4, 8), 0xf0);
    }
}
