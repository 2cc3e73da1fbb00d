//! Runs of host clusters known to be free, without reading the refcounts again.

use std::collections::BTreeMap;

/// How many runs are examined to find one that is long enough.
const LOOKS: usize = 32;

/// A run of contiguous host clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Whether it surely reads as zeros, even after a power cut.
    pub(crate) zeroed: bool,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        self.first.saturating_add(self.count)
    }
}

#[derive(Debug, Default)]
pub(crate) struct FreeRuns {
    /// First cluster -> (count, zeroed). Runs never overlap.
    runs: BTreeMap<u64, (u64, bool)>,
}

impl FreeRuns {
    fn get(&self, first: u64) -> Option<Run> {
        self.runs.get(&first).map(|(count, zeroed)| Run { first, count: *count, zeroed: *zeroed })
    }

    /// Finds a run of `want` clusters in front of `limit`, or the longest that it examines.
    pub(crate) fn find(&self, want: u64, limit: u64) -> Option<Run> {
        let mut best: Option<Run> = None;
        for (first, (count, zeroed)) in self.runs.range(..limit).take(LOOKS) {
            let count = (*count).min(limit.saturating_sub(*first));
            let run = Run { first: *first, count, zeroed: *zeroed };
            if run.count >= want {
                return Some(Run { count: want, ..run });
            }
            if best.is_none_or(|best| best.count < run.count) {
                best = Some(run);
            }
        }
        best
    }

    /// Takes the first `count` clusters of the run that starts at `first`.
    pub(crate) fn take(&mut self, first: u64, count: u64) {
        let Some(run) = self.get(first) else { return };
        self.runs.remove(&first);
        if run.count > count {
            self.runs.insert(first.saturating_add(count), (run.count.saturating_sub(count), run.zeroed));
        }
    }

    /// Adds a run. Parts that are known already stay as they are.
    pub(crate) fn add(&mut self, run: Run) {
        let mut at = run.first;
        while at < run.end() {
            let known = self.covering(at);
            if let Some(known) = known {
                at = known.end();
                continue;
            }
            let next = self.runs.range(at..run.end()).next().map_or(run.end(), |(first, _)| *first);
            self.insert_joined(Run { first: at, count: next.saturating_sub(at), zeroed: run.zeroed });
            at = next;
        }
    }

    fn covering(&self, cluster: u64) -> Option<Run> {
        let (first, _) = self.runs.range(..=cluster).next_back()?;
        self.get(*first).filter(|run| run.end() > cluster)
    }

    fn insert_joined(&mut self, mut run: Run) {
        if let Some(before) = run.first.checked_sub(1).and_then(|last| self.covering(last))
            && before.zeroed == run.zeroed
        {
            self.runs.remove(&before.first);
            run = Run { first: before.first, count: before.count.saturating_add(run.count), ..run };
        }
        if let Some(after) = self.get(run.end())
            && after.zeroed == run.zeroed
        {
            self.runs.remove(&after.first);
            run.count = run.count.saturating_add(after.count);
        }
        self.runs.insert(run.first, (run.count, run.zeroed));
    }

    /// Returns the parts of a range that are in no run.
    pub(crate) fn gaps(&self, first: u64, count: u64) -> Vec<Run> {
        let end = first.saturating_add(count);
        let mut gaps = Vec::new();
        let mut at = first;
        while at < end {
            if let Some(known) = self.covering(at) {
                at = known.end();
                continue;
            }
            let next = self.runs.range(at..end).next().map_or(end, |(first, _)| *first);
            gaps.push(Run { first: at, count: next.saturating_sub(at), zeroed: false });
            at = next;
        }
        gaps
    }

    /// Removes a range, wherever it lies in the runs.
    pub(crate) fn remove(&mut self, range: Run) {
        let mut at = range.first;
        while at < range.end() {
            let Some(known) = self.covering(at) else {
                let next = self.runs.range(at..range.end()).next();
                at = next.map_or(range.end(), |(first, _)| *first);
                continue;
            };
            self.runs.remove(&known.first);
            if known.first < at {
                self.runs.insert(known.first, (at.saturating_sub(known.first), known.zeroed));
            }
            if known.end() > range.end() {
                self.runs.insert(range.end(), (known.end().saturating_sub(range.end()), known.zeroed));
            }
            at = known.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64, zeroed: bool) -> Run {
        Run { first, count, zeroed }
    }

    #[test]
    fn neighbours_join_only_when_they_are_equally_known() {
        let mut runs = FreeRuns::default();
        runs.add(run(10, 5, false));
        runs.add(run(20, 5, false));
        runs.add(run(15, 5, false));
        assert_eq!(runs.find(15, u64::MAX), Some(run(10, 15, false)));
        runs.add(run(25, 5, true));
        assert_eq!(runs.find(20, u64::MAX), Some(run(10, 15, false)), "the longest there is");
        runs.add(run(0, 100, true));
        assert_eq!(runs.find(3, u64::MAX), Some(run(0, 3, true)));
        assert_eq!(runs.gaps(0, 120), [run(100, 20, false)]);
        runs.take(0, 10);
        runs.take(10, 3);
        assert_eq!(runs.find(12, u64::MAX), Some(run(13, 12, false)));
        runs.remove(run(14, 80, false));
        assert_eq!(runs.gaps(0, 100), [run(0, 13, false), run(14, 80, false)]);
    }
}
