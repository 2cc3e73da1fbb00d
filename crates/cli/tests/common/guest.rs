//! A guest whose data are checked, for tests that change its disk meanwhile.

#![allow(dead_code, reason = "each test file uses its part")]

use crate::common::PATIENCE;
use block::{Disk, DiskIo, IoResult, Op, OpFlags, ReactorHandle, Task, run_and_wait};
use driver::{Driver, DriverOptions};
use engine::{Reactor, ReactorConfig, ReactorThread};
use load::{BenchSpec, Hooks, Initial, Pattern, Stop, Verify};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Nobody lets a guest work for longer.
const LONGEST: Duration = Duration::from_secs(3600);

/// How a guest's work ended.
pub(crate) struct Worked {
    pub(crate) errors: u64,
    pub(crate) mismatches: u64,
    /// Reads and writes a second.
    pub(crate) iops: f64,
}

/// A guest that writes, reads and checks what it reads until it is told to stop.
pub(crate) struct Guest {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Worked>,
}

impl Guest {
    pub(crate) fn begin(socket: &Path) -> Self {
        let reactor = client_reactor();
        let disk: Arc<dyn Disk> = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let cancel = Arc::clone(&stop);
        let work = move || {
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = 8;
                spec.block_bytes = 4096;
                spec.length_bytes = Some(8 << 20);
                spec.drain_timeout = PATIENCE;
                spec.read_percent = 50;
                spec.verify = Some(Verify::new(5, Initial::Zeros));
                spec.pattern = Pattern::Random { seed: 6 };
                spec.flush_every = Some(32);
                spec.stop = Stop::Runtime(LONGEST);
            });
            let hooks = Hooks::default().with(|hooks| hooks.cancel = Some(cancel));
            let report = load::run(&disk, &handles, &spec, &hooks).unwrap().report;
            Worked { errors: report.errors, mismatches: report.mismatches, iops: report.iops }
        };
        Self { stop, thread: std::thread::spawn(work) }
    }

    pub(crate) fn stop(self) -> Worked {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("a guest's end")
    }

    /// Nothing went wrong.
    pub(crate) fn end(self) {
        let Worked { errors, mismatches, iops } = self.stop();
        assert_eq!((errors, mismatches), (0, 0));
        assert!(iops > 0.0, "it did nothing");
    }
}

fn client_reactor() -> ReactorThread {
    Reactor::spawn(ReactorConfig::default().with(|config| config.name = "client".into())).unwrap()
}

/// A guest that is connected, and then reads a few blocks once, each in a request of its own.
pub(crate) struct Reader {
    driver: Arc<Driver>,
    ended_before: u64,
    reactor: ReactorThread,
}

/// What has become of a reader's requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Read {
    pub(crate) errors: u64,
    /// Requests that the device has ended, whatever with. The others end with the connection.
    pub(crate) answered: u64,
}

impl Reader {
    pub(crate) const REQUESTS: u64 = 8;

    pub(crate) fn connect(socket: &Path) -> Self {
        let driver = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        Self { ended_before: driver.counters().requests, driver, reactor: client_reactor() }
    }

    /// Reads blocks of the last 32 MiB of a disk of 64 MiB.
    pub(crate) fn read(self) -> std::thread::JoinHandle<Read> {
        let work = move || {
            let Self { driver, ended_before, reactor } = self;
            let disk: Arc<dyn Disk> = Arc::clone(&driver) as _;
            let handles: [Arc<dyn ReactorHandle>; 1] = [reactor.handle()];
            let spec = BenchSpec::default().with(|spec| {
                spec.queue_depth = Self::REQUESTS as u32;
                (spec.offset_bytes, spec.length_bytes) = (32 << 20, Some(32 << 20));
                spec.stop = Stop::Requests(Self::REQUESTS);
                spec.drain_timeout = PATIENCE;
            });
            let report = load::run(&disk, &handles, &spec, &Hooks::default()).unwrap().report;
            Read { errors: report.errors, answered: driver.counters().requests - ended_before }
        };
        std::thread::spawn(work)
    }
}

/// A guest that writes and reads blocks, each in a request of its own, all in flight together.
pub(crate) struct Blocks {
    driver: Arc<Driver>,
    reactor: ReactorThread,
}

/// The number of a block, and its bytes after its request.
pub(crate) type Ended = (usize, IoResult<Vec<u8>>);

impl Blocks {
    pub(crate) const COUNT: usize = 64;
    const BYTES: usize = 4096;

    pub(crate) fn connect(socket: &Path) -> Self {
        let driver = Arc::new(Driver::connect(socket, DriverOptions::default()).unwrap());
        Self { driver, reactor: client_reactor() }
    }

    /// Writes this byte all over the blocks, which begin at this mebibyte of the disk.
    pub(crate) fn begin_to_write(&self, byte: u8, mebibyte: u64) -> Receiver<Ended> {
        self.begin(Some(byte), mebibyte)
    }

    /// Writes, and waits.
    pub(crate) fn write(&self, byte: u8, mebibyte: u64) {
        self.begin(Some(byte), mebibyte)
            .iter()
            .for_each(|(block, result)| drop(result.unwrap_or_else(|error| panic!("{block}: {error}"))));
    }

    /// Reads the blocks at the start of the disk.
    pub(crate) fn read(&self) -> Vec<Ended> {
        self.begin(None, 0).iter().collect()
    }

    fn begin(&self, byte: Option<u8>, mebibyte: u64) -> Receiver<Ended> {
        let (sender, ends) = channel();
        let driver = Arc::clone(&self.driver);
        let begin = move |ctx: &_| {
            let memory = driver.alloc(Self::COUNT * Self::BYTES).unwrap().whole();
            memory.fill(byte.unwrap_or(0));
            let io = DiskIo::open(driver.as_ref(), ctx).unwrap();
            for block in 0..Self::COUNT {
                let (io, sender, at) = (Rc::clone(&io), sender.clone(), block * Self::BYTES);
                let (part, offset) = (memory.slice(at, Self::BYTES), (mebibyte << 20) + at as u64);
                ctx.spawn(Task::new(async move {
                    let op = match byte {
                        Some(_) => Op::write(offset, part.clone(), OpFlags::NONE),
                        None => Op::read(offset, part.clone()),
                    };
                    let ended = io.run(op).await.map(|()| part.to_vec());
                    let _ = sender.send((block, ended));
                }));
            }
        };
        run_and_wait(self.reactor.handle().as_ref(), begin).unwrap();
        ends
    }
}
