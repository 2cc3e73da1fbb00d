//! Gives freed space back to the host, and cuts off the end of the file.
//!
//! In a damaged image, data may lie where the refcounts say that nothing does. So only two kinds of space are cut off:
//! what this edit has freed, and what reads as zeros, as space behind the end of the file does.

use super::Edit;
use block::{IoError, IoResult, PastEnd};
use std::ops::Range;

/// The end of the file is looked at in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

/// Sorts ranges and joins neighbours.
pub(super) fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges
}

impl Edit<'_, '_> {
    /// Gives unused space back to the host, and cuts off the end of the file. Failing to punch holes is no error.
    pub(super) async fn give_back(&mut self) -> IoResult {
        let freed = self.refs.freed();
        if freed.is_empty() {
            return Ok(());
        }
        let before = std::mem::take(&mut self.nobodys);
        self.nobodys = joined(before.into_iter().chain(freed.iter().cloned()).collect());
        let cut = self.cut_off_unused(0).await;
        for range in freed.into_iter().filter(|_| self.can_discard) {
            let (start, end) = (self.geometry.start_of(range.start), self.geometry.start_of(range.end));
            let _ = self.io.discard(start, end.saturating_sub(start)).await;
        }
        cut
    }

    /// Cuts off unused clusters at the end of the file, but none in front of `least`.
    pub(super) async fn cut_off_unused(&mut self, least: u64) -> IoResult {
        if !self.can_grow || self.refs.grew() {
            return Ok(());
        }
        let mut end = self.geometry.clusters_for(self.file_bytes);
        while end > least {
            let (lower, is_found) = self.skip_unused(end).await?;
            end = lower;
            if is_found {
                break;
            }
        }
        let end = self.geometry.start_of(end.max(least));
        match end < self.file_bytes {
            true => self.io.set_length(end).await,
            false => Ok(()),
        }
    }

    /// Goes down from `end` over unused clusters, within one refcount block. Returns where that leads, and whether to
    /// stop there: at something that must stay, or at the start of the file.
    pub(super) async fn skip_unused(&mut self, end: u64) -> IoResult<(u64, bool)> {
        let (lower, is_found) = self.refs.skip_free(end).await?;
        let mut at = end;
        while at > lower {
            // The ranges are sorted and apart, so only the last one that starts before `at` can hold it.
            let count = self.nobodys.partition_point(|range| range.start < at);
            let last = count.checked_sub(1).and_then(|index| self.nobodys.get(index)).cloned().unwrap_or(0..0);
            if last.end >= at {
                at = last.start.max(lower);
                continue;
            }
            let gap = last.end.max(lower)..at;
            let content_end = self.end_of_content(gap.clone()).await?;
            if content_end > gap.start {
                return Ok((content_end, true));
            }
            at = gap.start;
        }
        Ok((lower, is_found))
    }

    /// Returns the end of the last of these clusters that does not read as zeros; their start if all do.
    async fn end_of_content(&self, clusters: Range<u64>) -> IoResult<u64> {
        let start = self.geometry.start_of(clusters.start);
        let mut end = self.geometry.start_of(clusters.end);
        while end > start {
            let from = end.saturating_sub(PIECE_BYTES).max(start);
            if let Some(last) = self.last_content(from..end).await? {
                return Ok(self.geometry.cluster_of(last).saturating_add(1));
            }
            end = from;
        }
        Ok(clusters.start)
    }

    /// Returns the offset of the last byte that is not zero in a piece of the file.
    async fn last_content(&self, piece: Range<u64>) -> IoResult<Option<u64>> {
        let (mut at, mut found) = (piece.start, None);
        while at < piece.end {
            let left = piece.end.saturating_sub(at);
            let (is_hole, length) = self.file.hole_at(at, left).unwrap_or((false, left));
            let length = length.clamp(1, left);
            if !is_hole {
                let bytes = usize::try_from(length).map_err(|_| IoError::EIO)?;
                let read = self.io.read(at, bytes, PastEnd::Zeros).await?;
                let last = read.iter().rposition(|byte| *byte != 0);
                found = last.map(|last| at.saturating_add(last as u64)).or(found);
            }
            at = at.saturating_add(length);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        assert_eq!(joined(vec![5..6, 1..3, 9..12, 3..5, 10..11]), [1..6, 9..12]);
        assert_eq!(joined(Vec::new()), Vec::<Range<u64>>::new());
    }
}
