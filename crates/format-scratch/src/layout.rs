//! Where things are in the two files.
//!
//! The index file is a row of pages of 1024 words each. Page 0 is the header's. Behind it come groups: a page that names
//! owners, then up to 1024 *tables*. The owner page has a word for each table of its group: the number of the part of the
//! disk that the table is for, plus one. A table has a word for each of the 1024 pages (4 MiB) of its part. Words are
//! little-endian on every machine that Ringdisk runs on.

/// The unit of the disk, of the data and of the index, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// The largest disk: its directory of tables takes 64 MiB of memory.
pub const MAX_DISK_BYTES: u64 = 64 << 40;

/// Words of a page of the index.
pub(crate) const TABLE_WORDS: u64 = 1024;
/// What one table is for, in bytes of the disk.
pub(crate) const PART_BYTES: u64 = TABLE_WORDS * PAGE_BYTES;
/// Pages of the index before the first group.
pub(crate) const HEADER_PAGES: u64 = 1;
/// Pages of a group: the owners, and the tables.
const GROUP_PAGES: u64 = 1 + TABLE_WORDS;

/// A word: the layer below has the page.
pub(crate) const BELOW: u32 = 0;
/// A word: the page is zero.
pub(crate) const ZERO: u32 = 1;
/// A word: the page lies at this number, less this, in the data.
pub(crate) const FIRST_DATA: u32 = 2;
/// More pages of data there cannot be: 16 TiB.
pub(crate) const MAX_DATA_PAGES: u64 = (u32::MAX - FIRST_DATA) as u64;

/// The page of the data that a word names.
#[inline]
pub(crate) fn data_page(word: u32) -> Option<u64> {
    word.checked_sub(FIRST_DATA).map(u64::from)
}

/// The word for a page of the data.
pub(crate) fn word_of(data_page: u64) -> Option<u32> {
    u32::try_from(data_page).ok()?.checked_add(FIRST_DATA)
}

/// Parts of a disk of this size, the last perhaps not whole.
pub(crate) fn parts(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(PART_BYTES)
}

/// Where the table number `table` is, and where its owner is noted: a page of the index, and a word of the index.
pub(crate) fn place_of_table(table: u64) -> (u64, u64) {
    let group = HEADER_PAGES.saturating_add((table / TABLE_WORDS).saturating_mul(GROUP_PAGES));
    let inside = table % TABLE_WORDS;
    (group.saturating_add(1).saturating_add(inside), group.saturating_mul(TABLE_WORDS).saturating_add(inside))
}

/// The pages of an index with so many tables.
pub(crate) fn index_pages(tables: u64) -> u64 {
    match tables.checked_sub(1) {
        None => HEADER_PAGES,
        Some(last) => place_of_table(last).0.saturating_add(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_its_owners_before_its_tables() {
        assert_eq!(place_of_table(0), (2, 1024));
        assert_eq!(place_of_table(1), (3, 1025));
        assert_eq!(place_of_table(1023), (1025, 2047));
        assert_eq!(place_of_table(1024), (1027, 1026 * 1024));
        assert_eq!([0, 1, 2, 1024, 1025].map(index_pages), [1, 3, 4, 1026, 1028]);
    }
}
