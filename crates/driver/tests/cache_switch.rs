//! The driver on the device in one thread, over simulated storage whose power fails: what ended while the cache was
//! write-through is there afterwards, however often the cache is switched under load. The image is raw or qcow2, where
//! each write may need new space, and one queue or two write to it.

use block::{Disk, DiskQueue, File, Op, Poller, Result};
use image::{CreateOptions, FileName, Format, ImageOptions, Opener, Role};
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
/// From one sector that is written to the next: two lie in a cluster.
const STEP: usize = 2048;
const CLUSTER: u64 = 4096;
const DISK: usize = SECTORS * STEP;
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

/// The rings that were started, with their features and positions.
type Started = Arc<Mutex<BTreeMap<usize, (RingAreas, u64, u32)>>>;

/// The device as a transport: no socket between the two.
struct Wire {
    device: Arc<Device>,
    memory: Mutex<Option<Arc<GuestMemory>>>,
    started: Started,
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
        Ok(2)
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

    fn start_queue(&self, index: usize, queue: &QueueSetup, _: QueueEvents<'_>) -> Result<()> {
        let (features, memory) = (*self.features.lock().unwrap(), self.memory.lock().unwrap().clone().unwrap());
        let layout = RingLayout::from_bits(features);
        let areas = RingAreas::at_guest_addresses(layout, memory, queue.guest_addresses, queue.size).unwrap();
        self.started.lock().unwrap().insert(index, (areas, features, queue.first_position.into()));
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

/// What a world is made of.
#[derive(Debug, Clone, Copy)]
struct Kind {
    format: Format,
    queues: u16,
    packed: bool,
}

struct World {
    kind: Kind,
    storage: SimStorage,
    reactor: Rc<SimReactor>,
    driver: Driver,
    queues: Vec<Box<dyn DiskQueue>>,
    sectors: Vec<Sector>,
    writes: BTreeMap<u64, usize>,
    /// Flushes in flight, and what had ended when they were submitted.
    flushes: BTreeMap<u64, Vec<u64>>,
    next_tag: u64,
    write_through: bool,
    _device: Vec<Rc<RefCell<dyn Poller>>>,
}

fn open(storage: &SimStorage, format: Format, read_only: bool) -> Arc<dyn Disk> {
    let options =
        ImageOptions::new(NAME).with(|options| (options.format, options.read_only) = (Some(format), read_only));
    Arc::new(image::open(&options, &OneFile(storage.clone())).unwrap())
}

/// What a guest would find on the disk.
fn contents(storage: &SimStorage, format: Format) -> Vec<u8> {
    let disk = open(storage, format, true);
    let reactor = SimReactor::new(1);
    let mut queue = disk.open_queue(&reactor.ctx()).unwrap();
    let (buf, mut done) = (IoBuf::zeroed(DISK), Vec::new());
    queue.submit(1, Op::read(0, buf.whole()));
    while queue.in_flight() > 0 {
        reactor.step();
        queue.harvest(&mut done);
    }
    assert_eq!(done.pop().unwrap().result, Ok(()));
    buf.whole().to_vec()
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
    fn new(seed: u64, kind: Kind) -> Self {
        let storage = SimStorage::new(seed);
        // A raw image is there, durable; the other is made, which syncs it.
        let there = if kind.format == Format::Raw { DISK } else { 0 };
        storage.create_with(NAME, &vec![0; there], SimFileOptions::default());
        if kind.format == Format::Qcow2 {
            let file: Arc<dyn File> = storage.file(NAME).unwrap();
            let new = format_qcow2::CreateOptions::default()
                .with(|new| (new.size_bytes, new.cluster_size) = (DISK as u64, CLUSTER));
            image::create(&file, &CreateOptions::Qcow2(new)).unwrap();
        }
        let mut offered = DeviceOptions::default();
        offered.packed = kind.packed;
        let device = Device::new(open(&storage, kind.format, false), offered).unwrap();
        let started = Started::default();
        let (memory, chosen) = (Mutex::default(), Mutex::default());
        let wire = Wire { device: Arc::clone(&device), memory, started: Arc::clone(&started), features: chosen };
        let options = DriverOptions::default().with(|options| {
            (options.without_serial, options.queue_size, options.memory_bytes) = (true, 32, 0);
            (options.queues, options.bounce_bytes) = (kind.queues, 1 << 20);
        });
        let driver = Driver::over(Box::new(wire), options).unwrap();
        assert_eq!(driver.facts().packed, kind.packed);
        assert_ne!(driver.facts().features & features::CONFIG_WCE, 0);
        let reactor = SimReactor::new(seed);
        let ctx = reactor.ctx();
        let started = std::mem::take(&mut *started.lock().unwrap());
        let serve = |(index, (areas, features, base))| {
            let (device, index) = (Arc::clone(&device), index as u16);
            let setup = virtio_blk::QueueSetup::new(device, areas, features, Looks);
            let setup = setup.with(|setup| (setup.index, setup.base) = (index, base));
            let queue = virtio_blk::open_poller(&ctx, setup).unwrap();
            ctx.add_poller(Rc::clone(&queue)).unwrap();
            queue
        };
        let served = started.into_iter().map(serve).collect();
        let queues = (0..kind.queues).map(|_| driver.open_queue(&ctx).unwrap()).collect();
        let sectors = std::iter::repeat_with(Sector::default).take(SECTORS).collect();
        let (writes, flushes) = (BTreeMap::new(), BTreeMap::new());
        Self {
            kind,
            storage,
            reactor,
            driver,
            queues,
            sectors,
            writes,
            flushes,
            next_tag: 0,
            write_through: false,
            _device: served,
        }
    }

    fn in_flight(&self) -> usize {
        self.queues.iter().map(|queue| queue.in_flight()).sum()
    }

    fn submit(&mut self, dice: &mut Dice) {
        let tag = self.next_tag;
        self.next_tag += 1;
        let queue = &mut self.queues[dice.index(usize::from(self.kind.queues))];
        if dice.chance(4) {
            self.flushes.insert(tag, self.sectors.iter().map(|sector| sector.ended).collect());
            return queue.submit(tag, Op::Flush);
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
        queue.submit(tag, Op::write((at * STEP) as u64, buf.whole(), block::OpFlags::NONE));
    }

    fn turn(&mut self) {
        self.reactor.step();
        let mut done = Vec::new();
        for queue in &mut self.queues {
            queue.harvest(&mut done);
        }
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
        let bytes = contents(&self.storage.power_cut(dice.below(1 << 40)), self.kind.format);
        for (at, (sector, found)) in self.sectors.iter().zip(bytes.chunks(STEP)).enumerate() {
            let found = &found[..512];
            let is = |version: &u64| found.chunks(16).all(|part| part == stamp(at, *version));
            let version = (sector.durable..=sector.newest).find(is);
            let (durable, newest) = (sector.durable, sector.newest);
            assert!(version.is_some(), "{what}: sector {at}: not of version {durable} to {newest}: {:?}", &found[..16]);
        }
    }
}

fn survives(kind: Kind, seeds: u64) {
    for seed in 0..seeds {
        let mut dice = Dice::new(seed);
        let mut world = World::new(seed, kind);
        for switch in 0..SWITCHES {
            let what = format!("{kind:?}, seed {seed}, after switch {switch}");
            for _ in 0..1 + dice.index(30) {
                while world.in_flight() < 8 && dice.chance(80) {
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
        while world.in_flight() > 0 {
            world.turn();
        }
        world.cut(&mut dice, "at the end");
        let least = world.sectors.iter().map(|sector| sector.durable).min().unwrap();
        assert!(least > 0, "each sector was durable once");
    }
}

#[test]
fn what_ended_while_write_through_survives_a_power_cut_after_any_of_a_hundred_switches() {
    for (queues, packed) in [(1, false), (1, true), (2, false), (2, true)] {
        survives(Kind { format: Format::Raw, queues, packed }, 4);
    }
}

#[test]
fn the_same_holds_for_an_image_whose_space_is_found_as_it_is_written() {
    for (queues, packed) in [(1, false), (2, true), (2, false)] {
        survives(Kind { format: Format::Qcow2, queues, packed }, 3);
    }
}
