//! The way from the driver to the device, without a socket and without a thread. It notes what the driver says.

use block::Result;
use driver::{Link, QueueEvents, QueueSetup, SharedMemory, Transport};
use memory::{GuestMemory, GuestRegion, RegionSpec, duplicate_fd};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use virtio::blk::{BlkConfig, CONFIG_WRITEBACK_OFFSET};

/// The most rings of a device.
pub(super) const RINGS_MAX: usize = 3;

/// A ring as the driver set it up last.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) setup: Option<QueueSetup>,
    /// How often it was started.
    pub(super) starts: u32,
    pub(super) runs: bool,
    /// Wakes the driver's queue.
    pub(super) call: Option<OwnedFd>,
}

/// The messages of the driver so far, and what the device says that it is.
#[derive(Default)]
pub(super) struct Told {
    pub(super) link: Option<Arc<Link>>,
    pub(super) features: u64,
    pub(super) memory: Option<Arc<GuestMemory>>,
    /// The start and the length of the shared memory.
    pub(super) range: (u64, u64),
    pub(super) rings: [Ring; RINGS_MAX],
    pub(super) config: BlkConfig,
}

/// The connection. What is locked by one side waits for the other: a device that has locked it can finish what it does
/// with a ring before the driver stops that ring.
pub(super) struct Wire {
    pub(super) offered: u64,
    pub(super) told: Arc<Mutex<Told>>,
}

/// Locks what was said.
pub(super) fn lock(told: &Mutex<Told>) -> MutexGuard<'_, Told> {
    told.lock().expect("nobody panics with it")
}

impl Wire {
    fn tell(&self, change: impl FnOnce(&mut Told)) -> Result<()> {
        change(&mut lock(&self.told));
        Ok(())
    }
}

impl Transport for Wire {
    fn name(&self) -> String {
        "fuzz".into()
    }

    fn attach(&self, link: &Arc<Link>) -> Result<()> {
        self.tell(|told| told.link = Some(Arc::clone(link)))
    }

    fn offered_features(&self) -> Result<u64> {
        Ok(self.offered)
    }

    fn choose_features(&self, features: u64) -> Result<()> {
        assert_eq!(features & !self.offered, 0, "what was not offered");
        self.tell(|told| told.features = features)
    }

    fn queues_max(&self) -> Result<u64> {
        Ok(RINGS_MAX as u64)
    }

    fn read_config(&self) -> Result<BlkConfig> {
        Ok(lock(&self.told).config)
    }

    fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        assert_eq!((offset, bytes.len()), (CONFIG_WRITEBACK_OFFSET, 1), "only the cache is switched");
        self.tell(|told| told.config.writeback = bytes[0])
    }

    fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()> {
        let spec = RegionSpec::new(memory.guest_address, memory.length_bytes);
        let region = GuestRegion::map(spec, memory.file).expect("it is the driver's own file");
        let found = GuestMemory::new(vec![region]).expect("one region");
        self.tell(|told| {
            told.range = (memory.guest_address, memory.length_bytes);
            told.memory = Some(Arc::new(found));
        })
    }

    fn start_queue(&self, index: usize, queue: &QueueSetup, events: QueueEvents<'_>) -> Result<()> {
        let call = duplicate_fd(events.call).expect("a descriptor can be copied");
        self.tell(|told| {
            let ring = &mut told.rings[index];
            assert!(!ring.runs, "a ring is stopped before it is started again");
            *ring = Ring { setup: Some(*queue), starts: ring.starts + 1, runs: true, call: Some(call) };
        })
    }

    fn stop_queue(&self, index: usize) -> Result<()> {
        self.tell(|told| told.rings[index].runs = false)
    }

    fn hang_up(&self) {}
}
