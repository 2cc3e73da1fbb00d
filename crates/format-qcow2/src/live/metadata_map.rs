//! Maps the image's own tables, so that nothing else is ever written there, whatever the image says.
//!
//! Before the image's first write, the places are collected from the header, the refcount table, L1 and the snapshots.
//! They are kept up to date. Under the mutex the answer is exact. The path without a lock asks [`TableBits`], which may
//! say "perhaps" too often.

use block::sync::{AtomicU64, Ordering};
use foldhash::{HashMap, HashMapExt};
use std::fmt;
use std::ops::Range;

/// The kind of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Owner {
    Header,
    L1,
    L2,
    RefcountTable,
    RefcountBlock,
    SnapshotTable,
    SnapshotL1,
    SnapshotL2,
    Bitmap,
}

impl Owner {
    const ALL: [Self; 9] = [
        Self::Header,
        Self::L1,
        Self::L2,
        Self::RefcountTable,
        Self::RefcountBlock,
        Self::SnapshotTable,
        Self::SnapshotL1,
        Self::SnapshotL2,
        Self::Bitmap,
    ];

    fn bit(self) -> u16 {
        1u16.wrapping_shl(self as u32)
    }

    /// Returns the first owner in a set of bits.
    fn first_of(bits: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|owner| bits & owner.bit() != 0)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Header => "the header",
            Self::L1 => "the L1 table",
            Self::L2 => "an L2 table",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::SnapshotTable => "the snapshot table",
            Self::SnapshotL1 => "the L1 table of a snapshot",
            Self::SnapshotL2 => "an L2 table of a snapshot",
            Self::Bitmap => "a persistent bitmap",
        })
    }
}

/// Two tables of one kind share a cluster: neither may be changed.
const TWICE: u16 = 1 << 15;

/// The host clusters that hold tables, and each one's owners.
#[derive(Debug, Default)]
pub(crate) struct MetadataMap {
    /// The hash is quick: a large image has tens of thousands of tables, and all are collected before its first write.
    /// An image decides where its tables lie, but it does not know the hash's seed.
    owners: HashMap<u64, u16>,
    /// Whether some tables share their bits with clusters in front.
    has_far: bool,
}

impl MetadataMap {
    pub(crate) fn with_capacity(clusters: usize) -> Self {
        Self { owners: HashMap::with_capacity(clusters), has_far: false }
    }

    pub(crate) fn holds_table(&self, cluster: u64) -> bool {
        self.owners.contains_key(&cluster)
    }

    pub(crate) fn add(&mut self, bits: &TableBits, owner: Owner, clusters: Range<u64>) {
        for cluster in clusters {
            let found = self.owners.entry(cluster).or_default();
            // Snapshots share L2 tables.
            let shared = owner == Owner::SnapshotL2;
            *found |= if *found & owner.bit() != 0 && !shared { TWICE } else { owner.bit() };
            self.has_far |= !bits.has_own(cluster);
            bits.set(cluster);
        }
    }

    pub(crate) fn remove(&mut self, bits: &TableBits, owner: Owner, clusters: Range<u64>) {
        for cluster in clusters {
            let Some(found) = self.owners.get_mut(&cluster) else { continue };
            *found &= !owner.bit();
            if *found == 0 {
                self.owners.remove(&cluster);
                // A bit that another table may need stays set: the mutex holder gets the right answer anyway.
                if !self.has_far {
                    bits.clear(cluster);
                }
            }
        }
    }

    /// Forbids overwriting this cluster in place without the mutex, whether it holds a table or not.
    pub(crate) fn bar(&mut self, bits: &TableBits, cluster: u64) {
        self.has_far |= !bits.has_own(cluster);
        bits.set(cluster);
    }

    /// Undoes [`MetadataMap::bar`]. A bit that a table may need stays set.
    pub(crate) fn unbar(&self, bits: &TableBits, cluster: u64) {
        if !self.has_far && bits.has_own(cluster) && !self.holds_table(cluster) {
            bits.clear(cluster);
        }
    }

    /// Returns the first table in `clusters` that does not belong to `writer` alone, and its cluster.
    pub(crate) fn stranger(&self, writer: Option<Owner>, clusters: Range<u64>) -> Option<(u64, Owner)> {
        let own = writer.map_or(0, Owner::bit);
        let strange = |cluster| {
            let found = *self.owners.get(&cluster)?;
            let other = Owner::first_of(found & !own);
            Some((cluster, other.or_else(|| writer.filter(|_| found & TWICE != 0))?))
        };
        clusters.filter_map(strange).next()
    }
}

/// One bit for each host cluster. Clusters behind the last bit share bits with those in front. The path without a lock
/// asks this before it overwrites data in place.
#[derive(Debug)]
pub(crate) struct TableBits {
    words: Box<[AtomicU64]>,
}

/// The number of bits for a small file, with room to grow, and for the largest.
const BITS_MIN: u64 = 1 << 16;
const BITS_MAX: u64 = 1 << 23;

impl TableBits {
    pub(crate) fn for_clusters(clusters: u64) -> Self {
        let wanted = clusters.saturating_mul(2).clamp(BITS_MIN, BITS_MAX).next_power_of_two();
        Self { words: (0..wanted / 64).map(|_| AtomicU64::new(0)).collect() }
    }

    #[inline]
    fn place(&self, cluster: u64) -> Option<(&AtomicU64, u64)> {
        let index = (cluster >> 6) & (self.words.len() as u64).saturating_sub(1);
        Some((self.words.get(index as usize)?, 1u64.wrapping_shl((cluster & 63) as u32)))
    }

    fn set(&self, cluster: u64) {
        if let Some((word, bit)) = self.place(cluster) {
            word.fetch_or(bit, Ordering::Release);
        }
    }

    /// Whether no cluster in front has the same bit.
    fn has_own(&self, cluster: u64) -> bool {
        cluster >> 6 < self.words.len() as u64
    }

    /// Clears a cluster's bit. No cluster with this bit may hold a table.
    fn clear(&self, cluster: u64) {
        if let Some((word, bit)) = self.place(cluster) {
            word.fetch_and(!bit, Ordering::Release);
        }
    }

    /// Whether a table may lie there. False only if none does.
    #[inline]
    pub(crate) fn may_hold_table(&self, cluster: u64) -> bool {
        self.place(cluster).is_none_or(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_its_owners_alone_unless_another_table_lies_there_or_it_is_claimed_twice() {
        let bits = TableBits::for_clusters(10);
        let mut tables = MetadataMap::default();
        tables.add(&bits, Owner::L2, 5..6);
        tables.add(&bits, Owner::RefcountBlock, 7..9);
        assert_eq!(tables.stranger(Some(Owner::L2), 4..7), None);
        assert_eq!(tables.stranger(None, 4..7), Some((5, Owner::L2)));
        assert_eq!(tables.stranger(Some(Owner::L2), 5..9), Some((7, Owner::RefcountBlock)));
        tables.add(&bits, Owner::SnapshotL2, 5..6);
        tables.add(&bits, Owner::SnapshotL2, 5..6);
        assert_eq!(tables.stranger(Some(Owner::L2), 5..6), Some((5, Owner::SnapshotL2)));
        tables.remove(&bits, Owner::SnapshotL2, 5..6);
        assert_eq!(tables.stranger(Some(Owner::L2), 5..6), None);
        tables.add(&bits, Owner::L2, 5..6);
        assert_eq!(tables.stranger(Some(Owner::L2), 5..6), Some((5, Owner::L2)), "two of a kind");
        // Bits are shared by clusters that are far apart, never missing.
        assert!(bits.may_hold_table(8) && bits.may_hold_table(8 + BITS_MIN) && !bits.may_hold_table(9));
        tables.remove(&bits, Owner::RefcountBlock, 7..9);
        assert!(!bits.may_hold_table(8));
    }

    #[test]
    fn a_table_that_goes_leaves_the_bar_of_a_cluster_far_behind_it() {
        let bits = TableBits::for_clusters(10);
        let mut tables = MetadataMap::default();
        let far = 7 + BITS_MIN;
        tables.add(&bits, Owner::L2, 7..8);
        tables.bar(&bits, far);
        tables.remove(&bits, Owner::L2, 7..8);
        assert!(bits.may_hold_table(far), "a guest could overwrite what is being moved");
        // The other way round, and without anything far.
        tables.add(&bits, Owner::L2, 7..8);
        tables.unbar(&bits, far);
        assert!(bits.may_hold_table(7), "a guest could overwrite a table");
        let mut near = MetadataMap::default();
        near.bar(&bits, 9);
        assert!(bits.may_hold_table(9));
        near.unbar(&bits, 9);
        assert!(!bits.may_hold_table(9));
    }

    #[test]
    fn a_table_that_goes_leaves_the_bit_that_one_far_behind_it_shares() {
        for far_comes_first in [false, true] {
            let bits = TableBits::for_clusters(10);
            let mut tables = MetadataMap::default();
            let far = 7 + BITS_MIN;
            if far_comes_first {
                tables.add(&bits, Owner::RefcountBlock, far..far + 1);
            }
            tables.add(&bits, Owner::L2, 7..8);
            if !far_comes_first {
                tables.add(&bits, Owner::RefcountBlock, far..far + 1);
            }
            tables.remove(&bits, Owner::L2, 7..8);
            assert_eq!(tables.stranger(None, far..far + 1), Some((far, Owner::RefcountBlock)));
            assert!(bits.may_hold_table(far), "a guest could overwrite it");
            // And the other way round.
            tables.add(&bits, Owner::L2, 7..8);
            tables.remove(&bits, Owner::RefcountBlock, far..far + 1);
            assert!(bits.may_hold_table(7), "a guest could overwrite it");
        }
    }
}
