//! A table of latencies, for people.

use super::cells;
use control::api::{OperationLatency, Stats};

/// Makes a table with a line for each operation of a disk, and the parts of its time.
pub(super) fn table(stats: &Stats) -> String {
    let row = |disk: &str, latency: &OperationLatency| {
        let OperationLatency { operation, bytes, whole, parts } = latency;
        let mut row = vec![disk.to_owned(), operation.clone(), whole.count.to_string(), drive::human_size(*bytes)];
        let times = [whole.mean_us(), whole.quantile_us(0.5), whole.quantile_us(0.99), whole.quantile_us(0.999)];
        row.extend(times.map(time));
        let share = |us: u64| 100.0 * us as f64 / whole.sum_us.max(1) as f64;
        let parts = parts.iter().map(|part| format!("{} {:.0}%", part.part, share(part.time.sum_us)));
        row.push(parts.collect::<Vec<_>>().join(", "));
        row
    };
    let rows = stats.disks.iter().flat_map(|disk| disk.latency.iter().map(|latency| row(&disk.disk, latency)));
    let header = ["disk", "operation", "requests", "bytes", "mean", "p50", "p99", "p99.9", "time spent on"];
    cells::table(&header, rows, 2..8)
}

/// Formats a time with about three digits and a unit.
pub(super) fn time(us: f64) -> String {
    match us {
        us if us < 1_000.0 => format!("{us:.1} us"),
        us if us < 1_000_000.0 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}
