//! A daemon with nothing to do does nothing: with guests attached and their rings enabled, no thread wakes up.
//!
//! This counts the kernel's threads for io_uring too, since they are listed with the process. The kernel's workers must
//! not exist, because the last one of a ring wakes up every five seconds for ever. Our own workers end after a time
//! without work; that does not count as waking up.

use block::Disk;
use drive::{DriveFormat, DriveOptions, EngineOpener};
use driver::{Driver, DriverOptions};
use engine::{CacheMode, EngineKind, Reactor, ReactorConfig, ReactorThread};
use image::{BackingPolicy, CreateOptions, Opener, Role};
use load::{BenchSpec, Hooks, Stop, run};
use ringdisk_daemon::{Daemon, DaemonConfig};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SIZE_BYTES: u64 = 16 << 20;
const QUEUES: u16 = 2;
const REQUESTS: u64 = 500;
/// Work that is left may be done late on a loaded machine. Waking up that never ends shows in each of this many
/// stretches.
const TRIES: u32 = 5;

/// How long nothing may happen; RINGDISK_IDLE_SECONDS says otherwise.
fn idle_time() -> Duration {
    let seconds = std::env::var("RINGDISK_IDLE_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(6))
}

/// How the kernel names its workers for io_uring.
const KERNEL_WORKER: &str = "iou-wrk-";

/// Context switches so far by thread of this process (id and name), without the calling one.
fn switches() -> BTreeMap<String, u64> {
    let own = std::fs::read_link("/proc/thread-self").unwrap();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let others = tasks.filter(|task| task.file_name() != own.file_name());
    let of_thread = |task: std::path::PathBuf| {
        // A thread may end while the directory is read.
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let count = |name: &str| field(name)?.parse::<u64>().ok();
        let id = task.file_name()?.to_string_lossy().into_owned();
        let all = count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?;
        Some((format!("{id} {}", field("Name:")?), all))
    };
    others.filter_map(of_thread).collect()
}

fn create(path: &Path, format: DriveFormat) {
    let options = CreateOptions::new(format.of_image().unwrap(), SIZE_BYTES, None).unwrap();
    engine::create(path, 0).unwrap();
    image::create(&EngineOpener::default().open(&path.into(), Role::Writable).unwrap(), &options).unwrap();
}

/// A guest that has set its rings up, and has worked. The driver keeps them enabled until it is dropped.
struct Guest {
    driver: Arc<Driver>,
    reactors: Vec<ReactorThread>,
}

impl Guest {
    fn attach(socket: &Path) -> Self {
        let options = DriverOptions::default().with(|options| {
            options.queues = QUEUES;
            // With a limit, the driver's own thread looks now and then whether the device is silent.
            options.request_timeout_ms = 0;
        });
        let driver = Arc::new(Driver::connect(socket, options).unwrap());
        let reactors: Vec<_> = (0..QUEUES).map(|_| Reactor::spawn(ReactorConfig::default()).unwrap()).collect();
        let guest = Self { driver, reactors };
        guest.work();
        guest
    }

    fn work(&self) {
        let allocating = Arc::clone(&self.driver);
        let alloc: load::Alloc = Arc::new(move |length_bytes| allocating.alloc(length_bytes));
        let spec = BenchSpec::default().with(|spec| {
            spec.queues = u32::from(QUEUES);
            spec.read_percent = 50;
            spec.flush_every = Some(32);
            spec.stop = Stop::Requests(REQUESTS);
        });
        let disk: Arc<dyn Disk> = Arc::clone(&self.driver) as _;
        let reactors: Vec<_> = self.reactors.iter().map(ReactorThread::handle).collect();
        let report =
            run(&disk, &reactors, &spec, &Hooks::default().with(|hooks| hooks.alloc = Some(alloc))).unwrap().report;
        assert_eq!((report.errors, report.requests), (0, REQUESTS), "{:?}", report.first_error);
    }
}

#[test]
fn an_idle_daemon_with_guests_attached_never_wakes_up() {
    let dir = tempfile::tempdir().unwrap();
    let in_memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let drives = [
        (DriveFormat::Raw, EngineKind::IoUring, CacheMode::Writeback),
        (DriveFormat::Raw, EngineKind::IoUring, CacheMode::None),
        (DriveFormat::Qcow2, EngineKind::IoUring, CacheMode::None),
        (DriveFormat::Raw, EngineKind::IoUring, CacheMode::Writethrough),
        (DriveFormat::Raw, EngineKind::Threads, CacheMode::None),
        // In memory.
        (DriveFormat::Raw, EngineKind::Auto, CacheMode::Writeback),
        (DriveFormat::Qcow2, EngineKind::LinuxAio, CacheMode::None),
        (DriveFormat::Qcow2, EngineKind::Auto, CacheMode::Writeback),
        // The memory of the last disk's guest is registered.
        (DriveFormat::Raw, EngineKind::IoUring, CacheMode::Writeback),
    ];
    let (copied, last) = (5, drives.len() - 1);
    let config = DaemonConfig::default().with(|config| {
        config.reactors = 2;
        config.allow_backing = BackingPolicy::Deny;
    });
    let daemon = Daemon::start(config).unwrap();
    let mut guests = Vec::new();
    for (index, (format, engine, cache)) in drives.into_iter().enumerate() {
        let directory = if index == copied { &in_memory } else { &dir };
        let (path, socket) = (directory.path().join(index.to_string()), dir.path().join(format!("{index}.sock")));
        create(&path, format);
        let mut drive = DriveOptions::of_file(&path);
        (drive.disk.format, drive.disk.engine, drive.disk.cache) = (Some(format), engine, cache);
        (drive.export.queues, drive.export.socket) = (Some(QUEUES), Some(socket.clone()));
        drive.export.fixed_buffers = index == last;
        daemon.add(&drive).unwrap();
        guests.push(Guest::attach(&socket));
    }
    let have_all_worked = || daemon.exports().iter().all(|export| export.rings.iter().all(|ring| ring.requests > 0));
    for _ in 0..100 {
        // On a loaded machine one of a guest's queues may have done all before the other has begun.
        if have_all_worked() {
            break;
        }
        guests.iter().for_each(Guest::work);
    }
    assert!(have_all_worked(), "all rings are enabled");
    // Wait until every thread has looked for work for the last time.
    std::thread::sleep(Duration::from_secs(1));
    let before = switches();
    assert!(before.len() > drives.len(), "threads were found: {before:?}");
    let woken = |before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>| -> Vec<String> {
        let changed = after.iter().filter(|(thread, count)| before.get(*thread) != Some(count));
        changed.map(|(thread, _)| thread.clone()).collect()
    };
    assert!(!before.keys().any(|thread| thread.contains(KERNEL_WORKER)), "{before:?}");
    // Only root may pin that much for certain.
    let is_root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    assert!(!is_root || daemon.reactors().iter().all(|(_, stats)| stats.fixed > 0), "{:?}", daemon.reactors());
    let is_idle = |_| {
        let before = switches();
        std::thread::sleep(idle_time());
        let after = switches();
        let idle = woken(&before, &after);
        println!("these threads woke up: {idle:?}; before: {before:?}, after: {after:?}");
        idle.is_empty()
    };
    assert!((0..TRIES).any(is_idle), "threads wake up, in every one of {TRIES} stretches: see above");
    // The thread is still there, so its work would have been seen.
    let before = switches();
    guests.iter().for_each(Guest::work);
    let working = woken(&before, &switches());
    assert!(working.iter().any(|thread| thread.contains("reactor-")), "{working:?}");
    drop(guests);
    daemon.shutdown().unwrap();
}
