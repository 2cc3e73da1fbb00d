//! Pages of the data that were used and are free again.

use std::collections::BTreeMap;
use std::ops::Range;

/// How many runs are examined to find one that is long enough.
const LOOKED_AT: usize = 64;

/// Runs of free pages, with used pages between them.
#[derive(Debug, Default)]
pub(crate) struct FreePages {
    /// Maps the first page of each run to the page behind its last.
    runs: BTreeMap<u64, u64>,
    /// The number of pages in all runs.
    pages: u64,
}

impl FreePages {
    pub(crate) fn add(&mut self, run: Range<u64>) {
        let Range { mut start, mut end } = run;
        if start >= end {
            return;
        }
        self.pages = self.pages.saturating_add(end.saturating_sub(start));
        if let Some((&before, &touching)) = self.runs.range(..start).next_back()
            && touching == start
        {
            self.runs.remove(&before);
            start = before;
        }
        if let Some(behind) = self.runs.remove(&end) {
            end = behind;
        }
        self.runs.insert(start, end);
    }

    /// Returns how many pages are free.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Takes a run of `count` pages.
    pub(crate) fn take_whole(&mut self, count: u64) -> Option<Range<u64>> {
        let mut looked_at = self.runs.iter().take(LOOKED_AT);
        let start = looked_at.find(|(start, end)| end.saturating_sub(**start) >= count).map(|(start, _)| *start)?;
        self.take_from(start, count)
    }

    /// Takes a run of at most `count` pages.
    pub(crate) fn take_part(&mut self, count: u64) -> Option<Range<u64>> {
        let start = *self.runs.keys().next()?;
        self.take_from(start, count)
    }

    fn take_from(&mut self, start: u64, count: u64) -> Option<Range<u64>> {
        let end = self.runs.remove(&start)?;
        let taken = start.saturating_add(count).min(end);
        if taken < end {
            self.runs.insert(taken, end);
        }
        self.pages = self.pages.saturating_sub(taken.saturating_sub(start));
        Some(start..taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_join_and_are_taken_from_their_start() {
        let mut free = FreePages::default();
        for run in [4..6, 8..9, 6..8, 20..21] {
            free.add(run);
        }
        assert_eq!((free.take_whole(6), free.pages()), (None, 6));
        assert_eq!((free.take_whole(3), free.pages()), (Some(4..7), 3));
        assert_eq!(free.take_part(9), Some(7..9));
        assert_eq!(free.take_part(9), Some(20..21));
        assert_eq!((free.take_part(1), free.pages()), (None, 0));
    }
}
