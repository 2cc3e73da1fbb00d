//! Files that are opened anew behind a disk.

use super::{Daemon, Guest, common};
use common::{Server, assert_valid, at, directory, has_tool, path_str, ringdisk, run_fails, run_ok, tool_ok};
use std::path::Path;
use testkit::WebServer;

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

/// A disk whose first byte says which contents are read.
struct Shown<'a> {
    daemon: &'a Daemon,
    name: &'a str,
}

impl Shown<'_> {
    fn drive(dir: &Path, name: &str, options: &str) -> String {
        format!("{options},name={name},socket={}", dir.join(format!("{name}.sock")).display())
    }

    fn first_byte(&self) -> Option<u8> {
        let copy = self.daemon.path("copy.raw");
        let source = format!("vhost-user:{}", self.daemon.path(&format!("{}.sock", self.name)).display());
        run_ok(&["convert", "-O", "raw", &source, path_str(&copy)]);
        std::fs::read(&copy).expect("a copy").first().copied()
    }

    fn is_reopened(&self) {
        self.daemon.ctl(&["reopen", self.name, "--force"]);
    }
}

fn filled(path: &Path, byte: u8) {
    std::fs::write(path, vec![byte; 4 << 20]).unwrap();
}

#[test]
fn whatever_was_replaced_below_a_disk_is_read_after_its_files_are_opened_anew() {
    let dir = directory();
    let [raw, base, top, split, data] =
        ["disk.raw", "base.raw", "top.qcow2", "split.qcow2", "data.raw"].map(|name| at(&dir, name));
    [&raw, &base, &data].into_iter().for_each(|path| filled(path, 1));
    run_ok(&["create", "-q", "-f", "qcow2", "-b", path_str(&base), "-F", "raw", path_str(&top)]);
    let external = format!("data_file={},data_file_raw=on", data.display());
    run_ok(&["create", "-q", "-f", "qcow2", "-o", &external, path_str(&split), "4M"]);
    filled(&data, 1);
    let named = |path: &Path, format: &str| format!("file={},format={format}", path.display());
    let disks = [("raw", named(&raw, "raw")), ("top", named(&top, "qcow2")), ("split", named(&split, "qcow2"))];
    let drives = disks.map(|(name, options)| Shown::drive(dir.path(), name, &options));
    let arguments: Vec<&str> = drives.iter().flat_map(|drive| ["--drive", drive.as_str()]).collect();
    let daemon = Daemon::start_in(dir, &arguments);
    for (name, replaced) in [("raw", &raw), ("top", &base), ("split", &data)] {
        let shown = Shown { daemon: &daemon, name };
        assert_eq!(shown.first_byte(), Some(1), "{name}");
        let new = daemon.path("new");
        filled(&new, 2);
        std::fs::rename(&new, replaced).unwrap();
        assert_eq!(shown.first_byte(), Some(1), "{name}: its files are those that it had");
        shown.is_reopened();
        assert_eq!(shown.first_byte(), Some(2), "{name}");
    }
    drop(daemon.end());
}

#[test]
fn what_was_replaced_at_a_server_is_read_after_the_disk_is_opened_anew() {
    let dir = directory();
    let (one, other, socket) = (at(&dir, "one.raw"), at(&dir, "other.raw"), at(&dir, "nbd"));
    filled(&one, 1);
    filled(&other, 2);
    let served = |file: &Path| {
        let mut command = ringdisk();
        command.args(["nbd", path_str(file), "--socket", path_str(&socket), "--export-name", "disk"]);
        Server::start_command(command)
    };
    let nbd = served(&one);
    let web = WebServer::start(&vec![1; 4 << 20]);
    *web.behaviour.tag.lock().unwrap() = "\"one\"".to_owned();
    let far = format!("file=nbd+unix:///disk?socket={},format=raw", socket.display());
    let on_page = |keys: &str| format!("file={}{keys},format=raw,readonly=on", web.url("/disk.raw"));
    let (page, kept) = (on_page(""), on_page(&format!("#cache={}", at(&dir, "cache").display())));
    let drives = [("far", far), ("page", page), ("kept", kept)];
    let drives = drives.map(|(name, options)| Shown::drive(dir.path(), name, &options));
    let arguments: Vec<&str> = drives.iter().flat_map(|drive| ["--drive", drive.as_str()]).collect();
    let daemon = Daemon::start_in(dir, &arguments);
    let [far, page, kept] = ["far", "page", "kept"].map(|name| Shown { daemon: &daemon, name });
    assert_eq!([&far, &page, &kept].map(Shown::first_byte), [Some(1); 3]);
    nbd.kill();
    let nbd = served(&other);
    far.is_reopened();
    assert_eq!(far.first_byte(), Some(2));
    *web.behaviour.bytes.lock().unwrap() = vec![2; 4 << 20];
    *web.behaviour.tag.lock().unwrap() = "\"other\"".to_owned();
    for shown in [&page, &kept] {
        shown.is_reopened();
        assert_eq!(shown.first_byte(), Some(2), "{}", shown.name);
    }
    drop(daemon.end());
    nbd.kill();
}
