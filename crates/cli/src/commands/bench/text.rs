//! Text for people: the workload, one run's figures, and tables of several runs.

use super::series::Series;
use comfy_table::{CellAlignment, Table, presets};
use load::{BenchReport, Comparison, FigureSpread, Latency, Side, Spread};
use std::fmt::Write as _;

/// Describes the workload, without its depth.
pub(super) fn workload(report: &BenchReport) -> String {
    let size = drive::human_size(u64::from(report.block_bytes));
    let what = match report.read_percent {
        100 => "read".to_owned(),
        0 => "write".to_owned(),
        percent => format!("read and write, {percent}% reads"),
    };
    let queues = if report.queues == 1 { String::new() } else { format!(", {} queues", report.queues) };
    format!("{size} {} {what}{queues}", report.pattern)
}

/// The figures that are shown without --verbose.
const FIRST_FIGURES: [&str; 6] =
    ["iops", "mib_per_second", "p50_us", "p99_us", "client_us_per_request", "server_us_per_request"];

/// Describes one run. `server_gone` says that the server ended it.
pub(super) fn single(report: &BenchReport, verbose: bool, server_gone: bool) -> String {
    let mib = report.bytes_per_second / f64::from(1 << 20);
    let mut text = format!(
        "{} {} bytes, {}% reads, depth {} x {} queues: {:.0} IOPS, {mib:.1} MiB/s ({} requests in {:.2} s)\n",
        report.pattern,
        report.block_bytes,
        report.read_percent,
        report.queue_depth,
        report.queues,
        report.iops,
        report.requests,
        report.elapsed_seconds,
    );
    let kinds = [
        ("reads", &report.read_latency_us),
        ("writes", &report.write_latency_us),
        ("flushes", &report.flush_latency_us),
    ];
    for (kind, latency) in kinds.into_iter().filter(|(_, latency)| latency.count > 0) {
        let Latency { mean, p50, p90, p99, p999, max, .. } = latency;
        let _ = writeln!(
            text,
            "{kind}: mean {mean:.1} us, p50 {p50:.1}, p90 {p90:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1}"
        );
    }
    if let Some(by_maps) = report.by_maps {
        let _ = writeln!(text, "by maps: {by_maps} of {} reads and writes", report.reads + report.writes);
    }
    let _ = writeln!(text, "client: {:.2} us of CPU a request", report.client_us_per_request);
    for server in &report.servers {
        let _ = writeln!(
            text,
            "server {}: {:.2} us of CPU a request, {} voluntary context switches ({:.4} a request)",
            server.pid, server.us_per_request, server.voluntary_switches, server.voluntary_switches_per_request
        );
    }
    if verbose {
        text.push_str(&details(report));
    }
    if report.cancelled {
        let why = if server_gone { "the server ended the connection" } else { "interrupted" };
        let _ = writeln!(text, "{why}: the figures are of the time until then");
    }
    text
}

/// Describes how requests were batched, and lists the counters.
fn details(report: &BenchReport) -> String {
    let (mut text, batches) = (String::new(), &report.batches);
    let _ = writeln!(
        text,
        "completions a harvest: mean {:.1}, median {}, max {} ({} harvests)",
        batches.mean, batches.median, batches.max, batches.harvests
    );
    if let Some(harvests) = report.engine_harvests.filter(|harvests| harvests.harvests > 0) {
        let _ = writeln!(
            text,
            "completions a harvest of the engines: mean {:.1}, p10 {}, median {}, p90 {}, max {}; {:.0}% of them a full queue",
            harvests.mean, harvests.p10, harvests.p50, harvests.p90, harvests.max, harvests.full_percent
        );
    }
    for counter in &report.counters {
        let name = counter.name.replace('_', " ");
        let _ = writeln!(text, "{name}: {} ({:.4} a request)", counter.total, counter.per_request);
    }
    text
}

/// Describes a series: a table for each depth with several targets, a line for each depth with one.
pub(super) fn series(series: &Series, verbose: bool) -> String {
    let mut text = String::new();
    let first = series.depths.first().and_then(|depth| depth.sides.first());
    if let Some((side, report)) = first.and_then(|side| Some((side, side.runs.first()?))) {
        let runs = match side.runs.len() {
            1 => String::new(),
            count => format!("; medians of {count} rounds"),
        };
        let _ = writeln!(text, "{}{runs}", workload(report));
    }
    if let [target] = series.targets.as_slice() {
        let _ = writeln!(text, "{}\n{}", target.target, over_depths(&series.depths, verbose));
    } else {
        for target in &series.targets {
            let _ = writeln!(text, "{}: {}", target.name, target.target);
        }
        if !series.differences.is_empty() {
            let _ = writeln!(text, "different:\n  {}", series.differences.join("\n  "));
        }
        for depth in &series.depths {
            let _ = writeln!(text, "\ndepth {}\n{}", depth.queue_depth, side_by_side(depth, verbose));
        }
    }
    if series.interrupted {
        text.push_str("interrupted: the figures are of what was measured until then\n");
    }
    text
}

fn table(header: Vec<String>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header(header);
    table
}

fn finish(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Makes a table with figures in rows, and targets and ratios in columns.
fn side_by_side(depth: &Comparison, verbose: bool) -> Table {
    let names = depth.sides.iter().map(|side| side.name.clone());
    let ratios = depth.ratios.iter().map(|ratios| format!("{}/{} (min-max)", ratios.of, ratios.to));
    let mut table = table(std::iter::once(String::new()).chain(names).chain(ratios).collect());
    for FigureSpread { name, label, .. } in labels(&depth.sides, verbose) {
        let values =
            depth.sides.iter().map(|side| side.figure(name).map_or("-".to_owned(), |value| short(value.median)));
        let ratios = depth.ratios.iter().map(|ratios| ratios.figure(name).map_or("-".to_owned(), ratio));
        table.add_row(std::iter::once(label.clone()).chain(values).chain(ratios));
    }
    finish(table)
}

/// Makes a table with depths in rows, and figures in columns.
fn over_depths(depths: &[Comparison], verbose: bool) -> Table {
    let sides = || depths.iter().filter_map(|depth| Some((depth.queue_depth, depth.sides.first()?)));
    let labels = depths.first().map(|depth| labels(&depth.sides, verbose)).unwrap_or_default();
    // Each word gets a line; otherwise the table would be wider than a terminal.
    let head = |label: &str| label.replace(", ", "\n").replace(' ', "\n").replace("/request", "\n/request");
    let heads = labels.iter().map(|figure| head(&figure.label).replace("/harvest", "\n/harvest"));
    let mut table = table(std::iter::once("depth".to_owned()).chain(heads).collect());
    for (depth, side) in sides() {
        let value =
            |figure: &&FigureSpread| side.figure(&figure.name).map_or("-".to_owned(), |spread| short(spread.median));
        table.add_row(std::iter::once(depth.to_string()).chain(labels.iter().map(value)));
    }
    finish(table)
}

/// Returns the figures that any side has, each once; without `verbose` only the first ones.
fn labels(sides: &[Side], verbose: bool) -> Vec<&FigureSpread> {
    let mut found: Vec<&FigureSpread> = Vec::new();
    let is_shown = |figure: &&FigureSpread| verbose || FIRST_FIGURES.contains(&figure.name.as_str());
    for figure in sides.iter().flat_map(|side| &side.figures).filter(is_shown) {
        if !found.iter().any(|known| known.name == figure.name) {
            found.push(figure);
        }
    }
    found
}

fn ratio(spread: Spread) -> String {
    format!("{:.2} ({:.2}-{:.2})", spread.median, spread.min, spread.max)
}

/// Formats a value with its significant digits.
fn short(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 1.0 || value == 0.0 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}
