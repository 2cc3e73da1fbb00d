//! `ringdisk ctl` starts and steers long work on disks whose guests check every byte that they read; `kill -9` at any moment
//! of it leaves a chain that holds what was flushed.

mod common;
mod live_bench;

use common::{assert_valid, has_tool, path_str, ringdisk, run_ok, text, tool_ok};
use live_bench::{Bench, SIZE};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use testkit::{HistoryLoad, SectorHistory};

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
    for gone in ["c.qcow2", "d.qcow2"].map(|name| bench.path(name)) {
        let bytes = std::fs::metadata(&gone).unwrap().blocks() * 512;
        assert!(bytes < SIZE / 8, "{bytes} bytes of a committed layer stay in use");
    }
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
    ["c.qcow2", "d.qcow2"].into_iter().for_each(|gone| assert_valid(&bench.path(gone), false));
    // None of these is needed any more.
    for gone in ["base.qcow2", "a.qcow2", "b.qcow2", "c.qcow2", "d.qcow2"] {
        std::fs::remove_file(bench.path(gone)).unwrap();
    }
    let top = bench.path("e.qcow2");
    assert_valid(&top, false);
    bench.history.check_read(0, &bench.as_qemu_sees(&top), bench.history.now()).unwrap();
}

/// Runs a job to its end; what it tells rises to its total.
fn shows_its_progress(bench: &Bench, call: &[&str]) {
    let output = ringdisk().args(bench.arguments(call)).arg("--progress=json").output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{call:?}: {said}");
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let figure = |line: &Value, name: &str| line[name].as_u64().unwrap();
    let done: Vec<u64> = lines.iter().map(|line| figure(line, "done-bytes")).collect();
    let total: Vec<u64> = lines.iter().map(|line| figure(line, "total-bytes")).collect();
    assert!(!lines.is_empty() && done.is_sorted() && total.is_sorted(), "{call:?}: {said}");
    assert_eq!(done.last(), total.last(), "{call:?}: {said}");
}

/// Presses Ctrl-C while the job runs; it is cancelled.
fn is_cancelled_by_ctrl_c(bench: &Bench, call: &[&str]) {
    let mut command = ringdisk();
    command.args(bench.arguments(call)).args(["--rate", "64K", "--progress=json"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    assert!(first.starts_with('{'), "{call:?}: {first}");
    tool_ok("kill", &["-INT", &child.id().to_string()]);
    let said = lines.filter(|line| !line.starts_with('{')).collect::<Vec<_>>().join("\n");
    let status = child.wait().unwrap();
    assert!(said.contains("is cancelled") && status.signal() == Some(2), "{call:?}: {status} {said}");
    let jobs = bench.json(&["jobs"]);
    assert_eq!(jobs["jobs"].as_array().unwrap().last().unwrap()["state"], "cancelled", "{call:?}: {jobs}");
}

/// Each kind of job: the list that `long_verbs.rs` compares with the command line.
#[test]
fn a_job_shows_its_progress_and_ctrl_c_cancels_it() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    fill_and_discard(&bench, 1);
    let before = bench.json(&["show", "root"])["layers"].clone();
    let [copy, moved, saved, top, other] =
        ["copy", "moved", "saved", "top.qcow2", "other.qcow2"].map(|name| path_str(&bench.path(name)).to_owned());
    for call in [&["compact", "root"][..], &["mirror", "root", &copy, "--keep"], &["backup", "root", &saved]] {
        is_cancelled_by_ctrl_c(&bench, call);
        assert_eq!(bench.json(&["show", "root"])["layers"], before, "{call:?}");
        shows_its_progress(&bench, call);
    }
    for name in ["commit", "stream", "rebase"] {
        let _ = std::fs::remove_file(&top);
        bench.ctl(&["snapshot", "root", &top]);
        let guests = bench.guests(3, 50);
        guests.wait_for_more(500);
        assert_eq!(guests.finish(), [""; 0]);
        run_ok(&["create", "-q", "-f", "qcow2", &other, &SIZE.to_string()]);
        let mut call = vec![name, "root"];
        call.extend((name == "rebase").then_some(other.as_str()));
        is_cancelled_by_ctrl_c(&bench, &call);
        assert_eq!(bench.layers(), 2, "{call:?}");
        shows_its_progress(&bench, &call);
        match name {
            "commit" => assert_eq!(bench.layers(), 1),
            // Nothing is below it any more: back to one layer under the next name.
            "stream" => bench.ctl(&["mirror", "root", &moved]).clear(),
            _ => {}
        }
    }
    let guests = bench.guests(4, 0);
    guests.wait_for_more(300);
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();
}

/// The layers of a disk that were written to before are replaced by a base that holds something else.
#[test]
fn a_disk_gets_another_base_while_guests_work_and_a_layer_of_its_chain_after_that() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let other = bench.path("other.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&other), &(SIZE / 2).to_string()]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", &format!("write -P 90 0 {}", SIZE / 4), path_str(&other)]);
    let server = bench.serve();
    let guests = bench.guests(3, 50);
    guests.wait_for_more(500);
    bench.ctl(&["snapshot", "root", path_str(&bench.path("a.qcow2"))]);
    guests.wait_for_more(300);
    let missing = bench.fails(&["rebase", "root", path_str(&bench.path("none.qcow2"))]);
    assert!(missing.contains("none.qcow2"), "{missing}");
    bench.ctl(&["rebase", "root", path_str(&other)]);
    let layers = bench.json(&["show", "root"])["layers"].to_string();
    assert!(layers.contains("a.qcow2") && layers.contains("other.qcow2") && !layers.contains("base.qcow2"), "{layers}");
    // Of its own chain.
    bench.ctl(&["snapshot", "root", path_str(&bench.path("b.qcow2"))]);
    guests.wait_for_more(300);
    bench.ctl(&["rebase", "root", path_str(&other), "--rate", "200M"]);
    assert_eq!(bench.layers(), 2);
    guests.wait_for_more(300);
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();
    ["base.qcow2", "a.qcow2"].into_iter().for_each(|gone| std::fs::remove_file(bench.path(gone)).unwrap());
    let server = bench.serve();
    assert_eq!(bench.layers(), 2);
    server.stop();
    let top = bench.path("b.qcow2");
    assert_valid(&top, false);
    bench.history.check_read(0, &bench.as_qemu_sees(&top), bench.history.now()).unwrap();
}

/// What is killed. Mirrors, backups and compactions have tests of their own.
const KILLED: [&str; 8] =
    ["commit", "commit-below", "stream", "rebase", "snapshot", "bitmap", "snapshot-create", "snapshot-delete"];

/// A daemon is killed at moments of one call after the other.
struct Killing {
    bench: Bench,
    /// A base outside the chain, which holds something else.
    other: std::path::PathBuf,
}

impl Killing {
    fn new() -> Self {
        // Many small clusters: changes of its snapshots are those of a large image.
        let bench = Bench::with_clusters("2k");
        let server = bench.serve();
        let load = HistoryLoad { seed: 1, write_percent: 95, sectors_max: 256, ..HistoryLoad::default() };
        let guests = bench.guests_with(&load);
        guests.wait_for_more(200);
        assert_eq!(guests.finish(), [""; 0]);
        server.stop();
        let other = bench.path("other.qcow2");
        run_ok(&["create", "-q", "-f", "qcow2", path_str(&other), &(SIZE / 2).to_string()]);
        tool_ok("qemu-io", &["-f", "qcow2", "-c", &format!("write -P 90 0 {}", SIZE / 4), path_str(&other)]);
        Self { bench, other }
    }

    /// Returns the call, after what it needs.
    fn prepare(&self, verb: &str, moment: u64, guests: &testkit::RunningLoad) -> Vec<String> {
        let bench = &self.bench;
        let put_on = |which: &str| {
            let overlay = bench.path(&format!("{which}{moment}.qcow2"));
            bench.ctl(&["snapshot", "root", path_str(&overlay)]);
            guests.wait_for_more(300);
            path_str(&overlay).to_owned()
        };
        // Without a limit several pieces are under way.
        let rate = if moment.is_multiple_of(2) { "100M" } else { "0" };
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match verb {
            "commit-below" => {
                let middle = put_on("middle");
                put_on("top");
                words(&["commit", "root", "--top", &middle, "--rate", rate])
            }
            "rebase" => {
                put_on("top");
                words(&["rebase", "root", path_str(&self.other), "--rate", rate])
            }
            "commit" | "stream" => {
                put_on("top");
                words(&[verb, "root", "--rate", rate])
            }
            "snapshot" => words(&["snapshot", "root", path_str(&bench.path(&format!("new{moment}.qcow2")))]),
            "bitmap" => words(&["bitmap", "add", "root", "b"]),
            _ => {
                if verb == "snapshot-delete" {
                    bench.ctl(&["snapshot-create", "root", "s"]);
                    guests.wait_for_more(300);
                }
                words(&[verb, "root", "s"])
            }
        }
    }

    /// Brings what was broken off to its end, or back. What the guest sees stays the same.
    fn again(&self, verb: &str, call: &[String], before: &std::path::Path) {
        let bench = &self.bench;
        let call: Vec<&str> = call.iter().map(String::as_str).collect();
        let layers = bench.json(&["show", "root"])["layers"].to_string();
        let file = call.get(2).copied().unwrap_or_default();
        match verb {
            "commit" if bench.recorded_top() == before => {
                bench.ctl(&call);
            }
            "commit-below" if layers.contains(call[3]) => {
                bench.ctl(&call);
            }
            "stream" if bench.layers() > 1 => {
                bench.ctl(&call);
            }
            "rebase" => {
                bench.ctl(&call);
            }
            "snapshot" if !layers.contains(file) => {
                assert!(!std::path::Path::new(file).exists(), "a layer that was made, and is none, is left behind");
                bench.ctl(&call);
            }
            "bitmap" => {
                let bitmaps = bench.json(&["bitmap", "list", "root"]).to_string();
                if bitmaps.contains("\"b\"") {
                    bench.ctl(&["bitmap", "remove", "root", "b"]);
                }
            }
            "snapshot-create" | "snapshot-delete" => {
                // A fleece of the change that was broken off is taken back first.
                let begun = std::time::Instant::now();
                while bench.json(&["jobs"]).to_string().contains("\"running\"") {
                    assert!(begun.elapsed() < common::PATIENCE, "a fleece is not taken back");
                    std::thread::sleep(Duration::from_millis(10));
                }
                if bench.json(&["snapshot-list", "root"]).to_string().contains("\"s\"") {
                    bench.ctl(&["snapshot-delete", "root", "s"]);
                }
                let left = std::fs::read_dir(bench.path("")).unwrap().map(|entry| entry.unwrap().file_name());
                let left = left.filter(|name| name.to_string_lossy().contains("fleece")).count();
                assert_eq!(left, 0, "a fleece is left behind");
            }
            _ => {}
        }
        // A chain does not become longer and longer.
        if bench.layers() > 4 {
            bench.ctl(&["stream", "root"]);
        }
    }

    fn is_killed_at(&mut self, verb: &str, moment: u64) {
        let server = self.bench.serve();
        let guests = self.bench.guests(10 + moment, 50);
        guests.wait_for_more(300);
        let call = self.prepare(verb, moment, &guests);
        let before = self.bench.recorded_top();
        let arguments = self.bench.arguments(&call.iter().map(String::as_str).collect::<Vec<_>>());
        let mut caller = ringdisk();
        caller.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        let mut caller = caller.spawn().unwrap();
        std::thread::sleep(Duration::from_millis(moment * 37 % 150));
        server.kill();
        caller.wait().unwrap();
        assert_eq!(guests.abandon(), [""; 0], "moment {moment}, {verb}");

        // The daemon's locks go when the kernel has taken it down.
        let top = self.bench.recorded_top();
        common::info_after_kill(&top);
        assert_valid(&top, true);
        let seen = self.bench.as_qemu_sees(&top);
        let survivors = self.bench.history.check_survivors(0, &seen);
        survivors.unwrap_or_else(|wrong| panic!("moment {moment}, {verb}: {wrong}"));
        // What survived is where the next guests begin.
        let server = self.bench.serve();
        self.again(verb, &call, &before);
        server.stop();
        let top = self.bench.recorded_top();
        assert!(self.bench.as_qemu_sees(&top) == seen, "moment {moment}: the same again, {verb}");
        assert_valid(&top, true);
        self.bench.history = Arc::new(SectorHistory::holding(&seen));
    }
}

#[test]
fn killed_at_any_moment_of_a_job_the_chain_holds_what_was_flushed() {
    if !has_tool("qemu-img") {
        return;
    }
    let mut killing = Killing::new();
    for moment in 0..common::kill9_moments(KILLED.len() as u64) {
        killing.is_killed_at(KILLED[moment as usize % KILLED.len()], moment);
    }
}

/// `RINGDISK_KILL9_JOB=commit` plays one of [`KILLED`] only.
#[test]
#[ignore = "takes minutes"]
fn each_job_killed_at_fifty_moments() {
    let only = std::env::var("RINGDISK_KILL9_JOB").ok();
    for verb in KILLED.into_iter().filter(|verb| only.as_deref().is_none_or(|only| only == *verb)) {
        let mut killing = Killing::new();
        for moment in 0..common::kill9_moments(50) {
            killing.is_killed_at(verb, moment);
        }
        println!("{verb}: killed at {} moments", common::kill9_moments(50));
    }
}

/// Fills the disk, and discards most of it again.
fn fill_and_discard(bench: &Bench, seed: u64) {
    let load = HistoryLoad { seed, write_percent: 95, sectors_max: 256, ..HistoryLoad::default() };
    let guests = bench.guests_with(&load);
    guests.wait_for_more(600);
    assert_eq!(guests.finish(), [""; 0]);
    bench.discard(0..SIZE / 512 / 4 * 3);
}

fn file_bytes(file: &std::path::Path) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::metadata(file).unwrap();
    (found.len(), found.blocks() * 512)
}

#[test]
fn a_file_gets_shorter_while_guests_work() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    let image = bench.path("base.qcow2");
    fill_and_discard(&bench, 1);
    let (before, _) = file_bytes(&image);
    let guests = bench.guests(2, 20);
    guests.wait_for_more(300);
    let job = bench.json(&["compact", "root", "--no-wait", "--rate", "64K"])["id"].to_string();
    let refused = bench.fails(&["compact", "root"]);
    assert!(refused.contains("has a job already"), "{refused}");
    bench.ctl(&["pause", &job]);
    bench.ctl(&["resume", &job]);
    bench.ctl(&["cancel", &job]);
    let last = || bench.json(&["jobs"])["jobs"].as_array().unwrap().last().unwrap().clone();
    while last()["state"] == "cancelling" {
        guests.wait_for_more(50);
    }
    assert_eq!((last()["state"].as_str(), last()["kind"].as_str()), (Some("cancelled"), Some("compact")));
    bench.ctl(&["compact", "root"]);
    guests.wait_for_more(1000);
    assert_eq!(guests.finish(), [""; 0]);
    // How much they filled again meanwhile depends on how fast they were.
    bench.discard(0..SIZE / 512 / 4 * 3);
    let outcome = bench.json(&["compact", "root"])["outcome"].as_str().expect("an outcome").to_owned();
    let (after, held) = file_bytes(&image);
    println!("{before} bytes became {after}, of which {held} are held; {outcome}");
    assert!(outcome.contains(&format!("has {after};")) && after < before / 4 * 3, "{before}, {after}, {outcome}");
    server.stop();
    assert_valid(&image, false);
    bench.history.check_read(0, &bench.as_qemu_sees(&image), bench.history.now()).unwrap();
}

fn compactions_are_killed(moments: u64) {
    if !has_tool("qemu-img") {
        return;
    }
    let mut bench = Bench::new();
    let image = bench.path("base.qcow2");
    for moment in 0..moments {
        let server = bench.serve();
        fill_and_discard(&bench, 10 + moment);
        let guests = bench.guests(100 + moment, 30);
        guests.wait_for_more(200);
        bench.ctl(&["compact", "root", "--no-wait"]);
        std::thread::sleep(Duration::from_millis(moment * 37 % 150));
        server.kill();
        assert_eq!(guests.abandon(), [""; 0], "moment {moment}");
        common::info_after_kill(&image);
        assert_valid(&image, true);
        let seen = bench.as_qemu_sees(&image);
        bench.history.check_survivors(0, &seen).unwrap_or_else(|wrong| panic!("moment {moment}: {wrong}"));
        let server = bench.serve();
        assert!(bench.json(&["jobs"])["jobs"].as_array().unwrap().is_empty(), "nothing is left of the job");
        bench.ctl(&["compact", "root"]);
        server.stop();
        assert_eq!(bench.as_qemu_sees(&image), seen, "moment {moment}: compacted again");
        assert_valid(&image, true);
        bench.history = Arc::new(SectorHistory::holding(&seen));
    }
}

#[test]
fn killed_at_any_moment_of_a_compaction_the_image_holds_what_was_flushed() {
    compactions_are_killed(common::kill9_moments(4));
}

#[test]
#[ignore = "takes minutes"]
fn compactions_killed_at_fifty_moments() {
    compactions_are_killed(common::kill9_moments(50));
}
