//! `ringdisk bench`: one measurement, several over depth, and several targets in turn.

mod common;

use common::{Server, at, directory, path_str, run, run_fails, run_ok, text};
use serde_json::Value;

/// Short measurements of null disks. These tests do not ask how fast they are.
const NULL: &str = "drive:format=null,size=1M";

fn json(arguments: &[&str]) -> Value {
    let all = [&["bench", "--output", "json"], arguments].concat();
    serde_json::from_str(&run_ok(&all)).unwrap()
}

#[test]
fn compare_measures_each_target_in_each_round_and_divides_the_first_by_the_others() {
    let image = directory();
    let raw = at(&image, "disk.raw");
    run_ok(&["create", "-q", path_str(&raw), "1M"]);
    let host = format!("file=host:{}", raw.display());
    let workload = ["--pairs", "3", "--count", "300", "--warmup", "0", "--rw", "randrw", "--bs", "512"];
    let report = json(&[&["--compare", NULL, &host, "other=drive:format=null,size=2M"], workload.as_slice()].concat());
    let names: Vec<_> = report["targets"].as_array().unwrap().iter().map(|target| &target["name"]).collect();
    assert_eq!(names, ["A", "file", "other"]);
    let depths = report["depths"].as_array().unwrap();
    assert_eq!(depths.len(), 1);
    for side in depths[0]["sides"].as_array().unwrap() {
        let runs = side["runs"].as_array().unwrap();
        assert!(runs.len() == 3 && runs.iter().all(|run| run["requests"] == 300), "{runs:?}");
        let iops: Vec<_> = runs.iter().map(|run| run["iops"].as_f64().unwrap()).collect();
        let spread = |key: &str| side["figures"]["iops"][key].as_f64().unwrap();
        assert!(iops.contains(&spread("median")), "the middle one of three");
        assert!(iops.iter().all(|iops| (spread("min")..=spread("max")).contains(iops)));
    }
    let calls = |side: usize| depths[0]["sides"][side]["figures"]["system_calls_per_request"]["median"].as_f64();
    assert_eq!(calls(0), Some(0.0), "a null disk asks the kernel for nothing");
    assert!(calls(1) > Some(0.0));
    let ratios = depths[0]["ratios"].as_array().unwrap();
    let pairs: Vec<_> = ratios.iter().map(|ratios| (ratios["of"].clone(), ratios["to"].clone())).collect();
    assert_eq!(pairs, [("A".into(), "file".into()), ("A".into(), "other".into())]);
    let divided = |round: usize| {
        let iops = |side: usize| depths[0]["sides"][side]["runs"][round]["iops"].as_f64().unwrap();
        iops(0) / iops(1)
    };
    let median = ratios[0]["figures"]["iops"]["median"].as_f64().unwrap();
    assert!((0..3).any(|round| (divided(round) - median).abs() < 1e-9), "{median}");
    let compare = ["bench", "--compare", NULL, NULL, "--pairs", "1", "--count", "100"];
    let (short, whole) = (run_ok(&compare), run_ok(&[&compare[..], &["--verbose"]].concat()));
    for part in ["A: drive:format=null", "B: drive", "A/B (min-max)", "IOPS", "latency p99"] {
        assert!(short.contains(part) && whole.contains(part), "'{part}' is missing in:\n{short}\n{whole}");
    }
    for part in ["completions/harvest", "latency mean", "system"] {
        assert!(!short.contains(part) && whole.contains(part), "'{part}' is for --verbose:\n{short}\n{whole}");
    }
    assert!(!short.contains("different"), "{short}");
}

#[test]
fn compare_says_in_which_options_the_targets_differ() {
    let dir = directory();
    let raw = at(&dir, "disk.raw");
    run_ok(&["create", "-q", path_str(&raw), "1M"]);
    let threads = format!("drive:file={},format=raw,engine=threads,cache=writeback,readonly=on", raw.display());
    let synced = format!("{threads},sync=on");
    let compare = |one: &str, other: &str| {
        run_ok(&["bench", "--compare", one, other, "--pairs", "1", "--count", "50", "--warmup", "0"])
    };
    let said = compare(&threads, &synced);
    assert!(said.contains("sync: A off, B on") && !said.contains("engine:") && !said.contains("cache:"), "{said}");
    let server = Server::start(&["--drive", "format=null,size=1M", "--socket", path_str(&at(&dir, "s"))]);
    let said = compare(&format!("socket:{}", at(&dir, "s").display()), &threads);
    server.stop();
    assert!(said.contains("engine: A not known (the server's), B threads"), "{said}");
}

#[test]
fn what_would_be_overwritten_asks_for_destroy() {
    let dir = directory();
    let [raw, qcow2] = ["disk.raw", "disk.qcow2"].map(|name| at(&dir, name));
    run_ok(&["create", "-q", path_str(&raw), "1M"]);
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&qcow2), "1M"]);
    for (kind, file) in [("--host", &raw), ("--image", &qcow2)] {
        let write = ["bench", kind, path_str(file), "--rw", "write", "--count", "4", "--bs", "64k"];
        // Nobody loses anything in an empty image.
        run_ok(&write);
        let before = std::fs::read(file).unwrap();
        let said = run_fails(2, &write);
        assert!(said.contains("--destroy") && said.contains(path_str(file)), "{said}");
        let target = format!("{}:{}", &kind[2..], file.display());
        run_fails(2, &["bench", "--compare", NULL, &target, "--rw", "randrw", "--pairs", "1", "--count", "4"]);
        assert!(std::fs::read(file).unwrap() == before, "{kind} was written");
        run_ok(&["bench", kind, path_str(file), "--rw", "read", "--count", "4"]);
        run_ok(&[&write[..], &["--destroy"]].concat());
    }
    // A server's disk may be a guest's, whatever it holds.
    let (socket, image) = (at(&dir, "s"), path_str(&qcow2));
    let before = std::fs::read(&qcow2).unwrap();
    let server = Server::start(&[image, "--socket", path_str(&socket)]);
    let write = ["bench", "--socket", path_str(&socket), "--rw", "randrw", "--count", "4"];
    assert!(run_fails(2, &write).contains("--destroy"));
    let target = format!("socket:{}", socket.display());
    let compare = ["bench", "--compare", NULL, &target, "--rw", "write", "--pairs", "1", "--count", "4"];
    assert!(run_fails(2, &compare).contains(path_str(&socket)));
    run_ok(&["bench", "--socket", path_str(&socket), "--count", "4"]);
    server.stop();
    assert!(std::fs::read(&qcow2).unwrap() == before, "the server's disk was written");
    // Under an overlay nothing below is written. One that is kept holds something from then on.
    let before = std::fs::read(&raw).unwrap();
    let drive = format!("name=one,file={},format=raw,snapshot=on", raw.display());
    let kept = format!("{drive},keep={}", dir.path().display());
    let write = |drive: &str| run(&["bench", "--drive", drive, "--rw", "write", "--count", "4", "--bs", "64k"]);
    for drive in [&drive, &drive, &kept] {
        let output = write(drive);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let overlay = at(&dir, "one.scratch");
    let index = std::fs::read(&overlay).unwrap();
    let said = text(&write(&kept).stderr);
    assert!(said.contains("--destroy") && said.contains(path_str(&overlay)), "{said}");
    assert!(std::fs::read(&overlay).unwrap() == index && std::fs::read(&raw).unwrap() == before);
}

#[test]
fn plot_draws_every_target_over_every_depth() {
    let dir = directory();
    let svg = at(&dir, "out.svg");
    let measure = |arguments: &[&str]| {
        let common = ["bench", "--count", "200", "--warmup", "0", "--plot", path_str(&svg)];
        (run_ok(&[&common, arguments].concat()), std::fs::read_to_string(&svg).unwrap())
    };
    let (table, drawn) = measure(&["--drive", "format=null,size=1M"]);
    let first_words = table.lines().filter_map(|line| line.trim_start_matches('│').split_whitespace().next());
    let depths: Vec<u32> = first_words.filter_map(|word| word.parse().ok()).collect();
    assert_eq!(depths, [4, 1, 2, 4, 8, 16, 32, 64, 128], "4 KiB, then a row a depth:\n{table}");
    assert_eq!(drawn.matches("<polyline").count(), 3);
    assert!(drawn.contains("4 KiB random read") && drawn.ends_with("</svg>\n"));
    for depth in ["1", "2", "4", "8", "16", "32", "64", "128"] {
        assert!(drawn.contains(&format!("text-anchor=\"middle\">{depth}</text>")), "depth {depth} is on the axis");
    }
    let (_, drawn) = measure(&["--compare", NULL, "x<y=drive:format=null,size=1M", "--pairs", "2", "--depths", "1,3"]);
    assert_eq!(drawn.matches("<polyline").count(), 6);
    assert!(drawn.contains("x&lt;y: drive:format=null"));
}

#[test]
fn a_server_is_measured_with_its_process() {
    let dir = directory();
    let socket = at(&dir, "s");
    let server = Server::start(&["--drive", "format=null,size=1M,poll-max-us=20", "--socket", path_str(&socket)]);
    let pid = server.pid().to_string();
    let target = format!("daemon=socket:{}", socket.display());
    let whose = format!("daemon:{pid}");
    let compare =
        ["--compare", &target, NULL, "--server-pid", &whose, "--pairs", "1", "--count", "2000", "--depths", "1,8"];
    let report = json(&compare);
    for depth in report["depths"].as_array().unwrap() {
        let figures = &depth["sides"][0]["figures"];
        for figure in ["server_us_per_request", "server_voluntary_switches_per_request", "kicks_per_request"] {
            assert!(figures[figure]["median"].is_f64(), "{figure}: {figures}");
        }
        assert_eq!(depth["sides"][1]["figures"]["server_us_per_request"], Value::Null);
    }
    let socket = path_str(&socket);
    let said = run_ok(&["bench", "--verbose", "--socket", socket, "--count", "1000", "--server-pid", &pid]);
    for part in ["voluntary context switches", "kicks", "wakeups", "completions a harvest"] {
        assert!(said.contains(part), "'{part}' is missing in:\n{said}");
    }
    server.stop();
}

/// A figure of one side at a depth.
fn per_request(depth: &Value, side: usize, name: &str) -> f64 {
    let figures = &depth["sides"][side]["figures"];
    figures[format!("{name}_per_request")]["median"].as_f64().unwrap_or_else(|| panic!("{name}: {figures}"))
}

#[test]
fn a_disk_that_is_served_to_ones_own_guest_tells_what_its_server_does_for_a_batch() {
    let dir = directory();
    let raw = at(&dir, "disk.raw");
    // Data in the page cache, or in a file in memory whose pages are copied.
    std::fs::write(&raw, vec![7; 4 << 20]).unwrap();
    let served = format!("serve:file={},format=raw", raw.display());
    let null = "null=serve:format=null,size=4M";
    let direct = format!("direct={served},cache=none");
    let sides = ["--compare", &served, null, &direct];
    let report = json(&[&sides[..], &["--pairs", "3", "--count", "4000", "--depths", "1,32,128"]].concat());
    for depth in report["depths"].as_array().unwrap() {
        let figure = |side: usize, name: &str| per_request(depth, side, name);
        assert!(depth["sides"][0]["figures"]["completions_per_harvest"]["median"].is_f64());
        assert_eq!(figure(1, "server_system_calls"), 0.0, "a null disk asks the kernel for nothing");
        for side in [0, 1, 2] {
            let batches = figure(side, "server_batches");
            // A turn takes requests, or completions, or both.
            let turns = batches + figure(side, "server_harvests");
            assert!(batches > 0.0 && figure(side, "server_notifications") <= turns, "{depth}");
            // Where others want the processor, a turn may ask in vain before it yields.
            assert!(figure(side, "server_system_calls") <= turns + figure(side, "server_yields"), "{depth}");
        }
        // It is an exception that a request goes in two parts.
        let (calls, batches) = (figure(0, "server_system_calls"), figure(0, "server_batches"));
        assert!(calls <= batches * 1.5 && figure(0, "server_worker_calls") == 0.0, "{depth}");
        assert!(depth["queue_depth"] == 1 || batches <= 0.5, "{depth}");
    }
}

#[test]
fn two_disks_of_one_server_are_measured_together_and_the_report_counts_both() {
    let dir = directory();
    let [first, second] = ["first.raw", "second.raw"].map(|name| at(&dir, name));
    for file in [&first, &second] {
        run_ok(&["create", "-q", "-f", "raw", path_str(file), "1M"]);
    }
    let served = format!("server.beside={},format=raw,file={}", second.display(), first.display());
    let load = ["--queues", "2", "--depth", "4", "--rw", "write", "--count", "400", "--verify"];
    let report = json(&[&["--serve", &served], &load[..]].concat());
    let counters = report["counters"].as_array().unwrap();
    let counted = counters.iter().find(|counter| counter["name"] == "ring_requests").unwrap()["total"].as_u64();
    // Each goes through a ring of one of the disks.
    assert!(report["requests"].as_u64() >= Some(400) && counted >= report["requests"].as_u64(), "{report}");
    for file in [&first, &second] {
        assert!(std::fs::read(file).unwrap().iter().any(|byte| *byte != 0), "{} was not used", file.display());
    }
    let pools = report["pools"].as_array().unwrap();
    let has_all = |pool: &Value| {
        let figures = ["made", "freed", "spare", "peak_in_flight", "context_bytes"];
        pool["name"].is_string() && figures.iter().all(|name| pool[name].is_u64())
    };
    assert!(!pools.is_empty() && pools.iter().all(has_all), "{report}");
    let said = common::run_fails(2, &["bench", "--serve", &served, "--queues", "1", "--count", "1"]);
    assert!(said.contains("server.beside") && said.contains("--queues 2"), "{said}");
}

#[test]
fn a_server_that_ends_a_run_is_said_to_and_nobody_is_said_to_have_interrupted_it() {
    let dir = directory();
    let [socket, control] = ["s", "control"].map(|name| at(&dir, name));
    let drive = format!("format=null,size=1G,name=a,socket={}", socket.display());
    let server = Server::start(&["--control", path_str(&control), "--drive", &drive]);
    let mut bench = common::ringdisk();
    bench.args(["bench", "--time", "60", "--socket", path_str(&socket)]);
    let bench = bench.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let ctl = |call: &[&str]| run_ok(&[&["ctl", "--control", path_str(&control)], call].concat());
    let deadline = std::time::Instant::now() + common::PATIENCE;
    let requests = || {
        serde_json::from_str::<Value>(&ctl(&["stats", "--output=json"])).unwrap()["disks"][0]["latency"]
            .as_array()
            .map(Vec::len)
    };
    while requests() == Some(0) {
        assert!(std::time::Instant::now() < deadline, "nothing is measured");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    ctl(&["remove", "a", "--force"]);
    let output = bench.wait_with_output().unwrap();
    let (told, said) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{told}{said}");
    assert!(told.contains("the server ended the connection: the figures") && !told.contains("interrupted"), "{told}");
    assert!(said.contains("the server ended the connection"), "{said}");
    server.stop();
}

/// Whether a write to a file's page cache is known to end in the system call that many writes share.
fn writes_end_in_one_call(directory: &std::path::Path) -> bool {
    let words = std::process::Command::new("stat").args(["-f", "-c", "%T"]).arg(directory).output().unwrap();
    ["ext2/ext3", "xfs", "btrfs", "f2fs", "tmpfs"].contains(&String::from_utf8_lossy(&words.stdout).trim())
}

#[test]
fn writes_to_the_page_cache_take_one_call_a_batch() {
    let dir = directory();
    if !writes_end_in_one_call(dir.path()) {
        eprintln!("skipped: on this file system each write is a call");
        return;
    }
    let raw = at(&dir, "disk.raw");
    std::fs::write(&raw, vec![7; 4 << 20]).unwrap();
    let served = format!("serve:file={},format=raw", raw.display());
    let sides = ["--compare", &served, &served];
    let load = ["--rw", "randwrite", "--destroy", "--pairs", "3", "--count", "4000", "--depths", "1,32,128"];
    let report = json(&[&sides[..], &load].concat());
    for depth in report["depths"].as_array().unwrap() {
        let figure = |name: &str| per_request(depth, 0, name);
        let (batches, turns) = (figure("server_batches"), figure("server_batches") + figure("server_harvests"));
        // A worker thread writes, or the reactor if the file system takes writes that must not wait.
        let calls = figure("server_worker_calls") + figure("server_system_calls");
        assert!(calls <= turns && figure("server_worker_calls") <= batches * 1.1, "{depth}");
        assert!(depth["queue_depth"] == 1 || batches <= 0.5, "{depth}");
    }
}

#[test]
fn a_server_spins_no_longer_than_its_drive_says() {
    // A millisecond each: too long for the default.
    let drive = |poll: &str| format!("serve:format=null,size=4M,delay-ms=1,poll-max-us={poll}");
    let (never, always) = (drive("0"), drive("1000000"));
    let report = json(&["--compare", &never, &always, "--pairs", "3", "--count", "300", "--depths", "1"]);
    let sleeps = |side: usize| {
        let figures = &report["depths"][0]["sides"][side]["figures"];
        figures["server_sleeps_per_request"]["median"].as_f64().unwrap_or_else(|| panic!("{figures}"))
    };
    assert!(sleeps(0) >= 0.9 && sleeps(1) <= 0.1, "{} and {}", sleeps(0), sleeps(1));
}

#[test]
fn a_served_image_tells_how_often_its_tables_in_memory_were_enough() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    run_ok(&["create", "-f", "qcow2", path_str(&image), "64M"]);
    let served = format!("serve:file={},format=qcow2", image.display());
    let report =
        json(&["--compare", &served, NULL, "--pairs", "1", "--count", "2000", "--depths", "8", "--rw", "randread"]);
    let figures = &report["depths"][0]["sides"][0]["figures"];
    let figure = |name: &str| figures[name]["median"].as_f64().unwrap_or_else(|| panic!("{name}: {figures}"));
    assert!(figure("table_hits_per_request") >= 0.9 && figure("table_misses_per_request") < 0.1, "{figures}");
}

#[test]
fn a_client_that_never_looks_is_woken_for_each_end_and_one_that_looks_long_enough_is_not() {
    let late = "format=null,size=1M,delay-ms=1";
    let wakeups = |poll_max_us: &str| {
        let report = json(&["--serve", late, "--count", "200", "--depth", "1", "--poll-max-us", poll_max_us]);
        let counters = report["counters"].as_array().unwrap().clone();
        counters.iter().find(|counter| counter["name"] == "wakeups").unwrap()["total"].as_u64().unwrap()
    };
    let (sleeps, looks) = (wakeups("0"), wakeups("1000000"));
    assert!(sleeps >= 150 && looks <= 20, "{sleeps} and {looks} of 200");
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_is() {
    for (arguments, part) in [
        (&["--compare", NULL] as &[&str], "2 "),
        (&["--compare", NULL, "format=null,size=1M"], "drive:OPTIONS"),
        (&["--compare", NULL, "drive:format=null"], "size=4G"),
        (&["--compare", "x=host:a", "x=host:b"], "'x'"),
        (&["--compare", NULL, NULL, "--drive", "format=null,size=1M"], "cannot be used"),
        (&["--compare", NULL, NULL, "--server-pid", "1"], "A:1"),
        (&["--compare", NULL, NULL, "--server-pid", "C:1"], "there are A, B"),
        (&["--compare", NULL, NULL, "--server-pid", "A:x"], "not a process id"),
        (&["--drive", "format=null,size=1M", "--server-pid", "4194305"], "no such process"),
        (&["--drive", "format=null,size=1M", "--pairs", "3"], "--compare"),
        (&["--serve", "format=null,size=1M,queues=1", "--queues", "2"], "queues=1"),
        (&["--drive", "format=null,size=1M", "--depths", "1,0"], "0"),
        (&["--drive", "format=null,size=1M", "--depths", "1", "--depth", "1"], "cannot be used"),
        (&["--drive", "format=null,size=1M", "--plot", "out.png"], ".svg"),
        (&["--drive", "format=null,size=1M", "--plot", "/nonexistent/out.svg"], "/nonexistent"),
    ] {
        let said = run_fails(2, &[&["bench"], arguments].concat());
        assert!(said.contains(part), "{arguments:?}: '{part}' is missing in: {said}");
    }
    let said = run_fails(1, &["bench", "--compare", NULL, "host:/nonexistent/x", "--pairs", "1", "--count", "9"]);
    assert!(said.contains("/nonexistent/x"), "{said}");
    assert!(run_ok(&["bench", "--compare", "drive:cache=?", NULL]).contains("writethrough"));
}

#[test]
fn maps_read_and_write_what_requests_do_and_are_counted() {
    let image = directory();
    let raw = at(&image, "disk.raw");
    std::fs::write(&raw, vec![7; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,snapshot=on", raw.display());
    let load = ["--rw", "randrw", "--bs", "4k", "--depth", "4", "--count", "4000", "--verify"];
    let requests = json(&[&["--drive", &drive], &load[..]].concat());
    assert!(requests["by_maps"].is_null() && requests["mismatches"] == 0, "{requests}");
    let maps = json(&[&["--drive", &drive, "--maps"], &load[..]].concat());
    let by_maps = maps["by_maps"].as_u64().unwrap();
    assert!(maps["errors"] == 0 && maps["mismatches"] == 0 && maps["requests"] == 4000, "{maps}");
    assert!((1..=4000).contains(&by_maps), "{maps}");
    run_fails(2, &["bench", "--socket", path_str(&raw), "--maps"]);
    assert!(std::fs::read(&raw).unwrap() == vec![7; 1 << 20]);
}

#[test]
fn a_series_has_every_request_in_the_ten_milliseconds_in_which_it_completed() {
    let directory = directory();
    let series = at(&directory, "series.jsonl");
    let load = ["--drive", "format=null,size=1M", "--count", "5000", "--queues", "2", "--series", path_str(&series)];
    let report = json(&load);
    let text = std::fs::read_to_string(&series).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let first = lines.next().unwrap();
    assert!(first["begun_us"].as_u64() > Some(1_500_000_000_000_000) && first["width_ms"] == 10, "{first}");
    let (mut requests, mut longest) = (0, 0.0_f64);
    for (index, line) in lines.enumerate() {
        assert_eq!(line["start_ms"].as_f64(), Some(index as f64 * 10.0));
        let figure = |name: &str| line[name].as_f64().unwrap();
        assert!(figure("p50_us") <= figure("p99_us") && figure("p99_us") <= figure("max_us"), "{line}");
        requests += line["requests"].as_u64().unwrap();
        longest = longest.max(figure("max_us"));
    }
    assert_eq!(requests, 5000);
    let max_us = report["latency_us"]["max"].as_f64().unwrap();
    assert!((longest / max_us - 1.0).abs() < 0.05, "{longest}, {max_us}");
    let refused = run_fails(2, &["bench", "--compare", NULL, NULL, "--series", path_str(&series)]);
    assert!(refused.contains("--series"), "{refused}");
}
