//! Where an image has data, as librbd tells it for many bytes at once.

use crate::ffi::{ERANGE, Errno, Image, ImageFacts};
use std::ops::Range;

const STRIPING: u64 = 1 << 1;
const FAST_DIFF: u64 = 1 << 4;
const MAP_INVALID: u64 = 1 << 0;
const FAST_DIFF_INVALID: u64 = 1 << 1;

/// Objects that one question is about: with a map of the objects, and where each of them is asked.
const MAPPED_OBJECTS: u64 = 1 << 14;
const ASKED_OBJECTS: u64 = 256;
/// What is remembered of one answer, at most.
const EXTENTS_MAX: usize = 1 << 16;

/// How an image is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    object_bytes: u64,
    /// By objects, from the cluster's map of them.
    is_mapped: bool,
}

/// What is known of a range, until something changes.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    range: Range<u64>,
    /// First byte and end, sorted, not overlapping.
    data: Vec<Range<u64>>,
}

impl Question {
    /// Versions before 17.1 tell wrong offsets from the map where an image has a parent, or stripes.
    pub(crate) fn of(facts: &ImageFacts) -> Self {
        let has_map = facts.features & FAST_DIFF != 0 && facts.flags & (MAP_INVALID | FAST_DIFF_INVALID) == 0;
        let is_plain = facts.features & STRIPING == 0 && facts.overlap_bytes == 0;
        Self { object_bytes: facts.object_bytes.max(1), is_mapped: has_map && is_plain }
    }

    /// The range to ask for, around `offset`. Its ends are ends of objects: those versions need that, too.
    pub(crate) fn range_at(&self, offset: u64, wanted_bytes: u64, size_bytes: u64) -> Range<u64> {
        let objects = if self.is_mapped { MAPPED_OBJECTS } else { ASKED_OBJECTS };
        let start = offset.saturating_sub(offset.checked_rem(self.object_bytes).unwrap_or(0));
        let most = objects.saturating_mul(self.object_bytes);
        let end = match self.is_mapped {
            true => start.saturating_add(most),
            false => offset.saturating_add(wanted_bytes).min(start.saturating_add(most)),
        };
        start..end.checked_next_multiple_of(self.object_bytes).unwrap_or(end).min(size_bytes)
    }

    pub(crate) fn ask(&self, image: &Image, range: Range<u64>) -> Result<Extents, Errno> {
        let length = range.end.saturating_sub(range.start);
        let told = match image.data_extents(range.start, length, self.is_mapped, EXTENTS_MAX) {
            // Too many to remember: then all of it counts as data, which is never wrong.
            Err(ERANGE) => vec![(range.start, length)],
            told => told?,
        };
        let mut found: Vec<_> = told.into_iter().map(|(start, length)| start..start.saturating_add(length)).collect();
        found.sort_by_key(|extent| extent.start);
        let mut data: Vec<Range<u64>> = Vec::new();
        for extent in found {
            match data.last_mut().filter(|last| last.end >= extent.start) {
                Some(last) => last.end = last.end.max(extent.end),
                None => data.push(extent),
            }
        }
        Ok(Extents { range, data })
    }
}

impl Extents {
    /// Whether a byte lies in a hole, and where that ends; `None` if it was not asked for.
    pub(crate) fn at(&self, offset: u64) -> Option<(bool, u64)> {
        if !self.range.contains(&offset) {
            return None;
        }
        let next = self.data.partition_point(|extent| extent.end <= offset);
        let (is_hole, end) = match self.data.get(next) {
            Some(extent) if extent.start <= offset => (false, extent.end),
            Some(extent) => (true, extent.start),
            None => (true, self.range.end),
        };
        Some((is_hole, end.min(self.range.end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_lies_in_data_or_in_a_hole_up_to_the_next() {
        let extents = Extents { range: 100..200, data: vec![110..120, 150..300] };
        for (offset, expected) in [
            (99, None),
            (100, Some((true, 110))),
            (110, Some((false, 120))),
            (120, Some((true, 150))),
            (199, Some((false, 200))),
            (200, None),
        ] {
            assert_eq!(extents.at(offset), expected, "{offset}");
        }
    }

    #[test]
    fn questions_are_about_whole_objects_inside_the_image() {
        let facts = |features, flags, overlap_bytes| ImageFacts {
            size_bytes: 1000,
            object_bytes: 64,
            features,
            flags,
            overlap_bytes,
        };
        let mapped = Question::of(&facts(FAST_DIFF, 0, 0));
        assert!(mapped.is_mapped);
        assert_eq!(mapped.range_at(70, 1, 1000), 64..1000);
        for facts in [facts(0, 0, 0), facts(FAST_DIFF | STRIPING, 0, 0), facts(FAST_DIFF, 2, 0), facts(FAST_DIFF, 0, 1)]
        {
            let asked = Question::of(&facts);
            assert!(!asked.is_mapped);
            assert_eq!(asked.range_at(70, 1, 1000), 64..128);
        }
    }
}
