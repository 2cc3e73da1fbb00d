//! `ringdisk serve --control` and `ringdisk ctl`, as an operator uses them: disks change while a guest works, and come back
//! after `kill -9`.

mod common;

use block::{Disk, ReactorHandle};
use common::{Server, assert_valid, at, directory, has_tool, path_str, ringdisk, run_fails, run_ok, text, tool_ok};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tempfile::TempDir;

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

    fn path(&self, name: &str) -> PathBuf {
        at(&self.dir, name)
    }

    fn image(&self, name: &str, size: &str) -> PathBuf {
        let path = self.path(name);
        run_ok(&["create", "-q", "-f", "qcow2", path_str(&path), size]);
        path
    }

    fn start(&self, more: &[&str]) -> Server {
        let control = path_str(&self.control);
        let arguments = [&["--control", control, "--reactors", "1"], more].concat();
        Server::start(&arguments)
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

    fn names(&self) -> Vec<String> {
        let list = self.json(&["list"]);
        let disks = list["disks"].as_array().expect("a list").iter();
        disks.map(|disk| disk["name"].as_str().expect("a name").to_owned()).collect()
    }
}

const PART_BYTES: u64 = 16 << 20;

/// A guest that writes, reads and checks what it reads until it is told to stop.
struct Guest {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Guest {
    /// The guest works on a part of the disk, which holds zeros.
    fn begin(socket: &Path, part: u64) -> Self {
        let reactor = Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let cancel = Arc::clone(&stop);
        let work = move || {
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = 8;
                spec.block_bytes = 4096;
                spec.offset_bytes = part * PART_BYTES;
                spec.length_bytes = Some(PART_BYTES);
                spec.drain_timeout = common::PATIENCE;
                spec.read_percent = 50;
                spec.verify = Some(Verify::new(5, Initial::Zeros));
                spec.pattern = Pattern::Random { seed: 6 };
                spec.flush_every = Some(32);
                spec.stop = Stop::Runtime(common::PATIENCE);
            });
            let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
            let outcome = load::run(&disk, &handles, &spec, &hooks).unwrap();
            assert_eq!((outcome.report.errors, outcome.report.mismatches), (0, 0));
            assert!(outcome.report.cancelled, "the guest has worked until the end");
        };
        Self { stop, thread: std::thread::spawn(work) }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a guest without errors");
    }
}

#[test]
fn disks_are_managed_while_a_guest_works() {
    let daemon = Daemon::new();
    let image = daemon.image("root.qcow2", "64M");
    let server = daemon.start(&["--drive", &format!("file={},name=root,queues=1", image.display())]);
    assert_eq!(daemon.names(), ["root"]);
    let guest = Guest::begin(&daemon.path("root.qcow2.sock"), 0);
    for round in 0..5 {
        let socket = daemon.path("more.sock");
        daemon.ctl(&["add", &format!("format=null,size=1G,name=more,socket={}", socket.display())]);
        assert_eq!(daemon.names(), ["root", "more"]);
        daemon.ctl(&["remove", "more", "--force"]);
        assert!(!socket.exists());
        let size = (64 + round + 1) << 20;
        daemon.ctl(&["resize", "root", "+1M"]);
        assert_eq!(daemon.json(&["show", "root"])["size_bytes"], size);
    }
    let overlay = daemon.path("overlay.qcow2");
    daemon.ctl(&["snapshot", "root", path_str(&overlay)]);
    let shown = daemon.json(&["show", "root"]);
    assert_eq!(shown["file"], path_str(&overlay));
    assert_eq!(shown["layers"].as_array().unwrap().len(), 2);
    assert_eq!(daemon.json(&["commit", "root"])["state"], "done");
    assert_eq!(daemon.json(&["show", "root"])["file"], path_str(&image));
    let second = daemon.json(&["export", "root", "--read-only", "--socket", path_str(&daemon.path("ro.sock"))]);
    assert_eq!(daemon.json(&["exports"])["exports"].as_array().unwrap().len(), 2);
    daemon.ctl(&["unexport", &second["id"].to_string()]);
    assert!(daemon.ctl(&["stats"]).contains("reactor-0"));
    assert!(daemon.ctl(&["metrics"]).contains("ringdisk_disk_requests_total{disk=\"root\"}"));
    assert!(daemon.ctl(&["top", "--interval", "0.2", "--count", "1"]).contains("root"));
    guest.end();
    daemon.ctl(&["shutdown"]);
    let mut server = server;
    assert!(server.wait().success());
    assert_valid(&image, false);
}

#[test]
fn the_rate_of_a_running_disk_is_bounded_and_the_bound_comes_back() {
    let daemon = Daemon::new();
    let state = daemon.path("state");
    let socket = daemon.path("a.sock");
    let server = daemon.start(&["--state-dir", path_str(&state)]);
    let image = daemon.image("a.qcow2", "32M");
    daemon.ctl(&["add", &format!("file={},name=a,socket={},filter=throttle", image.display(), socket.display())]);
    assert!(run_fails(1, &daemon.arguments(&["set", "a", "throttling.iops-toral=1"])).contains("iops-total"));
    daemon.ctl(&["set", "a", "throttling.iops-total=200", "throttling.bps-write=10M"]);
    let rate = |daemon: &Daemon, part: u64| {
        let requests = |daemon: &Daemon| daemon.json(&["stats"])["disks"][0]["counters"]["requests"].as_u64().unwrap();
        let guest = Guest::begin(&socket, part);
        std::thread::sleep(Duration::from_millis(500));
        let (before, begin) = (requests(daemon), std::time::Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let rate = (requests(daemon) - before) as f64 / begin.elapsed().as_secs_f64();
        guest.end();
        rate
    };
    let bounded = rate(&daemon, 0);
    assert!(bounded > 0.0 && bounded <= 300.0, "{bounded} requests a second");
    let throttled_us = |daemon: &Daemon| daemon.json(&["stats"])["disks"][0]["throttled_us"].as_u64().unwrap();
    assert!(throttled_us(&daemon) > 100_000);
    server.kill();
    let server = daemon.start(&["--state-dir", path_str(&state)]);
    let shown = daemon.json(&["show", "a"])["options"]["filter"].as_str().unwrap().to_owned();
    assert_eq!(shown, "throttle:iops-total=200:bps-write=10485760");
    daemon.ctl(&["set", "a", "throttling.iops-total=0", "throttling.bps-write=0"]);
    let before = throttled_us(&daemon);
    let free = rate(&daemon, 1);
    let waited_us = throttled_us(&daemon) - before;
    assert!(free > 0.0 && waited_us < 100_000, "{free} requests a second without a bound waited {waited_us} us");
    server.stop();
}

#[test]
fn what_is_wrong_with_a_call_is_said() {
    let daemon = Daemon::new();
    let server = daemon.start(&[]);
    assert!(run_fails(1, &daemon.arguments(&["show", "nothing"])).contains("no disk 'nothing' (there is none)"));
    assert!(run_fails(1, &daemon.arguments(&["remove", "nothing"])).contains("there is no disk 'nothing'"));
    let missing = daemon.path("missing.qcow2");
    let said = run_fails(1, &daemon.arguments(&["add", &format!("file={}", missing.display())]));
    assert!(said.contains("missing.qcow2"), "{said}");
    assert!(run_fails(2, &daemon.arguments(&["add", "format=null,sise=1G"])).contains("did you mean 'size'"));
    daemon.ctl(&["add", &format!("format=null,size=1G,name=a,socket={}", daemon.path("a.sock").display())]);
    assert!(run_fails(1, &daemon.arguments(&["show", "b"])).contains("no disk 'b' (there is only 'a')"));
    assert!(run_fails(2, &daemon.arguments(&["unexport", "a"])).contains("the number of an export"));
    assert!(run_fails(2, &daemon.arguments(&["cancel", "a"])).contains("the number of a job"));
    let guest = Driver::connect(daemon.path("a.sock"), DriverOptions::default()).unwrap();
    let said = run_fails(1, &daemon.arguments(&["remove", "a"]));
    assert!(said.contains("where a guest is connected: end that first"), "{said}");
    assert!(run_fails(1, &daemon.arguments(&["resize", "a", "2G"])).contains("not an image"));
    assert!(
        run_fails(2, &daemon.arguments(&["resize", "a", "foo"])).contains("'foo' is not a size: it has to start with")
    );
    assert!(run_fails(2, &daemon.arguments(&["resize", "a", "-1M"])).contains("cannot be made smaller"));
    assert!(run_fails(1, &daemon.arguments(&["set", "a", "serial=b"])).contains("serial: cannot be changed"));
    assert!(run_fails(2, &daemon.arguments(&["snapshot", "a"])).contains("OVERLAY-FILE"));
    // For scripts.
    let json = |call: &[&str]| {
        let said = run_fails(1, &daemon.arguments(&[call, &["--output=json"]].concat()));
        serde_json::from_str::<Value>(&said).unwrap_or_else(|error| panic!("{error}: {said}"))["error"].clone()
    };
    assert_eq!(json(&["show", "nothing"])["kind"], "not-found");
    assert_eq!(json(&["remove", "a"])["kind"], "in-use");
    assert_eq!(json(&["set", "a", "serial=b"])["field"], "options");
    drop(guest);
    // A disk whose guest has gone is not in use any more.
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while daemon.json(&["show", "a"])["exports"][0]["connected"] == true {
        assert!(std::time::Instant::now() < deadline, "the guest stays connected");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(daemon.json(&["remove", "a"]), serde_json::json!({}));
    server.stop();
    assert!(!daemon.control.exists());
    assert!(run_fails(1, &daemon.arguments(&["list"])).contains("--control"));
}

#[test]
fn other_users_are_refused() {
    if !has_tool("setpriv") || !has_tool("curl") || !rustix::process::geteuid().is_root() {
        return;
    }
    let daemon = Daemon::new();
    let server = daemon.start(&[]);
    let call = ["curl", "-sS", "--unix-socket", path_str(&daemon.control), "http://ringdisk/v1/version"];
    assert!(tool_ok(call[0], &call[1..]).contains("\"api\":1"));
    // The client, where another user can run it.
    let public = directory();
    let client = at(&public, "client");
    std::fs::copy(ringdisk().get_program(), &client).unwrap();
    tool_ok("chmod", &["755", path_str(&client), path_str(public.path())]);
    let list = [&[path_str(&client)][..], &daemon.arguments(&["list"])].concat();
    let refused = |call: &[&str]| {
        let other = [&["--reuid=65534", "--regid=65534", "--clear-groups"][..], call].concat();
        let output = std::process::Command::new("setpriv").args(other).output().unwrap();
        assert!(!output.status.success(), "{}", text(&output.stdout));
        text(&output.stderr)
    };
    assert!(refused(&list).contains("answers only its own user and root"), "{}", refused(&list));
    // Even where the socket's mode would let them in.
    for path in [daemon.control.as_path(), daemon.dir.path()] {
        tool_ok("chmod", &["777", path_str(path)]);
    }
    refused(&call);
    assert!(refused(&list).contains("answers only its own user and root"), "{}", refused(&list));
    server.stop();
}

#[test]
fn after_a_kill_the_same_disks_come_back_on_the_right_chain() {
    let daemon = Daemon::new();
    let (configured, added) = (daemon.image("configured.qcow2", "32M"), daemon.image("added.qcow2", "32M"));
    let state = daemon.path("state");
    let drive = format!("file={},name=root,queues=1", configured.display());
    let arguments = ["--state-dir", path_str(&state), "--drive", &drive];
    let server = daemon.start(&arguments);
    daemon.ctl(&["add", &format!("file={},name=data,cache=none,serial=S1,queues=2", added.display())]);
    daemon.ctl(&["export", "data", "--read-only", "--socket", path_str(&daemon.path("ro.sock"))]);
    let elsewhere = daemon.path("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let overlay = at(&daemon.dir, "elsewhere/overlay.qcow2");
    daemon.ctl(&["snapshot", "root", path_str(&overlay)]);
    let before = daemon.json(&["list"]);
    server.kill();

    let server = daemon.start(&arguments);
    let mut after = daemon.json(&["list"]);
    // Numbers of exports, and why an engine was chosen, are of one run.
    let without_ids = |list: &mut Value| {
        for disk in list["disks"].as_array_mut().unwrap() {
            disk["layers"] = disk["layers"].as_array().unwrap().len().into();
            disk["exports"].as_array_mut().unwrap().iter_mut().for_each(|export| export["id"] = Value::Null);
        }
        list["disks"].as_array_mut().unwrap().sort_by_key(|disk| disk["name"].to_string());
    };
    let mut before = before;
    without_ids(&mut before);
    without_ids(&mut after);
    assert_eq!(before, after);
    Guest::begin(&daemon.path("configured.qcow2.sock"), 0).end();
    daemon.ctl(&["remove", "root", "--force"]);
    server.kill();

    let server = daemon.start(&arguments);
    assert_eq!(daemon.names(), ["data"], "what was removed stays away");
    server.stop();
    assert_valid(&overlay, true);
}

#[test]
fn a_disk_that_is_gone_keeps_no_other_from_coming_back() {
    let daemon = Daemon::new();
    let (one, two) = (daemon.image("one.qcow2", "1M"), daemon.image("two.qcow2", "1M"));
    let state = daemon.path("state");
    let server = daemon.start(&["--state-dir", path_str(&state)]);
    for (name, image) in [("one", &one), ("two", &two)] {
        daemon.ctl(&["add", &format!("file={},name={name}", image.display())]);
    }
    server.kill();
    std::fs::remove_file(&one).unwrap();
    let server = daemon.start(&["--state-dir", path_str(&state)]);
    assert_eq!(daemon.names(), ["two"]);
    let list = daemon.json(&["list"]);
    assert_eq!(list["failed"][0]["name"], "one");
    assert!(list["failed"][0]["error"].as_str().unwrap().contains("one.qcow2"), "{list}");
    daemon.ctl(&["remove", "one"]);
    assert_eq!(daemon.json(&["list"])["failed"], serde_json::json!([]));
    server.stop();
}

#[test]
fn events_are_told_as_they_happen() {
    let daemon = Daemon::new();
    let server = daemon.start(&[]);
    let watcher = ringdisk()
        .args(daemon.arguments(&["watch", "--count", "2", "--output=json"]))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // The watcher may not have begun yet: disks come until it has seen enough.
    let (done, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (waiting, asked) = (Arc::clone(&done), Arc::clone(&stop));
    let output = std::thread::spawn(move || {
        let output = watcher.wait_with_output().unwrap();
        waiting.store(true, Ordering::Relaxed);
        asked.store(true, Ordering::Relaxed);
        output
    });
    let socket = daemon.path("a.sock");
    while !done.load(Ordering::Relaxed) {
        daemon.ctl(&["add", &format!("format=null,size=1G,name=a,socket={}", socket.display())]);
        daemon.ctl(&["remove", "a", "--force"]);
    }
    let said = text(&output.join().unwrap().stdout);
    let kinds: Vec<String> = said
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["kind"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(kinds.len(), 2, "{said}");
    let known = ["disk-added", "export-added", "disk-removed"];
    assert!(kinds.iter().all(|kind| known.contains(&kind.as_str())), "{said}");
    server.stop();
}

#[test]
fn a_watcher_knows_whether_the_daemon_ended_in_order() {
    let daemon = Daemon::new();
    for (is_killed, code) in [(false, 0), (true, 1)] {
        let server = daemon.start(&[]);
        let said = daemon.path("said");
        let out = std::fs::File::create(&said).unwrap();
        let mut watcher = ringdisk().args(daemon.arguments(&["watch"])).stdout(out).spawn().unwrap();
        // It may not have begun yet: disks come until it has seen one.
        let deadline = std::time::Instant::now() + common::PATIENCE;
        while std::fs::read_to_string(&said).unwrap().is_empty() {
            assert!(std::time::Instant::now() < deadline, "no event is seen");
            daemon.ctl(&["add", "format=null,size=1G,name=a", "--no-export"]);
            daemon.ctl(&["remove", "a"]);
        }
        if is_killed {
            server.kill()
        } else {
            server.stop()
        }
        assert_eq!(watcher.wait().unwrap().code(), Some(code));
    }
}

/// Waits until `ctl list` names these disks.
fn wait_for_names(daemon: &Daemon, names: &[&str]) {
    let deadline = std::time::Instant::now() + common::PATIENCE;
    while daemon.names() != names {
        assert!(std::time::Instant::now() < deadline, "{:?}, not {names:?}", daemon.names());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_configuration_is_read_again_while_a_guest_works() {
    let daemon = Daemon::new();
    daemon.image("root.qcow2", "64M");
    let (config, socket) = (daemon.path("disks.toml"), daemon.path("root.qcow2.sock"));
    let null = |name: &str, size: &str| {
        format!("[[drive]]\nname = '{name}'\nformat = 'null'\nsize = '{size}'\nsocket = '{name}.sock'\n")
    };
    let write = |parts: &[String]| {
        let head = "control = 'control'\nstate-dir = 'state'\nreactors = 1\n".to_owned();
        let root =
            "[defaults]\nqueues = 1\n[[drive]]\nname = 'root'\nfile = 'root.qcow2'\ncache = 'writeback'\n".to_owned();
        std::fs::write(&config, [&[head, root], parts].concat().concat()).unwrap();
    };
    let throttle = |iops: u64| format!("filter = 'throttle:iops-total={iops}'\n");
    write(&[throttle(1_000_000), null("a", "1G"), null("b", "1G")]);
    let server = Server::start(&["--config", path_str(&config)]);
    assert_eq!(daemon.names(), ["root", "a", "b"]);
    daemon.ctl(&["add", &format!("format=null,size=1M,name=mine,socket={}", daemon.path("mine.sock").display())]);
    let guest = Guest::begin(&socket, 0);

    let more = "[[export]]\ndisk = 'root'\nsocket = 'more.sock'\nread-only = true\n".to_owned();
    write(&[throttle(500_000), null("a", "2G"), null("c", "1G"), more]);
    let reloaded = daemon.json(&["reload"]);
    let expected = serde_json::json!({
        "added": ["c"], "removed": ["b"], "changed": ["root"], "reopened": ["a"], "failed": [], "notes": [],
    });
    assert_eq!(reloaded, expected);
    let shown = daemon.json(&["show", "root"]);
    assert_eq!(shown["options"]["filter"], "throttle:iops-total=500000");
    assert_eq!(shown["exports"][1]["socket"], path_str(&daemon.path("more.sock")));
    assert_eq!(daemon.json(&["show", "a"])["size_bytes"], 2u64 << 30);
    assert!(!daemon.path("b.sock").exists());

    std::fs::write(&config, "control = 'control'\n[[drive]]\nname = 'root'\nfiel = 'root.qcow2'\n").unwrap();
    let said = run_fails(1, &daemon.arguments(&["reload"]));
    assert!(said.contains("disks.toml, line 4:") && said.contains("did you mean 'file'?"), "{said}");
    assert_eq!(daemon.names(), ["root", "mine", "a", "c"]);
    write(&[throttle(500_000), null("a", "2G")]);
    server.signal("HUP");
    wait_for_names(&daemon, &["root", "mine", "a"]);
    guest.end();

    // A layer that was put on stays, whatever else the file says.
    let overlay = daemon.path("overlay.qcow2");
    daemon.ctl(&["snapshot", "root", path_str(&overlay)]);
    write(&[throttle(500_000) + "serial = 'one'\n", null("a", "2G")]);
    assert_eq!(daemon.json(&["reload"])["reopened"], serde_json::json!(["root"]));
    let shown = daemon.json(&["show", "root"]);
    assert_eq!(shown["file"], path_str(&overlay));
    // So does the socket, which guests know.
    assert_eq!(shown["exports"][0]["socket"], path_str(&socket));
    server.kill();
    write(&[throttle(500_000) + "serial = 'two'\n"]);
    let server = Server::start(&["--config", path_str(&config)]);
    let shown = daemon.json(&["show", "root"]);
    assert_eq!((&shown["file"], &shown["serial"]), (&path_str(&overlay).into(), &"two".into()));
    assert_eq!(shown["exports"][0]["socket"], path_str(&socket));
    assert_eq!(daemon.names(), ["root", "mine"]);
    server.stop();
    assert_valid(&overlay, true);
}

#[test]
fn a_guest_waits_while_its_storage_fails_and_removing_ends_the_wait() {
    let daemon = Daemon::new();
    let image = daemon.image("root.qcow2", "64M");
    let server = daemon.start(&[]);
    let add = format!(
        "file={},name=root,queues=1,on-error=hold,filter=error:kinds=write:after=50:count=9:errno=EIO",
        image.display()
    );
    daemon.ctl(&["add", &add]);
    let guest = Guest::begin(&daemon.path("root.qcow2.sock"), 0);
    let wait_for = |is_held: bool| {
        let deadline = std::time::Instant::now() + common::PATIENCE;
        while daemon.json(&["show", "root"])["held"].is_null() == is_held {
            assert!(std::time::Instant::now() < deadline, "held is not {is_held}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for(true);
    let shown = daemon.ctl(&["show", "root"]);
    assert!(shown.contains("wait for 'ctl resume'") && shown.contains("Input/output error"), "{shown}");
    // Nine failures need at most so many tries.
    for _ in 0..9 {
        daemon.ctl(&["resume", "root"]);
        std::thread::sleep(Duration::from_millis(60));
    }
    wait_for(false);
    guest.end();
    daemon.ctl(&["set", "root", "on-error=report"]);
    daemon.ctl(&["remove", "root", "--force"]);

    // One that is held when its disk is removed ends.
    daemon.ctl(&["add", &add.replace("after=50:count=9", "after=0")]);
    let options = DriverOptions::default();
    let client = std::thread::spawn({
        let socket = daemon.path("root.qcow2.sock");
        move || {
            let reactor =
                Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap();
            let disk: Arc<dyn Disk> = Arc::new(Driver::connect(&socket, options).unwrap());
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                (spec.queue_depth, spec.block_bytes, spec.read_percent) = (4, 4096, 0);
                spec.drain_timeout = common::PATIENCE;
                spec.stop = Stop::Runtime(Duration::from_millis(200));
            });
            // What it sees of the end is the driver's affair.
            load::run(&disk, &handles, &spec, &Hooks::default()).map(drop)
        }
    });
    wait_for(true);
    daemon.ctl(&["remove", "root", "--force"]);
    drop(client.join().expect("the client ends"));
    server.stop();
    assert_valid(&image, true);
}
