//! The plain path: each operation becomes one ring request, or several where the device's limits ask for it.
//!
//! Operations are issued in the order of submission. One that does not fit into the ring, or finds no bounce buffer,
//! waits in line, and so does everything after it. Thus nothing overtakes a flush. Memory that the device shares is
//! named in the request directly; other memory is copied through bounce buffers.

use crate::driver::Inner;
use crate::issue::{MAX_REQUEST_BYTES, Way, copy_bounced, issue_data, issue_range, issue_zeros, range_segment};
use crate::layout::BOUNCE_BYTES;
use crate::ring::{ORPHAN, Ring};
use block::{Completion, DiskQueue, IoError, IoErrorKind, IoResult, Op, OpFlags, Poller, PollerId, ReactorCtx, Tag};
use memory::{IoBuf, Window};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use virtio::blk::{RangeSegment, RequestHeader, Status, request_type};
use virtio::driver_ring::AddError;

/// An operation that was submitted and has not completed.
#[derive(Debug)]
struct Active {
    tag: Tag,
    op: Op,
    /// Bytes of it that were issued.
    issued: u64,
    /// Its requests in the ring.
    parts: u32,
    /// It has to be issued further: it is in line.
    waiting: bool,
    /// A flush goes after the data (FUA on a device with a volatile cache).
    fua: bool,
    stage: Stage,
    result: IoResult,
}

/// Where an operation stands. The next stage begins when all requests of the one before have succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The flush before its data.
    Preflush,
    /// What it is about; a flush itself too.
    Data,
    /// The flush after its data.
    Flush,
}

/// What requests need to know of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) block_bytes: u64,
    pub(crate) read_only: bool,
    pub(crate) flush: bool,
    /// Zero where the device does not serve it.
    pub(crate) max_discard_sectors: u32,
    pub(crate) max_write_zeroes_sectors: u32,
}

/// A queue without its registration with the reactor.
struct Core {
    /// `None` once the queue was dropped.
    ring: Option<Ring>,
    inner: Arc<Inner>,
    rules: Rules,
    active: Vec<Active>,
    free: Vec<u32>,
    line: VecDeque<u32>,
    /// Completed without the device.
    immediate: Vec<Completion>,
    in_flight: usize,
    /// The bounce buffers, by index.
    bounce: Vec<Window>,
    /// First address of the shared memory, and its bytes.
    shared: (usize, usize),
    /// The device is gone or broke the ring: everything fails.
    failed: bool,
    armed: bool,
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
            inner: Arc::clone(inner),
            rules: inner.rules(),
            active: Vec::new(),
            free: Vec::new(),
            line: VecDeque::new(),
            immediate: Vec::new(),
            in_flight: 0,
            bounce: slots.map(|index| whole.slice(index * BOUNCE_BYTES, BOUNCE_BYTES)).collect(),
            shared,
            failed: false,
            armed: false,
            ring: Some(ring),
        };
        let core = Rc::new(RefCell::new(core));
        // Whatever fails from here on drops the core, which parks the ring.
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
        let published = self.ring.as_mut().is_some_and(Ring::publish);
        published || self.has_news()
    }

    fn arm(&mut self) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        ring.publish();
        self.armed = true;
        ring.enable_callbacks() || self.has_news()
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed)
            && let Some(ring) = &self.ring
        {
            ring.fds.wakeups.fetch_add(1, Ordering::Relaxed);
            ring.disable_callbacks();
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.ring.as_ref().map(|ring| ring.fds.call.as_fd())
    }
}

impl Core {
    /// Whether harvesting would give something.
    fn has_news(&self) -> bool {
        let used = self.ring.as_ref().is_some_and(Ring::has_used);
        !self.immediate.is_empty() || (!self.failed && (used || (self.in_flight > 0 && self.is_over())))
    }

    fn is_over(&self) -> bool {
        let given_up = |ring: &Ring| ring.fds.given_up.load(Ordering::Relaxed);
        self.inner.session.watch.is_gone() || self.ring.as_ref().is_none_or(given_up)
    }

    /// Gives the ring back to the driver; requests in flight go on without an owner.
    fn park(&mut self) {
        let Some(mut ring) = self.ring.take() else { return };
        ring.publish();
        ring.disable_callbacks();
        let orphans = ring.orphan_all();
        // Before the operations' buffers are dropped: the device may still write to them.
        self.inner.pool.add_orphans(orphans);
        self.active.clear();
        self.line.clear();
        self.inner.park(ring);
    }

    fn submit(&mut self, tag: Tag, op: Op) {
        self.in_flight += 1;
        let result = if self.failed { Err(IoError::EIO) } else { self.admit(&op) };
        match result {
            Ok(true) => {}
            Ok(false) => return self.immediate.push(Completion { tag, result: Ok(()) }),
            Err(error) => return self.immediate.push(Completion { tag, result: Err(error) }),
        }
        let flags = if self.has_volatile_cache() { op.flags() } else { OpFlags::NONE };
        let stage = if flags.is_preflush() { Stage::Preflush } else { Stage::Data };
        let fua = flags.is_fua();
        let active = Active { tag, op, issued: 0, parts: 0, waiting: false, fua, stage, result: Ok(()) };
        let index = match self.free.pop() {
            Some(index) => {
                if let Some(place) = self.active.get_mut(index as usize) {
                    *place = active;
                }
                index
            }
            None => {
                self.active.push(active);
                // Whatever ends or waits together later has room.
                self.free.reserve(self.active.len());
                self.line.reserve(self.active.len().saturating_sub(self.line.len()));
                // The number of operations at once is bounded by the submitter's memory.
                (self.active.len() - 1) as u32
            }
        };
        if !self.line.is_empty() || !self.issue(index) {
            return self.wait_in_line(index);
        }
        if self.active.get(index as usize).is_some_and(|active| active.parts == 0) {
            // No ring could hold it: its end comes with the next harvest.
            let mut done = std::mem::take(&mut self.immediate);
            self.finish(index, &mut done);
            self.immediate = done;
        }
    }

    fn wait_in_line(&mut self, index: u32) {
        if let Some(active) = self.active.get_mut(index as usize) {
            active.waiting = true;
            self.line.push_back(index);
        }
    }

    fn has_volatile_cache(&self) -> bool {
        self.rules.flush && self.inner.volatile_cache.load(Ordering::Relaxed)
    }

    /// Whether the operation has to go to the device; refused operations are an error.
    fn admit(&self, op: &Op) -> IoResult<bool> {
        if op.is_write() && self.rules.read_only {
            return Err(IoError::new(IoErrorKind::ReadOnly));
        }
        let Some((offset, length)) = op.range() else {
            return Ok(self.has_volatile_cache());
        };
        let size_bytes = self.inner.size_bytes.load(Ordering::Relaxed);
        let inside = offset.checked_add(length).is_some_and(|end| end <= size_bytes);
        if !inside || (offset | length) & (self.rules.block_bytes - 1) != 0 {
            return Err(IoError::new(IoErrorKind::OutOfRange));
        }
        match op {
            Op::Discard { .. } if self.rules.max_discard_sectors == 0 => Err(IoError::new(IoErrorKind::Unsupported)),
            _ => Ok(length > 0 || (op.flags().is_preflush() && self.has_volatile_cache())),
        }
    }

    /// Issues what is left of an operation; false if something remains for later.
    fn issue(&mut self, index: u32) -> bool {
        let Some(ring) = &mut self.ring else { return true };
        let Some(active) = self.active.get_mut(index as usize) else { return true };
        let length = active.op.range().map_or(0, |(_, length)| length);
        loop {
            if active.stage != Stage::Data || matches!(active.op, Op::Flush) {
                ring.begin();
                let header = RequestHeader { kind: request_type::FLUSH, priority: 0, sector: 0 };
                if ring.start(header, index, 0, 0).is_err() {
                    return false;
                }
                active.parts += 1;
                return true;
            }
            if active.issued >= length || active.result.is_err() {
                return true;
            }
            if !ring.has_room() {
                return false;
            }
            let issued = match &active.op {
                Op::Read { offset, data, priority } => {
                    let way = Way { kind: request_type::IN, offset: *offset, priority: *priority, shared: self.shared };
                    issue_data(ring, &self.bounce, &self.rules, way, data, active.issued as usize, index)
                }
                Op::Write { offset, data, priority, .. } => {
                    let way =
                        Way { kind: request_type::OUT, offset: *offset, priority: *priority, shared: self.shared };
                    issue_data(ring, &self.bounce, &self.rules, way, data, active.issued as usize, index)
                }
                Op::Discard { offset, .. } => {
                    let most = self.rules.max_discard_sectors;
                    let range = range_segment(offset + active.issued, length - active.issued, most, &self.rules, 0);
                    issue_range(ring, request_type::DISCARD, range, index)
                }
                Op::WriteZeroes { offset, may_unmap, .. } if self.rules.max_write_zeroes_sectors > 0 => {
                    let flags = if *may_unmap { RangeSegment::UNMAP } else { 0 };
                    let most = self.rules.max_write_zeroes_sectors;
                    let range = range_segment(offset + active.issued, length - active.issued, most, &self.rules, flags);
                    issue_range(ring, request_type::WRITE_ZEROES, range, index)
                }
                Op::WriteZeroes { offset, .. } => {
                    let left = usize::try_from(length - active.issued).unwrap_or(MAX_REQUEST_BYTES);
                    issue_zeros(ring, &self.bounce, &self.rules, offset + active.issued, left, index)
                }
                Op::Flush => Ok(0),
            };
            match issued {
                Ok(bytes) => {
                    active.issued += bytes;
                    active.parts += 1;
                }
                Err(AddError::Full) => return false,
                Err(AddError::TooLong { .. }) => active.result = Err(IoError::EIO),
            }
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        // Before the used ring, so that what the device completed before it went is seen.
        let over = !self.failed && self.is_over();
        if !self.failed {
            self.drain(done);
        }
        if over && !self.failed {
            self.fail_all("the connection is over or the device gave the ring up", done);
        }
        if !self.immediate.is_empty() {
            done.append(&mut self.immediate);
        }
        if !self.line.is_empty() {
            self.pump(done);
        }
        let count = done.len() - before;
        self.in_flight -= count;
        count
    }

    fn drain(&mut self, done: &mut Vec<Completion>) {
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
        if index == ORPHAN {
            ring.free_bounce(head);
            return self.inner.pool.orphan_done();
        }
        let Some(active) = self.active.get_mut(index as usize) else { return };
        match status {
            Status::Ok => {}
            Status::Unsupported => active.result = Err(IoError::new(IoErrorKind::Unsupported)),
            Status::IoErr => active.result = Err(IoError::EIO),
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

    /// Every request of the operation that was issued has ended, and nothing is left to issue.
    fn finish(&mut self, index: u32, done: &mut Vec<Completion>) {
        while self.next_stage(index) {
            if !self.line.is_empty() || !self.issue(index) {
                return self.wait_in_line(index);
            }
            if self.active.get(index as usize).is_none_or(|active| active.parts > 0) {
                return;
            }
            // Nothing to issue, or no ring could hold it.
        }
        let Some(active) = self.active.get_mut(index as usize) else { return };
        let completion = Completion { tag: active.tag, result: active.result };
        // The operation's memory is let go before its end is visible.
        active.op = Op::Flush;
        self.free.push(index);
        done.push(completion);
    }

    /// Moves an operation on to what follows its stage; false if that is its end.
    fn next_stage(&mut self, index: u32) -> bool {
        let Some(active) = self.active.get_mut(index as usize).filter(|active| active.result.is_ok()) else {
            return false;
        };
        active.stage = match active.stage {
            Stage::Preflush => Stage::Data,
            Stage::Data if active.fua => Stage::Flush,
            Stage::Data | Stage::Flush => return false,
        };
        true
    }

    /// Issues what waits in line, as far as it goes.
    fn pump(&mut self, done: &mut Vec<Completion>) {
        while let Some(index) = self.line.front().copied() {
            if !self.issue(index) {
                return;
            }
            self.line.pop_front();
            let Some(active) = self.active.get_mut(index as usize) else { continue };
            active.waiting = false;
            if active.parts == 0 {
                // It failed before its last part was issued.
                self.finish(index, done);
            }
        }
    }

    /// Nothing comes from the device any more: everything submitted fails, also in the future.
    fn fail_all(&mut self, why: &str, done: &mut Vec<Completion>) {
        self.failed = true;
        let queue = self.ring.as_ref().map_or(0, |ring| ring.index);
        if self.in_flight > 0 {
            tracing::error!(queue, in_flight = self.in_flight, "'{}': {why}", self.inner.session.path().display());
        }
        self.line.clear();
        // The device may go on writing to what these name; see `DmaPool`.
        let orphans = self.ring.as_mut().map_or(0, Ring::orphan_all);
        self.inner.pool.add_orphans(orphans);
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
