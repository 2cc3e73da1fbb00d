//! Dirty bitmaps of raw images: in memory only, because a raw file has no room for them. They last as long as the layer
//! is open, as in QEMU.
//!
//! Queues note each write before it begins, and so do copies to the layer. What a bitmap is, changes only while no request
//! is in flight ([`crate::online::edit`]).

use block::{Error, ErrorKind, Result};
use format_qcow2::{BitmapAction, BitmapBits};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The usual bytes of a disk for each bit.
const GRANULARITY_BYTES: u64 = 64 << 10;
const GRANULARITY_BYTES_MIN: u64 = 512;
const GRANULARITY_BYTES_MAX: u64 = 1 << 31;
/// The most bytes of all bits of a layer, as of persistent bitmaps.
const BITS_BYTES_MAX: u64 = 64 << 20;
/// Each write looks at each bitmap.
const BITMAPS_MAX: usize = 64;
const NAME_BYTES_MAX: usize = 1023;

/// The bitmaps of one layer.
#[derive(Debug, Default)]
pub(crate) struct MemoryBitmaps(Vec<MemoryBitmap>);

#[derive(Debug)]
pub(crate) struct MemoryBitmap {
    pub(crate) name: String,
    granularity_bits: u8,
    size_bytes: u64,
    pub(crate) enabled: bool,
    words: Box<[AtomicU64]>,
}

impl MemoryBitmap {
    fn new(name: &str, granularity_bits: u8, size_bytes: u64) -> Self {
        let words = words_for(granularity_bits, size_bytes);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { name: name.to_owned(), granularity_bits, size_bytes, enabled: true, words }
    }

    pub(crate) fn granularity_bytes(&self) -> u64 {
        1u64.wrapping_shl(u32::from(self.granularity_bits))
    }

    fn note(&self, offset: u64, length_bytes: u64) {
        let bits = u32::from(self.granularity_bits);
        let end = offset.saturating_add(length_bytes).min(self.size_bytes);
        let Some(last) = end.checked_sub(1).filter(|last| *last >= offset && length_bytes > 0) else { return };
        let (mut granule, last) = (offset.wrapping_shr(bits), last.wrapping_shr(bits));
        while granule <= last {
            let (word, first) = (granule / 64, granule % 64);
            let count = (last.saturating_sub(granule)).min(63u64.saturating_sub(first)).saturating_add(1);
            let mask = u64::MAX.wrapping_shr(64u32.saturating_sub(count as u32)).wrapping_shl(first as u32);
            if let Some(word) = usize::try_from(word).ok().and_then(|word| self.words.get(word)) {
                word.fetch_or(mask, Ordering::Relaxed);
            }
            granule = granule.saturating_add(count);
        }
    }

    pub(crate) fn bits(&self) -> BitmapBits {
        let words = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        BitmapBits::of_words(self.granularity_bits, self.size_bytes, words)
    }

    /// The noted ranges, in whole granules up to the disk's end, neighbours joined.
    #[cfg(test)]
    pub(crate) fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        self.each_range(|range| ranges.push(range));
        ranges
    }

    /// Calls for each noted range, in whole granules up to the disk's end, neighbours joined. All of them together may
    /// take far more memory than the bits.
    fn each_range(&self, mut found: impl FnMut(Range<u64>)) {
        let mut open: Option<Range<u64>> = None;
        for (index, word) in (0u64..).zip(&self.words) {
            let set = word.load(Ordering::Relaxed);
            for bit in (0..64u64).filter(|bit| set & 1u64.wrapping_shl(*bit as u32) != 0) {
                let granule = index.saturating_mul(64).saturating_add(bit);
                let start = granule.saturating_mul(self.granularity_bytes());
                let end = start.saturating_add(self.granularity_bytes()).min(self.size_bytes);
                match &mut open {
                    Some(last) if last.end == start => last.end = end,
                    _ => open.replace(start..end).into_iter().for_each(&mut found),
                }
            }
        }
        open.into_iter().for_each(found);
    }

    pub(crate) fn dirty_bytes(&self) -> u64 {
        let set = self.words.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones()));
        let bytes = set.fold(0, u64::saturating_add).saturating_mul(self.granularity_bytes());
        let Some(last) = self.size_bytes.checked_sub(1).map(|last| last.wrapping_shr(u32::from(self.granularity_bits)))
        else {
            return 0;
        };
        let word = usize::try_from(last / 64).ok().and_then(|word| self.words.get(word));
        let has_last = word.is_some_and(|word| word.load(Ordering::Relaxed).wrapping_shr((last % 64) as u32) & 1 != 0);
        let end = last.saturating_add(1).saturating_mul(self.granularity_bytes());
        bytes.saturating_sub(if has_last { end.saturating_sub(self.size_bytes) } else { 0 })
    }

    /// The same bits for a disk of another size.
    fn of_size(&self, size_bytes: u64) -> Self {
        let other = Self { enabled: self.enabled, ..Self::new(&self.name, self.granularity_bits, size_bytes) };
        for (new, old) in other.words.iter().zip(&self.words) {
            new.store(old.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        other
    }
}

fn words_for(granularity_bits: u8, size_bytes: u64) -> u64 {
    size_bytes.div_ceil(1u64.wrapping_shl(u32::from(granularity_bits))).div_ceil(64)
}

impl MemoryBitmaps {
    /// Whether anything is to be noted.
    pub(crate) fn is_recording(&self) -> bool {
        self.0.iter().any(|bitmap| bitmap.enabled)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &MemoryBitmap> {
        self.0.iter()
    }

    pub(crate) fn find(&self, name: &str) -> Option<&MemoryBitmap> {
        self.0.iter().find(|bitmap| bitmap.name == name)
    }

    /// Notes a range that will be written to.
    pub(crate) fn note(&self, offset: u64, length_bytes: u64) {
        self.0.iter().filter(|bitmap| bitmap.enabled).for_each(|bitmap| bitmap.note(offset, length_bytes));
    }

    /// Refuses a size for which the bits would take too much memory.
    pub(crate) fn check_size(&self, size_bytes: u64) -> Result<()> {
        let bytes = self.0.iter().map(|bitmap| words_for(bitmap.granularity_bits, size_bytes).saturating_mul(8));
        if bytes.fold(0, u64::saturating_add) > BITS_BYTES_MAX {
            return bad(format!("its bitmaps would take more than {BITS_BYTES_MAX} bytes: use larger granules"));
        }
        Ok(())
    }

    /// The same bitmaps for a disk of another size, which was checked. No request is in flight.
    pub(crate) fn of_size(&self, size_bytes: u64) -> Self {
        Self(self.0.iter().map(|bitmap| bitmap.of_size(size_bytes)).collect())
    }

    /// The bitmaps after these changes, for a disk of this size. No request is in flight.
    pub(crate) fn edited(&self, actions: &[(String, BitmapAction)], size_bytes: u64) -> Result<Self> {
        let mut new = self.of_size(size_bytes);
        for (name, action) in actions {
            // Checked after each change: all of them may ask for far more than there is.
            let changed = new.change(name, action, size_bytes).and_then(|()| new.check_size(size_bytes));
            changed.map_err(|error| error.in_context(format!("Operation on bitmap {name} failed")))?;
        }
        Ok(new)
    }

    fn change(&mut self, name: &str, action: &BitmapAction, size_bytes: u64) -> Result<()> {
        let place = self.0.iter().position(|bitmap| bitmap.name == name);
        if let BitmapAction::Add { granularity_bytes } = action {
            if place.is_some() {
                return bad(format!("Bitmap already exists: {name}"));
            }
            if self.0.len() >= BITMAPS_MAX {
                return bad(format!("a raw image has at most {BITMAPS_MAX} bitmaps: remove one"));
            }
            self.0.push(MemoryBitmap::new(name, granularity_bits(name, *granularity_bytes, size_bytes)?, size_bytes));
            return Ok(());
        }
        let not_found = |name: &str| Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found"));
        let place = place.ok_or_else(|| not_found(name))?;
        if *action == BitmapAction::Remove {
            self.0.remove(place);
            return Ok(());
        }
        let source = match action {
            BitmapAction::MergeOwn(source) => Some(self.find(source).ok_or_else(|| not_found(source))?),
            _ => None,
        };
        let Some(bitmap) = self.0.get(place) else { return Ok(()) };
        let note = |range: Range<u64>| bitmap.note(range.start, range.end.saturating_sub(range.start));
        source.into_iter().for_each(|source| source.each_range(note));
        match action {
            BitmapAction::Clear => bitmap.words.iter().for_each(|word| word.store(0, Ordering::Relaxed)),
            BitmapAction::Merge(bits) => bits.ranges().into_iter().for_each(note),
            BitmapAction::Enable | BitmapAction::Disable => {
                let is_enabled = *action == BitmapAction::Enable;
                self.0.get_mut(place).into_iter().for_each(|bitmap| bitmap.enabled = is_enabled);
            }
            _ => {}
        }
        Ok(())
    }
}

fn granularity_bits(name: &str, granularity_bytes: Option<u64>, size_bytes: u64) -> Result<u8> {
    let bytes = granularity_bytes.unwrap_or(GRANULARITY_BYTES);
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return bad(format!("Bitmap name has to have 1 to {NAME_BYTES_MAX} bytes"));
    }
    if !bytes.is_power_of_two() || !(GRANULARITY_BYTES_MIN..=GRANULARITY_BYTES_MAX).contains(&bytes) {
        return bad(format!(
            "Granularity has to be a power of two between {GRANULARITY_BYTES_MIN} and {GRANULARITY_BYTES_MAX}"
        ));
    }
    let bits = bytes.trailing_zeros() as u8;
    if words_for(bits, size_bytes).saturating_mul(8) > BITS_BYTES_MAX {
        return bad(format!("it would take more than {BITS_BYTES_MAX} bytes: use larger granules"));
    }
    Ok(bits)
}

fn bad<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::BadOption, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 100 * 4096 + 512;

    fn add(granularity_bytes: u64) -> BitmapAction {
        BitmapAction::Add { granularity_bytes: Some(granularity_bytes) }
    }

    fn with(actions: &[(&str, BitmapAction)]) -> MemoryBitmaps {
        edited(&MemoryBitmaps::default(), actions).unwrap()
    }

    fn edited(bitmaps: &MemoryBitmaps, actions: &[(&str, BitmapAction)]) -> Result<MemoryBitmaps> {
        let actions: Vec<_> = actions.iter().map(|(name, action)| ((*name).to_owned(), action.clone())).collect();
        bitmaps.edited(&actions, SIZE)
    }

    #[test]
    fn what_is_noted_comes_back_in_whole_granules_and_nothing_else_does() {
        let bitmaps = with(&[("b", add(4096))]);
        let b = bitmaps.find("b").unwrap();
        for (offset, length) in [(4095, 2), (10 * 4096, 0), (62 * 4096, 5 * 4096), (100 * 4096, 512), (u64::MAX - 1, 9)]
        {
            bitmaps.note(offset, length);
        }
        assert_eq!(b.ranges(), [0..8192, 62 * 4096..67 * 4096, 100 * 4096..SIZE]);
        assert_eq!(b.dirty_bytes(), 7 * 4096 + 512);
        assert!(b.bits().is_set(4095) && !b.bits().is_set(10 * 4096));
        assert_eq!(b.bits(), BitmapBits::of_ranges(12, SIZE, &b.ranges()));
        bitmaps.note(0, u64::MAX);
        assert_eq!(b.bits(), BitmapBits::of_ranges(12, SIZE, &b.ranges()));
        assert_eq!((b.ranges().len(), b.dirty_bytes()), (1, SIZE));
        assert_eq!(bitmaps.of_size(2 * SIZE).find("b").unwrap().ranges().last().unwrap().start, 0);
    }

    #[test]
    fn bitmaps_are_merged_cleared_and_stopped_all_or_none() {
        let bitmaps = with(&[("a", add(4096)), ("b", add(65536)), ("off", add(512)), ("off", BitmapAction::Disable)]);
        bitmaps.note(0, 1);
        let ranges = |bitmaps: &MemoryBitmaps, name: &str| bitmaps.find(name).unwrap().ranges();
        assert!(ranges(&bitmaps, "off").is_empty() && bitmaps.is_recording());
        let merge = |source: &str| BitmapAction::MergeOwn(source.to_owned());
        let next =
            edited(&bitmaps, &[("off", merge("a")), ("a", BitmapAction::Clear), ("b", BitmapAction::Remove)]).unwrap();
        assert!(ranges(&next, "off").first() == Some(&(0..4096)) && ranges(&next, "a").is_empty());
        assert_eq!(next.iter().count(), 2);
        for wrong in [("a", add(4096)), ("c", merge("a")), ("a", merge("c")), ("c", add(3)), ("", add(4096))] {
            assert!(edited(&bitmaps, &[("a", BitmapAction::Clear), wrong.clone()]).is_err(), "{wrong:?}");
        }
        assert_eq!(ranges(&bitmaps, "a").first(), Some(&(0..4096)));
        let large = [("c".to_owned(), add(512))];
        assert!(MemoryBitmaps::default().edited(&large, 1 << 40).is_err());
    }

    #[test]
    fn bitmaps_that_would_take_much_memory_are_refused_before_they_are_made() {
        // Each one alone is small enough.
        let size = 8 * 512 * BITS_BYTES_MAX;
        let many: Vec<_> = (0..1_000_000).map(|index| (index.to_string(), add(512))).collect();
        let refused = MemoryBitmaps::default().edited(&many, size).unwrap_err().to_string();
        assert!(refused.contains("bitmap 1 ") && refused.contains("larger granules"), "{refused}");
        let refused = MemoryBitmaps::default().edited(&many, 512).unwrap_err().to_string();
        assert!(refused.contains("at most 64 bitmaps"), "{refused}");
        let one = MemoryBitmaps::default().edited(&many[..1], 512).unwrap();
        assert!(
            one.check_size(size).is_ok() && one.check_size(size + 512).is_err() && one.check_size(u64::MAX).is_err()
        );
    }
}
