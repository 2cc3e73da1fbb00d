//! The setup of one peer: memory, features, rings. The session runs on the export's thread, and the rings on their
//! reactors.
//!
//! A ring runs while it is started (a kick message came since it was last stopped) and enabled, and its memory and
//! addresses are known. A change of a running ring's setup stops the ring first: no more requests are taken, and those
//! in flight are awaited. Then the change is made, and the ring goes on at its position.

use crate::memory_table::{MAX_REGIONS, MemoryRules, MemoryTable};
use crate::notifier::{Blocked, Notifier, Purpose, check_kind, seal};
use crate::queue_fds::QueueFds;
use crate::running_rings::RunningRings;
use crate::session_events::{Ending, SessionEvents};
use crate::wire::Backend;
use block::{Error, ErrorKind, ReactorHandle, Result};
use memory::{GuestMemory, MappingShare, RegionSpec};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use virtio::PackedDeviceRing;
use virtio::ring_access::{RingAddresses, RingAreas, RingLayout, check_packed_size, check_size};
use virtio_blk::{Counter, Device, Halt, QueueSetup, RunningQueue};

/// Vhost-user's own bit among the virtio features: the peer may ask for protocol features.
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The largest configuration space that the protocol can ask for.
const MAX_CONFIG_BYTES: u32 = 256;

/// One ring, as set up by the peer.
#[derive(Default)]
struct Ring {
    size: u16,
    addresses: Option<RingAddresses>,
    /// The position at which the ring goes on. `None` for a new ring, which begins at its layout's default.
    base: Option<u32>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    started: bool,
    enabled: bool,
    /// The reason why the ring halted or could not start.
    halt: Option<Halt>,
}

impl Ring {
    /// Forgets the start, because the peer has stopped the ring. The ring starts again only after the peer has named
    /// addresses: other data may lie at the old ones. All monitors name them at each start.
    fn forget_start(&mut self) {
        self.started = false;
        self.halt = None;
        self.kick = None;
        self.addresses = None;
    }
}

fn copy(fd: &Option<OwnedFd>, what: &str) -> Result<Option<OwnedFd>> {
    let lost = |error| Error::io(format!("cannot duplicate {what} descriptor"), error);
    fd.as_ref().map(OwnedFd::try_clone).transpose().map_err(lost)
}

fn notifier(fd: &Option<OwnedFd>, what: &str) -> Result<Option<Notifier>> {
    copy(fd, what)?.map(Notifier::new).transpose()
}

/// The state that all sessions of an export share: the device, and how it is served.
pub(crate) struct Served {
    pub(crate) device: Arc<Device>,
    pub(crate) reactors: Vec<Arc<dyn ReactorHandle>>,
    pub(crate) first_reactor: usize,
    /// The peers' memory is registered with the engines.
    pub(crate) fixed_buffers: bool,
    /// The rules for their memory.
    pub(crate) memory_rules: MemoryRules,
    /// The running rings.
    pub(crate) running: RunningRings,
    /// The share of mappings that the peers use, one after the other.
    pub(crate) share: Arc<MappingShare>,
    /// Times that each queue could not start.
    pub(crate) failed_starts: Vec<Counter>,
}

/// One peer's session.
pub(crate) struct Session {
    served: Arc<Served>,
    events: Arc<SessionEvents>,
    acked_features: u64,
    table: MemoryTable,
    memory: Arc<GuestMemory>,
    rings: Vec<Ring>,
    /// The capacity that the peer has last read in this session.
    read_sectors: Option<u64>,
    /// Whether a ring ran after the last message.
    has_run: bool,
}

impl Session {
    pub(crate) fn new(served: Arc<Served>, events: Arc<SessionEvents>) -> Self {
        let rings = served.failed_starts.iter().map(|_| Ring::default()).collect();
        let table = MemoryTable::new(&served.share, served.memory_rules);
        Self {
            served,
            events,
            acked_features: 0,
            table,
            memory: Arc::default(),
            rings,
            read_sectors: None,
            has_run: false,
        }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        let count = self.rings.len();
        let found = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        found.ok_or_else(|| Error::new(ErrorKind::Protocol, format!("the peer names ring {index}, {count} are served")))
    }

    /// Stops the rings that `which` names, all at once, and keeps where each goes on. Fails if that is not known for
    /// each. The session has to end then: its monitor goes on where the used ring ends.
    fn stop_where(&mut self, which: impl Fn(usize) -> bool) -> Result<()> {
        let stopped = self.served.running.stop_where(which);
        for (index, stopped) in stopped.rings {
            if let Some(ring) = self.rings.get_mut(index) {
                ring.base = Some(stopped.base);
                ring.halt = ring.halt.or(stopped.halt);
            }
        }
        match stopped.is_complete {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Io, "requests in flight were given up, so the session ends")),
        }
    }

    fn stop_one(&mut self, index: u32) -> Result<&mut Ring> {
        self.ring(index)?;
        self.stop_where(|other| u32::try_from(other) == Ok(index))?;
        self.ring(index)
    }

    /// Starts all rings that should run and do not.
    fn start_ready(&mut self) {
        for index in 0..self.rings.len() {
            if let Err(error) = self.start_if_ready(index) {
                let name = self.served.device.name();
                if let Some(times) = self.served.failed_starts.get(index).and_then(Counter::add_to_log) {
                    tracing::warn!(disk = %name, queue = index, times, "the queue cannot start: {error}");
                }
                if let Some(ring) = self.rings.get_mut(index) {
                    // Other failures are also tried again at the next change of the memory, which does no harm.
                    ring.halt = Some(Halt::Unreachable);
                    if let Ok(Some(err)) = notifier(&ring.err, "an error")
                        && err.notify() == Err(Blocked)
                    {
                        self.events.end_session(Ending::Blocking);
                    }
                }
            }
        }
    }

    fn start_if_ready(&mut self, index: usize) -> Result<()> {
        let has_memory = !self.memory.regions().is_empty();
        let served = Arc::clone(&self.served);
        let Some(ring) = self.rings.get_mut(index) else { return Ok(()) };
        let ready = ring.started && ring.enabled && ring.halt.is_none() && has_memory && ring.size > 0;
        let (Some(addresses), true, false) = (ring.addresses, ready, served.running.contains(index)) else {
            return Ok(());
        };
        let layout = RingLayout::from_bits(self.acked_features);
        let areas = RingAreas::at_user_addresses(layout, Arc::clone(&self.memory), addresses, ring.size)
            .map_err(|error| Error::with_source(ErrorKind::Protocol, "the ring cannot be used", error))?;
        let kick = copy(&ring.kick, "a kick")?;
        let (call, err) = (notifier(&ring.call, "a call")?, notifier(&ring.err, "an error")?);
        let transport = QueueFds::new(kick, call, err, Arc::clone(&self.events));
        let setup = QueueSetup::new(Arc::clone(&served.device), areas, self.acked_features, transport).with(|setup| {
            setup.index = u16::try_from(index).unwrap_or(u16::MAX);
            setup.base = ring.base.unwrap_or(setup.base);
            setup.register_memory = served.fixed_buffers;
        });
        let turn = served.first_reactor.wrapping_add(index);
        let reactor = turn.checked_rem(served.reactors.len()).and_then(|turn| served.reactors.get(turn));
        let reactor = reactor.ok_or_else(|| Error::new(ErrorKind::BadOption, "the export has no reactor"))?;
        served.running.start(index, || RunningQueue::start(reactor, setup))
    }

    /// Moves all rings to another memory map, after their requests in flight.
    fn change_memory(&mut self, table: MemoryTable) -> Result<()> {
        let memory = table.address_space()?;
        if self.served.fixed_buffers {
            // This takes long, so it is done on this thread. Registering resident pages is quick.
            memory.populate();
        }
        self.stop_where(|_| true)?;
        (self.table, self.memory) = (table, memory);
        // Memory that was out of reach may be there now. All requests that were taken are done, so each ring goes on
        // where it was.
        for ring in self.rings.iter_mut().filter(|ring| ring.halt == Some(Halt::Unreachable)) {
            ring.halt = None;
        }
        self.start_ready();
        Ok(())
    }

    /// Changes the setup of a ring for the peer. The reason of an earlier halt is forgotten.
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
        self.served.device.features() | PROTOCOL_FEATURES
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let unknown = features & !self.features();
        if unknown != 0 {
            let message = format!("the peer wants features {unknown:#x}, which are not offered");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        self.served.device.negotiated(features);
        if features != self.acked_features {
            self.stop_where(|_| true)?;
            if RingLayout::from_bits(features) != self.layout() {
                // Positions of the other layout have no meaning in this one.
                self.rings.iter_mut().for_each(|ring| ring.base = None);
            }
            self.acked_features = features;
        }
        // Without protocol features there is no message to enable rings, so all are enabled.
        if features & PROTOCOL_FEATURES == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        self.start_ready();
        Ok(())
    }

    fn set_memory(&mut self, regions: Vec<(RegionSpec, OwnedFd)>) -> Result<()> {
        self.change_memory(self.table.replaced_by(regions)?)
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
        let limit = self.served.device.options().queue_size;
        let (checked, what) = match self.layout() {
            RingLayout::Split => (check_size(size), "a power of two"),
            RingLayout::Packed => (check_packed_size(size), "any number"),
        };
        let size = checked.ok().filter(|size| *size <= limit).ok_or_else(|| {
            let message = format!("ring {ring} has {size} entries: {what} up to {limit} is served");
            Error::new(ErrorKind::Protocol, message)
        })?;
        self.set_up(ring, |ring| ring.size = size)
    }

    fn set_ring_addresses(&mut self, ring: u32, addresses: RingAddresses) -> Result<()> {
        self.set_up(ring, |ring| ring.addresses = Some(addresses))
    }

    fn set_ring_base(&mut self, ring: u32, base: u32) -> Result<()> {
        let layout = self.layout();
        if layout == RingLayout::Split && base > u32::from(u16::MAX) {
            let message = format!("ring {ring} cannot begin at entry {base}");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        // For a packed ring the lower half is the position, and some peers set only that.
        if (base ^ new_base(layout)) & 0xffff != 0 {
            self.served.device.taken_over();
        }
        self.set_up(ring, |ring| ring.base = Some(base))
    }

    fn stop_ring(&mut self, ring: u32) -> Result<u32> {
        self.settle();
        let layout = self.layout();
        let ring = self.stop_one(ring)?;
        ring.forget_start();
        Ok(ring.base.unwrap_or_else(|| new_base(layout)))
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
        fd.iter().for_each(seal);
        self.ring(ring)?;
        let index = usize::try_from(ring).unwrap_or(usize::MAX);
        if self.served.running.contains(index) {
            let call = notifier(&fd, "a call")?;
            self.served.running.change(index, |fds| fds.set_call(call));
        }
        let ring = self.ring(ring)?;
        // This comes last, so that the reactor's copy of the old descriptor is not the last one. Closing the last copy
        // may wait, for example for a socket that was sent through this one.
        ring.call = fd;
        Ok(())
    }

    fn set_ring_err(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()> {
        check_kind(Purpose::Err, fd.as_ref())?;
        self.ring(ring)?;
        let index = usize::try_from(ring).unwrap_or(usize::MAX);
        if self.served.running.contains(index) {
            let err = notifier(&fd, "an error")?;
            self.served.running.change(index, |fds| fds.set_err(err));
        }
        self.ring(ring)?.err = fd;
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

    fn config(&mut self, offset: u32, length_bytes: u32) -> Result<Vec<u8>> {
        let end = offset.checked_add(length_bytes).filter(|end| *end <= MAX_CONFIG_BYTES);
        if end.is_none() {
            let message =
                format!("the peer reads configuration {offset}+{length_bytes}: {MAX_CONFIG_BYTES} bytes exist");
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        let mut bytes = vec![0; length_bytes as usize];
        self.served.device.read_config(offset as usize, &mut bytes);
        if let (0, Some(capacity)) = (offset, bytes.first_chunk()) {
            self.read_sectors = Some(u64::from_le_bytes(*capacity));
        }
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        self.served.device.write_config(offset as usize, bytes)
    }

    fn stop_all(&mut self) -> Result<()> {
        self.settle();
        self.stop_where(|_| true)?;
        self.rings.iter_mut().for_each(Ring::forget_start);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.settle();
        self.stop_where(|_| true)?;
        self.rings.iter_mut().for_each(|ring| *ring = Ring::default());
        self.acked_features = 0;
        // The cache stays as the guest set it, because the monitor shows that byte to the next driver.
        self.served.device.negotiated(0);
        Ok(())
    }

    /// Whether the peer must be sent a configuration change that it missed. QEMU keeps a copy of the configuration. It
    /// ignores a change while its device is stopped, and does not read it when it connects again. So the change is sent
    /// when its rings start.
    fn owes_news(&mut self) -> bool {
        let runs = !self.served.running.is_empty();
        let had_run = std::mem::replace(&mut self.has_run, runs);
        runs && !had_run && self.read_sectors != Some(self.served.device.config().capacity_sectors)
    }
}

/// Returns where a new ring begins.
fn new_base(layout: RingLayout) -> u32 {
    match layout {
        RingLayout::Split => 0,
        RingLayout::Packed => PackedDeviceRing::NEW,
    }
}

impl Session {
    fn layout(&self) -> RingLayout {
        RingLayout::from_bits(self.acked_features)
    }

    /// Tells the device if a ring has run. Then the position of a ring says nothing of earlier programs.
    fn settle(&self) {
        if !self.served.running.is_empty() {
            self.served.device.settle();
        }
    }

    /// Ends the session. Waits for all requests in flight, then drops the peer's memory.
    pub(crate) fn close(&mut self) {
        self.settle();
        // The peer is told no place any more.
        let _ = self.stop_where(|_| true);
        self.rings.clear();
        self.table = MemoryTable::new(&self.served.share, self.served.memory_rules);
        self.memory = Arc::default();
    }
}
