//! The layout of the two files.
//!
//! The index file is a row of pages of 1024 words each. Page 0 is the header (see `header`; only a kept overlay has
//! one). Then come the bits for the parts of the disk, rounded up to pages: a bit marks a part without a table that is
//! wholly zero. Then come groups: a page of owners, then up to 1024 *tables*. The owner page has a word for each table
//! of its group: the number of the table's part of the disk, plus one. A table has a word for each of the 1024 pages (4
//! MiB) of its part. Words are in native order, which is little-endian on every machine that Ringdisk runs on.

/// Bytes of a page: the unit of the disk, of the data and of the index.
pub const PAGE_BYTES: u64 = 4096;
/// The largest disk: its directory of tables takes 64 MiB of memory.
pub const MAX_DISK_BYTES: u64 = 64 << 40;

/// Words in a page of the index.
pub(crate) const TABLE_WORDS: u64 = 1024;
/// Bytes of the disk that one table maps.
pub(crate) const PART_BYTES: u64 = TABLE_WORDS * PAGE_BYTES;
/// Bits in a page of the index.
const PAGE_BITS: u64 = PAGE_BYTES * 8;
/// Pages in a group: the owners, and the tables.
const GROUP_PAGES: u64 = 1 + TABLE_WORDS;

/// The layer below has the page.
pub(crate) const BELOW: u32 = 0;
/// The page reads as zeros.
pub(crate) const ZERO: u32 = 1;
/// Words from here on, minus this constant, are the number of the page in the data.
pub(crate) const FIRST_DATA: u32 = 2;
/// The most pages of data: 16 TiB.
pub(crate) const MAX_DATA_PAGES: u64 = (u32::MAX - FIRST_DATA) as u64;

/// Returns the page of the data that a word names.
#[inline]
pub(crate) fn data_page(word: u32) -> Option<u64> {
    word.checked_sub(FIRST_DATA).map(u64::from)
}

/// Returns the word for a page of the data.
pub(crate) fn word_of(data_page: u64) -> Option<u32> {
    u32::try_from(data_page).ok()?.checked_add(FIRST_DATA)
}

/// Returns the parts of a disk of this size; the last may be incomplete.
pub(crate) fn parts(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(PART_BYTES)
}

/// Returns the pages of the index before the first group, for a disk of this size.
pub(crate) fn header_pages(size_bytes: u64) -> u64 {
    parts(size_bytes).div_ceil(PAGE_BITS).saturating_add(1)
}

/// Returns where a part without a table is marked as zero: a word of the index, and a bit in it.
pub(crate) fn place_of_zero_bit(part: u64) -> (u64, u32) {
    (TABLE_WORDS.saturating_add(part / 32), 1u32.wrapping_shl((part % 32) as u32))
}

/// Returns the owner page of the group with this number, where the group begins.
pub(crate) fn group_page(header_pages: u64, group: u64) -> u64 {
    header_pages.saturating_add(group.saturating_mul(GROUP_PAGES))
}

/// Whether this page of the index is no table, but refers to tables.
pub(crate) fn leads_to_tables(header_pages: u64, page: u64) -> bool {
    page.checked_sub(header_pages).is_none_or(|inside| inside.is_multiple_of(GROUP_PAGES))
}

/// Returns where the table number `table` lies (a page of the index), and where its owner is noted (a word of the
/// index).
pub(crate) fn place_of_table(header_pages: u64, table: u64) -> (u64, u64) {
    let group = group_page(header_pages, table / TABLE_WORDS);
    let inside = table % TABLE_WORDS;
    (group.saturating_add(1).saturating_add(inside), group.saturating_mul(TABLE_WORDS).saturating_add(inside))
}

/// Returns the number of pages of an index with `tables` tables.
pub(crate) fn index_pages(header_pages: u64, tables: u64) -> u64 {
    match tables.checked_sub(1) {
        None => header_pages,
        Some(last) => place_of_table(header_pages, last).0.saturating_add(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_its_owners_before_its_tables() {
        assert_eq!(place_of_table(1, 0), (2, 1024));
        assert_eq!(place_of_table(1, 1), (3, 1025));
        assert_eq!(place_of_table(1, 1023), (1025, 2047));
        assert_eq!(place_of_table(1, 1024), (1027, 1026 * 1024));
        assert_eq!([0, 1, 2, 1024, 1025].map(|tables| index_pages(1, tables)), [1, 3, 4, 1026, 1028]);
        assert_eq!(
            [0, 1, 2, 1025, 1026, 1027].map(|page| leads_to_tables(1, page)),
            [true, true, false, false, true, false]
        );
    }

    #[test]
    fn the_bits_of_parts_that_are_zero_lie_behind_the_header() {
        assert_eq!([1, 1 << 37, (1 << 37) + 1, MAX_DISK_BYTES].map(header_pages), [2, 2, 3, 513]);
        assert_eq!(place_of_zero_bit(0), (1024, 1));
        assert_eq!(place_of_zero_bit(32767), (2047, 1 << 31));
    }
}
