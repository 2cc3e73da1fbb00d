//! What the program says to wrong usage, and that it lists what is right.

mod common;

use common::{at, directory, path_str, run, run_fails, run_ok, text};

#[test]
fn wrong_drive_options_list_the_valid_keys_and_values_and_exit_with_2() {
    for (option, parts) in [
        ("file=x,fromat=raw", &["did you mean 'format'", "file", "cache", "queue-size"] as &[&str]),
        ("file=x,format=qcow3", &["did you mean 'qcow2'", "raw", "null"]),
        ("file=x,cache=nonne", &["did you mean 'none'", "writeback", "directsync", "unsafe"]),
        ("file=x,engine=aio", &["auto", "io_uring", "linux-aio", "threads"]),
        ("file=x,readonly=maybe", &["on", "off"]),
        ("file", &["key=value"]),
        ("format=null", &["size=4G"]),
        ("format=null,size=12Q", &["'12Q' is not a size"]),
        ("file=x,serial=abcdefghijklmnopqrstu", &["20 bytes"]),
        ("file=x,queue-size=1", &["from 2 to 1024"]),
    ] {
        let said = run_fails(2, &["serve", "--drive", option]);
        for part in parts {
            assert!(said.contains(part), "--drive {option}: '{part}' is missing in: {said}");
        }
    }
}

#[test]
fn wrong_arguments_exit_with_2_and_missing_files_with_1() {
    for arguments in [
        &["serve"] as &[&str],
        &["serve", "x.img", "--socket", "a", "--socket", "b"],
        &["serve", "--drive", "format=null,size=1M"],
        &["serve", "--allow-backing", "some", "--drive", "format=null,size=1M"],
        &["serve", "--buffer-memory", "64k", "--drive", "format=null,size=1M,socket=s"],
        &["serve", "--buffer-memory", "much", "--drive", "format=null,size=1M,socket=s"],
        &["--log-level", "=x=", "info", "x"],
        &["create", "-f", "vmdk", "x", "1M"],
        &["create", "-f", "qcow2", "-o", "cluster_size=3k", "x", "1M"],
        &["create", "-f", "qcow2", "-o", "clustersize=64k", "x", "1M"],
        &["create", "-f", "qcow2", "-o", "compat=0.10,refcount_bits=8", "x", "1M"],
        &["create", "-f", "raw", "-b", "y", "x", "1M"],
        &["create", "x"],
        &["create", "-o", "size=1M"],
        &["create", "-o", "size=1M", "x", "1M"],
        &["convert", "-O", "qcow2", "-o", "cluster_size=4k"],
        &["measure", "-O", "qcow2", "-o", "compat=banana", "--size", "1M"],
        &["frobnicate"],
        &["bench"],
    ] {
        let said = run_fails(2, arguments);
        assert!(!said.trim().is_empty(), "{arguments:?} says nothing");
    }
    // Nothing is announced that is then refused.
    let refused = run(&["create", "-f", "scratch", "x", "1M"]);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(2), ""), "{}", text(&refused.stderr));
    let missing = run_fails(1, &["info", "/nonexistent/disk.qcow2"]);
    assert!(missing.contains("/nonexistent/disk.qcow2"), "{missing}");
    run_fails(1, &["serve", "/nonexistent/disk.qcow2"]);
}

#[test]
fn a_question_mark_lists_what_a_key_takes() {
    for (option, listed) in [
        ("format=?", "raw, qcow2, scratch, null"),
        ("file=x,engine=?", "auto, io_uring, linux-aio, threads"),
        ("cache=help", "writeback, none, writethrough, directsync, unsafe"),
        ("help", "serial"),
    ] {
        let said = run_ok(&["serve", "--drive", option]);
        assert!(said.contains(listed), "--drive {option}: {said}");
    }
    for verb in [&["create", "-f", "qcow2"][..], &["convert", "-O", "qcow2"]] {
        assert!(run_ok(&[verb, &["-o", "help"]].concat()).contains("  cluster_size=<size>    - "), "{verb:?}");
    }
}

#[test]
fn a_socket_path_that_is_too_long_is_refused_and_nothing_is_left_behind() {
    let dir = directory();
    let image = at(&dir, "disk.raw");
    run_ok(&["create", path_str(&image), "1M"]);
    let socket = at(&dir, &"s".repeat(120));
    let said = run_fails(2, &["serve", path_str(&image), "--socket", path_str(&socket)]);
    assert!(said.contains(path_str(&socket)) && said.contains("107"), "{said}");
    assert!(!socket.exists());
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let dir = directory();
    let image = at(&dir, "disk.raw");
    run_ok(&["create", path_str(&image), "1M"]);
    let program = env!("CARGO_BIN_EXE_ringdisk");
    let line = format!("set -o pipefail; '{program}' info '{}' | true", image.display());
    let output = std::process::Command::new("bash").args(["-c", &line]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(run(&["--version"]).status.success());
}
