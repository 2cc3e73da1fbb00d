//! Makes and opens kept overlays.

use crate::header::Header;
use crate::index::{Index, Part};
use crate::layout::{PAGE_BYTES, TABLE_WORDS, data_page, group_page, header_pages, index_pages, parts};
use crate::scratch::Scratch;
use crate::state::{INDEX_STEP_PAGES, Inner, Spaces};
use crate::unwritten::Kept;
use block::{Error, ErrorKind, IoError, MetaIo, PastEnd, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most pages that are read at once.
const READ_PAGES: u64 = 64;

/// Makes an empty overlay in an empty index file, with an empty data file. The overlay is durable when this returns.
pub async fn create_kept(io: &MetaIo, name: &str, header: &Header) -> Result<()> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot write its header"), error);
    let pages = header_pages(header.size_bytes);
    let page = header.encode(name, pages)?;
    io.write_zeroes(0, pages.saturating_mul(PAGE_BYTES), false).await.map_err(failed)?;
    io.flush().await.map_err(failed)?;
    io.write(0, page).await.map_err(failed)?;
    io.flush().await.map_err(failed)
}

impl Scratch {
    /// Opens the index of a kept overlay, of `length_bytes`. Reads all of it into memory.
    ///
    /// The process before may have been killed in the middle of a flush. Then the file has an index that is only in the
    /// host's cache. It is made durable first, unless nobody is going to write: a flush writes only what has changed
    /// since, and freed pages are used again.
    pub async fn open_kept(io: &MetaIo, name: &str, length_bytes: u64, read_only: bool) -> Result<Self> {
        let page_bytes = PAGE_BYTES as usize;
        let failed = |error| cannot_read(name, error);
        if !read_only {
            let unsynced =
                |error| Error::with_source(ErrorKind::Io, format!("'{name}': cannot make its index durable"), error);
            io.flush().await.map_err(unsynced)?;
        }
        let page = io.read(0, page_bytes, PastEnd::Zeros).await.map_err(failed)?;
        let (header, believed) = Header::decode(name, &page)?;
        let index = Index::in_memory(header.size_bytes);
        let index = index.map_err(|error| Error::io(format!("'{name}': no memory for its index"), error))?;
        let loaded = Loader { io, name, index: &index, pages: believed };
        if believed > length_bytes / PAGE_BYTES || believed < index.header_pages {
            return Err(loaded.bad("its file is shorter than its header says"));
        }
        // A huge sparse file costs its maker nothing, but its index would take the room of all others.
        let all = index_pages(index.header_pages, parts(header.size_bytes));
        if believed > all.saturating_add(INDEX_STEP_PAGES) {
            return Err(loaded.bad("it claims more than a disk of its size can need"));
        }
        loaded.zero_bits(header.size_bytes).await?;
        let (tables, free_tables) = loaded.tables(header.size_bytes).await?;
        let kept = Kept::new(header.clone());
        let inner = Inner::new(header.size_bytes, index, Spaces::OfFiles, Some(kept));
        let mut state = inner.lock();
        (state.tables, state.free_tables) = (tables, free_tables);
        state.index_reserved = believed;
        if let Some(memory) = &mut state.index_memory {
            memory.set(believed);
        }
        state.has_stale_data = true;
        if !read_only {
            let used = data_in_use(name, &inner, header.size_bytes)?;
            let end = used.last().map_or(0, |last| u64::from(*last).saturating_add(1));
            (state.data.used, state.data.reserved) = (end, end);
            let mut next = 0;
            for page in used {
                state.free.add(next..u64::from(page));
                next = u64::from(page).saturating_add(1);
            }
        }
        drop(state);
        Ok(Self { inner: Arc::new(inner) })
    }
}

fn cannot_read(name: &str, error: IoError) -> Error {
    Error::with_source(ErrorKind::Io, format!("'{name}': cannot read its index"), error)
}

/// Returns the pages of the data that the index names, in order. Fails if a page is named twice: two places of the disk
/// would share it.
fn data_in_use(name: &str, inner: &Inner, size_bytes: u64) -> Result<Vec<u32>> {
    let mut used = Vec::new();
    for part in 0..parts(size_bytes) {
        if let Part::Table(table) = inner.index.part(part) {
            let words = inner.index.page(u64::from(table)).map(|word| word.load(Ordering::Relaxed));
            used.extend(words.filter_map(|word| u32::try_from(data_page(word)?).ok()));
        }
    }
    used.sort_unstable();
    match used.windows(2).find(|pair| pair.first() == pair.last()) {
        None => Ok(used),
        Some(pair) => {
            let at = pair.first().map_or(0, |page| u64::from(*page).saturating_mul(PAGE_BYTES));
            let what = format!("two places of the disk share the data at byte {at}: its index is damaged");
            Err(Error::new(ErrorKind::BadImage, format!("'{name}': {what}")))
        }
    }
}

/// Fills an index from its file.
struct Loader<'a> {
    io: &'a MetaIo,
    name: &'a str,
    index: &'a Index,
    /// The number of valid pages in the file.
    pages: u64,
}

impl Loader<'_> {
    fn bad(&self, what: &str) -> Error {
        Error::new(ErrorKind::BadImage, format!("'{}': {what}: its index is damaged", self.name))
    }

    /// Reads pages of the file and keeps those that `wanted` accepts. Pages of zeros take no memory, however many the
    /// file claims to have.
    async fn read(&self, first: u64, count: u64, wanted: impl Fn(u64) -> bool) -> Result<()> {
        let bytes = usize::try_from(count.saturating_mul(PAGE_BYTES)).map_err(|_| self.bad("it is too long"))?;
        let read = self.io.read(first.saturating_mul(PAGE_BYTES), bytes, PastEnd::Zeros).await;
        let read = read.map_err(|error| cannot_read(self.name, error))?;
        for (page, bytes) in (first..).zip(read.chunks_exact(PAGE_BYTES as usize)).filter(|(page, _)| wanted(*page)) {
            if bytes.iter().all(|byte| *byte == 0) {
                continue;
            }
            for (word, bytes) in self.index.page(page).zip(bytes.as_chunks().0) {
                word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    async fn zero_bits(&self, size_bytes: u64) -> Result<()> {
        let (mut page, end) = (1, self.index.header_pages);
        while page < end {
            let count = end.saturating_sub(page).min(READ_PAGES);
            self.read(page, count, |_| true).await?;
            page = page.saturating_add(count);
        }
        for part in (0..parts(size_bytes)).filter(|part| self.index.zero_bit(*part)) {
            self.index.set_part(part, true);
        }
        Ok(())
    }

    /// Reads all tables. Returns the number of table numbers, and those that no part owns.
    async fn tables(&self, size_bytes: u64) -> Result<(u64, Vec<u64>)> {
        let (mut group, mut tables, mut free) = (0, 0u64, Vec::new());
        let (mut owned, mut given) = (Vec::new(), std::collections::HashSet::new());
        loop {
            let owners = group_page(self.index.header_pages, group);
            if owners >= self.pages || group.saturating_mul(TABLE_WORDS) >= parts(size_bytes) {
                free.retain(|table| *table < tables);
                return Ok((tables, free));
            }
            self.read(owners, 1, |_| true).await?;
            owned.clear();
            for (inside, word) in (0..).zip(self.index.page(owners)) {
                let table = group.saturating_mul(TABLE_WORDS).saturating_add(inside);
                let Some(part) = u64::from(word.load(Ordering::Relaxed)).checked_sub(1) else {
                    free.push(table);
                    continue;
                };
                let page = owners.saturating_add(1).saturating_add(inside);
                if page >= self.pages || table >= parts(size_bytes) || !given.insert(part) {
                    return Err(self.bad("a table lies behind its end, or belongs to a part that has one"));
                }
                owned.push((part, page));
                tables = table.saturating_add(1);
            }
            let mut rest = owned.as_slice();
            while let Some((_, first)) = rest.first() {
                let end = first.saturating_add(READ_PAGES);
                let (here, behind) = rest.split_at(rest.partition_point(|(_, page)| *page < end));
                let last = here.last().map_or(*first, |(_, page)| *page);
                let count = last.saturating_sub(*first).saturating_add(1);
                self.read(*first, count, |page| here.binary_search_by_key(&page, |(_, own)| *own).is_ok()).await?;
                rest = behind;
            }
            for (part, page) in &owned {
                let has = self.index.has_table(*part, *page);
                has.ok_or_else(|| self.bad("a table belongs to a part behind the end of the disk"))?;
            }
            group = group.saturating_add(1);
        }
    }
}
