//! Lists of ranges, in order and apart.

use std::ops::Range;

/// Returns the sum of their lengths, in bytes.
pub(super) fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end.saturating_sub(range.start)).fold(0, u64::saturating_add)
}

/// Returns the union of these lists.
pub(super) fn joined(lists: impl IntoIterator<Item = Vec<Range<u64>>>) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = lists.into_iter().flatten().filter(|range| !range.is_empty()).collect();
    all.sort_unstable_by_key(|range| range.start);
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for range in all {
        match ranges.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => ranges.push(range),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_lists_have_each_byte_once() {
        let ranges =
            joined([vec![0..2, 8..9, 20..30], vec![2..4, 7..8, 21..22, 40..40], std::iter::once(29..31).collect()]);
        assert_eq!(ranges, [0..4, 7..9, 20..31]);
        assert_eq!(total(&ranges), 17);
    }
}
