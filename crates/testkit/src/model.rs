//! A model of the data that a guest may read from a disk, sector by sector, now and after a power cut.
//!
//! Each sector has a list of the values written to it, with the times at which each write was submitted and completed.
//! A later write supersedes a value if it completed, and was submitted after the value's own write had completed. For a
//! power cut, the later write must also be durable. All values that are not superseded may be read. A failed write and
//! a discard supersede nothing: the old contents may still be there.

use crate::dice::mix;
use crate::request::{Reply, Request};
use block::Tag;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

const SECTOR: usize = 512;

#[derive(Debug, Clone)]
enum Value {
    Zero,
    Bytes(Arc<[u8; SECTOR]>),
}

impl Value {
    fn of(bytes: &[u8]) -> Self {
        if bytes.iter().all(|byte| *byte == 0) {
            return Self::Zero;
        }
        let mut own = [0; SECTOR];
        own.copy_from_slice(bytes);
        Self::Bytes(Arc::new(own))
    }

    fn is(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => bytes.iter().all(|byte| *byte == 0),
            Self::Bytes(own) => own[..] == *bytes,
        }
    }

    fn byte(&self, at: usize) -> Option<u8> {
        match self {
            Self::Zero => Some(0),
            Self::Bytes(own) => own.get(at).copied(),
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Zero => "zeros".to_owned(),
            Self::Bytes(bytes) => describe(&bytes[..]),
        }
    }
}

#[derive(Debug, Clone)]
struct Times {
    submitted: u64,
    completed: Option<u64>,
    /// Whether it completed without an error and leaves no older value.
    supersedes: bool,
    durable: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    op: u64,
    value: Value,
}

#[derive(Debug, Clone)]
struct Flying {
    op: u64,
    request: Request,
}

/// The model; see the module's documentation. Tags must be unique among the requests in flight.
#[derive(Debug, Clone)]
pub struct ModelDisk {
    sectors: Vec<Vec<Entry>>,
    times: BTreeMap<u64, Times>,
    flying: BTreeMap<Tag, Flying>,
    volatile_cache: bool,
    mixes: bool,
    clock: u64,
}

/// Stands for the operation that wrote the initial contents.
const START: u64 = 0;

impl ModelDisk {
    /// Makes a model of a disk that holds `contents`, durably. Without a volatile cache, every completed write is
    /// durable.
    #[must_use]
    pub fn new(contents: &[u8], volatile_cache: bool) -> Self {
        let sectors = contents.chunks_exact(SECTOR).map(|bytes| vec![Entry { op: START, value: Value::of(bytes) }]);
        let start = Times { submitted: 0, completed: Some(0), supersedes: true, durable: true };
        Self {
            sectors: sectors.collect(),
            times: BTreeMap::from([(START, start)]),
            flying: BTreeMap::new(),
            volatile_cache,
            mixes: false,
            clock: 0,
        }
    }

    /// Sets whether a read that overlaps a write may see old and new bytes in one sector. The kernel's page cache
    /// allows this, because it copies without a lock.
    #[must_use]
    pub fn with_mixed_reads(self, mixes: bool) -> Self {
        Self { mixes, ..self }
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        (self.sectors.len() * SECTOR) as u64
    }

    /// Makes the model of a disk whose process was killed, and which the next process shows as `contents`. What was not
    /// durable is still not, so after a power cut the disk may hold either.
    #[must_use]
    pub fn after_kill(mut self, contents: &[u8]) -> Self {
        let ended = self.tick();
        for Flying { op, .. } in std::mem::take(&mut self.flying).into_values() {
            if let Some(times) = self.times.get_mut(&op) {
                times.completed = Some(ended);
            }
        }
        let op = self.tick();
        self.times.insert(op, Times { submitted: op, completed: Some(op), supersedes: true, durable: false });
        for (entries, bytes) in self.sectors.iter_mut().zip(contents.chunks_exact(SECTOR)) {
            entries.push(Entry { op, value: Value::of(bytes) });
        }
        self
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Notes that a request is submitted. Call it before submitting to the disk.
    pub fn submit(&mut self, tag: Tag, request: &Request) {
        let op = self.tick();
        let times = Times { submitted: op, completed: None, supersedes: false, durable: false };
        self.times.insert(op, times);
        let (offset, length) = request.range();
        let (first, last) = ((offset / SECTOR as u64) as usize, ((offset + length) / SECTOR as u64) as usize);
        for sector in first..last.min(self.sectors.len()) {
            let value = match request {
                Request::Write { data, .. } | Request::WriteByMap { data, .. } => {
                    let start = sector * SECTOR - offset as usize;
                    Value::of(&data[start..start + SECTOR])
                }
                Request::Discard { .. } | Request::WriteZeroes { .. } => Value::Zero,
                Request::Read { .. } | Request::Flush => break,
            };
            self.prune(sector);
            self.sectors[sector].push(Entry { op, value });
        }
        self.flying.insert(tag, Flying { op, request: request.clone() });
    }

    /// Checks the reply to a request. Call it after the disk has completed the request. The error says what is wrong.
    pub fn complete(&mut self, reply: &Reply) -> Result<(), String> {
        let Some(Flying { op, request }) = self.flying.remove(&reply.tag) else {
            return Err(format!("tag {} completed and is not in flight", reply.tag));
        };
        let now = self.tick();
        let submitted = op;
        let Some(times) = self.times.get_mut(&op) else { return Ok(()) };
        times.completed = Some(now);
        if reply.result.is_err() {
            return Ok(());
        }
        match request {
            Request::Read { offset, .. } => return self.check_read(submitted, offset, &reply.data),
            Request::Write { flags, .. } | Request::WriteZeroes { flags, .. } => {
                times.supersedes = true;
                times.durable = flags.is_fua() || !self.volatile_cache;
                if flags.is_preflush() {
                    self.flushed(submitted);
                }
            }
            Request::WriteByMap { .. } => {
                times.supersedes = true;
                times.durable = !self.volatile_cache;
            }
            Request::Discard { .. } => {}
            Request::Flush => self.flushed(submitted),
        }
        Ok(())
    }

    /// Notes that a flush submitted at this time has succeeded.
    fn flushed(&mut self, submitted: u64) {
        let covered = |times: &&mut Times| times.completed.is_some_and(|completed| completed < submitted);
        self.times.values_mut().filter(covered).for_each(|times| times.durable = true);
    }

    fn check_read(&self, submitted: u64, offset: u64, data: &[u8]) -> Result<(), String> {
        let first = (offset / SECTOR as u64) as usize;
        for (index, bytes) in data.chunks_exact(SECTOR).enumerate() {
            let settled = |times: &Times| times.completed.is_some_and(|at| at < submitted);
            let checked = self.check(first + index, bytes, "a read", settled);
            if checked.is_err() && !self.is_mixed(first + index, bytes, submitted) {
                return checked;
            }
        }
        Ok(())
    }

    /// Whether each byte is one that a read submitted at this time may find, if a write overlapped the read.
    fn is_mixed(&self, sector: usize, bytes: &[u8], submitted: u64) -> bool {
        let Some(entries) = self.sectors.get(sector).filter(|_| self.mixes) else { return false };
        let newest = self.newest(entries, |times| times.completed.is_some_and(|at| at < submitted));
        let ended_after = |entry: &Entry, time: u64| self.times[&entry.op].completed.is_none_or(|at| at >= time);
        let allowed: Vec<_> = entries.iter().filter(|entry| ended_after(entry, newest)).collect();
        allowed.iter().any(|entry| ended_after(entry, submitted))
            && bytes.iter().enumerate().all(|(at, byte)| allowed.iter().any(|e| e.value.byte(at) == Some(*byte)))
    }

    /// Checks the contents of the whole disk. No write may be in flight.
    pub fn check_live(&self, contents: &[u8]) -> Result<(), String> {
        self.check_all(contents, "the disk", |times| times.completed.is_some())
    }

    /// Checks the contents of the whole disk after a power cut at this moment.
    pub fn check_after_crash(&self, contents: &[u8]) -> Result<(), String> {
        self.check_all(contents, "the disk after the cut", |times| times.durable)
    }

    fn check_all(&self, contents: &[u8], what: &str, settled: impl Fn(&Times) -> bool) -> Result<(), String> {
        if contents.len() as u64 != self.size_bytes() {
            return Err(format!("{what} has {} bytes, not {}", contents.len(), self.size_bytes()));
        }
        for (sector, bytes) in contents.chunks_exact(SECTOR).enumerate() {
            self.check(sector, bytes, what, &settled)?;
        }
        Ok(())
    }

    /// Whether `bytes` is a value of the sector that no `settled` later write superseded.
    fn check(&self, sector: usize, bytes: &[u8], what: &str, settled: impl Fn(&Times) -> bool) -> Result<(), String> {
        let Some(entries) = self.sectors.get(sector) else {
            return Err(format!("{what}: sector {sector} is behind the end"));
        };
        let newest = self.newest(entries, settled);
        let allowed = |entry: &&Entry| self.times[&entry.op].completed.is_none_or(|completed| completed >= newest);
        if entries.iter().filter(allowed).any(|entry| entry.value.is(bytes)) {
            return Ok(());
        }
        let mut message = format!("{what}: sector {sector} holds {}, allowed are", describe(bytes));
        for entry in entries.iter().filter(allowed) {
            let times = &self.times[&entry.op];
            let state = match (times.completed, times.supersedes, times.durable) {
                (None, ..) => "in flight",
                (_, false, _) => "failed or discarded",
                (_, _, true) => "durable",
                (_, _, false) => "volatile",
            };
            let _ = write!(message, " [{}, {state}]", entry.value.describe());
        }
        Err(message)
    }

    /// Returns when the latest `settled` superseding write was submitted. Values completed before it are gone.
    fn newest(&self, entries: &[Entry], settled: impl Fn(&Times) -> bool) -> u64 {
        let times = entries.iter().map(|entry| &self.times[&entry.op]);
        times.filter(|times| times.supersedes && settled(times)).map(|times| times.submitted).max().unwrap_or(0)
    }

    /// Drops values that can never be read again.
    fn prune(&mut self, sector: usize) {
        let oldest = self.flying.values().map(|flying| flying.op).min().unwrap_or(u64::MAX);
        let gone = self.newest(&self.sectors[sector], |times| {
            times.durable && times.completed.is_some_and(|completed| completed < oldest)
        });
        let times = &self.times;
        self.sectors[sector].retain(|entry| times[&entry.op].completed.is_none_or(|completed| completed >= gone));
    }
}

const MAGIC: &[u8; 8] = b"testkit\0";

/// Returns bytes for write number `id` at `offset`, unlike those of any other. Each sector says where it belongs.
#[must_use]
pub fn stamped(id: u64, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for (index, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        let number = offset / SECTOR as u64 + index as u64;
        crate::dice::fill_seeded(mix(id, number), sector);
        if sector.len() >= 24 {
            sector[..8].copy_from_slice(MAGIC);
            sector[8..16].copy_from_slice(&id.to_le_bytes());
            sector[16..24].copy_from_slice(&number.to_le_bytes());
        }
    }
    bytes
}

/// Describes the contents of a sector.
fn describe(bytes: &[u8]) -> String {
    if bytes.iter().all(|byte| *byte == 0) {
        return "zeros".to_owned();
    }
    let word = |at: usize| bytes.get(at..at + 8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    match (bytes.get(..8), word(8), word(16)) {
        (Some(magic), Some(id), Some(sector)) if magic == MAGIC => {
            let whole = stamped(id, sector * SECTOR as u64, bytes.len()) == bytes;
            format!("{}write {id} of sector {sector}", if whole { "" } else { "a torn " })
        }
        _ => format!("garbage starting {:02x?}", &bytes[..bytes.len().min(8)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{IoError, OpFlags};

    fn write(model: &mut ModelDisk, tag: Tag, byte: u8) {
        model.submit(tag, &Request::write(0, vec![byte; SECTOR]));
    }

    fn done(model: &mut ModelDisk, tag: Tag) {
        model.complete(&Reply { tag, result: Ok(()), data: Vec::new() }).unwrap();
    }

    /// Returns bytes that, according to the model, the sector may hold after a crash.
    fn after_crash(model: &ModelDisk) -> Vec<u8> {
        (0..10).filter(|byte| model.check_after_crash(&[*byte; SECTOR]).is_ok()).collect()
    }

    fn live(model: &ModelDisk) -> Vec<u8> {
        (0..10).filter(|byte| model.check_live(&[*byte; SECTOR]).is_ok()).collect()
    }

    #[test]
    fn only_a_flush_submitted_after_a_write_completed_settles_it() {
        let mut model = ModelDisk::new(&[9; SECTOR], true);
        write(&mut model, 1, 1);
        model.submit(2, &Request::Flush);
        done(&mut model, 1);
        done(&mut model, 2);
        assert_eq!((live(&model), after_crash(&model)), (vec![1], vec![1, 9]));
        model.submit(3, &Request::Flush);
        done(&mut model, 3);
        assert_eq!(after_crash(&model), [1]);
        write(&mut model, 4, 2);
        write(&mut model, 5, 3);
        assert_eq!(after_crash(&model), [1, 2, 3], "in flight");
        done(&mut model, 4);
        done(&mut model, 5);
        assert_eq!((live(&model), after_crash(&model)), (vec![2, 3], vec![1, 2, 3]), "they overlapped in time");
    }

    #[test]
    fn a_preflush_settles_what_completed_before_and_not_its_own_data() {
        let mut model = ModelDisk::new(&[9; 2 * SECTOR], true);
        let preflush = |offset| Request::Write {
            offset,
            data: vec![2; SECTOR].into(),
            pieces: Vec::new(),
            flags: OpFlags::PREFLUSH,
        };
        let survives = |model: &ModelDisk, first: u8, second: u8| {
            let sectors = [[first; SECTOR], [second; SECTOR]].concat();
            model.check_after_crash(&sectors).is_ok()
        };
        write(&mut model, 1, 1);
        done(&mut model, 1);
        model.submit(2, &preflush(SECTOR as u64));
        assert!(survives(&model, 9, 9));
        done(&mut model, 2);
        assert!(!survives(&model, 9, 9) && survives(&model, 1, 9) && survives(&model, 1, 2));
        write(&mut model, 3, 3);
        done(&mut model, 3);
        model.submit(4, &preflush(SECTOR as u64));
        model.complete(&Reply { tag: 4, result: Err(IoError::EIO), data: Vec::new() }).unwrap();
        assert!(survives(&model, 1, 9), "it failed, so it says nothing");
    }

    #[test]
    fn failed_writes_and_discards_leave_the_old_contents_possible() {
        let mut model = ModelDisk::new(&[9; SECTOR], true);
        write(&mut model, 1, 1);
        model.complete(&Reply { tag: 1, result: Err(IoError::EIO), data: Vec::new() }).unwrap();
        assert_eq!(live(&model), [1, 9]);
        write(&mut model, 2, 2);
        done(&mut model, 2);
        assert_eq!((live(&model), after_crash(&model)), (vec![2], vec![1, 2, 9]));
        model.submit(3, &Request::Discard { offset: 0, length: SECTOR as u64 });
        done(&mut model, 3);
        assert_eq!(live(&model), [0, 2]);
    }

    #[test]
    fn reads_are_judged_by_what_overlapped_them() {
        let mut model = ModelDisk::new(&[9; SECTOR], true);
        write(&mut model, 1, 1);
        model.submit(2, &Request::read(0, SECTOR));
        done(&mut model, 1);
        let reply = |tag, byte| Reply { tag, result: Ok(()), data: vec![byte; SECTOR] };
        let mut other = model.clone();
        assert!(model.complete(&reply(2, 9)).is_ok() && other.complete(&reply(2, 1)).is_ok());
        model.submit(3, &Request::read(0, SECTOR));
        assert!(model.complete(&reply(3, 9)).is_err());
    }

    #[test]
    fn without_a_volatile_cache_completed_is_durable() {
        let mut model = ModelDisk::new(&[9; SECTOR], false);
        write(&mut model, 1, 1);
        assert_eq!(after_crash(&model), [1, 9]);
        done(&mut model, 1);
        assert_eq!(after_crash(&model), [1]);
    }
}
