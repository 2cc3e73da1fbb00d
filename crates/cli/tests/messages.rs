//! What people are told when something is wrong: once, by its name, with what to do, and in words that the command knows.

mod common;

use common::{Server, at, directory, path_str, ringdisk, run_fails, run_ok, text};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Output, Stdio};

fn qcow2(image: &Path) {
    run_ok(&["create", "-q", "-f", "qcow2", path_str(image), "1M"]);
}

/// Runs the program under the other name.
fn as_qemu_img(arguments: &[&str]) -> Output {
    let mut command = ringdisk();
    command.arg0("qemu-img").args(arguments).env("RINGDISK_LOCK_TIMEOUT_S", "0");
    command.output().expect("the program can be started")
}

/// Runs the program, which must fail because an image is in use, and returns what it said. It waits for nobody.
fn refused(arguments: &[&str]) -> String {
    run_fails(1, &[&["--lock-timeout-s", "0"], arguments].concat())
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn a_size_in_other_units_is_answered_with_what_to_write() {
    let dir = directory();
    let image = at(&dir, "disk.raw");
    run_ok(&["create", "-q", path_str(&image), "64k"]);
    let drive = format!("format=null,size=1GB,socket={}", at(&dir, "s").display());
    for line in [
        &["create", path_str(&image), "1GB"][..],
        &["resize", "-f", "raw", path_str(&image), "1GB"],
        &["measure", "-O", "qcow2", "--size", "1GB"],
        &["serve", "--drive", &drive],
    ] {
        let said = run_fails(2, line);
        assert!(said.contains("'1GB' is not a size: write 1G"), "{line:?}: {said}");
    }
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 65536);
}

#[test]
fn a_reason_and_a_name_are_told_once() {
    let dir = directory();
    let (missing, text_file) = (at(&dir, "missing"), at(&dir, "text"));
    std::fs::write(&text_file, "just a text").unwrap();
    let drive = format!("file={}", missing.display());
    for line in [
        &["info", path_str(&missing)][..],
        &["check", path_str(&missing)],
        &["map", path_str(&missing)],
        &["resize", path_str(&missing), "2M"],
        &["convert", "-O", "raw", path_str(&missing), path_str(&at(&dir, "new"))],
        &["serve", "--drive", &drive],
    ] {
        let said = run_fails(1, line);
        assert_eq!((count(&said, "No such file"), count(&said, "os error")), (1, 0), "{line:?}: {said}");
        assert_eq!(count(&said, path_str(&missing)), 1, "{line:?}: {said}");
    }
    let said = run_fails(1, &["check", "-f", "qcow2", path_str(&text_file)]);
    assert_eq!((count(&said, path_str(&text_file)), count(&said, "not in qcow2 format")), (1, 1), "{said}");
}

#[test]
fn an_image_in_use_is_told_with_the_process_and_with_an_option_that_the_command_has() {
    let dir = directory();
    let (image, socket, second) = (at(&dir, "disk.qcow2"), at(&dir, "s"), at(&dir, "second"));
    qcow2(&image);
    let server = Server::start(&[path_str(&image), "--socket", path_str(&socket)]);
    let holder = format!("in use by pid {} (", server.pid());
    let new = at(&dir, "new.raw");
    for line in [
        &["info", path_str(&image)][..],
        &["map", path_str(&image)],
        &["check", path_str(&image)],
        &["snapshot", "-l", path_str(&image)],
        &["convert", "-O", "raw", path_str(&image), path_str(&new)],
    ] {
        let said = refused(line);
        assert!(said.contains(&holder) && said.contains("-U (--force-share)"), "{line:?}: {said}");
        assert!(said.contains("may then be old, or change meanwhile") && !said.contains("copy"), "{line:?}: {said}");
        assert_eq!(count(&said, path_str(&image)), 1, "{line:?}: {said}");
    }
    assert!(!new.exists());
    for line in [&["resize", path_str(&image), "2M"][..], &["amend", "-o", "compat=0.10", path_str(&image)]] {
        let said = refused(line);
        assert!(said.contains(&holder) && !said.contains("-U") && !said.contains("read-only"), "{line:?}: {said}");
    }
    let said = refused(&["serve", path_str(&image), "--socket", path_str(&second)]);
    assert!(said.contains(&holder) && !said.contains("readonly=on"), "it would not help: {said}");
    // Scripts look for these words.
    for (line, lock) in [
        (&["info", path_str(&image)][..], "Failed to get shared \"write\" lock\n"),
        (&["resize", path_str(&image), "2M"], "Failed to get \"write\" lock\n"),
    ] {
        let output = as_qemu_img(line);
        let said = text(&output.stderr);
        let asked = format!("Is another process using the image [{}]?", image.display());
        assert!(said.contains(lock) && said.contains(&asked) && said.contains(&holder), "{line:?}: {said}");
    }
    server.stop();
    let reads_only = format!("file={},readonly=on,socket={}", image.display(), socket.display());
    let server = Server::start(&["--drive", &reads_only]);
    let said = refused(&["serve", path_str(&image), "--socket", path_str(&second)]);
    assert!(said.contains(&format!("pid {} (", server.pid())) && said.contains("readonly=on"), "{said}");
    server.stop();
}

#[test]
fn a_copy_onto_its_own_source_says_which_side_that_is_and_names_no_other_process() {
    let dir = directory();
    let [base, top, link] = ["base.qcow2", "top.qcow2", "link.qcow2"].map(|name| at(&dir, name));
    qcow2(&base);
    run_ok(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path_str(&top)]);
    symlink(&base, &link).unwrap();
    for (source, target, side) in [
        (&base, &base, "is the source"),
        (&base, &link, "is the source"),
        (&top, &base, "is a file that the source"),
        (&top, &link, "is a file that the source"),
    ] {
        let before = std::fs::read(&base).unwrap();
        let said = run_fails(1, &["convert", "-O", "raw", path_str(source), path_str(target)]);
        let expected = format!("The target '{}' {side} '{}'", target.display(), source.display());
        assert!(said.contains(&expected) && said.contains("nothing was written"), "{said}");
        assert!(!said.contains("another process"), "{said}");
        assert_eq!(std::fs::read(&base).unwrap(), before);
    }
}

#[test]
fn an_interruption_is_told_once_and_ends_the_command_by_the_signal() {
    let dir = directory();
    let (source, target) = (at(&dir, "source.raw"), at(&dir, "target.qcow2"));
    let file = std::fs::File::create(&source).unwrap();
    // Compressing this takes long.
    let mut dice = testkit::Dice::new(1);
    let piece: Vec<u8> = (0..1 << 20).map(|_| b"0123456789abcdef"[dice.index(16)]).collect();
    for _ in 0..96 {
        std::io::Write::write_all(&mut &file, &piece).unwrap();
    }
    let mut command = ringdisk();
    command.args(["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&target)]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The handlers are there before the target is.
    while !std::fs::metadata(&target).is_ok_and(|meta| meta.len() > 1 << 16) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.signal(), Some(Signal::INT.as_raw()), "{said}");
    assert_eq!((count(&said, "nterrupted"), said.lines().count()), (1, 1), "{said}");
    assert!(said.contains("was removed again") && !target.exists(), "{said}");
}

#[test]
fn advice_names_options_that_the_command_has() {
    let dir = directory();
    let (raw, foreign) = (at(&dir, "disk.raw"), at(&dir, "disk.vmdk"));
    std::fs::write(&raw, [1; 65536]).unwrap();
    std::fs::write(&foreign, [&b"KDMV"[..], &[0; 65532]].concat()).unwrap();
    let output = common::run(&["resize", path_str(&raw), "128k"]);
    let said = text(&output.stderr);
    assert!(said.contains("-f raw") && said.contains(path_str(&raw)), "{said}");
    run_ok(&["resize", "-f", "raw", path_str(&raw), "192k"]);
    // qemu-img says the same, in lines without a time.
    let said = text(&as_qemu_img(&["resize", path_str(&raw), "256k"]).stderr);
    let expected = format!("WARNING: Image format was not specified for '{}' and probing guessed raw.", raw.display());
    assert!(said.starts_with(&expected), "{said}");
    let said = run_fails(1, &["info", path_str(&foreign)]);
    assert!(said.contains("-f raw"), "{said}");
    run_ok(&["info", "-f", "raw", path_str(&foreign)]);
    let said = run_fails(1, &["serve", "--socket", "unused", "--drive", &format!("file={}", foreign.display())]);
    assert!(said.contains("format=raw"), "{said}");
}

#[test]
fn the_help_of_drives_explains_each_key_that_an_unknown_one_lists() {
    let said = run_fails(2, &["serve", "--drive", "filee=x"]);
    assert!(said.contains("did you mean 'file'"), "{said}");
    let keys = said.split("(valid: ").nth(1).and_then(|rest| rest.split(')').next()).expect("a list");
    let help = run_ok(&["serve", "--drive", "help"]);
    let page =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/drive-options.md")).unwrap();
    for key in keys.split(", ") {
        assert!(help.lines().any(|line| line.starts_with(&format!("  {key} "))), "{key} is not in: {help}");
        assert!(page.contains(&format!("`{key}")), "{key} is not in docs/drive-options.md");
    }
}

#[test]
fn what_is_not_there_is_a_failure_and_no_wrong_usage() {
    let dir = directory();
    let [image, target] = ["disk.qcow2", "state"].map(|name| at(&dir, name));
    qcow2(&image);
    run_ok(&["snapshot", "-c", "bare", path_str(&image)]);
    for (line, why) in [
        (&["state", "extract", "-l", "bare", path_str(&image), path_str(&target)][..], "keeps no machine's state"),
        (&["restore", "--state", path_str(dir.path())], "no machine was saved"),
        (&["bitmap", "--clear", path_str(&image), "daily"], "'daily' not found"),
        (&["snapshot", "-d", "other", path_str(&image)], "other"),
    ] {
        let said = run_fails(1, line);
        assert!(said.contains(why), "{line:?}: {said}");
    }
}
