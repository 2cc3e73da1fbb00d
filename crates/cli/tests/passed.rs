//! Sockets and images that another program opened and passed: by number, or by name as a service manager does it.

mod common;

use block::Disk;
use common::{PATIENCE, Server, at, directory, has_tool, path_str, ringdisk, run_fails, run_ok, text};
use driver::{Driver, DriverOptions};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use serde_json::Value;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

/// Higher than any number that a shell is asked to give.
const HIGH: i32 = 100;

/// A copy of a descriptor that children inherit.
fn inheritable(fd: impl AsFd) -> OwnedFd {
    let copy = fcntl_dupfd_cloexec(fd, HIGH).unwrap();
    fcntl_setfd(&copy, FdFlags::empty()).unwrap();
    copy
}

/// A listening socket at `path` for children.
fn listening(path: &Path) -> OwnedFd {
    inheritable(UnixListener::bind(path).unwrap())
}

/// The size of the disk that a guest finds at a socket.
fn disk_bytes(socket: &Path) -> u64 {
    let options = DriverOptions::default().with(|options| {
        options.wait_for_socket_ms = PATIENCE.as_millis() as u64;
        options.queue_size = 64;
    });
    let driver = Driver::connect(socket, options).unwrap();
    let bytes = driver.info().size_bytes;
    driver.disconnect().unwrap();
    bytes
}

/// `ringdisk serve ARGUMENTS` as [`activated_by`] starts it.
fn activated(passed: &[&OwnedFd], names: Option<&str>, arguments: &[&str]) -> Command {
    activated_by("serve", passed, names, arguments)
}

/// `ringdisk COMMAND ARGUMENTS` with these descriptors as numbers 3, 4 and so on, and with these names.
fn activated_by(verb: &str, passed: &[&OwnedFd], names: Option<&str>, arguments: &[&str]) -> Command {
    let places: Vec<String> =
        passed.iter().enumerate().map(|(index, fd)| format!("{}<&{}", index + 3, fd.as_raw_fd())).collect();
    let mut command = Command::new("bash");
    command.args(["-c", &format!("LISTEN_PID=$$ exec \"$0\" \"$@\" {}", places.join(" "))]);
    command.arg(ringdisk().get_program()).arg(verb).args(arguments);
    command.env("LISTEN_FDS", passed.len().to_string()).env_remove("LISTEN_FDNAMES").env_remove("NOTIFY_SOCKET");
    if let Some(names) = names {
        command.env("LISTEN_FDNAMES", names);
    }
    command
}

/// What it says when it refuses; it must do so as wrong usage.
fn refusal(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    said
}

const ROOT: &str = "name=root,format=null,size=1M";
const DATA: &str = "name=data,format=null,size=2M";

#[test]
fn a_socket_that_was_passed_by_number_is_served_and_stays_its_owners() {
    let dir = directory();
    let (image, path) = (at(&dir, "disk.qcow2"), at(&dir, "s"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "3M"]);
    let socket = listening(&path);
    let drive = format!("file={},socket=fd:{}", image.display(), socket.as_raw_fd());
    for _ in 0..2 {
        let server = Server::start(&["--drive", &drive]);
        assert!(server.announced.contains(path_str(&path)), "{}", server.announced);
        assert_eq!(disk_bytes(&path), 3 << 20);
        server.stop();
        assert!(path.exists() && !at(&dir, "disk.qcow2.sock").exists());
    }
    let number = format!("fd:{}", socket.as_raw_fd());
    let server = Server::start(&[path_str(&image), "--socket", &number]);
    assert_eq!(disk_bytes(&path), 3 << 20);
    server.stop();
}

#[test]
fn a_descriptor_is_taken_for_what_it_is() {
    let dir = directory();
    let (image, path) = (at(&dir, "disk.raw"), at(&dir, "s"));
    run_ok(&["create", "-q", "-f", "raw", path_str(&image), "3M"]);
    let file = inheritable(std::fs::File::options().read(true).write(true).open(&image).unwrap());
    let socket = listening(&path);
    let drive = format!("fd={},fd={},format=raw", socket.as_raw_fd(), file.as_raw_fd());
    let server = Server::start(&["--drive", &drive]);
    assert_eq!(disk_bytes(&path), 3 << 20);
    server.stop();
}

#[test]
fn sockets_of_a_service_manager_go_to_the_disks_that_they_are_named_after() {
    let dir = directory();
    let (root, data) = (at(&dir, "1"), at(&dir, "2"));
    let (root_socket, data_socket) = (listening(&root), listening(&data));
    // In another order than the drives.
    let arguments = ["--drive", ROOT, "--drive", DATA];
    let server = Server::start_command(activated(&[&data_socket, &root_socket], Some("data:root"), &arguments));
    assert_eq!((disk_bytes(&root), disk_bytes(&data)), (1 << 20, 2 << 20));
    server.stop();
    assert!(root.exists() && data.exists());
    // A disk that no socket is named after has one of its own.
    let own = at(&dir, "own");
    let with_own = format!("{DATA},socket={}", own.display());
    let arguments = ["--drive", &with_own, "--drive", ROOT];
    let server = Server::start_command(activated(&[&root_socket], Some("root"), &arguments));
    assert_eq!((disk_bytes(&root), disk_bytes(&own)), (1 << 20, 2 << 20));
    server.stop();
    // Nobody has to name the only one.
    let server = Server::start_command(activated(&[&root_socket], None, &["--drive", "format=null,size=5M"]));
    assert_eq!(disk_bytes(&root), 5 << 20);
    server.stop();
}

#[test]
fn images_of_a_service_manager_are_found_by_their_names() {
    let dir = directory();
    let (image, path) = (at(&dir, "disk.raw"), at(&dir, "s"));
    run_ok(&["create", "-q", "-f", "raw", path_str(&image), "3M"]);
    let file = inheritable(std::fs::File::options().read(true).write(true).open(&image).unwrap());
    let (socket, other) = (listening(&path), listening(&at(&dir, "t")));
    let arguments = ["--drive", "name=root,format=raw,file=fd:the-image,socket=fd:door"];
    // What nobody asks for is no socket, so it is left alone.
    let passed = [&socket, &file, &inheritable(std::fs::File::open(dir.path()).unwrap())];
    let server = Server::start_command(activated(&passed, Some("door:the-image:something"), &arguments));
    assert_eq!(disk_bytes(&path), 3 << 20);
    server.stop();
    let said = refusal(activated(&[&socket, &other], Some("door:other"), &arguments));
    assert!(said.contains("the-image") && said.contains("door, other"), "{said}");
}

#[test]
fn a_socket_that_could_belong_to_several_disks_goes_to_none() {
    let dir = directory();
    let (path, other) = (at(&dir, "s"), at(&dir, "t"));
    let (socket, second) = (listening(&path), listening(&other));
    let two = ["--drive", ROOT, "--drive", DATA];
    let twice = format!("{ROOT},socket={}", at(&dir, "own").display());
    let by_number =
        ["--drive", "name=a,format=null,size=1M,socket=fd:3", "--drive", "name=b,format=null,size=1M,socket=fd:4"];
    for (passed, names, arguments, reason) in [
        (vec![&socket], None, &two[..], "root, data"),
        (vec![&socket], Some("rot"), &two, "FileDescriptorName="),
        (vec![&socket, &second], Some("root:root"), &two, "another one"),
        (vec![&socket], Some("root"), &["--drive", &twice], "another one"),
        (vec![&socket, &socket], None, &by_number, "serves another export"),
    ] {
        let said = refusal(activated(&passed, names, arguments));
        assert!(said.contains(reason), "{names:?} {arguments:?}: {said}");
    }
    assert!(UnixStream::connect(&path).is_ok(), "its owner still has it");
}

#[test]
fn what_is_no_listening_socket_is_refused_with_the_reason() {
    let dir = directory();
    let (connected, _other) = UnixStream::pair().unwrap();
    let connected = inheritable(connected);
    let file = inheritable(std::fs::File::open(dir.path()).unwrap());
    for (number, reason) in [(connected.as_raw_fd(), "nobody listens"), (file.as_raw_fd(), "socket"), (9999, "fd:9999")]
    {
        let said = run_fails(2, &["serve", "--drive", &format!("format=null,size=1M,socket=fd:{number}")]);
        assert!(said.contains(reason), "{said}");
    }
}

#[test]
fn systemd_s_socket_activation_starts_a_server_at_the_first_connection() {
    if !has_tool("systemd-socket-activate") {
        return;
    }
    let dir = directory();
    let (root, data) = (at(&dir, "1"), at(&dir, "2"));
    let mut command = Command::new("systemd-socket-activate");
    for socket in [&root, &data] {
        command.args(["--listen", path_str(socket)]);
    }
    command.arg("--fdname=root:data").arg(ringdisk().get_program()).args(["serve", "--drive", DATA, "--drive", ROOT]);
    command.env_remove("NOTIFY_SOCKET").stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = command.spawn().unwrap();
    let sizes = (disk_bytes(&data), disk_bytes(&root));
    common::tool_ok("kill", &["-TERM", &server.id().to_string()]);
    let status = server.wait().unwrap();
    assert_eq!(sizes, (2 << 20, 1 << 20));
    assert!(status.success(), "{status}");
}

#[test]
fn a_script_reads_in_one_line_of_json_where_guests_come_in() {
    let dir = directory();
    let (image, socket) = (at(&dir, "disk.qcow2"), at(&dir, "s"));
    run_ok(&["create", "-q", "-f", "qcow2", path_str(&image), "3M"]);
    let drive =
        format!("file={},name=root,serial=abc,queues=2,queue-size=64,socket={}", image.display(), socket.display());
    let mut command = ringdisk();
    command.args(["serve", "--output", "json", "--drive", &drive]).stdout(Stdio::piped());
    let mut server = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.stdout.take().unwrap()), &mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    let size = disk_bytes(&socket);
    common::tool_ok("kill", &["-TERM", &server.id().to_string()]);
    assert!(server.wait().unwrap().success());
    assert_eq!(told["pid"], server.id());
    let disk = &told["disks"][0];
    let known = (disk["name"].as_str(), disk["serial"].as_str(), disk["file"].as_str(), disk["size-bytes"].as_u64());
    assert_eq!(known, (Some("root"), Some("abc"), Some(path_str(&image)), Some(size)));
    assert!(disk["layers"][0].as_str().is_some_and(|layer| layer.contains("qcow2")), "{told}");
    let export = &disk["exports"][0];
    assert_eq!((export["socket"].as_str(), export["read-only"].as_bool()), (Some(path_str(&socket)), Some(false)));
    assert_eq!((export["queues"].as_u64(), export["queue-size"].as_u64()), (Some(2), Some(64)));
}

/// Whether an NBD server is at a socket.
fn greets(socket: &Path) -> bool {
    use std::io::Read as _;
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 8];
    stream.read_exact(&mut greeting).unwrap();
    greeting == *b"NBDMAGIC"
}

#[test]
fn nbd_clients_come_in_at_sockets_that_were_passed() {
    let dir = directory();
    let (nbd, guest) = (at(&dir, "nbd"), at(&dir, "guest"));
    let (nbd_socket, guest_socket) = (listening(&nbd), listening(&guest));
    // The only one, without a word of it.
    let server = Server::start_command(activated_by("nbd", &[&nbd_socket], None, &["--drive", "format=null,size=1M"]));
    assert!(server.announced.contains(path_str(&nbd)), "{}", server.announced);
    assert!(greets(&nbd));
    server.stop();
    assert!(nbd.exists(), "its file belongs to whoever passed it");
    let several = activated_by("nbd", &[&nbd_socket, &guest_socket], Some("n:g"), &["--drive", "format=null,size=1M"]);
    assert!(refusal(several).contains("fd:NAME"));
    // Beside a guest's, by name, and by a call.
    let control = at(&dir, "control");
    let arguments = ["--drive", ROOT, "--nbd", "fd:clients", "--control", path_str(&control)];
    let late = at(&dir, "late");
    let late_socket = listening(&late);
    let passed = [&nbd_socket, &guest_socket, &late_socket];
    let config = at(&dir, "disks.toml");
    let export = "[[export]]\ndisk = 'extra'\nsocket = 'fd:late'\n";
    let drive = "[[drive]]\nname = 'extra'\nformat = 'null'\nsize = '2M'\nexport = false\n";
    std::fs::write(&config, format!("{drive}{export}")).unwrap();
    let arguments = [&arguments[..], &["--config", path_str(&config)]].concat();
    let server = Server::start_command(activated(&passed, Some("clients:root:late"), &arguments));
    assert!(greets(&nbd));
    assert_eq!((disk_bytes(&guest), disk_bytes(&late)), (1 << 20, 2 << 20));
    let call = ["ctl", "--control", path_str(&control), "export", "extra", "--socket", "fd:nobody"];
    assert!(run_fails(1, &call).contains("nobody"));
    let own = at(&dir, "own");
    let group = std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(dir.path()).unwrap());
    let call = ["ctl", "--control", path_str(&control), "export", "extra", "--socket", path_str(&own)];
    run_ok(&[&call[..], &["--socket-mode", "0640", "--socket-group", &group.to_string()]].concat());
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&own).unwrap());
    assert_eq!(mode & 0o777, 0o640);
    server.stop();
}

/// The kernel would give each who connects to a guest's server or to the one of NBD clients.
#[test]
fn one_socket_does_not_serve_a_guest_and_nbd_clients_at_once() {
    let dir = directory();
    let [path, other, control] = ["s", "t", "control"].map(|name| at(&dir, name));
    let (socket, second) = (listening(&path), listening(&other));
    // The same socket under two numbers and names, too.
    let with_door = format!("{ROOT},socket=fd:door");
    for (passed, names, nbd) in
        [(vec![&socket], "door", "fd:door"), (vec![&socket, &socket], "door:clients", "fd:clients")]
    {
        let said = refusal(activated(&passed, Some(names), &["--drive", &with_door, "--nbd", nbd]));
        assert!(said.contains("serves another export"), "{said}");
    }
    // Several disks for NBD clients are at one socket, whatever it is called.
    let config = at(&dir, "disks.toml");
    let drive = "[[drive]]\nname = 'data'\nformat = 'null'\nsize = '2M'\nexport = false\n";
    let export = "[[export]]\ndisk = 'data'\ntype = 'nbd'\nsocket = 'fd:again'\n";
    std::fs::write(&config, format!("{drive}{export}")).unwrap();
    let given = ["--drive", &with_door, "--nbd", "fd:clients", "--config", path_str(&config)];
    let arguments = [&given[..], &["--control", path_str(&control)]].concat();
    let command = activated(&[&socket, &second, &second], Some("door:clients:again"), &arguments);
    let server = Server::start_command(command);
    for (name, size) in [("root", "1 MiB"), ("data", "2 MiB")].repeat(4) {
        let uri = format!("nbd+unix:///{name}?socket={}", other.display());
        let info = run_ok(&["info", "-f", "raw", &uri]);
        assert!(info.contains(size), "{name}: {info}");
    }
    let fails = |words: &[&str]| {
        let call = [&["ctl", "--control", path_str(&control), "export", "data"], words].concat();
        let said = run_fails(1, &call);
        assert!(said.contains("serves another export"), "{words:?}: {said}");
    };
    fails(&["--nbd", "fd:door"]);
    fails(&["--socket", "fd:clients"]);
    assert_eq!(disk_bytes(&path), 1 << 20);
    server.stop();
}
