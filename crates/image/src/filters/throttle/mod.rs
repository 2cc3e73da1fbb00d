//! A filter that bounds the rate of a disk: requests and bytes a second, of reads, of writes, and of both.
//!
//! Requests that come too fast wait in the order in which they came. Reads and writes have separate lines, so that reads
//! which reach a limit of reads hold up no write. Requests pass one by one at even distances, not all at once at the
//! beginning of a period. Flushes never wait.
//!
//! Limits belong to a [`ThrottleGroup`], which disks can share. Disks that wait get equal shares, however many requests
//! each has in flight. A disk that is ahead of another waiting disk is held back.
//!
//! When a disk or one of its exports ends, its waiting requests pass at once: the storage is well, so nobody should get
//! an error.

mod group;
mod rates;
#[cfg(test)]
mod tests;

pub use group::ThrottleGroup;
pub use rates::{Rate, Rates, ThrottleLimits};

use crate::filters::Filter;
use block::{Completion, DiskQueue, IoError, Op, Part, Parts, ReactorCtx, Result, Tag, Timer};
use group::{Load, nanos};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Requests for which a new line has room.
const ROOM: usize = 256;
/// The most timings that are kept until somebody takes them: more than a ring has requests.
const TIMINGS_MAX: usize = 2048;
/// How often a queue whose requests wait looks again at the latest: others may have set new limits, or lifted them.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The filter. See the module's documentation.
#[derive(Debug)]
pub struct Throttle {
    member: Arc<ThrottleMember>,
}

/// A disk's place in its group.
#[derive(Debug)]
pub struct ThrottleMember {
    group: Arc<ThrottleGroup>,
    id: u64,
    waited_ns: AtomicU64,
    /// How many callers want all requests to pass.
    lifted: AtomicUsize,
}

/// Keeps a disk's limits from holding requests up until dropped. See [`ThrottleMember::lift`].
#[derive(Debug)]
pub struct LiftedLimits(Arc<ThrottleMember>);

impl Drop for LiftedLimits {
    fn drop(&mut self) {
        self.0.lifted.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ThrottleMember {
    /// Lets all requests of this disk pass, uncounted, until the result is dropped. Other disks of the group keep their
    /// shares.
    #[must_use]
    pub fn lift(self: &Arc<Self>) -> LiftedLimits {
        self.lifted.fetch_add(1, Ordering::Relaxed);
        LiftedLimits(Arc::clone(self))
    }

    fn is_lifted(&self) -> bool {
        self.lifted.load(Ordering::Relaxed) > 0
    }

    /// Returns the group.
    #[must_use]
    pub fn group(&self) -> &ThrottleGroup {
        &self.group
    }

    /// Returns how long requests of this disk have waited, in total.
    #[must_use]
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }
}

impl Drop for ThrottleMember {
    fn drop(&mut self) {
        self.group.leave(self.id);
    }
}

impl Throttle {
    /// Makes a filter whose disk is a member of `group`.
    #[must_use]
    pub fn new(group: Arc<ThrottleGroup>) -> Self {
        let id = group.join();
        let (waited_ns, lifted) = (AtomicU64::new(0), AtomicUsize::new(0));
        Self { member: Arc::new(ThrottleMember { group, id, waited_ns, lifted }) }
    }

    /// Returns the disk's place in its group.
    #[must_use]
    pub fn member(&self) -> Arc<ThrottleMember> {
        Arc::clone(&self.member)
    }
}

impl Filter for Throttle {
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let lines = [VecDeque::with_capacity(ROOM), VecDeque::with_capacity(ROOM)];
        let timings = Vec::with_capacity(ROOM);
        let (member, timer) = (Arc::clone(&self.member), ctx.timer());
        let (waits, is_abandoned, ended) = (false, false, Vec::new());
        Ok(Box::new(ThrottleQueue { below, member, lines, timings, waits, timer, is_abandoned, ended }))
    }
}

struct Waiting {
    since: Instant,
    load: Load,
    tag: Tag,
    op: Op,
}

struct ThrottleQueue {
    below: Box<dyn DiskQueue>,
    member: Arc<ThrottleMember>,
    /// Waiting reads, and waiting writes.
    lines: [VecDeque<Waiting>; 2],
    /// How long the requests that passed have waited.
    timings: Vec<(Tag, Parts)>,
    /// Whether the group knows that this queue waits.
    waits: bool,
    timer: Timer,
    is_abandoned: bool,
    /// What ended without being passed on, since the queue was abandoned.
    ended: Vec<Completion>,
}

impl ThrottleQueue {
    /// Returns the load of the request that came first, and the state of its line. Without this order, reads without end
    /// would hold up every write. `pass` counts requests that pass already; lines that are not open are left out.
    fn first_of<'a>(
        &self,
        pass: &'a mut [usize; 2],
        is_open: &'a mut [bool; 2],
    ) -> Option<(Load, &'a mut usize, &'a mut bool)> {
        let lines = self.lines.iter().zip(pass).zip(is_open).filter(|(_, is_open)| **is_open);
        let heads = lines.filter_map(|((line, pass), is_open)| Some((line.get(*pass)?, pass, is_open)));
        heads.min_by_key(|(waiting, ..)| waiting.since).map(|(waiting, pass, is_open)| (waiting.load, pass, is_open))
    }

    /// Submits all requests that may pass, and sets the timer for the next.
    fn let_pass(&mut self) {
        let group = &self.member.group;
        let now = self.timer.now();
        let now_ns = group.now_ns(now);
        let mut next: Option<Instant> = None;
        let is_lifted = self.member.is_lifted();
        let mut pass = if is_lifted { self.lines.each_ref().map(VecDeque::len) } else { [0; 2] };
        {
            let mut state = group.lock();
            let mut is_open = [true; 2];
            while let Some((load, pass, is_open)) = self.first_of(&mut pass, &mut is_open) {
                match state.take(self.member.id, now_ns, load) {
                    Ok(()) => *pass = usize::saturating_add(*pass, 1),
                    Err(again_ns) => {
                        *is_open = false;
                        // A time too large to represent never comes.
                        next = [next, group.at(again_ns)].into_iter().flatten().min();
                    }
                }
            }
            let waits = self.lines.iter().zip(pass).any(|(line, pass)| line.len() > pass);
            match (self.waits, waits) {
                (false, true) => state.begins_to_wait(self.member.id),
                (true, false) => state.ends_to_wait(self.member.id),
                _ => {}
            }
            self.waits = waits;
        }
        // After the lock is released: a disk in memory carries a request out while it is submitted.
        for (line, pass) in self.lines.iter_mut().zip(pass) {
            for Waiting { since, tag, op, .. } in line.drain(..pass) {
                let waited = now.saturating_duration_since(since);
                if !waited.is_zero() {
                    self.member.waited_ns.fetch_add(nanos(waited), Ordering::Relaxed);
                    // Not every owner of a queue takes the timings.
                    if self.timings.len() < TIMINGS_MAX {
                        self.timings.push((tag, Parts::of(Part::Throttle, waited)));
                    }
                }
                self.below.submit(tag, op);
            }
        }
        let again = if self.waits { now.checked_add(LOOK_AGAIN) } else { None };
        match next.into_iter().chain(again).min() {
            Some(next) => self.timer.set(next),
            None => self.timer.clear(),
        }
    }
}

impl DiskQueue for ThrottleQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let Some(load) = Load::of(&op) else { return self.below.submit(tag, op) };
        if self.is_abandoned {
            return self.ended.push(Completion { tag, result: Err(IoError::EIO) });
        }
        let [reads, writes] = &mut self.lines;
        let line = if load.is_write { writes } else { reads };
        let is_first = line.is_empty();
        line.push_back(Waiting { since: self.timer.now(), load, tag, op });
        if is_first {
            self.let_pass();
        }
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.timer.is_due() {
            self.let_pass();
        }
        let ended = self.ended.len();
        done.append(&mut self.ended);
        self.below.harvest(done).saturating_add(ended)
    }

    fn in_flight(&self) -> usize {
        let waiting = self.lines.iter().map(VecDeque::len).fold(self.ended.len(), usize::saturating_add);
        self.below.in_flight().saturating_add(waiting)
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
        let waiting = self.lines.iter_mut().flat_map(|line| line.drain(..));
        self.ended.extend(waiting.map(|Waiting { tag, .. }| Completion { tag, result: Err(IoError::EIO) }));
        if std::mem::take(&mut self.waits) {
            self.member.group.lock().ends_to_wait(self.member.id);
        }
        self.timer.clear();
        self.below.abandon();
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        timings.append(&mut self.timings);
        self.below.take_timings(timings);
    }
}

impl Drop for ThrottleQueue {
    fn drop(&mut self) {
        if self.waits {
            self.member.group.lock().ends_to_wait(self.member.id);
        }
    }
}
