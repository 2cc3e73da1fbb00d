//! Options that change under a guest.

use super::{Daemon, Guest, common};
use common::{assert_valid, at, directory, has_tool, path_str, run_fails, run_ok};

#[test]
fn the_way_in_which_files_are_opened_changes_under_load_and_is_kept() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    // Large enough for more tables than the limit lets in.
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64G"]);
    let state = at(&dir, "state");
    let drive = format!("file={},name=disk,socket={}", image.display(), at(&dir, "disk.sock").display());
    let more = ["--state-dir", path_str(&state), "--drive", &drive];
    let daemon = Daemon::start_in(dir, &more);
    let guest = Guest::begin(&daemon.path("disk.sock"));
    let shown = |key: &str| daemon.json(&["show", "disk"])["options"][key].clone();
    for (engine, cache) in [
        ("threads", "none"),
        ("linux-aio", "directsync"),
        ("io_uring", "writethrough"),
        ("threads", "unsafe"),
        ("auto", "writeback"),
        ("linux-aio", "none"),
    ] {
        daemon.ctl(&["set", "disk", &format!("engine={engine}"), &format!("cache={cache}"), "l2-cache-size=1M"]);
        assert_eq!((shown("engine"), shown("cache")), (engine.into(), cache.into()));
        let layers = daemon.json(&["show", "disk"])["layers"][0].to_string();
        assert!(engine == "auto" || layers.contains(engine), "{layers}");
    }
    assert_eq!(daemon.stats("disk")["tables"]["limit_bytes"], 1 << 20);
    // With a layer on top, too.
    daemon.ctl(&["snapshot", "disk", path_str(&daemon.path("top.qcow2"))]);
    let refused = run_fails(1, &daemon.arguments(&["set", "disk", "cache=writeback"]));
    assert!(refused.contains("does not go with") && shown("cache") == "none", "{refused}");
    daemon.ctl(&["set", "disk", "engine=threads", "cache=writeback", "sync=on"]);
    guest.end();
    let Daemon { dir, server, .. } = daemon;
    server.kill();
    let daemon = Daemon::start_in(dir, &more);
    let options = daemon.json(&["show", "disk"])["options"].clone();
    let kept = ["cache", "sync", "engine", "l2-cache-size"].map(|key| options[key].clone());
    assert_eq!(kept, ["writeback", "on", "threads", "1M"]);
    assert_eq!(daemon.json(&["commit", "disk"])["state"], "done");
    let _files = daemon.end();
    assert_valid(&image, false);
}

#[test]
fn a_guest_that_was_told_that_writes_are_durable_may_go_on_to_believe_it() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    let drive =
        format!("file={},name=disk,cache=writethrough,socket={}", image.display(), at(&dir, "disk.sock").display());
    let daemon = Daemon::start_in(dir, &["--drive", &drive]);
    daemon.ctl(&["set", "disk", "cache=none"]);
    assert_eq!(daemon.json(&["show", "disk"])["volatile_cache"], false);
    drop(daemon.end());
}

#[test]
fn what_cannot_change_is_refused_with_the_reason_and_then_nothing_changes() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "64M"]);
    let drive = format!("file={},name=disk,socket={}", image.display(), at(&dir, "disk.sock").display());
    let scratch = format!(
        "file={},name=scratch,snapshot=on,socket={}",
        at(&dir, "other.raw").display(),
        at(&dir, "scratch.sock").display()
    );
    std::fs::write(at(&dir, "other.raw"), vec![0; 1 << 20]).unwrap();
    let daemon = Daemon::start_in(dir, &["--drive", &drive, "--drive", &format!("{scratch},format=raw")]);
    for (disk, changes, reason) in [
        ("disk", &["cache=none", "serial=S"][..], "serial: cannot be changed while the disk runs: guests were told"),
        ("disk", &["queues=3"], "belongs to the disk's socket"),
        ("disk", &["file=/x"], "'ctl mirror'"),
        ("disk", &["cahce=none"], "did you mean 'cache'?"),
        ("disk", &["cache=off"], "writeback, none, writethrough"),
        ("disk", &["cache=unsafe", "sync=on"], "contradict"),
        ("disk", &["cache=none", "on-error=hold"], "was added without on-error=hold"),
        ("disk", &["cache=none", "throttling.iops-total=5"], "filter=throttle"),
        ("scratch", &["cache=none"], "snapshot=on"),
    ] {
        let said = run_fails(1, &daemon.arguments(&[&["set", disk][..], changes].concat()));
        assert!(said.contains(reason), "{changes:?}: {said}");
        let options = daemon.json(&["show", disk])["options"].clone();
        assert!(options["cache"].is_null() && options["sync"].is_null(), "{changes:?}: {options}");
    }
    let layers = daemon.json(&["show", "disk"])["layers"].to_string();
    assert!(!layers.contains("direct"), "{layers}");
    drop(daemon.end());
}
