//! The counters and latencies of a queue in a front end. No request is counted below front ends.

mod counter;
mod counters;
mod stopwatch;

pub use counter::Counter;
pub use counters::{RingCounters, RingStats};
pub use stopwatch::{
    DISCARD, FLUSH, KIND_BITS, KindLatency, LATENCY_BUCKETS, Latency, LatencyHistogram, QueueLatency, READ,
    SECURE_ERASE, Stopwatch, WRITE, WRITE_ZEROES,
};
