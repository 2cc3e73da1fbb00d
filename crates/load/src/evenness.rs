//! Measures how evenly completions come: the number in each second, and the longest gap.

use std::time::Duration;

/// Room for a run's seconds. Longer runs are rare.
const ROOM: usize = 256;

/// Counts of one queue, or of several.
#[derive(Debug, Clone)]
pub(crate) struct Evenness {
    per_second: Vec<u64>,
    last_ns: u64,
    longest_gap_ns: u64,
}

impl Default for Evenness {
    fn default() -> Self {
        Self { per_second: Vec::with_capacity(ROOM), last_ns: 0, longest_gap_ns: 0 }
    }
}

impl Evenness {
    /// Counts completions at this time after the beginning.
    #[inline]
    pub(crate) fn record(&mut self, since_begin: Duration, count: u64) {
        let now_ns = u64::try_from(since_begin.as_nanos()).unwrap_or(u64::MAX);
        self.longest_gap_ns = self.longest_gap_ns.max(now_ns.saturating_sub(self.last_ns));
        self.last_ns = now_ns;
        let second = since_begin.as_secs() as usize;
        if second >= self.per_second.len() {
            self.per_second.resize(second + 1, 0);
        }
        if let Some(sum) = self.per_second.get_mut(second) {
            *sum += count;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.per_second.clear();
        (self.last_ns, self.longest_gap_ns) = (0, 0);
    }

    /// Adds another queue's counts. The longest gap is the longest of any queue.
    pub(crate) fn merge(&mut self, other: &Self) {
        let longest = self.per_second.len().max(other.per_second.len());
        self.per_second.resize(longest, 0);
        self.per_second.iter_mut().zip(&other.per_second).for_each(|(sum, count)| *sum += count);
        self.longest_gap_ns = self.longest_gap_ns.max(other.longest_gap_ns);
    }

    /// Returns the completions in each whole second of a run of this length.
    pub(crate) fn whole_seconds(&self, elapsed_seconds: f64) -> Vec<u64> {
        let whole = elapsed_seconds as usize;
        (0..whole).map(|second| self.per_second.get(second).copied().unwrap_or(0)).collect()
    }

    pub(crate) fn longest_gap_us(&self) -> f64 {
        self.longest_gap_ns as f64 / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_gaps_are_told_apart() {
        let (mut one, mut other) = (Evenness::default(), Evenness::default());
        for ms in [100, 200, 950, 1000, 2900] {
            one.record(Duration::from_millis(ms), 2);
        }
        other.record(Duration::from_millis(500), 1);
        assert_eq!(one.whole_seconds(2.95), [6, 2]);
        one.merge(&other);
        assert_eq!(one.whole_seconds(4.0), [7, 2, 2, 0]);
        assert!((one.longest_gap_us() - 1_900_000.0).abs() < 1.0);
        one.clear();
        assert_eq!(one.whole_seconds(1.5), [0]);
    }
}
