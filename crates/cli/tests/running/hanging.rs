//! Storage that does not answer.

use super::{Daemon, Guest, common};
use common::{PATIENCE, Server, assert_valid, at, directory, has_tool, path_str, ringdisk, run, run_ok, text, tool_ok};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A disk at an NBD server that is stopped as a process can be, and a good one beside it.
#[test]
fn a_disk_whose_server_hangs_is_removed_and_the_daemon_ends() {
    let dir = directory();
    let (raw, socket) = (at(&dir, "disk.raw"), at(&dir, "nbd"));
    run_ok(&["create", "-q", "-f", "raw", path_str(&raw), "64M"]);
    let mut command = ringdisk();
    command.args(["nbd", path_str(&raw), "--socket", path_str(&socket), "--export-name", "disk"]);
    let nbd = Server::start_command(command);
    let file = format!("file=nbd+unix:///disk?socket={},format=raw", socket.display());
    let at = |name: &str| format!("name={name},socket={}", dir.path().join(format!("{name}.sock")).display());
    let drives = [format!("{file},{}", at("far")), format!("format=null,size=1G,{}", at("good"))];
    let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &drives[0], "--drive", &drives[1]]);
    let (far, good) = (Guest::begin(&daemon.path("far.sock")), daemon.path("good.sock"));
    std::thread::sleep(Duration::from_millis(200));
    nbd.signal("STOP");
    daemon.wait_until_it_hangs("far");
    assert_eq!(daemon.stats("far")["connected"], true);
    let removed = run(&daemon.arguments(&["remove", "far", "--force"]));
    let said = text(&removed.stderr);
    assert!(said.contains("'far' is removed, but could not be closed"), "{said}");
    let list = daemon.json(&["list"]);
    assert_eq!(list["disks"].as_array().unwrap().len(), 1, "{list:#}");
    let worked = far.stop();
    assert!(worked.errors > 0, "its requests in flight end with errors");
    assert_eq!(worked.mismatches, 0);
    drop(driver::Driver::connect(&good, driver::DriverOptions::default()).expect("the other disk is served"));

    // The same with the end of the daemon.
    nbd.signal("CONT");
    daemon.ctl(&["add", &drives[0]]);
    let far = Guest::begin(&daemon.path("far.sock"));
    std::thread::sleep(Duration::from_millis(200));
    nbd.signal("STOP");
    daemon.wait_until_it_hangs("far");
    let begun = Instant::now();
    daemon.ctl(&["shutdown"]);
    let mut server = daemon.server;
    // Its exit code says that a disk could not be closed.
    server.wait();
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert!(far.stop().errors > 0);
    nbd.kill();
}

/// Nothing can be cancelled here: filters keep the requests for half a minute.
#[test]
fn requests_that_nobody_can_cancel_are_given_up() {
    let dir = directory();
    let raw = at(&dir, "disk.raw");
    run_ok(&["create", "-q", "-f", "raw", path_str(&raw), "64M"]);
    let drive = format!(
        "file={},format=raw,name=late,socket={},filter=delay:ms=10000,filter=delay:ms=10000,filter=delay:ms=10000",
        raw.display(),
        at(&dir, "late.sock").display()
    );
    let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &drive]);
    let late = Guest::begin(&daemon.path("late.sock"));
    daemon.wait_until_it_hangs("late");
    daemon.ctl(&["remove", "late", "--force"]);
    assert!(late.stop().errors > 0);
    assert!(daemon.json(&["list"])["disks"].as_array().unwrap().is_empty());
    drop(daemon.end());
}

/// A file of the host whose storage hangs while the server of its file system is stopped.
struct Stoppable {
    server: Child,
    path: PathBuf,
}

impl Stoppable {
    /// Nothing where no FUSE file system can be had.
    fn of_bytes(dir: &Path, bytes: u64) -> Option<Self> {
        if !has_tool("qemu-storage-daemon") || !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root()
        {
            assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "FUSE and root are missing");
            eprintln!("SKIPPED: a FUSE file system takes root, /dev/fuse and qemu-storage-daemon");
            return None;
        }
        let (below, path) = (dir.join("below.raw"), dir.join("stoppable.raw"));
        run_ok(&["create", "-q", "-f", "raw", path_str(&below), &bytes.to_string()]);
        std::fs::write(&path, b"").unwrap();
        let node = format!("driver=file,node-name=below,filename={}", below.display());
        let export = format!("type=fuse,id=fuse,node-name=below,writable=on,mountpoint={}", path.display());
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--blockdev", &node, "--export", &export]).stdin(Stdio::null());
        let mut server = command.spawn().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while std::fs::metadata(&path).unwrap().len() != bytes {
            assert!(server.try_wait().unwrap().is_none() && Instant::now() < deadline, "no FUSE file system comes");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Self { server, path })
    }

    fn signal(&self, name: &str) {
        tool_ok("kill", &[&format!("-{name}"), &self.server.id().to_string()]);
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        // Its file system goes with it, and whoever waits for it gets errors.
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = Command::new("umount").arg(&self.path).stderr(Stdio::null()).status();
    }
}

#[test]
fn a_job_whose_target_hangs_is_cancelled_in_time_and_the_guest_goes_on() {
    let dir = directory();
    let Some(target) = Stoppable::of_bytes(dir.path(), 64 << 20) else { return };
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    let drive = format!("file={},name=disk,socket={}", image.display(), at(&dir, "disk.sock").display());
    let state = at(&dir, "state");
    let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--state-dir", path_str(&state), "--drive", &drive]);
    let guest = Guest::begin(&daemon.path("disk.sock"));
    let job_is = |id: &serde_json::Value, state: &str| {
        let jobs = daemon.json(&["jobs"]);
        jobs["jobs"].as_array().unwrap().iter().any(|job| job["id"] == *id && job["state"] == state)
    };
    for (verb, way) in
        [("mirror", &["--rate", "1M"][..]), ("backup", &["--rate", "1M"]), ("mirror", &["--rate", "40M", "--keep"])]
    {
        target.signal("CONT");
        let call =
            [&[verb, "disk", path_str(&target.path), "--existing", "--format", "raw", "--no-wait"], way].concat();
        let id = daemon.json(&call)["id"].clone();
        // In the rounds, or while writes go to both sides, or at the end.
        std::thread::sleep(Duration::from_millis(100));
        target.signal("STOP");
        std::thread::sleep(Duration::from_millis(500));
        // One that has ended already says so.
        let _ = run(&daemon.arguments(&["cancel", &id.to_string()]));
        let deadline = Instant::now() + PATIENCE;
        while !job_is(&id, "cancelled") && !job_is(&id, "done") {
            assert!(Instant::now() < deadline, "{verb} {way:?}: {:#}", daemon.json(&["jobs"]));
            std::thread::sleep(Duration::from_millis(20));
        }
        let done = daemon.stats("disk")["counters"]["requests"].as_u64();
        let deadline = Instant::now() + PATIENCE;
        while daemon.stats("disk")["counters"]["requests"].as_u64() == done {
            assert!(Instant::now() < deadline, "{verb} {way:?}: the guest does not go on");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(daemon.json(&["show", "disk"])["file"], path_str(&image));
    guest.end();
    target.signal("CONT");
    let _files = daemon.end();
    assert_valid(&image, false);
}
