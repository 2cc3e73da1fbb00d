//! What operators do to disks that guests are using, when not all is well.

mod by_curl;
#[path = "../common/mod.rs"]
mod common;
mod full;
#[path = "../common/guest.rs"]
mod guest;
mod hanging;
mod hostile;
mod jobs;
mod killed;
mod options;
mod reopening;

use common::{Server, at, path_str, run_ok};
use guest::Guest;
use serde_json::Value;
use std::path::PathBuf;
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
