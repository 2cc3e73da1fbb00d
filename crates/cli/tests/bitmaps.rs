//! Persistent bitmaps of images that are served: what the guest writes is what QEMU sees marked, and a server that was
//! killed leaves bitmaps that nobody believes.

mod common;

use block::Disk;
use common::{Server, assert_valid, at, directory, has_tool, info_after_kill, path_str, run_ok, text, tool, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use jobs::bench::{BenchSpec, Hooks, Pattern, Stop, run};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WRITTEN: Range<u64> = (1 << 20) + 4096..(1 << 20) + (300 << 10);

fn has_tools() -> bool {
    ["qemu-img", "qemu-io", "qemu-nbd"].into_iter().all(has_tool)
}

/// An image of QEMU's with bitmaps that it has noted writes in, and one that is disabled.
fn prepare(image: &Path) {
    let image = path_str(image);
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", image, "64M"]);
    tool_ok("qemu-img", &["bitmap", "--add", "-g", "64k", image, "coarse"]);
    tool_ok("qemu-img", &["bitmap", "--add", "-g", "512", image, "fine"]);
    tool_ok("qemu-img", &["bitmap", "--add", "--disable", image, "off"]);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 512", image]);
}

/// Serves the image and writes to it through a driver; the server goes on.
fn serve_and_write(dir: &tempfile::TempDir, image: &Path) -> Server {
    let socket = at(dir, "s");
    let server = Server::start(&[path_str(image), "--socket", path_str(&socket)]);
    let driver = Driver::connect(&socket, DriverOptions::default()).unwrap();
    let disk = Arc::new(driver) as Arc<dyn Disk>;
    let reactor = Reactor::spawn(ReactorConfig { name: "client".into(), ..ReactorConfig::default() }).unwrap();
    let spec = BenchSpec {
        queue_depth: 8,
        read_percent: 0,
        pattern: Pattern::Sequential,
        offset_bytes: WRITTEN.start,
        length_bytes: Some(WRITTEN.end - WRITTEN.start),
        stop: Stop::OnePass,
        drain_timeout: common::PATIENCE,
        ..BenchSpec::default()
    };
    let outcome = run(&disk, &[reactor.handle()], &spec, &Hooks::default()).unwrap();
    assert_eq!(outcome.report.errors, 0);
    drop(disk);
    reactor.stop().unwrap();
    server
}

/// What a bitmap marks, as an NBD client of QEMU's sees it.
fn seen_by_qemu(dir: &tempfile::TempDir, image: &Path, bitmap: &str) -> Vec<Range<u64>> {
    let socket = at(dir, &format!("nbd-{bitmap}"));
    let mut nbd = Command::new("qemu-nbd");
    nbd.args(["-r", "-f", "qcow2", "-B", bitmap, "-k", path_str(&socket), path_str(image)]);
    // It ends with its first client.
    let mut nbd = nbd.stdin(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + common::PATIENCE;
    while !socket.exists() {
        assert!(nbd.try_wait().unwrap().is_none(), "qemu-nbd does not serve bitmap '{bitmap}'");
        assert!(Instant::now() < deadline, "qemu-nbd does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    let context = format!("x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}");
    let options = format!("driver=nbd,server.type=unix,server.path={},{context}", socket.display());
    let map = tool_ok("qemu-img", &["map", "--output=json", "--image-opts", &options]);
    nbd.wait().unwrap();
    let rows: Vec<Value> = serde_json::from_str(&map).unwrap();
    // That is how it shows what is marked.
    let marked = rows.iter().filter(|row| row["data"] == false);
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap();
    marked.map(|row| number(row, "start")..number(row, "start") + number(row, "length")).collect()
}

/// The flags of each bitmap.
fn flags(image: &Path) -> Vec<(String, Vec<String>)> {
    let said = tool_ok("qemu-img", &["info", "--output=json", path_str(image)]);
    let info: Value = serde_json::from_str(&said).unwrap();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap();
    let words = |value: &Value| {
        value.as_array().unwrap().iter().map(|flag| flag.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    bitmaps.iter().map(|bitmap| (bitmap["name"].as_str().unwrap().to_owned(), words(&bitmap["flags"]))).collect()
}

#[test]
fn what_a_guest_writes_is_what_qemu_sees_marked_and_it_goes_on_from_there() {
    if !has_tools() {
        return;
    }
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    prepare(&image);
    let before = flags(&image);
    serve_and_write(&dir, &image).stop();
    assert_valid(&image, false);
    assert_eq!(flags(&image), before);
    assert_eq!(seen_by_qemu(&dir, &image, "fine"), [0..512, WRITTEN]);
    let whole = 64 << 10;
    let coarse = WRITTEN.start / whole * whole..WRITTEN.end.next_multiple_of(whole);
    assert_eq!(seen_by_qemu(&dir, &image, "coarse"), [0..whole, coarse]);
    assert_eq!(seen_by_qemu(&dir, &image, "off"), []);

    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 2 40M 512", path_str(&image)]);
    let file = image::Opener::open(&daemon::EngineOpener::default(), &image, image::Role::ReadOnly).unwrap();
    let bits = image::read_bitmap(&file, image::Format::Qcow2, "fine").unwrap();
    let marked = (0..64 << 11).map(|sector| sector * 512).filter(|at| bits.is_set(*at));
    assert!(marked.eq([0].into_iter().chain(WRITTEN.step_by(512)).chain([40 << 20])));
}

#[test]
fn a_killed_server_leaves_bitmaps_that_say_they_are_inconsistent() {
    if !has_tools() {
        return;
    }
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    prepare(&image);
    serve_and_write(&dir, &image).kill();
    let said = info_after_kill(&image);
    assert_valid(&image, true);
    let strings = |flags: &[&str]| flags.iter().map(|flag| (*flag).to_owned()).collect::<Vec<_>>();
    let expected = [("coarse", &["in-use", "auto"][..]), ("fine", &["in-use", "auto"]), ("off", &[])];
    assert_eq!(flags(&image), expected.map(|(name, flags)| (name.to_owned(), strings(flags))));
    assert_eq!(said.matches("in-use").count(), 2, "{said}");
    let copy = at(&dir, "copy.qcow2");
    let copied = tool("qemu-img", &["convert", "--bitmaps", "-O", "qcow2", path_str(&image), path_str(&copy)]);
    assert!(!copied.status.success() && text(&copied.stderr).contains("inconsistent"), "{}", text(&copied.stderr));

    // The next server says so, leaves them alone, and they can be removed.
    let (status, said) = serve_and_write(&dir, &image).terminate();
    assert!(status.success() && said.contains("'coarse', 'fine'"), "{said}");
    assert_eq!(flags(&image), expected.map(|(name, flags)| (name.to_owned(), strings(flags))));
    for bitmap in ["coarse", "fine"] {
        run_ok(&["bitmap", "--remove", path_str(&image), bitmap]);
    }
    assert_eq!(flags(&image).len(), 1);
    assert_valid(&image, true);
}
