//! How long requests take: histograms of each queue, and the clock that fills them.
//!
//! Only the reactor's thread writes, by plain loads and stores; any thread may read. The clock is read once a batch,
//! not once a request. Of turns in which the disk answers all requests, only one in eight is timed: otherwise the clock
//! would cost more than one percent.

use super::counter::Counter;
use crate::latency::Rest;
use crate::{DiskQueue, Part, Parts, Tag};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Buckets of a histogram. Their upper bounds are 1, 2, 4 microseconds and so on; the last has none.
pub const LATENCY_BUCKETS: usize = 28;

/// Kinds of requests that are counted apart.
const KINDS: usize = 6;
const NAMES: [&str; KINDS] = ["read", "write", "flush", "discard", "write-zeroes", "secure-erase"];

/// Reads. This and the constants that follow are the kinds of requests.
pub const READ: u64 = 0;
/// Writes.
pub const WRITE: u64 = 1;
/// Flushes.
pub const FLUSH: u64 = 2;
/// Discards.
pub const DISCARD: u64 = 3;
/// Write-zeroes.
pub const WRITE_ZEROES: u64 = 4;
/// Secure erases.
pub const SECURE_ERASE: u64 = 5;

/// The bits of a request's key that hold its kind. The others hold its start time, and two flags.
pub const KIND_BITS: u64 = 7;
/// Flag: the parts of this request are known.
const HAS_PARTS: u64 = 8;
/// Flag: an untimed task carried the request out. The shares of the last timed task of its kind stand for it.
const AS_BEFORE: u64 = 16;
const KEY_SHIFT: u32 = 5;
/// Stands for the time in a turn without timing.
const UNTIMED: u64 = 1 << KEY_SHIFT;

/// One of this many quick turns is timed.
const TIMED_EVERY: u32 = 8;
/// A quick turn takes less than this.
const QUICK_NS: u64 = 20_000;

/// Returns nanoseconds since some moment before the first queue began.
fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let elapsed = START.get_or_init(Instant::now).elapsed();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).saturating_add(2) & (u64::MAX >> KEY_SHIFT)
}

/// Returns how long ago a moment was; zero if there is none.
fn age_ns(since_ns: &AtomicU64) -> u64 {
    match since_ns.load(Ordering::Relaxed) {
        0 => 0,
        since_ns => now_ns().saturating_sub(since_ns).max(1),
    }
}

/// A histogram of times, with one writer.
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
        // Most histograms are empty. A time of zero leaves the sum alone, and counts in the first bucket.
        if self.sum_ns.get() == 0 && self.buckets.first().is_none_or(|first| first.get() == 0) {
            return LatencyHistogram { buckets, sum_ns: 0 };
        }
        for (bucket, counter) in buckets.iter_mut().zip(&self.buckets) {
            *bucket = counter.get();
        }
        LatencyHistogram { buckets, sum_ns: self.sum_ns.get() }
    }
}

/// Returns the first bucket whose upper bound is not below `ns`.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let whole_us = ns.saturating_sub(1) / 1000;
    (u64::BITS.wrapping_sub(whole_us.leading_zeros()) as usize).min(LATENCY_BUCKETS.wrapping_sub(1))
}

/// A histogram of requests' times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencyHistogram {
    /// Requests in each bucket; see [`LATENCY_BUCKETS`].
    pub buckets: [u64; LATENCY_BUCKETS],
    /// The sum of all times, in nanoseconds.
    pub sum_ns: u64,
}

impl LatencyHistogram {
    /// Returns how many requests there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().copied().fold(0, u64::wrapping_add)
    }

    /// Adds the other histogram's figures.
    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in self.buckets.iter_mut().zip(other.buckets) {
            *sum = sum.wrapping_add(more);
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }
}

/// The times of requests of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KindLatency {
    /// `read`, `write`, `flush`, `discard`, `write-zeroes` or `secure-erase`.
    pub kind: &'static str,
    /// Bytes of data that were moved.
    pub bytes: u64,
    /// Time from when a request was taken until its end was published, and until the guest was notified, if it was.
    pub whole: LatencyHistogram,
    /// Time that they spent on each part, in the order of [`Part::NAMES`].
    pub parts: [LatencyHistogram; Part::COUNT],
}

/// The times of the requests of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueLatency {
    /// One entry for each kind; empty if the queue has never run.
    pub kinds: Vec<KindLatency>,
    /// The age of the oldest request in flight, in nanoseconds; zero if there is none.
    pub oldest_ns: u64,
}

impl QueueLatency {
    /// Adds the other queue's figures.
    pub fn merge(&mut self, other: Self) {
        self.oldest_ns = self.oldest_ns.max(other.oldest_ns);
        if self.kinds.is_empty() {
            self.kinds = other.kinds;
            return;
        }
        for (mine, other) in self.kinds.iter_mut().zip(&other.kinds) {
            mine.bytes = mine.bytes.wrapping_add(other.bytes);
            mine.whole.merge(&other.whole);
            mine.parts.iter_mut().zip(&other.parts).for_each(|(mine, other)| mine.merge(other));
        }
    }
}

/// The latencies of a queue, which its thread writes and others read.
#[derive(Debug, Default)]
pub struct Latency {
    /// Requests that spent all their time on one part, the engine's or the flush.
    plain: [Histogram; KINDS],
    /// All other requests.
    whole: [Histogram; KINDS],
    parts: [[Histogram; Part::COUNT]; KINDS],
    bytes: [Counter; 2],
    /// Since when the oldest request has been in flight; zero for none. Right while the queue sleeps, and shortly after
    /// `is_asked` was set.
    oldest_since_ns: AtomicU64,
    /// Since when the queue's own flush has been in flight; zero if it is not.
    own_flush_since_ns: AtomicU64,
    is_asked: AtomicBool,
}

impl Latency {
    /// Asks the queue to look for its oldest request, if it is awake.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Relaxed);
    }

    /// Returns a copy of the figures.
    #[must_use]
    pub fn snapshot(&self) -> QueueLatency {
        let oldest_ns = age_ns(&self.oldest_since_ns).max(self.own_flush_ns());
        let kinds = NAMES.iter().enumerate().map(|(kind, name)| self.of_kind(kind, name)).collect();
        QueueLatency { kinds, oldest_ns }
    }

    /// Returns for how long the queue's own flush has been in flight, in nanoseconds; zero if it is not.
    #[must_use]
    pub fn own_flush_ns(&self) -> u64 {
        age_ns(&self.own_flush_since_ns)
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

/// Returns where a run of requests with this key is kept: one place for each kind, and one more for its untimed tasks.
#[inline]
fn place_of(key: u64) -> usize {
    ((key & KIND_BITS) | ((key & AS_BEFORE) >> 1)) as usize
}

/// Returns the part that a request without known parts spends its time on.
fn plain_part(kind: u64) -> Part {
    if kind == FLUSH { Part::Flush } else { Part::Engine }
}

/// Requests with the same key that have ended.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    key: u64,
    count: u64,
    /// The head that the parts belong to, if the key says that there are some.
    head: u16,
}

/// The queue's side: takes times and records them.
pub struct Stopwatch {
    latency: std::sync::Arc<Latency>,
    /// The key of requests taken in this turn, without the kind.
    stamp: u64,
    /// Bytes read and written that are not counted yet.
    moved: [usize; 2],
    /// The runs of this turn, by [`place_of`], and a bit for each place in use.
    runs: [Run; 16],
    active: u16,
    ended: Vec<Run>,
    /// The known parts, by head. Made when the first request has some.
    parts: Vec<Parts>,
    timings: Vec<(Tag, Parts)>,
    /// The parts of the last request of each kind whose task was timed.
    last: [Parts; KINDS],
    /// The last turn was quick, and ended all requests that it took. So only some of the next turns are timed.
    is_quick: bool,
    turn: u32,
    quick_ns: u64,
    quick_notify_ns: u64,
    /// When requests of an untimed turn were first found to outlive it; zero if there are none.
    untimed_since_ns: u64,
    size: usize,
}

impl Stopwatch {
    /// Makes a stopwatch for a queue with at most `size` requests in flight, whose tags are below `size`.
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

    /// Begins a turn, before its first request.
    #[inline]
    pub fn begins_batch(&mut self) {
        self.turn = self.turn.wrapping_add(1);
        self.stamp = match self.is_quick && !self.turn.is_multiple_of(TIMED_EVERY) {
            true => UNTIMED,
            false => now_ns().wrapping_shl(KEY_SHIFT),
        };
    }

    /// Returns the key that a request keeps which begins in this turn.
    #[inline]
    #[must_use]
    pub fn key(&self, kind: u64) -> u64 {
        self.stamp | kind
    }

    /// Counts the bytes that a read or a write moves.
    #[inline]
    pub fn moves(&mut self, kind: u64, bytes: usize) {
        if let Some(moved) = self.moved.get_mut(kind as usize & 1) {
            *moved = moved.wrapping_add(bytes);
        }
    }

    /// Returns the bytes of the reads and writes of this turn.
    #[inline]
    #[must_use]
    pub fn moved_bytes(&self) -> usize {
        let [read, written] = self.moved;
        read.saturating_add(written)
    }

    /// Takes the parts of requests from the disk's last harvest. `look_up` gets a head, and calls its closure with that
    /// request's key.
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

    /// Counts a request that has ended.
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

    /// Ends a turn that took requests. `all_ended` says whether all of them have ended.
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

    /// Returns the time just before ends are published; zero if nothing needs it.
    #[inline]
    #[must_use]
    pub fn publishes(&self) -> u64 {
        if self.stamp == UNTIMED && self.untimed_since_ns == 0 && self.ended.is_empty() { 0 } else { now_ns() }
    }

    /// Records the requests whose ends are published. `end_ns` is what [`Stopwatch::publishes`] returned.
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
            // All requests taken before have ended.
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

    /// Counts `count` requests that took `ns` each before their notification. `parts` add up to `ns`.
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

    /// Notes that a flush begins which the queue sends before its first request. Until it has ended, it is the oldest one.
    pub fn own_flush_begins(&self) {
        self.latency.own_flush_since_ns.store(now_ns(), Ordering::Relaxed);
    }

    /// Counts the queue's own flush, which has ended. It belongs to no request: its time counts as one of metadata.
    pub fn own_flush_ended(&self) {
        let ns = self.latency.own_flush_ns();
        let mut parts = Parts::ZERO;
        parts.add(Part::Metadata, ns);
        self.add_parts(FLUSH as usize, parts, (ns, 0), 1);
        self.latency.own_flush_since_ns.store(0, Ordering::Relaxed);
    }

    /// Whether [`Latency::ask`] was called since the oldest request was last noted.
    #[inline]
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.latency.is_asked.load(Ordering::Relaxed)
    }

    /// Notes the oldest of the requests in flight, which are given by their keys.
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
        self.latency.own_flush_since_ns.store(0, Ordering::Relaxed);
    }
}
