//! Compares how a line ended in both worlds, and the files that it left.

use super::places::without_places;
use super::world::{Both, Done, World};
use super::{Finding, Kind};
use crate::common::{self, path_str, text, tool};
use serde_json::Value;
use std::path::Path;

/// Verbs that change nothing, unless they say so.
const LOOKING: &[&str] = &["info", "map", "measure", "compare"];

/// What differs after a line.
pub(super) fn judge(world: &World, line: &[String], done: &Both) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut tell = |kind, ours: String, theirs: String| {
        found.push(Finding { line: line.to_vec(), kind, ours, theirs });
    };
    let Both { ours, theirs } = done;
    let said = |done: &Done| format!("{:?} {}{}", done.code, done.stdout, done.stderr);
    if ours.code != theirs.code {
        tell(Kind::Code, said(ours), said(theirs));
        return found;
    }
    if line[0] != "io" {
        let [mut shown, mut expected] = [ours, theirs].map(|done| comparable(&done.stdout));
        if shown != expected && are_laid_out_differently(world, line) {
            [shown, expected] = [shown, expected].map(|said| without_places(&line[0], &said));
        }
        if shown != expected {
            tell(Kind::Output, different(&shown, &expected), different(&expected, &shown));
        }
        let missing = missing_words(&ours.stderr, &theirs.stderr);
        if !missing.is_empty() {
            tell(Kind::Words, ours.stderr.clone(), theirs.stderr.clone());
        }
    }
    if LOOKING.contains(&line[0].as_str()) {
        return found;
    }
    let [own, other] = [&world.ours, &world.theirs].map(|side| names(&side.directory));
    if own != other {
        tell(Kind::Names, format!("{own:?}"), format!("{other:?}"));
        return found;
    }
    let named = |name: &&String| line.iter().any(|word| word.ends_with(name.as_str()));
    for name in own.iter().filter(named) {
        let [ours, theirs] = [&world.ours, &world.theirs].map(|side| side.directory.join(name));
        compare_files(&ours, &theirs, &mut tell);
        world.settle(name);
    }
    found
}

/// Whether both programs have put a file that the line names together in their own way. Several requests are in flight
/// when an image is filled, so where its clusters lie depends on which of them ends first.
fn are_laid_out_differently(world: &World, line: &[String]) -> bool {
    let is_named = |name: &&String| line.iter().any(|word| word.contains(name.as_str()));
    names(&world.ours.directory).iter().filter(is_named).any(|name| {
        let [own, other] = [&world.ours, &world.theirs].map(|side| std::fs::read(side.directory.join(name)).ok());
        own != other
    })
}

/// The lines of a text that another one does not have.
fn different(text: &str, other: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !other.lines().any(|other| other == *line)).collect();
    if lines.is_empty() { text.to_owned() } else { lines.join("\n") }
}

/// Output without what the file system decides, and without dates.
fn comparable(said: &str) -> String {
    if let Ok(mut value) = serde_json::from_str::<Value>(said) {
        forget(&mut value);
        return format!("{value:#}");
    }
    let kept = said.lines().filter(|line| !line.trim_start().starts_with("disk size:"));
    kept.map(common::without_columns).collect::<Vec<_>>().join("\n")
}

fn forget(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for key in ["actual-size", "date-sec", "date-nsec"] {
                map.remove(key);
            }
            map.values_mut().for_each(forget);
        }
        Value::Array(values) => values.iter_mut().for_each(forget),
        _ => {}
    }
}

/// The parts of their message, as colons separate them, that ours does not have. More may be said.
pub(super) fn missing_words<'a>(ours: &str, theirs: &'a str) -> Vec<&'a str> {
    let parts = theirs.lines().flat_map(|line| line.split(": ")).map(|part| part.trim().trim_end_matches(['.', ':']));
    parts.filter(|part| !part.starts_with("qemu-img") && !ours.contains(part)).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

fn compare_files(ours: &Path, theirs: &Path, tell: &mut impl FnMut(Kind, String, String)) {
    let [own, other] = [ours, theirs].map(|path| std::fs::read(path).expect("a file"));
    if own == other {
        return;
    }
    let name = ours.file_name().expect("a name").display();
    // As both programs tell lengths: in sectors.
    if own.len().div_ceil(512) != other.len().div_ceil(512) {
        tell(Kind::Length, format!("{name} has {} bytes", own.len()), format!("{name} has {} bytes", other.len()));
    }
    let format = if own.starts_with(b"QFI\xfb") { "qcow2" } else { "raw" };
    let judged: Vec<String> = [ours, theirs].map(|path| described(path, format)).into();
    if judged[0] != judged[1] {
        tell(Kind::Image, different(&judged[0], &judged[1]), different(&judged[1], &judged[0]));
    }
    let said = tool("qemu-img", &["compare", "-U", "-f", format, "-F", format, path_str(ours), path_str(theirs)]);
    let is_same = said.status.success() || (format == "qcow2" && cannot_be_read(ours) && cannot_be_read(theirs));
    if !is_same {
        tell(
            Kind::Image,
            format!("{name}: {}{}", text(&said.stdout), text(&said.stderr)),
            "the same contents".to_owned(),
        );
    }
}

/// A damaged image, or one whose backing file is not there.
fn cannot_be_read(path: &Path) -> bool {
    !tool("qemu-img", &["map", "-U", "-f", "qcow2", path_str(path)]).status.success()
}

/// What qemu-img says of an image, wherever it lies.
fn described(path: &Path, format: &str) -> String {
    if format == "raw" {
        return String::new();
    }
    let path = path_str(path);
    let info = tool("qemu-img", &["info", "-U", "-f", format, "--output=json", path]);
    let mut value: Value = serde_json::from_slice(&info.stdout).unwrap_or_default();
    forget(&mut value);
    if let Some(map) = value.as_object_mut() {
        map.remove("children");
        map.remove("filename");
        map.remove("full-backing-filename");
    }
    let check = tool("qemu-img", &["check", "-U", "-f", format, path]);
    let counts = text(&check.stdout);
    let kept = counts.lines().filter(|line| !line.starts_with("Image end offset"));
    // Where clusters lie is each program's own affair.
    let kept = kept.map(|line| line.split(" allocated, ").next().unwrap_or_default());
    format!("{value:#}\ncheck: {:?}\n{}", check.status.code(), kept.collect::<Vec<_>>().join("\n"))
}
