//! A daemon that is killed at any moment of the calls that change what it serves.
//!
//! A few moments by default; `RINGDISK_KILL9_MOMENTS=50` for more, `RINGDISK_KILL9_SEED` for others.

use super::{Daemon, common};
use common::{PATIENCE, assert_valid, at, directory, has_tool, kill9_moments, path_str, run, run_ok};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use testkit::Dice;

/// Two disks of one group, one with limits of its own, and one of the configuration file.
const DISKS: [&str; 4] = ["d0", "d1", "d2", "configured"];
const GROUP: &str = "throttle:group=g";
const CONFIGURED: usize = 3;
const SIZE: u64 = 16 << 20;
/// The longest time from the first call to the kill.
const LONGEST_MS: u64 = 1500;
/// The number of an export when nobody can be asked.
const NO_EXPORT: &str = "4294967295";
const CACHES: [&str; 3] = ["none", "writeback", "writethrough"];

/// What a disk is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Served {
    file: PathBuf,
    size_bytes: u64,
    /// All options but the names of files.
    options: BTreeMap<String, Value>,
    /// The sockets of its exports.
    exports: BTreeSet<PathBuf>,
}

impl Served {
    fn of(disk: &Value) -> Self {
        let mut options: BTreeMap<String, Value> = serde_json::from_value(disk["options"].clone()).unwrap();
        options.retain(|key, _| !["file", "format", "name", "socket"].contains(&key.as_str()));
        let exports = disk["exports"].as_array().unwrap().iter();
        Self {
            file: disk["file"].as_str().unwrap().into(),
            size_bytes: disk["size_bytes"].as_u64().unwrap(),
            options,
            exports: exports.map(|export| export["socket"].as_str().unwrap().into()).collect(),
        }
    }

    fn set(&mut self, key: &str, value: &str) {
        self.options.insert(key.to_owned(), value.into());
    }
}

/// What all disks are to be.
type Disks = Vec<Option<Served>>;

/// Changes of disks, chosen by a seed.
struct Script<'a> {
    dir: &'a Path,
    control: &'a Path,
    dice: Dice,
    made: u32,
    /// The layers of each disk below its top.
    below: [Vec<PathBuf>; DISKS.len()],
    /// The sizes of images that are not served.
    sizes: [u64; DISKS.len()],
    serial: u32,
}

/// A call, and what it makes of the disks and their lower layers.
struct Call {
    words: Vec<String>,
    disks: Disks,
    below: Option<(usize, Vec<PathBuf>)>,
}

/// Whether no reload brings the export back.
fn is_of_a_call(socket: &Path) -> bool {
    socket.extension().is_none()
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Script<'_> {
    fn new_path(&mut self, kind: &str) -> PathBuf {
        self.made += 1;
        self.dir.join(format!("{kind}{}", self.made))
    }

    fn image(&self, which: usize) -> PathBuf {
        self.dir.join(format!("{}.qcow2", DISKS[which]))
    }

    fn configuration(&self, cache: &str) -> String {
        format!(
            "[[drive]]\nname = 'configured'\nfile = '{}'\ncache = '{cache}'\nserial = '{}'\n",
            self.image(CONFIGURED).display(),
            self.serial
        )
    }

    /// The configured disk, with the words of its configuration.
    fn configured(&self, cache: &str, layered: Option<Served>) -> Served {
        let (file, socket) = (self.image(CONFIGURED), self.dir.join("configured.qcow2.sock"));
        let mut served = layered.unwrap_or_else(|| Served {
            file,
            size_bytes: SIZE,
            options: BTreeMap::new(),
            exports: [socket].into(),
        });
        served.options.clear();
        served.set("cache", cache);
        served.set("serial", &self.serial.to_string());
        served
    }

    /// Adds a disk that is not there.
    fn add(&mut self, which: usize, mut disks: Disks) -> Call {
        let (file, socket) = (self.image(which), self.new_path("s"));
        let filter = if which < 2 { GROUP } else { "throttle" };
        let (file, size_bytes) = (self.below[which].first().cloned().unwrap_or(file), self.sizes[which]);
        let mut disk = Served { file, size_bytes, options: BTreeMap::new(), exports: [socket].into() };
        [("filter", filter), ("on-error", "hold")].into_iter().for_each(|(key, value)| disk.set(key, value));
        let (name, socket) = (DISKS[which], disk.exports.first().unwrap().display());
        let drive = format!("file={},name={name},filter={filter},on-error=hold,socket={socket}", disk.file.display());
        let words = words(&["add", &drive]);
        disks[which] = Some(disk);
        Call { words, disks, below: Some((which, Vec::new())) }
    }

    fn next(&mut self, now: &Disks) -> Call {
        let which = self.dice.below(DISKS.len() as u64) as usize;
        let (name, mut disks) = (DISKS[which], now.clone());
        let Some(disk) = &mut disks[which] else { return self.add(which, disks) };
        let mut below = None;
        let words = match self.dice.below(10) {
            0 if which != CONFIGURED => {
                // Its image is as large as the lowest layer.
                disks[which] = None;
                words(&["remove", name, "--force"])
            }
            0 | 1 => {
                let cache = CACHES[self.dice.below(3) as usize];
                self.serial += self.dice.below(2) as u32;
                std::fs::write(self.dir.join("disks.toml"), self.configuration(cache)).unwrap();
                disks[CONFIGURED] = Some(self.configured(cache, now[CONFIGURED].clone()));
                words(&["reload"])
            }
            2 | 3 => {
                let file = self.new_path("o");
                let mut layers = self.below[which].clone();
                layers.push(disk.file.clone());
                below = Some((which, layers));
                disk.file.clone_from(&file);
                words(&["snapshot", name, path_str(&file)])
            }
            4 if !self.below[which].is_empty() => {
                let mut layers = self.below[which].clone();
                disk.file = layers.pop().unwrap();
                below = Some((which, layers));
                words(&["commit", name])
            }
            5 if which != CONFIGURED => {
                let cache = CACHES[self.dice.below(3) as usize];
                disk.set("cache", cache);
                words(&["set", name, &format!("cache={cache}")])
            }
            6 if which != CONFIGURED => {
                let policy = ["hold", "report"][self.dice.below(2) as usize];
                disk.set("on-error", policy);
                words(&["set", name, &format!("on-error={policy}")])
            }
            7 if which != CONFIGURED => {
                let limit = 100_000 + self.dice.below(1000);
                let (others, group) = if which < 2 { (0..2, ":group=g") } else { (which..which + 1, "") };
                let filter = format!("throttle:iops-total={limit}{group}");
                disks[others].iter_mut().flatten().for_each(|disk| disk.set("filter", &filter));
                words(&["set", name, &format!("throttling.iops-total={limit}")])
            }
            8 if disk.exports.iter().any(|socket| is_of_a_call(socket)) => {
                let socket = disk.exports.iter().find(|socket| is_of_a_call(socket)).unwrap().clone();
                disk.exports.remove(&socket);
                words(&["unexport", &self.number_of(&socket)])
            }
            8 | 9 => {
                let socket = self.new_path("s");
                disk.exports.insert(socket.clone());
                words(&["export", name, "--socket", path_str(&socket)])
            }
            _ => {
                disk.size_bytes += 1 << 20;
                words(&["resize", name, &disk.size_bytes.to_string()])
            }
        };
        Call { words, disks, below }
    }

    /// The number of the export at a socket. None has it once the daemon is gone.
    fn number_of(&self, socket: &Path) -> String {
        let output = run(&["ctl", "--control", path_str(self.control), "exports", "--output=json"]);
        if !output.status.success() {
            return NO_EXPORT.to_owned();
        }
        let exports: Value = serde_json::from_slice(&output.stdout).unwrap();
        let mut exports = exports["exports"].as_array().unwrap().iter();
        exports.find(|export| export["socket"] == path_str(socket)).expect("the export is listed")["id"].to_string()
    }

    fn is_done(&mut self, call: Call, before: &Disks) -> Disks {
        if let Some((which, below)) = call.below {
            self.below[which] = below;
        }
        for (which, gone) in before.iter().enumerate() {
            if let (Some(gone), None) = (gone, &call.disks[which]) {
                // Added anew, it begins with the layer that it had on top.
                self.sizes[which] = gone.size_bytes;
                self.below[which] = vec![gone.file.clone()];
            }
        }
        call.disks
    }
}

fn listed(control: &Path) -> Value {
    let list = run_ok(&["ctl", "--control", path_str(control), "list", "--output=json"]);
    serde_json::from_str(&list).unwrap()
}

fn found(list: &Value) -> Disks {
    let disks = list["disks"].as_array().unwrap();
    let found = |name: &&str| disks.iter().find(|disk| disk["name"] == **name).map(Served::of);
    DISKS.iter().map(found).collect()
}

/// Calls until the daemon is gone. Returns what it has answered, and what the last call, which it has not, would have
/// made.
fn calls_until_the_end(script: &mut Script<'_>, first: Disks) -> (Disks, Disks, Vec<String>) {
    let (mut disks, deadline) = (first, Instant::now() + PATIENCE);
    loop {
        assert!(Instant::now() < deadline, "the daemon does not die");
        let call = script.next(&disks);
        let arguments: Vec<&str> = call.words.iter().map(String::as_str).collect();
        let control = path_str(script.control).to_owned();
        let output = run(&[&["ctl", "--control", &control, "--output=json"], &arguments[..]].concat());
        if !output.status.success() {
            let said = common::text(&output.stderr);
            // If the daemon was gone when exports were asked for, the call names none of them.
            let had_no_list = call.words.iter().any(|word| word == NO_EXPORT) && said.contains("no export");
            let is_gone = ["cannot reach", "does not answer", "ended before it answered", "the daemon ended"]
                .iter()
                .any(|word| said.contains(word));
            assert!(is_gone || had_no_list, "{:?} fails: {said}", call.words);
            return (disks, call.disks, call.words);
        }
        disks = script.is_done(call, &disks);
    }
}

#[test]
fn killed_at_any_moment_the_record_and_the_answers_agree() {
    if !has_tool("qemu-img") {
        return;
    }
    let first = std::env::var("RINGDISK_KILL9_SEED").map_or(1, |value| value.parse().expect("a number"));
    for seed in first..first + kill9_moments(4) {
        let dir = directory();
        for disk in DISKS {
            run_ok(&["create", "-q", "-f", "qcow2", path_str(&at(&dir, &format!("{disk}.qcow2"))), &SIZE.to_string()]);
        }
        let (state, config, control) = (at(&dir, "state"), at(&dir, "disks.toml"), at(&dir, "control"));
        let path = dir.path().to_owned();
        let mut script = Script {
            dir: &path,
            control: &control,
            dice: Dice::new(seed),
            made: 0,
            below: Default::default(),
            sizes: [SIZE; DISKS.len()],
            serial: 0,
        };
        std::fs::write(&config, script.configuration("none")).unwrap();
        let mut disks: Disks = vec![None; DISKS.len()];
        disks[CONFIGURED] = Some(script.configured("none", None));
        let more = ["--state-dir", path_str(&state), "--config", path_str(&config)];
        let Daemon { dir, server, .. } = Daemon::start_in(dir, &more);
        let moment = Duration::from_millis(script.dice.below(LONGEST_MS));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(moment);
            server.kill();
        });
        let (disks, open, call) = calls_until_the_end(&mut script, disks);
        killer.join().unwrap();
        let daemon = Daemon::start_in(dir, &more);
        let list = listed(&control);
        assert_eq!(list["failed"], serde_json::json!([]), "seed {seed}: {disks:?}, then {call:?}");
        let found = found(&list);
        // The last call was in flight: it has happened or not.
        let agrees = found == disks || found == open;
        assert!(agrees, "seed {seed}: the disks are {found:#?}\nnot {disks:#?}\nnor, by {call:?}, {open:#?}");
        if let (true, [verb, _, file]) = (found == disks, &call[..])
            && verb == "snapshot"
        {
            assert!(!Path::new(file).exists(), "seed {seed}: '{file}' was made, and is no layer");
        }
        let files: Vec<PathBuf> = found.into_iter().flatten().map(|disk| disk.file).collect();
        let _files = daemon.end();
        files.iter().for_each(|file| assert_valid(file, true));
    }
}
