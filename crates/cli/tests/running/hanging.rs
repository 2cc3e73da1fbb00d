//! Storage that does not answer.

use super::guest::{Blocks, Read, Reader};
use super::{Daemon, Guest, common};
use common::{PATIENCE, Server, assert_valid, at, directory, has_tool, path_str, ringdisk, run, run_ok, text, tool_ok};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
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
    let reader = daemon.reader_of("far");
    std::thread::sleep(Duration::from_millis(200));
    nbd.signal("STOP");
    let reading = daemon.begin_to_read(reader);
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
    // The device itself ends each request, with an error, before it hangs up.
    let count = Reader::REQUESTS;
    assert_eq!(reading.join().unwrap(), Read { errors: count, answered: count });
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

/// No guest is connected. What hangs is a call that reads from the image.
#[test]
fn the_daemon_ends_and_closes_the_other_disks_while_a_call_hangs() {
    let dir = directory();
    let [image, good, socket] = ["far.qcow2", "good.qcow2", "nbd"].map(|name| at(&dir, name));
    for image in [&image, &good] {
        run_ok(&["create", "-q", "-f", "qcow2", path_str(image), "64M"]);
    }
    run_ok(&["snapshot", "-c", "one", path_str(&image)]);
    let mut command = ringdisk();
    let drive = format!("file={},format=raw,name=disk", image.display());
    command.args(["nbd", "--drive", &drive, "--socket", path_str(&socket)]);
    let nbd = Server::start_command(command);
    let at = |name: &str| format!("name={name},socket={}", dir.path().join(format!("{name}.sock")).display());
    let far = format!("file=nbd+unix:///disk?socket={},format=qcow2,{}", socket.display(), at("far"));
    let near = format!("file={},{}", good.display(), at("good"));
    let mut daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &far, "--drive", &near]);
    let guest = Guest::begin(&daemon.path("good.sock"));
    std::thread::sleep(Duration::from_millis(200));
    guest.end();
    assert!(daemon.ctl(&["snapshot-list", "far"]).contains("one"));
    // It keeps the disk from being removed.
    let monitor = driver::Driver::connect(daemon.path("far.sock"), driver::DriverOptions::default()).unwrap();
    nbd.signal("STOP");
    let list = || {
        let mut command = ringdisk();
        command.args(daemon.arguments(&["snapshot-list", "far"])).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let mut call = list();
    let deadline = Instant::now() + PATIENCE;
    while !text(&run(&daemon.arguments(&["remove", "far"])).stderr).contains("a look at its snapshots") {
        assert!(Instant::now() < deadline && call.try_wait().unwrap().is_none(), "the call does not hang");
    }
    // More calls wait, and keep nobody else from calling: 7 for the storage, 64 for their turn. One more is refused.
    let mut more: Vec<Child> = (0..72).map(|_| list()).collect();
    while more.iter_mut().filter_map(|call| call.try_wait().unwrap()).count() < 1 {
        assert!(Instant::now() < deadline, "none is refused");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(daemon.json(&["list"])["disks"].as_array().unwrap().len(), 2);
    daemon.ctl(&["bitmap", "list", "good"]);
    daemon.ctl(&["metrics"]);
    daemon.server.signal("TERM");
    daemon.server.wait();
    more.iter_mut().for_each(|call| assert!(!call.wait().unwrap().success()));
    assert!(!call.wait().unwrap().success());
    run_ok(&["check", path_str(&good)]);
    drop(monitor);
    nbd.kill();
}

/// The configuration is read from a pipe that nobody writes to, as from a file system that does not answer.
#[test]
fn the_daemon_ends_while_reading_its_configuration_again_hangs() {
    use rustix::fs::{Mode, OFlags};
    let dir = directory();
    let config = at(&dir, "disks.toml");
    std::fs::write(&config, "[[drive]]\nname = 'null'\nformat = 'null'\nsize = '1M'\nsocket = 'null.sock'\n").unwrap();
    let mut daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--config", path_str(&config)]);
    std::fs::remove_file(&config).unwrap();
    tool_ok("mkfifo", &[path_str(&config)]);
    daemon.server.signal("HUP");
    let deadline = Instant::now() + PATIENCE;
    // It can be opened once somebody reads from it.
    let _pipe = loop {
        match rustix::fs::open(&config, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
            Ok(pipe) => break pipe,
            Err(error) => assert!(Instant::now() < deadline, "the configuration is not read: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    daemon.server.signal("HUP");
    std::thread::sleep(Duration::from_millis(100));
    daemon.ctl(&["shutdown"]);
    // Its exit code says that a call did not end.
    daemon.server.wait();
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

/// The storage of a local file hangs with requests in flight, whoever submits them.
#[test]
fn a_disk_whose_local_storage_hangs_is_removed_with_each_engine() {
    for (engine, cache) in [
        ("io_uring", "writeback"),
        ("io_uring", "none"),
        ("linux-aio", "none"),
        ("threads", "writeback"),
        ("threads", "none"),
    ] {
        let dir = directory();
        let Some(storage) = Stoppable::of_bytes(dir.path(), 64 << 20) else { return };
        let drive = format!(
            "file={},format=raw,name=far,socket={},engine={engine},cache={cache}",
            storage.path.display(),
            at(&dir, "far.sock").display()
        );
        let good = format!("format=null,size=1G,name=good,socket={}", at(&dir, "good.sock").display());
        let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &drive, "--drive", &good]);
        let (far, near) = (Guest::begin(&daemon.path("far.sock")), daemon.path("good.sock"));
        let reader = daemon.reader_of("far");
        daemon.wait_for_requests("far", 100);
        storage.signal("STOP");
        let reading = daemon.begin_to_read(reader);
        daemon.wait_until_it_hangs("far");
        let removed = run(&daemon.arguments(&["remove", "far", "--force"]));
        let said = text(&removed.stderr);
        let could_not_close = said.contains("'far' is removed, but could not be closed");
        assert!(removed.status.success() || could_not_close, "{engine} {cache}: {said}");
        let list = daemon.json(&["list"]);
        assert_eq!(list["disks"].as_array().unwrap().len(), 1, "{engine} {cache}: {list:#}");
        // With direct I/O, reads and writes are not answered, and the guest is disconnected.
        let worked = far.stop();
        assert!(worked.errors > 0, "{engine} {cache}: its requests in flight end with errors");
        assert_eq!(worked.mismatches, 0, "{engine} {cache}");
        let count = Reader::REQUESTS;
        let answered = if cache == "none" { 0 } else { count };
        assert_eq!(reading.join().unwrap(), Read { errors: count, answered }, "{engine} {cache}");
        drop(driver::Driver::connect(&near, driver::DriverOptions::default()).expect("the other disk is served"));
        storage.signal("CONT");
        daemon.ctl(&["shutdown"]);
        let mut server = daemon.server;
        server.wait();
    }
}

/// One write hangs in the kernel. The others wait behind it, and reach the kernel only after they were given up.
#[test]
fn writes_that_were_given_up_store_their_own_data_later_or_nothing() {
    for (engine, cache) in
        [("threads", "writeback"), ("io_uring", "writeback"), ("threads", "none"), ("io_uring", "none")]
    {
        let dir = directory();
        let Some(storage) = Stoppable::of_bytes(dir.path(), 64 << 20) else { return };
        let [first, second] = ["first.sock", "second.sock"].map(|name| at(&dir, name));
        let drive = format!(
            "file={},format=raw,name=far,socket={},engine={engine},cache={cache}",
            storage.path.display(),
            first.display()
        );
        let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &drive]);
        let export = daemon.json(&["exports"])["exports"][0]["id"].to_string();
        let taken = || daemon.json(&["exports"])["exports"][0]["counters"]["requests"].as_u64().unwrap();
        let (guest, count) = (Blocks::connect(&first), Blocks::COUNT as u64);
        guest.write(0x11, 0);
        storage.signal("STOP");
        let before = taken();
        let ends = guest.begin_to_write(0x22, 0);
        let deadline = Instant::now() + PATIENCE;
        while taken() < before + count {
            assert!(Instant::now() < deadline, "{engine} {cache}: its requests are not taken");
            std::thread::sleep(Duration::from_millis(20));
        }
        daemon.wait_until_it_hangs("far");
        daemon.ctl(&["unexport", &export]);
        let failed = ends.iter().filter(|(_, result)| result.is_err()).count();
        assert!(failed > 0, "{engine} {cache}: none was given up");
        drop(guest);
        storage.signal("CONT");
        daemon.ctl(&["export", "far", "--socket", path_str(&second)]);
        let guest = Blocks::connect(&second);
        // Writes of a file take their turns, so the late ones have ended before these.
        guest.write(0x33, 32);
        for (block, read) in guest.read() {
            let read = read.unwrap();
            let byte = read[0];
            assert!(matches!(byte, 0x11 | 0x22), "{engine} {cache}: block {block} begins with {byte}");
            assert!(read.iter().all(|other| *other == byte), "{engine} {cache}: block {block} is mixed");
        }
        daemon.ctl(&["shutdown"]);
        let mut server = daemon.server;
        server.wait();
    }
}

/// A file of the host whose storage hangs while the server of its file system is stopped.
struct Stoppable {
    server: Child,
    path: PathBuf,
}

impl Stoppable {
    /// Nothing where no FUSE file system can be had.
    fn of_bytes(dir: &Path, bytes: u64) -> Option<Self> {
        let below = dir.join("below.raw");
        run_ok(&["create", "-q", "-f", "raw", path_str(&below), &bytes.to_string()]);
        Self::over(dir, &below)
    }

    /// A qcow2 image with room for what is written to it.
    fn of_qcow2(dir: &Path, create: &[&str]) -> Option<Self> {
        let below = dir.join("below.qcow2");
        run_ok(&[&["create", "-q", "-f", "qcow2"], create, &[path_str(&below), "64M"]].concat());
        std::fs::File::options().write(true).open(&below).unwrap().set_len(96 << 20).unwrap();
        Self::over(dir, &below)
    }

    fn over(dir: &Path, below: &Path) -> Option<Self> {
        if !has_tool("qemu-storage-daemon") || !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root()
        {
            assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "FUSE and root are missing");
            eprintln!("SKIPPED: a FUSE file system takes root, /dev/fuse and qemu-storage-daemon");
            return None;
        }
        let (path, bytes) = (dir.join("stoppable"), std::fs::metadata(below).unwrap().len());
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

/// A guest of its own whose requests are in flight when the storage hangs.
impl Daemon {
    fn reader_of(&self, disk: &str) -> Reader {
        self.ctl(&["export", disk, "--socket", path_str(&self.path("reader.sock"))]);
        Reader::connect(&self.path("reader.sock"))
    }

    /// Returns when the daemon has taken all its requests.
    fn begin_to_read(&self, reader: Reader) -> JoinHandle<Read> {
        let taken = || {
            let exports = self.json(&["exports"]);
            let mut exports = exports["exports"].as_array().unwrap().iter();
            let own = exports.find(|export| export["socket"] == path_str(&self.path("reader.sock")));
            own.unwrap()["counters"]["requests"].as_u64().unwrap()
        };
        let (before, deadline) = (taken(), Instant::now() + PATIENCE);
        let reading = reader.read();
        while taken() < before + Reader::REQUESTS {
            assert!(Instant::now() < deadline, "its requests are not taken: {:#}", self.json(&["exports"]));
            std::thread::sleep(Duration::from_millis(20));
        }
        reading
    }
}

/// What is the same in the tests of jobs that write to a layer of the disk.
impl Daemon {
    fn job_is(&self, id: &serde_json::Value, state: &str) -> bool {
        let jobs = self.json(&["jobs"]);
        jobs["jobs"].as_array().unwrap().iter().any(|job| job["id"] == *id && job["state"] == state)
    }

    fn wait_for_job(&self, id: &serde_json::Value, states: &[&str]) {
        let deadline = Instant::now() + PATIENCE;
        while !states.iter().any(|state| self.job_is(id, state)) {
            assert!(Instant::now() < deadline, "not {states:?}: {:#}", self.json(&["jobs"]));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(super) fn wait_for_requests(&self, disk: &str, more: u64) {
        let count = || self.stats(disk)["counters"]["requests"].as_u64().unwrap();
        let (begun, deadline) = (count(), Instant::now() + PATIENCE);
        while count() < begun + more {
            assert!(Instant::now() < deadline, "the guest does not go on: {:#}", self.stats(disk));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts a job as soon as one that was given up has ended.
    fn start_when_free(&self, call: &[&str]) -> serde_json::Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = run(&self.arguments(&[call, &["--no-wait", "--output=json"]].concat()));
            if output.status.success() {
                let job: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
                return job["id"].clone();
            }
            let said = text(&output.stderr);
            assert!(said.contains("was given up and still waits for the storage"), "{said}");
            assert!(Instant::now() < deadline, "{said}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The layer below hangs while the top is taken back into it: in the rounds, and while guests write to both.
#[test]
fn a_commit_into_a_layer_that_hangs_ends_when_it_is_cancelled_and_the_guest_goes_on() {
    let dir = directory();
    let Some(below) = Stoppable::of_qcow2(dir.path(), &[]) else { return };
    let drive =
        format!("file={},format=qcow2,name=disk,socket={}", path_str(&below.path), path_str(&at(&dir, "disk.sock")));
    let (state, top) = (at(&dir, "state"), at(&dir, "top.qcow2"));
    let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--state-dir", path_str(&state), "--drive", &drive]);
    let guest = Guest::begin(&daemon.path("disk.sock"));
    daemon.wait_for_requests("disk", 500);
    daemon.ctl(&["snapshot", "disk", path_str(&top)]);
    // From here on the top has all that the guest reads.
    daemon.wait_for_requests("disk", 5000);
    for rate in ["1M", "40M", "200M"] {
        let id = daemon.start_when_free(&["commit", "disk", "--rate", rate]);
        std::thread::sleep(Duration::from_millis(100));
        below.signal("STOP");
        std::thread::sleep(Duration::from_millis(500));
        // One that has ended already says so.
        let _ = run(&daemon.arguments(&["cancel", &id.to_string()]));
        if rate != "1M" {
            // It may have been about to be done: then it is when the storage answers.
            let deadline = Instant::now() + Duration::from_secs(10);
            while daemon.job_is(&id, "cancelling") && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            if daemon.job_is(&id, "cancelling") {
                below.signal("CONT");
            }
        }
        daemon.wait_for_job(&id, &["cancelled", "done"]);
        if daemon.job_is(&id, "done") {
            below.signal("CONT");
            let _ = std::fs::remove_file(&top);
            daemon.wait_for_requests("disk", 100);
            daemon.ctl(&["snapshot", "disk", path_str(&top)]);
            daemon.wait_for_requests("disk", 5000);
            continue;
        }
        daemon.wait_for_requests("disk", 500);
        let refused = run(&daemon.arguments(&["commit", "disk"]));
        assert!(text(&refused.stderr).contains("still waits for the storage"), "{}", text(&refused.stderr));
        let refused = run(&daemon.arguments(&["remove", "disk"]));
        assert!(text(&refused.stderr).contains("was given up"), "{}", text(&refused.stderr));
        below.signal("CONT");
    }
    let id = daemon.start_when_free(&["commit", "disk"]);
    daemon.wait_for_job(&id, &["done"]);
    daemon.wait_for_requests("disk", 500);
    guest.end();
    let _files = daemon.end();
    assert_valid(&below.path, false);
}

/// The top hangs while a job copies into it what lies below.
#[test]
fn a_stream_into_a_layer_that_hangs_ends_when_it_is_cancelled_and_so_do_disk_and_daemon() {
    let dir = directory();
    let base = at(&dir, "base.raw");
    run_ok(&["create", "-q", "-f", "raw", path_str(&base), "64M"]);
    std::fs::write(&base, vec![7; 64 << 20]).unwrap();
    let Some(top) = Stoppable::of_qcow2(dir.path(), &["-b", path_str(&base), "-F", "raw"]) else { return };
    let drive = |name: &str, socket: &Path| {
        format!("file={},format=qcow2,name={name},socket={}", path_str(&top.path), path_str(socket))
    };
    let sockets = [at(&dir, "disk.sock"), at(&dir, "again.sock")];
    let daemon = Daemon::start_in(dir, &["--give-up-after", "1", "--drive", &drive("disk", &sockets[0])]);
    let hang = |disk: &str| {
        let id = daemon.start_when_free(&["stream", disk, "--rate", "4M"]);
        std::thread::sleep(Duration::from_millis(300));
        top.signal("STOP");
        std::thread::sleep(Duration::from_millis(500));
        id
    };
    // Cancelled, and begun anew when the storage answers.
    let id = hang("disk");
    daemon.ctl(&["cancel", &id.to_string()]);
    daemon.wait_for_job(&id, &["cancelled"]);
    top.signal("CONT");
    // The disk is removed with its job.
    let id = hang("disk");
    let removed = run(&daemon.arguments(&["remove", "disk", "--force"]));
    assert!(text(&removed.stderr).contains("'disk' is removed, but could not be closed"), "{}", text(&removed.stderr));
    daemon.wait_for_job(&id, &["cancelled"]);
    top.signal("CONT");
    let deadline = Instant::now() + PATIENCE;
    while !run(&daemon.arguments(&["add", &drive("again", &sockets[1])])).status.success() {
        assert!(Instant::now() < deadline, "its files stay locked though the storage answers");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The daemon ends with its job.
    let _ = hang("again");
    let begun = Instant::now();
    daemon.ctl(&["shutdown"]);
    let mut server = daemon.server;
    // The kernel keeps threads that wait for this file system: their process has ended all the same.
    let status = format!("/proc/{}/status", server.pid());
    let has_ended = || std::fs::read_to_string(&status).map_or(true, |status| status.contains("State:\tZ"));
    while !has_ended() {
        assert!(begun.elapsed() < PATIENCE, "the daemon does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    top.signal("CONT");
    server.wait();
    assert_valid(&top.path, true);
    let compared = run(&["compare", "-f", "qcow2", "-F", "raw", path_str(&top.path), path_str(&base)]);
    assert!(compared.status.success(), "{}", text(&compared.stdout));
}
