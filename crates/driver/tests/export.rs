//! The driver on Ringdisk's own export, over real files: the suite that every disk runs, through the socket.

use block::{Disk, DiskInfo, DiskListener, DiskQueue, File, Listeners, ReactorCtx, ReactorHandle};
use engine::{CacheMode, EngineKind, OpenOptions, Reactor, ReactorConfig, ReactorThread};
use export_vhost_user::{Export, ExportOptions};
use image::{CreateOptions, FileName, Format, ImageOptions, NullDisk, Opener, Role};
use ringdisk_driver::{Driver, DriverOptions};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;
use testkit::conformance::{Subject, run};
use testkit::{Harness, Request, ThreadHarness};

const SIZE: u64 = 1 << 20;

struct Files(OpenOptions);

impl Opener for Files {
    fn open(&self, name: &FileName, role: Role) -> block::Result<Arc<dyn File>> {
        let read_only = !matches!(role, Role::Writable);
        engine::open(name.path().unwrap(), &self.0.clone().with(|options| options.read_only = read_only))
    }
}

/// The driver, and what must live as long. The export is dropped after it.
struct Attached {
    driver: Driver,
    _export: Export,
    _directory: tempfile::TempDir,
}

impl Disk for Attached {
    fn info(&self) -> DiskInfo {
        self.driver.info()
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        self.driver.open_queue(ctx)
    }

    fn set_volatile_cache(&self, volatile: bool) {
        self.driver.set_volatile_cache(volatile);
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.driver.subscribe(listener);
    }
}

fn reactors(name: &str, count: usize) -> (Vec<Arc<dyn ReactorHandle>>, Vec<ReactorThread>) {
    let config = || ReactorConfig::default().with(|config| config.name = name.into());
    let threads: Vec<_> = (0..count).map(|_| Reactor::spawn(config()).unwrap()).collect();
    (threads.iter().map(ReactorThread::handle).collect(), threads)
}

fn attach(
    format: Format,
    files: &OpenOptions,
    read_only: bool,
    options: &DriverOptions,
    server: &[Arc<dyn ReactorHandle>],
) -> Attached {
    let directory = tempfile::tempdir().unwrap();
    let (path, socket) = (directory.path().join("disk.img"), directory.path().join("disk.sock"));
    engine::create(&path, 0).unwrap();
    let new = match format {
        Format::Raw => CreateOptions::raw(SIZE),
        _ => CreateOptions::Qcow2(format_qcow2::CreateOptions::default().with(|options| options.size_bytes = SIZE)),
    };
    image::create(&engine::open(&path, &OpenOptions::default()).unwrap(), &new).unwrap();
    let image = ImageOptions::new(&path).with(|options| {
        options.format = Some(format);
        options.read_only = read_only;
        options.serial = "s-1".into();
    });
    let disk = image::open(&image, &Files(files.clone().with(|options| options.lock = false))).unwrap();
    let export = Export::listen(&socket, Arc::new(disk), server.to_vec(), ExportOptions::default()).unwrap();
    let driver = Driver::connect(&socket, options.clone()).unwrap();
    assert_eq!(driver.info().serial, "s-1");
    Attached { driver, _export: export, _directory: directory }
}

fn conforms(format: Format, files: OpenOptions, options: DriverOptions, seed: u64) {
    let (server, _server_threads) = reactors("server", 2);
    let (guest, _guest_threads) = reactors("guest", 2);
    let options = options.with(|options| {
        options.queues = 4;
        options.memory_bytes = 1 << 20;
    });
    let mut make = |read_only| {
        let attached = attach(format, &files, read_only, &options, &server);
        Some(Arc::new(attached) as Arc<dyn Disk>)
    };
    let mut subject = Subject { make: &mut make, keeps_data: true, seed };
    let report = run(&mut ThreadHarness::new(guest), &mut subject);
    report.assert_passed();
    assert!(report.skipped.is_empty(), "{:?}", report.skipped);
}

#[test]
fn a_raw_image_conforms_through_the_socket() {
    conforms(Format::Raw, OpenOptions::default(), DriverOptions::default(), 1);
}

#[test]
fn a_qcow2_image_conforms_through_a_small_ring_without_extras() {
    let files = OpenOptions::default().with(|options| {
        options.engine = EngineKind::Threads;
        options.cache = CacheMode::Writeback;
    });
    let plain = DriverOptions::default().with(|options| {
        options.queue_size = 8;
        options.indirect = false;
        options.event_idx = false;
        options.bounce_bytes = 128 << 10;
    });
    conforms(Format::Qcow2, files, plain, 2);
}

/// A disk of zeros that becomes longer.
struct Growing {
    size_bytes: AtomicU64,
    listeners: Listeners,
}

const LARGEST: u64 = 1 << 30;

impl Disk for Growing {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes.load(Ordering::SeqCst), ..NullDisk::new(LARGEST, String::new()).info() }
    }

    fn open_queue(&self, ctx: &Rc<dyn ReactorCtx>) -> block::Result<Box<dyn DiskQueue>> {
        NullDisk::new(LARGEST, String::new()).open_queue(ctx)
    }

    fn subscribe(&self, listener: Weak<dyn DiskListener>) {
        self.listeners.subscribe(listener);
    }
}

impl Growing {
    fn grow(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::SeqCst);
        self.listeners.notify(|| self.info());
    }
}

/// Passes on the sizes that it hears of.
struct Sizes(Sender<u64>);

impl DiskListener for Sizes {
    fn info_changed(&self, info: &DiskInfo) {
        self.0.send(info.size_bytes).unwrap();
    }
}

/// Serves a disk that grows at `directory`.
fn growing(directory: &Path, server: Vec<Arc<dyn ReactorHandle>>) -> (Arc<Growing>, PathBuf, Export) {
    let socket = directory.join("disk.sock");
    let disk = Arc::new(Growing { size_bytes: AtomicU64::new(SIZE), listeners: Listeners::default() });
    let export = Export::listen(&socket, Arc::clone(&disk) as _, server, ExportOptions::default()).unwrap();
    (disk, socket, export)
}

#[test]
fn a_size_that_comes_while_the_device_is_frozen_is_seen_when_it_is_restored_or_reset() {
    let (server, _server_threads) = reactors("server", 1);
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket, _export) = growing(directory.path(), server);
    let driver = Driver::connect(&socket, DriverOptions::default()).unwrap();
    let (sender, sizes) = channel();
    let listener = Arc::new(Sizes(sender));
    driver.subscribe(Arc::downgrade(&listener) as Weak<dyn DiskListener>);
    let ends: [fn(&Driver) -> block::Result<()>; 2] = [Driver::restore, Driver::reset];
    for (times, end) in [2, 3].into_iter().zip(ends) {
        driver.freeze().unwrap();
        disk.grow(SIZE * times);
        // Time for the news.
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(driver.info().size_bytes, SIZE * (times - 1), "it is ignored");
        assert_eq!(sizes.try_recv(), Err(TryRecvError::Empty));
        end(&driver).unwrap();
        assert_eq!(driver.info().size_bytes, SIZE * times);
        assert_eq!(sizes.recv_timeout(Duration::from_secs(20)), Ok(SIZE * times));
        // The device repeats its news when its rings start; that is no new size.
        assert_eq!(sizes.try_recv(), Err(TryRecvError::Empty), "once");
    }
}

#[test]
fn the_driver_follows_the_size_of_its_device() {
    let (server, _server_threads) = reactors("server", 1);
    let (guest, _guest_threads) = reactors("guest", 1);
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket, _export) = growing(directory.path(), server);
    let driver: Arc<dyn Disk> = Arc::new(Driver::connect(&socket, DriverOptions::default()).unwrap());
    let (sender, sizes) = channel();
    let listener = Arc::new(Sizes(sender));
    driver.subscribe(Arc::downgrade(&listener) as Weak<dyn DiskListener>);
    let mut harness = ThreadHarness::new(guest);
    let queue = harness.open(&driver, 0).unwrap();
    let mut read_behind = |offset| {
        harness.submit(queue, vec![(0, Request::read(offset, 512))]);
        loop {
            if let Some((_, reply)) = harness.turn().replies.pop() {
                return reply.result;
            }
        }
    };
    for size_bytes in [SIZE * 2, SIZE * 3] {
        let end = driver.info().size_bytes;
        assert!(read_behind(end).is_err());
        disk.grow(size_bytes);
        assert_eq!(sizes.recv_timeout(Duration::from_secs(20)), Ok(size_bytes));
        assert_eq!(driver.info().size_bytes, size_bytes);
        assert_eq!(read_behind(end), Ok(()));
    }
}
