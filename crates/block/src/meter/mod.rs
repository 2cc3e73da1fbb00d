//! What front ends count of a queue, and how long its requests take. No request is counted below them.

mod counters;
mod stopwatch;

pub use counters::{Counter, RingCounters, RingStats};
pub use stopwatch::{
    DISCARD, FLUSH, KIND_BITS, KindLatency, LATENCY_BUCKETS, Latency, LatencyHistogram, QueueLatency, READ,
    SECURE_ERASE, Stopwatch, WRITE, WRITE_ZEROES,
};
