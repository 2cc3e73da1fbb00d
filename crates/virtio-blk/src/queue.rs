//! One virtqueue on its reactor: the data path.
//!
//! A turn harvests the disk's completions, and publishes them with at most one notification. Then it takes a batch of
//! requests, which the reactor submits. Requests of the batch that end at once are published, too. Nothing here waits,
//! locks or allocates (after the first requests).

mod end;
mod start;

use crate::device::{Device, MAX_ERASE_SECTORS};
use crate::transport::Transport;
use block::meter::{self, RingCounters, Stopwatch};
use block::{BatchEnd, Completion, DiskQueue, Error, ErrorKind, Poller, ReactorCtx, Result};
use memory::{GuestMemory, IoBuf};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::any::Any;
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;
use virtio::blk::{SECTOR_SHIFT, Status};
use virtio::ring_access::RingAreas;
use virtio::{BlkQueue, DeviceRing, FaultReason, PackedDeviceRing, RingFault, RingFeatures, SplitDeviceRing};

/// The most requests that one queue takes in a turn, so that the queues of a reactor share it fairly.
const BATCH: usize = 128;

/// If more requests than this are available, a turn takes half of them. The guest goes on when that half is done, while
/// the other half is served, instead of alternating with us.
const WHOLE_BATCH: usize = 16;

/// Bytes of data after which a queue takes no further request in a turn. Cached data are copied on the reactor's
/// thread, and other queues wait meanwhile. So long requests are taken one by one.
const BATCH_BYTES: usize = 128 << 10;

/// Pieces of memory after which a queue takes no further request in a turn. A guest may cut a request into a thousand
/// pieces, each of which is looked up and listed.
const BATCH_SEGMENTS: usize = 1024;

/// The length of a batch for a disk that completes at once. A driver that polls goes on with it while the next batch is
/// served, instead of alternating with us.
const STEP: usize = 16;

/// How often an idle ring is looked at if its driver sends no kicks.
const LOOK_PERIOD: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// The setup of a queue.
#[derive(Debug)]
#[non_exhaustive]
pub struct QueueSetup<T> {
    /// The device of the queue.
    pub device: Arc<Device>,
    /// Its index among the device's queues, from zero.
    pub index: u16,
    /// The ring, split or packed as the driver chose. It holds the guest's memory.
    pub areas: RingAreas,
    /// The features that the driver chose.
    pub features: u64,
    /// The ring's position ([`DeviceRing::base`]): zero for a new split ring, [`PackedDeviceRing::NEW`] for a new
    /// packed one, [`StoppedQueue::base`] for one that goes on.
    pub base: u32,
    /// Registers the guest's memory with the reactor's engines, if they can use that. Its pages are then pinned.
    pub register_memory: bool,
    /// The way to the driver.
    pub transport: T,
}

impl<T> QueueSetup<T> {
    /// Sets up the first queue of `device` on a new ring; `features` are those that the driver chose.
    #[must_use]
    pub fn new(device: Arc<Device>, areas: RingAreas, features: u64, transport: T) -> Self {
        let base = match &areas {
            RingAreas::Split(_) => 0,
            RingAreas::Packed(_) => PackedDeviceRing::NEW,
        };
        Self { device, index: 0, areas, features, base, register_memory: false, transport }
    }

    /// Changes some of it: `QueueSetup::new(...).with(|setup| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Why a queue takes no more requests although nobody stopped it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    /// The ring or its next request lies outside the guest's memory. Monitors exchange memory piece by piece while the
    /// guest runs, so after the next change the queue can go on where it was.
    Unreachable,
    /// The driver broke the ring's rules. The queue must be set up again.
    RulesBroken,
}

/// The state of a queue that was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoppedQueue {
    /// The position at which the ring goes on ([`DeviceRing::base`]). No request is in flight.
    pub base: u32,
    /// The reason why the queue had halted before, if it had.
    pub halt: Option<Halt>,
}

/// The operations of one request that have not ended. Nearly all requests have one; a discard or write-zeroes has one
/// for each range.
#[derive(Debug, Clone, Copy, Default)]
struct Pending {
    operations: u16,
    failed: Option<Status>,
    /// The value of [`Device::durable_writes_begun`] that the request's flush settles; zero if it has no flush.
    settles: u32,
    /// The request writes, and its data may be volatile after its end.
    volatile: bool,
    /// The request's start time and kind ([`Stopwatch::key`]).
    key: u64,
}

/// A virtqueue, polled by its reactor. `R` is the layout of its ring.
pub(crate) struct DeviceQueue<T, R> {
    index: u16,
    device: Arc<Device>,
    queue: BlkQueue<R>,
    disk: Box<dyn DiskQueue>,
    batch_end: BatchEnd,
    pending: Box<[Pending]>,
    harvested: Vec<Completion>,
    /// The last value of [`Device::durable_writes_begun`] for which all earlier writes are known to be durable.
    settled: u32,
    /// The value of [`Device::durable_writes_begun`] that the queue's own flush settles, and when that flush began. `None`
    /// if it is not in flight.
    first_flush: Option<(u32, Instant)>,
    /// Requests that ended since the used ring was published.
    ended: usize,
    /// The queue takes requests.
    taking: bool,
    halt: Option<Halt>,
    /// Gets a message as soon as no request is in flight.
    on_drained: Option<SyncSender<StoppedQueue>>,
    transport: T,
    /// The zeros that a secure erase writes; empty if none is offered.
    zeros: IoBuf,
    /// Wakes the reactor to look at the ring, if the driver sends no kicks.
    look_timer: Option<OwnedFd>,
    counters: Arc<RingCounters>,
    stopwatch: Stopwatch,
    /// Keeps the memory registered with the engines. The queue is dropped when nothing is in flight.
    registered: Option<Box<dyn Any>>,
}

/// Control of a queue on its reactor, whatever the layout of its ring.
pub(crate) trait QueueControl<T>: Poller {
    /// Returns the transport, to change it while the queue runs.
    fn transport_mut(&mut self) -> &mut T;

    /// Takes no more requests, and tells `on_drained` when those in flight have ended and are published.
    fn stop(&mut self, on_drained: SyncSender<StoppedQueue>);

    /// Ends requests in flight with errors although the storage hangs, because the disk is removed. The caller cuts off
    /// the returned memory at once ([`GuestMemory::fence`]). Reads and writes are not answered if a device may still
    /// hold their pages: the guest would use those pages again.
    fn give_up(&mut self) -> Arc<GuestMemory>;
}

/// Opens a queue that the caller polls by hand. Called on the reactor's thread. [`crate::RunningQueue`] is the usual
/// way.
pub fn open_poller<T: Transport>(ctx: &Rc<dyn ReactorCtx>, setup: QueueSetup<T>) -> Result<Rc<RefCell<dyn Poller>>> {
    Ok(open_queue(ctx, setup)?)
}

/// Opens a queue on a ring. Called on the reactor's thread, which then polls it ([`ReactorCtx::add_poller`]).
pub(crate) fn open_queue<T: Transport>(
    ctx: &Rc<dyn ReactorCtx>,
    setup: QueueSetup<T>,
) -> Result<Rc<RefCell<dyn QueueControl<T>>>> {
    let QueueSetup { device, index, areas, features, base, register_memory, transport } = setup;
    let parts = Parts { device, index, register_memory, transport };
    let features = RingFeatures::from_bits(features);
    let memory = Arc::clone(areas.memory());
    let bad_base = |error| Error::with_source(ErrorKind::Protocol, "the ring cannot be used", error);
    Ok(match areas {
        RingAreas::Split(areas) => {
            // The truncation is the ring's own: its index has 16 bits.
            let ring = SplitDeviceRing::new(areas, features, base as u16);
            Rc::new(RefCell::new(DeviceQueue::new(ctx, ring, memory, parts)?.flushing_first()))
        }
        RingAreas::Packed(areas) => {
            let ring = PackedDeviceRing::new(areas, features, base).map_err(bad_base)?;
            Rc::new(RefCell::new(DeviceQueue::new(ctx, ring, memory, parts)?.flushing_first()))
        }
    })
}

/// The parts of a queue besides its ring.
struct Parts<T> {
    device: Arc<Device>,
    index: u16,
    register_memory: bool,
    transport: T,
}

impl<T: Transport, R: DeviceRing> DeviceQueue<T, R> {
    fn new(ctx: &Rc<dyn ReactorCtx>, ring: R, memory: Arc<GuestMemory>, parts: Parts<T>) -> Result<Self> {
        let Parts { device, index, register_memory, transport } = parts;
        let size = usize::from(ring.size());
        let look_timer = match transport.kick_fd() {
            Some(_) => None,
            None => Some(look_timer()?),
        };
        let disk = device.disk()?.open_queue(ctx)?;
        let counters = device.counters(index);
        let refused = |error: &block::Error| {
            if let Some(times) = counters.unregistered.add_to_log() {
                tracing::warn!(disk = %device.name(), times, "fixed-buffers=on changes nothing: {error}");
            }
        };
        let register = || ctx.register_memory(&memory).inspect_err(refused).ok();
        let registered = if register_memory { register() } else { None };
        let zeros = match device.serves_secure_erase() {
            true => IoBuf::zeroed((MAX_ERASE_SECTORS << SECTOR_SHIFT) as usize),
            false => IoBuf::empty(),
        };
        let mut queue = BlkQueue::new(ring, memory, device.limits());
        queue.ring_mut().disable_notifications();
        Ok(Self {
            index,
            queue,
            disk,
            batch_end: ctx.batch_end(),
            pending: vec![Pending::default(); size].into_boxed_slice(),
            harvested: Vec::with_capacity(size),
            settled: device.durable_writes_flushed(),
            first_flush: None,
            ended: 0,
            taking: true,
            halt: None,
            on_drained: None,
            transport,
            zeros,
            look_timer,
            stopwatch: Stopwatch::new(counters.latency(), size),
            counters,
            registered,
            device,
        })
    }

    /// Notes since when the oldest request has been in flight, for other threads.
    #[inline(never)]
    fn note_oldest(&self) {
        let in_flight = usize::from(self.queue.ring().in_flight());
        let keys = self.pending.iter().filter(|pending| pending.operations > 0).map(|pending| pending.key);
        self.stopwatch.note_oldest(keys.take(in_flight));
    }

    fn tell_if_drained(&mut self) {
        if self.on_drained.is_none() || self.queue.ring().in_flight() > 0 || self.first_flush.is_some() {
            return;
        }
        let stopped = StoppedQueue { base: self.queue.ring().base(), halt: self.halt };
        if let Some(on_drained) = self.on_drained.take() {
            // The waiting thread may be gone. The queue is stopped all the same.
            let _ = on_drained.send(stopped);
        }
    }

    /// Takes a batch and submits it. Returns the number of requests.
    fn take_batch(&mut self) -> usize {
        let (mut taken, mut segments) = (0_usize, 0_usize);
        let mut most = BATCH;
        while self.taking && taken < most && self.stopwatch.moved_bytes() < BATCH_BYTES && segments < BATCH_SEGMENTS {
            match self.queue.pop() {
                Ok(Some((head, request))) => {
                    if taken == 0 {
                        self.stopwatch.begins_batch();
                        most = (usize::from(self.queue.ring().waiting()) >> 1).clamp(WHOLE_BATCH, BATCH);
                    }
                    segments = segments.saturating_add(self.queue.segment_count());
                    self.start(head, request);
                    taken = taken.saturating_add(1);
                    if self.batch_end.take() || (taken.is_multiple_of(STEP) && self.harvest() > 0) {
                        break;
                    }
                }
                Ok(None) => break,
                Err(fault) => self.stop_for(&fault),
            }
        }
        taken
    }

    /// Publishes ended requests, and notifies the guest if it wants that.
    fn publish(&mut self) {
        if self.ended == 0 {
            return;
        }
        self.ended = 0;
        // Data may have gone to, or come from, memory that is no longer the guest's. So no more ends are published.
        if self.look_for_poison() {
            return;
        }
        let end_ns = self.stopwatch.publishes();
        let notified = self.queue.publish() && self.transport.notify();
        match notified {
            true => self.counters.notifications.add(1),
            false => self.counters.notifications_avoided.add(1),
        }
        self.stopwatch.published(end_ns, notified);
    }

    /// Stops the queue because the guest broke the ring's rules, or named addresses outside its memory. It takes no
    /// more requests until it is reset, or until the memory changes. The request in question counts as not taken.
    #[cold]
    fn stop_for(&mut self, fault: &RingFault) {
        self.taking = false;
        if self.look_for_poison() {
            return;
        }
        let (halt, until) = match fault.reason {
            FaultReason::Memory(_) => (Halt::Unreachable, "the guest resets it or its memory changes"),
            _ => (Halt::RulesBroken, "the guest resets it"),
        };
        self.halt = Some(halt);
        if let Some(faults) = self.counters.faults.add_to_log() {
            tracing::warn!(
                disk = %self.device.name(),
                queue = self.index,
                faults,
                "the queue stops until {until}: {fault}"
            );
        }
        self.transport.stopped(fault);
    }

    /// Whether the peer shrank the guest's memory file. Bytes read since then may be zeros of our own. If so, tells the
    /// transport.
    fn look_for_poison(&mut self) -> bool {
        let poisoned = self.queue.memory().is_poisoned();
        if poisoned {
            self.taking = false;
            self.transport.memory_lost();
        }
        poisoned
    }
}

fn look_timer() -> Result<OwnedFd> {
    timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
        .map_err(|error| block::Error::io("cannot make a timer for a queue without kicks", error.into()))
}

/// Sets the timer to wake the reactor. Returns whether that worked.
fn look_later(timer: &OwnedFd) -> bool {
    let once = Itimerspec { it_interval: Timespec::default(), it_value: LOOK_PERIOD };
    timerfd_settime(timer, TimerfdTimerFlags::empty(), &once).is_ok()
}

impl<T: Transport, R: DeviceRing + 'static> QueueControl<T> for DeviceQueue<T, R> {
    fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    fn stop(&mut self, on_drained: SyncSender<StoppedQueue>) {
        self.taking = false;
        self.on_drained = Some(on_drained);
        self.tell_if_drained();
    }

    fn give_up(&mut self) -> Arc<GuestMemory> {
        self.taking = false;
        let may_be_held = self.registered.is_some() || self.device.disk().is_ok_and(|disk| disk.may_pin_memory());
        let (mut failed, mut left) = (0_usize, 0_usize);
        for head in 0..u16::try_from(self.pending.len()).unwrap_or(u16::MAX) {
            let Some(pending) = self.pending.get_mut(usize::from(head)).filter(|pending| pending.operations > 0) else {
                continue;
            };
            if may_be_held && matches!(pending.key & meter::KIND_BITS, meter::READ | meter::WRITE) {
                left = left.saturating_add(1);
                continue;
            }
            pending.operations = 0;
            self.end(head, Status::IoErr);
            failed = failed.saturating_add(1);
        }
        self.publish();
        // Requests in the kernel still use it, so it stays registered for ever.
        std::mem::forget(self.registered.take());
        tracing::error!(
            disk = %self.device.name(),
            queue = self.index,
            failed,
            unanswered = left,
            "the storage does not end requests in flight: they are given up, and the guest gets errors"
        );
        Arc::clone(self.queue.memory())
    }
}

impl<T: Transport, R: DeviceRing + 'static> Poller for DeviceQueue<T, R> {
    fn poll(&mut self) -> bool {
        let mut harvested = self.harvest();
        self.publish();
        let taken = self.take_batch();
        if taken > 0 {
            self.counters.requests.add(taken);
            self.counters.batches.add(1);
            // Disks that complete at once have completed already.
            harvested = harvested.saturating_add(self.harvest());
            self.stopwatch.ends_batch(self.queue.ring().in_flight() == 0);
        }
        let worked = taken > 0 || harvested > 0;
        // With ended requests, publishing looks for it.
        if worked && self.ended == 0 {
            self.look_for_poison();
        }
        self.publish();
        self.tell_if_drained();
        if self.stopwatch.is_asked() {
            self.note_oldest();
        }
        worked
    }

    fn arm(&mut self) -> bool {
        self.note_oldest();
        if !self.taking {
            return false;
        }
        let more = self.queue.ring_mut().enable_notifications();
        // A ring on a memory file that was shrunk looks like an idle one.
        if self.look_for_poison() {
            return false;
        }
        more || self.look_timer.as_ref().is_some_and(|timer| !look_later(timer))
    }

    fn disarm(&mut self) {
        if self.taking {
            self.queue.ring_mut().disable_notifications();
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.transport.kick_fd().or(self.look_timer.as_ref().map(AsFd::as_fd))
    }
}
