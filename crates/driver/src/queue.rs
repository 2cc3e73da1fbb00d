//! The bio path: each operation becomes one ring request, or several if the device's limits require it. The request
//! path (see `scheduler`) comes before it.
//!
//! Operations are issued in the order of submission. One that does not fit into the ring, or finds no bounce buffer,
//! waits in line, and so do all later ones. So nothing overtakes a flush. Memory that the device shares is named in the
//! request directly; other memory is copied through bounce buffers.

mod active;

pub(crate) use active::Active;

use crate::DriverPath;
use crate::cache::CacheMoment;
use crate::control::{Hold, Word};
use crate::inner::Inner;
use crate::issue::copy_bounced;
use crate::layout::BOUNCE_BYTES;
use crate::ring::{ORPHAN, Ring};
use crate::rules::Rules;
use crate::scheduler::Scheduler;
use active::Stage;
use block::{Completion, DiskQueue, IoError, IoErrorKind, IoResult, Op, OpFlags, Poller, PollerId, ReactorCtx, Tag};
use memory::{IoBuf, Window};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio::blk::Status;

/// A queue without its registration with the reactor.
pub(crate) struct Core {
    /// `None` when the queue was dropped, and while the driver holds all queues.
    pub(crate) ring: Option<Ring>,
    /// The ring, while it only ends its requests in flight; see `control`.
    pub(crate) draining: Option<Ring>,
    /// The driver's word that the queue follows at the moment.
    pub(crate) held: Word,
    pub(crate) index: usize,
    pub(crate) inner: Arc<Inner>,
    pub(crate) rules: Rules,
    pub(crate) active: Vec<Active>,
    pub(crate) free: Vec<u32>,
    pub(crate) line: VecDeque<u32>,
    /// On the request path only.
    pub(crate) scheduler: Option<Box<Scheduler>>,
    /// Operations that were completed without the device.
    pub(crate) immediate: Vec<Completion>,
    pub(crate) in_flight: usize,
    /// The bounce buffers, by index.
    pub(crate) bounce: Vec<Window>,
    /// First address of the shared memory, and its bytes.
    pub(crate) shared: (usize, usize),
    /// The device is gone or broke the ring: all operations fail.
    pub(crate) failed: bool,
    armed: bool,
    /// The ring was given back.
    is_parked: bool,
    /// Callbacks stay on even while the used ring is drained, for measurements.
    keeps_callbacks: bool,
}

/// A queue of the driver.
pub(crate) struct Queue {
    core: Rc<RefCell<Core>>,
    ctx: Rc<dyn ReactorCtx>,
    poller: PollerId,
}

impl Queue {
    pub(crate) fn open(inner: &Arc<Inner>, ring: Ring, ctx: &Rc<dyn ReactorCtx>) -> block::Result<Self> {
        let shared = (inner.mapping.as_ptr().as_ptr().addr(), inner.mapping.length_bytes());
        let layout = inner.layout(ring.index);
        let bounce_bytes = usize::from(layout.bounce_count) * BOUNCE_BYTES;
        let area = IoBuf::in_mapping(&inner.mapping, layout.bounce, bounce_bytes, Box::new(())).unwrap_or_default();
        let whole = area.whole();
        let slots = 0..whole.length_bytes() / BOUNCE_BYTES;
        let core = Core {
            index: ring.index,
            draining: None,
            held: inner.control.word().with(Hold::None),
            inner: Arc::clone(inner),
            rules: inner.rules(),
            active: Vec::new(),
            free: Vec::new(),
            line: VecDeque::new(),
            scheduler: (inner.options.path == DriverPath::Request).then(Box::default),
            immediate: Vec::new(),
            in_flight: 0,
            bounce: slots.map(|index| whole.slice(index * BOUNCE_BYTES, BOUNCE_BYTES)).collect(),
            shared,
            failed: false,
            armed: false,
            is_parked: false,
            keeps_callbacks: inner.options.keep_callbacks,
            ring: Some(ring),
        };
        let core = Rc::new(RefCell::new(core));
        // If anything fails from here on, the core is dropped, which parks the ring.
        let poller = ctx.add_poller(Rc::clone(&core) as Rc<RefCell<dyn Poller>>)?;
        Ok(Self { core, ctx: Rc::clone(ctx), poller })
    }
}

impl DiskQueue for Queue {
    fn submit(&mut self, tag: Tag, op: Op) {
        self.core.borrow_mut().submit(tag, op);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.core.borrow_mut().harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.core.borrow().in_flight
    }
}

/// A queue whose operations the scheduler merges and sorts.
pub(crate) struct RequestQueue(pub(crate) Queue);

impl DiskQueue for RequestQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        self.0.core.borrow_mut().enqueue(tag, op);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        self.0.harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.ctx.remove_poller(self.poller);
        self.core.borrow_mut().park();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.park();
    }
}

impl Poller for Core {
    fn poll(&mut self) -> bool {
        self.follow_hold();
        self.dispatch();
        let published = self.ring.as_mut().is_some_and(Ring::publish);
        published || self.has_news()
    }

    fn arm(&mut self) -> bool {
        self.follow_hold();
        self.dispatch();
        self.armed = true;
        let Some(ring) = self.ring.as_mut().or(self.draining.as_mut()) else { return self.has_news() };
        ring.publish();
        ring.enable_callbacks() || self.has_news()
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed)
            && let Some(ring) = &self.ring
        {
            ring.fds.wakeups.fetch_add(1, Ordering::Relaxed);
            if !self.keeps_callbacks {
                ring.disable_callbacks();
            }
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        // It is there even while the driver holds the ring, because the descriptors stay the same.
        self.inner.fds.get(self.index).map(|fds| fds.call.as_fd())
    }
}

impl Core {
    /// Whether a harvest would return anything.
    fn has_news(&self) -> bool {
        let ring = self.ring.as_ref().or(self.draining.as_ref());
        let used = ring.is_some_and(Ring::has_used);
        !self.immediate.is_empty()
            || (!self.failed && (used || (self.in_flight > 0 && (self.is_over() || self.is_stuck()))))
    }

    /// Whether something waits for memory or a place in the ring although no completion will free any.
    fn is_stuck(&self) -> bool {
        let waits = !self.line.is_empty() || self.scheduler.as_ref().is_some_and(|scheduler| scheduler.waits());
        waits && self.ring.as_ref().is_some_and(|ring| ring.in_flight() == 0)
    }

    pub(crate) fn is_over(&self) -> bool {
        let given_up = |ring: &Ring| ring.fds.given_up.load(Ordering::Relaxed);
        let ring = self.ring.as_ref().or(self.draining.as_ref());
        self.inner.session.is_gone() || ring.is_some_and(given_up)
    }

    /// Says why nothing more comes from the device.
    pub(crate) fn how_it_ended(&self) -> &'static str {
        match self.inner.session.is_gone() {
            true => "the server has hung up: requests that it has not ended fail",
            false => "the device has given the queue up: its requests fail",
        }
    }

    /// Gives the ring back to the driver. Requests in flight go on without an owner.
    fn park(&mut self) {
        if self.is_parked {
            return;
        }
        let ring = self.ring.take().or(self.draining.take());
        let inner = Arc::clone(&self.inner);
        inner.park(self.index, ring, |ring| {
            ring.publish();
            ring.disable_callbacks();
            // Counted before the operations' buffers are dropped: the device may still write to them.
            inner.pool.add_orphans(ring.orphan_all());
        });
        self.is_parked = true;
        self.active.clear();
        self.line.clear();
        self.scheduler = None;
    }

    fn submit(&mut self, tag: Tag, op: Op) {
        let Some(index) = self.accept(tag, op) else { return };
        if !self.line.is_empty() || !self.issue(index) {
            return self.wait_in_line(index);
        }
        self.end_if_nothing_was_issued(index);
    }

    /// Ends an operation that no ring could hold, or that has nothing to do, with the next harvest.
    pub(crate) fn end_if_nothing_was_issued(&mut self, index: u32) {
        if self.active.get(index as usize).is_some_and(|active| active.parts == 0) {
            let mut done = std::mem::take(&mut self.immediate);
            self.finish(index, &mut done);
            self.immediate = done;
        }
    }

    /// Finds a place for an operation. Returns `None` if it has ended already.
    #[inline]
    pub(crate) fn accept(&mut self, tag: Tag, op: Op) -> Option<u32> {
        if self.held.hold() != Hold::None {
            // What comes after a reset is none of those that the reset ends.
            self.follow_hold();
        }
        self.in_flight += 1;
        let result = if self.failed { Err(IoError::EIO) } else { self.admit(&op) };
        let ended = match result {
            Ok(true) => None,
            Ok(false) => Some(Ok(())),
            Err(error) => Some(Err(error)),
        };
        if let Some(result) = ended {
            self.immediate.push(Completion { tag, result });
            return None;
        }
        let flags = if self.rules.flush { op.flags() } else { OpFlags::NONE };
        let stage = match op {
            Op::Flush => Stage::Flush,
            // If there is nothing to flush, earlier writes are durable already.
            _ if flags.is_preflush() && self.needs_flush() => Stage::Preflush,
            _ => Stage::Data,
        };
        // Without data there is nothing to make durable.
        let fua = flags.is_fua() && op.range().is_some_and(|(_, length)| length > 0);
        let sent_at = CacheMoment::default();
        let active = Active { tag, op, issued: 0, parts: 0, waiting: false, fua, stage, result: Ok(()), sent_at };
        Some(match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.active.get_mut(index as usize) {
                    *place = active;
                }
                index
            }
            None => {
                self.active.push(active);
                // All of them may end or wait at once: room is made here.
                self.free.reserve(self.active.len());
                self.line.reserve(self.active.len().saturating_sub(self.line.len()));
                if let Some(scheduler) = &mut self.scheduler {
                    scheduler.reserve(self.active.len());
                }
                // The number of operations at once is bounded by the submitter's memory.
                (self.active.len() - 1) as u32
            }
        })
    }

    pub(crate) fn wait_in_line(&mut self, index: u32) {
        if let Some(active) = self.active.get_mut(index as usize) {
            active.waiting = true;
            self.line.push_back(index);
        }
    }

    /// Whether a flush has anything to do.
    fn needs_flush(&self) -> bool {
        self.rules.flush && self.inner.cache.now().needs_flush()
    }

    /// Returns whether the operation has to go to the device, or an error if it is refused.
    fn admit(&self, op: &Op) -> IoResult<bool> {
        if op.is_write() && self.rules.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly));
        }
        let Some((offset, length)) = op.range() else {
            return Ok(self.needs_flush());
        };
        let size_bytes = self.inner.size_bytes.load(Ordering::Relaxed);
        let inside = offset.checked_add(length).is_some_and(|end| end <= size_bytes);
        if !inside || (offset | length) & (self.rules.block_bytes - 1) != 0 {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        match op {
            Op::Discard { .. } if !self.rules.discard.is_served() => Err(IoError::new(IoErrorKind::Unsupported)),
            Op::SecureErase { .. } if !self.rules.secure_erase.is_served() => {
                Err(IoError::new(IoErrorKind::Unsupported))
            }
            _ => Ok(length > 0 || (op.flags().is_preflush() && self.needs_flush())),
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        if self.draining.is_some() {
            return self.harvest_draining(done);
        }
        // Read before the used ring, so that what the device completed before it went away is seen.
        let over = !self.failed && self.is_over();
        if !self.failed {
            self.drain(done);
        }
        if over && !self.failed {
            self.fail_all(self.how_it_ended(), done);
        }
        if !self.immediate.is_empty() {
            done.append(&mut self.immediate);
        }
        if !self.line.is_empty() {
            self.pump(done);
        }
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.restart();
        }
        let count = done.len() - before;
        self.in_flight -= count;
        if let Some(ring) = &mut self.ring
            && !self.failed
            && ring.has_untold_ends()
        {
            ring.tell_progress();
            if self.keeps_callbacks {
                ring.enable_callbacks();
            }
        }
        count
    }

    pub(crate) fn drain(&mut self, done: &mut Vec<Completion>) {
        loop {
            let Some(ring) = &mut self.ring else { return };
            match ring.pop() {
                Ok(Some(ended)) => self.end_part(ended.head, ended.status, done),
                Ok(None) => return,
                Err(error) => {
                    let why = error.to_string();
                    return self.fail_all(&why, done);
                }
            }
        }
    }

    fn end_part(&mut self, head: u16, status: Status, done: &mut Vec<Completion>) {
        let Some(ring) = &mut self.ring else { return };
        let Some(part) = ring.part(head) else { return };
        let index = part.owner;
        let Some(active) = self.active.get_mut(index as usize) else {
            return self.end_of_no_single(head, index, status, done);
        };
        if status != Status::Ok {
            active.result = result_of(status);
        }
        if !part.bounce.is_empty() {
            if let (Op::Read { data, .. }, Status::Ok) = (&active.op, status) {
                copy_bounced(&part.bounce, &self.bounce, ring.max_segment_bytes, &self.rules, |slot, at, length| {
                    data.copy_from(part.skip_bytes + at, &slot.slice(0, length.min(part.length_bytes - at)));
                    at + length < part.length_bytes
                });
            }
            ring.free_bounce(head);
        }
        active.parts -= 1;
        if active.parts == 0 && !active.waiting {
            self.finish(index, done);
        }
    }

    /// Ends a request whose queue was dropped, or one that several operations share.
    #[cold]
    fn end_of_no_single(&mut self, head: u16, owner: u32, status: Status, done: &mut Vec<Completion>) {
        if owner != ORPHAN {
            return self.end_group(head, owner, status, done);
        }
        if let Some(ring) = &mut self.ring {
            ring.free_bounce(head);
            ring.orphan_done();
        }
        self.inner.pool.orphan_done();
    }

    /// Moves an operation on whose issued requests have all ended, and which has nothing left to issue.
    pub(crate) fn finish(&mut self, index: u32, done: &mut Vec<Completion>) {
        while self.next_stage(index) {
            if !self.line.is_empty() || self.held.hold() != Hold::None || !self.issue(index) {
                return self.wait_in_line(index);
            }
            if self.active.get(index as usize).is_none_or(|active| active.parts > 0) {
                return;
            }
            // There was nothing to issue, or no ring could hold it.
        }
        let Some(active) = self.active.get_mut(index as usize) else { return };
        let completion = Completion { tag: active.tag, result: active.result };
        // The operation's memory is dropped before its end is visible.
        active.op = Op::Flush;
        self.free.push(index);
        done.push(completion);
    }

    /// Issues what waits in line, as far as it goes.
    pub(crate) fn pump(&mut self, done: &mut Vec<Completion>) {
        while let Some(index) = self.line.front().copied() {
            if !self.issue(index) {
                return;
            }
            self.line.pop_front();
            let Some(active) = self.active.get_mut(index as usize) else { continue };
            active.waiting = false;
            if active.parts == 0 {
                // The operation failed before its last part was issued.
                self.finish(index, done);
            }
        }
    }

    /// Fails all operations, later ones too, because nothing comes from the device any more.
    pub(crate) fn fail_all(&mut self, why: &str, done: &mut Vec<Completion>) {
        self.failed = true;
        if self.in_flight > 0 {
            let (queue, in_flight) = (self.index, self.in_flight);
            tracing::error!(queue, in_flight, "'{}': {why}", self.inner.session.name());
        }
        self.end_all(done);
    }

    /// Ends all submitted operations with an error. The device may go on writing to their memory; see `DmaPool`.
    pub(crate) fn end_all(&mut self, done: &mut Vec<Completion>) {
        self.line.clear();
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.clear();
        }
        let ring = self.ring.as_mut().or(self.draining.as_mut());
        self.inner.pool.add_orphans(ring.map_or(0, Ring::orphan_all));
        let free = std::mem::take(&mut self.free);
        for (index, active) in self.active.iter_mut().enumerate() {
            active.op = Op::Flush;
            if !free.contains(&(index as u32)) {
                done.push(Completion { tag: active.tag, result: Err(IoError::EIO) });
            }
        }
        self.active.clear();
    }
}

/// Returns what a status means to the submitter.
pub(crate) fn result_of(status: Status) -> IoResult {
    match status {
        Status::Ok => Ok(()),
        Status::Unsupported => Err(IoError::new(IoErrorKind::Unsupported)),
        Status::IoErr => Err(IoError::EIO),
    }
}
