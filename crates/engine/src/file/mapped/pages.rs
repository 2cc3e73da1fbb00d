//! The state of a mapped file's pages: which of them are copied through the mapping.

use memory::PAGE_BYTES;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const PAGE: u64 = PAGE_BYTES as u64;
pub(super) const REGION_PAGES: u64 = u64::BITS as u64;
pub(super) const REGION_BYTES: u64 = REGION_PAGES * PAGE;
/// The kernel maps this many pages at a time.
const GROUP_PAGES: u32 = 16;

/// The state of a run of pages, one bit for each page.
#[repr(C)]
pub(super) struct Region {
    /// Pages that are copied through the mapping.
    pub(super) ready: AtomicU64,
    /// Pages that a call has served.
    pub(super) touched: AtomicU64,
    /// Pages that hold data and lie wholly within the file.
    pub(super) present: AtomicU64,
    /// Not zero if the kernel was asked which pages are present.
    pub(super) asked: AtomicU64,
}

/// Makes regions with unknown pages, in untouched memory. Most of it is never touched.
pub(super) fn unknown_regions(count: u64) -> Box<[Region]> {
    let words = vec![[0_u64; size_of::<Region>() / size_of::<u64>()]; count as usize].into_boxed_slice();
    // SAFETY: a region consists of exactly these atomic words, which have a word's size, alignment (on every 64-bit
    // machine) and bits; the box was just ours.
    unsafe { Box::from_raw(Box::into_raw(words) as *mut [Region]) }
}

pub(super) fn has(word: &AtomicU64, bits: u64) -> bool {
    word.load(Ordering::Relaxed) & bits == bits
}

/// Sets bits. Bits that are set already are not written, so that reactors do not take the cache line from each other.
pub(super) fn set(word: &AtomicU64, bits: u64) {
    if !has(word, bits) {
        word.fetch_or(bits, Ordering::Relaxed);
    }
}

/// Clears bits. As with [`set`], nothing is written without need: untouched memory stays untouched.
pub(super) fn clear(word: &AtomicU64, bits: u64) {
    if word.load(Ordering::Relaxed) & bits != 0 {
        word.fetch_and(!bits, Ordering::Relaxed);
    }
}

/// Returns the bits `first..=last` of a region's word.
pub(super) fn mask(first: u64, last: u64) -> u64 {
    (u64::MAX << first) & (u64::MAX >> (REGION_PAGES - 1 - last))
}

/// Returns the bits of each group of a region.
pub(super) fn groups() -> impl Iterator<Item = u64> {
    let group = mask(0, u64::from(GROUP_PAGES) - 1);
    (0..u64::BITS).step_by(GROUP_PAGES as usize).map(move |first| group << first)
}

/// Returns all bits of the groups that `bits` lie in.
pub(super) fn groups_of(bits: u64) -> u64 {
    groups().filter(|group| bits & group != 0).fold(0, |all, group| all | group)
}

/// Returns the pages that a range touches.
pub(super) fn touched_by(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE..offset.saturating_add(length).div_ceil(PAGE)
}

/// Returns the pages that lie wholly in a range.
pub(super) fn covered_by(offset: u64, length: u64) -> Range<u64> {
    offset.div_ceil(PAGE)..offset.saturating_add(length) / PAGE
}

/// Calls `visit` with each region's number and the bits of `pages` in it, until it returns false. Returns whether it
/// never did.
pub(super) fn all_regions(pages: Range<u64>, mut visit: impl FnMut(usize, u64) -> bool) -> bool {
    let mut page = pages.start;
    while page < pages.end {
        let last = (page | (REGION_PAGES - 1)).min(pages.end - 1);
        if !visit((page / REGION_PAGES) as usize, mask(page % REGION_PAGES, last % REGION_PAGES)) {
            return false;
        }
        page = last + 1;
    }
    true
}
