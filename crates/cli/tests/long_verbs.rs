//! Every verb that may take long: its progress only rises and ends at the total; broken off at any moment it leaves
//! images valid and sources as they were; run again it finishes.
//!
//! A few moments a verb by default; `RINGDISK_VERB_MOMENTS=10` for more.

mod common;

use common::{assert_valid, directory, has_tool, ringdisk, text};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Instant;
use testkit::{Dice, fill_seeded};

const DISK_BYTES: usize = 8 << 20;
/// How often each verb is broken off.
const DEFAULT_MOMENTS: u64 = 4;
const SIGINT: i32 = 2;

/// A verb on images of its own.
struct Verb {
    /// In the directory of the images.
    line: &'static [&'static str],
    /// Makes the images.
    prepare: fn(&Path),
    /// Whether they name each other by whole paths, and so are made in each place anew.
    stay: bool,
    /// What the verb makes and does not overwrite.
    makes: &'static [&'static str],
    /// Images that stay byte for byte.
    sources: &'static [&'static str],
    /// qcow2 images that are valid at any time, if they are there.
    valid: &'static [&'static str],
    /// Images, and the raw file whose bytes they show at any time.
    always: &'static [(&'static str, &'static str)],
    /// The same for the end.
    at_end: &'static [(&'static str, &'static str)],
}

/// Bytes that differ by `seed`, with zeros between them.
fn raw_disk(path: &Path, seed: u64) {
    let mut bytes = vec![0; DISK_BYTES];
    for (index, chunk) in bytes.chunks_mut(1 << 20).enumerate().filter(|(index, _)| index % 3 < 2) {
        fill_seeded(seed + index as u64, chunk);
    }
    std::fs::write(path, bytes).unwrap();
}

fn in_directory(directory: &Path, line: &[&str]) -> Output {
    ringdisk().current_dir(directory).args(line).output().unwrap()
}

fn in_directory_ok(directory: &Path, line: &[&str]) {
    let output = in_directory(directory, line);
    assert!(output.status.success(), "{line:?}: {}{}", text(&output.stdout), text(&output.stderr));
}

/// `a.raw`, and `base.qcow2` that shows it.
fn one_image(directory: &Path) {
    raw_disk(&directory.join("a.raw"), 1);
    in_directory_ok(directory, &["convert", "-O", "qcow2", "a.raw", "base.qcow2"]);
}

/// Also `b.raw`, `top.qcow2` over the base that shows it, and `other.qcow2` that shows something else.
fn chain(directory: &Path) {
    one_image(directory);
    raw_disk(&directory.join("b.raw"), 100);
    raw_disk(&directory.join("c.raw"), 200);
    in_directory_ok(directory, &["convert", "-O", "qcow2", "c.raw", "other.qcow2"]);
    in_directory_ok(directory, &["convert", "-O", "qcow2", "-B", "base.qcow2", "-F", "qcow2", "b.raw", "top.qcow2"]);
}

/// The base has clusters that count as used and belong to nothing.
fn leaks(directory: &Path) {
    one_image(directory);
    let path = directory.join("base.qcow2");
    let mut bytes = std::fs::read(&path).unwrap();
    let number = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let table = number(&bytes, 48);
    let block = number(&bytes, table);
    let cluster = 1 << u32::from_be_bytes(bytes[20..24].try_into().unwrap());
    let first = bytes.len().div_ceil(cluster);
    for entry in first..first + 64 {
        bytes[block + 2 * entry..][..2].copy_from_slice(&1_u16.to_be_bytes());
    }
    bytes.resize((first + 64) * cluster, 0);
    std::fs::write(path, bytes).unwrap();
}

/// The base has a snapshot `one` of what it shows, and then shows `b.raw`.
fn snapshot(directory: &Path) {
    chain(directory);
    in_directory_ok(directory, &["snapshot", "-c", "one", "base.qcow2"]);
    in_directory_ok(directory, &["convert", "-n", "-O", "qcow2", "b.raw", "base.qcow2"]);
}

/// The base has a bitmap `one` with bits, and an empty one, `two`.
fn bitmaps(directory: &Path) {
    chain(directory);
    in_directory_ok(directory, &["bitmap", "--add", "base.qcow2", "one"]);
    in_directory_ok(directory, &["convert", "-n", "-O", "qcow2", "b.raw", "base.qcow2"]);
    in_directory_ok(directory, &["bitmap", "--add", "base.qcow2", "two"]);
}

/// `saved`, a machine's state with the bytes of `a.raw`.
fn state(directory: &Path) {
    raw_disk(&directory.join("a.raw"), 1);
    let mut stream = std::fs::File::open(directory.join("a.raw")).unwrap();
    save::StateFile::write(&directory.join("saved"), &mut stream, &mut |_| Ok(())).unwrap();
}

/// `a.raw`, and a kept scratch overlay over it that shows `b.raw`.
fn kept(directory: &Path) {
    raw_disk(&directory.join("a.raw"), 1);
    let drive = "name=disk,file=a.raw,format=raw,snapshot=on,keep=.";
    let load = ["--rw", "randwrite", "--bs", "16k", "--count", "300"];
    in_directory_ok(directory, &[&["bench", "--drive", drive][..], &load].concat());
    in_directory_ok(directory, &["convert", "-O", "raw", "disk.scratch", "b.raw"]);
}

/// `log`, of writes to `a.raw` that made it what `b.raw` shows.
fn write_log(directory: &Path) {
    raw_disk(&directory.join("a.raw"), 1);
    std::fs::copy(directory.join("a.raw"), directory.join("b.raw")).unwrap();
    let drive = "file=b.raw,format=raw,filter=log:file=log";
    let load = ["--rw", "randwrite", "--bs", "16k", "--count", "300", "--destroy"];
    in_directory_ok(directory, &[&["bench", "--drive", drive][..], &load].concat());
}

const ONE: &[(&str, &str)] = &[("base.qcow2", "a.raw")];

const CONVERT: Verb = Verb {
    line: &["convert", "-O", "qcow2", "base.qcow2", "new.qcow2"],
    prepare: one_image,
    stay: false,
    makes: &[],
    sources: &["base.qcow2"],
    valid: &["new.qcow2"],
    always: ONE,
    at_end: &[("new.qcow2", "a.raw")],
};

const DD: Verb = Verb { line: &["dd", "-O", "qcow2", "bs=64k", "if=base.qcow2", "of=new.qcow2"], ..CONVERT };

const COMMIT: Verb = Verb {
    line: &["commit", "top.qcow2"],
    prepare: chain,
    stay: false,
    makes: &[],
    sources: &["other.qcow2"],
    valid: &["top.qcow2", "base.qcow2"],
    always: &[("top.qcow2", "b.raw")],
    at_end: &[("base.qcow2", "b.raw")],
};

const REBASE: Verb = Verb {
    line: &["rebase", "-b", "other.qcow2", "-F", "qcow2", "top.qcow2"],
    prepare: chain,
    stay: false,
    makes: &[],
    sources: &["base.qcow2", "other.qcow2"],
    valid: &["top.qcow2"],
    always: &[("top.qcow2", "b.raw")],
    at_end: &[],
};

const FLATTEN: Verb = Verb { line: &["rebase", "-b", "", "top.qcow2"], ..REBASE };

const CHECK: Verb = Verb {
    line: &["check", "-r", "all", "base.qcow2"],
    prepare: leaks,
    stay: false,
    makes: &[],
    sources: &["a.raw"],
    valid: &["base.qcow2"],
    always: ONE,
    at_end: ONE,
};

const AMEND: Verb = Verb { line: &["amend", "-o", "refcount_bits=64", "base.qcow2"], prepare: one_image, ..CHECK };

const RESIZE: Verb =
    Verb { line: &["resize", "--preallocation=full", "base.qcow2", "40M"], always: &[], at_end: &[], ..AMEND };

const APPLY: Verb = Verb {
    line: &["snapshot", "-a", "one", "base.qcow2"],
    prepare: snapshot,
    stay: false,
    makes: &[],
    sources: &["top.qcow2", "other.qcow2"],
    valid: &["base.qcow2"],
    always: &[],
    at_end: ONE,
};

const COMPARE: Verb = Verb {
    line: &["compare", "a.raw", "base.qcow2"],
    prepare: one_image,
    stay: false,
    makes: &[],
    sources: &["a.raw", "base.qcow2"],
    valid: &[],
    always: &[],
    at_end: &[],
};

const MEASURE: Verb = Verb { line: &["measure", "-O", "qcow2", "base.qcow2"], ..COMPARE };

const MAP: Verb = Verb { line: &["map", "base.qcow2"], ..COMPARE };

const CREATE: Verb = Verb {
    line: &["create", "-q", "-f", "qcow2", "-o", "preallocation=full", "new.qcow2", "40M"],
    at_end: &[],
    ..CONVERT
};

const BITMAP: Verb = Verb {
    line: &["bitmap", "--merge", "one", "base.qcow2", "two"],
    prepare: bitmaps,
    always: &[("base.qcow2", "b.raw")],
    at_end: &[],
    ..CHECK
};

const STATE_CHECK: Verb = Verb { line: &["state", "check", "saved"], prepare: state, sources: &["saved"], ..COMPARE };

const STATE_EXTRACT: Verb = Verb {
    line: &["state", "extract", "saved", "stream"],
    makes: &["stream"],
    at_end: &[("stream", "a.raw")],
    ..STATE_CHECK
};

const COMMIT_KEPT: Verb = Verb {
    line: &["commit", "disk.scratch"],
    prepare: kept,
    stay: true,
    sources: &[],
    valid: &[],
    always: &[("disk.scratch", "b.raw")],
    at_end: &[("a.raw", "b.raw")],
    ..COMMIT
};

const CONVERT_KEPT: Verb = Verb {
    line: &["convert", "-O", "qcow2", "disk.scratch", "new.qcow2"],
    prepare: kept,
    stay: true,
    sources: &[],
    always: &[("disk.scratch", "b.raw")],
    at_end: &[("new.qcow2", "b.raw")],
    ..CONVERT
};

const REPLAY: Verb = Verb {
    line: &["replay", "-f", "raw", "log", "a.raw"],
    prepare: write_log,
    sources: &["log", "b.raw"],
    valid: &[],
    always: &[],
    at_end: &[("a.raw", "b.raw")],
    ..CONVERT
};

/// Jobs of running disks, which `live_jobs.rs` interrupts.
const LIVE: &[&str] = &["commit", "mirror", "stream", "rebase", "compact", "backup"];

/// Verbs that are not broken off here.
const NOT_HERE: &[(&str, &str)] = &[
    ("help", "prints a text"),
    ("info", "reads headers"),
    ("serve", "runs until it is told to end"),
    ("nbd", "runs until it is told to end"),
    ("try", "changes no file of the user"),
    ("bench", "measures, and its writes are its purpose"),
    ("img-compat", "prints a table"),
    ("save", "tests/save/interrupted.rs: at each of its steps"),
    ("restore", "tests/save/interrupted.rs: at each of its steps"),
];

/// Verbs of `ctl` that make one call, which the daemon carries out whatever becomes of the program.
const CALLS: &[&str] = &[
    "help",
    "list",
    "show",
    "add",
    "remove",
    "resize",
    "reopen",
    "set",
    "snapshot",
    "bitmap",
    "snapshot-list",
    "snapshot-create",
    "snapshot-delete",
    "snapshot-apply",
    "exports",
    "export",
    "unexport",
    "jobs",
    "pause",
    "resume",
    "limit",
    "cancel",
    "stats",
    "top",
    "watch",
    "metrics",
    "reload",
    "shutdown",
];

/// The verbs that the help of these words lists.
fn verbs_of(words: &[&str]) -> Vec<String> {
    let output = ringdisk().args(words).arg("--help").output().unwrap();
    let help = text(&output.stdout);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    let names: Vec<String> = names.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect();
    assert!(!names.is_empty(), "{words:?} has no verbs: {help}");
    names
}

/// Copies all files of a directory.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// Puts the verb's images into a directory.
fn fill(verb: &Verb, golden: &Path, target: &Path) {
    match verb.stay {
        true => (verb.prepare)(target),
        false => copy(golden, target),
    }
}

fn shows(directory: &Path, pairs: &[(&str, &str)], when: &str) {
    for (image, raw) in pairs {
        let output = in_directory(directory, &["compare", image, raw]);
        assert!(output.status.success(), "{image} {when}: {}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// Checks the lines of progress that a run wrote.
fn assert_rises(line: &[&str], said: &str) {
    let reports: Vec<serde_json::Value> =
        said.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect();
    let figure = |report: &serde_json::Value, name: &str| report[name].as_u64().unwrap();
    let pairs: Vec<_> =
        reports.iter().map(|report| (figure(report, "done-bytes"), figure(report, "total-bytes"))).collect();
    assert!(!pairs.is_empty(), "{line:?} reports no progress: {said}");
    assert!(pairs.is_sorted_by_key(|(done, _)| *done), "{line:?} goes back: {pairs:?}");
    let fraction = |pair: &(u64, u64)| pair.0 as f64 / (pair.1 as f64).max(1.0);
    assert!(pairs.is_sorted_by(|first, second| fraction(first) <= fraction(second)), "{line:?} goes back: {pairs:?}");
    let (done, total) = pairs[pairs.len() - 1];
    assert_eq!(done, total, "{line:?} does not end at its total: {pairs:?}");
}

/// Runs the verb, interrupted after a while, and returns how it ended.
fn run_until(directory: &Path, line: &[&str], microseconds: u64) -> std::process::ExitStatus {
    let mut child =
        ringdisk().current_dir(directory).args(line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_micros(microseconds));
    // It may have ended: then there is nobody to interrupt, but its number is not given to another before the wait.
    let _ = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).output().unwrap();
    child.wait().unwrap()
}

fn files(directory: &Path, names: &[&str]) -> Vec<Vec<u8>> {
    names.iter().map(|name| std::fs::read(directory.join(name)).unwrap()).collect()
}

fn is_stoppable_and_tells_how_far_it_is(verb: &Verb) {
    if !has_tool("qemu-img") {
        return;
    }
    let asked = std::env::var("RINGDISK_VERB_MOMENTS");
    let moments = asked.map_or(DEFAULT_MOMENTS, |number| number.parse().expect("a number"));
    let golden = directory();
    (verb.prepare)(golden.path());
    let sources = files(golden.path(), verb.sources);
    let whole = directory();
    fill(verb, golden.path(), whole.path());
    let began = Instant::now();
    let watched = [verb.line, &["--progress=json"][..]].concat();
    let output = in_directory(whole.path(), &watched);
    let took = began.elapsed();
    assert!(output.status.success(), "{:?}: {}", verb.line, text(&output.stderr));
    assert_rises(verb.line, &text(&output.stderr));
    shows(whole.path(), verb.at_end, "at its end");
    let mut dice = Dice::new(7);
    for moment in 0..moments {
        let place = directory();
        fill(verb, golden.path(), place.path());
        let after = dice.below(took.as_micros() as u64 + 1);
        let ended = run_until(place.path(), verb.line, after);
        let when = format!("after {:?} was interrupted (moment {moment}: {ended})", verb.line);
        assert!(ended.success() || ended.signal() == Some(SIGINT), "{when}");
        assert!(files(place.path(), verb.sources) == sources, "sources {when}");
        for image in verb.valid.iter().map(|name| place.path().join(name)).filter(|path| path.exists()) {
            assert_valid(&image, true);
        }
        shows(place.path(), verb.always, &when);
        for made in verb.makes {
            let _ = std::fs::remove_file(place.path().join(made));
        }
        in_directory_ok(place.path(), verb.line);
        shows(place.path(), verb.at_end, &format!("again {when}"));
        assert!(files(place.path(), verb.sources) == sources, "sources of the second run {when}");
    }
}

macro_rules! each {
    ($($name:ident: $verb:ident,)*) => {
        const VERBS: &[&Verb] = &[$(&$verb),*];

        $(#[test]
        fn $name() {
            is_stoppable_and_tells_how_far_it_is(&$verb);
        })*
    };
}

each! {
    convert_can_be_stopped_at_any_moment_and_run_again: CONVERT,
    dd_can_be_stopped_at_any_moment_and_run_again: DD,
    commit_can_be_stopped_at_any_moment_and_run_again: COMMIT,
    rebase_can_be_stopped_at_any_moment_and_run_again: REBASE,
    rebase_onto_nothing_can_be_stopped_at_any_moment_and_run_again: FLATTEN,
    check_can_be_stopped_at_any_moment_and_run_again: CHECK,
    amend_can_be_stopped_at_any_moment_and_run_again: AMEND,
    resize_can_be_stopped_at_any_moment_and_run_again: RESIZE,
    snapshot_can_be_stopped_at_any_moment_and_run_again: APPLY,
    compare_can_be_stopped_at_any_moment_and_run_again: COMPARE,
    measure_can_be_stopped_at_any_moment_and_run_again: MEASURE,
    map_can_be_stopped_at_any_moment_and_run_again: MAP,
    create_can_be_stopped_at_any_moment_and_run_again: CREATE,
    bitmap_can_be_stopped_at_any_moment_and_run_again: BITMAP,
    state_check_can_be_stopped_at_any_moment_and_run_again: STATE_CHECK,
    state_extract_can_be_stopped_at_any_moment_and_run_again: STATE_EXTRACT,
    commit_of_a_kept_overlay_can_be_stopped_at_any_moment_and_run_again: COMMIT_KEPT,
    convert_of_a_kept_overlay_can_be_stopped_at_any_moment_and_run_again: CONVERT_KEPT,
    replay_can_be_stopped_at_any_moment_and_run_again: REPLAY,
}

/// Whoever adds a verb says here how it is broken off.
#[test]
fn every_verb_of_the_command_line_is_broken_off_somewhere_or_is_not_long() {
    let row = |words: &[&str]| VERBS.iter().any(|verb| verb.line.starts_with(words));
    for verb in verbs_of(&[]) {
        match verb.as_str() {
            "ctl" => {
                for call in verbs_of(&["ctl"]) {
                    let is_known = LIVE.contains(&&*call) ^ CALLS.contains(&&*call);
                    assert!(is_known, "'ctl {call}': a job belongs into LIVE and live_jobs.rs, a call into CALLS");
                }
            }
            "state" => {
                for part in verbs_of(&["state"]) {
                    assert!(part == "help" || row(&["state", &part]), "'state {part}' has no row");
                }
            }
            name => {
                let reason = NOT_HERE.iter().any(|(known, _)| *known == name);
                assert!(row(&[name]) ^ reason, "'{name}' needs a row, or a reason why it needs none");
            }
        }
    }
}
