//! How long requests take: histograms of each queue, and the clock that fills them.
//!
//! Only the reactor's thread writes, by plain loads and stores; any thread may read. The clock is read for a batch and
//! not for a request. A disk that answers within the turn in which it was asked is timed in one such turn of eight:
//! there the clock would cost more than one part in a hundred.

use super::counters::Counter;
use crate::latency::Rest;
use crate::{DiskQueue, Part, Parts, Tag};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Buckets of a histogram: up to a microsecond, up to two, up to four and so on; the last has no upper bound.
pub const LATENCY_BUCKETS: usize = 28;

/// Kinds of requests that are counted apart.
const KINDS: usize = 6;
const NAMES: [&str; KINDS] = ["read", "write", "flush", "discard", "write-zeroes", "secure-erase"];

/// Reads; a kind of request, as those that follow.
pub const READ: u64 = 0;
/// Writes.
pub const WRITE: u64 = 1;
/// Flushes.
pub const FLUSH: u64 = 2;
/// Discards.
pub const DISCARD: u64 = 3;
/// Zeroes.
pub const WRITE_ZEROES: u64 = 4;
/// Secure erases.
pub const SECURE_ERASE: u64 = 5;

/// The part of a request's key that is its kind; the rest is when it was taken, and two flags.
pub const KIND_BITS: u64 = 7;
/// Its own parts are known.
const HAS_PARTS: u64 = 8;
/// A task carried it out that nobody timed: it did what the last one of its kind did that was.
const AS_BEFORE: u64 = 16;
const KEY_SHIFT: u32 = 5;
/// Stands for a time in a turn that was not timed.
const UNTIMED: u64 = 1 << KEY_SHIFT;

/// One of so many quick turns is timed.
const TIMED_EVERY: u32 = 8;
/// A turn that took longer is no quick one.
const QUICK_NS: u64 = 20_000;

/// Nanoseconds since some moment before the first queue began.
fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let elapsed = START.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).saturating_add(2) & (u64::MAX >> KEY_SHIFT)
}

/// Times, with one writer.
#[derive(Debug, Default)]
struct Histogram {
    buckets: [Counter; LATENCY_BUCKETS],
    sum_ns: Counter,
}

impl Histogram {
    #[inline]
    fn add(&self, ns: u64, count: u64) {
        let bucket = self.buckets.get(bucket_of(ns)).or(self.buckets.last());
        if let Some(bucket) = bucket {
            bucket.add(count as usize);
        }
        self.sum_ns.add(ns.wrapping_mul(count) as usize);
    }

    fn snapshot(&self) -> LatencyHistogram {
        let mut buckets = [0; LATENCY_BUCKETS];
        for (bucket, counter) in buckets.iter_mut().zip(&self.buckets) {
            *bucket = counter.get();
        }
        LatencyHistogram { buckets, sum_ns: self.sum_ns.get() }
    }
}

/// The first bucket whose upper bound is not below `ns`.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let whole_us = ns.saturating_sub(1) / 1000;
    (u64::BITS.wrapping_sub(whole_us.leading_zeros()) as usize).min(LATENCY_BUCKETS.wrapping_sub(1))
}

/// How long requests took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencyHistogram {
    /// How many took no longer than a microsecond, than two, than four and so on, and longer than the bucket before. The
    /// last has no bound.
    pub buckets: [u64; LATENCY_BUCKETS],
    /// All together, in nanoseconds.
    pub sum_ns: u64,
}

impl LatencyHistogram {
    /// The upper bounds of all buckets but the last, in nanoseconds.
    pub fn bounds_ns() -> impl Iterator<Item = u64> {
        (0..u32::try_from(LATENCY_BUCKETS).unwrap_or(0).saturating_sub(1)).map(|bucket| 1000_u64.wrapping_shl(bucket))
    }

    /// How many requests there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().copied().fold(0, u64::wrapping_add)
    }

    /// Those of both.
    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in self.buckets.iter_mut().zip(other.buckets) {
            *sum = sum.wrapping_add(more);
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }
}

/// The requests of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KindLatency {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes` or `secure-erase`.
    pub kind: &'static str,
    /// Bytes of data that were moved.
    pub bytes: u64,
    /// From when a request was taken until its end was published, and the guest was told, if it was.
    pub whole: LatencyHistogram,
    /// What they spent on each part, in the order of [`Part::NAMES`].
    pub parts: [LatencyHistogram; Part::COUNT],
}

/// What a queue says of how long its requests take.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueLatency {
    /// Kind by kind; none where the queue has never run.
    pub kinds: Vec<KindLatency>,
    /// How long the oldest request in flight has been so, in nanoseconds; zero where none is.
    pub oldest_ns: u64,
}

impl QueueLatency {
    /// Those of both queues.
    pub fn merge(&mut self, other: &Self) {
        self.oldest_ns = self.oldest_ns.max(other.oldest_ns);
        if self.kinds.is_empty() {
            self.kinds.clone_from(&other.kinds);
            return;
        }
        for (mine, other) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.bytes = mine.bytes.wrapping_add(other.bytes);
            mine.whole.merge(&other.whole);
            mine.parts.iter_mut().zip(&other.parts).for_each(|(mine, other)| mine.merge(other));
        }
    }
}

/// What a queue writes and others read.
#[derive(Debug, Default)]
pub struct Latency {
    /// Requests whose whole was one part, the engine's or the flush.
    plain: [Histogram; KINDS],
    /// The others.
    whole: [Histogram; KINDS],
    parts: [[Histogram; Part::COUNT]; KINDS],
    bytes: [Counter; 2],
    /// Since when the oldest request has been in flight; zero for none. True while the queue sleeps, and a moment after
    /// `is_asked`.
    oldest_since_ns: AtomicU64,
    is_asked: AtomicBool,
}

impl Latency {
    /// Has the queue look for its oldest request, if it is awake.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// What it says at this moment.
    #[must_use]
    pub fn snapshot(&self) -> QueueLatency {
        let since_ns = self.oldest_since_ns.load(Ordering::Relaxed);
        let oldest_ns = if since_ns == 0 { 0 } else { now_ns().saturating_sub(since_ns).max(1) };
        let kinds = NAMES.iter().enumerate().map(|(kind, name)| self.of_kind(kind, name)).collect();
        QueueLatency { kinds, oldest_ns }
    }

    fn of_kind(&self, kind: usize, name: &'static str) -> KindLatency {
        let mut latency = KindLatency { kind: name, ..KindLatency::default() };
        latency.bytes = self.bytes.get(kind).map_or(0, Counter::get);
        if let Some(whole) = self.whole.get(kind) {
            latency.whole = whole.snapshot();
        }
        for (part, histogram) in latency.parts.iter_mut().zip(self.parts.get(kind).into_iter().flatten()) {
            *part = histogram.snapshot();
        }
        if let Some(plain) = self.plain.get(kind).map(Histogram::snapshot) {
            latency.whole.merge(&plain);
            if let Some(part) = latency.parts.get_mut(plain_part(kind as u64) as usize) {
                part.merge(&plain);
            }
        }
        latency
    }

    fn add_part(&self, kind: usize, part: Part, ns: u64, count: u64) {
        if let Some(histogram) = self.parts.get(kind).and_then(|parts| parts.get(part as usize)) {
            histogram.add(ns, count);
        }
    }
}

/// Where a run of requests with this key is kept: one a kind, and one for those that go as before.
#[inline]
fn place_of(key: u64) -> usize {
    ((key & KIND_BITS) | ((key & AS_BEFORE) >> 1)) as usize
}

/// What a request that has no parts spends its time on.
fn plain_part(kind: u64) -> Part {
    if kind == FLUSH { Part::Flush } else { Part::Engine }
}

/// Requests that were taken at one time and have ended.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    key: u64,
    count: u64,
    /// Whose parts they are, where the key says that there are some.
    head: u16,
}

/// A queue's own side of it.
pub struct Stopwatch {
    latency: std::sync::Arc<Latency>,
    /// The key of what is taken now, without its kind.
    stamp: u64,
    /// Bytes read and written that are not counted yet.
    moved: [usize; 2],
    /// The runs that go on, by [`place_of`], and which there are.
    runs: [Run; 16],
    active: u16,
    ended: Vec<Run>,
    /// By head; made when the first request has some.
    parts: Vec<Parts>,
    timings: Vec<(Tag, Parts)>,
    /// What the last request of a kind did whose task was timed.
    last: [Parts; KINDS],
    /// The last turn had ended all that it took, so the next is timed only now and then.
    is_quick: bool,
    turn: u32,
    quick_ns: u64,
    quick_notify_ns: u64,
    /// When requests of a turn that was not timed were taken for slow; zero where there are none.
    untimed_since_ns: u64,
    size: usize,
}

impl Stopwatch {
    /// One for a queue with at most `size` requests in flight, whose tags are below that.
    #[must_use]
    pub fn new(latency: std::sync::Arc<Latency>, size: usize) -> Self {
        Self {
            latency,
            stamp: UNTIMED,
            moved: [0; 2],
            runs: [Run::default(); 16],
            active: 0,
            ended: Vec::with_capacity(size),
            parts: Vec::new(),
            timings: Vec::with_capacity(size),
            last: [Parts::ZERO; KINDS],
            is_quick: false,
            turn: 0,
            quick_ns: 0,
            quick_notify_ns: 0,
            untimed_since_ns: 0,
            size,
        }
    }

    /// The first request of a turn is about to begin.
    #[inline]
    pub fn begins_batch(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        self.stamp = match self.is_quick && !self.turn.is_multiple_of(TIMED_EVERY) {
            true => UNTIMED,
            false => now_ns().wrapping_shl(KEY_SHIFT),
        };
    }

    /// What a request keeps that begins now.
    #[inline]
    #[must_use]
    pub fn key(&self, kind: u64) -> u64 {
        self.stamp | kind
    }

    /// Bytes that a read or a write moves.
    #[inline]
    pub fn moves(&mut self, kind: u64, bytes: usize) {
        if let Some(moved) = self.moved.get_mut(kind as usize & 1) {
            *moved = moved.wrapping_add(bytes);
        }
    }

    /// Takes what the disk's last harvest says of the parts of requests. `look_up` calls with the key of a request in
    /// flight, given its head.
    #[inline]
    pub fn take_timings(&mut self, disk: &mut dyn DiskQueue, look_up: impl FnMut(u16, &mut dyn FnMut(&mut u64))) {
        disk.take_timings(&mut self.timings);
        if !self.timings.is_empty() {
            self.note_timings(look_up);
        }
    }

    #[inline(never)]
    fn note_timings(&mut self, mut look_up: impl FnMut(u16, &mut dyn FnMut(&mut u64))) {
        if self.parts.is_empty() {
            self.parts.resize(self.size, Parts::ZERO);
        }
        for (tag, more) in self.timings.drain(..) {
            let Ok(head) = u16::try_from(tag) else { continue };
            let Some(parts) = self.parts.get_mut(usize::from(head)) else { continue };
            look_up(head, &mut |key| match (more.rest, *key & HAS_PARTS) {
                (Rest::AsBefore, _) => *key |= AS_BEFORE,
                (_, 0) => {
                    *parts = more;
                    *key |= HAS_PARTS;
                }
                _ => parts.merge(&more),
            });
        }
    }

    /// A request has ended.
    #[inline]
    pub fn ended(&mut self, head: u16, key: u64) {
        match self.runs.get_mut(place_of(key)) {
            Some(run) if run.key == key => run.count = run.count.wrapping_add(1),
            _ => self.another_run(head, key),
        }
    }

    #[inline(never)]
    fn another_run(&mut self, head: u16, key: u64) {
        let run = Run { key, count: 1, head };
        if key & HAS_PARTS != 0 {
            return self.ended.push(run);
        }
        let place = place_of(key);
        if let (Some(slot), true) = (self.runs.get_mut(place), key != 0) {
            let former = std::mem::replace(slot, run);
            if former.count > 0 {
                self.ended.push(former);
            }
            self.active |= 1_u16.wrapping_shl(place as u32);
        }
    }

    /// A turn that took requests is over; whether all of them have ended.
    #[inline]
    pub fn ends_batch(&mut self, all_ended: bool) {
        if self.stamp == UNTIMED && !all_ended && self.untimed_since_ns == 0 {
            self.untimed_since_ns = now_ns();
        }
        self.is_quick = all_ended && self.quick_ns < QUICK_NS;
        for (counter, moved) in self.latency.bytes.iter().zip(&mut self.moved) {
            if *moved > 0 {
                counter.add(std::mem::take(moved));
            }
        }
    }

    /// Just before what has ended is published: when that is; zero where nobody needs to know.
    #[inline]
    #[must_use]
    pub fn publishes(&self) -> u64 {
        if self.stamp == UNTIMED && self.untimed_since_ns == 0 && self.ended.is_empty() { 0 } else { now_ns() }
    }

    /// What has ended is published. `end_ns` is what [`Stopwatch::publishes`] said.
    #[inline]
    pub fn published(&mut self, end_ns: u64, notified: bool) {
        let notify_ns = match (notified, end_ns) {
            (false, _) => 0,
            (true, 0) => self.quick_notify_ns,
            (true, _) => now_ns().saturating_sub(end_ns),
        };
        if notified {
            self.quick_notify_ns = notify_ns;
        }
        let mut active = std::mem::take(&mut self.active);
        while active != 0 {
            let place = active.trailing_zeros() as usize;
            active &= active.wrapping_sub(1);
            if let Some(run) = self.runs.get_mut(place).map(std::mem::take) {
                self.record(run, end_ns, notify_ns);
            }
        }
        if !self.ended.is_empty() {
            self.record_ended(end_ns, notify_ns);
        }
        if self.is_quick {
            // All that was taken before has ended.
            self.untimed_since_ns = 0;
        }
    }

    #[inline(never)]
    fn record_ended(&mut self, end_ns: u64, notify_ns: u64) {
        let mut ended = std::mem::take(&mut self.ended);
        for run in ended.drain(..) {
            self.record(run, end_ns, notify_ns);
        }
        self.ended = ended;
    }

    #[inline]
    fn record(&mut self, run: Run, end_ns: u64, notify_ns: u64) {
        let ns = match run.key.wrapping_shr(KEY_SHIFT) {
            1 if self.untimed_since_ns == 0 => self.quick_ns,
            1 => end_ns.saturating_sub(self.untimed_since_ns),
            since_ns => end_ns.saturating_sub(since_ns),
        };
        if run.key & !KIND_BITS == self.stamp && self.stamp != UNTIMED {
            self.quick_ns = ns;
        }
        if run.key & (HAS_PARTS | AS_BEFORE) != 0 || notify_ns != 0 {
            return self.record_parts(run, ns, notify_ns);
        }
        if let Some(plain) = self.latency.plain.get((run.key & KIND_BITS) as usize) {
            plain.add(ns, run.count);
        }
    }

    /// Records requests that spent their time on more than one part.
    #[inline(never)]
    fn record_parts(&mut self, run: Run, ns: u64, notify_ns: u64) {
        let kind = (run.key & KIND_BITS) as usize;
        if run.key & HAS_PARTS != 0 {
            return self.record_known_parts(&run, ns, notify_ns);
        }
        if run.key & AS_BEFORE != 0 {
            let parts = self.last.get(kind).copied().unwrap_or_default().scaled_to(ns);
            return self.add_parts(kind, parts, (ns, notify_ns), run.count);
        }
        if let Some(whole) = self.latency.whole.get(kind) {
            whole.add(ns.saturating_add(notify_ns), run.count);
        }
        self.latency.add_part(kind, plain_part(kind as u64), ns, run.count);
        self.latency.add_part(kind, Part::Notify, notify_ns, run.count);
    }

    fn record_known_parts(&mut self, run: &Run, ns: u64, notify_ns: u64) {
        let kind = (run.key & KIND_BITS) as usize;
        let known = self.parts.get(usize::from(run.head)).copied().unwrap_or_default();
        // Tasks of one request may have run side by side.
        let mut parts = if known.sum_ns() > ns { known.scaled_to(ns) } else { known };
        let rest_ns = ns.saturating_sub(parts.sum_ns());
        let rest = if run.key & AS_BEFORE == 0 { known.rest } else { Rest::AsBefore };
        match rest {
            Rest::Engine => parts.add(plain_part(kind as u64), rest_ns),
            Rest::Queue => {
                parts.add(Part::Queue, rest_ns);
                if let Some(last) = self.last.get_mut(kind) {
                    *last = parts;
                }
            }
            Rest::AsBefore => parts.merge(&self.last.get(kind).copied().unwrap_or_default().scaled_to(rest_ns)),
        }
        self.add_parts(kind, parts, (ns, notify_ns), 1);
    }

    /// Counts requests that took `ns` each, which `parts` make up, before their end was told.
    fn add_parts(&self, kind: usize, mut parts: Parts, (ns, notify_ns): (u64, u64), count: u64) {
        parts.add(Part::Notify, notify_ns);
        if let Some(whole) = self.latency.whole.get(kind) {
            whole.add(ns.saturating_add(notify_ns), count);
        }
        for (part, _) in Part::NAMES {
            match parts.get(part) {
                0 => {}
                ns => self.latency.add_part(kind, part, ns, count),
            }
        }
    }

    /// Whether somebody wants to know the oldest request.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.latency.is_asked.load(Ordering::Relaxed)
    }

    /// Says which of the requests in flight, given by their keys, is the oldest.
    pub fn note_oldest(&self, keys: impl Iterator<Item = u64>) {
        let since = |key: u64| match key.wrapping_shr(KEY_SHIFT) {
            1 if self.untimed_since_ns == 0 => now_ns(),
            1 => self.untimed_since_ns,
            since_ns => since_ns,
        };
        let oldest = keys.map(since).min().unwrap_or(0);
        self.latency.oldest_since_ns.store(oldest, Ordering::Relaxed);
        self.latency.is_asked.store(false, Ordering::Relaxed);
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.note_oldest(std::iter::empty());
    }
}
