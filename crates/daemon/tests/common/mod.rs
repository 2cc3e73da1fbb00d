//! A daemon, its disks, and a guest for them.

// Each test program uses some of this.
#![allow(dead_code)]

use block::{Disk, ReactorHandle};
use drive::{DriveFormat, DriveOptions, EngineOpener, ExportOptions};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig};
use image::{BackingPolicy, CreateOptions, Opener, Role};
use load::{BenchReport, BenchSpec, Hooks, Initial, Pattern, Stop, Verify, VerifyState, run};
use ringdisk_daemon::{Daemon, DaemonConfig};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub(crate) const SIZE_BYTES: u64 = 8 << 20;
/// Whatever takes longer than this hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn create(path: &Path, format: DriveFormat) -> DriveOptions {
    let options = CreateOptions::new(format.of_image().unwrap(), SIZE_BYTES, None).unwrap();
    engine::create(path, 0).unwrap();
    image::create(&EngineOpener::default().open(&path.into(), Role::Writable).unwrap(), &options).unwrap();
    let mut drive = DriveOptions::of_file(path);
    (drive.disk.format, drive.export.queues) = (Some(format), Some(2));
    drive
}

pub(crate) fn at_socket(mut drive: DriveOptions, socket: &Path) -> DriveOptions {
    drive.export.socket = Some(socket.to_owned());
    drive
}

pub(crate) fn start(reactors: usize) -> Daemon {
    let (allow_backing, listed) = (BackingPolicy::Deny, Vec::new());
    Daemon::start(DaemonConfig::default().with(|config| {
        config.reactors = reactors;
        config.allow_backing = allow_backing;
        config.listed = listed;
    }))
    .unwrap()
}

/// Threads for the guests' side.
pub(crate) struct Client {
    _threads: Vec<engine::ReactorThread>,
    pub(crate) handles: Vec<Arc<dyn ReactorHandle>>,
}

impl Client {
    pub(crate) fn new(queues: usize) -> Self {
        let config = |index| ReactorConfig::default().with(|config| config.name = format!("guest-{index}"));
        let threads: Vec<_> = (0..queues).map(|index| Reactor::spawn(config(index)).unwrap()).collect();
        let handles = threads.iter().map(engine::ReactorThread::handle).collect();
        Self { _threads: threads, handles }
    }

    /// One pass of patterned writes, or of reads that are compared.
    pub(crate) fn pass(&self, disk: &Arc<dyn Disk>, read_percent: u8, initial: Initial) -> (BenchReport, VerifyState) {
        let spec = BenchSpec::default().with(|spec| {
            spec.queue_depth = 8;
            spec.queues = self.handles.len() as u32;
            spec.block_bytes = 16 << 10;
            spec.read_percent = read_percent;
            spec.pattern = Pattern::Sequential;
            spec.stop = Stop::OnePass;
            spec.verify = Some(Verify::new(3, initial));
        });
        let outcome = run(disk, &self.handles, &spec, &Hooks::default()).unwrap();
        (outcome.report, outcome.state.unwrap())
    }
}

pub(crate) fn connect(socket: &Path, queues: u16) -> Arc<dyn Disk> {
    Arc::new(Driver::connect(socket, DriverOptions::default().with(|options| options.queues = queues)).unwrap())
}

pub(crate) fn assert_clean(report: &BenchReport) {
    assert_eq!((report.errors, report.mismatches), (0, 0), "{:?} {:?}", report.first_error, report.first_mismatch);
    assert!(report.requests > 0);
}

const HALF_BYTES: u64 = SIZE_BYTES / 2;

pub(crate) fn at(socket: &Path) -> ExportOptions {
    let mut export = ExportOptions::default();
    (export.socket, export.queues) = (Some(socket.to_owned()), Some(1));
    export
}

pub(crate) fn spec(half: u64, verify: Initial) -> BenchSpec {
    BenchSpec::default().with(|spec| {
        spec.queue_depth = 8;
        spec.offset_bytes = half * HALF_BYTES;
        spec.length_bytes = Some(HALF_BYTES);
        spec.verify = Some(Verify::new(half, verify));
        spec.stop = Stop::Runtime(PATIENCE * 10);
    })
}

/// A guest that writes its half of a disk and compares what it reads, until it is told to stop.
pub(crate) struct Guest {
    disk: Arc<dyn Disk>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(BenchReport, VerifyState)>,
}

impl Guest {
    pub(crate) fn load(socket: &Path, half: u64) -> Self {
        let (disk, stop) = (connect(socket, 1), Arc::new(AtomicBool::new(false)));
        let (loaded, cancel) = (Arc::clone(&disk), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let client = Client::new(1);
            let spec = spec(half, Initial::Zeros).with(|spec| {
                spec.read_percent = 50;
                spec.pattern = Pattern::Random { seed: half };
                spec.flush_every = Some(64);
            });
            let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
            let outcome = run(&loaded, &client.handles, &spec, &hooks).unwrap();
            (outcome.report, outcome.state.unwrap())
        });
        Self { disk, stop, thread }
    }

    /// What it has written; every request and every comparison went well.
    pub(crate) fn stop(self) -> (Arc<dyn Disk>, VerifyState) {
        self.stop.store(true, Ordering::Relaxed);
        let (report, state) = self.thread.join().unwrap();
        assert_clean(&report);
        (self.disk, state)
    }
}

pub(crate) fn assert_holds(disk: &Arc<dyn Disk>, half: u64, state: VerifyState) {
    let spec = spec(half, Initial::State(state)).with(|spec| {
        (spec.read_percent, spec.pattern, spec.stop) = (100, Pattern::Sequential, Stop::OnePass);
    });
    assert_clean(&run(disk, &Client::new(1).handles, &spec, &Hooks::default()).unwrap().report);
}
