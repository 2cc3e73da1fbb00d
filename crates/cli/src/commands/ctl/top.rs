//! `ctl top`: the disks' rates, refreshed regularly.

use super::{Output, latency};
use crate::output::{self, usage};
use control::Client;
use control::api::{DiskStats, OperationLatency, Stats};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

/// Clears the screen and moves to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

pub(super) fn run(client: &Client, form: Output, interval: f64, count: Option<u64>) -> anyhow::Result<()> {
    let Ok(interval) = Duration::try_from_secs_f64(interval) else {
        return Err(usage(format!("--interval {interval}: takes seconds, from 0.1 on")));
    };
    if interval < Duration::from_millis(100) {
        return Err(usage("--interval: takes seconds, from 0.1 on"));
    }
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    let mut last = (Instant::now(), disks(client)?);
    let mut pictures = 0;
    while count.is_none_or(|count| pictures < count) {
        std::thread::sleep(interval);
        let next = (Instant::now(), disks(client)?);
        let seconds = next.0.duration_since(last.0).as_secs_f64();
        let rates = rates(&last.1, &next.1, seconds);
        match form {
            Output::Human => output::print(&format!("{clear}{}", picture(&rates)))?,
            Output::Json => output::print(&format!("{}\n", serde_json::json!({ "disks": rates })))?,
        }
        last = next;
        pictures += 1;
    }
    Ok(())
}

fn disks(client: &Client) -> anyhow::Result<BTreeMap<String, DiskStats>> {
    let stats: Stats = client.get("/v1/stats")?;
    Ok(stats.disks.into_iter().map(|disk| (disk.disk.clone(), disk)).collect())
}

#[derive(serde::Serialize)]
struct Rate {
    disk: String,
    requests_per_second: f64,
    requests_per_batch: f64,
    failed_per_second: f64,
    connected: bool,
    oldest_request_us: Option<u64>,
    operations: Vec<OperationRate>,
}

/// The rates of one kind of request since the last update.
#[derive(serde::Serialize)]
struct OperationRate {
    operation: String,
    requests_per_second: f64,
    bytes_per_second: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    /// The parts' shares of the time, in percent.
    parts: BTreeMap<String, f64>,
}

fn rates(last: &BTreeMap<String, DiskStats>, next: &BTreeMap<String, DiskStats>, seconds: f64) -> Vec<Rate> {
    let rate = |(disk, after): (&String, &DiskStats)| {
        let (now, before) = (&after.counters, last.get(disk));
        let operations = after.latency.iter().map(|now| {
            let before = before.and_then(|disk| disk.latency.iter().find(|old| old.operation == now.operation));
            operation_rate(now, before, seconds)
        });
        let operations = operations.filter(|rate| rate.requests_per_second > 0.0).collect();
        let before = before.map(|disk| disk.counters).unwrap_or_default();
        let (requests, batches) =
            (now.requests.saturating_sub(before.requests), now.batches.saturating_sub(before.batches));
        Rate {
            disk: disk.clone(),
            requests_per_second: requests as f64 / seconds,
            requests_per_batch: if batches == 0 { 0.0 } else { requests as f64 / batches as f64 },
            failed_per_second: now.failed.saturating_sub(before.failed) as f64 / seconds,
            connected: after.connected,
            oldest_request_us: after.oldest_request_us,
            operations,
        }
    };
    next.iter().map(rate).collect()
}

fn operation_rate(now: &OperationLatency, before: Option<&OperationLatency>, seconds: f64) -> OperationRate {
    let whole = before.map_or_else(|| now.whole.clone(), |before| now.whole.since(&before.whole));
    let part_us = |latency: &OperationLatency, name: &str| {
        latency.parts.iter().find(|part| part.part == name).map_or(0, |part| part.time.sum_us)
    };
    let share = |name: &String| {
        let spent = part_us(now, name).saturating_sub(before.map_or(0, |before| part_us(before, name)));
        100.0 * spent as f64 / whole.sum_us.max(1) as f64
    };
    let names = now.parts.iter().map(|part| part.part.clone());
    OperationRate {
        operation: now.operation.clone(),
        requests_per_second: whole.count as f64 / seconds,
        bytes_per_second: now.bytes.saturating_sub(before.map_or(0, |before| before.bytes)) as f64 / seconds,
        mean_us: whole.mean_us(),
        p50_us: whole.quantile_us(0.5),
        p99_us: whole.quantile_us(0.99),
        parts: names.map(|name| (name.clone(), share(&name))).collect(),
    }
}

fn picture(rates: &[Rate]) -> String {
    let mut text = format!("{:<32} {:>12} {:>12} {:>12}\n", "disk", "requests/s", "a batch", "failed/s");
    for rate in rates {
        let Rate { disk, requests_per_second, requests_per_batch, failed_per_second, operations, .. } = rate;
        let _ =
            write!(text, "{disk:<32} {requests_per_second:>12.0} {requests_per_batch:>12.1} {failed_per_second:>12.0}");
        let state = if rate.connected { "" } else { "  no guest" };
        let oldest = rate.oldest_request_us.map(|us| format!("  oldest {}", latency::time(us as f64)));
        let _ = writeln!(text, "{state}{}", oldest.unwrap_or_default());
        for operation in operations {
            let _ = writeln!(text, "  {}", operation_line(operation));
        }
    }
    text
}

fn operation_line(rate: &OperationRate) -> String {
    let OperationRate { operation, requests_per_second, bytes_per_second, mean_us, p50_us, p99_us, parts } = rate;
    let [mean, half, most] = [*mean_us, *p50_us, *p99_us].map(latency::time);
    let bytes = drive::human_size(*bytes_per_second as u64);
    let mut line = format!(
        "{operation:<14} {requests_per_second:>10.0}/s {bytes:>10}/s  mean {mean:>8}  p50 {half:>8}  p99 {most:>8} "
    );
    for (part, share) in parts.iter().filter(|(_, share)| **share >= 0.5) {
        let _ = write!(line, " {part} {share:.0}%");
    }
    line
}
