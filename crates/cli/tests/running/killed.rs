//! A daemon that is killed at any moment of the calls that change what it serves.

use super::{Daemon, common};
use common::{assert_valid, at, directory, has_tool, path_str, run, run_ok};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DISKS: usize = 3;
const SIZE: u64 = 16 << 20;

/// What a disk is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Served {
    file: PathBuf,
    size_bytes: u64,
    cache: Option<&'static str>,
    exports: usize,
}

impl Served {
    fn of(disk: &Value) -> Self {
        let cache = disk["options"]["cache"].as_str();
        Self {
            file: disk["file"].as_str().unwrap().into(),
            size_bytes: disk["size_bytes"].as_u64().unwrap(),
            cache: cache.map(|cache| CACHES.into_iter().find(|known| *known == cache).expect("a known mode")),
            exports: disk["exports"].as_array().unwrap().len(),
        }
    }
}

const CACHES: [&str; 3] = ["none", "writeback", "writethrough"];

type Disks = Vec<Option<Served>>;

/// Changes of disks, chosen by a seed.
struct Script<'a> {
    dir: &'a Path,
    seed: u64,
    dice: u64,
    made: u32,
}

impl Script<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % bound
    }

    fn new_path(&mut self, kind: &str) -> PathBuf {
        self.made += 1;
        self.dir.join(format!("{kind}{}-{}", self.seed, self.made))
    }

    /// A call, and what the disk is when it is done.
    fn next(&mut self, which: usize, now: Option<&Served>) -> (Vec<String>, Option<Served>) {
        let (name, words) =
            (format!("d{which}"), |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect());
        let Some(now) = now else {
            let file = self.dir.join(format!("{name}.qcow2"));
            let call = words(&["add", &format!("file={},name={name}", file.display())]);
            // It may have grown before it was removed.
            return (call, Some(Served { size_bytes: 0, file, cache: None, exports: 1 }));
        };
        let now = now.clone();
        match self.below(6) {
            0 => (words(&["remove", &name, "--force"]), None),
            1 | 2 => {
                let file = self.new_path("o");
                (words(&["snapshot", &name, path_str(&file)]), Some(Served { file, ..now }))
            }
            3 => {
                let cache = CACHES[self.below(3) as usize];
                (words(&["set", &name, &format!("cache={cache}")]), Some(Served { cache: Some(cache), ..now }))
            }
            4 => {
                let size_bytes = now.size_bytes + (1 << 20);
                (words(&["resize", &name, &size_bytes.to_string()]), Some(Served { size_bytes, ..now }))
            }
            _ => {
                let socket = self.new_path("s");
                let call = words(&["export", &name, "--socket", path_str(&socket)]);
                (call, Some(Served { exports: now.exports + 1, ..now }))
            }
        }
    }
}

fn listed(control: &Path) -> Value {
    let list = run_ok(&["ctl", "--control", path_str(control), "list", "--output=json"]);
    serde_json::from_str(&list).unwrap()
}

fn found(list: &Value, which: usize) -> Option<Served> {
    let name = format!("d{which}");
    list["disks"].as_array().unwrap().iter().find(|disk| disk["name"] == name.as_str()).map(Served::of)
}

/// Calls until the daemon is gone. What it has answered, and what the last call, which it has not, would have made.
fn calls_until_the_end(control: &Path, script: &mut Script<'_>) -> (Disks, (usize, Option<Served>)) {
    let mut disks: Disks = vec![None; DISKS];
    loop {
        let which = script.below(DISKS as u64) as usize;
        let (call, mut next) = script.next(which, disks[which].as_ref());
        let call: Vec<&str> = call.iter().map(String::as_str).collect();
        let output = run(&[&["ctl", "--control", path_str(control), "--output=json"], &call[..]].concat());
        if !output.status.success() {
            return (disks, (which, next));
        }
        if let (Some(next), true) = (&mut next, call[0] == "add") {
            let added: Value = serde_json::from_slice(&output.stdout).unwrap();
            next.size_bytes = added["size_bytes"].as_u64().unwrap();
        }
        disks[which] = next;
    }
}

#[test]
fn killed_at_any_moment_the_record_and_the_answers_agree() {
    if !has_tool("qemu-img") {
        return;
    }
    let rounds = std::env::var("RINGDISK_KILL9_MOMENTS").map_or(4, |value| value.parse().expect("a number"));
    for seed in 1..=rounds {
        let dir = directory();
        for which in 0..DISKS {
            let image = at(&dir, &format!("d{which}.qcow2"));
            run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), &SIZE.to_string()]);
        }
        let state = at(&dir, "state");
        let more = ["--state-dir", path_str(&state)];
        let Daemon { dir, control, server } = Daemon::start_in(dir, &more);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(40 + seed * 97 % 700));
            server.kill();
        });
        let mut script = Script { dir: dir.path(), seed, dice: seed, made: 0 };
        let (disks, (which_open, open)) = calls_until_the_end(&control, &mut script);
        killer.join().unwrap();
        let daemon = Daemon::start_in(dir, &more);
        let list = listed(&control);
        assert_eq!(list["failed"], serde_json::json!([]), "seed {seed}: {disks:?}, then {open:?}");
        for (which, expected) in disks.iter().enumerate() {
            let found = found(&list, which);
            // The last call was in flight: it may have happened or not.
            let may_be = |open: &Option<Served>| match (open, &found) {
                // An added disk's size is its image's.
                (Some(open), Some(found)) => Served { size_bytes: found.size_bytes, ..open.clone() } == *found,
                (None, None) => true,
                _ => false,
            };
            let agrees = found == *expected || which == which_open && may_be(&open);
            assert!(agrees, "seed {seed}: d{which} is {found:?}, not {expected:?}; then d{which_open} to be {open:?}");
        }
        let files: Vec<PathBuf> = (0..DISKS).filter_map(|which| Some(found(&list, which)?.file)).collect();
        let _files = daemon.end();
        files.iter().for_each(|file| assert_valid(file, true));
    }
}
