//! Files that are opened anew behind a disk.

use super::{Daemon, Guest, common};
use common::{assert_valid, at, directory, has_tool, path_str, run_fails, run_ok, tool_ok};

#[test]
fn the_files_of_a_disk_are_opened_anew_under_load_and_stay_locked() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    let drive = format!("file={},name=disk,socket={}", image.display(), at(&dir, "disk.sock").display());
    let daemon = Daemon::start_in(dir, &["--drive", &drive]);
    let guest = Guest::begin(&daemon.path("disk.sock"));
    for round in 0..6 {
        daemon.ctl(&["reopen", "disk"]);
        if round == 3 {
            // Also with a layer that was put on.
            daemon.ctl(&["snapshot", "disk", path_str(&daemon.path("top.qcow2"))]);
        }
    }
    guest.end();
    let refused = run_fails(1, &["resize", path_str(&image), "1G"]);
    assert!(refused.contains("in use") || refused.contains("lock"), "{refused}");
    let refused = run_fails(1, &["resize", path_str(&daemon.path("top.qcow2")), "1G"]);
    assert!(refused.contains("in use") || refused.contains("lock"), "{refused}");
    assert_eq!(daemon.json(&["commit", "disk"])["state"], "done", "its layers are those that it had");
    let _files = daemon.end();
    assert_valid(&image, false);
}

#[test]
fn a_file_that_was_replaced_is_the_disk_and_one_that_does_not_fit_is_refused() {
    if !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let [image, new, small] = ["disk.qcow2", "new.qcow2", "small.qcow2"].map(|name| at(&dir, name));
    for (image, size) in [(&image, "64M"), (&new, "96M"), (&small, "32M")] {
        run_ok(&["create", "-q", "-f", "qcow2", path_str(image), size]);
    }
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 64k", path_str(&image)]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 2 0 64k", path_str(&new)]);
    let socket = at(&dir, "disk.sock");
    let drive = format!("file={},format=qcow2,name=disk,socket={}", image.display(), socket.display());
    let daemon = Daemon::start_in(dir, &["--drive", &drive]);
    let first_byte = || {
        let copy = daemon.path("copy.raw");
        let source = format!("vhost-user:{}", socket.display());
        run_ok(&["convert", "-O", "raw", &source, path_str(&copy)]);
        std::fs::read(copy).expect("a copy").first().copied()
    };
    assert_eq!(first_byte(), Some(1));
    std::fs::rename(&new, &image).unwrap();
    daemon.ctl(&["reopen", "disk"]);
    assert_eq!(first_byte(), Some(2), "what was remembered of the old file is gone");
    assert_eq!(daemon.json(&["show", "disk"])["size_bytes"], 96 << 20);
    std::fs::rename(&small, &image).unwrap();
    let refused = run_fails(1, &daemon.arguments(&["reopen", "disk"]));
    assert!(refused.contains("cannot become smaller"), "{refused}");
    assert_eq!(first_byte(), Some(2), "it goes on with the file that it had");
    drop(daemon.end());
}
