//! `ringdisk try` and `ringdisk bench`: the main job in one command, and the load generator.

mod common;

use common::{Server, at, directory, has_tool, path_str, ringdisk, run, run_fails, run_ok, text, tool_ok};
use serde_json::Value;
use std::path::Path;

/// What `bench` with these arguments measured.
fn bench(arguments: &[&str]) -> Value {
    let all = [&["bench", "--output", "json", "--time", "0.2"], arguments].concat();
    serde_json::from_str(&run_ok(&all)).expect("bench prints JSON")
}

#[test]
fn try_verifies_measures_and_cleans_up() {
    let dir = directory();
    for arguments in [&["--engine", "auto"] as &[&str], &["--engine", "threads", "--cache", "writeback"]] {
        let all = [&["try", "--size", "8M", "--seconds", "0.5", "--dir", path_str(dir.path())], arguments].concat();
        let said = run_ok(&all);
        for part in ["random read", "random write", "sequential read", "sequential write", "guest/host", "verified"] {
            assert!(said.contains(part), "'{part}' is missing in:\n{said}");
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "temporary files stay behind");
}

#[test]
fn try_works_where_the_directory_has_a_name_too_long_for_a_socket() {
    let dir = directory();
    let long = at(&dir, &"long-".repeat(20));
    std::fs::create_dir(&long).unwrap();
    run_ok(&["try", "--size", "8M", "--seconds", "0.2", "--dir", path_str(&long)]);
    run_fails(2, &["try", "--size", "1M"]);
    run_fails(2, &["try", "--seconds", "-1"]);
    let missing = run_fails(1, &["try", "--dir", "/nonexistent"]);
    assert!(missing.contains("/nonexistent"), "{missing}");
}

#[test]
fn bench_reaches_every_kind_of_target() {
    let dir = directory();
    let (qcow2, raw) = (at(&dir, "disk.qcow2"), at(&dir, "disk.raw"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&qcow2), "16M"]);
    run_ok(&["create", "-q", "-f", "raw", path_str(&raw), "16M"]);
    let server = Server::start(&["--drive", "format=null,size=1G", "--socket", path_str(&at(&dir, "s"))]);
    let (socket, pid) = (at(&dir, "s"), server.pid().to_string());
    let over_socket = bench(&["--socket", path_str(&socket), "--server-pid", &pid]);
    assert_eq!(over_socket["servers"][0]["pid"], server.pid());
    for (name, report) in [
        ("socket", over_socket),
        ("image", bench(&["--image", path_str(&qcow2), "--rw", "randrw", "--rwmixread", "30", "--verify"])),
        ("host", bench(&["--host", path_str(&raw), "--rw", "write", "--bs", "128k", "--depth", "4"])),
        ("drive", bench(&["--drive", "format=null,size=1G", "--queues", "2"])),
    ] {
        assert!(report["requests"].as_u64().unwrap() > 0, "{name}: {report}");
        assert_eq!(report["errors"], 0, "{name}: {report}");
        assert_eq!(report["mismatches"], 0, "{name}: {report}");
    }
    server.stop();
    let exact = bench_count(&raw, 1000);
    assert_eq!(exact["requests"], 1000);
}

fn bench_count(image: &Path, count: u32) -> Value {
    let arguments = ["bench", "--output", "json", "--host", path_str(image), "--count", &count.to_string()];
    serde_json::from_str(&run_ok(&arguments)).unwrap()
}

#[test]
fn a_verified_run_that_reads_something_else_fails() {
    let dir = directory();
    // A null disk forgets what is written. The generator must notice.
    let output = run(&[
        "bench",
        "--drive",
        "format=null,size=4M",
        "--rw",
        "randrw",
        "--verify",
        "--time",
        "0.2",
        "--output",
        "json",
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("wrong data"), "{}", text(&output.stderr));
    let image = at(&dir, "disk.raw");
    run_ok(&["create", "-q", path_str(&image), "4M"]);
    run_fails(2, &["bench", "--host", path_str(&image), "--bs", "1000"]);
    run_fails(2, &["bench", "--host", path_str(&image), "--rw", "read", "--rwmixread", "5"]);
    run_fails(2, &["bench", "--host", path_str(&image), "--image", path_str(&image)]);
}

#[test]
fn what_is_written_through_several_served_disks_is_in_their_images_after_sigterm() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let names = ["a.qcow2", "b.raw"];
    for name in names {
        let format = &name[2..];
        run_ok(&["create", "-q", "-f", format, path_str(&at(&dir, name)), "8M"]);
    }
    let drives = names.map(|name| format!("file={},format={}", at(&dir, name).display(), &name[2..]));
    let server = Server::start(&["--drive", &drives[0], "--drive", &drives[1], "--reactors", "2"]);
    // Both at once, one pass, without a flush: the orderly end must make the data durable.
    let benches = names.map(|name| {
        let socket = at(&dir, &format!("{name}.sock"));
        let mut command = ringdisk();
        command.args([
            "bench",
            "--rw",
            "write",
            "--bs",
            "64k",
            "--count",
            "128",
            "--verify",
            "--seed",
            "7",
            "--destroy",
        ]);
        command.arg("--socket").arg(socket).stdout(std::process::Stdio::null()).spawn().unwrap()
    });
    for mut bench in benches {
        assert!(bench.wait().unwrap().success());
    }
    server.stop();
    let (one, two) = (at(&dir, "a.qcow2"), at(&dir, "b.raw"));
    common::assert_valid(&one, false);
    let compare = ["compare", "-f", "qcow2", "-F", "raw", path_str(&one), path_str(&two)];
    assert!(tool_ok("qemu-img", &compare).contains("identical"));
    let written = std::fs::read(&two).unwrap();
    let empty = written.chunks(512).filter(|sector| sector.iter().all(|byte| *byte == 0)).count();
    assert_eq!(empty, 0, "{empty} sectors were never written");
}
