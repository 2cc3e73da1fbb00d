//! `ctl top`: what the disks do, again and again.

use super::Output;
use crate::output::{self, usage};
use control::Client;
use control::api::{Counters, Stats};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

/// Clears the screen and goes to its first line.
const CLEAR: &str = "\x1b[2J\x1b[H";

pub(super) fn run(client: &Client, form: Output, interval: f64, count: Option<u64>) -> anyhow::Result<()> {
    let Ok(interval) = Duration::try_from_secs_f64(interval) else {
        return Err(usage(format!("--interval {interval}: takes seconds, from 0.1 on")));
    };
    if interval < Duration::from_millis(100) {
        return Err(usage("--interval: takes seconds, from 0.1 on"));
    }
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    let mut last = (Instant::now(), counters(client)?);
    let mut pictures = 0;
    while count.is_none_or(|count| pictures < count) {
        std::thread::sleep(interval);
        let next = (Instant::now(), counters(client)?);
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

fn counters(client: &Client) -> anyhow::Result<BTreeMap<String, Counters>> {
    let stats: Stats = client.get("/v1/stats")?;
    Ok(stats.disks.into_iter().map(|disk| (disk.disk, disk.counters)).collect())
}

#[derive(serde::Serialize)]
struct Rate {
    disk: String,
    requests_per_second: f64,
    requests_per_batch: f64,
    failed_per_second: f64,
}

fn rates(last: &BTreeMap<String, Counters>, next: &BTreeMap<String, Counters>, seconds: f64) -> Vec<Rate> {
    let rate = |(disk, now): (&String, &Counters)| {
        let before = last.get(disk).copied().unwrap_or_default();
        let (requests, batches) =
            (now.requests.saturating_sub(before.requests), now.batches.saturating_sub(before.batches));
        Rate {
            disk: disk.clone(),
            requests_per_second: requests as f64 / seconds,
            requests_per_batch: if batches == 0 { 0.0 } else { requests as f64 / batches as f64 },
            failed_per_second: now.failed.saturating_sub(before.failed) as f64 / seconds,
        }
    };
    next.iter().map(rate).collect()
}

fn picture(rates: &[Rate]) -> String {
    let mut text = format!("{:<32} {:>12} {:>12} {:>12}\n", "disk", "requests/s", "a batch", "failed/s");
    for Rate { disk, requests_per_second, requests_per_batch, failed_per_second } in rates {
        let _ = writeln!(
            text,
            "{disk:<32} {requests_per_second:>12.0} {requests_per_batch:>12.1} {failed_per_second:>12.0}"
        );
    }
    text
}
