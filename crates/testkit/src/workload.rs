//! Seeded requests over several queues, checked against the model as they complete.

use crate::dice::Dice;
use crate::harness::{Harness, QueueId};
use crate::model::{ModelDisk, stamped};
use crate::request::{Reply, Request};
use block::{IoError, OpFlags, Tag};

const SECTOR: u64 = 512;
/// Idle turns after which a request counts as lost.
const QUIET_TURNS: u32 = 100;

/// A workload of a guest.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The seed of everything random.
    pub seed: u64,
    /// Number of requests.
    pub requests: u64,
    /// The most requests in flight on one queue.
    pub depth: usize,
    /// The part of the disk that is used, from its start.
    pub span_bytes: u64,
    /// Many requests begin and end at multiples of this (the image's cluster).
    pub granule_bytes: u64,
    /// Smallest unit of offsets and lengths.
    pub block_bytes: u64,
    /// The first tag, and the first stamp of written data. Two workloads on one model must not share any.
    pub first_tag: Tag,
    /// Percent of requests that only read.
    pub read_percent: u64,
    /// Percent of the other requests that are flushes.
    pub flush_percent: u64,
    /// Whether requests may fail. If not, a failed request ends the workload with an error.
    pub may_fail: bool,
    /// Whether half of the writes go through maps.
    pub maps: bool,
}

impl Workload {
    /// Makes a mixed workload on the first `span_bytes` of a disk.
    #[must_use]
    pub fn new(seed: u64, requests: u64, span_bytes: u64, granule_bytes: u64) -> Self {
        Self {
            seed,
            requests,
            depth: 4,
            span_bytes,
            granule_bytes: granule_bytes.max(SECTOR),
            block_bytes: SECTOR,
            first_tag: 1,
            read_percent: 20,
            flush_percent: 12,
            may_fail: false,
            maps: false,
        }
    }
}

/// An event, as the guest sees it.
#[derive(Debug, Clone)]
pub enum GuestEvent {
    /// A request is submitted.
    Submit(Tag, Request),
    /// A request has completed.
    Complete(Reply),
}

impl GuestEvent {
    /// Reports the event to the model.
    pub fn tell(&self, model: &mut ModelDisk) -> Result<(), String> {
        match self {
            Self::Submit(tag, request) => {
                model.submit(*tag, request);
                Ok(())
            }
            Self::Complete(reply) => model.complete(reply),
        }
    }
}

/// The record of a workload.
#[derive(Debug, Default)]
pub struct Story {
    /// The events, each with the clock's time.
    pub events: Vec<(u64, GuestEvent)>,
    /// Requests that failed.
    pub errors: Vec<(Request, IoError)>,
}

impl Workload {
    /// Runs the workload on `queues` to its end. `clock` gives the times of events.
    pub fn run(
        &self,
        harness: &mut dyn Harness,
        queues: &[QueueId],
        model: &mut ModelDisk,
        clock: &dyn Fn() -> u64,
    ) -> Result<Story, String> {
        let mut dice = Dice::new(self.seed);
        let mut story = Story::default();
        let mut submitted = 0;
        let mut quiet_turns = 0;
        let mut pending = std::collections::BTreeMap::new();
        while submitted < self.requests || !pending.is_empty() {
            let queue = queues[dice.index(queues.len())];
            let mut batch = Vec::new();
            let room = self.depth.saturating_sub(harness.in_flight(queue)) as u64;
            for _ in 0..room.min(dice.below(4)).min(self.requests - submitted) {
                let tag = self.first_tag + submitted;
                submitted += 1;
                let request = self.draw(tag, &mut dice);
                model.submit(tag, &request);
                story.events.push((clock(), GuestEvent::Submit(tag, request.clone())));
                pending.insert(tag, request.clone());
                batch.push((tag, request));
            }
            let quiet = batch.is_empty();
            if !batch.is_empty() {
                harness.submit(queue, batch);
            }
            let turn = harness.turn();
            let quiet = quiet && turn.idle && turn.replies.is_empty();
            quiet_turns = if quiet { quiet_turns + 1 } else { 0 };
            for (_, reply) in turn.replies {
                let request = pending.remove(&reply.tag).ok_or_else(|| format!("tag {} came back twice", reply.tag))?;
                if let Err(error) = reply.result {
                    if !self.may_fail {
                        return Err(format!("{} failed: {error}", brief(&request)));
                    }
                    story.errors.push((request.clone(), error));
                }
                model.complete(&reply).map_err(|wrong| format!("{}: {wrong}", brief(&request)))?;
                story.events.push((clock(), GuestEvent::Complete(reply)));
            }
            // For many turns no request was submitted, and none has completed.
            if quiet_turns > QUIET_TURNS {
                let lost: Vec<_> = pending.values().map(brief).collect();
                return Err(format!("never completed: {}", lost.join(", ")));
            }
        }
        for queue in queues {
            if let Some(violation) = harness.violations(*queue).first() {
                return Err(violation.clone());
            }
        }
        Ok(story)
    }

    fn draw(&self, tag: Tag, dice: &mut Dice) -> Request {
        if dice.chance(self.read_percent) {
            let (offset, length) = self.range(dice);
            return Request::Read { offset, pieces: pieces(length, dice) };
        }
        if dice.chance(self.flush_percent) {
            return Request::Flush;
        }
        match dice.below(8) {
            0 => {
                let (offset, length) = self.range(dice);
                Request::Discard { offset, length }
            }
            1 => {
                let (offset, length) = self.range(dice);
                Request::WriteZeroes { offset, length, may_unmap: dice.chance(50), flags: flags(dice) }
            }
            _ => {
                let (offset, length) = self.range(dice);
                let data = stamped(tag, offset, length as usize).into();
                if self.maps && tag.is_multiple_of(2) {
                    return Request::WriteByMap { offset, data };
                }
                Request::Write { offset, data, pieces: pieces(length, dice), flags: flags(dice) }
            }
        }
    }

    /// Returns a range: small, of whole granules, or any. Many are at the start of the disk, so that they overlap.
    fn range(&self, dice: &mut Dice) -> (u64, u64) {
        let span = if dice.chance(40) { (self.span_bytes / 8).max(self.granule_bytes) } else { self.span_bytes };
        let span = span.min(self.span_bytes);
        let block = self.block_bytes;
        let (offset, length) = match dice.below(4) {
            0 => (dice.below(span / block) * block, (1 + dice.below(3)) * block),
            1 => {
                let granule = self.granule_bytes;
                (dice.below(span.div_ceil(granule)) * granule, (1 + dice.below(3)) * granule)
            }
            _ => {
                let most = (2 * self.granule_bytes / block).max(8);
                (dice.below(span / block) * block, (1 + dice.below(most)) * block)
            }
        };
        let offset = offset.min(self.span_bytes - block);
        (offset, length.min(self.span_bytes - offset))
    }
}

/// Cuts a length into pieces, sometimes at odd places.
fn pieces(length: u64, dice: &mut Dice) -> Vec<usize> {
    let length = length as usize;
    let mut cuts = vec![0, length];
    if dice.chance(30) {
        for _ in 0..=dice.below(3) {
            cuts.push(dice.index(length));
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Returns a write's flags. Few writes have any.
fn flags(dice: &mut Dice) -> OpFlags {
    match dice.below(100) {
        0..8 => OpFlags::FUA,
        8..12 => OpFlags::PREFLUSH,
        12..14 => OpFlags::PREFLUSH | OpFlags::FUA,
        _ => OpFlags::NONE,
    }
}

/// Describes a request in a few words.
pub(crate) fn brief(request: &Request) -> String {
    let (offset, length) = request.range();
    match request {
        Request::Read { .. } => format!("read {offset}+{length}"),
        Request::Write { flags, .. } => {
            let name = |is_set, name| if is_set { name } else { "" };
            let (preflush, fua) = (name(flags.is_preflush(), " PREFLUSH"), name(flags.is_fua(), " FUA"));
            format!("write {offset}+{length}{preflush}{fua}")
        }
        Request::WriteByMap { .. } => format!("write {offset}+{length} by a map"),
        Request::Flush => "flush".to_owned(),
        Request::Discard { .. } => format!("discard {offset}+{length}"),
        Request::WriteZeroes { may_unmap, .. } => {
            format!("write zeroes {offset}+{length}{}", if *may_unmap { " unmap" } else { "" })
        }
    }
}
