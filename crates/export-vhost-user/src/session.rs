//! What one peer has set up: memory, features, rings. Runs on the export's thread; the rings run on their reactors.
//!
//! A ring runs while it is started (it has a kick message since it was last stopped) and enabled, and its memory and
//! addresses are known. Whatever changes what a running ring uses stops it first: no more requests are taken, those in
//! flight are awaited, then the change is made and the ring goes on where it was.

use crate::counters::{Counter, RingCounters};
use crate::device::{Device, PROTOCOL_FEATURES};
use crate::memory_table::{MAX_REGIONS, MemoryTable};
use crate::notifier::{Notifier, Purpose, check_kind};
use crate::ring_control::{RunningRing, StoppingRing};
use crate::ring_poller::{Halt, RingSetup};
use crate::wire::Backend;
use block::{Disk, Error, ErrorKind, ReactorHandle, Result};
use memory::{GuestMemory, RegionSpec};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio::blk::CONFIG_WRITEBACK_OFFSET;
use virtio::ring_access::{RingAddresses, check_size};

/// The largest configuration space that the protocol can ask for.
const MAX_CONFIG_BYTES: u32 = 256;

/// What a session's rings tell its thread.
#[derive(Debug)]
pub(crate) struct SessionEvents {
    wake: OwnedFd,
    poisoned: AtomicBool,
}

impl SessionEvents {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        Ok(Self { wake, poisoned: AtomicBool::new(false) })
    }

    /// The peer shrank its memory: the session has to end.
    pub(crate) fn report_poison(&self) {
        if !self.poisoned.swap(true, Ordering::AcqRel) {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// One ring, as set up by the peer.
#[derive(Default)]
struct Ring {
    size: u16,
    addresses: Option<RingAddresses>,
    base: u16,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    started: bool,
    enabled: bool,
    /// Stopped by itself, or could not start.
    halt: Option<Halt>,
    running: Option<RunningRing>,
}

impl Ring {
    /// The peer has stopped it. Until it names the new addresses nothing starts: what lies at the old ones may be something
    /// else by now. All monitors name them at each start.
    fn forget_start(&mut self) {
        self.started = false;
        self.halt = None;
        self.kick = None;
        self.addresses = None;
    }
}

/// What all sessions of an export share.
pub(crate) struct Served {
    pub(crate) device: Arc<Device>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) reactors: Vec<Arc<dyn ReactorHandle>>,
    pub(crate) first_reactor: usize,
    pub(crate) queue_size: u16,
    /// The peers' memory is to be registered with the engines.
    pub(crate) fixed_buffers: bool,
    /// One a ring.
    pub(crate) counters: Vec<Arc<RingCounters>>,
    /// Times that the guest chose how its cache works.
    pub(crate) cache_switches: Counter,
}

/// One peer's session.
pub(crate) struct Session {
    served: Arc<Served>,
    events: Arc<SessionEvents>,
    acked_features: u64,
    table: MemoryTable,
    memory: Arc<GuestMemory>,
    rings: Vec<Ring>,
}

impl Session {
    pub(crate) fn new(served: Arc<Served>, events: Arc<SessionEvents>) -> Self {
        let rings = served.counters.iter().map(|_| Ring::default()).collect();
        Self { served, events, acked_features: 0, table: MemoryTable::default(), memory: Arc::default(), rings }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        let count = self.rings.len();
        let found = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        found.ok_or_else(|| Error::new(ErrorKind::Protocol, format!("the peer names ring {index}, {count} are served")))
    }

    /// Stops the rings that `which` names, all at once, and keeps where each goes on.
    fn stop_where(&mut self, which: impl Fn(usize) -> bool) {
        let stopping: Vec<(usize, StoppingRing)> = self
            .rings
            .iter_mut()
            .enumerate()
            .filter(|(index, _)| which(*index))
            .filter_map(|(index, ring)| ring.running.take().map(|running| (index, running.begin_stop())))
            .collect();
        for (index, stopping) in stopping {
            let stopped = stopping.wait();
            if let (Some(ring), Some(stopped)) = (self.rings.get_mut(index), stopped) {
                ring.base = stopped.next_available;
                ring.halt = ring.halt.or(stopped.halt);
            }
        }
    }

    fn stop_one(&mut self, index: u32) -> Result<&mut Ring> {
        self.ring(index)?;
        self.stop_where(|other| u32::try_from(other) == Ok(index));
        self.ring(index)
    }

    /// Starts every ring that should run and does not.
    fn start_ready(&mut self) {
        for index in 0..self.rings.len() {
            if let Err(error) = self.start_if_ready(index) {
                let name = &self.served.device.name;
                let times = self.served.counters.get(index).and_then(|counters| counters.failed_starts.add_to_log());
                if let Some(times) = times {
                    tracing::warn!(disk = %name, queue = index, times, "the queue cannot start: {error}");
                }
                if let Some(ring) = self.rings.get_mut(index) {
                    // What else can go wrong there is tried again with the memory, too: it harms nobody.
                    ring.halt = Some(Halt::Unreachable);
                    if let Some(err) = ring.err.as_ref().and_then(|err| err.try_clone().ok()) {
                        Notifier::new(err).notify();
                    }
                }
            }
        }
    }

    fn start_if_ready(&mut self, index: usize) -> Result<()> {
        let has_memory = !self.memory.regions().is_empty();
        let served = Arc::clone(&self.served);
        let (Some(ring), Some(counters)) = (self.rings.get_mut(index), served.counters.get(index)) else {
            return Ok(());
        };
        let ready = ring.started && ring.enabled && ring.halt.is_none() && has_memory && ring.size > 0;
        let (Some(addresses), true, None) = (ring.addresses, ready, &ring.running) else {
            return Ok(());
        };
        let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
        let lost = |error| Error::io("cannot duplicate the ring's descriptors", error);
        let setup = RingSetup {
            index: u16::try_from(index).unwrap_or(u16::MAX),
            device: Arc::clone(&served.device),
            disk: Arc::clone(&served.disk),
            memory: Arc::clone(&self.memory),
            addresses,
            size: ring.size,
            features: self.acked_features,
            next_available: ring.base,
            kick: copy(&ring.kick).map_err(lost)?,
            call: copy(&ring.call).map_err(lost)?,
            err: copy(&ring.err).map_err(lost)?,
            events: Arc::clone(&self.events),
            counters: Arc::clone(counters),
            fixed_buffers: served.fixed_buffers,
        };
        let turn = served.first_reactor.wrapping_add(index);
        let reactor = turn.checked_rem(served.reactors.len()).and_then(|turn| served.reactors.get(turn));
        let reactor = reactor.ok_or_else(|| Error::new(ErrorKind::BadOption, "the export has no reactor"))?;
        ring.running = Some(RunningRing::start(reactor, setup)?);
        Ok(())
    }

    /// Moves all rings over to another memory map, when their requests in flight are done.
    fn change_memory(&mut self, table: MemoryTable) -> Result<()> {
        let memory = table.address_space()?;
        if self.served.fixed_buffers {
            // Here, because it takes long; registering what is there already does not.
            memory.populate();
        }
        self.stop_where(|_| true);
        (self.table, self.memory) = (table, memory);
        // What was out of reach may be there now. No request was taken that was not done, so each ring goes on where it was.
        for ring in self.rings.iter_mut().filter(|ring| ring.halt == Some(Halt::Unreachable)) {
            ring.halt = None;
        }
        self.start_ready();
        Ok(())
    }

    /// The peer sets the ring up anew: what stopped it is forgotten.
    fn set_up(&mut self, index: u32, change: impl FnOnce(&mut Ring)) -> Result<()> {
        let ring = self.stop_one(index)?;
        ring.halt = None;
        change(ring);
        self.start_ready();
        Ok(())
    }
}

impl Backend for Session {
    fn features(&self) -> u64 {
        self.served.device.features()
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.features();
        if unknown != 0 {
            let message = format!("the peer wants features {unknown:#x}, which are not offered");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        self.served.device.negotiated(features);
        if features != self.acked_features {
            self.stop_where(|_| true);
            self.acked_features = features;
        }
        // Without protocol features there is no message to enable a ring: all of them are.
        if features & PROTOCOL_FEATURES == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        self.start_ready();
        Ok(())
    }

    fn set_memory(&mut self, regions: Vec<(RegionSpec, OwnedFd)>) -> Result<()> {
        self.change_memory(MemoryTable::of(regions)?)
    }

    fn add_memory(&mut self, region: RegionSpec, file: OwnedFd) -> Result<()> {
        self.change_memory(self.table.with(region, &file)?)
    }

    fn remove_memory(&mut self, region: RegionSpec) -> Result<()> {
        self.change_memory(self.table.without(&region)?)
    }

    fn memory_slots(&self) -> u64 {
        MAX_REGIONS as u64
    }

    fn set_ring_size(&mut self, ring: u32, size: u32) -> Result<()> {
        let limit = self.served.queue_size;
        let checked = check_size(size).ok().filter(|size| *size <= limit);
        let size = checked.ok_or_else(|| {
            let message = format!("ring {ring} has {size} entries: a power of two up to {limit} is served");
            Error::new(ErrorKind::Protocol, message)
        })?;
        self.set_up(ring, |ring| ring.size = size)
    }

    fn set_ring_addresses(&mut self, ring: u32, addresses: RingAddresses) -> Result<()> {
        self.set_up(ring, |ring| ring.addresses = Some(addresses))
    }

    fn set_ring_base(&mut self, ring: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base)
            .map_err(|_| Error::new(ErrorKind::Protocol, format!("ring {ring} cannot begin at entry {base}")))?;
        if base != 0 {
            self.served.device.taken_over(self.acked_features);
        }
        self.set_up(ring, |ring| ring.base = base)
    }

    fn stop_ring(&mut self, ring: u32) -> Result<u16> {
        self.settle();
        let ring = self.stop_one(ring)?;
        ring.forget_start();
        Ok(ring.base)
    }

    fn set_ring_kick(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()> {
        check_kind(Purpose::Kick, fd.as_ref())?;
        self.set_up(ring, |ring| {
            ring.kick = fd;
            ring.started = true;
        })
    }

    fn set_ring_call(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()> {
        check_kind(Purpose::Call, fd.as_ref())?;
        let ring = self.ring(ring)?;
        let copy = fd.as_ref().map(OwnedFd::try_clone).transpose();
        let copy = copy.map_err(|error| Error::io("cannot duplicate a call descriptor", error))?;
        if let Some(running) = &ring.running {
            running.set_call(copy);
        }
        // Last, so that the reactor's copy of the old one is not the last: closing that may wait, for a socket that was
        // sent through this one, say.
        ring.call = fd;
        Ok(())
    }

    fn set_ring_err(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()> {
        check_kind(Purpose::Err, fd.as_ref())?;
        let ring = self.ring(ring)?;
        let copy = fd.as_ref().map(OwnedFd::try_clone).transpose();
        let copy = copy.map_err(|error| Error::io("cannot duplicate an error descriptor", error))?;
        if let Some(running) = &ring.running {
            running.set_err(copy);
        }
        ring.err = fd;
        Ok(())
    }

    fn enable_ring(&mut self, ring: u32, enabled: bool) -> Result<()> {
        if self.ring(ring)?.enabled != enabled {
            self.stop_one(ring)?.enabled = enabled;
            self.start_ready();
        }
        Ok(())
    }

    fn queue_count(&self) -> u64 {
        self.rings.len() as u64
    }

    fn config(&self, offset: u32, length_bytes: u32) -> Result<Vec<u8>> {
        let end = offset.checked_add(length_bytes).filter(|end| *end <= MAX_CONFIG_BYTES);
        if end.is_none() {
            let message =
                format!("the peer reads configuration {offset}+{length_bytes}: {MAX_CONFIG_BYTES} bytes exist");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        // Fields of later versions of the specification read as zero.
        let config = self.served.device.config().to_bytes();
        let bytes = config.into_iter().chain(std::iter::repeat(0));
        Ok(bytes.skip(offset as usize).take(length_bytes as usize).collect())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        // The driver may write one field; monitors that pass the whole space through change that byte at most.
        let mut wanted = self.config(offset, u32::try_from(bytes.len()).unwrap_or(u32::MAX))?;
        let at = (CONFIG_WRITEBACK_OFFSET as u32).checked_sub(offset).map(|at| at as usize);
        let write_back = at.and_then(|at| bytes.get(at)).copied();
        if let (Some(at), Some(byte)) = (at, write_back)
            && let Some(ours) = wanted.get_mut(at)
        {
            *ours = byte;
        }
        let offered = self.features() & virtio::blk::features::CONFIG_WCE != 0;
        match write_back {
            Some(byte) if byte <= 1 && offered && wanted == bytes => {
                self.set_write_back(byte == 1);
                Ok(())
            }
            _ => {
                let message = format!(
                    "the peer writes {} bytes of configuration at {offset}, where nothing is writable",
                    bytes.len()
                );
                Err(Error::new(ErrorKind::Protocol, message))
            }
        }
    }

    fn stop_all(&mut self) -> Result<()> {
        self.settle();
        self.stop_where(|_| true);
        self.rings.iter_mut().for_each(Ring::forget_start);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.settle();
        self.stop_where(|_| true);
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        self.acked_features = 0;
        // The cache stays as the guest set it: the monitor goes on showing that byte to the next driver.
        self.served.device.negotiated(0);
        Ok(())
    }
}

impl Session {
    fn set_write_back(&mut self, write_back: bool) {
        let device = &self.served.device;
        device.set_write_back(write_back);
        device.apply_features(self.acked_features);
        self.served.disk.set_volatile_cache(write_back);
        if let Some(times) = self.served.cache_switches.add_to_log() {
            let mode = if write_back { "write-back" } else { "write-through" };
            tracing::info!(disk = %device.name, times, "the guest switched to {mode}");
        }
    }

    /// Once a ring has run, where rings go on tells nothing of programs before us.
    fn settle(&self) {
        if self.rings.iter().any(|ring| ring.running.is_some()) {
            self.served.device.settle();
        }
    }

    /// Ends the session: every request in flight is awaited, then the peer's memory is let go.
    pub(crate) fn close(&mut self) {
        self.settle();
        self.stop_where(|_| true);
        self.rings.clear();
        self.table = MemoryTable::default();
        self.memory = Arc::default();
    }
}
