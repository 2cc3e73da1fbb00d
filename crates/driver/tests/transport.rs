//! A device over a transport of the test's own: changes of its configuration that come while the driver tries to hold its
//! queues, and calls that it refuses.

mod common;

use block::{Disk, Error, ErrorKind, IoError, Op};
use common::{HandReactor, small};
use ringdisk_driver::{Driver, Link, QueueEvents, QueueSetup, SharedMemory, Transport};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use virtio::blk::{BlkConfig, features};

/// A device that takes no requests.
#[derive(Default)]
struct Idle {
    link: OnceLock<Arc<Link>>,
    sectors: AtomicU64,
    writeback: AtomicU8,
    /// What it refuses from here on.
    refuses_to_start: AtomicBool,
    refuses_to_stop: AtomicBool,
    refuses_to_tell: AtomicBool,
}

impl Idle {
    fn new() -> Arc<Self> {
        Arc::new(Self { sectors: AtomicU64::new(8), ..Self::default() })
    }

    fn driver(self: &Arc<Self>) -> Driver {
        let options = small().with(|options| (options.without_serial, options.answer_timeout_ms) = (true, 1000));
        Driver::over(Box::new(Wire(Arc::clone(self))), options).unwrap()
    }

    fn grow(&self, sectors: u64) {
        self.sectors.store(sectors, Ordering::SeqCst);
        self.link.get().unwrap().config_changed();
    }
}

fn unless(refused: &AtomicBool) -> block::Result<()> {
    match refused.load(Ordering::SeqCst) {
        true => Err(Error::new(ErrorKind::Protocol, "refused")),
        false => Ok(()),
    }
}

type Call = fn(&Driver) -> block::Result<()>;
type Refusal = fn(&Idle) -> &AtomicBool;

struct Wire(Arc<Idle>);

impl Transport for Wire {
    fn name(&self) -> String {
        "idle".into()
    }

    fn attach(&self, link: &Arc<Link>) -> block::Result<()> {
        self.0.link.set(Arc::clone(link)).unwrap();
        Ok(())
    }

    fn offered_features(&self) -> block::Result<u64> {
        Ok(features::VERSION_1 | features::FLUSH | features::CONFIG_WCE)
    }

    fn choose_features(&self, _: u64) -> block::Result<()> {
        Ok(())
    }

    fn queues_max(&self) -> block::Result<u64> {
        Ok(1)
    }

    fn read_config(&self) -> block::Result<BlkConfig> {
        unless(&self.0.refuses_to_tell)?;
        Ok(BlkConfig::default().with(|config| {
            config.capacity_sectors = self.0.sectors.load(Ordering::SeqCst);
            config.writeback = self.0.writeback.load(Ordering::SeqCst);
        }))
    }

    fn write_config(&self, _: usize, bytes: &[u8]) -> block::Result<()> {
        self.0.writeback.store(bytes[0], Ordering::SeqCst);
        Ok(())
    }

    fn share_memory(&self, _: SharedMemory<'_>) -> block::Result<()> {
        Ok(())
    }

    fn start_queue(&self, _: usize, _: &QueueSetup, _: QueueEvents<'_>) -> block::Result<()> {
        unless(&self.0.refuses_to_start)
    }

    fn stop_queue(&self, _: usize) -> block::Result<()> {
        unless(&self.0.refuses_to_stop)
    }

    fn hang_up(&self) {}
}

fn is_held(driver: &Driver) -> bool {
    let (_, ctx) = HandReactor::new();
    driver.open_queue(&ctx).err().is_some_and(|error| error.to_string().contains("frozen"))
}

#[test]
fn a_size_that_comes_while_a_freeze_or_a_reset_is_tried_in_vain_is_seen_then() {
    let calls: [Call; 2] = [Driver::freeze, Driver::reset];
    for call in calls {
        let device = Idle::new();
        let driver = device.driver();
        let (_reactor, ctx) = HandReactor::new();
        // Its reactor does not turn, so its ring is never handed over.
        let _queue = driver.open_queue(&ctx).unwrap();
        let patience = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| call(&driver));
            while !is_held(&driver) && !thread.is_finished() {
                assert!(Instant::now() < patience, "it never begins");
                std::thread::yield_now();
            }
            device.grow(16);
            assert!(thread.join().unwrap().is_err());
        });
        assert_eq!(driver.info().size_bytes, 16 * 512);
    }
}

#[test]
fn requests_end_when_a_device_refuses_to_stop_or_to_start_its_rings() {
    let cases: [(Call, Refusal); 3] = [
        (Driver::freeze, |device| &device.refuses_to_stop),
        (Driver::reset, |device| &device.refuses_to_stop),
        (Driver::reset, |device| &device.refuses_to_start),
    ];
    for (call, refused) in cases {
        let device = Idle::new();
        let driver = device.driver();
        let (reactor, ctx) = HandReactor::new();
        let mut queue = driver.open_queue(&ctx).unwrap();
        refused(&device).store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| call(&driver));
            while !thread.is_finished() {
                reactor.turn();
            }
            assert!(thread.join().unwrap().unwrap_err().to_string().contains("refused"));
        });
        let buf = driver.alloc(512).unwrap();
        queue.submit(1, Op::read(0, buf.whole()));
        let (mut done, patience) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while done.is_empty() {
            assert!(Instant::now() < patience, "the request never ends");
            reactor.turn();
            queue.harvest(&mut done);
        }
        assert_eq!(done[0].result, Err(IoError::EIO));
        assert!(driver.is_disconnected());
    }
}

#[test]
fn a_cache_counts_as_volatile_if_the_device_does_not_tell_whether_it_was_switched() {
    let device = Idle::new();
    let driver = device.driver();
    assert!(!driver.info().volatile_cache);
    device.refuses_to_tell.store(true, Ordering::SeqCst);
    driver.set_volatile_cache(true);
    assert_eq!((device.writeback.load(Ordering::SeqCst), driver.info().volatile_cache), (1, true));
    driver.set_volatile_cache(false);
    assert!(driver.info().volatile_cache);
    device.refuses_to_tell.store(false, Ordering::SeqCst);
    driver.set_volatile_cache(false);
    assert!(!driver.info().volatile_cache);
}
