//! The same figures under the names that libvirt's exporters use, so that their dashboards work.

use super::{Labels, Scrape};
use crate::api::{DiskStats, OperationLatency};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;
use std::sync::Arc;

const PREFIX: &str = "libvirt_domain_block_stats_";

/// The name, the help, the operation, and its figure.
type Alias = (&'static str, &'static str, &'static str, fn(&OperationLatency) -> f64);

const ALIASES: [Alias; 8] = [
    ("read_bytes", "Bytes read", "read", |operation| operation.bytes as f64),
    ("read_requests", "Read requests", "read", |operation| operation.whole.count as f64),
    ("read_time_seconds", "Time spent on reads", "read", |operation| operation.whole.sum_us as f64 / 1e6),
    ("write_bytes", "Bytes written", "write", |operation| operation.bytes as f64),
    ("write_requests", "Write requests", "write", |operation| operation.whole.count as f64),
    ("write_time_seconds", "Time spent on writes", "write", |operation| operation.whole.sum_us as f64 / 1e6),
    ("flush_requests", "Flush requests", "flush", |operation| operation.whole.count as f64),
    ("flush_time_seconds", "Time spent on flushes", "flush", |operation| operation.whole.sum_us as f64 / 1e6),
];

#[derive(Debug)]
pub(super) struct Aliases(pub(super) Arc<Scrape>);

impl Collector for Aliases {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Scrape { stats, disks, domain, .. } = &*self.0;
        // A path and a machine's name may hold any character, other labels not.
        let domain = escaped(domain);
        let files: Vec<String> = disks.iter().map(|disk| escaped(&disk.file)).collect();
        let labels = |disk: &'_ DiskStats, file: &'_ str| {
            Labels::of(&[("domain", &domain), ("source_file", file), ("target_device", &disk.disk)])
        };
        for (name, help, wanted, figure) in ALIASES {
            let name = format!("{PREFIX}{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (disk, file) in stats.disks.iter().zip(&files) {
                let found = disk.latency.iter().find(|operation| operation.operation == wanted);
                ConstCounter::new(found.map_or(0.0, figure)).encode(family.encode_family(&labels(disk, file))?)?;
            }
        }
        // Other sizes, those of files, would take a look at storage, which may hang.
        let name = format!("{PREFIX}capacity_bytes");
        let mut family = encoder.encode_descriptor(&name, "Size of the disk", None, MetricType::Gauge)?;
        for (figures, (disk, file)) in stats.disks.iter().zip(disks.iter().zip(&files)) {
            let size = i64::try_from(disk.info.size_bytes).unwrap_or(i64::MAX);
            ConstGauge::new(size).encode(family.encode_family(&labels(figures, file))?)?;
        }
        Ok(())
    }
}

/// Escapes a label's value as OpenMetrics wants it.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_keeps_its_line_whatever_it_holds() {
        assert_eq!(escaped("/img/a\"b\\c\nd"), r#"/img/a\"b\\c\nd"#);
    }
}
