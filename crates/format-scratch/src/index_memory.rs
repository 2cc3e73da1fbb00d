//! Limits the memory that the indexes of all kept overlays take together.
//!
//! The more a guest writes, the more memory the index of its overlay takes. Without a limit a guest could take all
//! memory, and the process would end with all its disks.

use crate::layout::PAGE_BYTES;
use block::LogLimit;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory of this process.
static OF_PROCESS: Room = Room::new(u64::MAX);

/// Limits the memory of the indexes of all kept overlays of this process. An index may grow as long as it leaves as
/// much memory as it takes, so none takes all of it. Beyond that, writes to new places fail as on a full disk. An
/// overlay that is opened gets its index, whatever the limit. By default there is no limit.
pub fn limit_index_memory(bytes: u64) {
    OF_PROCESS.limit_pages.store(bytes / PAGE_BYTES, Ordering::Relaxed);
}

/// Room for pages of memory.
#[derive(Debug)]
struct Room {
    limit_pages: AtomicU64,
    used_pages: AtomicU64,
}

/// The pages that one overlay has taken; given back on drop.
#[derive(Debug)]
pub(crate) struct Taken {
    room: &'static Room,
    pages: u64,
    /// See [`Taken::count`].
    uncounted_pages: u64,
}

impl Room {
    const fn new(limit_pages: u64) -> Self {
        Self { limit_pages: AtomicU64::new(limit_pages), used_pages: AtomicU64::new(0) }
    }
}

impl Default for Taken {
    fn default() -> Self {
        Self::of(&OF_PROCESS)
    }
}

impl Taken {
    const fn of(room: &'static Room) -> Self {
        Self { room, pages: 0, uncounted_pages: 0 }
    }

    /// Sets the size of the index, in pages, of an overlay that was opened.
    pub(crate) fn set(&mut self, pages: u64) {
        self.room.used_pages.fetch_add(pages, Ordering::Relaxed);
        self.room.used_pages.fetch_sub(self.pages, Ordering::Relaxed);
        self.pages = pages;
    }

    /// Sets whether the pages count. They do not while the same index is opened anew.
    pub(crate) fn count(&mut self, counts: bool) {
        match (counts, self.uncounted_pages) {
            (true, pages) => {
                self.uncounted_pages = 0;
                self.set(self.pages.saturating_add(pages));
            }
            (false, 0) => {
                self.uncounted_pages = self.pages;
                self.set(0);
            }
            (false, _) => {}
        }
    }

    /// Takes pages until the index has `pages` of them. Returns false if the limit forbids it.
    pub(crate) fn grow_to(&mut self, pages: u64) -> bool {
        let Some(more) = pages.checked_sub(self.pages) else { return true };
        let limit = self.room.limit_pages.load(Ordering::Relaxed);
        let sum = |used: u64| used.checked_add(more).filter(|sum| sum.saturating_add(pages) <= limit || more == 0);
        let taken = self.room.used_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok();
        if taken {
            self.pages = pages;
        }
        taken
    }

    /// Takes all that an index will ever need, if half of the memory is left for indexes that grow.
    pub(crate) fn take_ahead(&mut self, pages: u64) -> bool {
        let half = self.room.limit_pages.load(Ordering::Relaxed) / 2;
        let sum = |used: u64| used.checked_add(pages).filter(|sum| *sum <= half);
        let taken = self.room.used_pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok();
        if taken {
            self.pages = self.pages.saturating_add(pages);
        }
        taken
    }

    /// Logs the reason of a full index, which the guest is not told.
    #[cold]
    pub(crate) fn log_full(&self) {
        static TIMES: LogLimit = LogLimit::new();
        if let Some(times) = TIMES.admit() {
            let limit = self.room.limit_pages.load(Ordering::Relaxed).saturating_mul(PAGE_BYTES);
            tracing::warn!(
                times,
                "a kept overlay takes no more writes to new places: its index may take no more of the {limit} bytes of memory \
                 that there are for all of them (serve --index-memory). Commit the overlay, or give more"
            );
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.room.used_pages.fetch_sub(self.pages, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_may_take_as_much_as_it_leaves_and_all_comes_back() {
        static ROOM: Room = Room::new(100);
        let (mut first, mut second) = (Taken::of(&ROOM), Taken::of(&ROOM));
        assert!(first.grow_to(50) && first.grow_to(20), "it has 50");
        assert!(!first.grow_to(51));
        assert!(second.grow_to(25) && !second.grow_to(26));
        drop(first);
        assert!(second.grow_to(50) && !second.grow_to(51));
        drop(second);
        assert_eq!(ROOM.used_pages.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn one_that_takes_all_ahead_leaves_half() {
        static ROOM: Room = Room::new(100);
        let (mut first, mut second, mut kept) = (Taken::of(&ROOM), Taken::of(&ROOM), Taken::of(&ROOM));
        assert!(!first.take_ahead(51) && first.take_ahead(40) && !second.take_ahead(11));
        assert!(first.grow_to(40), "it has them");
        assert!(kept.grow_to(30) && !second.take_ahead(1));
        drop((first, kept));
        assert!(second.take_ahead(50));
        drop(second);
        assert_eq!(ROOM.used_pages.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn one_that_was_opened_has_its_index_and_grows_only_if_there_is_room() {
        static ROOM: Room = Room::new(10);
        let mut opened = Taken::of(&ROOM);
        opened.set(40);
        assert!(opened.grow_to(40) && !opened.grow_to(41));
        opened.set(4);
        assert!(opened.grow_to(5) && !opened.grow_to(6));
        for (counts, used) in [(false, 0), (false, 0), (true, 5), (true, 5)] {
            opened.count(counts);
            assert_eq!(ROOM.used_pages.load(Ordering::Relaxed), used);
        }
        assert_eq!(ROOM.used_pages.load(Ordering::Relaxed), 5);
    }
}
