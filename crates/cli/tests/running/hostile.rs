//! Clients of the control socket that behave badly, and many changes, beside a guest whose data are checked.

use super::{Daemon, Guest, common};
use common::{assert_valid, at, directory, has_tool, path_str, run_ok, tool_ok};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

fn with_a_disk(size: &str) -> (Daemon, std::path::PathBuf) {
    let dir = directory();
    let image = at(&dir, "root.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), size]);
    let drive = format!("file={},name=first,socket={}", image.display(), at(&dir, "root.sock").display());
    (Daemon::start_in(dir, &["--drive", &drive]), image)
}

/// Sends bytes, and takes what comes for a moment.
fn send(control: &Path, bytes: &[u8]) {
    let Ok(mut stream) = UnixStream::connect(control) else { return };
    let _ = stream.set_read_timeout(Some(Duration::from_millis(5)));
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = stream.write_all(bytes);
    let _ = stream.read(&mut [0; 4096]);
}

/// Requests with a few bytes changed, by a seed.
fn fuzz(control: &Path, seed: u64, until: Instant) {
    const REQUESTS: [&str; 8] = [
        "GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n",
        "DELETE /v1/disks/other?force=true HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/exports HTTP/1.1\r\nhost: x\r\ncontent-length: 36\r\n\r\n{\"disk\": \"other\", \"read_only\": true }",
        "GET /v1/disks HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/disks/first/resize HTTP/1.1\r\nhost: x\r\ncontent-length: 19\r\n\r\n{\"size_bytes\": 512}",
        "PATCH /v1/disks/first HTTP/1.1\r\nhost: x\r\ncontent-length: 35\r\n\r\n{\"options\": {\"cache\": \"unsafe\"}}   ",
        "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/disks HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"op\r\n0\r\n\r\n",
    ];
    let mut state = seed | 1;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    while Instant::now() < until {
        let mut bytes = REQUESTS[next(REQUESTS.len())].as_bytes().to_vec();
        for _ in 0..next(4) {
            let at = next(bytes.len());
            bytes[at] = next(256) as u8;
        }
        if next(8) == 0 {
            bytes.truncate(next(bytes.len()));
        }
        send(control, &bytes);
    }
}

/// Connects, sends bytes, and keeps the connection without reading.
fn stay(control: &Path, bytes: &[u8]) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(control).ok()?;
    let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
    let _ = stream.write_all(bytes);
    Some(stream)
}

#[test]
fn hostile_clients_never_disturb_a_disk() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let (daemon, image) = with_a_disk("64M");
    let guest = Guest::begin(&daemon.path("root.sock"));
    let requests = || daemon.stats("first")["counters"]["requests"].as_u64().unwrap();
    let rate = |time: Duration| {
        let (before, begun) = (requests(), Instant::now());
        std::thread::sleep(time);
        (requests() - before) as f64 / begun.elapsed().as_secs_f64()
    };
    println!("requests a second in calm: {:.0}", rate(Duration::from_secs(1)));
    let until = Instant::now() + Duration::from_secs(5);
    let control = &daemon.control;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Those that never read their answers, and those that watch: they stay to the end.
            let scrapes = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000);
            let deaf: Vec<_> = (0..20).filter_map(|_| stay(control, &scrapes)).collect();
            let watch = b"GET /v1/events HTTP/1.1\r\nhost: x\r\n\r\n";
            let watching: Vec<_> = (0..100).filter_map(|_| stay(control, watch)).collect();
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            drop((deaf, watching));
        });
        for seed in 1..=3 {
            scope.spawn(move || fuzz(control, seed, until));
        }
        scope.spawn(move || {
            let giant =
                [&b"POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"[..], &[b' '; 1 << 20]];
            while Instant::now() < until {
                send(control, &giant.concat());
            }
        });
        scope.spawn(move || {
            // What is deep, and what has a long name.
            let deep = format!("{{\"options\": {}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
            let long = format!("{{\"options\": {{\"name\": \"{}\"}}}}", "n".repeat(250 << 10));
            let post = |body: &str| {
                format!("POST /v1/disks HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
            };
            while Instant::now() < until {
                [&deep, &long].iter().for_each(|body| send(control, post(body).as_bytes()));
            }
        });
        scope.spawn(move || {
            // Up to four thousand at once, and half of what a process may have, that say half a word, and stay. Those that are too many wait to be connected.
            let mut held = Vec::new();
            let most = limit.maximum.map_or(4000, |maximum| (maximum / 2).min(4000)) as usize;
            while held.len() < most && Instant::now() < until {
                if let Ok(mut stream) = UnixStream::connect(control) {
                    let _ = stream.write_all(b"GET /v1/di");
                    held.push(stream);
                }
            }
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        });
        // Meanwhile an operator gets through.
        let mut count = 0;
        while Instant::now() < until {
            daemon.ctl(&["list"]);
            daemon.ctl(&["metrics"]);
            count += 2;
        }
        println!("calls of an operator: {count}; requests a second: {:.0}", rate(Duration::from_millis(500)));
    });
    assert_eq!(daemon.json(&["show", "first"])["size_bytes"], 64 << 20);
    println!("requests a second afterwards: {:.0}", rate(Duration::from_secs(1)));
    guest.end();
    let _files = daemon.end();
    assert_valid(&image, false);
}

/// More calls at once than are carried out at one time: the others wait.
#[test]
fn many_calls_at_once_all_succeed() {
    let (daemon, image) = with_a_disk("64M");
    let guest = Guest::begin(&daemon.path("root.sock"));
    let add = |number: usize| {
        let options = format!("format=null,size=1G,name=q{number}");
        let mut command = common::ringdisk();
        command.args(daemon.arguments(&["add", &options, "--no-export"])).stdout(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let calls: Vec<_> = (0..64).map(add).collect();
    // And 64 on one disk.
    let list = |_| {
        let mut command = common::ringdisk();
        command.args(daemon.arguments(&["bitmap", "list", "first"])).stdout(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let lists: Vec<_> = (0..64).map(list).collect();
    for mut call in calls.into_iter().chain(lists) {
        assert!(call.wait().unwrap().success());
    }
    assert_eq!(daemon.json(&["list"])["disks"].as_array().unwrap().len(), 65);
    guest.end();
    let _files = daemon.end();
    assert_valid(&image, false);
}

/// As an operator's scripts would, by the client and by curl in turn.
#[test]
fn a_script_changes_disks_again_and_again_and_the_guest_sees_no_error() {
    if !has_tool("curl") {
        return;
    }
    let rounds = std::env::var("RINGDISK_CHANGES").map_or(8, |value| value.parse::<u64>().expect("a number"));
    let (daemon, image) = with_a_disk("64M");
    let guest = Guest::begin(&daemon.path("root.sock"));
    let curl = |path: &str, more: &[&str]| {
        let url = format!("http://localhost{path}");
        let fixed = ["--silent", "--show-error", "--fail-with-body", "--max-time", "60", "--unix-socket"];
        tool_ok("curl", &[&fixed[..], &[path_str(&daemon.control), &url], more].concat())
    };
    let more = daemon.path("more.sock");
    for round in 0..rounds {
        let (size, socket) = ((65 + round) << 20, path_str(&more));
        if round % 2 == 0 {
            daemon.ctl(&["resize", "first", "+1M"]);
            daemon.ctl(&["add", &format!("format=null,size=1G,name=more,socket={socket}")]);
            daemon.ctl(&["remove", "more"]);
        } else {
            curl("/v1/disks/first/resize", &["--data", &format!("{{\"size_bytes\": {size}}}")]);
            let options =
                format!("{{\"format\": \"null\", \"size\": \"1G\", \"name\": \"more\", \"socket\": \"{socket}\"}}");
            curl("/v1/disks", &["--data", &format!("{{\"options\": {options}}}")]);
            curl("/v1/disks/more", &["--request", "DELETE"]);
        }
        assert_eq!(daemon.json(&["show", "first"])["size_bytes"], size);
        assert!(!more.exists(), "round {round}");
    }
    guest.end();
    let _files = daemon.end();
    assert_valid(&image, false);
}
