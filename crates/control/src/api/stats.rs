//! Figures.

use super::Counters;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Figures of the whole daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Disk by disk.
    pub disks: Vec<DiskStats>,
    /// Reactor by reactor.
    pub reactors: Vec<ReactorStats>,
}

/// Figures of one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskStats {
    /// The disk.
    pub disk: String,
    /// The counters of the queues of all its exports.
    pub counters: Counters,
    /// How long its requests have waited for its limits: the sum, in microseconds.
    pub throttled_us: u64,
    /// Whether a guest is connected at one of its exports.
    #[serde(default)]
    pub connected: bool,
    /// The age of the oldest request in flight, in microseconds; none if no request is in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_request_us: Option<u64>,
    /// How long requests take, by kind. Kinds without requests are left out.
    #[serde(default)]
    pub latency: Vec<OperationLatency>,
    /// The tables in memory, if the image has tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<TableStats>,
}

/// How long the requests of one kind take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct OperationLatency {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes` or `secure-erase`.
    pub operation: String,
    /// Bytes of data that were read or written.
    pub bytes: u64,
    /// The time from taking the request out of the ring until its end is published and the guest notified.
    pub whole: Histogram,
    /// The parts of that time. They add up to the whole.
    pub parts: Vec<PartLatency>,
}

/// The time that requests spend on one part of their path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PartLatency {
    /// `queue`, `throttle`, `metadata`, `copy-on-write`, `engine`, `flush` or `notify`.
    pub part: String,
    /// The times of the requests that spent any time on it.
    pub time: Histogram,
}

/// How long something took.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// The number of values.
    pub count: u64,
    /// The sum, in microseconds.
    pub sum_us: u64,
    /// The number of values up to 1 microsecond, from there up to 2, up to 4 and so on. The last of 28 buckets has no
    /// bound. Empty buckets at the end are left out.
    pub buckets: Vec<u64>,
}

impl Histogram {
    /// Returns what was added since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let old = before.buckets.iter().copied().chain(std::iter::repeat(0));
        Self {
            count: self.count.saturating_sub(before.count),
            sum_us: self.sum_us.saturating_sub(before.sum_us),
            buckets: self.buckets.iter().zip(old).map(|(now, old)| now.saturating_sub(old)).collect(),
        }
    }

    /// Returns the average, in microseconds.
    #[must_use]
    pub fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_us as f64 / self.count as f64 }
    }

    /// Returns the time that a `share` (0 to 1) of all values does not exceed, in microseconds. Values count as evenly
    /// spread in their bucket.
    #[must_use]
    pub fn quantile_us(&self, share: f64) -> f64 {
        let wanted = share * self.buckets.iter().sum::<u64>() as f64;
        let (mut below, mut lower_us, mut upper_us) = (0.0, 0.0, 1.0);
        for count in &self.buckets {
            let count = *count as f64;
            if count > 0.0 && below + count >= wanted {
                return lower_us + (upper_us - lower_us) * (wanted - below) / count;
            }
            below += count;
            lower_us = upper_us;
            upper_us *= 2.0;
        }
        0.0
    }
}

/// The tables of an image that are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TableStats {
    /// Lookups that found their table in memory.
    pub hits: u64,
    /// Lookups that had to read it.
    pub misses: u64,
    /// Tables that made room for others.
    pub evictions: u64,
    /// Memory in use, in bytes.
    pub used_bytes: u64,
    /// Memory that may be used, in bytes.
    pub limit_bytes: u64,
}

/// Figures of one reactor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReactorStats {
    /// Its thread's name.
    pub name: String,
    /// Turns of its loop.
    pub turns: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// System calls made to submit requests or to fetch completions.
    pub system_calls: u64,
    /// Calls that workers made for it.
    pub worker_calls: u64,
}
