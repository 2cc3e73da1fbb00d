//! How long requests take, as the daemon tells operators and Prometheus.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, at, directory, path_str, run_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Pattern, Stop};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

fn ctl(control: &Path, call: &[&str]) -> String {
    run_ok(&[&["ctl", "--control", path_str(control)], call].concat())
}

fn json(control: &Path, call: &[&str]) -> Value {
    serde_json::from_str(&ctl(control, &[call, &["--output=json"]].concat())).expect("JSON")
}

/// A guest asks so many requests of 4 KiB, half of them reads.
fn work(socket: &Path, requests: u64) {
    let reactor = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
    let disk: Arc<dyn Disk> = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
    let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
    let spec = BenchSpec::default().with(|spec| {
        spec.queue_depth = 16;
        spec.block_bytes = 4096;
        spec.read_percent = 50;
        spec.pattern = Pattern::Random { seed: 7 };
        spec.flush_every = Some(64);
        spec.stop = Stop::Requests(requests);
        spec.drain_timeout = common::PATIENCE;
    });
    let outcome = load::run(&disk, &handles, &spec, &Hooks::default()).unwrap();
    assert_eq!(outcome.report.errors, 0);
}

fn sum_us(part: &Value) -> f64 {
    part["sum_us"].as_f64().expect("a sum")
}

#[test]
fn the_parts_of_requests_sum_to_the_whole_and_name_what_takes_long() {
    let dir = directory();
    let (control, image, overlay) = (at(&dir, "control"), at(&dir, "base.qcow2"), at(&dir, "top.qcow2"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    run_ok(&["bench", "--image", path_str(&image), "--rw", "write", "--bs", "64k", "--count", "1000"]);
    run_ok(&["create", "-q", "-f", "qcow2", "-b", path_str(&image), "-F", "qcow2", path_str(&overlay)]);
    let socket = |name: &str| at(&dir, &format!("{name}.sock"));
    let drives = [
        format!("file={},name=overlay,socket={}", overlay.display(), socket("overlay").display()),
        format!("format=null,size=64M,name=null,socket={}", socket("null").display()),
        format!("format=null,size=64M,name=slow,socket={},filter=throttle:iops-total=2000", socket("slow").display()),
        format!("format=null,size=64M,name=idle,socket={}", socket("idle").display()),
    ];
    let drives: Vec<&str> = drives.iter().flat_map(|drive| ["--drive", drive]).collect();
    let mut server = Server::start(
        &[&["--control", path_str(&control), "--allow-backing", "any", "--reactors", "1"], &*drives].concat(),
    );
    work(&socket("overlay"), 3000);
    work(&socket("null"), 20_000);
    work(&socket("slow"), 500);
    let stats = json(&control, &["stats"]);
    let disk = |name: &str| stats["disks"].as_array().unwrap().iter().find(|disk| disk["disk"] == name).unwrap();
    let operation = |name: &str, operation: &str| {
        let all = disk(name)["latency"].as_array().unwrap();
        all.iter().find(|latency| latency["operation"] == operation).unwrap_or_else(|| panic!("{name} {operation}"))
    };
    for name in ["overlay", "null", "slow"] {
        let mut requests = 0;
        for kind in ["read", "write", "flush"] {
            let latency = operation(name, kind);
            let whole = &latency["whole"];
            let parts: f64 = latency["parts"].as_array().unwrap().iter().map(|part| sum_us(&part["time"])).sum();
            let slack = 0.02 * sum_us(whole) + 10.0;
            assert!((parts - sum_us(whole)).abs() <= slack, "{name} {kind}: {parts} of {latency:#}");
            let buckets: u64 = whole["buckets"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
            assert_eq!(whole["count"], buckets, "{name} {kind}");
            requests += buckets;
        }
        // The driver asks for the serial number, which is of no kind.
        assert_eq!(disk(name)["counters"]["requests"], requests + 1, "{name}");
        assert!(disk(name)["oldest_request_us"].is_null(), "{name}: nothing is in flight");
    }
    let part = |name: &str, kind: &str, part: &str| {
        let parts = operation(name, kind)["parts"].as_array().unwrap();
        parts.iter().find(|found| found["part"] == part).map_or(0.0, |found| sum_us(&found["time"]))
    };
    for expected in ["metadata", "copy-on-write", "engine"] {
        assert!(part("overlay", "write", expected) > 0.0, "{expected}: {:#}", operation("overlay", "write"));
    }
    assert!(part("overlay", "flush", "flush") > 0.0);
    let throttled = part("slow", "read", "throttle") / sum_us(&operation("slow", "read")["whole"]);
    assert!(throttled > 0.5, "its limit is what it waits for: {throttled}");
    assert_eq!(operation("null", "read")["bytes"].as_u64().unwrap() % 4096, 0);
    assert_eq!(disk("idle")["latency"], serde_json::json!([]));
    let shown = ctl(&control, &["stats"]);
    assert!(shown.contains("p99") && shown.contains("copy-on-write"), "{shown}");
    let metrics = ctl(&control, &["metrics"]);
    for line in [
        "ringdisk_disk_latency_seconds_bucket{le=\"+Inf\",disk=\"null\",operation=\"read\"}",
        "ringdisk_disk_latency_part_seconds_sum{disk=\"slow\",operation=\"write\",part=\"throttle\"}",
        "ringdisk_disk_connected{disk=\"idle\"} 0",
        "ringdisk_disk_errors_total{disk=\"null\",kind=\"no-space\"} 0",
        "libvirt_domain_block_stats_read_time_seconds_total{domain=\"\",source_file=\"",
    ] {
        assert!(metrics.contains(line), "{line}:\n{metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    ctl(&control, &["shutdown"]);
    assert!(server.wait().success());
}
