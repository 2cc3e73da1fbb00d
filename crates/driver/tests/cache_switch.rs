//! The driver on the device in one thread, over simulated storage whose power fails: what ended while the cache was
//! write-through is there afterwards, however often the cache is switched under load.

use block::{Disk, DiskQueue, File, Op, Poller, Result};
use image::{FileName, Format, ImageOptions, Opener, Role};
use memory::{GuestMemory, GuestRegion, IoBuf, RegionSpec};
use ringdisk_driver::{Driver, DriverOptions, Link, QueueEvents, QueueSetup, SharedMemory, Transport};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use testkit::{Dice, SimFileOptions, SimReactor, SimStorage};
use virtio::blk::{BlkConfig, features};
use virtio::ring_access::{RingAreas, RingLayout};
use virtio_blk::{Device, DeviceOptions};

const NAME: &str = "disk";
const SECTORS: usize = 64;
const SWITCHES: usize = 100;

struct OneFile(SimStorage);

impl Opener for OneFile {
    fn open(&self, name: &FileName, _: Role) -> Result<Arc<dyn File>> {
        Ok(self.0.file(&name.to_string()).expect("the only file"))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}

/// The device as a transport: no socket between the two.
struct Wire {
    device: Arc<Device>,
    memory: Mutex<Option<Arc<GuestMemory>>>,
    started: Arc<Mutex<Option<(RingAreas, u64, u32)>>>,
    features: Mutex<u64>,
}

impl Transport for Wire {
    fn name(&self) -> String {
        "the device".into()
    }

    fn attach(&self, _: &Arc<Link>) -> Result<()> {
        Ok(())
    }

    fn offered_features(&self) -> Result<u64> {
        Ok(self.device.features())
    }

    fn choose_features(&self, features: u64) -> Result<()> {
        *self.features.lock().unwrap() = features;
        self.device.negotiated(features);
        Ok(())
    }

    fn queues_max(&self) -> Result<u64> {
        Ok(1)
    }

    fn read_config(&self) -> Result<BlkConfig> {
        Ok(self.device.config())
    }

    fn write_config(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.device.write_config(offset, bytes)
    }

    fn share_memory(&self, memory: SharedMemory<'_>) -> Result<()> {
        let region = GuestRegion::map(RegionSpec::new(memory.guest_address, memory.length_bytes), memory.file).unwrap();
        *self.memory.lock().unwrap() = Some(Arc::new(GuestMemory::new(vec![region]).unwrap()));
        Ok(())
    }

    fn start_queue(&self, _: usize, queue: &QueueSetup, _: QueueEvents<'_>) -> Result<()> {
        let (features, memory) = (*self.features.lock().unwrap(), self.memory.lock().unwrap().clone().unwrap());
        let layout = RingLayout::from_bits(features);
        let areas = RingAreas::at_guest_addresses(layout, memory, queue.guest_addresses, queue.size).unwrap();
        *self.started.lock().unwrap() = Some((areas, features, queue.first_position.into()));
        Ok(())
    }

    fn stop_queue(&self, _: usize) -> Result<()> {
        Ok(())
    }

    fn hang_up(&self) {}
}

/// The device's queue: both sides look by themselves.
struct Looks;

impl virtio_blk::Transport for Looks {
    fn notify(&self) -> bool {
        true
    }

    fn kick_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// What was written to a sector, in order, and what of it must have survived.
#[derive(Default)]
struct Sector {
    /// A write of it is in flight.
    flying: bool,
    /// The last version that was submitted. Zero is what was there at first.
    newest: u64,
    /// The last version that has ended.
    ended: u64,
    /// The oldest version that may be read after a power cut.
    durable: u64,
}

struct World {
    storage: SimStorage,
    reactor: Rc<SimReactor>,
    driver: Driver,
    queue: Box<dyn DiskQueue>,
    sectors: Vec<Sector>,
    writes: BTreeMap<u64, usize>,
    /// Flushes in flight, and what had ended when they were submitted.
    flushes: BTreeMap<u64, Vec<u64>>,
    next_tag: u64,
    write_through: bool,
    _device: Rc<RefCell<dyn Poller>>,
}

fn stamp(sector: usize, version: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    if version > 0 {
        bytes[..8].copy_from_slice(&version.to_le_bytes());
        bytes[8..].copy_from_slice(&(sector as u64 + 1).to_le_bytes());
    }
    bytes
}

impl World {
    fn new(seed: u64, packed: bool) -> Self {
        let storage = SimStorage::new(seed);
        storage.create_with(NAME, &[0; SECTORS * 512], SimFileOptions::default());
        let options = ImageOptions::new(NAME).with(|options| options.format = Some(Format::Raw));
        let disk: Arc<dyn Disk> = Arc::new(image::open(&options, &OneFile(storage.clone())).unwrap());
        let mut offered = DeviceOptions::default();
        offered.packed = packed;
        let device = Device::new(disk, offered).unwrap();
        let started = Arc::default();
        let (memory, chosen) = (Mutex::default(), Mutex::default());
        let wire = Wire { device: Arc::clone(&device), memory, started: Arc::clone(&started), features: chosen };
        let options = DriverOptions::default().with(|options| {
            (options.without_serial, options.queue_size, options.memory_bytes) = (true, 32, 0);
            options.bounce_bytes = 1 << 20;
        });
        let driver = Driver::over(Box::new(wire), options).unwrap();
        assert_eq!(driver.facts().packed, packed);
        assert_ne!(driver.facts().features & features::CONFIG_WCE, 0);
        let reactor = SimReactor::new(seed);
        let ctx = reactor.ctx();
        let (areas, features, base) = started.lock().unwrap().take().unwrap();
        let setup = virtio_blk::QueueSetup {
            device,
            index: 0,
            areas,
            features,
            base,
            register_memory: false,
            transport: Looks,
        };
        let device = virtio_blk::open_poller(&ctx, setup).unwrap();
        ctx.add_poller(Rc::clone(&device)).unwrap();
        let queue = driver.open_queue(&ctx).unwrap();
        let sectors = std::iter::repeat_with(Sector::default).take(SECTORS).collect();
        let (writes, flushes) = (BTreeMap::new(), BTreeMap::new());
        Self {
            storage,
            reactor,
            driver,
            queue,
            sectors,
            writes,
            flushes,
            next_tag: 0,
            write_through: false,
            _device: device,
        }
    }

    fn submit(&mut self, dice: &mut Dice) {
        let tag = self.next_tag;
        self.next_tag += 1;
        if dice.chance(4) {
            self.flushes.insert(tag, self.sectors.iter().map(|sector| sector.ended).collect());
            return self.queue.submit(tag, Op::Flush);
        }
        let at = dice.index(SECTORS);
        let sector = &mut self.sectors[at];
        if sector.flying {
            return;
        }
        (sector.newest, sector.flying) = (sector.newest + 1, true);
        let buf = IoBuf::zeroed(512);
        (0..512).step_by(16).for_each(|offset| {
            buf.whole().copy_from_slice(offset, &stamp(at, sector.newest));
        });
        self.writes.insert(tag, at);
        self.queue.submit(tag, Op::write(at as u64 * 512, buf.whole(), block::OpFlags::NONE));
    }

    fn turn(&mut self) {
        self.reactor.step();
        let mut done = Vec::new();
        self.queue.harvest(&mut done);
        for done in done {
            assert_eq!(done.result, Ok(()));
            if let Some(at) = self.writes.remove(&done.tag) {
                let sector = &mut self.sectors[at];
                (sector.flying, sector.ended) = (false, sector.newest);
                if self.write_through {
                    sector.durable = sector.newest;
                }
            } else {
                let ended = self.flushes.remove(&done.tag).unwrap();
                self.sectors
                    .iter_mut()
                    .zip(ended)
                    .for_each(|(sector, ended)| sector.durable = sector.durable.max(ended));
            }
        }
    }

    fn switch(&mut self) {
        self.write_through = !self.write_through;
        self.driver.set_volatile_cache(!self.write_through);
        assert_eq!(self.driver.info().volatile_cache, !self.write_through);
    }

    /// What a power cut would leave.
    fn cut(&self, dice: &mut Dice, what: &str) {
        let bytes = self.storage.power_cut(dice.below(1 << 40)).bytes(NAME);
        for (at, (sector, found)) in self.sectors.iter().zip(bytes.chunks(512)).enumerate() {
            let is = |version: &u64| found.chunks(16).all(|part| part == stamp(at, *version));
            let version = (sector.durable..=sector.newest).find(is);
            let (durable, newest) = (sector.durable, sector.newest);
            assert!(version.is_some(), "{what}: sector {at}: not of version {durable} to {newest}: {:?}", &found[..16]);
        }
    }
}

#[test]
fn what_ended_while_write_through_survives_a_power_cut_after_any_of_a_hundred_switches() {
    for seed in 0..12 {
        let mut dice = Dice::new(seed);
        let mut world = World::new(seed, seed % 2 == 1);
        for switch in 0..SWITCHES {
            let what = format!("seed {seed}, after switch {switch}");
            for _ in 0..1 + dice.index(30) {
                while world.queue.in_flight() < 8 && dice.chance(80) {
                    world.submit(&mut dice);
                }
                world.turn();
                if dice.chance(10) {
                    world.cut(&mut dice, &what);
                }
            }
            world.cut(&mut dice, &what);
            world.switch();
            world.cut(&mut dice, &what);
        }
        while world.queue.in_flight() > 0 {
            world.turn();
        }
        world.cut(&mut dice, "at the end");
        let least = world.sectors.iter().map(|sector| sector.durable).min().unwrap();
        assert!(least > 0, "each sector was durable once");
    }
}
