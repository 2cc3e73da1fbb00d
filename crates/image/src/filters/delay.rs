//! A filter that makes a disk slow. Each request waits before it begins: for its turn on a link, where each request and
//! each byte takes its time, and for a time that is fixed or varies. The filter stands for distant storage in tests and measurements.

use crate::filters::Filter;
use block::{Completion, DiskQueue, IoError, Op, Parts, ReactorCtx, Result, Tag, Timer};
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
    /// The time that each request takes on the link, whatever its length, as a command does on a bus.
    pub request: Duration,
    /// Each request is delayed by up to this time more, at random. So requests overtake each other.
    pub jitter: Duration,
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
    jitter: Duration,
    link: Option<Arc<Link>>,
}

impl Delay {
    /// Makes a filter with these options.
    #[must_use]
    pub fn new(options: DelayOptions) -> Self {
        let DelayOptions { delay, bytes_per_second, request, jitter } = options;
        let has_link = bytes_per_second.is_some() || !request.is_zero();
        let request_ns = u64::try_from(request.as_nanos()).unwrap_or(u64::MAX);
        let link = Link { rate: bytes_per_second.unwrap_or(u64::MAX).max(1), request_ns, ..Link::default() };
        Self { delay, jitter, link: has_link.then(|| Arc::new(link)) }
    }
}

impl Filter for Delay {
    fn open_queue(&self, below: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>) -> Result<Box<dyn DiskQueue>> {
        let (link, timer) = (self.link.clone(), ctx.timer());
        let (delay, jitter_ns) = (self.delay, u64::try_from(self.jitter.as_nanos()).unwrap_or(u64::MAX));
        let waiting = VecDeque::with_capacity(ROOM);
        let (random, is_abandoned, ended) = (1, false, Vec::new());
        Ok(Box::new(DelayQueue { below, delay, jitter_ns, random, link, waiting, timer, is_abandoned, ended }))
    }
}

/// A link that all queues share. It carries one transfer after the other.
#[derive(Debug, Default)]
struct Link {
    /// Bytes a second.
    rate: u64,
    /// What a request takes beside its bytes.
    request_ns: u64,
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
        let takes_ns = u64::try_from(nanos).unwrap_or(u64::MAX).saturating_add(self.request_ns);
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
    jitter_ns: u64,
    /// The state of the random numbers for the jitter, the same in each run. Never zero.
    random: u64,
    link: Option<Arc<Link>>,
    /// In the order in which they begin. Without jitter that is the order in which they came.
    waiting: VecDeque<Late>,
    /// Set for the first request that waits.
    timer: Timer,
    is_abandoned: bool,
    /// What ended without being passed on, since the queue was abandoned.
    ended: Vec<Completion>,
}

impl DelayQueue {
    fn due(&mut self, op: &Op) -> Instant {
        let late = self.late();
        let now = self.timer.now();
        let begins = match &self.link {
            Some(link) => link.carry(now, payload_bytes(op)),
            None => now,
        };
        // A time too large to represent never comes, so any far time will do.
        let far = || now.checked_add(Duration::from_secs(u64::from(u32::MAX))).unwrap_or(now);
        self.delay.checked_add(late).and_then(|late| begins.checked_add(late)).unwrap_or_else(far)
    }

    /// Returns the random part of the next request's delay.
    fn late(&mut self) -> Duration {
        if self.jitter_ns == 0 {
            return Duration::ZERO;
        }
        // Xorshift, by Marsaglia.
        self.random ^= self.random.wrapping_shl(13);
        self.random ^= self.random.wrapping_shr(7);
        self.random ^= self.random.wrapping_shl(17);
        Duration::from_nanos(self.random.checked_rem(self.jitter_ns.saturating_add(1)).unwrap_or(0))
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
        if self.is_abandoned {
            return self.ended.push(Completion { tag, result: Err(IoError::EIO) });
        }
        let due = self.due(&op);
        let at = match self.jitter_ns {
            0 => self.waiting.len(),
            _ => self.waiting.partition_point(|late| late.due <= due),
        };
        if at == 0 {
            self.timer.set(due);
        }
        self.waiting.insert(at, Late { due, tag, op });
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
        let ended = self.ended.len();
        done.append(&mut self.ended);
        self.below.harvest(done).saturating_add(ended)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight().saturating_add(self.waiting.len()).saturating_add(self.ended.len())
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
        let waiting = self.waiting.drain(..);
        self.ended.extend(waiting.map(|Late { tag, .. }| Completion { tag, result: Err(IoError::EIO) }));
        self.timer.clear();
        self.below.abandon();
    }

    fn take_timings(&mut self, timings: &mut Vec<(Tag, Parts)>) {
        self.below.take_timings(timings);
    }
}
