//! `ringdisk nbd`: disks for other people's NBD clients, from the command line.

mod common;

use common::{Server, directory, has_tool, path_str, ringdisk, run_fails, run_ok, tool_ok};
use std::os::unix::fs::PermissionsExt;

#[test]
fn disks_are_served_under_their_names_until_a_signal() {
    if !has_tool("nbdinfo") || !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, other, socket) = (path("disk.qcow2"), path("other.raw"), path("nbd"));
    run_ok(&["create", "-q", "-f", "qcow2", &image, "16M"]);
    run_ok(&["create", "-q", "-f", "raw", &other, "1M"]);
    let mut command = ringdisk();
    let drive = format!("file={other},format=raw,name=other,readonly=on");
    command.args(["nbd", &image, "--socket", &socket, "--export-name", "root", "--description", "a system"]);
    command.args(["--drive", &drive]);
    let server = Server::start_command(command);
    assert!(server.announced.contains(&format!("at nbd+unix:///root?socket={socket}")), "{}", server.announced);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    let list = tool_ok("nbdinfo", &["--list", &uri("")]);
    assert!(
        list.contains("export=\"root\"") && list.contains("a system") && list.contains("export=\"other\""),
        "{list}"
    );
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 7 1M 64k", &uri("root")]);
    assert!(tool_ok("nbdinfo", &["--json", &uri("other")]).contains("\"is_read_only\": true"));
    server.stop();
    assert!(!std::path::Path::new(&socket).exists());
    tool_ok("qemu-io", &["-r", "-f", "qcow2", "-c", "read -P 7 1M 64k", &image]);
}

#[test]
fn a_server_without_a_place_or_without_a_disk_says_so() {
    assert!(run_fails(2, &["nbd", "disk.raw"]).contains("--socket"));
    assert!(run_fails(2, &["nbd", "--socket", "x"]).contains("IMAGE"));
}

#[test]
fn keys_that_are_for_guests_are_refused_with_the_reason() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    for (options, said) in [
        ("socket=/s", "--socket or --listen"),
        ("socket-mode=0660", "give --socket-mode"),
        ("queues=2", "queues="),
        ("queue-size=128", "queue-size="),
        ("guest-memory=any", "guest-memory="),
        ("logical_block_size=4096", "logical_block_size="),
    ] {
        let drive = format!("format=null,size=1M,{options}");
        let refused = run_fails(2, &["nbd", "--socket", path_str(&socket), "--drive", &drive]);
        assert!(refused.contains(said), "{options}: {refused}");
    }
    assert!(!socket.exists());
}

#[test]
fn a_socket_has_the_mode_that_was_asked_for() {
    let directory = directory();
    let socket = directory.path().join("nbd");
    let mut command = ringdisk();
    command.args(["nbd", "--drive", "format=null,size=1M,poll-max-us=5", "--socket", path_str(&socket)]);
    command.args(["--socket-mode", "0640", "--buffer-memory", "1M"]);
    let server = Server::start_command(command);
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o640);
    server.stop();
    let tcp = ["nbd", "--drive", "format=null,size=1M", "--listen", "127.0.0.1:1", "--socket-mode", "0640"];
    assert!(run_fails(2, &tcp).contains("Unix socket"));
}

#[test]
fn one_signal_ends_it_while_requests_are_held_that_the_storage_fails() {
    if !has_tool("qemu-io") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, socket) = (path("disk.raw"), path("nbd"));
    run_ok(&["create", "-q", "-f", "raw", &image, "1M"]);
    let mut command = ringdisk();
    let drive = format!("file={image},format=raw,filter=error:kinds=write,on-error=hold");
    command.args(["nbd", "--drive", &drive, "--socket", &socket, "--give-up-after", "1"]);
    let server = Server::start_command(command);
    let uri = format!("nbd+unix:///?socket={socket}");
    let mut client = std::process::Command::new("qemu-io");
    client.args(["-f", "raw", "-c", "write 0 4k", &uri]).stdout(std::process::Stdio::null());
    let mut client = client.stderr(std::process::Stdio::null()).spawn().unwrap();
    // Its write is held for as long as anybody waits.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(client.try_wait().unwrap().is_none(), "the write ended");
    let (status, said) = server.terminate();
    client.wait().unwrap();
    assert!(status.code().is_some(), "{status}: {said}");
    assert!(!std::path::Path::new(&socket).exists(), "the end was in order");
}

#[test]
fn a_disk_of_a_server_is_read_written_mapped_and_served_as_a_file_is() {
    if !has_tool("qemu-img") || !has_tool("qemu-io") || !has_tool("nbdcopy") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (source, raw, inner, copy) = (path("source.raw"), path("raw.raw"), path("inner.raw"), path("copy.qcow2"));
    let mut bytes = common::numbered(3 << 20);
    bytes.resize(8 << 20, 0);
    std::fs::write(&source, &bytes).unwrap();
    run_ok(&["create", "-q", "-f", "raw", &raw, "8M"]);
    run_ok(&["create", "-q", "-f", "raw", &inner, "16M"]);
    let socket = path("nbd");
    let mut command = ringdisk();
    let drive = format!("file={inner},format=raw,name=inner");
    command.args(["nbd", &raw, "--socket", &socket, "--export-name", "raw", "--drive", &drive]);
    let server = Server::start_command(command);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={socket}");
    // As a raw target and source.
    run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", &source, &uri("raw")]);
    run_ok(&["convert", "-f", "raw", "-O", "qcow2", &uri("raw"), &copy]);
    tool_ok("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &copy]);
    run_ok(&["compare", "-f", "raw", "-F", "raw", &source, &uri("raw")]);
    let info = run_ok(&["info", "-f", "raw", &uri("raw")]);
    assert!(info.contains("8 MiB") && info.contains("protocol type: nbd\n"), "{info}");
    let map = run_ok(&["map", "-f", "raw", "--output=json", &uri("raw")]);
    assert!(map.contains("\"zero\": true") || map.contains("\"data\": false"), "{map}");
    // With an image in it, made by somebody else: read, written and served again.
    tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", &uri("inner"), "8M"]);
    run_ok(&["convert", "-n", "-f", "raw", "-O", "qcow2", &source, &uri("inner")]);
    run_ok(&["check", "-f", "qcow2", &uri("inner")]);
    tool_ok("qemu-img", &["compare", "-q", "-f", "raw", "-F", "qcow2", &source, &uri("inner")]);
    let outer = path("outer");
    let mut command = ringdisk();
    command.args(["nbd", "--socket", &outer, "--drive", &format!("file={},format=qcow2,name=again", uri("inner"))]);
    let again = Server::start_command(command);
    let outer_uri = format!("nbd+unix:///again?socket={outer}");
    tool_ok("qemu-io", &["-f", "raw", "-c", "write -P 9 4M 1M", "-c", "flush", &outer_uri]);
    let back = path("back");
    tool_ok("nbdcopy", &[&outer_uri, &back]);
    again.stop();
    bytes[4 << 20..5 << 20].fill(9);
    assert!(std::fs::read(&back).unwrap() == bytes);
    run_ok(&["check", "-f", "qcow2", &uri("inner")]);
    server.stop();
}

#[test]
fn what_fio_writes_over_nbd_it_finds_again() {
    if !has_tool("fio") || !tool_ok("fio", &["--enghelp"]).contains("nbd") {
        return;
    }
    let directory = directory();
    let path = |name: &str| path_str(&directory.path().join(name)).to_owned();
    let (image, socket) = (path("disk.qcow2"), path("nbd"));
    run_ok(&["create", "-q", "-f", "qcow2", &image, "64M"]);
    let mut command = ringdisk();
    command.args(["nbd", &image, "--socket", &socket]);
    let server = Server::start_command(command);
    let uri = format!("--uri=nbd+unix:///?socket={socket}");
    let words = ["--name=verified", "--ioengine=nbd", "--thread", "--rw=randwrite", "--bsrange=4k-64k", "--iodepth=16"];
    let more = [
        "--size=16M",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--fsync=32",
        "--randrepeat=1",
        "--verify_state_save=0",
        &uri,
    ];
    tool_ok("fio", &[&words[..], &more].concat());
    server.stop();
    run_ok(&["check", &image]);
}
