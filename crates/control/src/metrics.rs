//! The metrics for Prometheus.

mod libvirt;

use crate::api::{Counters, DiskStats, Histogram, OperationLatency, Stats};
use crate::manager::Manager;
use daemon::DiskStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeMetric as _, LabelSetEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::fmt::{self, Write as _};
use std::sync::Arc;

#[derive(Debug)]
struct Scrape {
    stats: Stats,
    /// The disks, in the order of their figures.
    disks: Vec<DiskStatus>,
    failed: usize,
    /// The machine that the disks belong to, if its name is known.
    domain: String,
}

/// Returns the metrics in OpenMetrics' text format.
pub(crate) fn render(manager: &Manager) -> Result<String, fmt::Error> {
    // One look at the disks serves all: each clones their descriptions.
    let disks = manager.daemon.disks();
    let stats = manager.stats_of(&disks);
    let domain = manager.domain.get().cloned().unwrap_or_default();
    let scrape = Arc::new(Scrape { stats, disks, failed: manager.failed_disks().len(), domain });
    let mut own = Registry::with_prefix("ringdisk");
    own.register_collector(Box::new(Own(Arc::clone(&scrape))));
    let mut aliases = Registry::default();
    aliases.register_collector(Box::new(libvirt::Aliases(scrape)));
    let mut out = String::new();
    text::encode_registry(&mut out, &own)?;
    text::encode_registry(&mut out, &aliases)?;
    text::encode_eof(&mut out)?;
    Ok(out)
}

/// Name, help, and the figure in a disk's counters.
type DiskCounter = (&'static str, &'static str, fn(&Counters) -> u64);

const DISK_COUNTERS: [DiskCounter; 6] = [
    ("disk_requests", "Requests taken from guests", |counters| counters.requests),
    ("disk_batches", "Turns in which requests were taken", |counters| counters.batches),
    ("disk_notifications", "Notifications sent to guests", |counters| counters.notifications),
    ("disk_notifications_avoided", "Batches of completions that guests did not ask to be told of", |counters| {
        counters.notifications_avoided
    }),
    ("disk_failed_requests", "Requests that ended with an error", |counters| counters.failed),
    ("disk_queue_faults", "Times that a queue stopped because its guest broke the rules", |counters| counters.faults),
];

/// A kind of error, and its count.
type ErrorCount = (&'static str, fn(&Counters) -> u64);

/// Kinds of errors, and their figures.
const ERRORS: [ErrorCount; 3] = [
    ("io", |counters| counters.io_errors),
    ("no-space", |counters| counters.no_space),
    // Requests that were refused before they reached the storage, and unsupported ones.
    ("refused", |counters| counters.failed.saturating_sub(counters.io_errors).saturating_sub(counters.no_space)),
];

#[derive(Debug)]
struct Own(Arc<Scrape>);

impl Collector for Own {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Scrape { stats, disks, failed, .. } = &*self.0;
        encode_counters(&mut encoder, &stats.disks)?;
        encode_latencies(&mut encoder, &stats.disks)?;
        encode_states(&mut encoder, &stats.disks)?;
        let mut family = encoder.encode_descriptor("disk_size_bytes", "Size of the disk", None, MetricType::Gauge)?;
        for disk in disks {
            let size = i64::try_from(disk.info.size_bytes).unwrap_or(i64::MAX);
            ConstGauge::new(size).encode(family.encode_family(&[("disk", &*disk.name)])?)?;
        }
        let mut family = encoder.encode_descriptor("reactor_turns", "Turns of its loop", None, MetricType::Counter)?;
        for reactor in &stats.reactors {
            let label = [("reactor", &*reactor.name)];
            ConstCounter::new(reactor.turns).encode(family.encode_family(&label)?)?;
        }
        let help = "Disks of the state directory that could not be opened, and exports that are not served";
        let encoder = encoder.encode_descriptor("failed_disks", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(*failed).unwrap_or(i64::MAX)).encode(encoder)
    }
}

fn encode_counters(encoder: &mut DescriptorEncoder<'_>, disks: &[DiskStats]) -> Result<(), fmt::Error> {
    for (name, help, figure) in DISK_COUNTERS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for disk in disks {
            let label = [("disk", &*disk.disk)];
            ConstCounter::new(figure(&disk.counters)).encode(family.encode_family(&label)?)?;
        }
    }
    let mut family =
        encoder.encode_descriptor("disk_errors", "Requests that failed, by kind", None, MetricType::Counter)?;
    for disk in disks {
        for (kind, figure) in ERRORS {
            let label = [("disk", &*disk.disk), ("kind", kind)];
            ConstCounter::new(figure(&disk.counters)).encode(family.encode_family(&label)?)?;
        }
    }
    let help = "Seconds that requests have waited for the disk's limits";
    let mut family = encoder.encode_descriptor("disk_throttled_seconds", help, None, MetricType::Counter)?;
    for disk in disks {
        let label = [("disk", &*disk.disk)];
        ConstCounter::new(disk.throttled_us as f64 / 1e6).encode(family.encode_family(&label)?)?;
    }
    Ok(())
}

fn encode_latencies(encoder: &mut DescriptorEncoder<'_>, disks: &[DiskStats]) -> Result<(), fmt::Error> {
    let help = "Bytes of data that guests read and wrote";
    let mut family = encoder.encode_descriptor("disk_transferred_bytes", help, None, MetricType::Counter)?;
    for_each_operation(disks, |disk, operation| {
        let label = [("disk", disk), ("operation", &*operation.operation)];
        ConstCounter::new(operation.bytes).encode(family.encode_family(&label)?)
    })?;
    let help = "From a request's way out of the ring until its end is published and the guest told";
    let mut family = encoder.encode_descriptor("disk_latency_seconds", help, None, MetricType::Histogram)?;
    for_each_operation(disks, |disk, operation| {
        let labels = Labels::of(&[("disk", disk), ("operation", &operation.operation)]);
        encode_histogram(&operation.whole, family.encode_family(&labels)?)
    })?;
    let help = "What that time was spent on";
    let mut family = encoder.encode_descriptor("disk_latency_part_seconds", help, None, MetricType::Histogram)?;
    for_each_operation(disks, |disk, operation| {
        operation.parts.iter().try_for_each(|part| {
            let labels = Labels::of(&[("disk", disk), ("operation", &operation.operation), ("part", &part.part)]);
            encode_histogram(&part.time, family.encode_family(&labels)?)
        })
    })
}

fn for_each_operation<'a>(
    disks: &'a [DiskStats],
    mut encode: impl FnMut(&'a str, &'a OperationLatency) -> Result<(), fmt::Error>,
) -> Result<(), fmt::Error> {
    let all = disks.iter().flat_map(|disk| disk.latency.iter().map(move |operation| (&*disk.disk, operation)));
    all.into_iter().try_for_each(|(disk, operation)| encode(disk, operation))
}

/// Labels of a histogram, written out once. Each bucket is a line with all of them, and most of a scrape is buckets.
#[derive(Debug)]
struct Labels(String);

impl Labels {
    fn of(labels: &[(&str, &str)]) -> Self {
        let mut text = String::with_capacity(128);
        for (key, value) in labels {
            let comma = if text.is_empty() { "" } else { "," };
            text.extend([comma, key, "=\"", value, "\""]);
        }
        Self(text)
    }
}

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        // The key's place takes the whole text: what follows a key is written only when its value is.
        encoder.encode_label().encode_label_key()?.write_str(&self.0)
    }
}

/// Encodes a histogram with bounds from a microsecond on, each twice the one before. Bounds above the slowest request
/// are left out.
fn encode_histogram(
    histogram: &Histogram,
    mut encoder: prometheus_client::encoding::MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    let bounds = std::iter::successors(Some(1e-6), |bound| Some(bound * 2.0));
    let mut buckets: Vec<(f64, u64)> = bounds.zip(histogram.buckets.iter().copied()).collect();
    // The last bucket of a full list has no bound.
    match buckets.last_mut().filter(|_| histogram.buckets.len() == export_buckets()) {
        Some(last) => last.0 = f64::MAX,
        None => buckets.push((f64::MAX, 0)),
    }
    encoder.encode_histogram::<NoLabelSet>(histogram.sum_us as f64 / 1e6, histogram.count, &buckets, None)
}

fn export_buckets() -> usize {
    daemon::LatencyHistogram::default().buckets.len()
}

fn encode_states(encoder: &mut DescriptorEncoder<'_>, disks: &[DiskStats]) -> Result<(), fmt::Error> {
    let help = "Whether a guest is connected";
    let mut family = encoder.encode_descriptor("disk_connected", help, None, MetricType::Gauge)?;
    for disk in disks {
        let connected = i64::from(disk.connected);
        ConstGauge::new(connected).encode(family.encode_family(&[("disk", &*disk.disk)])?)?;
    }
    let help = "How long the oldest request in flight has been so; zero where none is";
    let mut family = encoder.encode_descriptor("disk_oldest_request_seconds", help, None, MetricType::Gauge)?;
    for disk in disks {
        let seconds = disk.oldest_request_us.unwrap_or(0) as f64 / 1e6;
        ConstGauge::new(seconds).encode(family.encode_family(&[("disk", &*disk.disk)])?)?;
    }
    let mut family = encoder.encode_descriptor("disk_tables_bytes", "Memory for tables", None, MetricType::Gauge)?;
    for disk in disks {
        let Some(tables) = &disk.tables else { continue };
        let used = i64::try_from(tables.used_bytes).unwrap_or(i64::MAX);
        ConstGauge::new(used).encode(family.encode_family(&[("disk", &*disk.disk)])?)?;
    }
    Ok(())
}
