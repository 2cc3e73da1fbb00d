//! The driver with a device that does anything, on both layouts of a ring, and with several queues.
//!
//! An input describes the device's properties, the submitted requests, and the device's actions: serve requests, use
//! descriptors that it was not given or that do not exist, change any byte of the shared memory, stay silent, change its
//! size, die. Meanwhile the driver is frozen, restored and reset, its cache switched, and queues are closed and opened
//! again, all while other queues work, sleep, or do not turn at all.
//!
//! The checks: no panic, and each request ends once, with or without the device. Half of the devices are honest. Then
//! reads have their own queue's data, no other memory is written, nothing is lost, no queue sleeps through the end of a
//! request, a frozen device gets nothing, and the disk has the size that the device says.

mod reactor;
mod requests;
mod rings;
mod wire;

use arbitrary::{Result, Unstructured};
use block::{Disk, DiskQueue, ReactorCtx};
use driver::{Driver, DriverOptions, DriverPath};
use memory::IoBuf;
use reactor::HandReactor;
use requests::{Draft, Submitted, is_as_it_was, kept_memory};
use rings::Device;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use virtio::blk::{BlkConfig, features};
use wire::{RINGS_MAX, Told, Wire, lock};

const STEPS_MAX: usize = 96;
/// What is done during a call to the driver, at most.
const MEANWHILE_MAX: usize = 6;
/// Rounds in which an honest device ends all requests: far more than a request has parts.
const ROUNDS_MAX: usize = 10_000;

fn config(u: &mut Unstructured<'_>) -> Result<BlkConfig> {
    let mut config = BlkConfig::default();
    (config.capacity_sectors, config.seg_max, config.blk_size_bytes) = (4096, 14, 512);
    config.num_queues = RINGS_MAX as u16;
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

fn options(u: &mut Unstructured<'_>, queues_max: u16) -> Result<DriverOptions> {
    let mut options = DriverOptions::default();
    options.queues = u.int_in_range(1..=queues_max)?;
    options.queue_size = *u.choose(&[4, 8, 16])?;
    (options.memory_bytes, options.bounce_bytes) = (64 << 10, 64 << 10);
    (options.packed, options.indirect, options.event_idx) = (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    options.path = if u.arbitrary()? { DriverPath::Request } else { DriverPath::Bio };
    // Nobody answers while the driver attaches. Calls that some queue does not follow take this long.
    (options.without_serial, options.answer_timeout_ms) = (true, 4);
    options.without_features = features::LIFETIME;
    Ok(options)
}

/// A call to the driver itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// What happens while a call is made. It is drawn before: how long a call takes must not change the rest of an input.
struct Meanwhile {
    /// Queues whose reactors turn.
    turning: [bool; RINGS_MAX],
    /// Rings whose device ends all requests.
    ending: [bool; RINGS_MAX],
    requests: Vec<(usize, Draft)>,
    capacity_sectors: Option<u64>,
}

impl Meanwhile {
    fn any(u: &mut Unstructured<'_>, queues: usize) -> Result<Self> {
        let (turning, ending) = (mostly_all(u)?, mostly_all(u)?);
        let count = u.int_in_range(0..=MEANWHILE_MAX)?;
        let requests = (0..count).map(|_| Ok((u.choose_index(queues)?, Draft::any(u)?))).collect::<Result<_>>()?;
        let capacity_sectors = if u.ratio(1u8, 3)? { Some(u.int_in_range(0..=8192)?) } else { None };
        Ok(Self { turning, ending, requests, capacity_sectors })
    }

    /// Everybody works, and nothing else happens.
    fn work() -> Self {
        let all = [true; RINGS_MAX];
        Self { turning: all, ending: all, requests: Vec::new(), capacity_sectors: None }
    }
}

/// Chooses some of the rings. If one of them stands still, a freeze does not succeed.
fn mostly_all(u: &mut Unstructured<'_>) -> Result<[bool; RINGS_MAX]> {
    if u.ratio(2u8, 3)? { Ok([true; RINGS_MAX]) } else { u.arbitrary() }
}

/// A ring: the driver's queue with its reactor, and the device's half.
struct Lane {
    device: Device,
    reactor: Rc<HandReactor>,
    /// `None` while it is closed.
    queue: Option<Box<dyn DiskQueue>>,
    submitted: Submitted,
}

impl Lane {
    fn turn(&mut self) {
        if let Some(queue) = &mut self.queue
            && self.reactor.turn()
        {
            self.submitted.harvest(queue.as_mut());
        }
    }

    fn submit(&mut self, draft: Draft, driver: &Driver) {
        if let Some(queue) = &mut self.queue {
            self.reactor.wake();
            self.submitted.submit(draft, driver, queue.as_mut());
        }
    }

    fn in_flight(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.in_flight())
    }
}

/// The driver, its rings, and the device.
struct Play {
    told: Arc<Mutex<Told>>,
    driver: Arc<Driver>,
    lanes: Vec<Lane>,
    is_honest: bool,
    is_frozen: bool,
    /// Memory that was allocated while requests of closed queues were in flight: the device must not write to it.
    kept: Vec<IoBuf>,
}

impl Play {
    /// Begins it; `None` if the driver refuses the device.
    fn begin(u: &mut Unstructured<'_>) -> Result<Option<Self>> {
        let left_out: u64 = if u.ratio(1u8, 4)? { u.arbitrary()? } else { features::RO };
        let told = Arc::new(Mutex::new(Told { config: config(u)?, ..Told::default() }));
        let wire = Wire { offered: !left_out | features::VERSION_1, told: Arc::clone(&told) };
        let queues_max = if wire.offered & features::MQ == 0 { 1 } else { RINGS_MAX as u16 };
        let options = options(u, queues_max)?;
        let queues = usize::from(options.queues);
        let is_honest = u.arbitrary()?;
        let Ok(driver) = Driver::over(Box::new(wire), options) else { return Ok(None) };
        let mut play =
            Self { told, driver: Arc::new(driver), lanes: Vec::new(), is_honest, is_frozen: false, kept: Vec::new() };
        for index in 0..queues {
            let Some(device) = Device::new(&lock(&play.told), index) else { return Ok(None) };
            play.lanes.push(Lane { device, reactor: Rc::default(), queue: None, submitted: Submitted::default() });
        }
        (0..queues).for_each(|_| play.open());
        Ok(Some(play))
    }

    /// Opens the first queue that is closed, on a reactor of its own.
    fn open(&mut self) {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.queue.is_none()) else { return };
        let reactor = Rc::new(HandReactor::default());
        let ctx: Rc<dyn ReactorCtx> = reactor.clone();
        match self.driver.open_queue(&ctx) {
            Ok(queue) => (lane.queue, lane.reactor) = (Some(queue), reactor),
            Err(error) => assert!(self.is_frozen, "{error}"),
        }
    }

    /// Closes a queue with all that it has in flight.
    fn close(&mut self, index: usize) {
        let lane = &mut self.lanes[index];
        if lane.queue.take().is_some() {
            let submitted = std::mem::take(&mut lane.submitted);
            submitted.check_handles();
            if self.is_honest {
                submitted.check_data(index);
            }
            drop(submitted);
            self.kept.extend(kept_memory(&self.driver, 4096));
        }
    }

    /// Lets the device of a ring act; `act` returns whether the driver wants to be called. An honest device does not touch
    /// a ring that was stopped.
    fn act(&mut self, index: usize, act: impl FnOnce(&mut Device) -> Result<bool>) -> Result<()> {
        let told = lock(&self.told);
        let device = &mut self.lanes[index].device;
        let calls = (device.follow(&told) || !self.is_honest) && act(device)?;
        if let Some(call) = told.rings[index].call.as_ref().filter(|_| calls) {
            rustix::io::write(call, &1u64.to_ne_bytes()).expect("the driver's descriptor takes it");
        }
        Ok(())
    }

    fn end_all(&mut self, index: usize) {
        let is_honest = self.is_honest;
        let _ = self.act(index, |device| Ok(device.end_all(is_honest)));
    }

    /// The device changes its size, and says so.
    fn resize(&mut self, capacity_sectors: u64) {
        let link = {
            let mut told = lock(&self.told);
            told.config.capacity_sectors = capacity_sectors;
            told.link.clone()
        };
        link.iter().for_each(|link| link.config_changed());
    }

    /// Makes the call on another thread, as a monitor does.
    fn call(&mut self, call: Call, meanwhile: Meanwhile) {
        let Meanwhile { turning, ending, requests, capacity_sectors } = meanwhile;
        let before: Vec<usize> = self.lanes.iter().map(|lane| lane.submitted.count()).collect();
        let mut requests = requests.into_iter();
        let mut capacity_sectors = capacity_sectors;
        let driver = Arc::clone(&self.driver);
        let thread = std::thread::spawn(move || call.make(&driver));
        loop {
            // All that was drawn happens, even if the call ends earlier.
            let is_over = thread.is_finished();
            for index in 0..self.lanes.len() {
                if ending[index] {
                    self.end_all(index);
                }
                if turning[index] {
                    self.lanes[index].turn();
                }
            }
            let drawn = requests.next();
            if let Some((index, draft)) = drawn {
                self.lanes[index].submit(draft, &self.driver);
            }
            let resized = capacity_sectors.take_if(|_| drawn.is_none());
            resized.into_iter().for_each(|capacity| self.resize(capacity));
            if is_over && drawn.is_none() {
                break;
            }
            std::thread::yield_now();
        }
        let done = thread.join().expect("no panic");
        self.check_call(call, done.is_ok(), &before);
    }

    fn check_call(&mut self, call: Call, is_done: bool, before: &[usize]) {
        match call {
            Call::Freeze => self.is_frozen |= is_done,
            Call::Restore | Call::Reset => self.is_frozen &= !is_done,
            Call::SwitchCache(_) => {}
        }
        if is_done && call == Call::Reset {
            for (lane, count) in self.lanes.iter_mut().zip(before) {
                lane.turn();
                assert!(lane.submitted.have_ended(*count), "a reset ends all");
            }
        }
        self.check_size();
    }

    fn check_size(&self) {
        if !self.is_frozen {
            let capacity_sectors = lock(&self.told).config.capacity_sectors;
            assert_eq!(
                self.driver.info().size_bytes,
                capacity_sectors.saturating_mul(512),
                "not the size of the device"
            );
        }
    }

    fn check_frozen(&mut self) {
        if self.is_frozen && self.is_honest {
            let told = lock(&self.told);
            for Lane { device, .. } in self.lanes.iter_mut().filter(|lane| lane.queue.is_some()) {
                assert!(!device.follow(&told) && !device.has_more(), "a frozen device gets a request");
            }
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let (index, is_honest) = (u.choose_index(self.lanes.len())?, self.is_honest);
        match u.int_in_range(0..=11)? {
            0..=2 => self.lanes[index].submit(Draft::any(u)?, &self.driver),
            3..=5 => self.act(index, |device| device.serve(u, is_honest))?,
            6 if !is_honest => self.act(index, |device| device.misbehave(u).map(|()| false))?,
            // They take a thread, and many of them their whole time.
            7 if u.ratio(1u8, 4)? => {
                let call = Call::any(u)?;
                let meanwhile = Meanwhile::any(u, self.lanes.len())?;
                self.call(call, meanwhile);
            }
            8 => {
                self.resize(u.int_in_range(0..=8192)?);
                self.check_size();
            }
            9 if u.arbitrary()? => self.close(index),
            9 => self.open(),
            _ => self.lanes[index].reactor.sleep(),
        }
        self.check_frozen();
        if u.ratio(3u8, 4)? {
            self.lanes[index].turn();
        }
        Ok(())
    }

    /// The honest device ends everything, and whoever has nothing to do sleeps.
    fn settle(&mut self) {
        if self.is_frozen {
            self.call(Call::Restore, Meanwhile::work());
        }
        for _ in 0..ROUNDS_MAX {
            for index in 0..self.lanes.len() {
                self.end_all(index);
                self.lanes[index].turn();
                self.lanes[index].reactor.sleep();
            }
            if self.lanes.iter().all(|lane| lane.in_flight() == 0) {
                return;
            }
        }
        let left: Vec<usize> = self.lanes.iter().map(Lane::in_flight).collect();
        panic!("requests in flight that an honest device does not get: {left:?}");
    }

    /// The device dies. Then everything has ended, once, and nothing is held.
    fn end(mut self) {
        let link = lock(&self.told).link.take();
        link.iter().for_each(|link| link.end());
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            (0..3).for_each(|_| lane.turn());
            assert!(lane.submitted.have_ended(usize::MAX), "a request never ended");
            if self.is_honest {
                lane.submitted.check_data(index);
            }
            lane.queue = None;
            lane.submitted.check_handles();
        }
        assert!(!self.is_honest || self.kept.iter().all(is_as_it_was), "memory of others was written");
    }
}

pub(crate) fn device(u: &mut Unstructured<'_>) -> Result<()> {
    let Some(mut play) = Play::begin(u)? else { return Ok(()) };
    for _ in 0..u.int_in_range(1..=STEPS_MAX)? {
        play.step(u)?;
    }
    if play.is_honest {
        play.settle();
    }
    play.end();
    Ok(())
}
