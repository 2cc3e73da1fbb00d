//! Request contexts in the running daemon, with two disks on two reactors over vhost-user and the driver as guest.
//! After warm-up none is created, and there are hardly more than were in flight at once.
//!
//! `RINGDISK_POOL_REQUESTS=1000000 cargo test -p ringdisk-daemon --test pools` watches a million requests a disk.

use block::Disk;
use drive::{DriveFormat, DriveOptions, EngineOpener};
use driver::{Driver, DriverOptions};
use engine::{CacheMode, EngineKind, Reactor, ReactorConfig, ReactorThread};
use image::{BackingPolicy, CreateOptions, Opener, Role};
use load::{Alloc, BenchReport, BenchSpec, Hooks, Pattern, Progress, Stop, run};
use memory::{DECAY_PERIOD, IoBuf, PoolStats};
use ringdisk_daemon::{Daemon, DaemonConfig};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SIZE_BYTES: u64 = 16 << 20;
const DISKS: usize = 2;
/// The pool that every request of a file takes a context from.
const REQUESTS: &str = "request in an engine";
const WARM_UP: u64 = 5_000;

/// Requests of a disk that are watched; set RINGDISK_POOL_REQUESTS to widen.
fn watched() -> u64 {
    std::env::var("RINGDISK_POOL_REQUESTS").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

type Pools = BTreeMap<&'static str, PoolStats>;

struct Guest {
    driver: Arc<Driver>,
    reactor: ReactorThread,
}

impl Guest {
    fn new(socket: &Path) -> Self {
        let driver = Arc::new(
            Driver::connect(socket, DriverOptions::default().with(|options| options.queue_size = 512)).unwrap(),
        );
        Self { driver, reactor: Reactor::spawn(ReactorConfig::default()).unwrap() }
    }

    /// `odd` buffers have to be bounced by the device, where the file asks for alignment.
    fn run(&self, spec: &BenchSpec, odd: bool, hooks: Hooks<'_>) -> BenchReport {
        let driver = Arc::clone(&self.driver);
        let alloc: Alloc = Arc::new(move |length| match odd {
            false => driver.alloc(length),
            true => Ok(IoBuf::gather(vec![driver.alloc(length + 1)?.whole().slice(1, length)])),
        });
        let disk: Arc<dyn Disk> = Arc::clone(&self.driver) as _;
        let hooks = hooks.with(|hooks| hooks.alloc = Some(alloc));
        let report = run(&disk, &[self.reactor.handle()], spec, &hooks).unwrap().report;
        assert_eq!(report.errors, 0, "{:?}", report.first_error);
        report
    }
}

struct Setup {
    daemon: Daemon,
    guests: Vec<Guest>,
    _dir: tempfile::TempDir,
}

fn set_up(engine: EngineKind, delay_ms: Option<u32>) -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let config = DaemonConfig::default().with(|config| {
        config.reactors = DISKS;
        config.allow_backing = BackingPolicy::Deny;
    });
    let daemon = Daemon::start(config).unwrap();
    let mut guests = Vec::new();
    for index in 0..DISKS {
        let (path, socket) = (dir.path().join(index.to_string()), dir.path().join(format!("{index}.sock")));
        engine::create(&path, 0).unwrap();
        let open = || EngineOpener::default().open(&(&path).into(), Role::Writable).unwrap();
        image::create(&open(), &CreateOptions::raw(SIZE_BYTES)).unwrap();
        let mut drive = DriveOptions::of_file(&path);
        (drive.disk.format, drive.disk.engine) = (Some(DriveFormat::Raw), engine);
        (drive.disk.cache, drive.disk.delay_ms) = (CacheMode::None, delay_ms);
        (drive.export.queues, drive.export.socket) = (Some(1), Some(socket.clone()));
        daemon.add(&drive).unwrap();
        guests.push(Guest::new(&socket));
    }
    let setup = Setup { daemon, guests, _dir: dir };
    let fill = BenchSpec::default().with(|spec| {
        spec.block_bytes = 64 << 10;
        spec.read_percent = 0;
        spec.pattern = Pattern::Sequential;
        spec.stop = Stop::OnePass;
    });
    setup.guests.iter().for_each(|guest| drop(guest.run(&fill, false, Hooks::default())));
    setup
}

fn load(queue_depth: u32, read_percent: u8, stop: Stop) -> BenchSpec {
    BenchSpec::default().with(|spec| {
        spec.queue_depth = queue_depth;
        spec.read_percent = read_percent;
        spec.pattern = Pattern::Random { seed: 7 };
        spec.stop = stop;
    })
}

impl Setup {
    fn pools(&self) -> Pools {
        self.daemon.pools().into_iter().collect()
    }

    /// Loads both disks at once, and watches until the given number of requests of each has passed without a new
    /// context. Gives the counters of that moment. Bounced requests are writes only. A read needs other sizes, and how
    /// many of each are in flight at once would be luck.
    fn watch(&self, case: &str, queue_depth: u32, odd: bool) -> Pools {
        let spec = load(queue_depth, if odd { 0 } else { 50 }, Stop::Runtime(Duration::from_secs(3600)));
        let (done, enough) = ([const { AtomicU64::new(0) }; DISKS], Arc::new(AtomicBool::new(false)));
        let (last, deadline) = (self.pools(), Instant::now() + WINDOWS_TIME);
        let windows = Mutex::new(Windows { case, since: None, last, count: 0, deadline });
        thread::scope(|scope| {
            for (index, guest) in self.guests.iter().enumerate() {
                let (done, enough, windows, spec) = (&done, &enough, &windows, &spec);
                scope.spawn(move || {
                    let progress = |now: Progress| {
                        done[index].store(now.requests, SeqCst);
                        let least = done.iter().map(|done| done.load(SeqCst)).min().unwrap_or(0);
                        if windows.lock().unwrap().look(least, || self.pools()) {
                            enough.store(true, SeqCst);
                        }
                    };
                    let cancel = Some(Arc::clone(enough));
                    guest.run(
                        spec,
                        odd,
                        Hooks::default().with(|hooks| {
                            hooks.progress = Some(&progress);
                            hooks.cancel = cancel;
                        }),
                    );
                });
            }
        });
        windows.into_inner().unwrap().last
    }

    /// After the load has ended, most contexts are freed without any further request.
    fn wait_until_given_back(&self) {
        let (before, deadline) = (self.pools()[REQUESTS].total, Instant::now() + GIVEN_BACK_TIME);
        loop {
            let now = self.pools()[REQUESTS];
            if now.total * 4 <= before {
                return println!("of {before} contexts {} are left: {now:?}", now.total);
            }
            assert!(Instant::now() < deadline, "of {before} contexts there still are: {now:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn end(self) {
        drop(self.guests);
        self.daemon.shutdown().unwrap();
    }
}

/// A few periods, and the reactors' time to get round to it on a machine that is busy.
const GIVEN_BACK_TIME: Duration = Duration::from_secs(60);

/// Stretches of a run, in which contexts may be created or not.
struct Windows<'a> {
    case: &'a str,
    /// When the stretch began, and how many requests the slower disk had served then.
    since: Option<(u64, Instant)>,
    last: Pools,
    /// Stretches so short that nothing can have been given back in them.
    count: u32,
    deadline: Instant,
}

/// The total is bounded and grows by whole batches, so new contexts can appear in far fewer stretches than this. A pool
/// that does not settle shows some in each.
const WINDOWS_MAX: u32 = 40;
/// Where every stretch is so long that contexts are given back and created again: until then one must have had none.
const WINDOWS_TIME: Duration = Duration::from_secs(120);

impl Windows<'_> {
    /// Whether a stretch without a new context has ended.
    fn look(&mut self, requests: u64, pools: impl Fn() -> Pools) -> bool {
        match self.since {
            Some((since, _)) if requests < since + watched() => return false,
            None if requests < WARM_UP => return false,
            _ => {}
        }
        let (now, began) = (pools(), self.since.replace((requests, Instant::now())));
        let new = |(name, now): (&&'static str, &PoolStats)| {
            let before = self.last.get(name).map_or(0, |before| before.created);
            (now.created > before).then(|| format!("{} '{name}': {now:?}", now.created - before))
        };
        let created: Vec<_> = now.iter().filter_map(new).collect();
        self.last = now;
        let Some((_, began)) = began else { return false };
        self.count += u32::from(began.elapsed() < DECAY_PERIOD);
        let may_go_on = self.count < WINDOWS_MAX && Instant::now() < self.deadline;
        assert!(created.is_empty() || may_go_on, "{}: still created: {created:?}", self.case);
        created.is_empty()
    }
}

fn check(case: &str, depth: u32, pools: &Pools) {
    let requests = pools[REQUESTS];
    println!("{case}: {requests:?}");
    let most = u64::from(depth) * DISKS as u64;
    let PoolStats { total, peak_in_flight: peak, .. } = requests;
    assert!(total * 10 <= peak * 11, "{case}: more than a tenth above the peak in flight: {requests:?}");
    assert!(peak <= most, "{case}: {requests:?} for at most {most} in flight");
    assert!(peak >= most / 2, "{case}: the load was there; {requests:?}");
}

/// One test, in which the depth only rises: the counters are those of the whole process, and they remember peaks.
#[test]
fn two_disks_need_hardly_more_contexts_than_are_in_flight_and_create_none_after_warm_up() {
    for (engine, depth, delay_ms) in [
        (EngineKind::IoUring, 128, None),
        (EngineKind::LinuxAio, 128, None),
        (EngineKind::Threads, 128, None),
        (EngineKind::IoUring, 256, Some(1)),
    ] {
        let setup = set_up(engine, delay_ms);
        for odd in [false, true] {
            let case = format!("{engine}, depth {depth}, delay {delay_ms:?}, bounced: {odd}");
            check(&case, depth, &setup.watch(&case, depth, odd));
        }
        if delay_ms.is_some() {
            // Bounced requests at this depth leave so much behind that a sleeping reactor wakes up to free it.
            setup.wait_until_given_back();
        }
        setup.end();
    }
    a_greater_depth_is_no_cliff();
}

/// The load doubles twice and the rate does not break down, neither at full speed nor with a delay of a millisecond.
/// Noise of the machine may hit any depth, but a real cliff shows every time.
fn a_greater_depth_is_no_cliff() {
    const ROUNDS: u32 = 10;
    for delay_ms in [None, Some(1)] {
        let setup = set_up(EngineKind::IoUring, delay_ms);
        let rate = |depth| {
            let spec = &load(depth, 50, Stop::Requests(8_000));
            thread::scope(|scope| {
                let run = |guest: &Guest| guest.run(spec, false, Hooks::default()).iops;
                let runs: Vec<_> = setup.guests.iter().map(|guest| scope.spawn(move || run(guest))).collect();
                runs.into_iter().map(|run| run.join().unwrap()).sum::<f64>()
            })
        };
        // With a delay, more requests in flight take no longer.
        let least = if delay_ms.is_some() { 1.0 } else { 0.5 };
        for depth in [256, 512] {
            let holds = (0..ROUNDS).any(|_| {
                let (usual, deep) = (rate(128), rate(depth));
                println!("delay {delay_ms:?} ms: {usual:.0} requests a second at depth 128, {deep:.0} at {depth}");
                deep >= usual * least
            });
            assert!(
                holds,
                "delay {delay_ms:?} ms: at {depth} less than {least} of the rate of depth 128, {ROUNDS} times"
            );
        }
        setup.end();
    }
}
