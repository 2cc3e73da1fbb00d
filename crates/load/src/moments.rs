//! Latency over time: the completions in each short piece of a run.

use std::time::Duration;

/// Requests that are remembered at once; more room is made as a run goes on.
const ROOM: usize = 1 << 16;

/// The completions in one piece of a run.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Moment {
    /// The start of the piece, after the beginning of the measurement, in milliseconds.
    pub start_ms: f64,
    /// The number of requests that completed in it, including flushes.
    pub requests: u64,
    /// Their median latency in microseconds; 0 where none completed.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// The piece and the latency of each completion. Eight bytes a request.
#[derive(Debug, Clone)]
pub(crate) struct Moments {
    width_ns: u64,
    /// The number of the piece, and microseconds.
    completed: Vec<(u32, f32)>,
}

impl Moments {
    /// Makes pieces of this length, at least a microsecond.
    pub(crate) fn new(width: Duration) -> Self {
        let width_ns = u64::try_from(width.as_nanos()).unwrap_or(u64::MAX).max(1000);
        Self { width_ns, completed: Vec::with_capacity(ROOM) }
    }

    #[inline]
    pub(crate) fn record(&mut self, since_begin: Duration, latency_ns: u64) {
        let piece = u64::try_from(since_begin.as_nanos()).unwrap_or(u64::MAX) / self.width_ns;
        self.completed.push((u32::try_from(piece).unwrap_or(u32::MAX), (latency_ns as f64 / 1000.0) as f32));
    }

    pub(crate) fn clear(&mut self) {
        self.completed.clear();
    }

    /// Adds another queue's.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.completed.extend_from_slice(&other.completed);
    }

    /// Returns every piece up to the last one with completions, in order.
    pub(crate) fn summary(mut self) -> Vec<Moment> {
        self.completed.sort_unstable_by(|one, other| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1)));
        let width_ms = self.width_ns as f64 / 1e6;
        let mut moments: Vec<Moment> = Vec::new();
        for of_piece in self.completed.chunk_by(|one, other| one.0 == other.0) {
            let piece = of_piece.first().map_or(0, |(piece, _)| *piece as usize);
            while moments.len() < piece {
                moments.push(moment(moments.len() as f64 * width_ms, &[]));
            }
            moments.push(moment(piece as f64 * width_ms, of_piece));
        }
        moments
    }
}

/// Sums up a piece; `completed` is sorted by latency.
fn moment(start_ms: f64, completed: &[(u32, f32)]) -> Moment {
    let at = |percent: usize| {
        let place = (completed.len() * percent).div_ceil(100).saturating_sub(1);
        completed.get(place).map_or(0.0, |(_, us)| f64::from(*us))
    };
    Moment { start_ms, requests: completed.len() as u64, p50_us: at(50), p99_us: at(99), max_us: at(100) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_piece_has_its_own_figures_and_an_empty_one_says_so() {
        let mut one = Moments::new(Duration::from_millis(10));
        let mut other = one.clone();
        for us in 1..=100 {
            one.record(Duration::from_millis(3), us * 1000);
        }
        other.record(Duration::from_millis(9), 5_000_000);
        other.record(Duration::from_millis(39), 7000);
        one.merge(&other);
        let moments = one.summary();
        let figures: Vec<_> = moments.iter().map(|moment| (moment.requests, moment.p50_us, moment.max_us)).collect();
        assert_eq!(figures, [(101, 51.0, 5000.0), (0, 0.0, 0.0), (0, 0.0, 0.0), (1, 7.0, 7.0)]);
        assert!((moments[0].p99_us - 100.0).abs() < 1e-9 && (moments[3].start_ms - 30.0).abs() < 1e-9);
        assert_eq!(Moments::new(Duration::ZERO).summary(), []);
    }
}
