//! Persistent bitmaps of images that are served: what the guest writes is what QEMU sees marked, and a server that was
//! killed leaves bitmaps that nobody believes.

mod common;

use block::Disk;
use common::{Server, assert_valid, at, directory, has_tool, info_after_kill, path_str, run_ok, text, tool, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Pattern, Stop, run};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use testkit::marked_as_qemu_sees;

const WRITTEN: Range<u64> = (1 << 20) + 4096..(1 << 20) + (300 << 10);

fn has_tools() -> bool {
    ["qemu-img", "qemu-io", "qemu-nbd"].into_iter().all(has_tool)
}

/// An image of QEMU's with bitmaps in which QEMU has noted writes, and one that is disabled.
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
    let reactor = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
    let spec = BenchSpec::default().with(|spec| {
        spec.queue_depth = 8;
        spec.read_percent = 0;
        spec.pattern = Pattern::Sequential;
        spec.offset_bytes = WRITTEN.start;
        spec.length_bytes = Some(WRITTEN.end - WRITTEN.start);
        spec.stop = Stop::OnePass;
        spec.drain_timeout = common::PATIENCE;
    });
    let outcome = run(&disk, &[reactor.handle()], &spec, &Hooks::default()).unwrap();
    assert_eq!(outcome.report.errors, 0);
    drop(disk);
    reactor.stop().unwrap();
    server
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
    let seen = |bitmap| marked_as_qemu_sees(dir.path(), &image, bitmap);
    assert_eq!(seen("fine"), [0..512, WRITTEN]);
    let whole = 64 << 10;
    let coarse = WRITTEN.start / whole * whole..WRITTEN.end.next_multiple_of(whole);
    assert_eq!(seen("coarse"), [0..whole, coarse]);
    assert_eq!(seen("off"), []);

    tool_ok("qemu-io", &["-f", "qcow2", "-c", "write -P 2 40M 512", path_str(&image)]);
    let file = image::Opener::open(&drive::EngineOpener::default(), &(&image).into(), image::Role::ReadOnly).unwrap();
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

    let skipping = ["convert", "--bitmaps", "--skip-broken-bitmaps", "-O", "qcow2", path_str(&image), path_str(&copy)];
    for output in [tool("qemu-img", &skipping), common::run(&skipping)] {
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        for bitmap in ["coarse", "fine"] {
            assert!(said.contains(&format!("warning: Skipping inconsistent bitmap '{bitmap}'")), "{said}");
        }
        assert_eq!(flags(&copy), [("off".to_owned(), Vec::new())]);
    }

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

#[test]
fn a_bench_that_fails_closes_its_image_and_bitmaps_stay_believed() {
    if !has_tools() {
        return;
    }
    let dir = directory();
    let (image, link) = (at(&dir, "disk.qcow2"), at(&dir, "qemu-img"));
    std::fs::write(&image, common::with_an_unreadable_cluster()).unwrap();
    tool_ok("qemu-img", &["bitmap", "--add", "-g", "4k", path_str(&image), "b"]);
    let before = flags(&image);
    // The second request meets a cluster of which it must keep a part.
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ringdisk"), &link).unwrap();
    let bench = ["bench", "-w", "-f", "qcow2", "-c", "3", "-d", "1", "-S", "64k"];
    let failed = Command::new(&link).args(bench).arg(&image).output().unwrap();
    let said = text(&failed.stderr);
    assert!(failed.status.code() == Some(1) && said.contains("Failed request"), "{said}");
    assert_eq!(flags(&image), before);
    assert!(marked_as_qemu_sees(dir.path(), &image, "b").contains(&(0..4096)));

    let bench = ["bench", "--rw", "write", "--destroy", "--depth", "1", "--count", "20", "--image", path_str(&image)];
    let said = common::run_fails(1, &bench);
    assert!(said.contains("requests failed"), "{said}");
    assert_eq!(flags(&image), before);
    let marked = marked_as_qemu_sees(dir.path(), &image, "b");
    assert!(marked.iter().any(|range| range.start == 0 && range.end >= 65536), "{marked:?}");
    assert_valid(&image, false);
}
