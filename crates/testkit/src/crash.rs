//! Runs a workload, and cuts the power at each of its writes and flushes, or injects a fault into each operation.

use crate::dice::mix;
use crate::harness::{Harness, SimHarness};
use crate::model::ModelDisk;
use crate::request::{Reply, Request};
use crate::sim::{Fault, FaultAction, OpKind, Replay, SimStorage};
use crate::workload::{Story, Workload};
use block::{Disk, DiskInfo, Result};
use std::sync::Arc;

/// Opens the disk under test on some storage.
pub type OpenDisk<'a> = &'a dyn Fn(&SimStorage) -> Result<OpenedDisk>;
/// Checks the bytes of the image, whatever its format.
pub type CheckStorage<'a> = &'a dyn Fn(&SimStorage) -> std::result::Result<(), String>;

/// A disk under test, and how to close it properly.
pub struct OpenedDisk {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Called when the disk's queues are gone; writes data that are still in memory.
    pub close: Box<dyn FnOnce() -> Result<()>>,
}

impl From<Arc<dyn Disk>> for OpenedDisk {
    /// Takes a disk that keeps nothing in memory.
    fn from(disk: Arc<dyn Disk>) -> Self {
        Self { disk, close: Box::new(|| Ok(())) }
    }
}

/// Bytes in each read when the whole disk is read.
const READ_BYTES: u64 = 1 << 18;

/// A test that cuts the power.
pub struct PowerCutTest<'a> {
    /// The storage before the workload, which changes it.
    pub storage: SimStorage,
    /// Opens the disk.
    pub open: OpenDisk<'a>,
    /// Checks the image right after a cut, before anything opens it, and again after it has been used.
    pub check: CheckStorage<'a>,
    /// The guest's requests.
    pub workload: Workload,
    /// The number of queues, each on its own reactor.
    pub queues: usize,
    /// How many outcomes to try for each cut.
    pub outcomes: u64,
    /// Cuts at every `stride`th event.
    pub stride: u64,
}

/// The counts of a test.
#[derive(Debug, Default, Clone, Copy)]
pub struct Summary {
    /// The number of power cuts or injected faults.
    pub moments: u64,
    /// The number of storages that were checked and reopened.
    pub reopened: u64,
    /// The number of requests that failed.
    pub errors: u64,
}

impl PowerCutTest<'_> {
    /// Runs the workload once, then cuts the power at each of its write and flush boundaries. Returns the first error,
    /// with everything needed to reproduce it.
    pub fn run(&self) -> std::result::Result<Summary, String> {
        self.at_each_moment(|replay, now, model, summary| {
            for outcome in 0..self.outcomes {
                let seed = mix(self.workload.seed, outcome);
                let place = || format!("seed {}, cut at event {now}, outcome {outcome}", self.workload.seed);
                self.judge(&replay.power_cut(seed), model, seed).map_err(|wrong| format!("{}: {wrong}", place()))?;
                summary.reopened += 1;
            }
            if summary.moments.is_multiple_of(4) {
                let place = || format!("seed {}, killed at event {now}", self.workload.seed);
                let after = replay.process_killed(self.workload.seed);
                self.judge(&after, model, now).map_err(|wrong| format!("{}: {wrong}", place()))?;
                summary.reopened += 1;
            }
            Ok(())
        })
    }

    /// Runs the workload once, then kills the process at each of its write and flush boundaries. The next process goes on
    /// with what it finds, of which much is not durable. Then the power is cut.
    pub fn run_with_kills(&self) -> std::result::Result<Summary, String> {
        self.at_each_moment(|replay, now, model, summary| {
            for outcome in 0..self.outcomes {
                let seed = mix(self.workload.seed, outcome);
                let place = || format!("seed {}, killed at event {now}, outcome {outcome}", self.workload.seed);
                let after = replay.left_by_killed(seed);
                self.judge_left(&after, model, mix(seed, now)).map_err(|wrong| format!("{}: {wrong}", place()))?;
                summary.reopened += 3;
            }
            Ok(())
        })
    }

    fn at_each_moment(
        &self,
        mut judge: impl FnMut(&Replay, u64, &ModelDisk, &mut Summary) -> std::result::Result<(), String>,
    ) -> std::result::Result<Summary, String> {
        let before = || format!("seed {}: before any cut", self.workload.seed);
        let (initial, story) = self.play().map_err(|wrong| format!("{}: {wrong}", before()))?;
        let mut model = initial;
        let mut events = story.events.iter().peekable();
        let mut replay = self.storage.take_recording().replay();
        let mut summary = Summary::default();
        while let Some(now) = replay.advance() {
            while let Some((_, event)) = events.next_if(|(at, _)| *at <= now) {
                event.tell(&mut model)?;
            }
            if !now.is_multiple_of(self.stride) {
                continue;
            }
            summary.moments += 1;
            judge(&replay, now, &model, &mut summary)?;
        }
        Ok(summary)
    }

    /// Checks what a killed process has left: a flush of the next one makes all durable that it shows, and without a flush
    /// its writes do not show elsewhere after a power cut.
    fn judge_left(&self, after: &SimStorage, model: &ModelDisk, seed: u64) -> std::result::Result<(), String> {
        (self.check)(after).map_err(|wrong| format!("the image is damaged: {wrong}"))?;
        let mut session = Session::open(after, self.open, seed, 1)?;
        let contents = session.read_all()?;
        model.check_after_crash(&contents)?;
        let mut model = model.clone().after_kill(&contents);
        // Without a volatile cache, a write that asks for a flush first makes none: all of this process is durable.
        let (tag, requests) = (1 << 32, if session.info().volatile_cache { seed % 3 * 8 } else { 0 });
        if requests > 0 {
            let (span, granule) = (self.workload.span_bytes, self.workload.granule_bytes);
            let workload =
                Workload { first_tag: tag, flush_percent: 5, ..Workload::new(seed, requests, span, granule) };
            let queues = session.queues.clone();
            workload.run(&mut session.harness, &queues, &mut model, &|| 0)?;
        } else {
            model.submit(tag, &Request::Flush);
            session.call(Request::Flush)?;
            model.complete(&Reply { tag, result: Ok(()), data: Vec::new() })?;
        }
        for outcome in 0..2 {
            let cut = after.power_cut(mix(seed, outcome));
            (self.check)(&cut).map_err(|wrong| format!("the image is damaged by a later cut: {wrong}"))?;
            let contents = Session::open(&cut, self.open, seed, 1)?.read_all()?;
            model
                .check_after_crash(&contents)
                .map_err(|wrong| format!("a later cut, after {requests} requests, outcome {outcome}: {wrong}"))?;
        }
        session.close()
    }

    /// Runs the workload and records it. Returns the model at the start, and the story.
    fn play(&self) -> std::result::Result<(ModelDisk, Story), String> {
        let (start, volatile_cache) = {
            let mut session = Session::open(&self.storage, self.open, self.workload.seed, 1)?;
            let contents = (session.read_all()?, session.info().volatile_cache);
            session.close()?;
            contents
        };
        let initial = ModelDisk::new(&start, volatile_cache);
        self.storage.record();
        let mut session = Session::open(&self.storage, self.open, self.workload.seed, self.queues)?;
        let mut model = initial.clone();
        let storage = self.storage.clone();
        let queues = session.queues.clone();
        let story = self.workload.run(&mut session.harness, &queues, &mut model, &move || storage.now())?;
        model.check_live(&session.read_all()?)?;
        session.close()?;
        (self.check)(&self.storage)?;
        let mut session = Session::open(&self.storage.process_killed(0), self.open, self.workload.seed, 1)?;
        model.check_live(&session.read_all()?).map_err(|wrong| format!("closed and reopened: {wrong}"))?;
        Ok((initial, story))
    }

    /// Checks that the image is sound, that flushed data are there, that untouched data are unchanged, and that the
    /// image can be used.
    fn judge(&self, after: &SimStorage, model: &ModelDisk, seed: u64) -> std::result::Result<(), String> {
        (self.check)(after).map_err(|wrong| format!("the image is damaged: {wrong}"))?;
        let mut session = Session::open(after, self.open, seed, 1)?;
        let contents = session.read_all()?;
        model.check_after_crash(&contents)?;
        if seed.is_multiple_of(4) {
            // Uses the image further: writes must not land in space that the crash left in use.
            let mut model = ModelDisk::new(&contents, session.info().volatile_cache);
            let span = self.workload.span_bytes;
            let workload =
                Workload { first_tag: 1 << 32, ..Workload::new(seed, 12, span, self.workload.granule_bytes) };
            let queues = session.queues.clone();
            workload.run(&mut session.harness, &queues, &mut model, &|| 0)?;
            model.check_live(&session.read_all()?)?;
            let again = after.power_cut(seed);
            (self.check)(&again).map_err(|wrong| format!("the image is damaged by a second cut: {wrong}"))?;
            let contents = Session::open(&again, self.open, seed, 1)?.read_all()?;
            model.check_after_crash(&contents).map_err(|wrong| format!("a second cut: {wrong}"))?;
            session.close()?;
            (self.check)(after).map_err(|wrong| format!("the image is damaged after going on: {wrong}"))?;
        }
        Ok(())
    }
}

/// A test that injects faults.
pub struct FaultTest<'a> {
    /// Makes new storage.
    pub storage: &'a dyn Fn() -> SimStorage,
    /// Opens the disk.
    pub open: OpenDisk<'a>,
    /// Checks the image after the workload, and after it has been used again.
    pub check: CheckStorage<'a>,
    /// The file that fails.
    pub file: &'a str,
    /// The kind of operation that fails.
    pub kind: OpKind,
    /// The action on the operation.
    pub action: FaultAction,
    /// Whether all later operations of the kind fail, too.
    pub persistent: bool,
    /// The guest's requests, which may fail.
    pub workload: Workload,
    /// The number of queues.
    pub queues: usize,
    /// Fails every `stride`th operation.
    pub stride: u64,
}

impl FaultTest<'_> {
    /// Runs the workload again and again, each time with the next operation failing, until no operation is hit.
    pub fn run(&self) -> std::result::Result<Summary, String> {
        let mut summary = Summary::default();
        for nth in (0..).step_by(self.stride as usize) {
            let place = || {
                let (seed, kind, action) = (self.workload.seed, self.kind, self.action);
                format!("seed {seed}, {kind:?} number {nth} of '{}': {action:?}", self.file)
            };
            match self.one(nth).map_err(|wrong| format!("{}: {wrong}", place()))? {
                None => break,
                Some(errors) => {
                    summary.moments += 1;
                    summary.reopened += 3;
                    summary.errors += errors;
                }
            }
        }
        Ok(summary)
    }

    /// Runs the workload once. Returns how many requests failed; `None` if there was no such operation.
    fn one(&self, nth: u64) -> std::result::Result<Option<u64>, String> {
        let storage = (self.storage)();
        let (start, volatile_cache) = {
            let mut session = Session::open(&storage, self.open, self.workload.seed, 1)?;
            let contents = (session.read_all()?, session.info().volatile_cache);
            session.close()?;
            contents
        };
        let before = storage.pushed(self.file, self.kind);
        let fault = if self.persistent { Fault::from_nth } else { Fault::nth };
        storage.inject(self.file, fault(self.kind, nth, self.action));
        let mut model = ModelDisk::new(&start, volatile_cache);
        let mut errors = 0;
        let mut closed = true;
        let is_hit = || storage.pushed(self.file, self.kind) > before + nth;
        // Opening may fail: that is a correct answer.
        let session = Session::open(&storage, self.open, self.workload.seed, self.queues);
        let mut hit = is_hit();
        if let Ok(mut session) = session {
            let workload = Workload { may_fail: true, ..self.workload.clone() };
            let queues = session.queues.clone();
            let story = workload.run(&mut session.harness, &queues, &mut model, &|| 0)?;
            errors = story.errors.len() as u64;
            hit = is_hit();
            self.judge_crash(&storage.power_cut(nth), &model).map_err(|wrong| format!("power cut: {wrong}"))?;
            self.judge_crash(&storage.process_killed(nth), &model).map_err(|wrong| format!("killed: {wrong}"))?;
            // The disk may have stopped itself after the fault, but it must not return wrong data.
            if let Ok(contents) = session.read_all() {
                model.check_live(&contents)?;
            }
            closed = session.leave()?.is_ok();
        }
        storage.clear_faults();
        (self.check)(&storage).map_err(|wrong| format!("the image is damaged: {wrong}"))?;
        let after = storage.process_killed(nth);
        let mut session = Session::open(&after, self.open, nth, 1)?;
        let contents = session.read_all()?;
        // A disk that was not closed properly may have lost unflushed writes.
        let verdict = if closed { model.check_live(&contents) } else { model.check_after_crash(&contents) };
        verdict.map_err(|wrong| format!("after reopening: {wrong}"))?;
        let mut model = ModelDisk::new(&contents, volatile_cache);
        let span = self.workload.span_bytes;
        let workload = Workload { first_tag: 1 << 32, ..Workload::new(nth, 12, span, self.workload.granule_bytes) };
        let queues = session.queues.clone();
        workload.run(&mut session.harness, &queues, &mut model, &|| 0)?;
        model.check_live(&session.read_all()?)?;
        session.close()?;
        (self.check)(&after).map_err(|wrong| format!("the image is damaged after going on: {wrong}"))?;
        Ok(hit.then_some(errors))
    }
}

impl FaultTest<'_> {
    /// Checks that the fault has not made a crash any worse.
    fn judge_crash(&self, after: &SimStorage, model: &ModelDisk) -> std::result::Result<(), String> {
        (self.check)(after).map_err(|wrong| format!("the image is damaged: {wrong}"))?;
        model.check_after_crash(&Session::open(after, self.open, self.workload.seed, 1)?.read_all()?)
    }
}

/// A disk that is open on simulated reactors.
pub struct Session {
    /// The reactors of its queues.
    pub harness: SimHarness,
    /// Its queues.
    pub queues: Vec<u64>,
    opened: OpenedDisk,
}

impl Session {
    /// Opens the disk, and `queues` queues, each on its own reactor.
    pub fn open(
        storage: &SimStorage,
        open: OpenDisk<'_>,
        seed: u64,
        queues: usize,
    ) -> std::result::Result<Self, String> {
        let opened = open(storage).map_err(|error| format!("cannot open the disk: {error}"))?;
        let mut harness = SimHarness::new(seed, queues);
        let mut ids = Vec::new();
        for reactor in 0..queues {
            let queue = harness.open(&opened.disk, reactor).map_err(|error| format!("cannot open a queue: {error}"))?;
            ids.push(queue);
        }
        Ok(Self { harness, queues: ids, opened })
    }

    /// Returns the disk's properties.
    #[must_use]
    pub fn info(&self) -> DiskInfo {
        self.opened.disk.info()
    }

    /// Makes one request on the first queue, alone. Returns the data of a read.
    pub fn call(&mut self, request: Request) -> std::result::Result<Vec<u8>, String> {
        let name = crate::workload::brief(&request);
        self.harness.submit(self.queues[0], vec![(u64::MAX, request)]);
        loop {
            let turn = self.harness.turn();
            if let Some((_, reply)) = turn.replies.into_iter().find(|(_, reply)| reply.tag == u64::MAX) {
                return reply.result.map(|()| reply.data).map_err(|error| format!("{name} failed: {error}"));
            }
            if turn.idle {
                return Err(format!("{name} was never completed"));
            }
        }
    }

    /// Reads the whole disk.
    pub fn read_all(&mut self) -> std::result::Result<Vec<u8>, String> {
        let size = self.info().size_bytes;
        let mut contents = Vec::new();
        while (contents.len() as u64) < size {
            let offset = contents.len() as u64;
            let length = READ_BYTES.min(size - offset) as usize;
            contents.extend(self.call(Request::read(offset, length))?);
        }
        Ok(contents)
    }

    /// Drops the queues, lets the storage finish, and closes the disk. The outer error must never happen: something was
    /// left running. The inner error is the disk's.
    pub fn leave(mut self) -> std::result::Result<Result<()>, String> {
        for queue in std::mem::take(&mut self.queues) {
            self.harness.close(queue);
        }
        self.harness.settle();
        let closed = (self.opened.close)();
        drop(self.opened.disk);
        self.harness.settle();
        match self.harness.reactor().operations_in_flight() {
            0 => Ok(closed),
            left => Err(format!("{left} operations are still in flight after the disk was dropped")),
        }
    }

    /// As [`Session::leave`], but closing must succeed.
    pub fn close(self) -> std::result::Result<(), String> {
        self.leave()?.map_err(|error| format!("cannot close the disk: {error}"))
    }
}
