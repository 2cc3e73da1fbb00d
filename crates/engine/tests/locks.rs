//! Images in use: QEMU's tools and this program refuse and permit the same.
//!
//! QEMU's tools let a raw image be written by others while they only read it (and know of no harm in reading what a
//! virtual machine writes); readers of qcow2 tolerate no writer. The tests expect just that.

mod common;

use block::{ErrorKind, File, Locks};
use common::fuse::{STALL_FROM, StallingFile};
use ringdisk_engine::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

fn open(path: &Path, read_only: bool) -> block::Result<Arc<dyn File>> {
    ringdisk_engine::open(path, &OpenOptions::default().with(|options| options.read_only = read_only))
}

fn has_qemu() -> bool {
    let found = ["qemu-img", "qemu-io"].iter().all(|tool| Command::new(tool).arg("--version").output().is_ok());
    if !found {
        common::skip("qemu-img and qemu-io are not installed (package qemu-utils)");
    }
    found
}

/// A `qemu-io` that has an image open until it is dropped.
struct QemuIo {
    child: Child,
    input: Option<ChildStdin>,
    _output: BufReader<ChildStdout>,
}

impl QemuIo {
    fn open(path: &Path, format: &str, read_only: bool) -> Self {
        let mut command = Command::new("qemu-io");
        command.args(["-f", format]).args(read_only.then_some("-r")).arg(path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut output = BufReader::new(output);
        // It answers commands only once the image is open; the prompt comes before the answer.
        writeln!(input, "length").unwrap();
        let mut line = String::new();
        while !line.contains("iB") && !line.contains("bytes") {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "qemu-io ended");
        }
        Self { child, input: Some(input), _output: output }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.input.take());
        self.child.wait().unwrap();
    }
}

fn qemu_opens(path: &Path, format: &str, read_only: bool) -> bool {
    let mut command = Command::new("qemu-io");
    command.args(["-f", format, "-c", "length"]).args(read_only.then_some("-r")).arg(path);
    let output = command.output().unwrap();
    let refused = String::from_utf8_lossy(&output.stderr).contains("lock");
    assert_eq!(output.status.success(), !refused, "{output:?}");
    !refused
}

#[test]
fn a_writer_is_alone_and_readers_share() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 20).unwrap();
    let writer = open(&path, false).unwrap();
    for read_only in [false, true] {
        let error = open(&path, read_only).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked);
        let message = error.to_string();
        assert!(message.contains("image") && message.contains("in use"), "{message}");
    }
    let unlocked = OpenOptions::default().with(|options| options.lock = false);
    let unlocked = ringdisk_engine::open(&path, &unlocked).unwrap();
    assert_eq!((unlocked.info().locks, writer.info().locks), (Locks::NotWanted, Locks::Held));
    drop(unlocked);
    assert!(open(&path, false).is_err(), "closing an unlocked descriptor leaves the lock");
    drop(writer);
    let readers = [open(&path, true).unwrap(), open(&path, true).unwrap()];
    assert!(open(&path, false).is_err());
    drop(readers);
    open(&path, false).unwrap();
}

#[test]
fn a_file_says_that_its_file_system_has_no_locks() {
    let Some(file) = StallingFile::mount() else {
        return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
    };
    assert_eq!(open(&file.path(), true).unwrap().info().locks, Locks::Lacking);
}

#[test]
fn the_lock_goes_with_the_last_queue_also_on_a_reactor() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    ringdisk_engine::create(&path, 1 << 20).unwrap();
    let reactor = common::reactor("locks");
    let file = open(&path, false).unwrap();
    common::with_queue(&reactor, &file, |queue| async move { common::write(&queue, 0, &[1; 512]).await.unwrap() });
    drop(file);
    // The task that held the queue was dropped on the reactor's thread before this job runs.
    block::run_and_wait(&*reactor.handle(), |_| ()).unwrap();
    open(&path, false).unwrap();
    reactor.stop().unwrap();
}

#[test]
fn qemu_refuses_what_is_in_use_here() {
    if !has_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for format in ["raw", "qcow2"] {
        let path = dir.path().join(format);
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg("1M").status();
        assert!(made.unwrap().success());
        let writer = open(&path, false).unwrap();
        assert!(!qemu_opens(&path, format, false));
        assert_eq!(qemu_opens(&path, format, true), format == "raw");
        drop(writer);
        let reader = open(&path, true).unwrap();
        assert!(!qemu_opens(&path, format, false));
        assert!(qemu_opens(&path, format, true), "readers share");
        drop(reader);
        assert!(qemu_opens(&path, format, false));
    }
}

#[test]
fn what_qemu_has_in_use_is_refused_here() {
    if !has_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for format in ["raw", "qcow2"] {
        let path = dir.path().join(format);
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg("1M").status();
        assert!(made.unwrap().success());
        let writer = QemuIo::open(&path, format, false);
        assert_eq!(open(&path, false).unwrap_err().kind(), ErrorKind::Locked, "{format}");
        assert_eq!(open(&path, true).unwrap_err().kind(), ErrorKind::Locked, "{format}");
        drop(writer);
        let reader = QemuIo::open(&path, format, true);
        assert_eq!(open(&path, false).is_ok(), format == "raw");
        open(&path, true).unwrap();
        drop(reader);
        open(&path, false).unwrap();
    }
}

#[test]
fn a_backing_file_is_shared_by_qemus_overlay_and_our_reader_but_not_with_a_writer() {
    if !has_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (base, overlay) = (dir.path().join("base.qcow2"), dir.path().join("overlay.qcow2"));
    let create = |words: &[&str], paths: &[&Path]| {
        let mut command = Command::new("qemu-img");
        assert!(command.args(["create", "-q", "-f", "qcow2"]).args(words).args(paths).status().unwrap().success());
    };
    create(&["-o", "size=1M"], &[&base]);
    create(&["-F", "qcow2", "-b"], &[&base, &overlay]);
    let overlay_in_use = QemuIo::open(&overlay, "qcow2", false);
    let reader = open(&base, true).unwrap();
    drop(reader);
    assert!(open(&base, false).is_err());
    drop(overlay_in_use);
    let writer = open(&base, false).unwrap();
    assert!(!qemu_opens(&overlay, "qcow2", false), "its backing file is being written");
    drop(writer);
    let reader = open(&base, true).unwrap();
    assert!(qemu_opens(&overlay, "qcow2", false));
    drop(reader);
}

/// Not a test by itself: the program that [`Holding`] starts. It opens the image that the environment names, and reads where
/// the file system stalls.
#[test]
#[ignore = "a part of another test"]
fn part_of_another_that_holds_an_image() {
    let Some(path) = std::env::var_os("RINGDISK_TEST_IMAGE") else { return };
    let file = open(Path::new(&path), true).unwrap();
    println!("open");
    let data = memory::IoBuf::zeroed(4096).whole();
    let queue = file.open_blocking().unwrap();
    let reading = queue.start(block::FileOp::Read { offset: STALL_FROM, data, past_end: block::PastEnd::Fails });
    let _ = block::block_on(reading);
}

/// Another process that has an image open, and is in the middle of a request.
struct Holding(Child);

impl Holding {
    fn start(file: &StallingFile) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "part_of_another_that_holds_an_image", "--ignored"])
            .env("RINGDISK_TEST_IMAGE", file.path());
        let child = command.stdout(Stdio::null()).spawn().unwrap();
        file.wait_for_stalled(1);
        Self(child)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

fn open_within(path: &Path, timeout: Duration) -> block::Result<Arc<dyn File>> {
    ringdisk_engine::open(path, &OpenOptions::default().with(|options| options.lock_timeout = timeout))
}

#[test]
fn what_a_living_process_holds_is_refused_with_its_name_however_long_the_limit() {
    let Some(file) = StallingFile::mount_with_locks() else {
        return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
    };
    let holding = Holding::start(&file);
    let message = open_within(&file.path(), Duration::from_secs(3600)).unwrap_err().to_string();
    assert!(message.contains(&format!("pid {} (", holding.0.id())), "{message}");
    file.release();
}

#[test]
fn the_lock_of_a_killed_process_is_waited_for_until_its_last_request_has_ended() {
    let Some(file) = StallingFile::mount_with_locks() else {
        return common::skip("a FUSE file system cannot be mounted here (it takes root and /dev/fuse)");
    };
    let mut holding = Holding::start(&file);
    holding.0.kill().unwrap();
    let error = open_within(&file.path(), Duration::from_millis(1100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert!(error.to_string().contains("no living process"), "{error}");
    std::thread::scope(|scope| {
        let opened = scope.spawn(|| open_within(&file.path(), Duration::from_secs(3600)).map(drop));
        std::thread::sleep(Duration::from_millis(1300));
        assert!(!opened.is_finished(), "the request has not ended");
        file.release();
        opened.join().unwrap().unwrap();
    });
}
