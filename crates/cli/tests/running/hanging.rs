//! Storage that does not answer.

use super::{Daemon, Guest, common};
use common::{Server, at, directory, path_str, ringdisk, run, run_ok, text};
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
