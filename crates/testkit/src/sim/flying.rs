//! Operations in flight on simulated files.

use super::fault::FaultAction;
use super::state::{Effect, End, OpId, SIM_SECTOR_BYTES};
use super::storage::{Event, SimFile, Storage};
use crate::dice::{Dice, fill_seeded};
use block::{Done, FileIo, FileOp, IoError, IoErrorKind, IoResult, PastEnd};
use std::sync::Arc;

/// An operation between its push and its completion. It is carried out in parts, at different moments.
pub(crate) struct Flying {
    file: Arc<SimFile>,
    op: FileOp,
    done: Done,
    id: OpId,
    /// Parts that have not been carried out.
    parts: Vec<(u64, u64)>,
    result: IoResult,
    /// The bytes as pushed; `None` if a part takes its bytes from the buffer when it is carried out.
    early: Option<Arc<[u8]>>,
    pub(crate) stalls: bool,
    /// What it was to make durable is forgotten.
    loses: bool,
    /// The turn from which it may go on.
    pub(crate) due: u64,
}

impl Flying {
    pub(crate) fn start(file: Arc<SimFile>, io: FileIo, dice: &mut Dice) -> Self {
        let FileIo { op, done, .. } = io;
        let mut storage = file.storage().lock();
        let id = storage.new_op();
        let fault = storage.fault(file.index(), &op);
        let mut flying = Self {
            parts: Vec::new(),
            result: Ok(()),
            early: None,
            stalls: false,
            loses: false,
            due: 0,
            id,
            op,
            done,
            file: Arc::clone(&file),
        };
        match flying.validate(&storage) {
            Err(error) => flying.result = Err(error),
            Ok((start, end)) => {
                flying.log_push(&mut storage, dice);
                flying.parts = split(start, end, dice);
                flying.hit(fault, start, end, dice);
            }
        }
        drop(storage);
        flying
    }

    /// Refuses what the file cannot do. Returns the range otherwise.
    fn validate(&self, storage: &Storage) -> IoResult<(u64, u64)> {
        let entry = &storage.files[self.file.index()];
        let options = &entry.options;
        if options.read_only
            && let Some(error) = self.op.refused_when_read_only()
        {
            return Err(error);
        }
        let (offset, length) = match &self.op {
            FileOp::Read { offset, data, .. } | FileOp::Write { offset, data, .. } => {
                (*offset, data.length_bytes() as u64)
            }
            FileOp::Discard { offset, length } | FileOp::WriteZeroes { offset, length, .. } => (*offset, *length),
            FileOp::SetLength { length } => (0, *length),
            FileOp::Flush => (0, 0),
        };
        let end = offset.checked_add(length).filter(|end| *end <= i64::MAX as u64).ok_or(IoError::EIO)?;
        let grows = match &self.op {
            FileOp::Write { .. } | FileOp::WriteZeroes { .. } => length > 0 && end > entry.state.length(),
            FileOp::SetLength { .. } if options.block_device => return Err(IoError::new(IoErrorKind::Unsupported)),
            FileOp::SetLength { .. } => end > entry.state.length(),
            FileOp::Discard { .. } if !options.can_discard => return Err(IoError::new(IoErrorKind::Unsupported)),
            FileOp::Read { past_end: PastEnd::Fails, .. } if end > entry.state.length() => return Err(IoError::EIO),
            _ => false,
        };
        if grows && (options.block_device || end > options.max_length_bytes) {
            return Err(IoError::new(IoErrorKind::NoSpace));
        }
        Ok(if matches!(self.op, FileOp::SetLength { .. }) { (0, 1) } else { (offset, end) })
    }

    fn log_push(&mut self, storage: &mut Storage, dice: &mut Dice) {
        let zeroes = storage.files[self.file.index()].options.discard_zeroes;
        let effect = match &self.op {
            FileOp::Read { .. } => return,
            FileOp::Write { offset, data, fua } => {
                let bytes: Arc<[u8]> = data.to_vec().into();
                self.early = dice.chance(50).then(|| Arc::clone(&bytes));
                Effect::Write { offset: *offset, data: bytes, fua: *fua }
            }
            FileOp::WriteZeroes { offset, length, .. } => Effect::Zero { offset: *offset, length: *length },
            FileOp::Discard { offset, length } => Effect::Discard { offset: *offset, length: *length, zeroes },
            FileOp::SetLength { length } => Effect::SetLength { length: *length },
            FileOp::Flush => Effect::Flush,
        };
        storage.happen(Event::Push { op: self.id, file: self.file.index(), effect });
    }

    fn hit(&mut self, fault: Option<FaultAction>, start: u64, end: u64, dice: &mut Dice) {
        match fault {
            None => {}
            Some(FaultAction::Stall) => self.stalls = true,
            Some(FaultAction::Fail(error) | FaultAction::Lose(error)) => {
                self.parts.clear();
                self.result = Err(error);
                self.loses = matches!(fault, Some(FaultAction::Lose(_)));
            }
            Some(FaultAction::Short(error)) => {
                // Storage never tears a sector, not even when it fails.
                let cut = (start + dice.below(end - start)) / SIM_SECTOR_BYTES * SIM_SECTOR_BYTES;
                self.parts = if cut > start { vec![(start, cut)] } else { Vec::new() };
                self.result = Err(error);
            }
            Some(FaultAction::Scatter(error)) => {
                self.parts = sectors(start, end).filter(|_| dice.chance(50)).collect();
                self.result = Err(error);
            }
        }
    }

    /// Carries out one more part. Returns false if there was none left.
    pub(crate) fn apply_next(&mut self, dice: &mut Dice) -> bool {
        let Some((from, to)) = self.parts.pop() else {
            return false;
        };
        let mut storage = self.file.storage().lock();
        let file = self.file.index();
        let bytes = match &self.op {
            FileOp::Flush => return true,
            FileOp::Read { offset, data, .. } => {
                let mut bytes = vec![0; (to - from) as usize];
                storage.files[file].state.read(from, &mut bytes);
                data.copy_from_slice((from - offset) as usize, &bytes);
                return true;
            }
            FileOp::Write { offset, data, .. } => {
                let (skip, length) = ((from - offset) as usize, (to - from) as usize);
                Some(match &self.early {
                    Some(bytes) => bytes[skip..skip + length].into(),
                    None => data.slice(skip, length).to_vec().into(),
                })
            }
            _ => None,
        };
        storage.happen(Event::Apply { op: self.id, file, from, to, bytes });
        drop(storage);
        let _ = dice;
        true
    }

    /// Reports the end.
    pub(crate) fn finish(self) {
        let Self { file, op, done, id, result, loses, .. } = self;
        if let FileOp::Read { data, .. } = &op {
            if result.is_err() {
                // A failed read leaves garbage, so that nothing can rely on its buffer.
                let mut garbage = vec![0; data.length_bytes()];
                fill_seeded(id, &mut garbage);
                data.copy_from_slice(0, &garbage);
            }
        } else {
            let end = match &result {
                Ok(()) => End::Done,
                Err(_) if loses => End::Lost,
                Err(_) => End::Failed,
            };
            file.storage().lock().happen(Event::Complete { op: id, file: file.index(), end });
        }
        // The memory is released before anybody learns of the end.
        drop(op);
        done.complete(result);
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.stalls && !self.file.storage().lock().stalled_released()
    }
}

fn sectors(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let first = start / SIM_SECTOR_BYTES;
    let last = end.div_ceil(SIM_SECTOR_BYTES);
    (first..last)
        .map(move |sector| ((sector * SIM_SECTOR_BYTES).max(start), ((sector + 1) * SIM_SECTOR_BYTES).min(end)))
}

/// Cuts a range at up to three sector boundaries and shuffles the parts.
fn split(start: u64, end: u64, dice: &mut Dice) -> Vec<(u64, u64)> {
    if start == end {
        return Vec::new();
    }
    let mut cuts = vec![start, end];
    let first = start / SIM_SECTOR_BYTES + 1;
    let inner = end.div_ceil(SIM_SECTOR_BYTES).saturating_sub(first);
    if inner > 0 && dice.chance(50) {
        for _ in 0..=dice.below(3) {
            cuts.push((first + dice.below(inner)) * SIM_SECTOR_BYTES);
        }
    }
    cuts.sort_unstable();
    cuts.dedup();
    let mut parts: Vec<_> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
    dice.shuffle(&mut parts);
    parts
}
