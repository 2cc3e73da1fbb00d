//! Every verb that may take long: its progress only rises and ends at the total; broken off at any moment it leaves
//! images valid and sources as they were; run again it finishes.

mod common;

use common::{assert_valid, directory, has_tool, ringdisk, text};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Instant;
use testkit::{Dice, fill_seeded};

const DISK_BYTES: usize = 8 << 20;
/// How often each verb is broken off, each day and in the slow test.
const MOMENTS: usize = 2;
const MANY_MOMENTS: usize = 10;
const SIGINT: i32 = 2;

/// A verb on images of its own.
struct Verb {
    /// In the directory of the images.
    line: &'static [&'static str],
    /// Makes the images.
    prepare: fn(&Path),
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

const ONE: &[(&str, &str)] = &[("base.qcow2", "a.raw")];

const CONVERT: Verb = Verb {
    line: &["convert", "-O", "qcow2", "base.qcow2", "new.qcow2"],
    prepare: one_image,
    sources: &["base.qcow2"],
    valid: &["new.qcow2"],
    always: ONE,
    at_end: &[("new.qcow2", "a.raw")],
};

const DD: Verb = Verb { line: &["dd", "-O", "qcow2", "bs=64k", "if=base.qcow2", "of=new.qcow2"], ..CONVERT };

const COMMIT: Verb = Verb {
    line: &["commit", "top.qcow2"],
    prepare: chain,
    sources: &["other.qcow2"],
    valid: &["top.qcow2", "base.qcow2"],
    always: &[("top.qcow2", "b.raw")],
    at_end: &[("base.qcow2", "b.raw")],
};

const REBASE: Verb = Verb {
    line: &["rebase", "-b", "other.qcow2", "-F", "qcow2", "top.qcow2"],
    prepare: chain,
    sources: &["base.qcow2", "other.qcow2"],
    valid: &["top.qcow2"],
    always: &[("top.qcow2", "b.raw")],
    at_end: &[],
};

const FLATTEN: Verb = Verb { line: &["rebase", "-b", "", "top.qcow2"], ..REBASE };

const CHECK: Verb = Verb {
    line: &["check", "-r", "all", "base.qcow2"],
    prepare: leaks,
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
    sources: &["top.qcow2", "other.qcow2"],
    valid: &["base.qcow2"],
    always: &[],
    at_end: ONE,
};

const COMPARE: Verb = Verb {
    line: &["compare", "a.raw", "base.qcow2"],
    prepare: one_image,
    sources: &["a.raw", "base.qcow2"],
    valid: &[],
    always: &[],
    at_end: &[],
};

const MEASURE: Verb = Verb { line: &["measure", "-O", "qcow2", "base.qcow2"], ..COMPARE };

const MAP: Verb = Verb { line: &["map", "base.qcow2"], ..COMPARE };

/// Copies all files of a directory.
fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
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

fn is_stoppable_and_tells_how_far_it_is(verb: &Verb, moments: usize) {
    if !has_tool("qemu-img") {
        return;
    }
    let golden = directory();
    (verb.prepare)(golden.path());
    let sources = files(golden.path(), verb.sources);
    let whole = directory();
    copy(golden.path(), whole.path());
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
        copy(golden.path(), place.path());
        let after = dice.below(took.as_micros() as u64 + 1);
        let ended = run_until(place.path(), verb.line, after);
        let when = format!("after {:?} was interrupted (moment {moment}: {ended})", verb.line);
        assert!(ended.success() || ended.signal() == Some(SIGINT), "{when}");
        assert!(files(place.path(), verb.sources) == sources, "sources {when}");
        for image in verb.valid.iter().map(|name| place.path().join(name)).filter(|path| path.exists()) {
            assert_valid(&image, true);
        }
        shows(place.path(), verb.always, &when);
        in_directory_ok(place.path(), verb.line);
        shows(place.path(), verb.at_end, &format!("again {when}"));
        assert!(files(place.path(), verb.sources) == sources, "sources of the second run {when}");
    }
}

macro_rules! each {
    ($($name:ident: $verb:ident,)*) => {
        $(#[test]
        fn $name() {
            is_stoppable_and_tells_how_far_it_is(&$verb, MOMENTS);
        })*

        #[test]
        #[ignore = "takes a minute"]
        fn every_verb_can_be_stopped_at_many_moments() {
            $(is_stoppable_and_tells_how_far_it_is(&$verb, MANY_MOMENTS);)*
        }
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
}
