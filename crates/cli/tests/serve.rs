//! `ringdisk serve`: ready means ready, an end is an orderly end, and images in use are left alone.

mod common;

use common::{
    PATIENCE, Server, assert_valid, at, directory, has_tool, info_after_kill, path_str, ringdisk, run_fails, run_ok,
    text, tool, tool_ok,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

fn create(image: &Path, format: &str, size: &str) {
    run_ok(&["create", "-q", "-f", format, path_str(image), size]);
}

#[test]
fn several_disks_are_connectable_when_ready_and_leave_nothing_behind() {
    let dir = directory();
    let (one, two) = (at(&dir, "one.qcow2"), at(&dir, "two.raw"));
    create(&one, "qcow2", "64M");
    create(&two, "raw", "32M");
    let (two_socket, null_socket, pidfile) = (at(&dir, "2.sock"), at(&dir, "null.sock"), at(&dir, "pid"));
    let two_options = format!("file={},format=raw,readonly=on,serial=two", two.display());
    let null_options = format!("format=null,size=4G,socket={}", null_socket.display());
    let server = Server::start(&[
        path_str(&one),
        "--drive",
        &null_options,
        "--drive",
        &two_options,
        "--pidfile",
        path_str(&pidfile),
        "--socket",
        path_str(&at(&dir, "one.qcow2.sock")),
        "--socket",
        path_str(&two_socket),
    ]);
    let sockets = [at(&dir, "one.qcow2.sock"), null_socket, two_socket];
    for socket in &sockets {
        UnixStream::connect(socket).unwrap_or_else(|error| panic!("{}: {error}", socket.display()));
        let mode = std::fs::metadata(socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{}", socket.display());
    }
    assert_eq!(std::fs::read_to_string(&pidfile).unwrap().trim(), server.pid().to_string());
    assert!(server.announced.contains("read-only"), "{}", server.announced);
    server.stop();
    for left in sockets.iter().chain([&pidfile]) {
        assert!(!left.exists(), "{} is left behind", left.display());
    }
    if has_tool("qemu-img") {
        assert_valid(&one, false);
    }
}

/// Ends a server with these signals while a guest writes. The image is clean then.
fn ends_cleanly_under_load(signals: &[&str]) {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    let (image, socket) = (at(&dir, "disk.qcow2"), at(&dir, "s"));
    create(&image, "qcow2", "64M");
    let server = Server::start(&[path_str(&image), "--socket", path_str(&socket)]);
    let mut load = ringdisk();
    load.args(["bench", "--destroy", "--rw", "randwrite", "--time", "60", "--socket", path_str(&socket)]);
    let mut load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while std::fs::metadata(&image).unwrap().len() < 4 << 20 {
        assert!(Instant::now() < deadline, "the load does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    server.stop_by(signals);
    assert!(!socket.exists());
    // Its disk is gone.
    assert_eq!(load.wait().unwrap().code(), Some(1));
    assert_valid(&image, false);
}

#[test]
fn sigterm_under_load_leaves_a_clean_image() {
    ends_cleanly_under_load(&["TERM"]);
}

#[test]
fn a_terminal_that_goes_under_load_leaves_a_clean_image() {
    // The shell sends one, the kernel another; a service manager sends it with its SIGTERM.
    ends_cleanly_under_load(&["HUP", "HUP", "TERM"]);
}

#[test]
fn the_socket_of_a_killed_server_is_taken_over_and_that_of_a_living_one_is_not() {
    let dir = directory();
    let (image, socket) = (at(&dir, "disk.raw"), at(&dir, "disk.raw.sock"));
    create(&image, "raw", "1M");
    Server::start(&[path_str(&image)]).kill();
    assert!(socket.exists());
    info_after_kill(&image);
    let server = Server::start(&[path_str(&image)]);
    let other = at(&dir, "other.raw");
    create(&other, "raw", "1M");
    let said = run_fails(1, &["serve", path_str(&other), "--socket", path_str(&socket)]);
    assert!(said.contains(path_str(&socket)), "{said}");
    UnixStream::connect(&socket).unwrap();
    server.stop();
    assert!(!socket.exists());
}

#[test]
fn the_service_manager_is_told_when_it_is_ready_and_when_it_stops() {
    let dir = directory();
    let notify = at(&dir, "notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let receive = || {
        let mut buf = [0; 64];
        let length = manager.recv(&mut buf).unwrap();
        text(&buf[..length])
    };
    let socket = at(&dir, "s");
    let mut command = ringdisk();
    command.args(["serve", "--drive", "format=null,size=1M", "--socket", path_str(&socket)]);
    let server = Server::start_command({
        command.env("NOTIFY_SOCKET", &notify);
        command
    });
    assert_eq!(receive(), "READY=1");
    UnixStream::connect(&socket).unwrap();
    server.stop();
    assert_eq!(receive(), "STOPPING=1");
}

#[test]
fn a_service_manager_that_watches_is_told_again_and_again() {
    let dir = directory();
    let notify = at(&dir, "notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let receive = || {
        let mut buf = [0; 64];
        let length = manager.recv(&mut buf).unwrap();
        text(&buf[..length])
    };
    let mut command = ringdisk();
    command.args(["serve", "--drive", "format=null,size=1M", "--socket", path_str(&at(&dir, "s"))]);
    command.env("NOTIFY_SOCKET", &notify).env("WATCHDOG_USEC", "100000");
    let server = Server::start_command(command);
    assert_eq!([receive(), receive(), receive()], ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    server.stop();
}

#[test]
fn an_image_in_use_is_refused_by_qemu_img_and_by_us() {
    if !has_tool("qemu-img") {
        return;
    }
    let dir = directory();
    for format in ["raw", "qcow2"] {
        let image = at(&dir, format);
        create(&image, format, "1M");
        let server = Server::start(&["--drive", &format!("file={},format={format}", image.display())]);
        // qemu-img reads a raw image that somebody else has open. It does not read a qcow2 image then.
        let name = path_str(&image);
        let refused: &[&[&str]] = match format {
            "raw" => &[&["resize", "-f", "raw", name, "2M"]],
            _ => &[&["info", name], &["check", name], &["resize", "-f", format, name, "2M"]],
        };
        for arguments in refused {
            let output = tool("qemu-img", arguments);
            assert!(!output.status.success(), "qemu-img {arguments:?} went through");
            assert!(text(&output.stderr).contains("lock"), "{}", text(&output.stderr));
        }
        for arguments in [&["info"] as &[&str], &["serve", "--socket", path_str(&at(&dir, "x"))], &["create", "-q"]] {
            let mut arguments = [arguments, &[path_str(&image)]].concat();
            if arguments[0] == "create" {
                arguments.push("5M");
            }
            let said = run_fails(1, &arguments);
            assert!(said.contains(path_str(&image)) && said.contains("use"), "{arguments:?}: {said}");
        }
        run_ok(&["info", "-U", path_str(&image)]);
        server.stop();
        run_ok(&["info", path_str(&image)]);
    }
}

/// `qemu-io` with an image open, until it is dropped.
struct QemuIo {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl QemuIo {
    fn open(image: &Path, format: &str, read_only: bool) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", format]).args(read_only.then_some("-r")).arg(image);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut qemu = Self { child, stdin, stdout };
        qemu.wait_for_an_answer();
        qemu
    }

    /// It answers commands only once the image is open.
    fn wait_for_an_answer(&mut self) {
        writeln!(self.stdin, "length").unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut line = String::new();
        while !line.contains("MiB") {
            assert!(Instant::now() < deadline, "qemu-io does not answer");
            line.clear();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "qemu-io ended");
        }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = writeln!(self.stdin, "quit");
        let _ = self.child.wait();
    }
}

#[test]
fn an_image_that_qemu_has_open_is_refused_and_one_that_it_reads_can_be_read() {
    if !has_tool("qemu-io") {
        return;
    }
    let dir = directory();
    let image = at(&dir, "disk.qcow2");
    create(&image, "qcow2", "1M");
    let qemu = QemuIo::open(&image, "qcow2", false);
    let said = run_fails(1, &["serve", path_str(&image)]);
    assert!(said.contains("use"), "{said}");
    assert!(!at(&dir, "disk.qcow2.sock").exists());
    drop(qemu);
    let qemu = QemuIo::open(&image, "qcow2", true);
    run_fails(1, &["serve", path_str(&image)]);
    Server::start(&["--drive", &format!("file={},readonly=on", image.display())]).stop();
    drop(qemu);
    Server::start(&[path_str(&image)]).stop();
}

#[test]
fn a_backing_file_elsewhere_is_opened_only_if_the_user_named_it() {
    let dir = directory();
    let (vms, bases) = (at(&dir, "vms"), at(&dir, "bases"));
    std::fs::create_dir_all(&vms).unwrap();
    std::fs::create_dir_all(&bases).unwrap();
    let (image, base) = (vms.join("disk.qcow2"), bases.join("base.raw"));
    create(&base, "raw", "1M");
    run_ok(&["create", "-q", "-f", "qcow2", "-b", path_str(&base), "-F", "raw", path_str(&image)]);
    let said = run_fails(1, &["serve", path_str(&image)]);
    assert!(said.contains(path_str(&base)) && said.contains("--allow-backing"), "{said}");
    for more in [&["--backing", path_str(&base)] as &[&str], &["--allow-backing", "any"]] {
        Server::start(&[&[path_str(&image)], more].concat()).stop();
    }
    run_fails(1, &["serve", path_str(&image), "--backing", path_str(&base), "--allow-backing", "deny"]);
}

#[test]
fn a_socket_has_the_mode_and_the_group_that_its_drive_asks_for() {
    let dir = directory();
    let group = std::fs::metadata(dir.path()).unwrap().gid();
    for (options, mode) in [
        (format!("socket-group={group}"), 0o660),
        (format!("socket-group={group},socket-mode=0666"), 0o666),
        ("socket-mode=0640".to_owned(), 0o640),
    ] {
        let socket = at(&dir, "s");
        let drive = format!("format=null,size=1M,socket={},{options}", socket.display());
        let server = Server::start(&["--drive", &drive]);
        let metadata = std::fs::metadata(&socket).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.gid()), (mode, group), "{options}");
        server.stop();
    }
}

#[test]
fn a_journal_gets_no_flags_to_copy() {
    let dir = directory();
    let drive = format!("format=null,size=1M,socket={}", at(&dir, "s").display());
    let (mut reader, writer) = std::io::pipe().unwrap();
    let stat = rustix::fs::fstat(&writer).unwrap();
    for (journal, has_flags) in [(format!("{}:{}", stat.st_dev, stat.st_ino), false), ("1:2".to_owned(), true)] {
        let mut command = ringdisk();
        command.args(["serve", "--drive", &drive]).env("JOURNAL_STREAM", journal);
        let mut server = command.stdout(writer.try_clone().unwrap()).spawn().unwrap();
        let mut said = String::new();
        while !said.contains("ready\n") || has_flags && !said.contains("virtio_uml") {
            let mut bytes = [0; 4096];
            let count = reader.read(&mut bytes).unwrap();
            said += &text(&bytes[..count]);
        }
        tool_ok("kill", &["-TERM", &server.id().to_string()]);
        assert!(server.wait().unwrap().success());
        assert_eq!(said.contains("Attach"), has_flags, "{said}");
    }
}

#[test]
fn logs_call_a_disk_by_what_its_user_knows_it_by() {
    let dir = directory();
    let image = at(&dir, "disk.raw");
    create(&image, "raw", "1M");
    for (options, name) in [("", path_str(&image)), (",serial=a-serial", "a-serial"), (",serial=x,name=root", "root")] {
        let server = Server::start(&["--drive", &format!("file={},format=raw{options}", image.display())]);
        // What is no message ends the session, and the log says so.
        let mut peer = UnixStream::connect(at(&dir, "disk.raw.sock")).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        peer.write_all(&[0xff; 64]).unwrap();
        let _ = peer.read(&mut [0; 64]);
        let (status, said) = server.terminate();
        assert!(status.success(), "{status}");
        assert!(said.contains(&format!("disk={name}")), "{name} is not in: {said}");
    }
}

/// Serves `fd:3`, which is `image` opened by somebody else.
fn serve_descriptor(image: &Path, mode: &str, socket: &Path, options: &str) -> Command {
    let drive = format!("file=fd:3,{options},socket={}", socket.display());
    let mut command = Command::new("bash");
    let line = format!("exec \"$1\" serve --drive \"$2\" 3{mode}\"$3\"");
    command.args(["-c", &line, "bash", env!("CARGO_BIN_EXE_ringdisk"), &drive, path_str(image)]);
    command
}

#[test]
fn an_image_that_was_passed_as_a_descriptor_is_served_and_locked() {
    let dir = directory();
    let (image, socket) = (at(&dir, "disk.qcow2"), at(&dir, "s"));
    create(&image, "qcow2", "1M");
    let server = Server::start_command(serve_descriptor(&image, "<>", &socket, "format=qcow2"));
    UnixStream::connect(&socket).unwrap();
    let said = run_fails(1, &["serve", path_str(&image)]);
    assert!(said.contains("use"), "{said}");
    server.stop();
    let output = serve_descriptor(&image, "<", &socket, "format=qcow2").output().unwrap();
    assert!(text(&output.stderr).contains("reading only"), "{output:?}");
    Server::start_command(serve_descriptor(&image, "<", &socket, "format=qcow2,readonly=on")).stop();
    let said = run_fails(2, &["serve", "--drive", "file=fd:3", "--socket", path_str(&socket)]);
    assert!(said.contains("fd:3"), "{said}");
}

#[test]
fn a_pidfile_of_a_running_server_is_not_taken() {
    let dir = directory();
    let pidfile = at(&dir, "pid");
    let arguments = |socket: &str| {
        let socket = at(&dir, socket);
        ["--drive".into(), format!("format=null,size=1M,socket={}", socket.display()), "--pidfile".into(), {
            path_str(&pidfile).to_owned()
        }]
    };
    let server = Server::start(&arguments("one"));
    let output = ringdisk().arg("serve").args(arguments("two")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains(&server.pid().to_string()), "{}", text(&output.stderr));
    assert!(!at(&dir, "two").exists());
    server.stop();
    assert!(!pidfile.exists());
}
