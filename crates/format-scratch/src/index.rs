//! The index: a word for each page of the disk.

use crate::layout::{
    BELOW, FIRST_DATA, PAGE_BYTES, TABLE_WORDS, ZERO, data_page, header_pages, index_pages, parts, place_of_table,
    place_of_zero_bit,
};
use block::{Extent, Mapped};
use memory::MappedWords;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

/// Directory entry: no table; the layer below has the whole part.
const NO_TABLE: u32 = 0;
/// Directory entry: no table; the whole part is zero.
const ZERO_PART: u32 = u32::MAX;

/// The words of the index, read without a lock. They change only under the lock of the overlay's state.
#[derive(Debug)]
pub(crate) struct Index {
    /// For each part of the disk, its directory entry or the page of its table in the index.
    directory: Box<[AtomicU32]>,
    words: MappedWords,
    /// The number of pages before the first group.
    pub(crate) header_pages: u64,
}

/// The mapping of a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All pages of the part have this word.
    All(u32),
    /// The part has a table, at this page of the index.
    Table(u32),
}

impl Index {
    /// Makes an empty index in an empty file, for a disk of this size.
    pub(crate) fn new(file: BorrowedFd<'_>, size_bytes: u64) -> io::Result<Self> {
        Self::of_words(size_bytes, |count| MappedWords::new(file, count))
    }

    /// Makes an empty index in memory.
    pub(crate) fn in_memory(size_bytes: u64) -> io::Result<Self> {
        Self::of_words(size_bytes, MappedWords::in_memory)
    }

    fn of_words(size_bytes: u64, make: impl FnOnce(usize) -> io::Result<MappedWords>) -> io::Result<Self> {
        let too_large = || io::Error::new(io::ErrorKind::InvalidInput, "the disk is too large for an index in memory");
        let (count, header_pages) = (parts(size_bytes), header_pages(size_bytes));
        let words = index_pages(header_pages, count.max(1)).checked_mul(TABLE_WORDS);
        let words = words.and_then(|words| usize::try_from(words).ok()).ok_or_else(too_large)?;
        let words = make(words)?;
        let count = usize::try_from(count).map_err(|_| too_large())?;
        let mut directory = Vec::new();
        directory.try_reserve_exact(count).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        directory.resize_with(count, || AtomicU32::new(NO_TABLE));
        Ok(Self { directory: directory.into_boxed_slice(), words, header_pages })
    }

    /// Whether a page of the index could not be read. Nothing in the index is then valid.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.words.is_poisoned()
    }

    #[inline]
    pub(crate) fn part(&self, part: u64) -> Part {
        match self.entry(part).map_or(NO_TABLE, |entry| entry.load(Ordering::Acquire)) {
            NO_TABLE => Part::All(BELOW),
            ZERO_PART => Part::All(ZERO),
            table => Part::Table(table),
        }
    }

    #[inline]
    fn place(&self, table: u32, inside: u64) -> Option<&AtomicU32> {
        self.at(u64::from(table).saturating_mul(TABLE_WORDS).saturating_add(inside))
    }

    #[inline]
    fn at(&self, word: u64) -> Option<&AtomicU32> {
        self.words.get(usize::try_from(word).ok()?)
    }

    fn entry(&self, part: u64) -> Option<&AtomicU32> {
        self.directory.get(usize::try_from(part).ok()?)
    }

    /// Returns the words of a page of the index; none behind its end.
    pub(crate) fn page(&self, page: u64) -> impl Iterator<Item = &AtomicU32> {
        let first = page.saturating_mul(TABLE_WORDS);
        (first..first.saturating_add(TABLE_WORDS)).filter_map(|word| self.at(word))
    }

    /// Returns the word of a page of the disk.
    #[inline]
    pub(crate) fn word(&self, page: u64) -> u32 {
        match self.part(page / TABLE_WORDS) {
            Part::All(word) => word,
            Part::Table(table) => {
                self.place(table, page % TABLE_WORDS).map_or(BELOW, |word| word.load(Ordering::Acquire))
            }
        }
    }

    /// Whether any page of the disk lies in the data.
    pub(crate) fn names_data(&self) -> bool {
        let parts = u64::try_from(self.directory.len()).unwrap_or(u64::MAX);
        (0..parts).any(|part| match self.part(part) {
            Part::All(_) => false,
            Part::Table(table) => {
                self.page(u64::from(table)).any(|word| data_page(word.load(Ordering::Acquire)).is_some())
            }
        })
    }

    /// Publishes the word of a page whose part has a table. Returns the former word.
    pub(crate) fn set(&self, page: u64, word: u32) -> Option<u32> {
        match self.part(page / TABLE_WORDS) {
            Part::All(_) => None,
            Part::Table(table) => Some(self.place(table, page % TABLE_WORDS)?.swap(word, Ordering::AcqRel)),
        }
    }

    /// Gives a part without a table the table number `table`, whose space is reserved and zero. Returns the pages of
    /// the index that have changed.
    pub(crate) fn give_table(&self, part: u64, table: u64) -> Option<[u64; 2]> {
        let (page, owner) = place_of_table(self.header_pages, table);
        let entry = u32::try_from(page).ok().filter(|page| *page != ZERO_PART)?;
        if self.part(part) == Part::All(ZERO) {
            for inside in 0..TABLE_WORDS {
                self.place(entry, inside)?.store(ZERO, Ordering::Relaxed);
            }
        }
        let name = u32::try_from(part).ok()?.checked_add(1)?;
        self.at(owner)?.store(name, Ordering::Relaxed);
        self.entry(part)?.store(entry, Ordering::Release);
        Some([page, owner / TABLE_WORDS])
    }

    /// Notes that a part's table was read and lies at this page; `None` if there is no such part.
    pub(crate) fn has_table(&self, part: u64, page: u64) -> Option<()> {
        let entry = u32::try_from(page).ok().filter(|page| *page != ZERO_PART)?;
        self.entry(part)?.store(entry, Ordering::Release);
        Some(())
    }

    /// Marks a part without a table as zero, or as left to the layer below.
    pub(crate) fn set_part(&self, part: u64, is_zero: bool) {
        if let Some(entry) = self.entry(part) {
            entry.store(if is_zero { ZERO_PART } else { NO_TABLE }, Ordering::Release);
        }
    }

    /// Returns the bit that marks, for a later opening, a part that is wholly zero.
    pub(crate) fn zero_bit(&self, part: u64) -> bool {
        let (word, bit) = place_of_zero_bit(part);
        self.at(word).is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Changes that bit. Returns the page of the index that has changed.
    pub(crate) fn set_zero_bit(&self, part: u64, is_zero: bool) -> u64 {
        let (at, bit) = place_of_zero_bit(part);
        if let Some(word) = self.at(at) {
            match is_zero {
                true => word.fetch_or(bit, Ordering::Relaxed),
                false => word.fetch_and(!bit, Ordering::Relaxed),
            };
        }
        at / TABLE_WORDS
    }

    /// Looks up the first part of a range, which is not empty.
    #[inline]
    pub(crate) fn lookup(&self, offset: u64, length_bytes: u64) -> Mapped {
        let skip = offset % PAGE_BYTES;
        let end = offset.saturating_add(length_bytes);
        let mut page = offset / PAGE_BYTES;
        let first = self.word(page);
        let mut expected = first;
        let mut reached = match self.part(page / TABLE_WORDS) {
            Part::All(_) => (page / TABLE_WORDS).saturating_add(1).saturating_mul(TABLE_WORDS),
            Part::Table(_) => page.saturating_add(1),
        };
        while reached.saturating_mul(PAGE_BYTES) < end {
            page = reached;
            // Parts without a table are skipped in one step.
            let whole = if page.is_multiple_of(TABLE_WORDS) { self.part(page / TABLE_WORDS) } else { Part::Table(0) };
            match whole {
                Part::All(word) if word == first => reached = page.saturating_add(TABLE_WORDS),
                Part::All(_) => break,
                Part::Table(_) => {
                    expected = if first >= FIRST_DATA { expected.wrapping_add(1) } else { first };
                    if self.word(page) != expected {
                        break;
                    }
                    reached = page.saturating_add(1);
                }
            }
        }
        let length_bytes = reached.saturating_mul(PAGE_BYTES).min(end).saturating_sub(offset);
        let extent = match data_page(first) {
            Some(page) => Extent::Data { file: 0, offset: page.saturating_mul(PAGE_BYTES).saturating_add(skip) },
            None if first == ZERO => Extent::Zero,
            None => Extent::Backing,
        };
        Mapped { extent, length_bytes }
    }
}
