//! `ringdisk ctl` starts and steers long work on disks whose guests check every byte that they read; `kill -9` at any moment
//! of it leaves a chain that holds what was flushed.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, assert_valid, at, directory, has_tool, path_str, run_fails, run_ok, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use testkit::{HistoryLoad, RunningLoad, SectorHistory};

const SIZE: u64 = 16 << 20;

/// A daemon with a record, one disk, and guests at its socket.
struct Bench {
    dir: TempDir,
    history: Arc<SectorHistory>,
    reactors: Vec<ReactorThread>,
}

impl Bench {
    fn new() -> Self {
        let dir = directory();
        run_ok(&["create", "-q", "-f", "qcow2", path_str(&at(&dir, "base.qcow2")), &SIZE.to_string()]);
        let spawn = |index| Reactor::spawn(ReactorConfig::default().with(|config| config.name = format!("c{index}")));
        let reactors = (0..2).map(|index| spawn(index).unwrap()).collect();
        Self { dir, history: Arc::new(SectorHistory::new((SIZE / 512) as usize)), reactors }
    }

    fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    fn serve(&self) -> Server {
        let (control, state, drive) = (self.path("control"), self.path("state"), self.path("base.qcow2"));
        let drive = format!("file={},name=root,queues=2,socket={}", drive.display(), self.path("s").display());
        let arguments = ["--control", path_str(&control), "--reactors", "2", "--state-dir", path_str(&state)];
        Server::start(&[&arguments[..], &["--drive", &drive]].concat())
    }

    fn arguments(&self, call: &[&str]) -> Vec<String> {
        let control = self.path("control");
        ["ctl", "--control", path_str(&control)].iter().chain(call).map(|word| (*word).to_owned()).collect()
    }

    fn ctl(&self, call: &[&str]) -> String {
        let arguments = self.arguments(call);
        run_ok(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn fails(&self, call: &[&str]) -> String {
        let arguments = self.arguments(call);
        run_fails(1, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn json(&self, call: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[call, &["--output=json"]].concat())).expect("JSON")
    }

    fn guests(&self, seed: u64, write_percent: u64) -> RunningLoad {
        let options = DriverOptions::default().with(|options| options.queues = 2);
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(self.path("s"), options).unwrap());
        let handles: Vec<Arc<dyn ReactorHandle>> = self.reactors.iter().map(ReactorThread::handle).collect();
        HistoryLoad { seed, write_percent, ..HistoryLoad::default() }.start(&disk, &handles, &self.history)
    }

    fn layers(&self) -> usize {
        self.json(&["show", "root"])["layers"].as_array().expect("a list").len()
    }

    /// What another program reads from an image, byte for byte.
    fn as_qemu_sees(&self, image: &Path) -> Vec<u8> {
        let raw = self.path("seen.raw");
        tool_ok("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path_str(image), path_str(&raw)]);
        std::fs::read(raw).expect("the copy")
    }
}

#[test]
fn layers_are_streamed_and_committed_while_guests_work() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    let guests = bench.guests(1, 50);
    for name in ["a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"] {
        guests.wait_for_more(1000);
        bench.ctl(&["snapshot", "root", path_str(&bench.path(name))]);
    }
    guests.wait_for_more(500);
    bench.ctl(&["commit", "root", "--layers", "2"]);
    assert_eq!(bench.layers(), 3);
    assert!(bench.fails(&["commit", "root", "--layers", "3"]).contains("between 1 and 2"));
    guests.wait_for_more(500);
    assert_eq!(guests.finish(), [""; 0]);

    // A top that holds little, so that there is something to pull up.
    let guests = bench.guests(2, 1);
    bench.ctl(&["snapshot", "root", path_str(&bench.path("e.qcow2"))]);
    let job = bench.json(&["stream", "root", "--no-wait", "--rate", "64K"])["id"].to_string();
    let refused = bench.fails(&["commit", "root"]);
    assert!(refused.contains("has a job already"), "{refused}");
    assert!(bench.fails(&["snapshot", "root", path_str(&bench.path("f.qcow2"))]).contains("being changed"));
    bench.ctl(&["pause", &job]);
    assert_eq!(bench.json(&["jobs"])["jobs"].as_array().unwrap().last().unwrap()["state"], "paused");
    bench.ctl(&["resume", &job]);
    bench.ctl(&["limit", &job, "0"]);
    while bench.json(&["jobs"])["jobs"].as_array().unwrap().last().unwrap()["state"] == "running" {
        guests.wait_for_more(100);
    }
    assert_eq!(bench.layers(), 1);
    guests.wait_for_more(1000);
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();
    // None of these is needed any more.
    for gone in ["base.qcow2", "a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"] {
        std::fs::remove_file(bench.path(gone)).unwrap();
    }
    let top = bench.path("e.qcow2");
    assert_valid(&top, false);
    bench.history.check_read(0, &bench.as_qemu_sees(&top), bench.history.now()).unwrap();
}

/// The top of the disk, as the record of the daemon has it.
fn recorded_top(bench: &Bench) -> PathBuf {
    let record: Value = serde_json::from_slice(&std::fs::read(bench.path("state/disks.json")).unwrap()).unwrap();
    record["disks"][0]["options"]["file"].as_str().expect("a file").into()
}

#[test]
fn killed_at_any_moment_of_a_job_the_chain_holds_what_was_flushed() {
    if !has_tool("qemu-img") {
        return;
    }
    let moments = std::env::var("RINGDISK_KILL9_MOMENTS").map_or(4, |value| value.parse().expect("a number"));
    let mut bench = Bench::new();
    for moment in 0..moments {
        let server = bench.serve();
        let guests = bench.guests(10 + moment, 50);
        let overlay = bench.path(&format!("overlay{moment}.qcow2"));
        guests.wait_for_more(300);
        bench.ctl(&["snapshot", "root", path_str(&overlay)]);
        guests.wait_for_more(300);
        let verb = if moment % 2 == 0 { "commit" } else { "stream" };
        bench.ctl(&[verb, "root", "--no-wait", "--rate", "100M"]);
        std::thread::sleep(Duration::from_millis(moment * 37 % 150));
        server.kill();
        assert_eq!(guests.abandon(), [""; 0], "moment {moment}, {verb}");

        // The daemon's locks go when the kernel has taken it down.
        let top = recorded_top(&bench);
        common::info_after_kill(&top);
        assert_valid(&top, true);
        let seen = bench.as_qemu_sees(&top);
        bench.history.check_survivors(0, &seen).unwrap_or_else(|wrong| panic!("moment {moment}, {verb}: {wrong}"));
        // What survived is where the next guests begin.
        let server = bench.serve();
        let job_again = bench.layers() > 1;
        if job_again {
            bench.ctl(&[verb, "root"]);
        }
        server.stop();
        let top = recorded_top(&bench);
        assert_eq!(bench.as_qemu_sees(&top), seen, "moment {moment}: the same job again, {verb}");
        assert_valid(&top, true);
        bench.history = Arc::new(SectorHistory::holding(&seen));
    }
}
