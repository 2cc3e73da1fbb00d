//! The merged answers of the layers below the top one. With it, a lookup in sixteen layers costs about as much as in
//! two.
//!
//! Layers below the top are read-only, so their answer for a place never changes. The layers are asked once, one after
//! the other. The answer is kept for each granule (their smallest cluster) in a cache of slices like those of L2
//! tables. The cache is read without a lock, and changed under a mutex that nobody waits for. Some granules have no
//! single answer, because of compressed clusters or a layer that ends inside. They are marked, and the layers are asked
//! each time.

use crate::chain::place::Place;
use block::sync::{Mutex, PoisonError};
use block::{CacheStats, Extent, SliceBook, SliceCache};

/// Entries that are cached together, as a power of two: a slice has 4 KiB.
const SLICE_BITS: u32 = 9;
const SLICE_ENTRIES: usize = 1 << SLICE_BITS;
/// The smallest granule. Below it, the map of a disk with tiny clusters would be larger than the tables it replaces.
const GRANULE_BITS_MIN: u32 = 12;
/// The most slices of a map; larger disks get larger granules. The image says how large the disk is, and the index of
/// slices takes memory.
const SLICES_MAX: u64 = 1 << 24;

/// An entry, from its low bits up: a kind, the index of the layer's file, the offset in that file, the layer. Zero: not
/// known.
const KIND_MASK: u64 = 3;
const KIND_ZERO: u64 = 1;
const KIND_DATA: u64 = 2;
const KIND_ASK: u64 = 3;
const FILE_SHIFT: u32 = 2;
const FILE_MASK: u64 = 0x7f;
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const LAYER_SHIFT: u32 = 56;

/// What the map knows of a granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    /// The place is known.
    At(Place),
    /// The layers must be asked.
    Ask,
    /// Nothing yet.
    Nothing,
}

/// The merged map.
pub(crate) struct LowerMap {
    granule_bits: u32,
    size_bytes: u64,
    cache: SliceCache,
    book: Mutex<SliceBook>,
}

impl LowerMap {
    /// Makes a map of at most `cache_bytes`, for a disk over layers whose smallest cluster is `cluster_bits`.
    pub(crate) fn new(size_bytes: u64, cluster_bits: u32, cache_bytes: u64) -> Self {
        let granule_bits = Self::granule_bits(size_bytes, cluster_bits);
        let slices = Self::slices(size_bytes, granule_bits);
        let cache = SliceCache::new(slices, SLICE_ENTRIES, cache_bytes);
        Self { granule_bits, size_bytes, cache, book: Mutex::default() }
    }

    /// Returns how many bytes a map of the whole disk takes.
    pub(crate) fn wanted_bytes(size_bytes: u64, cluster_bits: u32) -> u64 {
        let slices = Self::slices(size_bytes, Self::granule_bits(size_bytes, cluster_bits));
        slices.saturating_mul(SLICE_ENTRIES as u64).saturating_mul(8)
    }

    fn granule_bits(size_bytes: u64, cluster_bits: u32) -> u32 {
        let fits = |bits: &u32| Self::slices(size_bytes, *bits) <= SLICES_MAX;
        (cluster_bits.max(GRANULE_BITS_MIN)..u64::BITS.saturating_sub(SLICE_BITS))
            .find(fits)
            .unwrap_or(GRANULE_BITS_MIN)
    }

    fn slices(size_bytes: u64, granule_bits: u32) -> u64 {
        size_bytes.div_ceil(1u64.wrapping_shl(granule_bits.saturating_add(SLICE_BITS)))
    }

    pub(crate) fn stats(&self) -> CacheStats {
        self.cache.stats()
    }

    fn granule_bytes(&self) -> u64 {
        1u64.wrapping_shl(self.granule_bits)
    }

    fn slice_of(&self, offset: u64) -> u64 {
        offset.wrapping_shr(self.granule_bits.saturating_add(SLICE_BITS))
    }

    fn index_of(&self, offset: u64) -> usize {
        (offset.wrapping_shr(self.granule_bits) & (SLICE_ENTRIES as u64).saturating_sub(1)) as usize
    }

    /// Looks up the first part of a range.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Known {
        let Some(view) = self.cache.view(self.slice_of(offset)) else { return Known::Nothing };
        let mut index = self.index_of(offset);
        let Some(first) = view.get(index) else { return Known::Nothing };
        let skip = offset & self.granule_bytes().saturating_sub(1);
        let mut bytes = self.granule_bytes().saturating_sub(skip);
        // The next granule continues this one if its entry is the same, moved on by one granule.
        let step = if first & KIND_MASK == KIND_DATA { self.granule_bytes() } else { 0 };
        let mut expected = first;
        while bytes < length_bytes {
            index = index.saturating_add(1);
            expected = expected.wrapping_add(step);
            if view.get(index) != Some(expected) {
                break;
            }
            bytes = bytes.saturating_add(self.granule_bytes());
        }
        if !view.is_valid() {
            return Known::Nothing;
        }
        let length_bytes = bytes.min(length_bytes);
        match first & KIND_MASK {
            KIND_ZERO => Known::At(Place { layer: 0, extent: Extent::Zero, length_bytes }),
            KIND_DATA => {
                let file = (first.wrapping_shr(FILE_SHIFT) & FILE_MASK) as u8;
                let extent = Extent::Data { file, offset: (first & OFFSET_MASK).saturating_add(skip) };
                Known::At(Place { layer: first.wrapping_shr(LAYER_SHIFT) as usize, extent, length_bytes })
            }
            KIND_ASK => Known::Ask,
            _ => Known::Nothing,
        }
    }

    /// Answers most reads, in few steps, for a range in one granule: the layer, and the offset in its file. `None` if
    /// [`LowerMap::lookup`] has to be asked.
    #[inline]
    pub(crate) fn lookup_data(&self, offset: u64, length_bytes: u64) -> Option<(usize, u64)> {
        let skip = offset & self.granule_bytes().saturating_sub(1);
        if skip.saturating_add(length_bytes) > self.granule_bytes() {
            return None;
        }
        let view = self.cache.view(self.slice_of(offset))?;
        let entry = view.get(self.index_of(offset))?;
        let known = entry & KIND_MASK == KIND_DATA && view.is_valid();
        known.then_some((entry.wrapping_shr(LAYER_SHIFT) as usize, (entry & OFFSET_MASK).saturating_add(skip)))
    }

    /// Stores the layers' answer for the granule of `offset`. `ask` asks the layers for the first part of a range. It
    /// returns `None` if a table must be read first. If another queue is storing something, this one does not wait.
    pub(crate) fn learn(&self, offset: u64, ask: impl FnOnce(u64, u64) -> Option<Place>) {
        let start = offset & !self.granule_bytes().saturating_sub(1);
        let length = self.granule_bytes();
        // The disk may grow. A granule cut short by its present end says nothing about the time after that.
        let whole = start.checked_add(length).is_some_and(|end| end <= self.size_bytes);
        let raw = match whole {
            false => KIND_ASK,
            true => match ask(start, length) {
                None => return,
                Some(place) if place.length_bytes == length => encode(&place).unwrap_or(KIND_ASK),
                Some(_) => KIND_ASK,
            },
        };
        let mut book = match self.book.try_lock() {
            Ok(book) => book,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(std::sync::TryLockError::WouldBlock) => return,
        };
        let slice = self.slice_of(start);
        if self.cache.view(slice).is_some() || book.install(&self.cache, slice, std::iter::repeat(0)) {
            self.cache.set(slice, self.index_of(start), raw);
        }
    }
}

/// Encodes a place; `None` if an entry cannot hold it.
fn encode(place: &Place) -> Option<u64> {
    match place.extent {
        Extent::Zero | Extent::Backing => Some(KIND_ZERO),
        Extent::Data { file, offset } => {
            let layer = u8::try_from(place.layer).ok()?;
            let fits = offset & !OFFSET_MASK == 0 && u64::from(file) <= FILE_MASK;
            let tag = u64::from(layer).wrapping_shl(LAYER_SHIFT) | u64::from(file).wrapping_shl(FILE_SHIFT);
            fits.then_some(tag | offset | KIND_DATA)
        }
        Extent::Compressed(_) => None,
    }
}

#[cfg(all(test, feature = "explore"))]
mod explored;

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 65536;

    fn data(layer: usize, offset: u64, length_bytes: u64) -> Place {
        Place { layer, extent: Extent::Data { file: 0, offset }, length_bytes }
    }

    #[test]
    fn granules_that_go_on_in_one_file_join_and_others_do_not() {
        let below = LowerMap::new(100 * G + 512, 16, 1 << 20);
        assert_eq!(below.lookup(0, G), Known::Nothing);
        for (at, layer, offset) in [(0, 255, 7 * G), (1, 255, 8 * G), (2, 254, 9 * G)] {
            below.learn(at * G + 512, |_, length| Some(data(layer, offset, length)));
        }
        below.learn(3 * G, |_, length| Some(Place { layer: 9, extent: Extent::Zero, length_bytes: length }));
        assert_eq!(below.lookup(512, 10 * G), Known::At(data(255, 7 * G + 512, 2 * G - 512)));
        assert_eq!(below.lookup(2 * G + 512, 512), Known::At(data(254, 9 * G + 512, 512)));
        let zero = Place { layer: 0, extent: Extent::Zero, length_bytes: G };
        assert_eq!(below.lookup(3 * G, 2 * G), Known::At(zero));
    }

    #[test]
    fn the_map_of_a_disk_that_claims_to_be_huge_takes_little_memory_and_is_right() {
        let size_bytes = 1 << 61;
        assert!(LowerMap::slices(size_bytes, LowerMap::granule_bits(size_bytes, 9)) <= SLICES_MAX);
        assert_eq!(LowerMap::granule_bits(1 << 40, 16), 16);
        let below = LowerMap::new(size_bytes, 9, 1 << 20);
        let granule = below.granule_bytes();
        let last = size_bytes - granule;
        below.learn(last + 512, |_, length| Some(data(1, 7 * G, length)));
        assert_eq!(below.lookup(last + 512, G), Known::At(data(1, 7 * G + 512, G)));
        below.learn(0, |_, length| Some(data(1, G, length - 512)));
        assert_eq!(below.lookup(0, 512), Known::Ask);
    }

    #[test]
    fn what_has_no_single_answer_is_asked_for() {
        let below = LowerMap::new(100 * G + 512, 16, 1 << 20);
        below.learn(0, |_, length| Some(data(1, G, length - 512)));
        assert_eq!(below.lookup(0, 512), Known::Ask);
        below.learn(G, |_, _| None);
        assert_eq!(below.lookup(G, 512), Known::Nothing, "a table has to be read first");
        below.learn(100 * G, |_, length| Some(data(1, G, length)));
        assert_eq!(below.lookup(100 * G, 512), Known::Ask, "the disk's end");
        below.learn(2 * G, |_, length| Some(data(256, G, length)));
        assert_eq!(below.lookup(2 * G, 512), Known::Ask, "a layer that an entry cannot name");
    }
}
