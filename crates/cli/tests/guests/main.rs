//! Real Linux guests on disks that `ringdisk serve` serves: nothing is lost, and others' tools find the images clean.
//!
//! Each test needs Debian's packages for its guest and takes many seconds, so they are ignored by default and run by
//! `cargo xtask ci`; by hand with `cargo test -p ringdisk --test guests -- --ignored`.

mod changes;
#[path = "../common/mod.rs"]
mod common;

use common::{Server, path_str, run_ok, tool_ok};
use guestlab::{
    GuestKind, GuestOptions, GuestReport, GuestWork, ImageFormat, MeasureJob, Monitor, NbdDisk, verify_image,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use testkit::{Dice, WebServer};

const DISK_BYTES: u64 = 768 << 20;
const BACKING_BYTES: usize = 96 << 20;
const SERIAL: &str = "a-disk-for-a-guest";

/// `ringdisk serve` with a socket a disk, on two reactors with four queues each.
struct Served {
    server: Server,
    sockets: Vec<PathBuf>,
    arguments: Vec<String>,
    /// Which drives offer packed rings.
    packed: Vec<bool>,
}

impl Served {
    /// Serves `drives` (options without serial and socket).
    fn start(directory: &Path, drives: &[String]) -> Self {
        Self::start_with(directory, drives, &[])
    }

    /// As [`Served::start`], with more options.
    fn start_with(directory: &Path, drives: &[String], more: &[&str]) -> Self {
        let first = ["--reactors", "2", "--queues", "4"];
        let mut arguments: Vec<String> = first.iter().chain(more).map(|word| (*word).to_owned()).collect();
        let mut sockets = Vec::new();
        for (number, drive) in drives.iter().enumerate() {
            let socket = directory.join(format!("{number}.sock"));
            // Where /dev/shm is small, User Mode Linux keeps its memory in a file on a disk.
            arguments.extend(["--drive".to_owned(), format!("{drive},serial={SERIAL},guest-memory=any")]);
            arguments.extend(["--socket".to_owned(), path_str(&socket).to_owned()]);
            sockets.push(socket);
        }
        let packed = drives.iter().map(|drive| drive.contains("packed=on")).collect();
        Self { server: Server::start(&arguments), sockets, arguments, packed }
    }

    /// Ends it as an administrator would, and starts it again for whoever was connected. `between` works on the images
    /// meanwhile.
    fn restart(self, between: impl FnOnce()) -> Self {
        let Self { server, sockets, arguments, packed } = self;
        server.stop();
        between();
        Self { server: Server::start(&arguments), sockets, arguments, packed }
    }

    /// Runs a guest on all disks. If it fails, what the server said is shown, too.
    fn run_guest(self, kind: GuestKind, work: Option<GuestWork>) -> (Self, GuestReport) {
        let mut options = GuestOptions::new(kind, self.sockets.clone());
        options.work = work.unwrap_or(options.work);
        options.packed = self.packed.contains(&true);
        options.memory_mib += 64 * self.sockets.len() as u32;
        let start = Instant::now();
        let run = || {
            let mut has_begun = false;
            let mut progress = |step: &str| {
                has_begun = true;
                eprintln!("{:6.1} s  {kind:?}: {step}", start.elapsed().as_secs_f64());
            };
            (guestlab::run(&options, &mut progress), has_begun)
        };
        // QEMU 10 was once seen to fail an assertion of its own about the MSI-X table while its guest started.
        let is_its_own = |error: &anyhow::Error| format!("{error:#}").contains("hw/pci/msix.c");
        let ended = match run() {
            (Err(error), false) if is_its_own(&error) => {
                eprintln!("QEMU failed before its guest began, and is started again: {error:#}");
                run().0
            }
            (ended, _) => ended,
        };
        match ended {
            Ok(report) => (self, report),
            Err(error) => {
                let (status, said) = self.server.terminate();
                panic!("{error:#}\n\nringdisk serve ({status}) said:\n{said}");
            }
        }
    }

    /// Ends it as an administrator would.
    fn stop(self) {
        self.server.stop();
        assert!(self.sockets.iter().all(|socket| !socket.exists()), "a socket was left behind");
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
        let size = DISK_BYTES.to_string();
        tool_ok("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", path_str(&path), &size]);
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
            assert!(std::fs::read(base).unwrap() == backing_contents(), "the backing file was written");
        }
    }
}

fn backing_contents() -> Vec<u8> {
    b"what the backing file holds.....".iter().copied().cycle().take(BACKING_BYTES).collect()
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

/// A guest fills the disks. A second guest finds all files on the running server, a third one on a restarted server.
/// Then tools of others judge the images, before and after.
fn fill_restart_check(kind: GuestKind, images: &[(&TestImage, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let drives: Vec<String> = images.iter().map(|(image, options)| image.drive(options)).collect();

    let served = Served::start(directory.path(), &drives);
    let (served, report) = served.run_guest(kind, None);
    assert_eq!(report.disks.len(), images.len());
    let packed: Vec<bool> = report.disks.iter().map(|disk| disk.packed).collect();
    assert_eq!(packed, served.packed);
    assert_filled(kind, &report);
    let (served, _) = served.run_guest(GuestKind::Uml, Some(GuestWork::CheckAgain));
    served.stop();
    images.iter().for_each(|(image, _)| image.assert_clean());

    let served = Served::start(directory.path(), &drives);
    let (served, report) = served.run_guest(GuestKind::Uml, Some(GuestWork::CheckAgain));
    assert!(report.disks.iter().all(|disk| disk.checks == 1 && disk.files == 200), "{report:?}");
    served.stop();
    images.iter().for_each(|(image, _)| image.assert_clean());
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_the_smallest_disk_that_try_measures() {
    let said =
        run_ok(&["try", "--guest", "uml", "--size", "8M", "--seconds", "1", "--dir", env!("CARGO_TARGET_TMPDIR")]);
    assert!(said.contains("clean afterwards") && said.contains("guest/host"), "{said}");
    assert!(said.contains("guest's ceiling"), "{said}");
}

/// One guest for all of them: a boot takes as long as the work on a disk.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_raw_and_qcow2_over_every_engine() {
    let raw = [TestImage::raw(), TestImage::raw(), TestImage::raw()];
    let qcow2 = [TestImage::qcow2_with_backing(), TestImage::qcow2_with_backing()];
    let images = [
        (&raw[0], "engine=io_uring,cache=none"),
        (&raw[1], "engine=linux-aio,cache=none"),
        (&qcow2[0], "engine=threads,cache=writeback"),
        (&raw[2], "engine=threads"),
        (&qcow2[1], "engine=io_uring"),
    ];
    fill_restart_check(GuestKind::Uml, &images);
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_with_its_kernels_nbd_client() {
    let image = TestImage::qcow2_with_backing();
    let port = {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        free.local_addr().unwrap().port()
    };
    let address = format!("127.0.0.1:{port}");
    let run = |work: Option<GuestWork>| {
        let mut command = common::ringdisk();
        command.args(["nbd", "--listen", &address, "--drive", &image.drive("name=disk")]);
        let server = Server::start_command(command);
        let mut options = GuestOptions::new(GuestKind::Uml, Vec::new());
        options.nbd = Some(NbdDisk { port, export: "disk".to_owned() });
        options.work = work.unwrap_or(options.work);
        let report = guestlab::run(&options, &mut |step| eprintln!("{step}"));
        server.stop();
        image.assert_clean();
        report.unwrap().disks.remove(0)
    };
    let disk = run(None);
    assert_eq!((disk.name.as_str(), disk.size_bytes), ("nbd0", DISK_BYTES));
    assert!(disk.volatile_cache && disk.discard_max_bytes > 0 && disk.trimmed_bytes > 0, "{disk:?}");
    assert!(disk.checks == 2 && disk.files == 200 && disk.fio.is_some(), "{disk:?}");
    let disk = run(Some(GuestWork::CheckAgain));
    assert!(disk.checks == 1 && disk.files == 200, "{disk:?}");
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_disks_whose_writes_are_thrown_away_or_kept_beside_them() {
    let (thrown, kept) = (TestImage::raw(), TestImage::qcow2_with_backing());
    let state = |image: &TestImage| {
        let meta = std::fs::metadata(&image.path).unwrap();
        (meta.len(), std::os::unix::fs::MetadataExt::blocks(&meta), meta.modified().unwrap())
    };
    let before = (state(&thrown), state(&kept), std::fs::read(&kept.path).unwrap());
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let keep = format!("snapshot=on,keep={}", directory.path().display());
    let served = Served::start(directory.path(), &[thrown.drive("snapshot=on"), kept.drive(&keep)]);
    let (served, report) = served.run_guest(GuestKind::Uml, None);
    assert_filled(GuestKind::Uml, &report);
    // All is there as long as the daemon is.
    let (served, report) = served.run_guest(GuestKind::Uml, Some(GuestWork::CheckAgain));
    assert!(report.disks.iter().all(|disk| disk.checks == 1 && disk.files == 200), "{report:?}");
    served.stop();
    // A sparse file that has no block still reads as zeros.
    assert!(before == (state(&thrown), state(&kept), std::fs::read(&kept.path).unwrap()), "an image was changed");

    let overlay = directory.path().join("disk.qcow2.scratch");
    run_ok(&["commit", "-q", "--allow-backing", "any", path_str(&overlay)]);
    let served = Served::start(directory.path(), &[kept.drive("cache=writeback")]);
    let (served, report) = served.run_guest(GuestKind::Uml, Some(GuestWork::CheckAgain));
    assert!(report.disks.iter().all(|disk| disk.checks == 1 && disk.files == 200), "{report:?}");
    served.stop();
    kept.assert_clean();
}

/// A guest fills a disk, which goes to a web server. Guests with overlays of their own mount it from there, the first with
/// the server, the second without.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_an_overlay_over_a_base_on_a_web_server() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let base = TestImage::qcow2_with_backing();
    let served = Served::start(directory.path(), &[base.drive("cache=writeback")]);
    let (served, report) = served.run_guest(GuestKind::Uml, None);
    assert_filled(GuestKind::Uml, &report);
    served.stop();
    let whole = directory.path().join("base.qcow2");
    run_ok(&["convert", "-O", "qcow2", path_str(&base.path), path_str(&whole)]);
    let web = WebServer::start(&std::fs::read(&whole).unwrap());
    web.behaviour.latency_ms.store(20, Ordering::SeqCst);
    let url = web.url("/base.qcow2");
    let named = format!("{url}#cache={}", directory.path().join("cache").display());
    let check = |overlay: &str| {
        let path = directory.path().join(overlay);
        run_ok(&[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            &url,
            "-F",
            "qcow2",
            "-u",
            path_str(&path),
            &DISK_BYTES.to_string(),
        ]);
        let drive = format!("file={},format=qcow2", path.display());
        let served = Served::start_with(directory.path(), &[drive], &["--backing", &named]);
        let (served, report) = served.run_guest(GuestKind::Uml, Some(GuestWork::CheckAgain));
        assert!(report.disks.iter().all(|disk| disk.checks == 1 && disk.files == 200), "{report:?}");
        served.stop();
    };
    check("first.qcow2");
    let asked = web.requests();
    web.behaviour.is_out.store(true, Ordering::SeqCst);
    check("second.qcow2");
    assert_eq!(web.requests(), asked, "the second guest needed the server");
}

/// One guest for all of them: a boot takes as long as the work on a disk.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_with_four_queues_on_raw_and_qcow2_over_every_engine_split_and_packed() {
    let (raw, packed) = (TestImage::raw(), TestImage::raw());
    let qcow2 = [TestImage::qcow2_with_backing(), TestImage::qcow2_with_backing()];
    let images = [
        (&raw, "engine=threads,cache=writeback"),
        (&qcow2[0], "engine=io_uring,cache=writeback"),
        (&qcow2[1], "engine=linux-aio,cache=none"),
        (&packed, "engine=io_uring,cache=writeback,packed=on"),
    ];
    fill_restart_check(GuestKind::Qemu, &images);
}

/// What the attach lines promise: a guest with their flags just goes on over an end in order and a new start. It works all
/// the time, and checks all that it reads.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_with_reconnect_goes_on_when_the_daemon_is_ended_and_started_again() {
    let (raw, qcow2) = (TestImage::raw(), TestImage::qcow2_with_backing());
    let directory = tempfile::tempdir().unwrap();
    let served = Served::start(directory.path(), &[raw.drive("cache=none"), qcow2.drive("cache=writeback")]);
    let mut options = GuestOptions::new(GuestKind::Qemu, served.sockets.clone());
    // As printed.
    options.reconnect_ms = Some(1000);
    options.work = GuestWork::Fill { measure_seconds: 0, measure_mib: 0, fio_mib: 48 };
    // Its monitor does not look at the size when it connects again.
    let grow = || drop(run_ok(&["resize", "-q", "-f", "raw", path_str(&raw.path), &(DISK_BYTES * 2).to_string()]));
    let (begin, begun) = std::sync::mpsc::channel();
    let mut served = Some(served);
    let report = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let report = guestlab::run(&options, &mut |step| {
                eprintln!("{step}");
                let _ = begin.send(step.contains("writing"));
            });
            drop(begin);
            report
        });
        let mut restarts = 0;
        // Each time that it begins to write something: files, and with fio, on two disks.
        while let Ok(writes) = begun.recv() {
            if writes {
                std::thread::sleep(Duration::from_millis(1500));
                served = served.take().map(|served| {
                    served.restart(|| {
                        if restarts == 0 {
                            grow()
                        }
                    })
                });
                restarts += usize::from(!guest.is_finished());
            }
        }
        let report = guest.join().unwrap().unwrap();
        assert!(restarts >= 2, "the guest was done before the daemon was ended");
        report
    });
    assert!(report.disks.iter().all(|disk| disk.files == 200 && disk.checks == 2 && disk.fio.is_some()), "{report:?}");
    let sectors: Vec<&str> = report.disks.iter().map(|disk| disk.facts["sectors"].as_str()).collect();
    assert_eq!(sectors, [DISK_BYTES * 2, DISK_BYTES].map(|bytes| (bytes / 512).to_string()));
    served.into_iter().for_each(Served::stop);
    raw.assert_clean();
    qcow2.assert_clean();
}

/// As its own kernel counts (`/proc/interrupts`), with both ways of saying when one is wanted.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_is_interrupted_once_a_request_at_most_with_event_idx_and_with_flags() {
    const BLOCK_KIB: u32 = 4;
    let directory = tempfile::tempdir().unwrap();
    let drive = "format=null,size=64M".to_owned();
    let served = Served::start(directory.path(), &[drive.clone(), drive]);
    let mut options = GuestOptions::new(GuestKind::Qemu, served.sockets.clone());
    options.without_event_idx = 1;
    let job = |rw: &str, depth| MeasureJob { rw: rw.to_owned(), block_kib: BLOCK_KIB, depth };
    let jobs = vec![job("randread", 1), job("randread", 64), job("randwrite", 64), job("read", 64)];
    options.work = GuestWork::Measure { jobs, seconds: 2, mib: 32 };
    let report = guestlab::run(&options, &mut |_| {}).unwrap();
    served.stop();
    let [with, without] = report.disks.as_slice() else { panic!("{report:?}") };
    for (disk, event_idx) in [(with, true), (without, false)] {
        assert_eq!(disk.measured.len(), 4);
        for (index, fio) in disk.measured.iter().enumerate() {
            let requests = (fio.read_bytes + fio.written_bytes) / (u64::from(BLOCK_KIB) << 10);
            let depth = if index == 0 { 1 } else { 64 };
            println!(
                "event_idx={event_idx} {} at {depth}: {requests} requests, {} interrupts, {:.3} a request",
                fio.name,
                fio.interrupts,
                fio.interrupts as f64 / requests as f64
            );
            // fio's own opening and closing of the disk may read a little, and some may be late from the job before.
            assert!(fio.interrupts > 0 && fio.interrupts <= requests + 100, "{fio:?}");
        }
    }
}

/// What the kernel says of the disk that [`inspect`] serves, after it was bound, switched, suspended and reset so often.
fn facts_of<'a>(rebinds: &'a str, toggles: &'a str, suspends: &'a str, resets: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut expected = vec![
        ("alignment_offset", "3584"),
        ("bound", rebinds),
        ("cache_type_back", "write-back"),
        ("cache_type_through", "write-through"),
        ("discard_granularity", "8192"),
        ("discard_max_bytes", "1073741824"),
        ("event", "1-vda"),
        ("fua", "0"),
        ("geometry", "8-9-7"),
        ("logical_block_size", "512"),
        ("max_discard_segments", "16"),
        ("max_segment_size", "65536"),
        ("max_segments", "30"),
        ("minimum_io_size", "8192"),
        ("optimal_io_size", "65536"),
        ("physical_block_size", "4096"),
        ("resets", resets),
        ("sectors", "196608"),
        ("sectors_after_bind", "163840"),
        ("sectors_after_sleep", "229376"),
        ("sg_io", "errno-25"),
        ("slept", suspends),
        ("toggled", toggles),
        ("write_cache", "write-back"),
        ("write_zeroes_max_bytes", "1073741824"),
    ];
    expected.retain(|(key, count)| !(matches!(*key, "resets" | "slept") && *count == "0"));
    expected.retain(|(key, _)| *key != "sectors_after_sleep" || suspends != "0");
    expected
}

/// What the kernel of a real guest makes of what its disk says, and of what happens to a disk and to the machine. With an
/// empty serial, too, on a second disk.
fn inspect(kind: GuestKind, format: ImageFormat, (rebinds, toggles): (u32, u32), (suspends, resets): (u32, u32)) {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [image, socket, control] = ["disk", "d.sock", "ctl.sock"].map(|name| directory.path().join(name));
    let name = if format == ImageFormat::Raw { "raw" } else { "qcow2" };
    // Under QEMU, rings are packed, too.
    let packed = if kind == GuestKind::Qemu { "on" } else { "off" };
    run_ok(&["create", "-q", "-f", name, path_str(&image), "64M"]);
    let drive = format!(
        "name=d,file={},format={name},serial=12345678901234567890,physical-block-size=4096,alignment-offset=3584,\
         min-io-size=8192,opt-io-size=65536,cyls=7,heads=8,secs=9,seg-max=30,size-max=65536,discard-granularity=8192,\
         packed={packed},guest-memory=any",
        image.display()
    );
    let plain = directory.path().join("plain.sock");
    let arguments = ["--control", path_str(&control), "--drive", &drive, "--socket", path_str(&socket)];
    let without_serial = ["--drive", "name=plain,format=null,size=8M,guest-memory=any", "--socket", path_str(&plain)];
    let server = Server::start(&[arguments.as_slice(), &without_serial].concat());
    let mut options = GuestOptions::new(kind, vec![socket, plain]);
    (options.cpus, options.queues, options.only_measured) = (2, 1, 1);
    options.packed = packed == "on";
    options.work = GuestWork::Inspect { rebinds, toggles, suspends, resets };
    // It boots once more for each.
    options.time_limit += Duration::from_secs(60) * (suspends + resets);
    let monitor = directory.path().join("qmp.sock");
    options.monitor = (resets > 0).then(|| monitor.clone());
    let (mut used, mut dice) = (Vec::new(), Dice::new(7));
    let used_bytes = || std::fs::metadata(&image).unwrap().blocks() * 512;
    // All but the tables of an image is given back.
    let tables_bytes = if format == ImageFormat::Raw { 0 } else { 1 << 20 };
    let resize = |size: &str| drop(run_ok(&["ctl", "--control", path_str(&control), "resize", "d", size]));
    let report = guestlab::run(&options, &mut |step| match step {
        // Nobody hears of the first at that time: the device is not started.
        "unbound vda" => resize("80M"),
        "resize vda" => resize("96M"),
        "sleeping vda" => {
            // Its alarm comes later.
            std::thread::sleep(Duration::from_secs(1));
            resize("112M");
        }
        "reset vda" => {
            std::thread::sleep(Duration::from_millis(dice.below(1500)));
            Monitor::connect(&monitor).unwrap().reset().unwrap();
        }
        _ => {
            let begun = Instant::now();
            while step == "discarded vda" && used_bytes() > tables_bytes && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_millis(20));
            }
            used.push((step.to_owned(), used_bytes()));
        }
    });
    let (status, said) = server.terminate();
    let report = report.unwrap_or_else(|error| panic!("{error:#}\n\nringdisk serve ({status}) said:\n{said}"));
    assert!(status.success(), "{said}");
    let [(written, full), (discarded, empty)] = used.as_slice() else { panic!("{used:?}") };
    assert_eq!([written.as_str(), discarded], ["written vda", "discarded vda"]);
    assert!((32 << 20..=(32 << 20) + tables_bytes).contains(full) && *empty <= tables_bytes, "{used:?}");
    let [disk, without_serial] = report.disks.as_slice() else { panic!("{report:?}") };
    // As its kernel saw it when it booted last.
    let size_bytes = match (suspends, resets) {
        (_, 0) => 64 << 20,
        (0, _) => 96 << 20,
        _ => 112 << 20,
    };
    assert_eq!((disk.size_bytes, disk.serial.as_str()), (size_bytes, "12345678901234567890"));
    assert_eq!(without_serial.serial, "");
    let [rebinds, toggles, suspends, resets] = [rebinds, toggles, suspends, resets].map(|count| count.to_string());
    let expected = facts_of(&rebinds, &toggles, &suspends, &resets);
    let found: Vec<_> = disk.facts.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(found, expected);
    assert_eq!(disk.packed, packed == "on");
    verify_image(&image, format).unwrap();
}

#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn uml_on_a_disk_whose_every_field_is_set_sees_switches_and_grows_with_it() {
    // It has no S3, and its monitor is the kernel itself.
    inspect(GuestKind::Uml, ImageFormat::Raw, (20, 100), (0, 0));
}

/// `RINGDISK_SUSPENDS=5` lets it sleep more often. The step `guests` sets `RINGDISK_RESETS=3`: a reset takes 12 s.
#[test]
#[ignore = "boots a guest; run by cargo xtask ci"]
fn qemu_on_a_disk_whose_every_field_is_set_sleeps_and_survives_resets_under_load() {
    let count = |name: &str, usual| std::env::var(name).map_or(usual, |text| text.parse().unwrap());
    inspect(
        GuestKind::Qemu,
        ImageFormat::Qcow2,
        (20, 100),
        (count("RINGDISK_SUSPENDS", 1), count("RINGDISK_RESETS", 20)),
    );
}
