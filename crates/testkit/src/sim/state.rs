//! The state of a simulated file: durable sectors, the unflushed versions on top of them, and operations in flight.
//!
//! The volatile cache works by sectors of 512 bytes. At a power cut, each sector independently becomes its durable
//! version or any later one, applied or still in flight. Space that was never written nor punched has no defined
//! contents: it reads as garbage, before a cut and after.

use crate::dice::{Dice, fill_seeded, mix};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The unit that is kept or lost as a whole.
pub(crate) const SIM_SECTOR_BYTES: u64 = 512;
const SECTOR: usize = 512;

/// The number of an operation in the log.
pub(crate) type OpId = u64;

/// The effect of an operation on a file.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    /// Stores bytes as they were when pushed.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        data: Arc<[u8]>,
        /// Whether they are durable at completion.
        fua: bool,
    },
    /// Zeroes a range, growing the file.
    Zero {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Discards a range.
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Whether the range then reads as zeros. If not, it may read as anything.
        zeroes: bool,
    },
    /// Sets the length.
    SetLength {
        /// The new length.
        length: u64,
    },
    /// Makes everything durable that completed before.
    Flush,
}

/// The result of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It succeeded.
    Done,
    /// It failed.
    Failed,
    /// It failed, and nothing that completed before will become durable.
    Lost,
}

impl Effect {
    /// Returns the bytes that it touches.
    pub(crate) fn range(&self) -> (u64, u64) {
        match self {
            Self::Write { offset, data, .. } => (*offset, offset + data.len() as u64),
            Self::Zero { offset, length } | Self::Discard { offset, length, .. } => (*offset, offset + length),
            Self::SetLength { .. } | Self::Flush => (0, 0),
        }
    }
}

#[derive(Debug, Clone)]
enum Content {
    Garbage,
    Zero,
    Data(Arc<[u8; SECTOR]>),
}

#[derive(Debug, Clone)]
struct Version<T> {
    op: OpId,
    value: T,
}

#[derive(Debug, Clone)]
struct Pending {
    effect: Effect,
    pushed_at: u64,
}

/// The state of one file. See the module's documentation.
#[derive(Debug, Clone)]
pub(crate) struct FileState {
    durable: BTreeMap<u64, Content>,
    durable_length: u64,
    versions: BTreeMap<u64, Vec<Version<Content>>>,
    lengths: Vec<Version<u64>>,
    pending: BTreeMap<OpId, Pending>,
    /// When each write completed, in events of the storage's clock.
    completed: BTreeMap<OpId, u64>,
    /// Untouched sectors below this are zeros: the file was created with this length.
    zero_below: u64,
    grows_with_zeros: bool,
    salt: u64,
}

impl FileState {
    pub(crate) fn new(length: u64, salt: u64, grows_with_zeros: bool) -> Self {
        Self {
            durable: BTreeMap::new(),
            durable_length: length,
            versions: BTreeMap::new(),
            lengths: Vec::new(),
            pending: BTreeMap::new(),
            completed: BTreeMap::new(),
            zero_below: length.div_ceil(SIM_SECTOR_BYTES),
            grows_with_zeros,
            salt,
        }
    }

    pub(crate) fn length(&self) -> u64 {
        self.lengths.last().map_or(self.durable_length, |version| version.value)
    }

    /// Stores `bytes` durably, outside the log: for preparing a file.
    pub(crate) fn load(&mut self, offset: u64, bytes: &[u8]) {
        self.for_sectors(offset, offset + bytes.len() as u64, |state, sector, from, to| {
            let start = (sector * SIM_SECTOR_BYTES + from as u64 - offset) as usize;
            let content = state.patched(sector, from, &bytes[start..start + (to - from)]);
            state.versions.remove(&sector);
            state.durable.insert(sector, content);
        });
        self.durable_length = self.durable_length.max(offset + bytes.len() as u64);
        self.lengths.clear();
    }

    pub(crate) fn read(&self, offset: u64, target: &mut [u8]) {
        let end = offset + target.len() as u64;
        let mut at = offset;
        while at < end {
            let sector = at / SIM_SECTOR_BYTES;
            let skip = (at % SIM_SECTOR_BYTES) as usize;
            let take = (SECTOR - skip).min((end - at) as usize);
            let start = (at - offset) as usize;
            let bytes = self.bytes_of(sector, &self.current(sector));
            target[start..start + take].copy_from_slice(&bytes[skip..skip + take]);
            at += take as u64;
        }
        let length = self.length();
        if end > length {
            let behind = (length.max(offset) - offset) as usize;
            target[behind..].fill(0);
        }
    }

    pub(crate) fn push(&mut self, op: OpId, effect: &Effect, now: u64) {
        self.pending.insert(op, Pending { effect: effect.clone(), pushed_at: now });
    }

    /// Carries out the part of `op` in `from..to`. `bytes` are those of a write.
    pub(crate) fn apply(&mut self, op: OpId, from: u64, to: u64, bytes: Option<&[u8]>) {
        let Some(effect) = self.pending.get(&op).map(|pending| pending.effect.clone()) else { return };
        match effect {
            Effect::Write { .. } => {
                let bytes = bytes.unwrap_or_default();
                self.for_sectors(from, to, |state, sector, skip, end| {
                    let start = (sector * SIM_SECTOR_BYTES + skip as u64 - from) as usize;
                    let content = state.patched(sector, skip, &bytes[start..start + (end - skip)]);
                    state.add(op, sector, content);
                });
                self.set_length(op, self.length().max(to));
            }
            Effect::Zero { .. } => {
                self.zero(op, from, to);
                self.set_length(op, self.length().max(to));
            }
            Effect::Discard { zeroes: true, .. } => self.zero(op, from, to.min(self.length())),
            Effect::Discard { zeroes: false, .. } => self.scramble(op, from, to.min(self.length())),
            Effect::SetLength { length } => {
                let (first, last) = (length.div_ceil(SIM_SECTOR_BYTES), self.length().div_ceil(SIM_SECTOR_BYTES));
                let gone = if self.grows_with_zeros { Content::Zero } else { Content::Garbage };
                for sector in first..last {
                    self.add(op, sector, gone.clone());
                }
                self.set_length(op, length);
            }
            Effect::Flush => {}
        }
    }

    pub(crate) fn complete(&mut self, op: OpId, end: End, now: u64) {
        let Some(pending) = self.pending.remove(&op) else { return };
        let ok = end == End::Done;
        match pending.effect {
            Effect::Flush if ok => self.flush(pending.pushed_at),
            // Effects that are no longer in `completed` are covered by no flush.
            Effect::Flush if end == End::Lost => self.completed.retain(|_, at| *at >= pending.pushed_at),
            Effect::Flush => {}
            effect => {
                self.completed.insert(op, now);
                if ok && matches!(effect, Effect::Write { fua: true, .. }) {
                    let (start, end) = effect.range();
                    self.for_sectors(start, end, |state, sector, _, _| state.harden(sector, |version| version == op));
                    self.harden_length(|version| version == op);
                }
            }
        }
    }

    /// Returns the file after a power cut now. With `keep_applied` only the process died: effects that reached the file
    /// stay, and operations in flight may have happened in part.
    pub(crate) fn cut(&self, dice: &mut Dice, keep_applied: bool) -> Self {
        let mut choices: BTreeMap<u64, Vec<Version<Content>>> = self.versions.clone();
        let mut lengths = self.lengths.clone();
        for (op, pending) in &self.pending {
            self.add_pending(*op, &pending.effect, &mut choices, &mut lengths);
        }
        let mut fate = Fate::throw(dice);
        let mut durable = self.durable.clone();
        for (sector, versions) in &choices {
            let applied = self.versions.get(sector).map_or(0, Vec::len);
            let floor = if keep_applied { applied } else { 0 };
            // Choice 0 is the durable version.
            match fate.choose(dice, versions, floor) {
                0 => {}
                chosen => drop(durable.insert(*sector, versions[chosen - 1].value.clone())),
            }
        }
        let floor = if keep_applied { self.lengths.len() } else { 0 };
        let length = match fate.choose(dice, &lengths, floor) {
            0 => self.durable_length,
            chosen => lengths[chosen - 1].value,
        };
        let end_sector = length.div_ceil(SIM_SECTOR_BYTES);
        drop(durable.split_off(&end_sector));
        Self {
            durable,
            durable_length: length,
            zero_below: self.zero_below.min(end_sector),
            grows_with_zeros: self.grows_with_zeros,
            ..Self::new(0, self.salt, self.grows_with_zeros)
        }
    }

    /// Returns the file as the next process finds it after this one was killed: what reached the file is as volatile as it
    /// was. Operations in flight happened, happened in part, or did not happen.
    pub(crate) fn left_by_killed(&self, dice: &mut Dice, now: u64) -> Self {
        let mut after = self.clone();
        for (op, pending) in self.pending.clone() {
            let (start, end) = pending.effect.range();
            let sectors = (end.div_ceil(SIM_SECTOR_BYTES)).saturating_sub(start / SIM_SECTOR_BYTES);
            let (has_happened, is_whole) = (dice.chance(60), dice.chance(50));
            let reached = match is_whole {
                true => end,
                false => ((start / SIM_SECTOR_BYTES + dice.below(sectors + 1)) * SIM_SECTOR_BYTES).clamp(start, end),
            };
            if has_happened && (reached > start || start == end) {
                let bytes = match &pending.effect {
                    Effect::Write { data, .. } => Some(&data[..(reached - start) as usize]),
                    _ => None,
                };
                after.apply(op, start, reached, bytes);
            }
            // A flush has not happened, and no write has made itself durable.
            after.complete(op, End::Failed, now);
        }
        after
    }

    fn add_pending(
        &self,
        op: OpId,
        effect: &Effect,
        choices: &mut BTreeMap<u64, Vec<Version<Content>>>,
        lengths: &mut Vec<Version<u64>>,
    ) {
        // The effect is applied to a copy that holds only the range of the effect.
        let mut after = Self::new(self.length(), self.salt, self.grows_with_zeros);
        after.zero_below = 0;
        let (start, end) = effect.range();
        let (mut first, mut last) = (start / SIM_SECTOR_BYTES, end.div_ceil(SIM_SECTOR_BYTES));
        if let Effect::SetLength { length } = effect {
            (first, last) = (length.div_ceil(SIM_SECTOR_BYTES), self.length().div_ceil(SIM_SECTOR_BYTES));
        }
        for sector in first..last {
            let now = choices.get(&sector).and_then(|list| list.last()).map(|version| version.value.clone());
            after.durable.insert(sector, now.unwrap_or_else(|| self.current(sector)));
        }
        after.push(op, effect, 0);
        let bytes = if let Effect::Write { data, .. } = effect { Some(&data[..]) } else { None };
        after.apply(op, start, end, bytes);
        for (sector, versions) in after.versions {
            choices.entry(sector).or_default().extend(versions);
        }
        lengths.extend(after.lengths);
    }

    fn zero(&mut self, op: OpId, from: u64, to: u64) {
        self.for_sectors(from, to, |state, sector, skip, end| {
            let whole = skip == 0 && end == SECTOR;
            let content = if whole { Content::Zero } else { state.patched(sector, skip, &[0; SECTOR][..end - skip]) };
            state.add(op, sector, content);
        });
    }

    /// Carries out a discard without promises: each whole sector keeps its contents, or becomes zeros or garbage.
    fn scramble(&mut self, op: OpId, from: u64, to: u64) {
        let salt = self.salt;
        self.for_sectors(from, to, |state, sector, skip, end| match mix(mix(salt, op), sector) % 3 {
            0 if skip == 0 && end == SECTOR => state.add(op, sector, Content::Zero),
            1 if skip == 0 && end == SECTOR => state.add(op, sector, Content::Garbage),
            _ => {}
        });
    }

    fn flush(&mut self, pushed_at: u64) {
        let completed = std::mem::take(&mut self.completed);
        let covered = |op: OpId| completed.get(&op).is_some_and(|at| *at < pushed_at);
        for sector in self.versions.keys().copied().collect::<Vec<_>>() {
            self.harden(sector, covered);
        }
        self.harden_length(covered);
        self.completed = completed.into_iter().filter(|(_, at)| *at >= pushed_at).collect();
    }

    /// Makes the newest `covered` version the durable one, and drops older ones.
    fn harden(&mut self, sector: u64, covered: impl Fn(OpId) -> bool) {
        let Some(versions) = self.versions.get_mut(&sector) else { return };
        let Some(newest) = versions.iter().rposition(|version| covered(version.op)) else { return };
        if let Some(version) = versions.drain(..=newest).next_back() {
            self.durable.insert(sector, version.value);
        }
        if versions.is_empty() {
            self.versions.remove(&sector);
        }
    }

    fn harden_length(&mut self, covered: impl Fn(OpId) -> bool) {
        if let Some(newest) = self.lengths.iter().rposition(|version| covered(version.op))
            && let Some(version) = self.lengths.drain(..=newest).next_back()
        {
            self.durable_length = version.value;
        }
    }

    fn add(&mut self, op: OpId, sector: u64, content: Content) {
        self.versions.entry(sector).or_default().push(Version { op, value: content });
    }

    fn set_length(&mut self, op: OpId, length: u64) {
        self.lengths.push(Version { op, value: length });
    }

    fn current(&self, sector: u64) -> Content {
        let newest = self.versions.get(&sector).and_then(|versions| versions.last()).map(|version| &version.value);
        newest.or_else(|| self.durable.get(&sector)).cloned().unwrap_or_else(|| self.untouched(sector))
    }

    fn untouched(&self, sector: u64) -> Content {
        if sector < self.zero_below || self.grows_with_zeros { Content::Zero } else { Content::Garbage }
    }

    fn bytes_of(&self, sector: u64, content: &Content) -> [u8; SECTOR] {
        match content {
            Content::Zero => [0; SECTOR],
            Content::Data(bytes) => **bytes,
            Content::Garbage => {
                let mut bytes = [0; SECTOR];
                fill_seeded(mix(self.salt, sector), &mut bytes);
                bytes
            }
        }
    }

    fn patched(&self, sector: u64, skip: usize, bytes: &[u8]) -> Content {
        let mut whole = if bytes.len() == SECTOR { [0; SECTOR] } else { self.bytes_of(sector, &self.current(sector)) };
        whole[skip..skip + bytes.len()].copy_from_slice(bytes);
        Content::Data(Arc::new(whole))
    }

    /// Calls `visit(self, sector, from, to)` for each sector of the range, with the touched bytes within it.
    fn for_sectors(&mut self, start: u64, end: u64, mut visit: impl FnMut(&mut Self, u64, usize, usize)) {
        let mut at = start;
        while at < end {
            let sector = at / SIM_SECTOR_BYTES;
            let skip = (at % SIM_SECTOR_BYTES) as usize;
            let take = (SECTOR - skip).min((end - at) as usize);
            visit(self, sector, skip, skip + take);
            at += take as u64;
        }
    }
}

/// How a cut chooses among the volatile versions: mostly sector by sector, sometimes in patterns that find most faults.
enum Fate {
    Sectors { kept_percent: u64 },
    Operations { seed: u64 },
    AllKept,
    AllLost,
}

impl Fate {
    fn throw(dice: &mut Dice) -> Self {
        match dice.below(10) {
            0 => Self::AllKept,
            1 => Self::AllLost,
            2 => Self::Sectors { kept_percent: 10 },
            3 => Self::Sectors { kept_percent: 90 },
            4 | 5 => Self::Operations { seed: dice.seed() },
            _ => Self::Sectors { kept_percent: 50 },
        }
    }

    /// Returns zero for the durable version, or one more than the index of a later one; at least `floor`.
    fn choose<T>(&mut self, dice: &mut Dice, versions: &[Version<T>], floor: usize) -> usize {
        let chosen = match self {
            Self::AllLost => 0,
            Self::AllKept => versions.len(),
            Self::Sectors { kept_percent } if dice.chance(*kept_percent) => 1 + dice.index(versions.len().max(1)),
            Self::Sectors { .. } => 0,
            Self::Operations { seed } => {
                versions.iter().rposition(|version| mix(*seed, version.op) & 1 == 0).map_or(0, |index| index + 1)
            }
        };
        chosen.clamp(floor.min(versions.len()), versions.len())
    }
}
