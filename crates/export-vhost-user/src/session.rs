//! What one peer has set up: memory, features, rings. Runs on the export's thread; the rings run on their reactors.
//!
//! A ring runs while it is started (it has a kick message since it was last stopped) and enabled, and its memory and
//! addresses are known. Whatever changes what a running ring uses stops it first: no more requests are taken, those in
//! flight are awaited, then the change is made and the ring goes on where it was.

use crate::memory_table::{MAX_REGIONS, MemoryTable};
use crate::notifier::{Blocked, Notifier, Purpose, check_kind};
use crate::queue_fds::QueueFds;
use crate::wire::Backend;
use block::{Error, ErrorKind, ReactorHandle, Result};
use memory::{GuestMemory, RegionSpec};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use virtio::ring_access::{RingAddresses, SplitAreas, check_size};
use virtio_blk::{Counter, Device, Halt, QueueSetup, RunningQueue, StoppingQueue};

/// Vhost-user's own bit among the virtio features: the peer may ask for protocol features.
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// The largest configuration space that the protocol can ask for.
const MAX_CONFIG_BYTES: u32 = 256;

/// Why a queue wants its session to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The peer shrank a file of its memory.
    MemoryLost,
    /// The peer keeps those who notify it waiting.
    Blocking,
}

impl Ending {
    fn why(self) -> &'static str {
        match self {
            Self::MemoryLost => "the peer shrank a memory file that it shares: what it holds is lost",
            Self::Blocking => "the peer filled a descriptor for notifications and let us wait for it",
        }
    }
}

/// What a session's queues tell its thread.
#[derive(Debug)]
pub(crate) struct SessionEvents {
    wake: OwnedFd,
    ending: OnceLock<Ending>,
}

impl SessionEvents {
    pub(crate) fn new() -> Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an event descriptor", error.into()))?;
        Ok(Self { wake, ending: OnceLock::new() })
    }

    /// The session has to end.
    pub(crate) fn end_session(&self, ending: Ending) {
        if self.ending.set(ending).is_ok() {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// Fails if the session has to end.
    pub(crate) fn check(&self) -> Result<()> {
        self.ending.get().map_or(Ok(()), |ending| Err(Error::new(ErrorKind::Protocol, ending.why())))
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
    running: Option<RunningQueue<QueueFds>>,
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

fn copy(fd: &Option<OwnedFd>, what: &str) -> Result<Option<OwnedFd>> {
    let lost = |error| Error::io(format!("cannot duplicate {what} descriptor"), error);
    fd.as_ref().map(OwnedFd::try_clone).transpose().map_err(lost)
}

fn notifier(fd: &Option<OwnedFd>, what: &str) -> Result<Option<Notifier>> {
    copy(fd, what)?.map(Notifier::new).transpose()
}

/// What all sessions of an export share.
pub(crate) struct Served {
    pub(crate) device: Arc<Device>,
    pub(crate) reactors: Vec<Arc<dyn ReactorHandle>>,
    pub(crate) first_reactor: usize,
    /// The peers' memory is to be registered with the engines.
    pub(crate) fixed_buffers: bool,
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
}

impl Session {
    pub(crate) fn new(served: Arc<Served>, events: Arc<SessionEvents>) -> Self {
        let rings = served.failed_starts.iter().map(|_| Ring::default()).collect();
        Self { served, events, acked_features: 0, table: MemoryTable::default(), memory: Arc::default(), rings }
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        let count = self.rings.len();
        let found = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        found.ok_or_else(|| Error::new(ErrorKind::Protocol, format!("the peer names ring {index}, {count} are served")))
    }

    /// Stops the rings that `which` names, all at once, and keeps where each goes on.
    fn stop_where(&mut self, which: impl Fn(usize) -> bool) {
        let stopping: Vec<(usize, StoppingQueue<QueueFds>)> = self
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
                let name = self.served.device.name();
                if let Some(times) = self.served.failed_starts.get(index).and_then(Counter::add_to_log) {
                    tracing::warn!(disk = %name, queue = index, times, "the queue cannot start: {error}");
                }
                if let Some(ring) = self.rings.get_mut(index) {
                    // What else can go wrong there is tried again with the memory, too: it harms nobody.
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
        let (Some(addresses), true, None) = (ring.addresses, ready, &ring.running) else {
            return Ok(());
        };
        let areas = SplitAreas::at_user_addresses(Arc::clone(&self.memory), addresses, ring.size)
            .map_err(|error| Error::with_source(ErrorKind::Protocol, "the ring cannot be used", error))?;
        let kick = copy(&ring.kick, "a kick")?;
        let (call, err) = (notifier(&ring.call, "a call")?, notifier(&ring.err, "an error")?);
        let setup = QueueSetup {
            device: Arc::clone(&served.device),
            index: u16::try_from(index).unwrap_or(u16::MAX),
            areas,
            features: self.acked_features,
            next_available: ring.base,
            register_memory: served.fixed_buffers,
            transport: QueueFds::new(kick, call, err, Arc::clone(&self.events)),
        };
        let turn = served.first_reactor.wrapping_add(index);
        let reactor = turn.checked_rem(served.reactors.len()).and_then(|turn| served.reactors.get(turn));
        let reactor = reactor.ok_or_else(|| Error::new(ErrorKind::BadOption, "the export has no reactor"))?;
        ring.running = Some(RunningQueue::start(reactor, setup)?);
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
        let limit = self.served.device.options().queue_size;
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
            self.served.device.taken_over();
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
        if let Some(running) = &ring.running {
            let call = notifier(&fd, "a call")?;
            running.change_transport(|fds| fds.set_call(call));
        }
        // Last, so that the reactor's copy of the old one is not the last: closing that may wait, for a socket that was
        // sent through this one, say.
        ring.call = fd;
        Ok(())
    }

    fn set_ring_err(&mut self, ring: u32, fd: Option<OwnedFd>) -> Result<()> {
        check_kind(Purpose::Err, fd.as_ref())?;
        let ring = self.ring(ring)?;
        if let Some(running) = &ring.running {
            let err = notifier(&fd, "an error")?;
            running.change_transport(|fds| fds.set_err(err));
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
        let mut bytes = vec![0; length_bytes as usize];
        self.served.device.read_config(offset as usize, &mut bytes);
        Ok(bytes)
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        self.served.device.write_config(offset as usize, bytes)
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
