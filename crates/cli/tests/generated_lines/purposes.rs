//! What differs on purpose: how each topic that `ringdisk img-compat` prints is recognised.

use super::world::Both;
use super::{Finding, Kind};

/// A topic of `ringdisk img-compat`, and the findings that it explains.
struct Purpose {
    topic: &'static str,
    explains: fn(&Finding, &Both) -> bool,
}

const fn purpose(topic: &'static str, explains: fn(&Finding, &Both) -> bool) -> Purpose {
    Purpose { topic, explains }
}

const PURPOSES: &[Purpose] = &[
    purpose("formats", |_, done| {
        let ours = &done.ours.stderr;
        let is_refused =
            ["Unknown driver", "Unknown file format", "looks like a", "Invalid format name", "unknown image format"]
                .iter()
                .any(|words| ours.contains(words));
        is_refused && FOREIGN.iter().any(|name| ours.contains(name))
    }),
    purpose("protocols", |_, done| {
        ["Unknown protocol", "names with a protocol"].iter().any(|words| done.ours.stderr.contains(words))
    }),
    purpose("encryption", |_, done| done.ours.stderr.contains("encrypted")),
    purpose("file-lengths", |finding, _| {
        let verb = finding.line[0].as_str();
        let is_packed = finding.line.iter().any(|word| word == "-c" || word == "--bitmaps");
        let has_no_choice = verb == "create" || (verb == "convert" && !is_packed);
        finding.kind == Kind::Length && finding.theirs.contains(".qcow2") && !has_no_choice
    }),
    purpose("dd-zeros", |finding, done| {
        let is_about_space = matches!(finding.kind, Kind::Length | Kind::Image);
        finding.line[0] == "dd" && is_about_space && done.theirs.code == Some(0)
    }),
    purpose("node-names", |finding, done| finding.kind == Kind::Words && done.theirs.stderr.contains("#block")),
    purpose("half-targets", |finding, done| {
        let makes = ["create", "convert", "dd"].contains(&finding.line[0].as_str());
        finding.kind == Kind::Names && makes && done.theirs.code == Some(1)
    }),
    purpose("backing-not-opened", |finding, done| {
        let looks_at_one_file = ["check", "snapshot", "bitmap"].contains(&finding.line[0].as_str());
        looks_at_one_file && done.theirs.stderr.contains("Could not open backing file")
    }),
    purpose("compat-names", |finding, done| {
        finding.line[0] == "measure" && done.theirs.stderr.contains("Invalid compatibility level: 'v")
    }),
    purpose("measured-options", |finding, done| {
        let has_options = finding.line.iter().any(|word| word == "-o");
        finding.kind == Kind::Code
            && finding.line[0] == "measure"
            && has_options
            && (done.ours.code, done.theirs.code) == (Some(1), Some(0))
    }),
    purpose("first-block", |finding, _| {
        let of_raw = finding.line.last().is_some_and(|word| word.ends_with(".raw"));
        finding.kind == Kind::Output && of_raw && ["map", "measure"].contains(&finding.line[0].as_str())
    }),
    purpose("directories", |finding, done| {
        finding.kind == Kind::Words && done.theirs.stderr.contains("Is a directory")
    }),
    purpose("same-file", |finding, done| {
        finding.kind == Kind::Code && finding.line[0] == "dd" && done.ours.stderr.contains("The target")
    }),
];

/// Formats that qemu-img has and we do not.
const FOREIGN: &[&str] = &["vmdk", "vdi", "vpc", "qed", "qcow'", "qcow image", "parallels"];

/// The topics.
pub(crate) fn purposes() -> impl Iterator<Item = &'static str> {
    PURPOSES.iter().map(|purpose| purpose.topic)
}

pub(super) fn is_on_purpose(finding: &Finding, done: &Both) -> bool {
    PURPOSES.iter().any(|purpose| (purpose.explains)(finding, done))
}
