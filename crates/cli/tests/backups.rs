//! `ringdisk ctl` backs running disks up, keeps their bitmaps and takes internal snapshots, while guests check every byte
//! that they read; after `kill -9` at any moment of it nothing is lost.

mod common;

use block::{Disk, ReactorHandle};
use common::{PATIENCE, Server, assert_valid, at, directory, has_tool, path_str, run_fails, run_ok, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use testkit::{HistoryLoad, RunningLoad, SectorHistory};

const SIZE: u64 = 8 << 20;

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

    fn last_job(&self) -> Value {
        self.json(&["jobs"])["jobs"].as_array().expect("a list").last().expect("a job").clone()
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "not in time: {what}; {}", self.last_job());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn bitmap(&self, name: &str) -> Value {
        let bitmaps = self.json(&["bitmap", "list", "root"]);
        let found = bitmaps["bitmaps"].as_array().expect("a list").iter().find(|bitmap| bitmap["name"] == name);
        found.cloned().unwrap_or_default()
    }

    /// Files that backups have left behind.
    fn fleeces(&self) -> usize {
        let names = std::fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().contains("fleece")).count()
    }

    /// What another program reads from an image, byte for byte.
    fn as_qemu_sees(&self, image: &Path) -> Vec<u8> {
        let raw = self.path("seen.raw");
        tool_ok("qemu-img", &["convert", "-U", "-f", "qcow2", "-O", "raw", path_str(image), path_str(&raw)]);
        std::fs::read(raw).expect("the copy")
    }
}

#[test]
fn backups_by_a_bitmap_follow_a_disk_that_guests_use_and_bitmaps_outlive_the_daemon() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    let guests = bench.guests(1, 30);
    bench.ctl(&["bitmap", "add", "root", "b", "--granularity", "4K"]);
    bench.ctl(&["bitmap", "add", "root", "off", "--disabled"]);
    assert!(bench.fails(&["bitmap", "add", "root", "b"]).contains("already exists"));
    let backups: Vec<PathBuf> = (0..4).map(|index| bench.path(&format!("backup{index}.qcow2"))).collect();
    let unknown = ["backup", "root", path_str(&backups[0]), "--mode", "full", "--bitmap", "none"];
    assert!(bench.fails(&unknown).contains("no bitmap 'none'"));
    bench.ctl(&["backup", "root", path_str(&backups[0]), "--bitmap", "b"]);
    assert!(bench.last_job()["outcome"].as_str().unwrap().contains("a full backup"), "{}", bench.last_job());
    for pair in backups[..3].windows(2) {
        guests.wait_for_more(300);
        let since = bench.history.now();
        bench.ctl(&["backup", "root", path_str(&pair[1]), "--bitmap", "b"]);
        let outcome = bench.last_job()["outcome"].clone();
        assert!(outcome.as_str().unwrap().contains(path_str(&pair[0])), "{outcome}");
        bench.history.check_read(0, &bench.as_qemu_sees(&pair[1]), since).unwrap();
    }
    assert_eq!((bench.layers(), bench.fleeces()), (1, 0));
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();

    let base = bench.path("base.qcow2");
    let info: Value = serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(&base)])).unwrap();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().expect("bitmaps").clone();
    let flags = |name: &str| bitmaps.iter().find(|bitmap| bitmap["name"] == name).expect("a bitmap")["flags"].clone();
    assert_eq!((flags("b"), flags("off")), (serde_json::json!(["auto"]), serde_json::json!([])));
    assert_valid(&base, false);

    // Another daemon goes on with them. A raw copy is as good as any other.
    let server = bench.serve();
    assert_eq!(bench.bitmap("off")["recording"], false);
    bench.ctl(&["bitmap", "merge", "root", "off", "b"]);
    assert!(bench.bitmap("off")["dirty_bytes"].as_u64() >= bench.bitmap("b")["dirty_bytes"].as_u64());
    bench.ctl(&["backup", "root", path_str(&backups[3]), "--bitmap", "b"]);
    bench.ctl(&["bitmap", "remove", "root", "off"]);
    let raw = bench.path("copy.raw");
    bench.ctl(&["backup", "root", path_str(&raw), "--format", "raw"]);
    server.stop();
    let seen = bench.as_qemu_sees(&base);
    assert!(seen == bench.as_qemu_sees(&backups[3]), "the chain of backups is the disk");
    assert!(seen == std::fs::read(raw).unwrap());
    bench.history.check_read(0, &seen, bench.history.now()).unwrap();
    let info: Value =
        serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(&backups[3])])).unwrap();
    assert_eq!(info["full-backing-filename"], path_str(&backups[2]));
    backups.iter().for_each(|backup| assert_valid(backup, false));
}

#[test]
fn a_backup_that_breaks_leaves_guests_the_disk_and_its_bitmap_as_they_were() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    bench.ctl(&["bitmap", "add", "root", "b", "--granularity", "4K"]);
    let guests = bench.guests(2, 60);
    guests.wait_for_more(2000);
    let (first, target) = (bench.path("first.qcow2"), bench.path("target.qcow2"));
    bench.ctl(&["backup", "root", path_str(&first), "--mode", "full", "--bitmap", "b"]);
    let slowly = ["backup", "root", path_str(&target), "--base", path_str(&first), "--bitmap", "b", "--rate", "64K"];

    guests.wait_for_more(500);
    let said = bench.fails(&[&slowly[..], &["--fleece-quota", "1M"]].concat());
    assert!(said.contains("quota of 1048576 bytes"), "{said}");
    assert_eq!((bench.layers(), bench.fleeces(), target.exists()), (1, 0, false));

    let job = bench.json(&[&slowly[..], &["--no-wait"]].concat())["id"].to_string();
    bench.until("the fleece is on top", |bench| bench.layers() == 2);
    assert!(bench.fails(&["snapshot", "root", path_str(&bench.path("no.qcow2"))]).contains("being changed"));
    assert!(bench.fails(&["bitmap", "add", "root", "c"]).contains("its backup"));
    assert!(bench.fails(&["snapshot-create", "root", "c"]).contains("its backup"));
    assert!(bench.fails(&["commit", "root"]).contains("has a job already"));
    bench.ctl(&["pause", &job]);
    guests.wait_for_more(500);
    bench.ctl(&["cancel", &job]);
    bench.until("the job has ended", |bench| bench.last_job()["state"] == "cancelled");
    assert_eq!((bench.layers(), bench.fleeces(), target.exists()), (1, 0, false));

    // What was written before and meanwhile is copied by the next one.
    assert_eq!(guests.finish(), [""; 0]);
    let last = bench.path("last.qcow2");
    bench.ctl(&["backup", "root", path_str(&last), "--base", path_str(&first), "--bitmap", "b"]);
    server.stop();
    let base = bench.path("base.qcow2");
    assert_valid(&base, false);
    assert!(bench.as_qemu_sees(&base) == bench.as_qemu_sees(&last));
}

/// A bitmap loses the bits of what is cut off, and the space that comes back reads as zeros.
#[test]
fn a_backup_by_a_bitmap_has_the_zeros_of_a_disk_that_became_smaller_and_larger_again() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    for grows_while_in_use in [false, true] {
        let bench = Bench::new();
        let (base, size) = (bench.path("base.qcow2"), SIZE.to_string());
        tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 8M", path_str(&base)]);
        let [first, second] = ["first.qcow2", "second.qcow2"].map(|name| bench.path(name));
        let server = bench.serve();
        bench.ctl(&["bitmap", "add", "root", "b"]);
        bench.ctl(&["backup", "root", path_str(&first), "--bitmap", "b"]);
        server.stop();
        // In the middle of a granule.
        let cut = (3 << 20) + 512;
        run_ok(&["resize", "-q", "--shrink", path_str(&base), &cut.to_string()]);
        if !grows_while_in_use {
            run_ok(&["resize", "-q", path_str(&base), &size]);
        }
        let server = bench.serve();
        if grows_while_in_use {
            bench.ctl(&["resize", "root", &size]);
        }
        let dirty = bench.bitmap("b")["dirty_bytes"].clone();
        bench.ctl(&["backup", "root", path_str(&second), "--bitmap", "b"]);
        assert!(bench.last_job()["outcome"].as_str().unwrap().contains(path_str(&first)), "{}", bench.last_job());
        server.stop();
        let seen = bench.as_qemu_sees(&second);
        assert!(seen == bench.as_qemu_sees(&base), "grows while in use: {grows_while_in_use}");
        assert!(seen[cut..].iter().all(|byte| *byte == 0) && seen.len() as u64 == SIZE);
        assert_eq!(dirty, SIZE - (3 << 20));
        // Zeros take no space there.
        let info = tool_ok("qemu-img", &["info", "--output=json", path_str(&second)]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert!(info["actual-size"].as_u64() < Some(1 << 20), "{info}");
    }
}

/// An NBD server that takes 256 KiB a second, until it may go on faster.
struct SlowServer(Child, PathBuf);

impl SlowServer {
    fn start(socket: &Path) -> Self {
        let rate = socket.with_extension("rate");
        std::fs::write(&rate, "2M\n").unwrap();
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U", path_str(socket), "--filter=rate", "memory", &SIZE.to_string(), "rate=2M"]);
        command.arg(format!("rate-file={}", rate.display()));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("nbdkit starts");
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child, rate)
    }

    fn go_faster(&self) {
        std::fs::write(&self.1, "8G\n").unwrap();
    }
}

impl Drop for SlowServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_slow_target_slows_the_backup_and_no_guest() {
    if !has_tool("nbdkit") || !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    let guests = bench.guests(3, 60);
    guests.wait_for_more(3000);
    let socket = bench.path("nbd");
    let target = SlowServer::start(&socket);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let since = bench.history.now();
    bench.ctl(&["backup", "root", &uri, "--format", "raw", "--existing", "--no-wait"]);
    bench.until("the copy has begun", |bench| bench.last_job()["done_bytes"].as_u64() > Some(0));
    let before = bench.last_job()["done_bytes"].as_u64();
    // So many requests end while the target takes next to nothing.
    guests.wait_for_more(1000);
    let after = bench.last_job();
    assert!(after["state"] == "running" && before < after["total_bytes"].as_u64(), "{after}");
    target.go_faster();
    bench.until("the backup has ended", |bench| bench.last_job()["state"] == "done");
    assert_eq!(guests.finish(), [""; 0]);
    let raw = bench.path("seen.raw");
    tool_ok("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, path_str(&raw)]);
    bench.history.check_read(0, &std::fs::read(raw).unwrap(), since).unwrap();
    drop(target);
    server.stop();
}

/// A bitmap that is believed after a crash has to have all that was written since the backup that the next one rests on.
fn backups_are_killed(moments: u64) {
    if !has_tool("qemu-img") {
        return;
    }
    let mut bench = Bench::new();
    let [first, second, next] = ["first", "second", "next"].map(|name| bench.path(name));
    let mut believed = 0;
    for moment in 0..moments {
        let server = bench.serve();
        bench.ctl(&["bitmap", "add", "root", "b", "--granularity", "4K"]);
        let guests = bench.guests(10 + moment, 50);
        bench.ctl(&["backup", "root", path_str(&first), "--mode", "full", "--bitmap", "b"]);
        guests.wait_for_more(300);
        // Without a limit several pieces are under way.
        let rate = ["1M", "20M", "0"][moment as usize % 3];
        bench.ctl(&["backup", "root", path_str(&second), "--bitmap", "b", "--rate", rate, "--no-wait"]);
        std::thread::sleep(Duration::from_millis(50 + moment * 67 % 250));
        server.kill();
        assert_eq!(guests.abandon(), [""; 0], "moment {moment}");

        let server = bench.serve();
        bench.until("the fleece is taken back", |bench| bench.layers() == 1 && bench.fleeces() == 0);
        bench.until("the job has ended", |bench| {
            bench.json(&["jobs"])["jobs"].as_array().unwrap().iter().all(|job| job["state"] == "done")
        });
        assert!(!bench.path("second.part").exists(), "moment {moment}: half a backup is left");
        let is_believed = bench.bitmap("b")["inconsistent"] == false;
        if is_believed {
            believed += 1;
            // It rests on the second backup if that came to its end, and else on the first.
            bench.ctl(&["backup", "root", path_str(&next), "--bitmap", "b"]);
        } else {
            let refused = bench.fails(&["backup", "root", path_str(&next), "--bitmap", "b", "--mode", "full"]);
            assert!(refused.contains("inconsistent"), "{refused}");
        }
        bench.ctl(&["bitmap", "remove", "root", "b"]);
        server.stop();
        let base = bench.path("base.qcow2");
        assert_valid(&base, true);
        let seen = bench.as_qemu_sees(&base);
        bench.history.check_survivors(0, &seen).unwrap_or_else(|wrong| panic!("moment {moment}: {wrong}"));
        assert!(!is_believed || bench.as_qemu_sees(&next) == seen, "moment {moment}: the bitmap lacks something");
        if second.exists() {
            assert_valid(&second, false);
        }
        [&first, &second, &next].into_iter().for_each(|backup| drop(std::fs::remove_file(backup)));
        bench.history = Arc::new(SectorHistory::holding(&seen));
    }
    eprintln!("{believed} of {moments} bitmaps were believed after the crash");
}

#[test]
fn killed_at_any_moment_of_a_backup_the_next_daemon_has_all_that_was_flushed_and_no_fleece() {
    backups_are_killed(common::kill9_moments(4));
}

#[test]
#[ignore = "takes minutes"]
fn backups_killed_at_fifty_moments() {
    backups_are_killed(common::kill9_moments(50));
}

/// Makes an image of the disk's size whose refcounts deny its last two clusters of data.
fn image_that_denies_its_data(path: &Path) -> Vec<u8> {
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(path), &SIZE.to_string()]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 7 0 128k", path_str(path)]);
    let mut bytes = std::fs::read(path).unwrap();
    let at = |bytes: &[u8], place: usize| u64::from_be_bytes(bytes[place..place + 8].try_into().unwrap()) as usize;
    let block = at(&bytes, at(&bytes, 48));
    assert!(bytes[block + 8..block + 14] == [0, 1, 0, 1, 0, 1], "the last two are data");
    bytes[block + 10..block + 14].fill(0);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn nothing_is_copied_into_an_image_whose_refcounts_deny_data_that_are_there() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") {
        return;
    }
    let bench = Bench::new();
    let target = bench.path("old.qcow2");
    let bytes = image_that_denies_its_data(&target);
    let server = bench.serve();
    let guests = bench.guests(11, 50);
    guests.wait_for_more(300);
    bench.ctl(&["bitmap", "add", "root", "b"]);
    for call in [
        &["backup", "root", path_str(&target), "--existing"][..],
        &["backup", "root", path_str(&target), "--existing", "--mode", "incremental", "--bitmap", "b"],
        &["mirror", "root", path_str(&target), "--existing", "--format", "qcow2"],
    ] {
        let said = bench.fails(call);
        assert!(said.contains("refcounts deny"), "{call:?}: {said}");
        assert!(std::fs::read(&target).unwrap() == bytes, "{call:?} has changed it");
    }
    assert_eq!((bench.layers(), bench.fleeces()), (1, 0));
    run_ok(&["check", "-q", "-r", "all", path_str(&target)]);
    bench.ctl(&["backup", "root", path_str(&target), "--existing"]);
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();
}

#[test]
fn a_raw_disk_and_a_top_layer_are_backed_up_and_a_target_that_fails_harms_nobody() {
    if !has_tool("nbdkit") || !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let (raw, socket) = (bench.path("raw.raw"), bench.path("t"));
    std::fs::write(&raw, common::numbered(1 << 20)).unwrap();
    let server = bench.serve();
    bench.ctl(&["add", &format!("file={},format=raw,name=raw", raw.display()), "--no-export"]);
    let (copy, top_of_raw) = (bench.path("copy.qcow2"), bench.path("raw3.qcow2"));
    bench.ctl(&["backup", "raw", path_str(&copy)]);
    assert!(bench.as_qemu_sees(&copy) == std::fs::read(&raw).unwrap());
    // Its bitmaps last as long as it is open.
    assert!(bench.ctl(&["bitmap", "add", "raw", "b"]).contains("recording, in memory"));
    let [first, second] = ["raw1.qcow2", "raw2.qcow2"].map(|name| bench.path(name));
    [&first, &second]
        .into_iter()
        .for_each(|target| drop(bench.ctl(&["backup", "raw", path_str(target), "--bitmap", "b"])));
    assert!(bench.as_qemu_sees(&second) == std::fs::read(&raw).unwrap());
    bench.ctl(&["reopen", "raw"]);
    assert!(bench.fails(&["backup", "raw", path_str(&top_of_raw), "--bitmap", "b"]).contains("no bitmap 'b'"));
    assert!(bench.fails(&["backup", "raw", path_str(&copy)]).contains("exists"));
    let onto_itself = bench.fails(&["backup", "raw", path_str(&raw), "--existing", "--format", "raw"]);
    assert!(onto_itself.contains("is part of the disk"), "{onto_itself}");

    // What lies below the top was the top before, so the daemon has it open for writing.
    let guests = bench.guests(7, 40);
    guests.wait_for_more(500);
    bench.ctl(&["snapshot", "root", path_str(&bench.path("overlay.qcow2"))]);
    guests.wait_for_more(200);
    let top = bench.path("top.qcow2");
    bench.ctl(&["backup", "root", path_str(&top), "--mode", "top"]);
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U", path_str(&socket), "--filter=error", "memory", &SIZE.to_string()]);
    command.args(["error-pwrite=ENOSPC", "error-pwrite-rate=100%"]);
    let target = SlowServer(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap(), PathBuf::new());
    bench.until("nbdkit listens", |_| socket.exists());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let said = bench.fails(&["backup", "root", &uri, "--format", "raw", "--existing"]);
    assert!(said.contains("cannot write to it at byte") && said.contains("No space left"), "{said}");
    assert_eq!((bench.layers(), bench.fleeces()), (2, 0));
    drop(target);
    assert_eq!(guests.finish(), [""; 0]);
    let again = bench.path("again.qcow2");
    bench.ctl(&["backup", "root", path_str(&again), "--mode", "top"]);
    server.stop();
    let info: Value = serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(&top)])).unwrap();
    assert_eq!(info["full-backing-filename"], path_str(&bench.path("base.qcow2")));
    assert!(bench.as_qemu_sees(&again) == bench.as_qemu_sees(&bench.path("overlay.qcow2")));
    [&top, &again].into_iter().for_each(|backup| assert_valid(backup, false));
}

#[test]
fn internal_snapshots_are_taken_under_guests_and_applied_without() {
    if !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let server = bench.serve();
    let guests = bench.guests(5, 50);
    guests.wait_for_more(500);
    for name in ["one", "two", "three"] {
        guests.wait_for_more(300);
        bench.ctl(&["snapshot-create", "root", name]);
    }
    bench.ctl(&["snapshot-delete", "root", "two"]);
    assert!(bench.fails(&["snapshot-delete", "root", "two"]).contains("no snapshot"));
    let refused = bench.fails(&["snapshot-apply", "root", "one"]);
    assert!(refused.contains("has a guest at"), "{refused}");
    guests.wait_for_more(300);
    assert_eq!(guests.finish(), [""; 0]);
    let base = bench.path("base.qcow2");
    let then = bench.path("then.raw");
    bench.until("the guest is gone", |bench| {
        let arguments = bench.arguments(&["snapshot-apply", "root", "one"]);
        common::run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).status.success()
    });
    let names: Vec<Value> = bench.json(&["snapshot-list", "root"])["snapshots"].as_array().unwrap().clone();
    assert_eq!(names.iter().map(|found| found["name"].clone()).collect::<Vec<_>>(), ["one", "three"]);
    server.stop();
    let arguments =
        ["convert", "-f", "qcow2", "-l", "snapshot.name=one", "-O", "raw", path_str(&base), path_str(&then)];
    tool_ok("qemu-img", &arguments);
    assert!(bench.as_qemu_sees(&base) == std::fs::read(then).unwrap());
    assert_valid(&base, false);
}

/// A disk at an NBD server: its image is no file beside which anything could lie.
#[test]
fn a_disk_at_a_server_gets_layers_and_gives_them_back_and_is_backed_up() {
    if !has_tool("nbdkit") || !has_tool("qemu-img") {
        return;
    }
    let bench = Bench::new();
    let (socket, layers) = (bench.path("nbd"), bench.path("layers"));
    std::fs::create_dir(&layers).unwrap();
    let remote = SlowServer::start(&socket);
    remote.go_faster();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let drive = format!("file={uri},format=raw,name=root,queues=2,socket={}", bench.path("s").display());
    let (control, state) = (bench.path("control"), bench.path("state"));
    let arguments = ["--control", path_str(&control), "--state-dir", path_str(&state), "--drive", &drive];
    let server = Server::start(&arguments);
    let guests = bench.guests(5, 60);
    guests.wait_for_more(500);
    let refused = bench.fails(&["backup", "root", path_str(&layers.join("no"))]);
    assert!(refused.contains("say where (--fleece-dir)"), "{refused}");
    let backup = |name: &str, more: &[&str]| {
        let (target, call) = (layers.join(name), ["backup", "root"]);
        let since = bench.history.now();
        bench.ctl(&[&call[..], &[path_str(&target), "--fleece-dir", path_str(&layers)], more].concat());
        bench.history.check_read(0, &bench.as_qemu_sees(&target), since).unwrap();
    };
    backup("full.qcow2", &[]);
    bench.ctl(&["snapshot", "root", path_str(&layers.join("one.qcow2"))]);
    guests.wait_for_more(500);
    assert_eq!(bench.layers(), 2);
    // It rests on the same disk of the server.
    backup("top.qcow2", &["--mode", "top"]);
    let info: Value =
        serde_json::from_str(&tool_ok("qemu-img", &["info", "--output=json", path_str(&layers.join("top.qcow2"))]))
            .unwrap();
    assert_eq!(info["backing-filename"], uri.as_str());
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();

    let server = Server::start(&arguments);
    assert_eq!(bench.layers(), 2, "the record names the layer at the server");
    let guests = bench.guests(6, 60);
    guests.wait_for_more(300);
    bench.ctl(&["commit", "root"]);
    guests.wait_for_more(300);
    assert_eq!(bench.layers(), 1);
    assert_eq!(guests.finish(), [""; 0]);
    server.stop();
    let raw = bench.path("seen.raw");
    tool_ok("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, path_str(&raw)]);
    bench.history.check_read(0, &std::fs::read(raw).unwrap(), bench.history.now()).unwrap();
    let server = Server::start(&arguments);
    assert_eq!(bench.layers(), 1);
    server.stop();
    drop(remote);
}
