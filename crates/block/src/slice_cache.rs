//! A cache of tables of 64-bit entries, in slices, read without a lock.
//!
//! A slice is a part of a table that is cached together (4 KiB of a qcow2 image's L2 table). Its number is its place in
//! the guest's address space. A lookup goes directory -> slot -> entry without a lock. Each slot has a tag with the
//! number of its slice and a generation. The writer, under its owner's mutex, changes the tag before the slot's
//! contents. The reader looks at the tag before and after (a seqlock). Entries of a slice that stays in memory are
//! replaced one at a time, each as a whole.

use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The fewest slots of a cache: enough for two operations to go on, one after the other's flush.
const SLOTS_MIN: u64 = 2;

/// Directory entries that are allocated together.
const CHUNK_BITS: u32 = 10;
const CHUNK_ENTRIES: usize = 1 << CHUNK_BITS;
const CHUNK_MASK: u64 = (1 << CHUNK_BITS) - 1;

/// A tag has the generation in its high bits, and the slice's number plus one below. Zero below means no slice.
const TAG_SLICE_BITS: u32 = 40;
const TAG_SLICE_MASK: u64 = (1 << TAG_SLICE_BITS) - 1;

#[derive(Debug, Default)]
struct Slot {
    tag: AtomicU64,
    /// The slot was used since the clock's hand passed.
    used: AtomicBool,
    entries: OnceLock<Box<[AtomicU64]>>,
}

/// The part of the cache that readers share.
#[derive(Debug)]
pub struct SliceCache {
    slots: Box<[Slot]>,
    directory: Box<[OnceLock<Box<[AtomicU32]>>]>,
    entries_per_slice: usize,
    installed: AtomicU64,
    evicted: AtomicU64,
}

/// Figures of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Bytes of tables in memory.
    pub used_bytes: u64,
    /// The most bytes that may be in memory.
    pub limit_bytes: u64,
    /// Slices put into memory.
    pub installed: u64,
    /// Slices that were removed to make room.
    pub evicted: u64,
}

/// A slice as a reader found it. Its entries are valid only if [`SliceView::is_valid`] returns true afterwards.
#[derive(Debug, Clone, Copy)]
pub struct SliceView<'a> {
    slot: &'a Slot,
    entries: &'a [AtomicU64],
    tag: u64,
}

impl SliceView<'_> {
    /// Returns one entry.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Option<u64> {
        // Acquire: a reader that sees an entry of the slot's next slice also sees that the tag has changed.
        Some(self.entries.get(index)?.load(Ordering::Acquire))
    }

    /// Whether everything read so far belonged to the slice.
    #[inline]
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.slot.tag.load(Ordering::Relaxed) == self.tag
    }
}

impl SliceCache {
    /// Makes a cache of at most `cache_bytes` (or the fewest slots) for a disk of `slices`. Slots get memory as they
    /// are used.
    #[must_use]
    pub fn new(slices: u64, entries_per_slice: usize, cache_bytes: u64) -> Self {
        let slice_bytes = (entries_per_slice as u64).saturating_mul(8);
        let slots = slices.min(cache_bytes.checked_div(slice_bytes).unwrap_or(0).max(SLOTS_MIN));
        let chunks = slices.div_ceil(CHUNK_ENTRIES as u64);
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            directory: (0..chunks).map(|_| OnceLock::new()).collect(),
            entries_per_slice,
            installed: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Returns the figures.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        let slice_bytes = (self.entries_per_slice as u64).saturating_mul(8);
        let slots = self.slots.len() as u64;
        let installed = self.installed.load(Ordering::Relaxed);
        CacheStats {
            used_bytes: installed.min(slots).saturating_mul(slice_bytes),
            limit_bytes: slots.saturating_mul(slice_bytes),
            installed,
            evicted: self.evicted.load(Ordering::Relaxed),
        }
    }

    fn directory_entry(&self, slice: u64) -> Option<&AtomicU32> {
        let chunk = self.directory.get(usize::try_from(slice >> CHUNK_BITS).ok()?)?.get()?;
        chunk.get((slice & CHUNK_MASK) as usize)
    }

    /// Returns the slice, if it is in memory.
    #[inline]
    #[must_use]
    pub fn view(&self, slice: u64) -> Option<SliceView<'_>> {
        let index = self.directory_entry(slice)?.load(Ordering::Acquire).checked_sub(1)?;
        let slot = self.slots.get(index as usize)?;
        let tag = slot.tag.load(Ordering::Acquire);
        if tag & TAG_SLICE_MASK != slice.saturating_add(1) {
            return None;
        }
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(SliceView { slot, entries: slot.entries.get()?, tag })
    }

    /// Replaces one entry of a slice that is in memory. Call it only under the owner's mutex.
    pub fn set(&self, slice: u64, index: usize, raw: u64) {
        if let Some(entry) = self.view(slice).and_then(|view| view.entries.get(index)) {
            entry.store(raw, Ordering::Release);
        }
    }
}

/// The state under the owner's mutex: the free slots, and the slices that must stay.
#[derive(Debug, Default)]
pub struct SliceBook {
    never_used: usize,
    hand: usize,
    /// Slices that differ from the file.
    dirty: BTreeMap<u64, ()>,
    /// Slices that are being written to the file: a load would race with the write.
    writing: BTreeMap<u64, ()>,
}

impl SliceBook {
    /// Marks a slice as different from the file. It stays in memory until it is written.
    pub fn mark_dirty(&mut self, slice: u64) {
        self.dirty.insert(slice, ());
    }

    /// Whether the slice differs from the file.
    #[must_use]
    pub fn is_dirty(&self, slice: u64) -> bool {
        self.dirty.contains_key(&slice)
    }

    /// Returns how many slices differ from the file.
    #[must_use]
    pub fn dirty_count(&self) -> usize {
        self.dirty.len()
    }

    /// Whether any slice differs from the file.
    #[must_use]
    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes all dirty slices, in order, and marks them as being written.
    pub fn begin_writing(&mut self) -> Vec<u64> {
        let slices: Vec<u64> = std::mem::take(&mut self.dirty).into_keys().collect();
        self.writing.extend(slices.iter().map(|slice| (*slice, ())));
        slices
    }

    /// Ends the writing that [`SliceBook::begin_writing`] began. Slices whose write failed are dirty again.
    pub fn end_writing(&mut self, written: bool) {
        let writing = std::mem::take(&mut self.writing);
        if !written {
            self.dirty.extend(writing);
        }
    }

    /// Puts a slice into memory. Returns false if every slot is dirty or being written: a flush makes room.
    pub fn install(&mut self, slices: &SliceCache, slice: u64, raw: impl Iterator<Item = u64>) -> bool {
        let Some(chunk) = usize::try_from(slice >> CHUNK_BITS).ok().and_then(|chunk| slices.directory.get(chunk))
        else {
            return false;
        };
        let Some(index) = self.take_slot(slices) else { return false };
        let Some(slot) = slices.slots.get(index) else { return false };
        let entries = slot.entries.get_or_init(|| (0..slices.entries_per_slice).map(|_| AtomicU64::new(0)).collect());
        for (entry, raw) in entries.iter().zip(raw) {
            entry.store(raw, Ordering::Release);
        }
        let generation = (slot.tag.load(Ordering::Relaxed) >> TAG_SLICE_BITS).wrapping_add(1);
        slot.tag.store((generation << TAG_SLICE_BITS) | slice.saturating_add(1), Ordering::Release);
        slot.used.store(true, Ordering::Relaxed);
        chunk.get_or_init(|| (0..CHUNK_ENTRIES).map(|_| AtomicU32::new(0)).collect());
        if let Some(entry) = slices.directory_entry(slice) {
            entry.store((index as u32).saturating_add(1), Ordering::Release);
        }
        slices.installed.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Returns a slot that holds nothing: a new one, or that of a clean slice that was not used lately.
    fn take_slot(&mut self, slices: &SliceCache) -> Option<usize> {
        let count = slices.slots.len();
        if self.never_used < count {
            let index = self.never_used;
            self.never_used = index.saturating_add(1);
            return Some(index);
        }
        // The usual reason why there is none, found without looking at each slot. (A slice can be both dirty and being
        // written.)
        if self.dirty.len() >= count || self.writing.len() >= count {
            return None;
        }
        // Readers may mark slots faster than the hand clears the marks, so the third round ignores them.
        for step in 0..count.saturating_mul(3) {
            let index = self.hand;
            self.hand = index.saturating_add(1);
            if self.hand >= count {
                self.hand = 0;
            }
            let slot = slices.slots.get(index)?;
            let tag = slot.tag.load(Ordering::Relaxed);
            let held = (tag & TAG_SLICE_MASK).checked_sub(1);
            if held.is_some_and(|slice| self.dirty.contains_key(&slice) || self.writing.contains_key(&slice)) {
                continue;
            }
            if slot.used.swap(false, Ordering::Relaxed) && step < count.saturating_mul(2) {
                continue;
            }
            slices.evicted.fetch_add(1, Ordering::Relaxed);
            // The tag goes first: see `SliceView::get`.
            let generation = (tag >> TAG_SLICE_BITS).wrapping_add(1);
            slot.tag.store(generation << TAG_SLICE_BITS, Ordering::Relaxed);
            if let Some(entry) = held.and_then(|slice| slices.directory_entry(slice)) {
                entry.store(0, Ordering::Release);
            }
            return Some(index);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(slices: &SliceCache, book: &mut SliceBook, slice: u64) -> bool {
        book.install(slices, slice, std::iter::repeat(slice * 100))
    }

    #[test]
    fn clean_slices_make_room_and_dirty_ones_stay() {
        let slices = SliceCache::new(1 << 20, 512, 0);
        let count = slices.slots.len() as u64;
        let mut book = SliceBook::default();
        for slice in 0..count {
            assert!(filled(&slices, &mut book, slice));
            book.mark_dirty(slice);
        }
        assert!(!filled(&slices, &mut book, count), "every slot is dirty");
        book.begin_writing();
        assert!(!filled(&slices, &mut book, count), "every slot is being written");
        book.end_writing(true);
        book.mark_dirty(5);
        for slice in count..count * 3 {
            assert!(filled(&slices, &mut book, slice));
        }
        assert!(slices.view(5).is_some());
        assert!(slices.view(6).is_none());
        assert_eq!(slices.view(count * 3 - 1).unwrap().get(7), Some((count * 3 - 1) * 100));
    }

    #[test]
    fn a_view_of_a_slot_that_changed_hands_is_not_valid() {
        let slices = SliceCache::new(1 << 20, 512, 0);
        let mut book = SliceBook::default();
        assert!(filled(&slices, &mut book, 1));
        let view = slices.view(1).unwrap();
        assert!(view.is_valid());
        for slice in 2..3 * slices.slots.len() as u64 {
            assert!(filled(&slices, &mut book, slice));
        }
        // Slice 1 comes back, perhaps into the same slot: the old view stays invalid.
        assert!(filled(&slices, &mut book, 1));
        assert!(!view.is_valid());
    }

    #[test]
    fn readers_never_see_an_entry_of_another_slice() {
        let slices = SliceCache::new(1 << 20, 512, 0);
        let mut book = SliceBook::default();
        let (begin, stop) = (std::sync::Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                begin.wait();
                let mut seen = 0u64;
                loop {
                    let is_last = stop.load(Ordering::Acquire);
                    for slice in 0..128 {
                        let Some(view) = slices.view(slice) else { continue };
                        let entry = view.get(511).unwrap();
                        if view.is_valid() {
                            assert_eq!(entry, slice * 100);
                            seen += 1;
                        }
                    }
                    if is_last {
                        break;
                    }
                }
                assert!(seen > 0);
            });
            begin.wait();
            for round in 0..200u64 {
                for slice in 0..128 {
                    let slice = (slice * 37 + round) % 128;
                    if slices.view(slice).is_none() {
                        assert!(filled(&slices, &mut book, slice));
                    }
                }
            }
            stop.store(true, Ordering::Release);
        });
    }
}
