//! After warm-up the whole path allocates nothing and frees nothing, on either side of the socket. The guest is the
//! driver. An allocator counts while it is told to.
//!
//! `RINGDISK_ALLOCATION_REQUESTS=1000000 cargo test -p ringdisk-daemon --test no_allocation` counts over a million
//! requests a case. Only the threads that conduct the run are left out: they are no part of the path.

use block::Disk;
use drive::{DriveFormat, DriveOptions, EngineOpener};
use driver::{Driver, DriverOptions};
use engine::{CacheMode, EngineKind, Reactor, ReactorConfig, ReactorThread};
use image::{BackingPolicy, CreateOptions, Opener, Role};
use load::{Alloc, BenchSpec, Hooks, Pattern, Progress, Stop, run};
use memory::IoBuf;
use ringdisk_daemon::{Daemon, DaemonConfig};
use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SIZE_BYTES: u64 = 16 << 20;
const BLOCK_BYTES: usize = 4096;
/// A depth that one turn takes whole, so that the warm-up reaches the most that can be in flight at once.
const DEPTH: u32 = 16;
/// Requests before anything is counted: writes, reads, and a mixture.
const WARM_UP: u64 = 1_500;
/// For how many calls of the allocator the place of the call is kept.
const TRACES: usize = 4;
/// On a loaded machine a case may meet something for the first time after its warm-up, and so allocate once.
const TRIES: u32 = 8;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);
static TRACED: Mutex<Vec<(&str, Backtrace)>> = Mutex::new(Vec::new());

thread_local! {
    /// Threads that are not counted: the conductor, and a thread inside the counting.
    static LEFT_OUT: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

/// The process's first thread is the test harness. After a minute it prints that it still waits.
fn is_harness() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

fn count(what: &'static str, counter: &AtomicU64) {
    if !COUNTING.load(SeqCst) || is_harness() || LEFT_OUT.try_with(|left_out| left_out.replace(true)).unwrap_or(true) {
        return;
    }
    counter.fetch_add(1, SeqCst);
    let mut traced = TRACED.lock().unwrap();
    if traced.len() < TRACES {
        traced.push((what, Backtrace::force_capture()));
    }
    drop(traced);
    LEFT_OUT.set(false);
}

// SAFETY: every call is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count("allocation", &ALLOCATIONS);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count("allocation", &ALLOCATIONS);
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, length: usize) -> *mut u8 {
        count("reallocation", &ALLOCATIONS);
        // SAFETY: passed on.
        unsafe { System.realloc(ptr, layout, length) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count("free", &FREES);
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Requests that are counted in each case.
fn requests() -> u64 {
    std::env::var("RINGDISK_ALLOCATION_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(3_000)
}

/// Where the guest's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Buffers {
    /// In one page that the device may reach.
    Direct,
    /// In two pieces of such memory.
    TwoSegments,
    /// At an odd address: with direct I/O the device has to bounce it.
    Odd,
    /// In two pieces, each at an odd address.
    TwoSegmentsOdd,
    /// In memory that only the guest has: its driver bounces it.
    Private,
}

/// The cases that need most come last. Otherwise contexts that only an earlier case needed would be freed while a later
/// case counts.
const ALL_BUFFERS: [Buffers; 5] =
    [Buffers::Direct, Buffers::TwoSegments, Buffers::Private, Buffers::Odd, Buffers::TwoSegmentsOdd];

impl Buffers {
    fn make(self, driver: &Driver, length: usize) -> block::Result<IoBuf> {
        let half = length / 2;
        Ok(match self {
            Self::Direct => driver.alloc(length)?,
            Self::TwoSegments => {
                let whole = driver.alloc(length)?.whole();
                IoBuf::gather(vec![whole.slice(half, length - half), whole.slice(0, half)])
            }
            Self::Odd => IoBuf::gather(vec![driver.alloc(length + 1)?.whole().slice(1, length)]),
            Self::TwoSegmentsOdd => {
                let whole = driver.alloc(length + 3)?.whole();
                IoBuf::gather(vec![whole.slice(half + 3, length - half), whole.slice(1, half)])
            }
            Self::Private => IoBuf::zeroed(length),
        })
    }
}

fn create(path: &Path, format: DriveFormat) {
    let options = CreateOptions::new(format.of_image().unwrap(), SIZE_BYTES, None).unwrap();
    engine::create(path, 0).unwrap();
    image::create(&EngineOpener::default().open(&path.into(), Role::Writable).unwrap(), &options).unwrap();
}

struct Guest {
    driver: Arc<Driver>,
    reactor: ReactorThread,
}

impl Guest {
    fn new(socket: &Path) -> Self {
        let driver = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        Self { driver, reactor: Reactor::spawn(ReactorConfig::default()).unwrap() }
    }

    fn run(&self, spec: &BenchSpec, buffers: Buffers, hooks: Hooks<'_>) {
        let driver = Arc::clone(&self.driver);
        let alloc: Alloc = Arc::new(move |length| buffers.make(&driver, length));
        let disk: Arc<dyn Disk> = Arc::clone(&self.driver) as _;
        let report =
            run(&disk, &[self.reactor.handle()], spec, &hooks.with(|hooks| hooks.alloc = Some(alloc))).unwrap().report;
        assert_eq!(report.errors, 0, "{:?}", report.first_error);
    }

    /// Writes the whole disk once.
    fn fill(&self) {
        let spec = BenchSpec::default().with(|spec| {
            spec.queue_depth = DEPTH;
            spec.block_bytes = 64 << 10;
            spec.read_percent = 0;
            spec.pattern = Pattern::Sequential;
            spec.stop = Stop::OnePass;
        });
        self.run(&spec, Buffers::Direct, Hooks::default());
    }

    /// Reads and overwrites at random; counts once it is warm, for as many requests as are asked for.
    fn count(&self, case: &str, buffers: Buffers) -> Option<String> {
        let spec = BenchSpec::default().with(|spec| {
            spec.queue_depth = DEPTH;
            spec.block_bytes = BLOCK_BYTES as u32;
            spec.read_percent = 50;
            spec.pattern = Pattern::Random { seed: 7 };
            spec.stop = Stop::Runtime(Duration::from_secs(3600));
        });
        // Reads alone and writes alone, as many at once as possible. A mixture would reach that only by luck.
        for read_percent in [0, 100] {
            let warm_up = spec.clone().with(|spec| {
                spec.read_percent = read_percent;
                spec.stop = Stop::Requests(WARM_UP);
            });
            self.run(&warm_up, buffers, Hooks::default());
        }
        let (started, enough) = (Cell::new(None), Arc::new(AtomicBool::new(false)));
        let progress = |now: Progress| match started.get() {
            None if now.requests >= WARM_UP => {
                started.set(Some(now.requests));
                COUNTING.store(true, SeqCst);
            }
            Some(start) if now.requests - start >= requests() => {
                COUNTING.store(false, SeqCst);
                enough.store(true, SeqCst);
            }
            _ => {}
        };
        let hooks = Hooks::default().with(|hooks| {
            hooks.progress = Some(&progress);
            hooks.cancel = Some(Arc::clone(&enough));
        });
        self.run(&spec, buffers, hooks);
        assert!(enough.load(SeqCst), "{case}: the run ended early");
        let (allocations, frees) = (ALLOCATIONS.swap(0, SeqCst), FREES.swap(0, SeqCst));
        let traced = std::mem::take(&mut *TRACED.lock().unwrap());
        for (what, trace) in &traced {
            eprintln!("{case}: {what}\n{trace}");
        }
        let clean = allocations + frees == 0;
        (!clean).then(|| format!("{case}: {allocations} allocations and {frees} frees after warm-up"))
    }
}

/// What the last try allocated or freed, if every try did.
fn fault(guest: &Guest, case: &str, buffers: Buffers) -> Option<String> {
    let mut fault = None;
    for _ in 0..TRIES {
        fault = Some(guest.count(case, buffers)?);
    }
    fault
}

/// Gives back what earlier load needed: at once here, and each reactor does so before it sleeps for long.
fn forget_the_load() {
    std::thread::sleep(Duration::from_millis(150));
    memory::trim_pools();
    std::thread::sleep(Duration::from_millis(300));
}

/// How bytes reach the storage.
#[derive(Clone, Copy)]
struct Way {
    engine: EngineKind,
    cache: CacheMode,
    fixed_buffers: bool,
}

impl Way {
    fn new(engine: EngineKind, cache: CacheMode) -> Self {
        Self { engine, cache, fixed_buffers: false }
    }
}

fn check(dir: &Path, format: DriveFormat, way: Way) -> Vec<String> {
    let Way { engine, cache, fixed_buffers } = way;
    let more = if fixed_buffers { ", fixed buffers" } else { "" };
    let case = format!("{format:?} in {}, {engine}, {cache}{more}", dir.display());
    let (path, socket) = (dir.join("disk"), dir.join("disk.sock"));
    create(&path, format);
    let mut drive = DriveOptions::of_file(&path);
    (drive.disk.format, drive.disk.engine, drive.disk.cache) = (Some(format), engine, cache);
    drive.export.fixed_buffers = fixed_buffers;
    (drive.export.queues, drive.export.socket) = (Some(1), Some(socket.clone()));
    let config = DaemonConfig::default().with(|config| {
        config.reactors = 1;
        config.allow_backing = BackingPolicy::Deny;
    });
    let daemon = Daemon::start(config).unwrap();
    daemon.add(&drive).unwrap();
    let guest = Guest::new(&socket);
    guest.fill();
    let layer = &daemon.disks()[0].layers[0];
    let expected = if engine == EngineKind::Auto { String::new() } else { engine.to_string() };
    assert!(layer.contains(&expected), "{case}: {layer}");
    if std::env::var_os("RINGDISK_REQUIRE_ALL").is_some() {
        // Otherwise nothing would have to be bounced, and nothing would be registered.
        assert!(cache != CacheMode::None || layer.contains("-byte alignment"), "{case}: {layer}");
        assert!(!fixed_buffers || daemon.reactors()[0].1.fixed > 0, "{case}: {:?}", daemon.reactors());
    }
    forget_the_load();
    let of_case = |buffers| fault(&guest, &format!("{case}, {buffers:?}"), buffers);
    let faults = ALL_BUFFERS.into_iter().filter_map(of_case).collect();
    drop(guest);
    daemon.shutdown().unwrap();
    std::fs::remove_file(&path).unwrap();
    faults
}

/// One test: the count is the whole process's.
#[test]
fn nothing_is_allocated_or_freed_after_warm_up() {
    LEFT_OUT.set(true);
    let dir = tempfile::tempdir().unwrap();
    let uring = Way::new(EngineKind::IoUring, CacheMode::None);
    let ways = [
        Way::new(EngineKind::IoUring, CacheMode::Writeback),
        uring,
        Way { fixed_buffers: true, ..uring },
        Way::new(EngineKind::LinuxAio, CacheMode::None),
        Way::new(EngineKind::Threads, CacheMode::Writeback),
        Way::new(EngineKind::Threads, CacheMode::None),
        Way::new(EngineKind::Auto, CacheMode::Writeback),
    ];
    let mut faults = Vec::new();
    for format in [DriveFormat::Raw, DriveFormat::Qcow2] {
        for way in ways {
            faults.extend(check(dir.path(), format, way));
        }
        // Where the reactor copies by itself.
        if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
            faults.extend(check(memory.path(), format, Way::new(EngineKind::Auto, CacheMode::Writeback)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
