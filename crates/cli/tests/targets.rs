//! What happens to the files that a command writes to: if Ctrl-C ends it, if it is told to overwrite its source, or if
//! what it is asked for does not fit.

mod common;

use common::{at, directory, path_str, run_fails, run_ok, text, tool_ok};
use std::fs::{File, hard_link};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const SIGINT: i32 = 2;

/// Sends SIGINT once `image` has a header; returns what was said.
fn interrupted(arguments: &[&str], image: &Path) -> String {
    let mut command = common::ringdisk();
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let has_header = || {
        let mut magic = [0; 4];
        File::open(image).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"QFI\xfb"
    };
    let deadline = Instant::now() + common::PATIENCE;
    while !has_header() {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "{arguments:?} makes no image");
        std::thread::sleep(Duration::from_millis(5));
    }
    tool_ok("kill", &["-INT", &child.id().to_string()]);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.signal(), Some(SIGINT), "{arguments:?}: {said}");
    assert_eq!(said.matches("interrupted").count(), 1, "{said}");
    said
}

#[test]
fn an_interrupted_preallocation_removes_what_is_new_and_says_what_is_left() {
    let dir = directory();
    let [source, target, data] = ["source.raw", "target.qcow2", "target.data"].map(|name| at(&dir, name));
    // It is so large that the tables alone take long.
    File::create(&source).and_then(|file| file.set_len(1 << 42)).unwrap();
    let external = "preallocation=metadata,data_file=target.data";
    let create = ["create", "-f", "qcow2", "-o", external, path_str(&target), "4T"];
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", external, path_str(&source), path_str(&target)];
    let plain = ["create", "-f", "qcow2", "-o", "preallocation=metadata", path_str(&target), "4T"];
    let removed = |path: &Path| format!("'{}' was removed again", path.display());
    for line in [&create[..], &convert, &plain] {
        let said = interrupted(line, &target);
        assert!(said.contains(&removed(&target)) && said.contains("interrupted"), "{line:?}: {said}");
        assert!(!target.exists() && !data.exists(), "{line:?}");
    }
    // A file that was there before is not removed.
    std::fs::write(&target, "old").unwrap();
    let said = interrupted(&create, &target);
    assert!(said.contains(&format!("'{}' is incomplete", target.display())), "{said}");
    assert!(said.contains(&removed(&data)) && target.exists() && !data.exists(), "{said}");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&target), "1M"]);
    assert_eq!(std::fs::metadata(&source).unwrap().len(), 1 << 42);
}

#[test]
fn a_link_to_a_file_that_is_not_there_makes_that_file_and_half_of_it_is_removed_again() {
    let dir = directory();
    let [bad, link, file] = ["bad.qcow2", "link", "file"].map(|name| at(&dir, name));
    symlink("file", &link).unwrap();
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&link), "1M"]);
    assert!(link.is_symlink() && !file.is_symlink() && file.is_file());
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&bad), "1M"]);
    // An L1 entry that leads nowhere. It is found only when the copy gets there.
    let mut bytes = std::fs::read(&bad).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    bytes[l1..l1 + 8].copy_from_slice(&(1u64 << 40 | 1 << 63).to_be_bytes());
    std::fs::write(&bad, bytes).unwrap();
    let said = run_fails(1, &["convert", "-O", "raw", path_str(&bad), path_str(&link)]);
    assert!(said.contains("was removed again") && link.is_symlink() && !file.exists(), "{said}");
}

#[test]
fn wrong_options_leave_a_file_that_exists_as_it_was() {
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    std::fs::write(&image, "precious").unwrap();
    for (format, options) in [
        ("qcow2", "extended_l2=on,cluster_size=4k"),
        ("qcow2", "data_file_raw=on"),
        ("raw", "preallocation=metadata"),
        ("raw", "extent_size_hint=4G"),
    ] {
        run_fails(2, &["create", "-q", "-f", format, "-o", options, path_str(&image), "1M"]);
        assert_eq!(std::fs::read(&image).unwrap(), b"precious", "{options}");
    }
}

#[test]
fn an_image_whose_data_file_is_the_source_by_any_name_is_not_written() {
    let dir = directory();
    let names = ["data.raw", "hard.raw", "soft.raw", "over.qcow2", "target.qcow2"];
    let [data, hard, soft, over, target] = names.map(|name| at(&dir, name));
    run_ok(&["create", "-q", "-f", "qcow2", "-o", "data_file=data.raw", path_str(&target), "64k"]);
    std::fs::write(&data, [7; 65536]).unwrap();
    hard_link(&data, &hard).unwrap();
    symlink(&data, &soft).unwrap();
    run_ok(&["create", "-q", "-f", "qcow2", "-b", "hard.raw", "-F", "raw", path_str(&over)]);
    let before = std::fs::read(&target).unwrap();
    for (source, format) in [(&data, "raw"), (&hard, "raw"), (&soft, "raw"), (&over, "qcow2")] {
        // No lock tells that it is the same file.
        let said =
            run_fails(1, &["convert", "-U", "-n", "-f", format, "-O", "qcow2", path_str(source), path_str(&target)]);
        assert!(said.contains("the source") && !said.contains("incomplete"), "{said}");
        assert_eq!(std::fs::read(&data).unwrap(), [7; 65536]);
        assert_eq!(std::fs::read(&target).unwrap(), before);
    }
}

#[test]
fn what_does_not_fit_a_target_that_exists_is_refused_before_anything_is_written() {
    let dir = directory();
    let [raw, source, target] = ["source.raw", "source.qcow2", "target.qcow2"].map(|name| at(&dir, name));
    std::fs::write(&raw, vec![1; 1 << 20]).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&source)]);
    run_ok(&["bitmap", "--add", path_str(&source), "b"]);
    let convert = ["convert", "-n", "--bitmaps", "-O", "qcow2", path_str(&source), path_str(&target)];
    let new = |options: &[&str], size: &str| {
        run_ok(&[&["create", "-q", "-f", "qcow2"][..], options, &[path_str(&target), size]].concat());
    };
    let refused = |reason: &str| {
        let before = std::fs::read(&target).unwrap();
        let said = run_fails(1, &convert);
        assert!(said.contains(reason) && !said.contains("incomplete"), "{said}");
        assert!(std::fs::read(&target).unwrap() == before, "{reason}");
    };
    new(&[], "2M");
    refused("different sizes");
    new(&[], "512k");
    refused("smaller than input file");
    new(&["-o", "compat=0.10"], "1M");
    refused("v2");
    new(&[], "1M");
    run_ok(&["bitmap", "--add", path_str(&target), "b"]);
    refused("already exists");
    run_ok(&["bitmap", "--remove", path_str(&target), "b"]);
    run_ok(&convert);
    assert!(run_ok(&["info", path_str(&target)]).contains("name: b"));
    run_ok(&["compare", "-f", "raw", "-F", "qcow2", path_str(&raw), path_str(&target)]);
}

#[test]
fn compressing_into_a_longer_target_leaves_what_is_behind_the_source() {
    let dir = directory();
    let (source, target) = (at(&dir, "source.raw"), at(&dir, "target.qcow2"));
    std::fs::write(&source, vec![0x11; 96 << 10]).unwrap();
    let [source, target] = [&source, &target].map(|path| path_str(path));
    let old = at(&dir, "old.raw");
    std::fs::write(&old, vec![0x55; 192 << 10]).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", path_str(&old), target]);
    run_ok(&["convert", "-n", "-c", "-f", "raw", "-O", "qcow2", source, target]);
    let whole = at(&dir, "whole.raw");
    run_ok(&["convert", "-f", "qcow2", "-O", "raw", target, path_str(&whole)]);
    let expected = [vec![0x11; 96 << 10], vec![0x55; 96 << 10]].concat();
    assert!(std::fs::read(&whole).unwrap() == expected, "bytes behind the source's end are gone");
}

#[test]
fn a_new_image_does_not_take_the_place_of_what_it_would_rest_on() {
    let dir = directory();
    let names = ["base.raw", "middle.qcow2", "alias.raw", "new.qcow2", "source.raw"];
    let [base, middle, alias, new, source] = names.map(|name| at(&dir, name));
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    run_ok(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&middle)]);
    hard_link(&base, &alias).unwrap();
    std::fs::write(&source, vec![1; 1 << 20]).unwrap();
    let before = std::fs::read(&middle).unwrap();
    let over = |backing: &'static str, format: &'static str| ["create", "-f", "qcow2", "-b", backing, "-F", format];
    let convert = ["convert", "-O", "qcow2", "-F", "qcow2", "-B", "middle.qcow2", path_str(&source)];
    let with_data = ["-o", "data_file=base.raw"];
    let lines = [
        [&over("middle.qcow2", "qcow2")[..], &[path_str(&base)]].concat(),
        [&over("alias.raw", "raw")[..], &[path_str(&base)]].concat(),
        [&over("middle.qcow2", "qcow2")[..], &["-u", path_str(&middle), "1M"]].concat(),
        [&over("middle.qcow2", "qcow2")[..], &with_data, &[path_str(&new), "1M"]].concat(),
        [&convert[..], &[path_str(&base)]].concat(),
    ];
    for line in lines {
        let said = run_fails(2, &line);
        assert!(said.contains("same filename as the backing file"), "{line:?}: {said}");
        assert!(std::fs::read(&base).unwrap() == vec![7; 1 << 20], "{line:?}");
        assert!(std::fs::read(&middle).unwrap() == before, "{line:?}");
    }
    assert!(!new.exists());
}

#[test]
fn what_images_name_is_opened_through_the_gate_when_the_new_image_is_looked_for_below() {
    let dir = directory();
    let names = ["base.raw", "middle.qcow2", "sub/top.qcow2", "sub/new.qcow2"];
    let [base, middle, top, new] = names.map(|name| at(&dir, name));
    std::fs::create_dir(top.parent().unwrap()).unwrap();
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    let over =
        |backing: &'static str, format: &'static str| ["create", "-q", "-f", "qcow2", "-b", backing, "-F", format];
    run_ok(&[&over("base.raw", "raw")[..], &[path_str(&middle)]].concat());
    run_ok(&[&over("../middle.qcow2", "qcow2")[..], &[path_str(&top)]].concat());
    // That it is the same file is known only to a program that opens the middle layer, which lies elsewhere.
    hard_link(&base, &new).unwrap();
    let mut command = common::ringdisk();
    command.args([&over("top.qcow2", "qcow2")[..], &[path_str(&new)]].concat());
    let refused = command.env("RINGDISK_ALLOW_BACKING", "any").output().unwrap();
    assert!(text(&refused.stderr).contains("same filename as the backing file"), "{}", text(&refused.stderr));
    assert!(std::fs::read(&base).unwrap() == vec![7; 1 << 20]);
    run_ok(&[&over("top.qcow2", "qcow2")[..], &[path_str(&new)]].concat());
}

#[test]
fn an_unknown_cache_mode_is_told_before_the_target_is_touched() {
    let dir = directory();
    let [source, target] = ["source.raw", "target.raw"].map(|name| at(&dir, name));
    std::fs::write(&source, vec![1; 4096]).unwrap();
    std::fs::write(&target, "kept").unwrap();
    let operands = [&source, &target].map(|path| path_str(path).to_owned());
    let [from, to] = [format!("if={}", operands[0]), format!("of={}", operands[1])];
    for line in [
        ["convert", "-t", "foo", "-f", "raw", &operands[0], &operands[1]],
        ["dd", "-t", "foo", "-f", "raw", &from, &to],
    ] {
        let said = run_fails(2, &line);
        assert!(said.contains("cache=foo"), "{said}");
        assert_eq!(std::fs::read(&target).unwrap(), b"kept", "{line:?}");
    }
}
