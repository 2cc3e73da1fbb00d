//! From lengths on storage to lengths in memory.

/// Returns a length, a place or an index as one in memory. What no memory can have becomes the largest number, which
/// fails every check of bounds.
#[inline]
#[must_use]
pub fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
