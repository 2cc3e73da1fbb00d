//! Generates the load of one queue: a poller harvests completions and submits as many new requests.
//!
//! The clock is read once a batch. Completions of one harvest end at the same moment, and the requests that replace
//! them begin then.

use crate::evenness::Evenness;
use crate::moments::Moments;
use crate::range::Range;
use crate::report::{BatchCounts, Timings};
use crate::spec::{BenchSpec, Pattern, Stop};
use crate::verify::{BlockState, ReadBegan, Tracker, Words, check_block, fill_block};
use block::{BatchEnd, Completion, Disk, DiskQueue, IoError, Op, OpFlags, Poller, PollerId, ReactorCtx};
use memory::{IoBuf, Window};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

/// The state that the main thread shares with the generators.
#[derive(Debug, Default)]
pub(crate) struct Conductor {
    phase: AtomicU8,
    /// Completions of all queues. Updated every few thousand requests.
    pub(crate) requests: AtomicU64,
    pub(crate) failures: AtomicU64,
}

/// The phases of a run, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Requests do not count yet.
    Warmup,
    /// Requests count.
    Measure,
    /// Nothing more is submitted; requests in flight are awaited.
    Drain,
    /// Requests in flight are given up.
    Abandon,
}

impl Conductor {
    pub(crate) fn set(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Warmup,
            1 => Phase::Measure,
            2 => Phase::Drain,
            _ => Phase::Abandon,
        }
    }
}

/// The measurements of a generator.
pub(crate) struct QueueResult {
    pub(crate) queue: u32,
    pub(crate) reads: Timings,
    pub(crate) writes: Timings,
    pub(crate) flushes: Timings,
    pub(crate) bytes: u64,
    pub(crate) by_maps: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    pub(crate) mismatches: u64,
    pub(crate) first_mismatch: Option<String>,
    pub(crate) batches: BatchCounts,
    pub(crate) evenness: Evenness,
    pub(crate) moments: Option<Moments>,
    pub(crate) elapsed_seconds: f64,
    pub(crate) blocks: Option<Vec<BlockState>>,
    pub(crate) abandoned: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
}

struct Slot {
    buf: IoBuf,
    /// A window over the whole buffer, for every request but a short last one.
    whole: Window,
    kind: Kind,
    block: u64,
    /// The block's history when its read began.
    began: ReadBegan,
    since: Instant,
    /// Whether the bytes that the request read must still be looked at.
    unseen: bool,
}

/// The parts that make a generator.
pub(crate) struct Parts {
    pub(crate) queue_index: u32,
    pub(crate) spec: Arc<BenchSpec>,
    pub(crate) range: Range,
    pub(crate) blocks: std::ops::Range<u64>,
    pub(crate) tracker: Option<Tracker>,
    pub(crate) conductor: Arc<Conductor>,
    pub(crate) results: Sender<QueueResult>,
    /// The disk, where its maps are used.
    pub(crate) maps: Option<Arc<dyn Disk>>,
}

pub(crate) struct Generator {
    queue: Option<Box<dyn DiskQueue>>,
    ctx: Rc<dyn ReactorCtx>,
    batch_end: BatchEnd,
    pub(crate) poller: Option<PollerId>,
    parts: Parts,
    slots: Vec<Slot>,
    idle: Vec<usize>,
    done: Vec<Completion>,
    /// Completions of maps since the last harvest.
    mapped: Vec<Completion>,
    random: Words,
    next_block: u64,
    /// Requests left to submit, if their number is limited.
    left: Option<u64>,
    writes_until_flush: u32,
    phase: Phase,
    started: Instant,
    /// The last completion.
    ended: Instant,
    /// Completions that the conductor has not been told of.
    untold: u64,
    result: Option<QueueResult>,
    scratch: Vec<u8>,
    /// The sum of all words that were looked at.
    seen: u64,
}

/// The conductor is told after this number of completions.
const TELL_EVERY: u64 = 1024;

impl Generator {
    pub(crate) fn new(queue: Box<dyn DiskQueue>, ctx: &Rc<dyn ReactorCtx>, buffers: Vec<IoBuf>, parts: Parts) -> Self {
        let (spec, now) = (Arc::clone(&parts.spec), Instant::now());
        let slots: Vec<Slot> = buffers
            .into_iter()
            .map(|buf| Slot {
                whole: buf.whole(),
                buf,
                kind: Kind::Read,
                block: 0,
                began: ReadBegan::default(),
                since: now,
                unseen: false,
            })
            .collect();
        let seed = match spec.pattern {
            Pattern::Random { seed } => seed,
            Pattern::Sequential => 0,
        };
        let result = QueueResult {
            queue: parts.queue_index,
            reads: Timings::new(),
            writes: Timings::new(),
            flushes: Timings::new(),
            bytes: 0,
            by_maps: 0,
            errors: 0,
            first_error: None,
            mismatches: 0,
            first_mismatch: None,
            batches: BatchCounts::up_to(slots.len()),
            evenness: Evenness::default(),
            moments: spec.moments.map(Moments::new),
            elapsed_seconds: 0.0,
            blocks: None,
            abandoned: 0,
        };
        let share = |total: u64| {
            let (queues, index) = (u64::from(spec.queues), u64::from(parts.queue_index));
            total / queues + u64::from(index < total % queues)
        };
        Self {
            queue: Some(queue),
            ctx: Rc::clone(ctx),
            batch_end: ctx.batch_end(),
            poller: None,
            idle: (0..slots.len()).rev().collect(),
            done: Vec::with_capacity(slots.len()),
            mapped: Vec::new(),
            slots,
            random: Words::new(seed ^ u64::from(parts.queue_index) << 32),
            next_block: parts.blocks.start,
            left: match spec.stop {
                Stop::Runtime(_) => None,
                Stop::Requests(total) => Some(share(total)),
                Stop::OnePass => Some(parts.blocks.end - parts.blocks.start),
            },
            writes_until_flush: spec.flush_every.unwrap_or(0),
            phase: Phase::Warmup,
            started: now,
            ended: now,
            untold: 0,
            result: Some(result),
            seen: 0,
            scratch: vec![0; if parts.tracker.is_some() { spec.block_bytes as usize } else { 0 }],
            parts,
        }
    }

    /// Follows the conductor's phase. When the measurement begins, everything counted so far is dropped.
    fn follow(&mut self) {
        let phase = self.parts.conductor.phase();
        if phase == self.phase {
            return;
        }
        let Some(result) = &mut self.result else { return };
        if self.phase < Phase::Measure {
            self.started = Instant::now();
            self.ended = self.started;
            result.reads.clear();
            result.writes.clear();
            result.flushes.clear();
            result.batches.clear();
            result.evenness.clear();
            (result.bytes, result.by_maps) = (0, 0);
            if let Some(moments) = &mut result.moments {
                moments.clear();
            }
        }
        self.phase = phase;
    }

    fn has_more(&self) -> bool {
        self.phase < Phase::Drain && self.left != Some(0)
    }

    fn choose(&mut self) -> (Kind, u64) {
        let spec = &self.parts.spec;
        let read = match spec.read_percent {
            100 => true,
            0 => false,
            percent => self.random.below(100) < u64::from(percent),
        };
        if !read && spec.flush_every.is_some() && self.writes_until_flush == 0 {
            return (Kind::Flush, 0);
        }
        let blocks = &self.parts.blocks;
        let mut block = match spec.pattern {
            Pattern::Random { .. } => blocks.start + self.random.below(blocks.end - blocks.start),
            Pattern::Sequential => {
                let block = self.next_block;
                self.next_block = if block + 1 == blocks.end { blocks.start } else { block + 1 };
                block
            }
        };
        if read {
            return (Kind::Read, block);
        }
        if let Some(tracker) = &self.parts.tracker {
            // A block has one write in flight at a time: otherwise it would be unknown which came last. There are more
            // blocks than slots.
            while tracker.is_writing(block) {
                block = if block + 1 == blocks.end { blocks.start } else { block + 1 };
            }
        }
        (Kind::Write, block)
    }

    fn submit(&mut self, index: usize, now: Instant) {
        let (kind, block) = self.choose();
        let Some(slot) = self.slots.get_mut(index) else { return };
        (slot.kind, slot.block, slot.since) = (kind, block, now);
        let op = match kind {
            Kind::Flush => {
                self.writes_until_flush = self.parts.spec.flush_every.unwrap_or(0);
                if let Some(tracker) = &mut self.parts.tracker {
                    tracker.begin_flush(index);
                }
                Op::Flush
            }
            Kind::Read => {
                let (offset, length) = self.parts.range.block(block);
                slot.began = self.parts.tracker.as_ref().map(|tracker| tracker.begin_read(block)).unwrap_or_default();
                Op::read(offset, part(slot, length))
            }
            Kind::Write => {
                let (offset, length) = self.parts.range.block(block);
                self.writes_until_flush = self.writes_until_flush.saturating_sub(1);
                if let (Some(tracker), Some(scratch)) = (&mut self.parts.tracker, self.scratch.get_mut(..length)) {
                    let generation = tracker.begin_write(block);
                    fill_block(scratch, tracker.seed, offset, generation);
                    slot.whole.copy_from_slice(0, scratch);
                }
                Op::write(offset, part(slot, length), OpFlags::from_fua(self.parts.spec.fua))
            }
        };
        if kind != Kind::Flush
            && self.phase == Phase::Measure
            && let Some(left) = &mut self.left
        {
            *left -= 1;
        }
        match self.parts.maps.is_some() {
            true => self.submit_by_map(index, op),
            false => self.submit_op(index, op),
        }
    }

    fn submit_op(&mut self, index: usize, op: Op) {
        if self.parts.spec.touch
            && let Op::Write { data, .. } = &op
        {
            data.put_words(|number| word(index as u64, number));
        }
        if let Some(slot) = self.slots.get_mut(index) {
            slot.unseen = self.parts.spec.touch && slot.kind == Kind::Read;
        }
        if let Some(queue) = &mut self.queue {
            queue.submit(index as u64, op);
        }
    }

    /// Carries out the operation by a map, if the disk provides one.
    fn submit_by_map(&mut self, index: usize, op: Op) {
        let (Some(disk), Some(queue), Some(result)) = (&self.parts.maps, &mut self.queue, &mut self.result) else {
            return;
        };
        let (tag, touch, seen) = (index as u64, self.parts.spec.touch, &mut self.seen);
        let ended = match &op {
            Op::Read { offset, data, .. } => disk.map_read(*offset, data.length_bytes()).map(|map| {
                match touch {
                    true => map.for_each_word(0, data.length_bytes() / 8, |word| *seen = seen.wrapping_add(word))?,
                    false => map.copy_to(0, data.length_bytes(), data)?,
                }
                map.commit()
            }),
            Op::Write { offset, data, .. } => disk.map_write(*offset, data.length_bytes()).map(|mut map| {
                match touch {
                    true => map.put_words(0, data.length_bytes() / 8, |number| word(tag, number))?,
                    false => map.copy_from(0, data)?,
                }
                queue.submit_map(tag, map)
            }),
            _ => None,
        };
        result.by_maps += u64::from(ended.is_some());
        match ended {
            None => self.submit_op(index, op),
            // The commit completes like other requests.
            Some(Ok(())) if matches!(op, Op::Write { .. }) => {}
            Some(result) => self.mapped.push(Completion { tag, result }),
        }
        self.seen = std::hint::black_box(self.seen);
    }

    fn complete(&mut self, completion: Completion, now: Instant) {
        let index = completion.tag as usize;
        let (Some(slot), Some(result)) = (self.slots.get_mut(index), &mut self.result) else { return };
        let success = completion.result.is_ok();
        if std::mem::take(&mut slot.unseen) {
            let (_, length) = self.parts.range.block(slot.block);
            part(slot, length).for_each_word(|word| self.seen = self.seen.wrapping_add(word));
        }
        if success {
            let ns = now.saturating_duration_since(slot.since).as_nanos() as u64;
            let (timings, bytes) = match slot.kind {
                Kind::Read => (&mut result.reads, self.parts.range.block(slot.block).1),
                Kind::Write => (&mut result.writes, self.parts.range.block(slot.block).1),
                Kind::Flush => (&mut result.flushes, 0),
            };
            timings.record(ns);
            if let (Some(moments), true) = (&mut result.moments, self.phase >= Phase::Measure) {
                moments.record(now.saturating_duration_since(self.started), ns);
            }
            result.bytes += bytes as u64;
        }
        self.untold += u64::from(slot.kind != Kind::Flush);
        self.idle.push(index);
        if let Err(error) = completion.result {
            self.note_error(index, error);
        }
        if self.parts.tracker.is_some() {
            self.track(index, success);
        }
        self.seen = std::hint::black_box(self.seen);
    }

    fn note_error(&mut self, index: usize, error: IoError) {
        let (Some(slot), Some(result)) = (self.slots.get(index), &mut self.result) else { return };
        result.errors += 1;
        self.parts.conductor.failures.fetch_add(1, Ordering::Relaxed);
        if result.first_error.is_none() {
            let (offset, length) = self.parts.range.block(slot.block);
            result.first_error = Some(match slot.kind {
                Kind::Flush => format!("flush: {error}"),
                kind => format!("{kind:?} of {length} bytes at offset {offset}: {error}").to_lowercase(),
            });
        }
    }

    fn track(&mut self, index: usize, success: bool) {
        let (Some(slot), Some(tracker)) = (self.slots.get(index), &mut self.parts.tracker) else { return };
        match slot.kind {
            Kind::Flush => tracker.end_flush(index, success),
            Kind::Write => tracker.end_write(slot.block, success, self.parts.spec.fua),
            Kind::Read if success => {
                let (offset, length) = self.parts.range.block(slot.block);
                let Some(scratch) = self.scratch.get_mut(..length) else { return };
                slot.whole.copy_to_slice(0, scratch);
                let expected = tracker.expected(slot.block, slot.began);
                let (Err(what), Some(result)) =
                    (check_block(scratch, tracker.seed, offset, expected), &mut self.result)
                else {
                    return;
                };
                result.mismatches += 1;
                self.parts.conductor.failures.fetch_add(1, Ordering::Relaxed);
                result.first_mismatch.get_or_insert(what);
            }
            Kind::Read => {}
        }
    }

    fn tell(&mut self) {
        self.parts.conductor.requests.fetch_add(std::mem::take(&mut self.untold), Ordering::Relaxed);
    }

    /// Sends the result and leaves the reactor, when everything has completed or was given up.
    fn finish(&mut self) {
        self.tell();
        let Some(mut result) = self.result.take() else { return };
        // Requests that the drain awaited count, so their time does.
        result.elapsed_seconds = self.ended.saturating_duration_since(self.started).as_secs_f64();
        result.abandoned = self.slots.len() - self.idle.len();
        result.blocks = self.parts.tracker.take().map(Tracker::into_blocks);
        // The queue is dropped first: the receiver of the result may use the disk at once.
        (self.queue, self.parts.maps) = (None, None);
        self.slots.clear();
        if let Some(poller) = self.poller.take() {
            self.ctx.remove_poller(poller);
        }
        // The receiver is gone only if the run was given up.
        let _ = self.parts.results.send(result);
    }
}

/// Returns a word of a write's data, for runs that touch their bytes.
fn word(tag: u64, number: usize) -> u64 {
    (number as u64) ^ tag << 32
}

/// Returns the first `length` bytes of the slot's buffer.
fn part(slot: &Slot, length: usize) -> Window {
    if length == slot.buf.length_bytes() { slot.whole.clone() } else { slot.whole.slice(0, length) }
}

impl Poller for Generator {
    fn poll(&mut self) -> bool {
        let (Some(queue), Some(result)) = (&mut self.queue, &mut self.result) else { return false };
        let count = queue.harvest(&mut self.done) + self.mapped.len();
        self.done.append(&mut self.mapped);
        result.batches.polls += 1;
        self.follow();
        if count == 0 && (self.idle.is_empty() || !self.has_more()) {
            if self.idle.len() == self.slots.len() || self.phase == Phase::Abandon {
                self.finish();
            }
            return false;
        }
        let now = Instant::now();
        if let (Some(result), true) = (&mut self.result, count > 0) {
            self.ended = now;
            result.batches.record(count);
            if self.phase >= Phase::Measure {
                result.evenness.record(now.saturating_duration_since(self.started), count as u64);
            }
        }
        for index in 0..self.done.len() {
            if let Some(completion) = self.done.get(index).copied() {
                self.complete(completion, now);
            }
        }
        self.done.clear();
        while self.has_more()
            && let Some(index) = self.idle.pop()
        {
            self.submit(index, now);
            if self.batch_end.take() {
                break;
            }
        }
        if self.untold >= TELL_EVERY {
            self.tell();
        }
        true
    }
}
