//! Real Linux guests on disks that `ringdisk serve` serves: nothing is lost, and others' tools find the images clean.
//!
//! Each test needs Debian's packages for its guest and takes many seconds, so they are ignored by default and run by
//! `cargo xtask ci`; by hand with `cargo test -p ringdisk --test guests -- --ignored`.

#[path = "../src/guest/mod.rs"]
mod guest;

use guest::{GuestKind, GuestOptions, GuestReport, GuestWork, ImageFormat, verify_image};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = 768 << 20;
const BACKING_BYTES: usize = 96 << 20;
const SERIAL: &str = "a-disk-for-a-guest";
const READY_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// `ringdisk serve` as a child process; killed when it goes.
struct Server {
    child: Child,
    log: PathBuf,
    sockets: Vec<PathBuf>,
}

impl Server {
    /// Serves `drives` (options without serial and socket) with two reactors and four queues each; returns once it is
    /// ready.
    fn start(directory: &Path, drives: &[String]) -> Self {
        let log = directory.join("ringdisk.log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(["serve", "--reactors", "2", "--queues", "4"]);
        let mut sockets = Vec::new();
        for (number, drive) in drives.iter().enumerate() {
            let socket = directory.join(format!("{number}.sock"));
            command.arg("--drive").arg(format!("{drive},serial={SERIAL}")).arg("--socket").arg(&socket);
            sockets.push(socket);
        }
        let errors = std::fs::File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let mut server = Self { child: command.spawn().unwrap(), log, sockets };
        server.wait_until_ready();
        server
    }

    fn wait_until_ready(&mut self) {
        let (sender, receiver) = channel();
        let mut output = BufReader::new(self.child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut line = String::new();
            while output.read_line(&mut line).is_ok_and(|length| length > 0) {
                if line.trim_end() == "ready" {
                    let _ = sender.send(());
                }
                line.clear();
            }
        });
        if receiver.recv_timeout(READY_LIMIT).is_err() {
            panic!("ringdisk serve did not become ready:\n{}", self.said());
        }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as an administrator would; it has to drain, flush, remove its sockets and say that all went well.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let end = Instant::now() + STOP_LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < end, "ringdisk serve does not end:\n{}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(status.success(), "ringdisk serve ended with {status}:\n{}", self.said());
        assert!(self.sockets.iter().all(|socket| !socket.exists()), "a socket was left behind");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An image in a directory of its own, below cargo's for tests: on a real file system, where direct I/O works.
struct TestImage {
    directory: tempfile::TempDir,
    path: PathBuf,
    format: ImageFormat,
}

impl TestImage {
    fn raw() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
        Self { directory, path, format: ImageFormat::Raw }
    }

    /// An overlay over a shorter raw file that is full of what must never show up in the guest's file system.
    fn qcow2_with_backing() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("disk.qcow2");
        std::fs::write(directory.path().join("base.raw"), backing_contents()).unwrap();
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"]).arg(&path);
        assert!(create.arg(DISK_BYTES.to_string()).status().unwrap().success());
        Self { directory, path, format: ImageFormat::Qcow2 }
    }

    fn drive(&self, options: &str) -> String {
        let format = if self.format == ImageFormat::Raw { "raw" } else { "qcow2" };
        format!("file={},format={format},{options}", self.path.display())
    }

    fn assert_clean(&self) {
        verify_image(&self.path, self.format).unwrap();
        let base = self.directory.path().join("base.raw");
        if base.exists() {
            let mut contents = Vec::new();
            std::fs::File::open(base).unwrap().read_to_end(&mut contents).unwrap();
            assert!(contents == backing_contents(), "the backing file was written");
        }
    }
}

fn backing_contents() -> Vec<u8> {
    b"what the backing file holds.....".iter().copied().cycle().take(BACKING_BYTES).collect()
}

fn run_guest(kind: GuestKind, server: &Server, work: Option<GuestWork>) -> GuestReport {
    let mut options = GuestOptions::new(kind, server.sockets.clone());
    options.work = work.unwrap_or(options.work);
    let start = Instant::now();
    let report =
        guest::run(&options, &mut |step| eprintln!("{:6.1} s  {kind:?}: {step}", start.elapsed().as_secs_f64()));
    report.unwrap_or_else(|error| panic!("{error:#}\nringdisk serve said:\n{}", server.said()))
}

fn assert_filled(kind: GuestKind, report: &GuestReport) {
    let (cpus, queues) = if kind == GuestKind::Qemu { (4, 4) } else { (1, 1) };
    assert_eq!(report.cpus, cpus);
    for disk in &report.disks {
        assert_eq!((disk.size_bytes, disk.queues), (DISK_BYTES, queues), "{disk:?}");
        assert_eq!(disk.serial, SERIAL);
        assert!(disk.volatile_cache && disk.discard_max_bytes > 0 && disk.write_zeroes_max_bytes > 0, "{disk:?}");
        assert!(disk.checks == 2 && disk.files == 200 && disk.trimmed_bytes > 0, "{disk:?}");
        let fio = disk.fio.as_ref().expect("fio ran");
        assert!(fio.written_bytes >= 4 * (16 << 20) && fio.read_bytes >= fio.written_bytes, "{disk:?}");
    }
}

/// A guest fills the disks; a second guest finds all files on the running server, a third on a restarted one; then the
/// images are judged by others' tools, before and after.
fn fill_restart_check(kind: GuestKind, images: &[(&TestImage, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let drives: Vec<String> = images.iter().map(|(image, options)| image.drive(options)).collect();

    let server = Server::start(directory.path(), &drives);
    let report = run_guest(kind, &server, None);
    assert_eq!(report.disks.len(), images.len());
    assert_filled(kind, &report);
    run_guest(GuestKind::Uml, &server, Some(GuestWork::CheckAgain));
    server.stop();
    images.iter().for_each(|(image, _)| image.assert_clean());

    let server = Server::start(directory.path(), &drives);
    let report = run_guest(GuestKind::Uml, &server, Some(GuestWork::CheckAgain));
    assert!(report.disks.iter().all(|disk| disk.checks == 1 && disk.files == 200), "{report:?}");
    server.stop();
    images.iter().for_each(|(image, _)| image.assert_clean());
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_raw_over_io_uring() {
    fill_restart_check(GuestKind::Uml, &[(&TestImage::raw(), "engine=io_uring,cache=none")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_raw_over_linux_aio() {
    fill_restart_check(GuestKind::Uml, &[(&TestImage::raw(), "engine=linux-aio,cache=none")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_qcow2_with_a_backing_file_over_threads() {
    fill_restart_check(GuestKind::Uml, &[(&TestImage::qcow2_with_backing(), "engine=threads,cache=writeback")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_two_disks_of_one_daemon() {
    let (raw, qcow2) = (TestImage::raw(), TestImage::qcow2_with_backing());
    fill_restart_check(GuestKind::Uml, &[(&raw, "engine=threads"), (&qcow2, "engine=io_uring")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_with_four_queues_on_raw_over_threads() {
    fill_restart_check(GuestKind::Qemu, &[(&TestImage::raw(), "engine=threads,cache=writeback")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_with_four_queues_on_qcow2_with_a_backing_file_over_io_uring() {
    fill_restart_check(GuestKind::Qemu, &[(&TestImage::qcow2_with_backing(), "engine=io_uring,cache=writeback")]);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_with_four_queues_on_qcow2_with_a_backing_file_over_linux_aio() {
    fill_restart_check(GuestKind::Qemu, &[(&TestImage::qcow2_with_backing(), "engine=linux-aio,cache=none")]);
}
