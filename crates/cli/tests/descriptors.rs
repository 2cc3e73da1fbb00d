//! The image tool on images that were passed as open descriptors (`fd:3`).

mod common;

use common::{at, directory, path_str, run_fails, run_ok, text};
use std::path::Path;
use std::process::Command;

/// Runs a command line in which `fd:3` is `image`, opened by a shell for reading (`<`), or for writing too (`<>`).
fn with_image(image: &Path, mode: &str, arguments: &[&str]) -> Result<String, String> {
    let line = format!("image=$1; shift; exec \"$@\" 3{mode}\"$image\"");
    let program = env!("CARGO_BIN_EXE_ringdisk");
    let mut command = Command::new("bash");
    command.args(["-c", &line, "bash", path_str(image), program]).args(arguments);
    let output = command.output().unwrap();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn every_verb_takes_an_image_that_was_passed_as_a_descriptor() {
    let dir = directory();
    let [base, other, top, copy] = ["base.raw", "other.raw", "top.qcow2", "copy.raw"].map(|name| at(&dir, name));
    for path in [&base, &other] {
        std::fs::write(path, vec![7; 1 << 20]).unwrap();
    }
    run_ok(&["create", "-f", "qcow2", "-b", path_str(&base), "-F", "raw", path_str(&top)]);
    let any = ["--allow-backing", "any"];
    let read = |arguments: &[&str]| with_image(&top, "<", arguments).unwrap();
    let write = |arguments: &[&str]| with_image(&top, "<>", arguments).unwrap();
    assert!(read(&["info", "fd:3"]).contains("virtual size: 1 MiB"));
    assert!(read(&["check", "fd:3"]).contains("No errors"));
    assert!(read(&[&["map", "fd:3"][..], &any].concat()).contains(path_str(&base)));
    assert!(read(&[&["measure", "-O", "qcow2", "fd:3"][..], &any].concat()).contains("required size"));
    read(&[&["convert", "-O", "raw", "fd:3", path_str(&copy)][..], &any].concat());
    assert_eq!(std::fs::read(&copy).unwrap(), vec![7; 1 << 20]);
    assert_eq!(read(&[&["compare", "fd:3", path_str(&copy)][..], &any].concat()), "Images are identical.\n");
    write(&["snapshot", "-c", "one", "fd:3"]);
    assert!(read(&["snapshot", "fd:3"]).contains("one"));
    write(&["snapshot", "-d", "one", "fd:3"]);
    write(&["bitmap", "--add", "fd:3", "b"]);
    write(&["bitmap", "--remove", "fd:3", "b"]);
    write(&[&["amend", "-o", "lazy_refcounts=on", "fd:3"][..], &any].concat());
    write(&[&["rebase", "-b", path_str(&other), "-F", "raw", "fd:3"][..], &any].concat());
    assert!(read(&["info", "fd:3"]).contains(path_str(&other)));
    write(&[&["resize", "fd:3", "2M"][..], &any].concat());
    write(&[&["commit", "fd:3"][..], &any].concat());
    assert_eq!(std::fs::metadata(&other).unwrap().len(), 2 << 20);
}

#[test]
fn what_a_descriptor_cannot_stand_for_is_refused_with_the_reason() {
    let dir = directory();
    let [base, top] = ["base.raw", "top.qcow2"].map(|name| at(&dir, name));
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    run_ok(&["create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&top)]);
    // What the image names lies beside it, and a descriptor lies nowhere.
    let said = with_image(&top, "<", &["map", "--allow-backing", "any", "fd:3"]).unwrap_err();
    assert!(said.contains("relative"), "{said}");
    let said = with_image(&top, "<", &["snapshot", "-c", "one", "fd:3"]).unwrap_err();
    assert!(said.contains("reading only"), "{said}");
    // The source would be lost.
    let said = with_image(&base, "<", &["convert", "-f", "raw", "-O", "raw", "fd:3", path_str(&base)]).unwrap_err();
    assert!(said.contains("is the source"), "{said}");
    assert!(std::fs::read(&base).unwrap() == vec![7; 1 << 20]);
    let said = run_fails(1, &["create", "-f", "raw", "fd:3", "1M"]);
    assert!(said.contains("fd:3"), "{said}");
    let said = run_fails(2, &["info", "fd:3"]);
    assert!(said.contains("fd:3"), "{said}");
}
