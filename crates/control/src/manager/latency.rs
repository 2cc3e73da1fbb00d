//! The daemon's histograms in the form of the interface.

use crate::api::{Histogram, OperationLatency, PartLatency};
use daemon::{LatencyHistogram, Part, QueueLatency};

/// Returns the histograms of a disk; kinds without requests are left out.
pub(super) fn to_operations(latency: &QueueLatency) -> Vec<OperationLatency> {
    let asked = latency.kinds.iter().filter(|kind| kind.whole.count() > 0);
    let operations = asked.map(|kind| OperationLatency {
        operation: kind.kind.to_owned(),
        bytes: kind.bytes,
        whole: to_histogram(&kind.whole),
        parts: to_parts(&kind.parts),
    });
    operations.collect()
}

fn to_parts(parts: &[LatencyHistogram; Part::COUNT]) -> Vec<PartLatency> {
    let named = Part::NAMES.iter().zip(parts).filter(|(_, histogram)| histogram.count() > 0);
    named
        .map(|((_, name), histogram)| PartLatency { part: (*name).to_owned(), time: to_histogram(histogram) })
        .collect()
}

fn to_histogram(histogram: &LatencyHistogram) -> Histogram {
    let filled = histogram.buckets.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
    Histogram {
        count: histogram.count(),
        sum_us: histogram.sum_ns / 1000,
        buckets: histogram.buckets.iter().take(filled).copied().collect(),
    }
}
