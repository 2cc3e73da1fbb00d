//! Looks at a file through its mapping.

use super::{InPlace, Whole};
use crate::file::open_file::OpenFile;
use block::{MapPiece, PastEnd};
use memory::{MappedRange, Mapping, PAGE_BYTES};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

const PAGE: u64 = PAGE_BYTES as u64;
/// The file may grow by this much, or double its length if that is more, before it is mapped again.
const ROOM_BYTES: u64 = 64 << 20;
/// Pages whose presence is asked for in one call.
const ASKED_PAGES: usize = 256;

impl InPlace {
    /// Returns a mapping that covers the file's bytes up to `end`, and the file's length. The length is not asked again
    /// if `end` is known to lie within the file.
    fn mapping(&self, file: &OpenFile, end: u64) -> Option<(Arc<Mapping>, u64)> {
        let mut whole = self.whole.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Whole { mapping, known_bytes }) = whole.as_ref()
            && end <= *known_bytes
            && !self.was_cut.load(Ordering::Acquire)
            && !mapping.is_poisoned()
        {
            return Some((Arc::clone(mapping), *known_bytes));
        }
        let known_bytes = file.length_now().ok()?;
        let usable = |whole: &Whole| {
            let mapped_bytes = whole.mapping.length_bytes() as u64;
            known_bytes.min(end) <= mapped_bytes && !whole.mapping.is_poisoned()
        };
        if !whole.as_ref().is_some_and(usable) {
            let room = known_bytes.max(ROOM_BYTES);
            let wanted = known_bytes.checked_add(room)?.checked_next_multiple_of(ROOM_BYTES)?;
            let wanted = usize::try_from(wanted).ok()?;
            let made = Mapping::of_storage(file.fd.as_fd(), wanted, !file.info.read_only).ok()?;
            *whole = Some(Whole { mapping: Arc::new(made), known_bytes });
        }
        let whole = whole.as_mut()?;
        whole.known_bytes = known_bytes;
        Some((Arc::clone(&whole.mapping), known_bytes))
    }
}

impl OpenFile {
    /// Whether requests and a mapping see the same bytes.
    fn lies_in_memory(&self) -> bool {
        !self.info.block_device && (self.info.in_memory || self.page_cached)
    }

    /// See [`block::File::map`].
    pub(crate) fn map(&self, offset: u64, length_bytes: usize, past_end: PastEnd, pieces: &mut Vec<MapPiece>) -> bool {
        let Some(end) = offset.checked_add(length_bytes as u64).filter(|_| self.lies_in_memory()) else { return false };
        let Some((mapping, file_bytes)) = self.in_place.mapping(self, end) else { return false };
        let there = file_bytes.saturating_sub(offset).min(length_bytes as u64);
        if there < length_bytes as u64 && past_end == PastEnd::Fails {
            return false;
        }
        let shown = match self.info.in_memory && !self.is_known_there(offset, there) {
            true => self.map_what_is_there(&mapping, offset, there, pieces),
            false => push_bytes(&mapping, offset, there, pieces),
        };
        if there < length_bytes as u64 {
            pieces.push(MapPiece::Zeros(length_bytes.saturating_sub(there as usize)));
        }
        shown
    }

    /// See [`block::File::can_map_reserved`].
    pub(crate) fn can_map_reserved(&self) -> bool {
        self.lies_in_memory() && !self.info.read_only
    }

    /// See [`block::File::map_reserved`].
    pub(crate) fn map_reserved(&self, offset: u64, length_bytes: usize) -> Option<MappedRange> {
        if !self.can_map_reserved() {
            return None;
        }
        let end = offset.checked_add(length_bytes as u64)?;
        let (mapping, file_bytes) = self.in_place.mapping(self, end)?;
        if end > file_bytes {
            return None;
        }
        let range = MappedRange::new(&mapping, usize::try_from(offset).ok()?, length_bytes)?;
        if let Some(mapped) = &self.mapped {
            // The pages have space, so copies of requests may use them, too.
            mapped.was_written(offset, length_bytes as u64);
            mapped.is_written_unseen();
        }
        Some(range)
    }

    fn is_known_there(&self, offset: u64, length_bytes: u64) -> bool {
        self.mapped.as_ref().is_some_and(|mapped| mapped.has_all(offset, length_bytes))
    }

    /// Appends the pages of a file in memory that are there, and zeros for the others. If pages may be swapped out, a
    /// missing page is no proof of zeros.
    fn map_what_is_there(
        &self,
        mapping: &Arc<Mapping>,
        offset: u64,
        length_bytes: u64,
        pieces: &mut Vec<MapPiece>,
    ) -> bool {
        let end = offset.saturating_add(length_bytes);
        let mut at = offset;
        while at < end {
            let first = at / PAGE;
            let count = end.div_ceil(PAGE).saturating_sub(first).min(ASKED_PAGES as u64);
            let mut resident = [0_u8; ASKED_PAGES];
            let Some(resident) = resident.get_mut(..count as usize) else { return false };
            let Ok(skip) = usize::try_from(first * PAGE) else { return false };
            if mapping.residency(skip, resident).is_err() {
                return false;
            }
            let mut page = 0;
            while page < resident.len() {
                let is_there = resident[page] & 1 != 0;
                let alike = resident[page..].iter().take_while(|byte| (**byte & 1 != 0) == is_there).count();
                let alike_end = ((first + (page + alike) as u64) * PAGE).min(end);
                let length = alike_end.saturating_sub(at);
                match is_there {
                    true if !push_bytes(mapping, at, length, pieces) => return false,
                    true => {}
                    // A file without [`OpenFile::mapped`] may have pages in swap.
                    false if self.mapped.is_none() => return false,
                    false => pieces.push(MapPiece::Zeros(length as usize)),
                }
                at = alike_end;
                page += alike;
            }
        }
        true
    }
}

fn push_bytes(mapping: &Arc<Mapping>, offset: u64, length_bytes: u64, pieces: &mut Vec<MapPiece>) -> bool {
    if length_bytes == 0 {
        return true;
    }
    let (Ok(skip), Ok(length)) = (usize::try_from(offset), usize::try_from(length_bytes)) else { return false };
    let range = MappedRange::new(mapping, skip, length);
    let is_some = range.is_some();
    pieces.extend(range.map(MapPiece::Bytes));
    is_some
}
