//! Disks of a running daemon for NBD clients: beside guests, through changes of the disk, over `kill -9`.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, assert_valid, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool, tool_ok};
use drive::{DriveOptions, ParsedDrive, open_disk};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use image::BackingPolicy;
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const PART_BYTES: u64 = 8 << 20;

struct Daemon {
    dir: TempDir,
    control: PathBuf,
}

impl Daemon {
    fn new() -> Self {
        let dir = directory();
        let control = at(&dir, "control");
        Self { dir, control }
    }

    fn path(&self, name: &str) -> String {
        path_str(&at(&self.dir, name)).to_owned()
    }

    fn image(&self, name: &str, size: &str) -> String {
        let path = self.path(name);
        run_ok(&["create", "-q", "-f", "qcow2", &path, size]);
        path
    }

    fn start(&self, more: &[&str]) -> Server {
        let first = ["--control", path_str(&self.control), "--reactors", "2"];
        Server::start(&[&first[..], more].concat())
    }

    fn arguments<'a>(&'a self, call: &[&'a str]) -> Vec<&'a str> {
        [&["ctl", "--control", path_str(&self.control)], call].concat()
    }

    fn ctl(&self, call: &[&str]) -> String {
        run_ok(&self.arguments(call))
    }

    fn json(&self, call: &[&str]) -> Value {
        let said = self.ctl(&[call, &["--output=json"]].concat());
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{call:?}: {error}\n{said}"))
    }

    fn uri(&self, socket: &str, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.path(socket))
    }

    /// Returns the number of the export with this name.
    fn id_of(&self, name: &str) -> String {
        let exports = self.json(&["exports"]);
        let mut all = exports["exports"].as_array().unwrap().iter();
        all.find(|export| export["nbd"]["name"] == name).unwrap()["id"].to_string()
    }

    /// Reads what a bitmap calls dirty, and writes it over the last backup.
    fn copy_dirty(&self, bitmap: &str, uri: &str, backup: &str) {
        let script = self.path("backup.py");
        std::fs::write(&script, BACKUP).unwrap();
        let mut nbdsh = std::process::Command::new("nbdsh");
        // It needs the Python that it was made for.
        nbdsh.env("PATH", "/usr/bin:/bin").args(["-c", &format!("exec(open('{script}').read())")]);
        let ran = nbdsh.env("TARGET", backup).env("URI", uri).env("BITMAP", bitmap).output().expect("nbdsh starts");
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    }
}

/// Whoever writes to a part of a disk, and checks what it reads there.
struct Load {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Load {
    fn of_guest(socket: &str, part: u64) -> Self {
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(Path::new(socket), DriverOptions::default()).unwrap());
        Self::begin(part, move || (disk, None))
    }

    fn of_client(uri: &str, part: u64) -> Self {
        let text = format!("file={uri},format=raw");
        Self::begin(part, move || {
            let ParsedDrive::Drive(drive) = DriveOptions::parse(&text).unwrap() else { panic!("help") };
            let opened = open_disk(&drive.disk, BackingPolicy::Deny, &[]).unwrap();
            (Arc::clone(&opened.disk) as Arc<dyn Disk>, Some(opened))
        })
    }

    fn begin(part: u64, open: impl FnOnce() -> (Arc<dyn Disk>, Option<drive::OpenedDisk>) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let cancel = Arc::clone(&stop);
        let (is_open, opens) = std::sync::mpsc::channel();
        let work = move || {
            let (disk, opened) = open();
            is_open.send(()).unwrap();
            let reactor =
                Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = 8;
                spec.block_bytes = 4096;
                spec.offset_bytes = part * PART_BYTES;
                spec.length_bytes = Some(PART_BYTES);
                spec.drain_timeout = common::PATIENCE;
                spec.read_percent = 50;
                spec.verify = Some(Verify::new(5, Initial::Zeros));
                spec.pattern = Pattern::Random { seed: 6 + part };
                spec.flush_every = Some(32);
                spec.stop = Stop::Runtime(common::PATIENCE);
            });
            let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
            let outcome = load::run(&disk, &handles, &spec, &hooks).unwrap();
            assert_eq!((outcome.report.errors, outcome.report.mismatches), (0, 0));
            assert!(outcome.report.cancelled, "it has worked until the end");
            drop(disk);
            opened.iter().for_each(|opened| opened.close().unwrap());
        };
        let thread = std::thread::spawn(work);
        opens.recv_timeout(common::PATIENCE).expect("the disk is opened");
        Self { stop, thread }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a load without errors");
    }
}

#[test]
fn a_disk_has_nbd_clients_beside_its_guest_while_it_is_changed() {
    if !has_tool("nbdinfo") {
        return;
    }
    let daemon = Daemon::new();
    let image = daemon.image("root.qcow2", "64M");
    let server = daemon.start(&["--drive", &format!("file={image},name=root,queues=1")]);
    let socket = daemon.path("nbd");
    daemon.ctl(&["export", "root", "--nbd", &socket, "--description", "a system"]);
    daemon.ctl(&["export", "root", "--nbd", &socket, "--export-name", "look", "--read-only"]);
    let refused = run_fails(1, &daemon.arguments(&["export", "root", "--nbd", &socket]));
    assert!(refused.contains("'root'"), "{refused}");
    let list = tool_ok("nbdinfo", &["--list", &daemon.uri("nbd", "")]);
    assert!(
        list.contains("export=\"root\"") && list.contains("a system") && list.contains("export=\"look\""),
        "{list}"
    );

    let loads = [Load::of_guest(&format!("{image}.sock"), 0), Load::of_client(&daemon.uri("nbd", "root"), 1)];
    for round in 0..3 {
        daemon.ctl(&["snapshot", "root", &daemon.path(&format!("top{round}.qcow2"))]);
        daemon.ctl(&["commit", "root"]);
    }
    daemon.ctl(&["resize", "root", "+16M"]);
    // Who connects from now on sees the new size.
    assert_eq!(tool_ok("nbdinfo", &["--size", &daemon.uri("nbd", "look")]).trim(), (80 << 20).to_string());
    let written = tool("qemu-io", &["-f", "raw", "-c", "write 0 4k", &daemon.uri("nbd", "look")]);
    assert!(!written.status.success(), "an export that is read-only was written");
    let shown = daemon.json(&["show", "root"]);
    let nbd: Vec<&Value> =
        shown["exports"].as_array().unwrap().iter().map(|export| &export["nbd"]).filter(|nbd| !nbd.is_null()).collect();
    assert_eq!(nbd.len(), 2, "{shown}");
    assert_eq!(nbd[0]["uri"], daemon.uri("nbd", "root"));
    assert!(nbd[0]["connections"].as_u64() >= Some(1), "{shown}");
    loads.into_iter().for_each(Load::end);

    // Its clients' requests are in the figures of the disk.
    let exports = daemon.json(&["exports"]);
    let requests = |name: &str| {
        let mut exports = exports["exports"].as_array().unwrap().iter();
        exports.find(|export| export["nbd"]["name"] == name).unwrap()["counters"]["requests"].as_u64().unwrap()
    };
    assert!(requests("root") > 100, "{exports}");
    let stats = daemon.json(&["stats"]);
    assert!(stats["disks"][0]["counters"]["requests"].as_u64().unwrap() > requests("root"), "{stats}");
    assert!(daemon.ctl(&["metrics"]).contains("ringdisk_disk_latency_seconds"));

    let ids: Vec<String> =
        exports["exports"].as_array().unwrap().iter().map(|export| export["id"].to_string()).collect();
    daemon.ctl(&["unexport", &ids[2]]);
    assert!(!tool("nbdinfo", &["--size", &daemon.uri("nbd", "look")]).status.success());
    assert!(Path::new(&socket).exists(), "the other export is there");
    daemon.ctl(&["unexport", &ids[1]]);
    assert!(!Path::new(&socket).exists());
    server.stop();
    assert_valid(Path::new(&image), false);
}

#[test]
fn exports_come_back_after_a_kill_and_a_client_goes_on() {
    if !has_tool("nbdinfo") {
        return;
    }
    let daemon = Daemon::new();
    let (raw, state) = (daemon.path("a.raw"), daemon.path("state"));
    run_ok(&["create", "-q", "-f", "raw", &raw, "32M"]);
    let drive = format!("file={raw},format=raw,name=a");
    let arguments = ["--state-dir", &state, "--drive", &drive, "--nbd", &daemon.path("named")];
    let server = daemon.start(&arguments);
    assert!(server.announced.contains(&daemon.uri("named", "a")), "{}", server.announced);
    daemon.ctl(&["export", "a", "--nbd", &daemon.path("called"), "--export-name", "x"]);
    let client = Load::of_client(&format!("{}&reconnect-s=60", daemon.uri("called", "x")), 1);
    let mut server = Some(server);
    for _ in 0..2 {
        server.take().unwrap().kill();
        server = Some(daemon.start(&arguments));
        for uri in [daemon.uri("named", "a"), daemon.uri("called", "x")] {
            assert_eq!(tool_ok("nbdinfo", &["--size", &uri]).trim(), (32 << 20).to_string());
        }
    }
    client.end();
    server.take().unwrap().stop();
}

#[test]
fn a_configuration_has_exports_for_nbd_clients() {
    if !has_tool("nbdinfo") {
        return;
    }
    let daemon = Daemon::new();
    let config = daemon.path("disks.toml");
    let (one, two) = (daemon.image("one.qcow2", "16M"), daemon.image("two.qcow2", "24M"));
    let drives = format!(
        "[[drive]]\nname = 'one'\nfile = '{one}'\nexport = false\n[[drive]]\nname = 'two'\nfile = '{two}'\nexport = false\n"
    );
    let export =
        |disk: &str, more: &str| format!("[[export]]\ntype = 'nbd'\ndisk = '{disk}'\nsocket = 'nbd'\n{more}\n");
    std::fs::write(&config, format!("{drives}{}{}", export("one", ""), export("two", "name = 'second'"))).unwrap();
    let server = daemon.start(&["--config", &config]);
    let size = |name: &str| {
        let found = tool("nbdinfo", &["--size", &daemon.uri("nbd", name)]);
        found.status.success().then(|| text(&found.stdout).trim().parse::<u64>().unwrap() >> 20)
    };
    assert_eq!((size("one"), size("second"), size("two")), (Some(16), Some(24), None));
    std::fs::write(&config, format!("{drives}{}", export("two", "name = 'other'\nread-only = true"))).unwrap();
    daemon.ctl(&["reload"]);
    assert_eq!((size("one"), size("second"), size("other")), (None, None, Some(24)));
    server.stop();
}

#[test]
fn what_cannot_be_exported_says_why() {
    let daemon = Daemon::new();
    let image = daemon.image("a.qcow2", "1M");
    let server = daemon.start(&["--drive", &format!("file={image},name=a")]);
    let refused = |call: &[&str]| text(&run(&daemon.arguments(call)).stderr);
    let socket = daemon.path("nbd");
    assert!(refused(&["export", "a", "--nbd", &socket, "--bitmap", "none"]).contains("'none'"));
    assert!(refused(&["export", "a", "--nbd", &socket, "--tls-creds", "/nowhere"]).contains("/nowhere"));
    assert!(refused(&["export", "a", "--nbd", "127.0.0.1:99999"]).contains("'99999' is no port"));
    assert!(refused(&["export", "a", "--nbd", "127.0.0.1:1x"]).contains("'1x' is no port"));
    assert!(refused(&["export", "a", "--nbd", "127.0.0.1:0"]).contains("port 0"));
    assert!(refused(&["export", "a", "--tls-creds", "/nowhere"]).contains("--nbd"));
    assert!(refused(&["export", "a", "--export-name", "x"]).contains("--nbd"));
    assert!(!Path::new(&socket).exists());
    daemon.ctl(&["export", "a", "--nbd", &socket]);
    let other = refused(&["export", "a", "--nbd", &socket, "--export-name", "b", "--shared", "2"]);
    assert!(other.contains("other connections"), "{other}");
    server.stop();
    assert!(!Path::new(&socket).exists());
}

/// What virtnbdbackup does: all of the disk once, then again and again what a bitmap calls written, over NBD.
#[test]
fn incremental_backups_over_nbd_by_bitmap_are_the_disk_each_time() {
    if !has_tool("nbdsh") || !has_tool("qemu-io") || !has_tool("nbdcopy") {
        return;
    }
    let daemon = Daemon::new();
    let (image, backup) = (daemon.image("root.qcow2", "64M"), daemon.path("backup.raw"));
    let server = daemon.start(&["--state-dir", &daemon.path("state"), "--drive", &format!("file={image},name=root")]);
    daemon.ctl(&["export", "root", "--nbd", &daemon.path("rw")]);
    let write = |command: &str| {
        tool_ok("qemu-io", &["-f", "raw", "-c", command, "-c", "flush", &daemon.uri("rw", "root")]);
    };
    write("write -P 1 3M 1M");
    write("write -P 2 40M 2M");
    tool_ok("nbdcopy", &[&daemon.uri("rw", "root"), &backup]);
    daemon.ctl(&["bitmap", "add", "root", "b0"]);
    for round in 0..3 {
        let (old, next) = (format!("b{round}"), format!("b{}", round + 1));
        write(&format!("write -P {} 3500k 64k", 10 + round));
        write(&format!("write -P {} {}M 128k", 20 + round, 60 - round));
        write(&format!("write -z {}M 512k", 40 + round));
        if round == 1 {
            daemon.ctl(&["resize", "root", "+16M"]);
            write("write -P 30 70M 64k");
        }
        // From here on the next bitmap records. Both have what is written before the first one stops.
        daemon.ctl(&["bitmap", "add", "root", &next]);
        write(&format!("write -P {} 10M 64k", 40 + round));
        daemon.ctl(&["bitmap", "disable", "root", &old]);
        let (socket, uri) = (daemon.path("backup"), daemon.uri("backup", "b"));
        let export = ["--export-name", "b", "--read-only", "--bitmap", &old];
        daemon.ctl(&[&["export", "root", "--nbd", &socket], &export[..]].concat());
        let map = tool_ok("nbdinfo", &[&format!("--map=qemu:dirty-bitmap:{old}"), "--totals", &uri]);
        let of_dirty = |line: &str| line.split_whitespace().next().filter(|_| line.contains("dirty"))?.parse().ok();
        let dirty: u64 = map.lines().find_map(of_dirty).expect("something is dirty");
        // Space that was added is zeros, and counts as dirty: an earlier backup may hold data there.
        let added = if round == 1 { 16 << 20 } else { 0 };
        assert!((added..added + (2 << 20)).contains(&dirty), "{map}");
        daemon.copy_dirty(&old, &uri, &backup);
        let now = daemon.path("now.raw");
        tool_ok("nbdcopy", &[&uri, &now]);
        assert!(std::fs::read(&now).unwrap() == std::fs::read(&backup).unwrap(), "backup {round} is not the disk");
        daemon.ctl(&["unexport", &daemon.id_of("b")]);
        daemon.ctl(&["bitmap", "remove", "root", &old]);
    }
    server.stop();
    assert_valid(Path::new(&image), false);
}

/// Copies what the bitmap calls dirty over the last backup.
const BACKUP: &str = r#"
import os, nbd
h = nbd.NBD()
bitmap = "qemu:dirty-bitmap:" + os.environ["BITMAP"]
h.add_meta_context(bitmap)
h.connect_uri(os.environ["URI"])
dirty, at, size = [], 0, h.get_size()
def note(context, offset, entries, error):
    global at
    assert context == bitmap
    for length, flags in zip(entries[0::2], entries[1::2]):
        if flags & 1:
            dirty.append((offset, length))
        offset += length
    at = offset
while at < size:
    h.block_status(min(size - at, 1 << 30), at, note)
assert dirty
with open(os.environ["TARGET"], "r+b") as target:
    target.truncate(size)
    for offset, length in dirty:
        while length:
            piece = min(length, 1 << 20)
            target.seek(offset)
            target.write(h.pread(piece, offset))
            offset, length = offset + piece, length - piece
"#;

/// A bitmap of a lower layer knows nothing of what is written now: a backup by it would lack that.
#[test]
fn a_bitmap_below_the_top_layer_is_no_bitmap_of_the_disk() {
    if !has_tool("nbdinfo") || !has_tool("qemu-io") {
        return;
    }
    let daemon = Daemon::new();
    let image = daemon.image("root.qcow2", "16M");
    let server = daemon.start(&["--drive", &format!("file={image},name=root")]);
    daemon.ctl(&["bitmap", "add", "root", "daily"]);
    daemon.ctl(&["export", "root", "--nbd", &daemon.path("nbd"), "--bitmap", "daily"]);
    let uri = daemon.uri("nbd", "root");
    let map = || tool("nbdinfo", &["--map=qemu:dirty-bitmap:daily", &uri]);
    assert!(map().status.success());
    daemon.ctl(&["snapshot", "root", &daemon.path("top.qcow2")]);
    tool_ok("qemu-io", &["-f", "raw", "-c", "write 1M 64k", &uri]);
    let asked = map();
    assert!(!asked.status.success(), "{}", text(&asked.stdout));
    let again = ["export", "root", "--nbd", &daemon.path("more"), "--bitmap", "daily"];
    let refused = run_fails(1, &daemon.arguments(&again));
    assert!(refused.contains("lower layer"), "{refused}");
    // Its data are there as before.
    tool_ok("qemu-io", &["-f", "raw", "-c", "read 1M 64k", &uri]);
    daemon.ctl(&["commit", "root"]);
    let asked = map();
    assert!(asked.status.success() && text(&asked.stdout).contains("dirty"), "{}", text(&asked.stdout));
    server.stop();
    assert_valid(Path::new(&image), false);
}

#[test]
fn a_disk_comes_back_without_an_export_that_cannot() {
    if !has_tool("nbdinfo") || !has_tool("qemu-io") {
        return;
    }
    let daemon = Daemon::new();
    let (image, state) = (daemon.image("a.qcow2", "16M"), daemon.path("state"));
    let drive = format!("file={image},name=a");
    let arguments = ["--state-dir", &state, "--drive", &drive];
    let server = daemon.start(&arguments);
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().to_string()
    };
    daemon.ctl(&["bitmap", "add", "a", "live"]);
    daemon.ctl(&["export", "a", "--nbd", &daemon.path("nbd"), "--bitmap", "live"]);
    daemon.ctl(&["export", "a", "--nbd", &port]);
    tool_ok("qemu-io", &["-f", "raw", "-c", "write 1M 64k", "-c", "flush", &daemon.uri("nbd", "a")]);
    server.kill();
    let taken = std::net::TcpListener::bind(&port).expect("the port that the daemon had");
    let server = daemon.start(&arguments);
    // The guest's own socket, and the client's disk, of which the bitmap is lost.
    Driver::connect(Path::new(&format!("{image}.sock")), DriverOptions::default()).unwrap();
    let uri = daemon.uri("nbd", "a");
    assert_eq!(tool_ok("nbdinfo", &["--size", &uri]).trim(), (16 << 20).to_string());
    assert!(!tool("nbdinfo", &["--map=qemu:dirty-bitmap:live", &uri]).status.success());
    let disks = daemon.json(&["list"]);
    assert_eq!(disks["failed"].as_array().unwrap().len(), 1, "{disks}");
    assert!(disks["failed"][0]["error"].as_str().unwrap().contains(&port), "{disks}");
    // It is in the record still.
    drop(taken);
    server.stop();
    let server = daemon.start(&arguments);
    assert_eq!(tool_ok("nbdinfo", &["--size", &format!("nbd://{port}/a")]).trim(), (16 << 20).to_string());
    server.stop();
    // One that failed to start is taken away by its number, and does not come back.
    let taken = std::net::TcpListener::bind(&port).expect("the port that the daemon had");
    let server = daemon.start(&arguments);
    let exports = daemon.json(&["exports"]);
    let failed = exports["failed"].as_array().unwrap();
    let id = failed[0]["id"].to_string();
    assert!(failed.len() == 1 && failed[0]["disk"] == "a", "{exports}");
    assert!(exports["exports"].as_array().unwrap().iter().all(|export| export["id"] != failed[0]["id"]), "{exports}");
    daemon.ctl(&["unexport", &id]);
    let has_none = || daemon.json(&["exports"])["failed"].as_array().unwrap().is_empty();
    assert!(has_none() && daemon.json(&["list"])["failed"].as_array().unwrap().is_empty());
    server.stop();
    drop(taken);
    let server = daemon.start(&arguments);
    assert!(has_none() && std::net::TcpStream::connect(&port).is_err());
    server.stop();
}
