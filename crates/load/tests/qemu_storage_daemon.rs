//! The driver and the load generator against another project's server, so that neither agrees only with itself.
//!
//! Without `qemu-storage-daemon` these tests are skipped and say so; where `CI` is set, that is an error.

use block::{Disk, DiskQueue, Op, OpFlags, Poller, ReactorHandle, run_and_wait};
use driver::{Driver, DriverOptions, DriverPath};
use engine::{Reactor, ReactorConfig, ReactorThread};
use ringdisk_load::{
    Alloc, BenchSpec, FillSpec, Hooks, Initial, Pattern, Progress, Stop, Verify, fill_and_verify, run,
};
use std::cell::RefCell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PROGRAM: &str = "qemu-storage-daemon";

struct Server {
    child: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Server {
    /// Serves `blockdev` (a node named `n`); `None` where the program is not installed.
    fn start(blockdev: impl FnOnce(&Path) -> String, queues: u16) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("q.sock");
        let export = format!(
            "type=vhost-user-blk,id=e,addr.type=unix,addr.path={},node-name=n,writable=on,writethrough=off,\
             num-queues={queues}",
            socket.display()
        );
        let mut command = Command::new(PROGRAM);
        command.args(["--blockdev", &blockdev(directory.path()), "--export", &export]).stdin(Stdio::null());
        match command.spawn() {
            Ok(child) => Some(Self { child, socket, _directory: directory }),
            Err(error) if error.kind() == ErrorKind::NotFound && std::env::var_os("CI").is_none() => {
                eprintln!("skipped: {PROGRAM} is not installed (package qemu-system-common or qemu-utils)");
                None
            }
            Err(error) => panic!("{PROGRAM}: {error}"),
        }
    }

    fn null() -> Option<Self> {
        Self::start(|_| "driver=null-co,node-name=n,size=1073741824,read-zeroes=on".into(), 2)
    }

    fn raw(length_bytes: u64) -> Option<Self> {
        let image = |directory: &Path| {
            let path = directory.join("disk.raw");
            std::fs::File::create(&path).unwrap().set_len(length_bytes).unwrap();
            format!("driver=file,node-name=n,discard=unmap,filename={}", path.display())
        };
        Self::start(image, 2)
    }

    fn attach(&self, options: DriverOptions) -> Arc<Driver> {
        let options = options.with(|options| options.wait_for_socket_ms = 20_000);
        let driver = Driver::connect(&self.socket, options).unwrap();
        // The server has a cache but says so only once it is switched on.
        driver.set_volatile_cache(true);
        Arc::new(driver)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have been killed by the test already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Reactors {
    handles: Vec<Arc<dyn ReactorHandle>>,
    _threads: Vec<ReactorThread>,
}

fn reactors(count: usize) -> Reactors {
    let config = || ReactorConfig::default().with(|config| config.name = "guest".into());
    let threads: Vec<_> = (0..count).map(|_| Reactor::spawn(config()).unwrap()).collect();
    Reactors { handles: threads.iter().map(ReactorThread::handle).collect(), _threads: threads }
}

fn shared(driver: &Arc<Driver>) -> Alloc {
    let driver = Arc::clone(driver);
    Arc::new(move |length| driver.alloc(length))
}

#[test]
fn every_ring_layout_both_paths_and_both_kinds_of_memory_carry_verified_data() {
    let Some(server) = Server::raw(32 << 20) else { return };
    let layouts = [(true, true), (true, true), (true, false), (true, false), (false, true), (false, true)];
    for (turn, (indirect, event_idx)) in layouts.iter().chain(&[(false, false), (false, false)]).enumerate() {
        let options = DriverOptions::default().with(|options| {
            options.queues = 2;
            options.queue_size = 64;
            options.indirect = *indirect;
            options.event_idx = *event_idx;
            options.path = if turn % 2 == 0 { DriverPath::Bio } else { DriverPath::Request };
        });
        let driver = server.attach(options);
        let info = driver.info();
        assert_eq!((info.size_bytes, info.serial.as_str(), info.volatile_cache), (32 << 20, "vhost_user_blk", true));
        let reactors = reactors(2);
        let disk: Arc<dyn Disk> = driver.clone();
        for alloc in [Some(shared(&driver)), None] {
            let hooks = Hooks::default().with(|hooks| hooks.alloc = alloc);
            let fill = FillSpec::default().with(|fill| {
                fill.queues = 2;
                fill.seed = turn as u64;
                fill.queue_depth = 32;
            });
            let filled = fill_and_verify(&disk, &reactors.handles, &fill, &hooks).unwrap();
            assert_eq!((filled.errors, filled.mismatches), (0, 0), "{:?}", filled.first_failure);
            let spec = BenchSpec::default().with(|spec| {
                spec.queues = 2;
                spec.queue_depth = 48;
                spec.read_percent = 60;
                spec.stop = Stop::Requests(20_000);
                spec.flush_every = Some(100);
                spec.pattern = Pattern::Random { seed: turn as u64 };
                spec.verify = Some(Verify::new(1, Initial::Unknown));
            });
            let report = run(&disk, &reactors.handles, &spec, &hooks).unwrap().report;
            assert_eq!((report.errors, report.mismatches), (0, 0), "{:?}", report.first_mismatch);
            assert_eq!(report.requests, 20_000);
            assert!(report.flushes > 0);
        }
    }
}

#[test]
fn a_killed_server_ends_the_run_with_errors_and_not_with_a_wait() {
    let Some(server) = Server::null() else { return };
    let driver = server.attach(DriverOptions::default());
    let disk: Arc<dyn Disk> = driver.clone();
    let cancel = Arc::new(AtomicBool::new(false));
    let server = Mutex::new(server);
    // The first look at the progress kills the server; failures end the run.
    let kill = |progress: Progress| {
        if progress.failures > 0 {
            cancel.store(true, Ordering::Relaxed);
        }
        let _ = server.lock().unwrap().child.kill();
    };
    let hooks = Hooks::default().with(|hooks| {
        hooks.alloc = Some(shared(&driver));
        hooks.progress = Some(&kill);
        hooks.cancel = Some(Arc::clone(&cancel));
    });
    let spec = BenchSpec::default().with(|spec| spec.stop = Stop::Runtime(Duration::from_secs(600)));
    let report = run(&disk, &reactors(1).handles, &spec, &hooks).unwrap().report;
    assert!(report.cancelled && report.errors > 0);
    assert!(driver.is_disconnected());
}

#[test]
fn a_server_takes_the_next_client_after_one_disconnects() {
    let Some(server) = Server::null() else { return };
    for _ in 0..5 {
        let driver = server.attach(DriverOptions::default());
        let disk: Arc<dyn Disk> = driver.clone();
        let spec = BenchSpec::default().with(|spec| spec.stop = Stop::Requests(1000));
        let report = run(&disk, &reactors(1).handles, &spec, &Hooks::default()).unwrap().report;
        assert_eq!((report.errors, report.requests), (0, 1000));
        driver.disconnect().unwrap();
    }
}

#[test]
fn discard_and_write_zeroes_leave_zeros() {
    let Some(server) = Server::raw(8 << 20) else { return };
    let driver = server.attach(DriverOptions::default());
    let disk: Arc<dyn Disk> = driver.clone();
    let reactors = reactors(1);
    let handles = &reactors.handles;
    let fill = fill_and_verify(&disk, handles, &FillSpec::default(), &Hooks::default()).unwrap();
    assert_eq!(fill.errors + fill.mismatches, 0);
    let (sender, receiver) = std::sync::mpsc::channel();
    let zeroed = Arc::clone(&disk);
    run_and_wait(handles[0].as_ref(), move |ctx| {
        let zeroer = Zeroer { queue: Some(zeroed.open_queue(ctx).unwrap()), sender, submitted: false };
        ctx.add_poller(Rc::new(RefCell::new(zeroer))).unwrap();
    })
    .unwrap();
    receiver.recv_timeout(Duration::from_secs(60)).unwrap();
    let look = BenchSpec::default().with(|spec| {
        spec.pattern = Pattern::Sequential;
        spec.stop = Stop::OnePass;
        spec.length_bytes = Some(4 << 20);
        spec.verify = Some(Verify::new(5, Initial::Zeros));
    });
    let report = run(&disk, handles, &look, &Hooks::default()).unwrap().report;
    assert_eq!((report.errors, report.mismatches, report.reads), (0, 0, 1024), "{:?}", report.first_mismatch);
}

/// Zeroes the first half of the disk, two ways; closes its queue and tells when that is done.
struct Zeroer {
    queue: Option<Box<dyn DiskQueue>>,
    sender: std::sync::mpsc::Sender<()>,
    submitted: bool,
}

impl Poller for Zeroer {
    fn poll(&mut self) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        if !std::mem::replace(&mut self.submitted, true) {
            let (length, may_unmap) = (2 << 20, true);
            queue.submit(1, Op::WriteZeroes { offset: 0, length, may_unmap, flags: OpFlags::FUA });
            queue.submit(2, Op::Discard { offset: length, length });
            return true;
        }
        let mut done = Vec::new();
        queue.harvest(&mut done);
        assert!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
        if queue.in_flight() == 0 {
            self.queue = None;
            self.sender.send(()).unwrap();
        }
        !done.is_empty()
    }
}
