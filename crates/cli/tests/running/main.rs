//! What operators do to disks that guests are using, when not all is well.

#[path = "../common/mod.rs"]
mod common;
mod hanging;
mod hostile;
mod reopening;

use block::{Disk, ReactorHandle};
use common::{Server, at, path_str, run_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A daemon with a control socket.
struct Daemon {
    dir: TempDir,
    control: PathBuf,
    server: Server,
}

impl Daemon {
    fn start_in(dir: TempDir, more: &[&str]) -> Self {
        let control = at(&dir, "control");
        let server = Server::start(&[&["--control", path_str(&control), "--reactors", "1"], more].concat());
        Self { dir, control, server }
    }

    fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    fn arguments<'a>(&'a self, call: &[&'a str]) -> Vec<&'a str> {
        [&["ctl", "--control", path_str(&self.control)], call].concat()
    }

    fn ctl(&self, call: &[&str]) -> String {
        run_ok(&self.arguments(call))
    }

    fn json(&self, call: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[call, &["--output=json"]].concat())).expect("JSON")
    }

    /// The figures of a disk.
    fn stats(&self, disk: &str) -> Value {
        let stats = self.json(&["stats"]);
        let found = stats["disks"].as_array().unwrap().iter().find(|found| found["disk"] == disk);
        found.expect("the disk").clone()
    }

    /// Waits until the oldest request of a disk has been in flight for half a second.
    fn wait_until_it_hangs(&self, disk: &str) {
        let deadline = Instant::now() + common::PATIENCE;
        while self.stats(disk)["oldest_request_us"].as_u64().unwrap_or(0) < 500_000 {
            assert!(Instant::now() < deadline, "{:#}", self.stats(disk));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends it in order, and gives its files.
    fn end(mut self) -> TempDir {
        self.ctl(&["shutdown"]);
        assert!(self.server.wait().success());
        self.dir
    }
}

/// How a guest's work ended.
struct Worked {
    errors: u64,
    mismatches: u64,
}

/// A guest that writes, reads and checks what it reads until it is told to stop.
struct Guest {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Worked>,
}

impl Guest {
    fn begin(socket: &Path) -> Self {
        let reactor = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let cancel = Arc::clone(&stop);
        let work = move || {
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = 8;
                spec.block_bytes = 4096;
                spec.length_bytes = Some(8 << 20);
                spec.drain_timeout = common::PATIENCE;
                spec.read_percent = 50;
                spec.verify = Some(Verify::new(5, Initial::Zeros));
                spec.pattern = Pattern::Random { seed: 6 };
                spec.flush_every = Some(32);
                spec.stop = Stop::Runtime(common::PATIENCE);
            });
            let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
            let report = load::run(&disk, &handles, &spec, &hooks).unwrap().report;
            Worked { errors: report.errors, mismatches: report.mismatches }
        };
        Self { stop, thread: std::thread::spawn(work) }
    }

    fn stop(self) -> Worked {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a guest's end")
    }

    /// Nothing went wrong.
    fn end(self) {
        let Worked { errors, mismatches } = self.stop();
        assert_eq!((errors, mismatches), (0, 0));
    }
}
