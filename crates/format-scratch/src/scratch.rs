//! A scratch overlay.

use crate::index::Index;
use crate::index_memory::Taken;
use crate::layout::{MAX_DISK_BYTES, PAGE_BYTES, data_page, header_pages, index_pages, parts};
use crate::space::Space;
use crate::state::{Inner, Spaces};
use block::{Epochs, Error, ErrorKind, IoError, IoResult, Mapped, Result};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

/// A scratch overlay over a disk: holds the pages that were written.
///
/// A temporary overlay is never durable. A kept one ([`Scratch::open_kept`]) is an image, and a flush makes earlier
/// writes durable. The mapping of a page changes when a write to it commits, and not before.
pub struct Scratch {
    pub(crate) inner: Arc<Inner>,
}

impl Scratch {
    /// Makes an empty overlay for a disk of `size_bytes`. `index` is an empty file, open for reading and writing.
    /// `spaces` reserve space in that file, and in another one where the caller keeps the data. Fails if the index
    /// cannot be mapped, or its space cannot be reserved.
    ///
    /// A mapped page of a file that is not `resident` may be written out and dropped, and a lookup would wait until it
    /// is read back. So the index of such a file is in memory, if there is room for all of it
    /// ([`crate::limit_index_memory`]); the file only reserves its space.
    pub fn new(name: &str, size_bytes: u64, index: &File, spaces: [Arc<dyn Space>; 2], resident: bool) -> Result<Self> {
        let unsupported = |why: String| Error::new(ErrorKind::Unsupported, format!("'{name}': {why}"));
        if size_bytes > MAX_DISK_BYTES {
            let most = MAX_DISK_BYTES >> 40;
            return Err(unsupported(format!("a scratch overlay is for a disk of at most {most} TiB")));
        }
        let mut memory = Taken::default();
        let all = index_pages(header_pages(size_bytes), parts(size_bytes).max(1));
        let in_memory = !resident && memory.take_ahead(all);
        let mapped = if in_memory { Index::in_memory(size_bytes) } else { Index::new(index.as_fd(), size_bytes) };
        let mapped = mapped.map_err(|error| unsupported(format!("its file system maps no files ({error})")))?;
        let cannot = |error| unsupported(format!("no space can be reserved in its directory ({error})"));
        spaces.iter().try_for_each(|space| space.reserve(0, PAGE_BYTES)).map_err(cannot)?;
        let inner = Inner::new(size_bytes, mapped, Spaces::Given(spaces), None);
        let mut state = inner.lock();
        (state.index_reserved, state.data.reserved) = (1, 1);
        state.index_memory = in_memory.then_some(memory);
        drop(state);
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.inner.size_bytes
    }

    /// Returns the epochs, in which queues take part.
    #[must_use]
    pub fn epochs(&self) -> &Epochs {
        &self.inner.epochs
    }

    /// Looks up the first part of a range of the disk; `None` if the index is not valid any more.
    #[inline]
    #[must_use]
    pub fn lookup(&self, offset: u64, length_bytes: u64) -> Option<Mapped> {
        let mapped = self.inner.index.lookup(offset, length_bytes);
        // The mark is checked after the words were read.
        (!self.inner.index.is_lost()).then_some(mapped)
    }

    /// As [`Scratch::lookup`], but fails instead of returning `None`.
    pub fn resolve(&self, offset: u64, length_bytes: u64) -> IoResult<Mapped> {
        self.lookup(offset, length_bytes).ok_or(IoError::EIO)
    }

    /// Returns where the whole range lies in the data in one piece.
    #[inline]
    #[must_use]
    pub fn in_one_piece(&self, offset: u64, length_bytes: u64) -> Option<u64> {
        let (skip, page) = (offset % PAGE_BYTES, offset / PAGE_BYTES);
        if length_bytes == 0 {
            return None;
        }
        let first = data_page(self.inner.index.word(page))?;
        let count = skip.saturating_add(length_bytes).div_ceil(PAGE_BYTES);
        for next in 1..count {
            let here = data_page(self.inner.index.word(page.saturating_add(next)));
            if here != Some(first.saturating_add(next)) {
                return None;
            }
        }
        let place = first.saturating_mul(PAGE_BYTES).saturating_add(skip);
        (!self.inner.index.is_lost()).then_some(place)
    }

    /// Returns how many bytes of the data file were ever used.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.inner.lock().data.used.saturating_mul(PAGE_BYTES)
    }
}
