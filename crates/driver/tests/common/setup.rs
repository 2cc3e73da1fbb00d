//! A driver on a device that the test plays by hand, step by step.

use super::{Character, Device, HandReactor, Server, Started};
use block::{Completion, Disk, DiskQueue, IoErrorKind, Op, OpFlags};
use memory::IoBuf;
use ringdisk_driver::{Driver, DriverOptions};
use std::rc::Rc;
use std::time::{Duration, Instant};
use virtio::Request;
use virtio::blk::Status;

pub struct Setup {
    pub server: Server,
    pub driver: Driver,
    pub started: Started,
    pub device: Device,
    pub reactor: Rc<HandReactor>,
    pub queue: Box<dyn DiskQueue>,
    pub done: Vec<Completion>,
}

/// The tests of `tests/packed.rs` are those of the other files, over packed rings.
pub fn small() -> DriverOptions {
    DriverOptions::default().with(|options| {
        options.packed = env!("CARGO_CRATE_NAME") == "packed";
        options.queue_size = 16;
        options.memory_bytes = 1 << 20;
        options.answer_timeout_ms = 20_000;
    })
}

pub fn setup(character: Character, options: DriverOptions) -> Setup {
    let server = Server::new(character);
    let driver = Driver::connect(&server.path, options).unwrap();
    let started = server.ring();
    let device = started.queue();
    let (reactor, ctx) = HandReactor::new();
    let queue = driver.open_queue(&ctx).unwrap();
    Setup { server, driver, started, device, reactor, queue, done: Vec::new() }
}

impl Setup {
    /// What the device sees now, completed by `answer`.
    pub fn serve(&mut self, mut answer: impl FnMut(&Request) -> Status) -> Vec<String> {
        self.reactor.turn();
        let mut seen = Vec::new();
        while let Some((head, request)) = self.device.pop().unwrap() {
            let status = answer(&request);
            seen.push(self.describe(head, &request));
            drop(request);
            self.device.complete(head, status);
        }
        self.device.publish();
        self.queue.harvest(&mut self.done);
        seen
    }

    pub fn describe(&self, head: u16, request: &Request) -> String {
        match request {
            Request::Read { sector, data, .. } => format!("read {sector}+{}", data.length_bytes()),
            Request::Write { sector, data, .. } => format!("write {sector}+{}", data.length_bytes()),
            Request::Discard | Request::SecureErase | Request::WriteZeroes => {
                format!("{request:?} {:?}", self.device.ranges(head)[0]).to_lowercase()
            }
            other => format!("{other:?}").to_lowercase(),
        }
    }

    pub fn serve_all(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let seen = self.serve(|_| Status::Ok);
            if seen.is_empty() {
                return all;
            }
            all.extend(seen);
        }
    }

    pub fn results(&mut self) -> Vec<(u64, Result<(), IoErrorKind>)> {
        self.queue.harvest(&mut self.done);
        self.done.drain(..).map(|done| (done.tag, done.result.map_err(|error| error.kind()))).collect()
    }

    /// Turns until everything in flight has ended. For ends that another thread must notice first.
    pub fn wait_for_end(&mut self) -> Vec<(u64, Result<(), IoErrorKind>)> {
        let patience = Instant::now() + Duration::from_secs(20);
        let mut results = Vec::new();
        while self.queue.in_flight() > 0 {
            assert!(Instant::now() < patience, "{} requests never ended", self.queue.in_flight());
            self.reactor.turn();
            results.extend(self.results());
        }
        results
    }
}

pub fn read(offset: u64, buf: &IoBuf) -> Op {
    Op::read(offset, buf.whole())
}

pub fn write(offset: u64, buf: &IoBuf, fua: bool) -> Op {
    Op::write(offset, buf.whole(), OpFlags::from_fua(fua))
}

pub fn pattern(length: usize, seed: u8) -> IoBuf {
    let buf = IoBuf::zeroed(length);
    let bytes: Vec<u8> = (0..length).map(|index| (index % 251) as u8 ^ (index / 512) as u8 ^ seed).collect();
    buf.whole().copy_from_slice(0, &bytes);
    buf
}

/// A queue that is nothing, to put in another's place.
pub fn setup_dummy() -> Box<dyn DiskQueue> {
    struct Nothing;
    impl DiskQueue for Nothing {
        fn submit(&mut self, _: u64, _: Op) {}
        fn harvest(&mut self, _: &mut Vec<Completion>) -> usize {
            0
        }
        fn in_flight(&self) -> usize {
            0
        }
    }
    Box::new(Nothing)
}
