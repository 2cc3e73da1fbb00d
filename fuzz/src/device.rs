//! The driver with a device that does anything, on both layouts of a ring.
//!
//! An input describes the device's properties, the submitted requests, and the device's actions: serve requests, use
//! descriptors that it was not given or that do not exist, change any byte of the shared memory, stay silent, die.
//! Meanwhile the driver is frozen, restored and reset, and its cache switched. The checks: no panic, and each request ends
//! once, with or without the device.

use arbitrary::{Result, Unstructured};
use block::{Completion, Disk, DiskQueue, Op, OpFlags, Poller, PollerId, ReactorCtx, Task, Timers, Work};
use driver::{Driver, DriverOptions, DriverPath, Link, QueueEvents, QueueSetup, SharedMemory, Transport};
use memory::{GuestMemory, GuestRegion, IoBuf, RegionSpec};
use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use virtio::blk::{BlkConfig, Status, features};
use virtio::ring_access::{EventWish, PackedAreas, RingAreas, RingLayout, SharedWords, SplitAreas};
use virtio::{BlkQueue, DeviceRing, PackedDeviceRing, Request, RequestLimits, RingFeatures, SplitDeviceRing};

const STEPS_MAX: usize = 64;
const LIMITS: RequestLimits = RequestLimits::NONE.with_ranges(4, 1000).with_erases(4, 100).with_lifetime();

/// The messages of the driver to the device so far.
#[derive(Default)]
struct Told {
    link: Option<Arc<Link>>,
    features: u64,
    memory: Option<Arc<GuestMemory>>,
    /// The start and the length of the shared memory.
    range: (u64, u64),
    queue: Option<QueueSetup>,
    /// How often the queue was started.
    starts: u32,
}

/// The connection between the two: no socket, no thread.
struct Wire {
    offered: u64,
    config: BlkConfig,
    told: Arc<Mutex<Told>>,
}

impl Wire {
    fn tell(&self, change: impl FnOnce(&mut Told)) -> block::Result<()> {
        change(&mut self.told.lock().expect("nobody panics with it"));
        Ok(())
    }
}

impl Transport for Wire {
    fn name(&self) -> String {
        "fuzz".into()
    }

    fn attach(&self, link: &Arc<Link>) -> block::Result<()> {
        self.tell(|told| told.link = Some(Arc::clone(link)))
    }

    fn offered_features(&self) -> block::Result<u64> {
        Ok(self.offered)
    }

    fn choose_features(&self, features: u64) -> block::Result<()> {
        assert_eq!(features & !self.offered, 0, "what was not offered");
        self.tell(|told| told.features = features)
    }

    fn queues_max(&self) -> block::Result<u64> {
        Ok(1)
    }

    fn read_config(&self) -> block::Result<BlkConfig> {
        Ok(self.config)
    }

    fn write_config(&self, _: usize, _: &[u8]) -> block::Result<()> {
        Ok(())
    }

    fn share_memory(&self, memory: SharedMemory<'_>) -> block::Result<()> {
        let spec = RegionSpec::new(memory.guest_address, memory.length_bytes);
        let region = GuestRegion::map(spec, memory.file).expect("it is the driver's own file");
        let found = GuestMemory::new(vec![region]).expect("one region");
        self.tell(|told| {
            told.range = (memory.guest_address, memory.length_bytes);
            told.memory = Some(Arc::new(found));
        })
    }

    fn start_queue(&self, _: usize, queue: &QueueSetup, _: QueueEvents<'_>) -> block::Result<()> {
        self.tell(|told| {
            told.queue = Some(*queue);
            told.starts += 1;
        })
    }

    fn stop_queue(&self, _: usize) -> block::Result<()> {
        Ok(())
    }

    fn hang_up(&self) {}
}

/// A reactor that turns when the input says so.
#[derive(Default)]
struct HandReactor {
    pollers: RefCell<BTreeMap<PollerId, Rc<RefCell<dyn Poller>>>>,
}

impl HandReactor {
    fn each(&self, act: impl Fn(&mut dyn Poller) -> bool) -> bool {
        let pollers: Vec<_> = self.pollers.borrow().values().cloned().collect();
        pollers.iter().fold(false, |any, poller| act(&mut *poller.borrow_mut()) | any)
    }
}

impl ReactorCtx for HandReactor {
    fn spawn(&self, _: Task) {
        unimplemented!("the driver has no tasks");
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> block::Result<PollerId> {
        let mut pollers = self.pollers.borrow_mut();
        let id = PollerId(pollers.len() as u64);
        pollers.insert(id, poller);
        Ok(id)
    }

    fn remove_poller(&self, id: PollerId) {
        self.pollers.borrow_mut().remove(&id);
    }

    fn timers(&self) -> &Rc<Timers> {
        unimplemented!("the driver has no timers");
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The device: a correct one, and the bare ring for breaking the rules.
struct Device {
    good: BlkQueue<Box<dyn DeviceRing>>,
    held: Vec<u16>,
    areas: RingAreas,
    size: u16,
    /// All memory that the driver shares.
    words: SharedWords,
    shared_bytes: usize,
}

impl Device {
    fn new(told: &Told) -> Option<Self> {
        let (memory, queue) = (told.memory.clone()?, told.queue?);
        let layout = RingLayout::from_bits(told.features);
        let areas =
            || RingAreas::at_guest_addresses(layout, Arc::clone(&memory), queue.guest_addresses, queue.size).ok();
        let features = RingFeatures::from_bits(told.features);
        let ring: Box<dyn DeviceRing> = match areas()? {
            RingAreas::Split(areas) => Box::new(SplitDeviceRing::new(areas, features, queue.first_position)),
            RingAreas::Packed(areas) => {
                Box::new(PackedDeviceRing::new(areas, features, queue.first_position.into()).ok()?)
            }
        };
        let (start, shared_bytes) = (told.range.0, told.range.1 as usize);
        Some(Self {
            good: BlkQueue::new(ring, Arc::clone(&memory), LIMITS),
            held: Vec::new(),
            areas: areas()?,
            size: queue.size,
            words: SharedWords::at_guest_address(Arc::clone(&memory), start, shared_bytes).ok()?,
            shared_bytes,
        })
    }

    /// Takes requests and ends some, as a device should.
    fn serve(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        for _ in 0..u.int_in_range(0..=4)? {
            let Ok(Some((head, request))) = self.good.pop() else { break };
            if let Request::Read { data, .. } = &request {
                data.fill(0x5a);
            }
            drop(request);
            self.held.push(head);
        }
        while !self.held.is_empty() && u.ratio(3u8, 4)? {
            let head = self.held.swap_remove(u.choose_index(self.held.len())?);
            let status = *u.choose(&[Status::Ok, Status::Ok, Status::Ok, Status::IoErr, Status::Unsupported])?;
            self.good.complete(head, status);
        }
        if u.ratio(3u8, 4)? {
            self.good.publish();
        }
        Ok(())
    }

    /// Takes and ends all requests.
    fn end_all(&mut self) {
        while let Ok(Some((head, request))) = self.good.pop() {
            drop(request);
            self.held.push(head);
        }
        for head in self.held.drain(..) {
            self.good.complete(head, Status::Ok);
        }
        self.good.publish();
    }

    fn misbehave(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        if u.ratio(1u8, 3)? {
            // The ring, the headers and the status bytes come first.
            let end = if u.arbitrary()? { 8192 } else { self.shared_bytes };
            let at = u.int_in_range(0..=end.min(self.shared_bytes) - 1)?;
            self.words.set_byte(at, u.arbitrary()?);
            return Ok(());
        }
        match &self.areas {
            RingAreas::Split(areas) => misuse_split(u, areas, self.size),
            RingAreas::Packed(areas) => misuse_packed(u, areas, self.size),
        }
    }
}

/// Returns a number that is likely valid for a ring of `size`.
fn near(u: &mut Unstructured<'_>, size: u16) -> Result<u16> {
    if u.ratio(1u8, 8)? { u.arbitrary() } else { u.int_in_range(0..=size) }
}

fn written(u: &mut Unstructured<'_>) -> Result<u32> {
    if u.ratio(1u8, 4)? { u.arbitrary() } else { Ok(*u.choose(&[0, 1, 512, 513, 4096, 4097])?) }
}

fn misuse_split(u: &mut Unstructured<'_>, areas: &SplitAreas, size: u16) -> Result<()> {
    match u.int_in_range(0..=4)? {
        0 | 1 => {
            let id = if u.ratio(1u8, 8)? { u.arbitrary()? } else { near(u, size)?.into() };
            areas.set_used_entry(areas.used_index(), id, written(u)?);
            areas.publish_used_index(areas.used_index().wrapping_add(1));
        }
        2 => areas.publish_used_index(areas.used_index().wrapping_add(near(u, size)?)),
        3 => areas.set_used_flags(u.arbitrary()?),
        _ => areas.set_avail_event(u.arbitrary()?),
    }
    Ok(())
}

fn misuse_packed(u: &mut Unstructured<'_>, areas: &PackedAreas, size: u16) -> Result<()> {
    let index = near(u, size)? % size;
    match u.int_in_range(0..=4)? {
        0 | 1 => {
            areas.set_used(index, near(u, size)?, written(u)?);
            // Used, with either wrap counter.
            areas.publish_flags(index, if u.arbitrary()? { 0x8080 } else { 0 });
        }
        2 => areas.publish_flags(index, u.arbitrary()?),
        3 => areas.set_device_wish(EventWish::At(u.arbitrary()?)),
        _ => areas.set_device_wish(if u.arbitrary()? { EventWish::Always } else { EventWish::Never }),
    }
    Ok(())
}

/// The submitted requests, and how often each has ended.
#[derive(Default)]
struct Submitted {
    ends: Vec<u32>,
    own: Vec<IoBuf>,
    done: Vec<Completion>,
}

impl Submitted {
    fn submit(&mut self, u: &mut Unstructured<'_>, driver: &Driver, queue: &mut dyn DiskQueue) -> Result<()> {
        let length = 512 * u.int_in_range(1..=40)?;
        let offset = if u.ratio(1u8, 16)? { u.arbitrary()? } else { 512 * u.int_in_range(0..=2000)? };
        let buf = match driver.alloc(length) {
            Ok(shared) if u.arbitrary()? => shared,
            _ => IoBuf::zeroed(length),
        };
        let flags = *u.choose(&[OpFlags::NONE, OpFlags::FUA, OpFlags::PREFLUSH])?;
        let op = match u.int_in_range(0..=8)? {
            0..=2 => Op::read(offset, buf.whole()),
            3 | 4 => Op::write(offset, buf.whole(), flags),
            5 => Op::Discard { offset, length: length as u64 },
            6 => Op::WriteZeroes { offset, length: length as u64, may_unmap: u.arbitrary()?, flags },
            7 => Op::SecureErase { offset, length: length as u64 },
            _ => Op::Flush,
        };
        queue.submit(self.ends.len() as u64, op);
        self.ends.push(0);
        self.own.push(buf);
        Ok(())
    }

    fn harvest(&mut self, queue: &mut dyn DiskQueue) {
        queue.harvest(&mut self.done);
        for done in self.done.drain(..) {
            self.ends[done.tag as usize] += 1;
        }
        let left = self.ends.iter().filter(|ends| **ends == 0).count();
        assert!(self.ends.iter().all(|ends| *ends <= 1), "a request ended twice");
        assert_eq!(queue.in_flight(), left);
    }
}

fn config(u: &mut Unstructured<'_>) -> Result<BlkConfig> {
    let mut config = BlkConfig::default();
    (config.capacity_sectors, config.seg_max, config.blk_size_bytes) = (4096, 14, 512);
    config.max_discard_sectors = u.int_in_range(0..=64)?;
    config.max_write_zeroes_sectors = u.int_in_range(0..=64)?;
    config.max_secure_erase_sectors = u.int_in_range(0..=64)?;
    config.writeback = u.arbitrary()?;
    if u.ratio(1u8, 4)? {
        config.seg_max = u.arbitrary()?;
        config.size_max_bytes = u.arbitrary()?;
        config.blk_size_bytes = 1u32 << u.int_in_range(8..=17)?;
        config.capacity_sectors = u.arbitrary()?;
        (config.physical_block_exp, config.alignment_offset) = (u.arbitrary()?, u.arbitrary()?);
    }
    Ok(config)
}

fn options(u: &mut Unstructured<'_>) -> Result<DriverOptions> {
    let mut options = DriverOptions::default();
    options.queue_size = *u.choose(&[4, 8, 16])?;
    (options.memory_bytes, options.bounce_bytes) = (64 << 10, 64 << 10);
    (options.packed, options.indirect, options.event_idx) = (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    options.path = if u.arbitrary()? { DriverPath::Request } else { DriverPath::Bio };
    // The device does not answer while the driver attaches, and few freezes end.
    (options.without_serial, options.answer_timeout_ms) = (true, 2);
    options.without_features = features::LIFETIME;
    Ok(options)
}

/// What is asked of the driver itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Freeze,
    Restore,
    Reset,
    SwitchCache(bool),
}

impl Call {
    fn any(u: &mut Unstructured<'_>) -> Result<Self> {
        let switch = Self::SwitchCache(u.arbitrary()?);
        Ok(*u.choose(&[Self::Freeze, Self::Restore, Self::Reset, switch])?)
    }

    fn make(self, driver: &Driver) -> block::Result<()> {
        match self {
            Self::Freeze => driver.freeze(),
            Self::Restore => driver.restore(),
            Self::Reset => driver.reset(),
            Self::SwitchCache(volatile) => {
                driver.set_volatile_cache(volatile);
                Ok(())
            }
        }
    }
}

/// The driver, its queue, and the device.
struct Play {
    told: Arc<Mutex<Told>>,
    driver: Driver,
    reactor: Rc<HandReactor>,
    queue: Box<dyn DiskQueue>,
    device: Device,
    submitted: Submitted,
}

impl Play {
    /// Begins it; `None` if the driver refuses the device.
    fn begin(u: &mut Unstructured<'_>) -> Result<Option<Self>> {
        let told = Arc::new(Mutex::new(Told::default()));
        let left_out: u64 = if u.ratio(1u8, 4)? { u.arbitrary()? } else { features::RO };
        let wire = Wire { offered: !left_out | features::VERSION_1, config: config(u)?, told: Arc::clone(&told) };
        let Ok(driver) = Driver::over(Box::new(wire), options(u)?) else { return Ok(None) };
        let reactor = Rc::new(HandReactor::default());
        let ctx: Rc<dyn ReactorCtx> = reactor.clone();
        let queue = driver.open_queue(&ctx).expect("there is one");
        let device = Device::new(&told.lock().expect("nobody panics with it"));
        let submitted = Submitted::default();
        Ok(device.map(|device| Self { told, driver, reactor, queue, device, submitted }))
    }

    fn turn(&mut self) {
        self.reactor.each(|poller| poller.poll());
        self.submitted.harvest(self.queue.as_mut());
    }

    /// Makes the call on another thread, as a monitor does. The queue turns meanwhile, and the device may end all requests.
    fn call(&mut self, call: Call, device_ends_all: bool) {
        let Self { told, driver, reactor, queue, device, submitted } = self;
        let starts = || told.lock().expect("nobody panics with it").starts;
        let before = starts();
        let done = std::thread::scope(|scope| {
            let driver = &*driver;
            let thread = scope.spawn(move || call.make(driver));
            while !thread.is_finished() {
                if device_ends_all {
                    device.end_all();
                }
                reactor.each(|poller| poller.poll());
                submitted.harvest(queue.as_mut());
            }
            thread.join().expect("no panic")
        });
        if starts() > before {
            *device = Device::new(&told.lock().expect("nobody panics with it")).expect("as at the start");
        }
        if done.is_ok() && call == Call::Reset {
            self.turn();
            assert_eq!(self.queue.in_flight(), 0, "a reset ends all");
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=8)? {
            0..=2 => self.submitted.submit(u, &self.driver, self.queue.as_mut())?,
            3..=5 => self.device.serve(u)?,
            6 => self.device.misbehave(u)?,
            // They take a thread, and most freezes their whole time.
            7 if u.ratio(1u8, 8)? => self.call(Call::any(u)?, u.arbitrary()?),
            _ if self.reactor.each(|poller| poller.arm()) => {}
            _ => drop(self.reactor.each(|poller| {
                poller.disarm();
                false
            })),
        }
        self.turn();
        Ok(())
    }
}

pub(crate) fn device(u: &mut Unstructured<'_>) -> Result<()> {
    let Some(mut play) = Play::begin(u)? else { return Ok(()) };
    for _ in 0..u.int_in_range(1..=STEPS_MAX)? {
        play.step(u)?;
    }
    // The device dies.
    let link = play.told.lock().expect("nobody panics with it").link.take();
    link.iter().for_each(|link| link.end());
    for _ in 0..3 {
        play.turn();
    }
    let Play { submitted, queue, driver: _driver, .. } = play;
    assert!(submitted.ends.iter().all(|ends| *ends == 1), "a request never ended");
    drop(queue);
    // The device knows nothing of the caller's own memory.
    let holds = |buf: &&IoBuf| !buf.is_unique();
    assert_eq!(submitted.own.iter().filter(holds).count(), 0, "a handle stays behind");
    Ok(())
}
