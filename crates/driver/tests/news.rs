//! Changes of the device's configuration that come while the driver tries to hold its queues.

mod common;

use block::Disk;
use common::{HandReactor, small};
use ringdisk_driver::{Driver, Link, QueueEvents, QueueSetup, SharedMemory, Transport};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use virtio::blk::{BlkConfig, features};

/// A device that takes no requests, and grows.
#[derive(Default)]
struct Growing {
    link: OnceLock<Arc<Link>>,
    sectors: AtomicU64,
}

impl Growing {
    fn grow(&self, sectors: u64) {
        self.sectors.store(sectors, Ordering::SeqCst);
        self.link.get().unwrap().config_changed();
    }
}

struct Wire(Arc<Growing>);

impl Transport for Wire {
    fn name(&self) -> String {
        "growing".into()
    }

    fn attach(&self, link: &Arc<Link>) -> block::Result<()> {
        self.0.link.set(Arc::clone(link)).unwrap();
        Ok(())
    }

    fn offered_features(&self) -> block::Result<u64> {
        Ok(features::VERSION_1)
    }

    fn choose_features(&self, _: u64) -> block::Result<()> {
        Ok(())
    }

    fn queues_max(&self) -> block::Result<u64> {
        Ok(1)
    }

    fn read_config(&self) -> block::Result<BlkConfig> {
        Ok(BlkConfig::default().with(|config| config.capacity_sectors = self.0.sectors.load(Ordering::SeqCst)))
    }

    fn write_config(&self, _: usize, _: &[u8]) -> block::Result<()> {
        Ok(())
    }

    fn share_memory(&self, _: SharedMemory<'_>) -> block::Result<()> {
        Ok(())
    }

    fn start_queue(&self, _: usize, _: &QueueSetup, _: QueueEvents<'_>) -> block::Result<()> {
        Ok(())
    }

    fn stop_queue(&self, _: usize) -> block::Result<()> {
        Ok(())
    }

    fn hang_up(&self) {}
}

fn is_held(driver: &Driver) -> bool {
    let (_, ctx) = HandReactor::new();
    driver.open_queue(&ctx).err().is_some_and(|error| error.to_string().contains("frozen"))
}

#[test]
fn a_size_that_comes_while_a_freeze_or_a_reset_is_tried_in_vain_is_seen_then() {
    let calls: [fn(&Driver) -> block::Result<()>; 2] = [Driver::freeze, Driver::reset];
    for call in calls {
        let device = Arc::new(Growing { sectors: AtomicU64::new(8), ..Growing::default() });
        let options = small().with(|options| (options.without_serial, options.answer_timeout_ms) = (true, 1000));
        let driver = Driver::over(Box::new(Wire(Arc::clone(&device))), options).unwrap();
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
