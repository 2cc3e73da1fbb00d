//! What Prometheus scrapes.

use crate::api::{Counters, Stats};
use crate::manager::Manager;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DiskLabel {
    disk: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReactorLabel {
    reactor: String,
}

#[derive(Debug)]
struct Scrape {
    stats: Stats,
    sizes: Vec<(String, u64)>,
    failed: usize,
}

/// The metrics in OpenMetrics' text form.
pub(crate) fn render(manager: &Manager) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("ringdisk");
    let sizes = manager.disks().into_iter().map(|disk| (disk.name, disk.size_bytes)).collect();
    registry.register_collector(Box::new(Scrape {
        stats: manager.stats(),
        sizes,
        failed: manager.failed_disks().len(),
    }));
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
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

impl prometheus_client::collector::Collector for Scrape {
    fn encode(&self, mut encoder: prometheus_client::encoding::DescriptorEncoder) -> Result<(), fmt::Error> {
        use prometheus_client::encoding::EncodeMetric as _;
        for (name, help, figure) in DISK_COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for disk in &self.stats.disks {
                let label = DiskLabel { disk: disk.disk.clone() };
                ConstCounter::new(figure(&disk.counters)).encode(family.encode_family(&label)?)?;
            }
        }
        let help = "Seconds that requests have waited for the disk's limits";
        let mut family = encoder.encode_descriptor("disk_throttled_seconds", help, None, MetricType::Counter)?;
        for disk in &self.stats.disks {
            let label = DiskLabel { disk: disk.disk.clone() };
            ConstCounter::new(disk.throttled_us as f64 / 1e6).encode(family.encode_family(&label)?)?;
        }
        let mut family = encoder.encode_descriptor("disk_size_bytes", "Size of the disk", None, MetricType::Gauge)?;
        for (disk, size) in &self.sizes {
            let size = i64::try_from(*size).unwrap_or(i64::MAX);
            ConstGauge::new(size).encode(family.encode_family(&DiskLabel { disk: disk.clone() })?)?;
        }
        let mut family =
            encoder.encode_descriptor("disk_tables_bytes", "Memory for tables", None, MetricType::Gauge)?;
        for disk in &self.stats.disks {
            let Some(tables) = &disk.tables else { continue };
            let used = i64::try_from(tables.used_bytes).unwrap_or(i64::MAX);
            ConstGauge::new(used).encode(family.encode_family(&DiskLabel { disk: disk.disk.clone() })?)?;
        }
        let mut family = encoder.encode_descriptor("reactor_turns", "Turns of its loop", None, MetricType::Counter)?;
        for reactor in &self.stats.reactors {
            let label = ReactorLabel { reactor: reactor.name.clone() };
            ConstCounter::new(reactor.turns).encode(family.encode_family(&label)?)?;
        }
        let help = "Disks of the state directory that could not be opened";
        let encoder = encoder.encode_descriptor("failed_disks", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(self.failed).unwrap_or(i64::MAX)).encode(encoder)
    }
}
