//! `snapshot=on`: what guests write is gone with the daemon, however that ends, and the image is not touched.

mod common;

use common::{Server, at, directory, has_tool, numbered, path_str, ringdisk, run, run_fails, run_ok, text, tool_ok};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: usize = 3 << 20;

/// An overlay over a raw base, and what a guest sees of it.
struct Images {
    dir: tempfile::TempDir,
    files: [PathBuf; 2],
    before: Vec<(Vec<u8>, Times)>,
    temporary: PathBuf,
}

impl Images {
    fn new() -> Self {
        let dir = directory();
        let (base, top) = (at(&dir, "base.raw"), at(&dir, "top.qcow2"));
        std::fs::write(&base, numbered(SIZE)).unwrap();
        run_ok(&["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", path_str(&top)]);
        let temporary = at(&dir, "tmp");
        std::fs::create_dir(&temporary).unwrap();
        let files = [base, top];
        let before = files.iter().map(|file| state(file)).collect();
        Self { dir, files, before, temporary }
    }

    fn socket(&self) -> PathBuf {
        at(&self.dir, "s")
    }

    fn disk(&self) -> String {
        format!("vhost-user:{}", self.socket().display())
    }

    fn serve(&self, mut command: Command) -> Server {
        let drive = format!("name=vm,file={},snapshot=on,socket={}", self.files[1].display(), self.socket().display());
        command.env("TMPDIR", &self.temporary).args(["--drive", &drive]);
        Server::start_command(command)
    }

    fn assert_untouched(&self) {
        let now: Vec<_> = self.files.iter().map(|file| state(file)).collect();
        assert!(now == self.before, "an image was changed, or its times");
        let left: Vec<_> = std::fs::read_dir(&self.temporary).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// When a file was last changed, in its bytes and in its attributes.
type Times = [(i64, i64); 2];

fn state(file: &Path) -> (Vec<u8>, Times) {
    let meta = std::fs::metadata(file).unwrap();
    (std::fs::read(file).unwrap(), [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())])
}

fn serve_command() -> Command {
    let mut command = ringdisk();
    command.arg("serve");
    command
}

/// The temporary files that a process has open: length and space.
fn open_files(pid: u32, directory: &Path) -> Vec<(u64, u64)> {
    let mut found: Vec<(PathBuf, u64, u64)> = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let Ok(target) = std::fs::read_link(&path) else { continue };
        if target.starts_with(directory) && found.iter().all(|(known, ..)| *known != target) {
            let meta = std::fs::metadata(&path).unwrap();
            found.push((target, meta.len(), meta.blocks() * 512));
        }
    }
    found.into_iter().map(|(_, length, space)| (length, space)).collect()
}

#[test]
fn what_a_guest_writes_is_there_until_the_daemon_is_killed_and_nothing_else_ever_changes() {
    let images = Images::new();
    let server = images.serve(serve_command());
    let written = at(&images.dir, "written.raw");
    let mut bytes = numbered(SIZE);
    bytes.rotate_left(1000);
    std::fs::write(&written, &bytes).unwrap();
    run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", path_str(&written), &images.disk()]);
    run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&written), &images.disk()]);
    let temporary = open_files(server.pid(), &images.temporary);
    assert_eq!(temporary.len(), 2, "{temporary:?}");
    assert!(temporary.iter().any(|(length, _)| *length >= SIZE as u64), "{temporary:?}");
    assert!(temporary.iter().all(|(length, space)| space >= length), "sparse: {temporary:?}");
    images.assert_untouched();

    // Others may use the same images.
    let others = at(&images.dir, "other");
    let drive = format!("file={},snapshot=on,socket={}", images.files[1].display(), others.display());
    let other = Server::start(&["--drive", &drive]);
    let others = format!("vhost-user:{}", others.display());
    run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&images.files[0]), &others]);
    other.stop();

    server.kill();
    images.assert_untouched();
    let server = images.serve(serve_command());
    run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&images.files[0]), &images.disk()]);
    server.stop();
    images.assert_untouched();
}

#[test]
fn a_full_directory_is_an_error_of_the_request_and_the_daemon_goes_on() {
    let images = Images::new();
    // No file may get longer than this, as on a disk with so much space.
    let mut limited = Command::new("prlimit");
    limited.args(["--fsize=1048576", "--"]).arg(ringdisk().get_program()).arg("serve");
    let server = images.serve(limited);
    let written = at(&images.dir, "written.raw");
    std::fs::write(&written, vec![7; SIZE]).unwrap();
    let said = run_fails(1, &["convert", "-n", "-f", "raw", "-O", "raw", path_str(&written), &images.disk()]);
    assert!(said.contains("error"), "{said}");
    let compared = run(&["compare", "-f", "raw", "-F", "raw", path_str(&written), &images.disk()]);
    assert_eq!(compared.status.code(), Some(1), "the disk can be read: {}", text(&compared.stderr));
    server.stop();
    images.assert_untouched();
}

#[test]
fn a_disk_with_snapshot_keeps_its_size_and_takes_no_overlay() {
    let images = Images::new();
    let control = at(&images.dir, "control");
    let mut command = serve_command();
    command.arg("--control").arg(&control);
    let server = images.serve(command);
    let ctl = |arguments: &[&str]| {
        let output = ringdisk().args(["ctl", "--control", path_str(&control)]).args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        text(&output.stderr)
    };
    let said = ctl(&["resize", "vm", "+1G"]);
    assert!(said.contains("snapshot=on"), "{said}");
    ctl(&["snapshot", "vm", path_str(&at(&images.dir, "over.qcow2"))]);
    assert!(!at(&images.dir, "over.qcow2").exists());
    server.stop();
    images.assert_untouched();
}

#[test]
fn a_directory_that_is_not_there_is_named_and_a_disk_too_large_to_map_falls_back_to_qcow2() {
    let images = Images::new();
    let drive = format!("file={},snapshot=on", images.files[1].display());
    let output = ringdisk().env("TMPDIR", "/nowhere/at/all").args(["serve", "--drive", &drive]).output().unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("/nowhere/at/all") && said.contains("TMPDIR"), "{said}");

    let large = at(&images.dir, "large.qcow2");
    run_ok(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", path_str(&large), "100T"]);
    let mut command = serve_command();
    let socket = at(&images.dir, "large.sock");
    let drive = format!("file={},snapshot=on,socket={}", large.display(), socket.display());
    command.env("TMPDIR", &images.temporary).args(["--drive", &drive]);
    let server = Server::start_command(command);
    let bench = ["bench", "--socket", path_str(&socket), "--rw", "randwrite", "--time", "0.2", "--destroy"];
    run_ok(&bench);
    assert_eq!(open_files(server.pid(), &images.temporary).len(), 1);
    let (_, said) = server.terminate();
    assert!(said.contains("temporary qcow2"), "{said}");
}

/// The words that run a command where `directory` is a file system in memory with these mount options, which is full;
/// `None` where this host does not let us.
fn with_mounted(directory: &Path, options: &str) -> Option<Vec<String>> {
    let fill = "{ cat /dev/zero > \"$0/all\"; } 2> /dev/null";
    let script = format!("mount -t tmpfs -o {options} none \"$0\" && {{ {fill}; exec \"$@\"; }}");
    ["-rm", "-m"].into_iter().find_map(|how| {
        let words = ["unshare", how, "sh", "-c", script.as_str(), path_str(directory)].map(str::to_owned);
        let tried = Command::new(&words[0]).args(&words[1..]).arg("true").output();
        tried.is_ok_and(|output| output.status.success()).then(|| words.to_vec())
    })
}

fn skipped() {
    assert!(std::env::var_os("RINGDISK_REQUIRE_ALL").is_none(), "nothing can be mounted here, and this is CI");
    testkit::skipped("nothing can be mounted here");
}

#[test]
fn a_directory_that_can_only_be_read_is_said_with_what_to_do_and_other_disks_go_on() {
    let images = Images::new();
    let Some(words) = with_mounted(&images.temporary, "ro") else {
        skipped();
        return;
    };
    let [control, socket] = ["control", "plain"].map(|name| at(&images.dir, name));
    let plain = format!("name=plain,file={},readonly=on,socket={}", images.files[0].display(), socket.display());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg(ringdisk().get_program()).args(["serve", "--control", path_str(&control)]);
    command.args(["--drive", &plain]).env("TMPDIR", &images.temporary);
    let server = Server::start_command(command);
    let drive = format!("name=vm,file={},snapshot=on,socket={}", images.files[1].display(), images.socket().display());
    let said = run_fails(1, &["ctl", "--control", path_str(&control), "add", &drive]);
    for wanted in [path_str(&images.temporary), "snapshot=on", "choose another TMPDIR", "Read-only file system"] {
        assert!(said.contains(wanted), "{said}");
    }
    assert!(said.matches(path_str(&images.temporary)).count() == 1, "it is said once: {said}");
    run_ok(&["bench", "--count", "20", "--socket", path_str(&socket)]);
    server.stop();
    images.assert_untouched();
}

#[test]
fn a_directory_without_any_room_is_said_with_what_to_do() {
    let images = Images::new();
    let Some(words) = with_mounted(&images.temporary, "size=65536") else {
        skipped();
        return;
    };
    let drive = format!("file={},snapshot=on", images.files[1].display());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).arg(ringdisk().get_program()).args(["serve", "--drive", &drive]);
    let output = command.env("TMPDIR", &images.temporary).output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for wanted in [path_str(&images.temporary), "snapshot=on", "choose another TMPDIR", "No space left"] {
        assert!(said.contains(wanted), "{said}");
    }
    images.assert_untouched();
}

/// Files of servers, of a cluster, and one that was passed open.
#[test]
fn a_disk_that_lies_elsewhere_is_written_to_as_little() {
    let dir = directory();
    let path = |name: &str| at(&dir, name);
    let (base, temporary) = (path("base.raw"), path("tmp"));
    std::fs::write(&base, numbered(SIZE)).unwrap();
    std::fs::create_dir(&temporary).unwrap();
    let before = state(&base);
    let (cluster, web) = (testkit::RbdStandIn::new(), testkit::WebServer::start(&before.0));
    let image = cluster.name("one");
    let with_cluster = || {
        let mut command = ringdisk();
        command.env("RINGDISK_LIBRBD", cluster.library());
        command
    };
    let copied = with_cluster().args(["convert", "-f", "raw", "-O", "raw", path_str(&base), &image]).output().unwrap();
    assert!(copied.status.success(), "{}", text(&copied.stderr));
    let mut nbd = ringdisk();
    nbd.args(["nbd", "--read-only", "--socket", path_str(&path("nbd")), path_str(&base)]);
    let nbd = Server::start_command(nbd);
    let uri = format!("nbd+unix:///?socket={}", path("nbd").display());
    let url = web.url("/base.raw");
    let written = path("written.raw");
    let mut bytes = numbered(SIZE);
    bytes.rotate_left(1000);
    std::fs::write(&written, &bytes).unwrap();
    for (index, file) in [uri.as_str(), &url, &image, "fd:9"].into_iter().enumerate() {
        let socket = path(&format!("s{index}"));
        let drive = format!("file={file},format=raw,snapshot=on,socket={}", socket.display());
        let mut command = Command::new("sh");
        let script = "exec 9< \"$0\"; exec \"$@\"";
        command.args(["-c", script, path_str(&base)]).arg(ringdisk().get_program()).args(["serve", "--drive", &drive]);
        command.env("TMPDIR", &temporary).env("RINGDISK_LIBRBD", cluster.library()).env_remove("NOTIFY_SOCKET");
        let server = Server::start_command(command);
        let disk = format!("vhost-user:{}", socket.display());
        run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&base), &disk]);
        run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", path_str(&written), &disk]);
        run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&written), &disk]);
        let sizes = open_files(server.pid(), &temporary);
        assert!(sizes.len() == 2 && sizes.iter().all(|(length, space)| space >= length), "{file}: {sizes:?}");
        server.kill();
        assert!(state(&base) == before, "{file}: the image was changed, or its times");
        assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0, "{file}");
        // A kept overlay names its image by a path.
        let kept = format!("name=one,file={file},format=raw,snapshot=on,keep={}", dir.path().display());
        let said = with_cluster().args(["serve", "--drive", &kept]).output().unwrap();
        assert!(!said.status.success() && !path("one.scratch").exists(), "{file}: {}", text(&said.stderr));
    }
    let compared =
        with_cluster().args(["compare", "-f", "raw", "-F", "raw", path_str(&base), &image]).output().unwrap();
    assert!(compared.status.success(), "{}", text(&compared.stderr));
    nbd.stop();
}

/// Reserved before it is used: at any moment, while a guest writes, no file is longer than its space. Also with names.
#[test]
fn no_file_is_ever_longer_than_its_space() {
    let dir = directory();
    let (base, socket) = (at(&dir, "base.raw"), at(&dir, "s"));
    std::fs::File::create(&base).unwrap().set_len(64 << 20).unwrap();
    for more in ["", ",keep="] {
        let place = at(&dir, if more.is_empty() { "tmp" } else { "kept" });
        std::fs::create_dir(&place).unwrap();
        let keep = if more.is_empty() { String::new() } else { format!("{more}{}", place.display()) };
        let drive =
            format!("name=one,file={},format=raw,snapshot=on{keep},socket={}", base.display(), socket.display());
        let mut command = serve_command();
        command.env("TMPDIR", &place).args(["--drive", &drive]);
        let server = Server::start_command(command);
        let load = ["--rw", "randwrite", "--bs", "16k", "--size", "48M", "--count", "6000", "--destroy"];
        let words = [&["bench", "--socket", path_str(&socket)][..], &load].concat();
        let mut guest = ringdisk().args(&words).stdout(std::process::Stdio::null()).spawn().unwrap();
        let mut moments = 0;
        while guest.try_wait().unwrap().is_none() || moments == 0 {
            for (length, space) in open_files(server.pid(), &place) {
                assert!(space >= length, "{length} bytes have {space}{more}");
            }
            moments += 1;
        }
        assert!(guest.wait().unwrap().success());
        assert_eq!(open_files(server.pid(), &place).len(), 2);
        server.stop();
    }
}

/// Where a file cannot be mapped, its index is in memory. Where that has no room, or no space can be reserved, the overlay
/// is another image.
#[test]
fn on_a_file_system_that_maps_no_files_the_overlay_does_without_or_is_a_qcow2_image_and_the_log_says_so() {
    let limited = &["--index-memory", "0"][..];
    let cases = [
        (true, &[][..], None),
        (true, limited, Some("maps no files")),
        (false, &[][..], Some("no space can be reserved")),
    ];
    for (reserves_space, more, reason) in cases {
        let images = Images::new();
        let Some(place) = testkit::UnmappableDirectory::mount(&images.temporary, reserves_space) else {
            skipped();
            return;
        };
        let mut command = serve_command();
        command.args(more);
        let server = images.serve(command);
        let written = at(&images.dir, "written.raw");
        // Twice: what was written is written over.
        for shift in [1000, 2000] {
            let mut bytes = numbered(SIZE);
            bytes.rotate_left(shift);
            std::fs::write(&written, &bytes).unwrap();
            run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", path_str(&written), &images.disk()]);
            run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&written), &images.disk()]);
        }
        let expected = if reason.is_some() { 1 } else { 2 };
        assert_eq!((open_files(server.pid(), &images.temporary).len(), place.names()), (expected, 0), "{reason:?}");
        let (status, said) = server.terminate();
        assert!(status.success(), "{said}");
        let is_said = said.contains("a temporary qcow2 image takes what is written");
        let names = reason.is_some_and(|reason| said.contains(reason) && said.contains(path_str(&images.temporary)));
        assert!(is_said == reason.is_some() && names == reason.is_some(), "{reason:?}: {said}");
        images.assert_untouched();
    }
}

/// Whether the file system is to overwrite a file's data in place.
fn is_nocow(file: &Path) -> bool {
    let file = std::fs::File::open(file).unwrap();
    rustix::fs::ioctl_getflags(&file).unwrap().contains(rustix::fs::IFlags::NOCOW)
}

#[test]
fn where_data_are_copied_on_write_temporary_files_and_images_that_ask_for_it_are_not() {
    if !has_tool("mkfs.btrfs") {
        return;
    }
    let images = Images::new();
    let device = at(&images.dir, "btrfs");
    std::fs::File::create(&device).unwrap().set_len(256 << 20).unwrap();
    tool_ok("mkfs.btrfs", &["-q", path_str(&device)]);
    let script = "mount -o loop \"$0\" \"$TMPDIR\" && exec \"$@\"";
    let mounted = |program: &std::ffi::OsStr| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script]).args([device.as_os_str(), program]).env("TMPDIR", &images.temporary);
        command
    };
    if !mounted("true".as_ref()).output().is_ok_and(|output| output.status.success()) {
        testkit::skipped("no btrfs file system can be mounted here");
        return;
    }
    let mut command = mounted(ringdisk().get_program());
    command.arg("serve");
    let server = images.serve(command);
    run_ok(&["convert", "-n", "-f", "raw", "-O", "raw", path_str(&images.files[0]), &images.disk()]);
    run_ok(&["compare", "-f", "raw", "-F", "raw", path_str(&images.files[0]), &images.disk()]);
    let pid = server.pid().to_string();
    let sizes = open_files(server.pid(), &images.temporary);
    assert!(sizes.len() == 2 && sizes.iter().all(|(length, space)| space >= length), "{sizes:?}");
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
    let own = |fd: &PathBuf| std::fs::read_link(fd).is_ok_and(|target| target.starts_with(&images.temporary));
    assert!(fds.filter(own).all(|fd| is_nocow(&fd)));

    let there = |name: &str| images.temporary.join(name);
    let make = |program: &std::ffi::OsStr, arguments: &[&str]| {
        let output = Command::new("nsenter").args(["-m", "-t", &pid]).arg(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    let ringdisk = ringdisk();
    for (program, prefix) in [(ringdisk.get_program(), "own"), ("qemu-img".as_ref(), "theirs")] {
        if prefix == "theirs" && !has_tool("qemu-img") {
            continue;
        }
        let [plain, raw, qcow2, data] =
            ["plain", "raw", "qcow2", "data"].map(|name| there(&format!("{prefix}.{name}")));
        make(program, &["create", "-q", "-f", "raw", path_str(&plain), "1M"]);
        make(program, &["create", "-q", "-f", "raw", "-o", "nocow=on", path_str(&raw), "1M"]);
        let options = format!("nocow=on,data_file={}", data.display());
        make(program, &["create", "-q", "-f", "qcow2", "-o", &options, path_str(&qcow2), "1M"]);
        // Other processes see the file system through one that does.
        let seen = |path: &Path| is_nocow(Path::new(&format!("/proc/{pid}/root{}", path.display())));
        assert_eq!([&plain, &raw, &qcow2, &data].map(|path| seen(path)), [false, true, true, true], "{prefix}");
    }
    server.stop();
    images.assert_untouched();
}
