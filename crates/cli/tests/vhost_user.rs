//! Image commands on the disk of a server that runs: `vhost-user:SOCKET` in the place of a file.

mod common;

use common::{Server, at, directory, has_tool, path_str, run, run_fails, run_ok, text, tool_ok};
use std::path::Path;

const SIZE: usize = 3 << 20;

/// Data, zeros, and data that no page ends with.
fn contents() -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..SIZE).map(|index| (index / 7) as u8).collect();
    bytes[1 << 20..2 << 20].fill(0);
    bytes
}

/// The image served by Ringdisk, and its name as a source.
fn serve(dir: &tempfile::TempDir, image: &Path, format: &str) -> (Server, String) {
    let socket = at(dir, "s");
    let drive = format!("file={},format={format},socket={}", path_str(image), path_str(&socket));
    (Server::start(&["--drive", &drive]), format!("vhost-user:{}", path_str(&socket)))
}

#[test]
fn a_servers_disk_is_a_source_of_every_command_that_reads() {
    let dir = directory();
    let (image, copy) = (at(&dir, "disk.raw"), at(&dir, "copy.qcow2"));
    std::fs::write(&image, contents()).unwrap();
    let (_server, name) = serve(&dir, &image, "raw");
    let said = run_ok(&["info", "-f", "raw", &name]);
    assert!(said.contains("(3145728 bytes)") && said.contains("disk size: unavailable"), "{said}");
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &name, path_str(&copy)]);
    run_ok(&["compare", "-f", "raw", &name, path_str(&copy)]);
    let part = at(&dir, "part.raw");
    run_ok(&[
        "dd",
        "-f",
        "raw",
        &format!("if={name}"),
        &format!("of={}", path_str(&part)),
        "bs=1000",
        "skip=3",
        "count=9",
    ]);
    assert_eq!(std::fs::read(&part).unwrap()[..6000], contents()[3000..9000]);
    assert!(run_ok(&["map", "-f", "raw", &name]).contains("vhost-user"));
    if has_tool("qemu-img") {
        tool_ok("qemu-img", &["compare", "-f", "raw", path_str(&image), path_str(&copy)]);
    }
}

#[test]
fn a_servers_disk_is_a_target_and_holds_what_was_written() {
    let dir = directory();
    let (source, image) = (at(&dir, "source.raw"), at(&dir, "disk.qcow2"));
    std::fs::write(&source, contents()).unwrap();
    run_ok(&["create", "-f", "qcow2", path_str(&image), "4M"]);
    let (server, name) = serve(&dir, &image, "qcow2");
    // What was there before must not show through.
    let old = at(&dir, "old.raw");
    std::fs::write(&old, vec![9; 4 << 20]).unwrap();
    for arguments in [&["-n"][..], &[]] {
        let convert = |from: &Path| {
            let words = [&["convert", "-f", "raw", "-O", "raw"], arguments, &[path_str(from), &name]].concat();
            run_ok(&words);
        };
        convert(&old);
        convert(&source);
        assert!(run(&["compare", "-f", "raw", "-F", "raw", path_str(&source), &name]).status.code() == Some(1));
    }
    let found = at(&dir, "found.raw");
    run_ok(&["convert", "-f", "raw", "-O", "raw", &name, path_str(&found)]);
    let bytes = std::fs::read(&found).unwrap();
    assert!(bytes[..SIZE] == contents(), "the source");
    assert!(bytes[SIZE..].iter().all(|byte| *byte == 9), "what was behind it");
    let (status, said) = server.terminate();
    assert!(status.success(), "{said}");
    assert!(run_ok(&["check", path_str(&image)]).contains("No errors"));
    run_ok(&["compare", "-F", "raw", path_str(&image), path_str(&found)]);
}

#[test]
fn an_image_lies_in_a_servers_disk_as_in_a_device() {
    let dir = directory();
    let (source, inner, disk) = (at(&dir, "source.raw"), at(&dir, "inner.qcow2"), at(&dir, "disk.raw"));
    std::fs::write(&source, contents()).unwrap();
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", path_str(&source), path_str(&inner)]);
    let mut bytes = std::fs::read(&inner).unwrap();
    bytes.resize(8 << 20, 0);
    std::fs::write(&disk, bytes).unwrap();
    let (_server, name) = serve(&dir, &disk, "raw");
    assert!(run_ok(&["info", &name]).contains("file format: qcow2"));
    run_ok(&["compare", "-F", "raw", &name, path_str(&source)]);
}

#[test]
fn what_a_servers_disk_cannot_be_is_refused_with_the_reason() {
    let dir = directory();
    let (small, large) = (at(&dir, "small.raw"), at(&dir, "large.raw"));
    std::fs::write(&small, [1; 4096]).unwrap();
    std::fs::write(&large, [1; 8192]).unwrap();
    let (_server, name) = serve(&dir, &small, "raw");
    let said = run_fails(1, &["convert", "-f", "raw", "-O", "raw", path_str(&large), &name]);
    assert!(said.contains("has 4096 bytes"), "{said}");
    let said = run_fails(1, &["convert", "-f", "raw", "-O", "qcow2", path_str(&large), &name]);
    assert!(said.contains("has 4096 bytes, and the image needs"), "{said}");
    let said = run_fails(1, &["info", "vhost-user:/nonexistent/s"]);
    assert!(said.contains("/nonexistent/s"), "{said}");
    assert!(!Path::new(&name).exists(), "no file of that name is made");
    let output = run(&["info", "-f", "raw", &name]);
    assert!(output.status.success(), "the server is as it was: {}", text(&output.stderr));
}
