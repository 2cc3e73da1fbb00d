//! A filter that makes a disk slow. Each request waits before it begins: for its turn on a link of limited bandwidth,
//! and for a fixed time. The filter stands for distant storage in tests and measurements.

use crate::filters::Filter;
use block::{Completion, DiskQueue, Op, Parts, ReactorCtx, Result, Tag, Timer};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Requests for which a new queue has room.
const ROOM: usize = 256;

/// How a disk is slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DelayOptions {
    /// The delay before each request begins. Requests wait at the same time.
    pub delay: Duration,
    /// The bandwidth of the link, which all queues share: the data of reads and writes pass one after the other. `None`
    /// for no limit. The delay comes on top.
    pub bytes_per_second: Option<u64>,
}

impl DelayOptions {
    /// Returns options with a delay and no other limit.
    #[must_use]
    pub fn of(delay: Duration) -> Self {
        Self { delay, ..Self::default() }
    }

    /// Changes some of the options: `DelayOptions::default().with(|options| ...)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// The filter. See the module's documentation.
#[derive(Debug)]
pub struct Delay {
    delay: Duration,
    link: Option<Arc<Link>>,
}

impl Delay {
    /// Makes a filter with these options.
    #[must_use]
    pub fn new(options: DelayOptions) -> Self {
        let link = options.bytes_per_second.map(|rate| Arc::new(Link { rate: rate.max(1), ..Link::default() }));
        Self { delay: options.delay, link }
    }
}

impl Filter for Delay {
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let (link, timer) = (self.link.clone(), ctx.timer());
        Ok(Box::new(DelayQueue { below, delay: self.delay, link, waiting: VecDeque::with_capacity(ROOM), timer }))
    }
}

/// A link that all queues share. It carries one transfer after the other.
#[derive(Debug, Default)]
struct Link {
    /// Bytes a second.
    rate: u64,
    /// The time from which `free_at_ns` counts.
    start: OnceLock<Instant>,
    free_at_ns: AtomicU64,
}

impl Link {
    /// Returns when the last of `length_bytes`, sent now, has passed.
    fn carry(&self, now: Instant, length_bytes: u64) -> Instant {
        let start = *self.start.get_or_init(|| now);
        let now_ns = u64::try_from(now.saturating_duration_since(start).as_nanos()).unwrap_or(u64::MAX);
        let nanos = u128::from(length_bytes).saturating_mul(1_000_000_000).div_ceil(u128::from(self.rate));
        let takes_ns = u64::try_from(nanos).unwrap_or(u64::MAX);
        let passed = |free_at_ns: u64| free_at_ns.max(now_ns).saturating_add(takes_ns);
        let before = self.free_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(passed(free)));
        let free_at_ns = before.map_or(now_ns, passed);
        start.checked_add(Duration::from_nanos(free_at_ns)).unwrap_or(now)
    }
}

struct Late {
    due: Instant,
    tag: Tag,
    op: Op,
}

struct DelayQueue {
    below: Box<dyn DiskQueue>,
    delay: Duration,
    link: Option<Arc<Link>>,
    /// In the order in which they begin: the delay is the same for all, and the link keeps the order.
    waiting: VecDeque<Late>,
    /// Set for the first request that waits.
    timer: Timer,
}

impl DelayQueue {
    fn due(&self, op: &Op) -> Instant {
        let now = self.timer.now();
        let begins = match &self.link {
            Some(link) => link.carry(now, payload_bytes(op)),
            None => now,
        };
        // A time too large to represent never comes, so any far time will do.
        let far = || now.checked_add(Duration::from_secs(u64::from(u32::MAX))).unwrap_or(now);
        begins.checked_add(self.delay).unwrap_or_else(far)
    }
}

fn payload_bytes(op: &Op) -> u64 {
    match op {
        Op::Read { data, .. } | Op::Write { data, .. } => data.length_bytes() as u64,
        Op::Flush | Op::Discard { .. } | Op::SecureErase { .. } | Op::WriteZeroes { .. } => 0,
    }
}

impl DiskQueue for DelayQueue {
    fn submit(&mut self, tag: Tag, op: Op) {
        let due = self.due(&op);
        if self.waiting.is_empty() {
            self.timer.set(due);
        }
        self.waiting.push_back(Late { due, tag, op });
    }

    fn harvest(&mut self, done: &mut Vec<Completion>) -> usize {
        if self.timer.is_due() {
            self.timer.clear();
            let now = self.timer.now();
            while self.waiting.front().is_some_and(|late| late.due <= now) {
                let Some(Late { tag, op, .. }) = self.waiting.pop_front() else { break };
                self.below.submit(tag, op);
            }
            if let Some(next) = self.waiting.front() {
                self.timer.set(next.due);
            }
        }
        self.below.harvest(done)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight().saturating_add(self.waiting.len())
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.below.take_timings(timings);
    }
}
