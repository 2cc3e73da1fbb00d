//! `snapshot`, `resize`, `amend` and `convert -l`: the same words to qemu-img and to this program. One of them made the
//! image, the other one did, or both in turns.

mod common;

use common::{at, directory, has_tool, path_str, run, run_ok, text, tool, tool_ok};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// What is done to an image, in this order. `FILE` is the image. Its disk is written to between two steps.
const HISTORY: [&[&str]; 29] = [
    &["snapshot", "-l", "FILE"],
    &["snapshot", "-c", "one", "FILE"],
    &["snapshot", "-c", "two words", "FILE"],
    &["snapshot", "-c", "one", "FILE"],
    &["snapshot", "-l", "FILE"],
    &["snapshot", "-a", "2", "FILE"],
    &["snapshot", "-a", "missing", "FILE"],
    &["snapshot", "-d", "missing", "FILE"],
    &["snapshot", "-d", "2", "FILE"],
    &["snapshot", "-q", "-d", "one", "FILE"],
    &["resize", "FILE", "+3M"],
    &["snapshot", "-c", "large", "FILE"],
    &["resize", "FILE", "5M"],
    &["resize", "--shrink", "FILE", "5M"],
    &["snapshot", "-c", "small", "FILE"],
    &["snapshot", "-a", "large", "FILE"],
    &["resize", "--shrink", "FILE", "-100G"],
    &["resize", "--preallocation=metadata", "FILE", "+2M"],
    &["resize", "--preallocation=falloc", "FILE", "+1M"],
    &["resize", "--preallocation=full", "FILE", "+1M"],
    &["resize", "--preallocation=nothing", "FILE", "+1M"],
    &["resize", "-q", "FILE", "+1k"],
    &["amend", "-o", "refcount_bits=32,lazy_refcounts=on", "FILE"],
    &["amend", "-o", "refcount_bits=1", "FILE"],
    &["amend", "-o", "cluster_size=4k", "FILE"],
    &["amend", "-o", "size=14M,refcount_bits=16", "FILE"],
    &["snapshot", "-d", "small", "FILE"],
    &["snapshot", "-d", "large", "FILE"],
    &["amend", "-o", "lazy_refcounts=off", "FILE"],
];

fn with_file<'a>(arguments: &[&'a str], file: &'a Path) -> Vec<&'a str> {
    arguments.iter().map(|word| if *word == "FILE" { path_str(file) } else { word }).collect()
}

/// The output without what depends on the time or the version.
fn comparable(output: &Output) -> String {
    text(&output.stdout).lines().map(common::without_columns).collect::<Vec<_>>().join("\n")
}

fn scribble(image: &Path, number: usize) {
    let at = number * 37 % 60;
    let command = format!("write -P {} {}k 300k", number + 1, at * 60);
    tool_ok("qemu-io", &["-f", "qcow2", "-c", &command, path_str(image)]);
}

/// The snapshots of `info`, without their dates.
fn snapshots(output: &Output) -> Vec<Value> {
    let info: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut list = info["snapshots"].as_array().cloned().unwrap_or_default();
    for snapshot in &mut list {
        let fields = snapshot.as_object_mut().unwrap();
        assert!(fields.remove("date-sec").is_some() && fields.remove("date-nsec").is_some());
    }
    list
}

#[test]
fn the_same_words_do_the_same_to_images_as_qemu_img_does() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for options in ["compat=1.1", "compat=1.1,cluster_size=4k,refcount_bits=8"] {
        let (ours, theirs) = (at(&dir, "ours.qcow2"), at(&dir, "theirs.qcow2"));
        for image in [&ours, &theirs] {
            tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, path_str(image), "8M"]);
        }
        for (number, words) in HISTORY.iter().enumerate() {
            scribble(&ours, number);
            scribble(&theirs, number);
            // qemu-img does every third step on our image, so each program goes on where the other stopped.
            let mine = match number % 3 {
                2 => tool("qemu-img", &with_file(words, &ours)),
                _ => run(&with_file(words, &ours)),
            };
            let judge = tool("qemu-img", &with_file(words, &theirs));
            let said = format!("{options}, {words:?}: {}{}", text(&mine.stderr), text(&judge.stderr));
            assert_eq!(mine.status.success(), judge.status.success(), "{said}");
            assert_eq!(comparable(&mine), comparable(&judge), "{said}");
            // Newer versions list the snapshots if they are told nothing.
            let [named, asked] =
                [&["snapshot", "FILE"][..], &["snapshot", "-l", "FILE"]].map(|words| run_ok(&with_file(words, &ours)));
            assert_eq!(named, asked, "{said}");
            tool_ok("qemu-img", &["check", "-f", "qcow2", path_str(&ours)]);
            tool_ok("qemu-img", &["compare", path_str(&ours), path_str(&theirs)]);
            let info = ["info", "--output=json"];
            let mine = snapshots(&run(&[&info[..], &[path_str(&ours)]].concat()));
            assert_eq!(mine, snapshots(&tool("qemu-img", &[&info[..], &[path_str(&theirs)]].concat())), "{said}");
            // Copies take the longest, so they are made only now and then.
            let names = if number % 7 == 4 { 5 } else { 0 };
            for name in ["one", "snapshot.name=large", "snapshot.id=3,snapshot.name=one", "snapshot.id=77", "3"]
                .into_iter()
                .take(names)
            {
                let (raw, judge) = (at(&dir, "ours.raw"), at(&dir, "theirs.raw"));
                let convert = |image, to| ["convert", "-l", name, "-O", "raw", path_str(image), path_str(to)];
                let (mine, theirs) = (run(&convert(&ours, &raw)), tool("qemu-img", &convert(&theirs, &judge)));
                assert_eq!(mine.status.success(), theirs.status.success(), "{said}: -l {name}");
                if mine.status.success() {
                    let (mine, theirs) = (std::fs::read(&raw).unwrap(), std::fs::read(&judge).unwrap());
                    // qemu-img cuts a snapshot off if the disk is smaller at that time.
                    let both = mine.len().min(theirs.len());
                    assert!(mine[..both] == theirs[..both], "{said}: -l {name}");
                }
            }
        }
    }
}

/// Has the monitor of QEMU do something to the disk, in a machine without anything else.
fn monitor(image: &Path, commands: &str) -> String {
    let drive = format!("if=none,file={},id=disk", path_str(image));
    let mut qemu = Command::new("qemu-system-x86_64")
        .args(["-machine", "none", "-accel", "tcg", "-display", "none", "-nodefaults", "-monitor", "stdio"])
        .args(["-drive", &drive])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    qemu.stdin.take().unwrap().write_all(format!("{commands}\nquit\n").as_bytes()).unwrap();
    let output = qemu.wait_with_output().unwrap();
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && !said.contains("Error"), "{said}");
    said
}

#[test]
fn the_state_of_a_virtual_machine_is_kept_with_its_snapshot() {
    if !has_tool("qemu-img") || !has_tool("qemu-system-x86_64") {
        return;
    }
    let dir = directory();
    let image = at(&dir, "machine.qcow2");
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", path_str(&image), "8M"]);
    scribble(&image, 1);
    monitor(&image, "savevm running");
    let state =
        |image: &Path| snapshots(&run(&["info", "--output=json", path_str(image)]))[0]["vm-state-size"].as_u64();
    assert!(state(&image).unwrap() > 0);
    for words in [
        &["snapshot", "-c", "other", "FILE"][..],
        &["snapshot", "-a", "running", "FILE"],
        &["resize", "FILE", "+1G"],
        &["snapshot", "-a", "other", "FILE"],
        &["amend", "-o", "refcount_bits=64", "FILE"],
        &["snapshot", "-d", "other", "FILE"],
    ] {
        run_ok(&with_file(words, &image));
        tool_ok("qemu-img", &["check", path_str(&image)]);
        if words[0] == "resize" {
            // The state lies behind the disk's end; it must not be in the space that was added.
            let zeros = at(&dir, "zeros.raw");
            tool_ok("qemu-img", &["create", "-q", "-f", "raw", path_str(&zeros), "1032M"]);
            tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 2 2220k 300k", path_str(&zeros)]);
            tool_ok("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", path_str(&image), path_str(&zeros)]);
        }
    }
    monitor(&image, "loadvm running");
    tool_ok("qemu-img", &["check", path_str(&image)]);
}

#[test]
fn a_snapshot_that_is_larger_than_the_disk_is_copied_whole() {
    let dir = directory();
    let [image, then] = ["disk.qcow2", "then.raw"].map(|name| at(&dir, name));
    let source = at(&dir, "source.raw");
    std::fs::write(&source, vec![7; 3 << 20]).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&image)]);
    run_ok(&["snapshot", "-c", "large", path_str(&image)]);
    run_ok(&["resize", "--shrink", path_str(&image), "1M"]);
    run_ok(&["convert", "-l", "large", "-O", "raw", path_str(&image), path_str(&then)]);
    assert!(std::fs::read(&then).unwrap() == vec![7; 3 << 20]);
}

/// An overlay of 1 MiB over `base.raw` with a snapshot in which nothing was written yet, and data written later.
fn overlay_with_a_snapshot(dir: &Path) -> std::path::PathBuf {
    let [base, source, overlay] = ["base.raw", "source.raw", "overlay.qcow2"].map(|name| dir.join(name));
    std::fs::write(&base, vec![1; 1 << 20]).unwrap();
    std::fs::write(&source, vec![2; 1 << 20]).unwrap();
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&overlay)]);
    run_ok(&["snapshot", "-c", "before", path_str(&overlay)]);
    run_ok(&["convert", "-n", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&overlay)]);
    overlay
}

fn snapshot_shows(overlay: &Path) -> u8 {
    let raw = overlay.with_extension("raw");
    run_ok(&["convert", "-l", "before", "-O", "raw", path_str(overlay), path_str(&raw)]);
    let bytes = std::fs::read(&raw).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn commit_and_rebase_do_not_change_what_a_snapshot_shows_unless_told_to() {
    let dir = directory();
    let overlay = overlay_with_a_snapshot(dir.path());
    let other = at(&dir, "other.raw");
    std::fs::write(&other, vec![3; 1 << 20]).unwrap();
    for words in [&["commit"][..], &["rebase", "-F", "raw", "-b", "other.raw"]] {
        let refused = run(&[words, &[path_str(&overlay)]].concat());
        assert_eq!(refused.status.code(), Some(1));
        let said = text(&refused.stderr);
        assert!(said.contains("'before'") && said.contains("--change-snapshots"), "{said}");
        assert_eq!(snapshot_shows(&overlay), 1);
    }
    run_ok(&["commit", "--change-snapshots", path_str(&overlay)]);
    assert_eq!(snapshot_shows(&overlay), 2);
    run_ok(&["rebase", "--change-snapshots", "-F", "raw", "-b", "other.raw", path_str(&overlay)]);
    assert_eq!(snapshot_shows(&overlay), 3);
}
