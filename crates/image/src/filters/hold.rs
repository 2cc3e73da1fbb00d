//! A filter that holds requests which the storage fails. The guest waits instead of seeing an error, until somebody has
//! repaired the storage and lets the requests be tried again.
//!
//! Each request in flight is kept, so that it can be submitted again. A failed flush is always reported, and so is a
//! write with a flush before it. The kernel reports lost data once: a second flush would succeed without them. A durable
//! write is reported, too, unless it found no space: that is its own failure, never one of a sync.

use crate::filters::Filter;
use block::{Completion, DiskQueue, IoError, IoErrorKind, Op, OpFlags, Parts, ReactorCtx, Result, Tag, Timer};
use memory::to_usize;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Requests for which a new queue has room.
const ROOM: usize = 256;
/// The most timings that are kept until somebody takes them.
const TIMINGS_MAX: usize = 2048;
/// How often a queue that holds requests checks whether to try again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What happens when the storage fails a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ErrorPolicy {
    /// The guest gets the error.
    #[default]
    Report,
    /// The request waits until it is tried again.
    Hold,
}

impl ErrorPolicy {
    /// All policies with their names.
    pub const NAMES: [(&'static str, Self); 2] = [("report", Self::Report), ("hold", Self::Hold)];
}

/// The requests that a disk holds because the storage failed them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldRequests {
    /// How many there are.
    pub requests: usize,
    /// The error of the request that failed last.
    pub error: IoError,
}

/// Called when a disk begins to hold requests, on a reactor's thread: it must not wait.
pub type HoldListener = Box<dyn Fn(IoError) + Send + Sync>;

/// How many callers want requests to end with their errors, because the disk or an export is removed.
type Ending = Arc<AtomicUsize>;

fn give_up(ending: &Ending) -> GivingUp {
    ending.fetch_add(1, Ordering::Relaxed);
    GivingUp(Arc::clone(ending))
}

/// The state that a disk's queues share with whoever manages the disk.
#[derive(Default)]
pub struct HoldControl {
    holds_errors: AtomicBool,
    holds_no_space: AtomicBool,
    held: AtomicUsize,
    errno: AtomicI32,
    /// Rises with each call of [`HoldControl::try_again`].
    round: AtomicU64,
    ending: Ending,
    listener: OnceLock<HoldListener>,
}

impl fmt::Debug for HoldControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldControl").field("held", &self.held()).finish_non_exhaustive()
    }
}

impl HoldControl {
    /// Sets the policies for I/O errors and for lack of space; `None` keeps the present one.
    pub fn set_policies(&self, on_error: Option<ErrorPolicy>, on_no_space: Option<ErrorPolicy>) {
        for (policy, flag) in [(on_error, &self.holds_errors), (on_no_space, &self.holds_no_space)] {
            if let Some(policy) = policy {
                flag.store(policy == ErrorPolicy::Hold, Ordering::Relaxed);
            }
        }
    }

    /// Sets whom the disk tells when it begins to hold requests. Only the first call counts.
    pub fn listen(&self, listener: HoldListener) {
        // There is a listener already; this one is dropped.
        let _ = self.listener.set(listener);
    }

    /// Returns what is held, if anything is.
    #[must_use]
    pub fn held(&self) -> Option<HeldRequests> {
        let requests = self.held.load(Ordering::Relaxed);
        let error = IoError::from_errno(self.errno.load(Ordering::Relaxed));
        (requests > 0).then_some(HeldRequests { requests, error })
    }

    /// Submits all held requests again. Requests that fail again are held again.
    pub fn try_again(&self) {
        self.round.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends held requests of the whole disk with their errors, and holds no others until the result is dropped.
    #[must_use]
    pub fn give_up(&self) -> GivingUp {
        give_up(&self.ending)
    }

    fn holds(&self, op: &Op, error: IoError) -> bool {
        let policy = match error.kind() {
            IoErrorKind::NoSpace => &self.holds_no_space,
            IoErrorKind::Io => &self.holds_errors,
            // The request or the image is wrong: another try cannot help.
            _ => return false,
        };
        let flags = op.flags();
        let has_flush = matches!(op, Op::Flush) || flags.contains(OpFlags::PREFLUSH);
        let has_sync = flags.is_fua() && error.kind() != IoErrorKind::NoSpace;
        policy.load(Ordering::Relaxed) && !has_flush && !has_sync
    }

    fn begins_to_hold(&self, error: IoError) {
        self.errno.store(error.errno(), Ordering::Relaxed);
        if self.held.fetch_add(1, Ordering::Relaxed) == 0
            && let Some(listener) = self.listener.get()
        {
            listener(error);
        }
    }

    fn end_to_hold(&self, count: usize) {
        self.held.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Keeps requests from being held until dropped. See [`HoldControl::give_up`].
#[derive(Debug)]
pub struct GivingUp(Ending);

impl Drop for GivingUp {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The filter. See the module's documentation.
#[derive(Debug, Clone)]
pub struct Hold {
    control: Arc<HoldControl>,
    ending: Ending,
}

impl Hold {
    /// Makes a filter that obeys `control`. A disk can be seen through several.
    #[must_use]
    pub fn new(control: Arc<HoldControl>) -> Self {
        Self { control, ending: Ending::default() }
    }

    /// As [`HoldControl::give_up`], for what passes through this filter and its clones.
    #[must_use]
    pub fn give_up(&self) -> GivingUp {
        give_up(&self.ending)
    }

    fn is_ending(&self) -> bool {
        [&self.control.ending, &self.ending].iter().any(|ending| ending.load(Ordering::Relaxed) > 0)
    }
}

impl Filter for Hold {
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        Ok(Box::new(HoldQueue {
            below,
            hold: self.clone(),
            slots: Vec::with_capacity(ROOM),
            free: Vec::with_capacity(ROOM),
            held: Vec::new(),
            timings: Vec::with_capacity(ROOM),
            round: 0,
            timer: ctx.timer(),
            is_abandoned: false,
        }))
    }
}

struct Kept {
    tag: Tag,
    op: Op,
}

struct Held {
    slot: usize,
    error: IoError,
}

struct HoldQueue {
    below: Box<dyn DiskQueue>,
    hold: Hold,
    /// The requests in flight. A request's index here is its tag below.
    slots: Vec<Option<Kept>>,
    free: Vec<usize>,
    /// The held requests, in the order in which they failed.
    held: Vec<Held>,
    /// The timings from the queue below, with the tags from above.
    timings: Vec<(Tag, Parts)>,
    /// The round in which held requests were last tried.
    round: u64,
    /// Set while any request is held.
    timer: Timer,
    is_abandoned: bool,
}

impl HoldQueue {
    /// Takes a request out and drops it first: once its end is seen, nobody else has its memory.
    fn end(&mut self, slot: usize, result: block::IoResult) -> Option<Completion> {
        let Kept { tag, op } = self.slots.get_mut(slot)?.take()?;
        drop(op);
        self.free.push(slot);
        Some(Completion { tag, result })
    }

    /// Takes the timings below and replaces their tags, which are indices of slots. A slot is free for another request
    /// as soon as its own has ended.
    fn note_timings(&mut self) {
        let known = self.timings.len();
        if known >= TIMINGS_MAX {
            return;
        }
        self.below.take_timings(&mut self.timings);
        for (tag, _) in self.timings.iter_mut().skip(known) {
            let slot = usize::try_from(*tag).ok().and_then(|slot| self.slots.get(slot)?.as_ref());
            *tag = slot.map_or(Tag::MAX, |kept| kept.tag);
        }
    }

    fn is_held(&self, completion: &Completion) -> Option<Held> {
        let error = completion.result.err()?;
        let slot = usize::try_from(completion.tag).ok()?;
        let Kept { op, .. } = self.slots.get(slot)?.as_ref()?;
        (self.hold.control.holds(op, error) && !self.is_ending()).then_some(Held { slot, error })
    }

    fn is_ending(&self) -> bool {
        self.is_abandoned || self.hold.is_ending()
    }

    /// Submits the held requests again, or ends them, if somebody asked for it.
    fn look_after_held(&mut self, done: &mut Vec<Completion>) {
        if self.is_ending() {
            self.hold.control.end_to_hold(self.held.len());
            while let Some(Held { slot, error }) = self.held.pop() {
                done.extend(self.end(slot, Err(error)));
            }
        } else if self.hold.control.round.load(Ordering::Relaxed) != self.round {
            self.hold.control.end_to_hold(self.held.len());
            for Held { slot, .. } in self.held.drain(..) {
                if let Some(Some(Kept { op, .. })) = self.slots.get(slot) {
                    self.below.submit(slot as Tag, op.clone());
                }
            }
        }
        match self.held.is_empty() {
            true => self.timer.clear(),
            false => {
                let now = self.timer.now();
                self.timer.set(now.checked_add(LOOK_AGAIN).unwrap_or(now));
            }
        }
    }
}

impl DiskQueue for HoldQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let kept = Some(Kept { tag, op: op.clone() });
        let slot = match self.free.pop() {
            Some(slot) => {
                if let Some(place) = self.slots.get_mut(slot) {
                    *place = kept;
                }
                slot
            }
            None => {
                self.slots.push(kept);
                self.slots.len().saturating_sub(1)
            }
        };
        self.below.submit(slot as Tag, op);
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        let start = done.len();
        if self.below.harvest(done) > 0 {
            self.note_timings();
        }
        let mut end = start;
        for index in start..done.len() {
            let Some(completion) = done.get(index).copied() else { break };
            if let Some(held) = self.is_held(&completion) {
                if self.held.is_empty() {
                    // Earlier calls to try again concern earlier failures.
                    self.round = self.hold.control.round.load(Ordering::Relaxed);
                    let now = self.timer.now();
                    self.timer.set(now.checked_add(LOOK_AGAIN).unwrap_or(now));
                }
                self.hold.control.begins_to_hold(held.error);
                self.held.push(held);
                continue;
            }
            let slot = to_usize(completion.tag);
            if let (Some(ended), Some(place)) = (self.end(slot, completion.result), done.get_mut(end)) {
                *place = ended;
                end = end.saturating_add(1);
            }
        }
        done.truncate(end);
        if !self.held.is_empty() && (self.is_abandoned || self.timer.is_due()) {
            self.look_after_held(done);
        }
        done.len().saturating_sub(start)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight().saturating_add(self.held.len())
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
        self.below.abandon();
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        timings.append(&mut self.timings);
    }
}

impl Drop for HoldQueue {
    fn drop(&mut self) {
        self.hold.control.end_to_hold(self.held.len());
    }
}
