//! How long it takes to scrape many disks.

mod common;

use block::{Disk, ReactorHandle};
use common::{PATIENCE, Server, at, directory, path_str, ringdisk};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Pattern, Stop};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DISKS: usize = 100;
const SCRAPES: usize = 100;

/// What a guest does to a disk, and how many requests a second it gets through.
fn work(socket: &Path, reactor: &Arc<dyn ReactorHandle>, stop: Stop) -> f64 {
    let disk: Arc<dyn Disk> = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
    let spec = BenchSpec::default().with(|spec| {
        (spec.queue_depth, spec.block_bytes, spec.read_percent) = (16, 4096, 50);
        spec.pattern = Pattern::Random { seed: 7 };
        spec.flush_every = Some(64);
        spec.stop = stop;
        spec.drain_timeout = PATIENCE;
    });
    let report = load::run(&disk, &[Arc::clone(reactor)], &spec, &Hooks::default()).unwrap().report;
    assert_eq!(report.errors, 0);
    report.iops
}

/// Fetches `path` as a scraper does; how long it takes, and how many bytes come.
fn fetch(control: &Path, path: &str) -> (Duration, usize) {
    let begun = Instant::now();
    let mut stream = UnixStream::connect(control).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", common::text(&answer[..answer.len().min(200)]));
    (begun.elapsed(), answer.len())
}

#[test]
#[ignore = "it prints how long scrapes take, which means something in a release build on a quiet machine"]
fn a_hundred_disks_are_scraped() {
    let dir = directory();
    let control = at(&dir, "control");
    let socket = |disk: usize| at(&dir, &format!("{disk}.sock"));
    // Another build of the same program.
    let other = std::env::var_os("RINGDISK_PROGRAM").map(Command::new);
    let mut command = other.unwrap_or_else(ringdisk);
    command.args(["serve", "--reactors", "1", "--control", path_str(&control)]);
    for disk in 0..DISKS {
        let drive = format!("format=null,size=1G,queues=1,name=disk{disk},socket={}", socket(disk).display());
        command.args(["--drive", &drive]);
    }
    let mut server = Server::start_command(command);
    let client = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
    let reactor: Arc<dyn ReactorHandle> = client.handle();
    // Histograms that nothing was counted in are left out.
    for disk in 0..DISKS {
        work(&socket(disk), &reactor, Stop::Requests(500));
    }
    let alone = work(&socket(0), &reactor, Stop::Runtime(Duration::from_secs(2)));
    for path in ["/metrics", "/v1/stats"] {
        let mut times: Vec<(Duration, usize)> = (0..SCRAPES).map(|_| fetch(&control, path)).collect();
        times.sort_unstable();
        let ms = |at: usize| times[at].0.as_secs_f64() * 1e3;
        println!(
            "{path}, {DISKS} disks, {} KiB: {:.2} ms (median), {:.2} ms (slowest of {SCRAPES})",
            times[0].1 >> 10,
            ms(SCRAPES / 2),
            ms(SCRAPES - 1)
        );
    }
    // Ten scrapes a second, more than anybody makes.
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (ended, place) = (Arc::clone(&done), control.clone());
    let scraper = std::thread::spawn(move || {
        while !ended.load(std::sync::atomic::Ordering::Relaxed) {
            fetch(&place, "/metrics");
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let scraped = work(&socket(0), &reactor, Stop::Runtime(Duration::from_secs(2)));
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    scraper.join().unwrap();
    println!("a guest of the null disk: {alone:.0} requests a second, and {scraped:.0} with ten scrapes a second");
    server.signal("TERM");
    assert!(server.wait().success());
}
