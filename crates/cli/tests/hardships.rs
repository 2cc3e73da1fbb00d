//! What happens around a server rather than in its disks: a standard error that takes nothing more, a terminal that
//! goes away, few descriptors.

mod common;

use common::{PATIENCE, Server, at, directory, path_str, ringdisk, run_ok};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

/// `ringdisk serve ARGUMENTS`, started by a shell with what `before` does to the process.
fn start_after(before: &str, arguments: &[&str]) -> Server {
    let mut command = Command::new("sh");
    command.env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
    command.args(["-c", &format!("{before} exec \"$0\" \"$@\"")]).arg(ringdisk().get_program());
    command.arg("serve").args(arguments);
    Server::start_command(command)
}

fn reads(socket: &Path) {
    run_ok(&["bench", "--count", "20", "--socket", path_str(socket)]);
}

#[test]
fn a_log_that_cannot_be_written_stops_neither_reactors_nor_sessions() {
    let dir = directory();
    let sockets = ["one", "two"].map(|name| at(&dir, name));
    let drives = [0, 1].map(|index| {
        let image = at(&dir, &format!("{index}.raw"));
        run_ok(&["create", "-q", "-f", "raw", path_str(&image), "1M"]);
        format!("file={},format=raw,engine=io_uring,socket={}", image.display(), sockets[index].display())
    });
    // The reactor speaks when the first ring comes. It would speak of broken rings in the same way.
    let server = start_after(
        "exec 2>/dev/full;",
        &["--log-level=warn,ringdisk_engine::uring=info", "--reactors=1", "--drive", &drives[0], "--drive", &drives[1]],
    );
    for _ in 0..2 {
        sockets.iter().for_each(|socket| reads(socket));
        // The export's thread complains of this peer.
        let mut peer = UnixStream::connect(&sockets[0]).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        peer.write_all(&[0xff; 64]).unwrap();
        match peer.read(&mut [0; 64]) {
            Ok(0) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            other => panic!("the peer is not cut off: {other:?}"),
        }
    }
    server.stop();
}

#[test]
fn more_descriptors_than_the_soft_limit_allows_are_no_trouble() {
    let dir = directory();
    let sockets = ["one", "two", "three", "four"].map(|name| at(&dir, name));
    let drives = sockets.iter().flat_map(|socket| {
        ["--drive".to_owned(), format!("format=null,size=1G,queues=16,socket={}", socket.display())]
    });
    let arguments: Vec<String> = drives.collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let server = start_after("ulimit -S -n 64;", &arguments);
    for socket in &sockets {
        run_ok(&["bench", "--queues=16", "--count=160", "--socket", path_str(socket)]);
    }
    server.stop();
}

#[test]
fn a_server_that_was_started_under_nohup_stays_when_its_terminal_goes() {
    let dir = directory();
    let socket = at(&dir, "s");
    let drive = format!("format=null,size=1G,socket={}", socket.display());
    let server = start_after("trap '' HUP;", &["--drive", &drive]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    assert_eq!(u64::from_str_radix(ignored.trim(), 16).unwrap() & 1, 1, "SIGHUP is the first signal");
    server.signal("HUP");
    reads(&socket);
    server.stop();
}

#[test]
fn a_repair_goes_on_though_nobody_reads_what_it_finds() {
    let dir = directory();
    let image = at(&dir, "leak.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "1M"]);
    // A cluster that nothing refers to has a refcount.
    let file = std::fs::OpenOptions::new().write(true).open(&image).unwrap();
    file.set_len(11 << 16).unwrap();
    file.write_all_at(&[0, 1], (2 << 16) + 20).unwrap();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let check = |more: &[&str]| ringdisk().arg("check").args(more).arg(&image).stderr(full()).status().unwrap().code();
    assert_eq!(check(&[]), Some(3));
    assert_eq!(check(&["-r", "leaks"]), Some(0));
    assert_eq!(check(&[]), Some(0));
}
