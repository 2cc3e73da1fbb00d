//! Decides which parts of a conversion's sources are copied, zeroed or left alone, and in which pieces.

use crate::pipeline::Pipeline;
use crate::{Control, ConvertOptions, JobDisk};
use block::{Result, Run, Runs, StatusQuery};
use std::ops::Range;

/// The most bytes that are zeroed at once. This changes mostly metadata.
const ZERO_PIECE_BYTES: u64 = 64 << 20;
/// The most bytes that are tried at once where a table is damaged.
const SALVAGE_STEP_BYTES: u64 = 64 << 10;

/// The plan of a conversion.
#[derive(Clone)]
pub(crate) struct Plan {
    /// Copies begin at multiples of this, and end there or at the end of the disk.
    pub(crate) alignment: u64,
    /// The most that is copied at once; a multiple of the alignment.
    pub(crate) piece: u64,
    pub(crate) total: u64,
    /// From here on, unwritten parts of the target read as zeros.
    pub(crate) shows_zeros_from: u64,
    pub(crate) options: ConvertOptions,
}

/// A piece of work: a range of the target.
pub(crate) enum Piece {
    Copy(Range<u64>),
    Zero(Range<u64>),
}

impl Plan {
    /// Hands out copies of whole clusters (zeros beside the data are read with them), and zeros for the rest.
    pub(crate) fn hand_out(
        &self,
        sources: &[JobDisk],
        places: &[Range<u64>],
        pipeline: &Pipeline<Piece>,
        control: &mut Control<'_>,
    ) -> Result<()> {
        let mut walk = Walk { plan: self, pipeline, covered: 0, pending: 0..0, held: Vec::new() };
        let all_is_data = self.options.sparse_bytes == 0;
        if all_is_data && !self.options.top_only {
            // Whether clusters are compressed is not looked up here, so some may be.
            pipeline.widen();
            walk.copy(0..self.total, control);
            return Ok(());
        }
        for run in self.runs(sources, places) {
            let run = run?;
            control.check()?;
            if run.compressed {
                pipeline.widen();
            }
            let is_data = run.takes_read() || (all_is_data && run.zero && run.start < self.shows_zeros_from);
            if !(if is_data { walk.data(run, control) } else { walk.zero(run, control) }) {
                return Ok(());
            }
        }
        walk.end(control);
        Ok(())
    }

    /// Returns the runs of all sources, at their places in the target.
    fn runs(&self, sources: &[JobDisk], places: &[Range<u64>]) -> impl Iterator<Item = Result<Run>> {
        let layers = if self.options.top_only { 1 } else { usize::MAX };
        let query = StatusQuery::all().with(|query| query.layers = layers);
        let runs_of = |disk, start: u64| {
            let runs = SourceRuns { disk, query, salvages: self.options.salvage.is_some(), runs: None };
            runs.map(move |run| run.map(|run: Run| Run { start: run.start + start, ..run }))
        };
        let each: Vec<_> = sources.iter().zip(places).map(|(source, place)| runs_of(source, place.start)).collect();
        each.into_iter().flatten().flat_map(|run| {
            let (run, behind) = run.map_or_else(|error| (Err(error), None), |run| self.split(run));
            std::iter::once(run).chain(behind.map(Ok))
        })
    }

    /// Splits zeros at the place from which the target reads as zeros.
    fn split(&self, run: Run) -> (Result<Run>, Option<Run>) {
        let from = self.shows_zeros_from;
        if !run.zero || from <= run.start || run.end() <= from {
            return (Ok(run), None);
        }
        let length_bytes = from - run.start;
        let offset = run.offset.map(|offset| offset + length_bytes);
        let behind = Run { start: from, length_bytes: run.length_bytes - length_bytes, offset, ..run };
        (Ok(Run { length_bytes, ..run }), Some(behind))
    }
}

/// The runs of a disk. To salvage it, a part that its tables do not describe is tried too.
struct SourceRuns<'a> {
    disk: &'a JobDisk,
    /// The rest of the disk.
    query: StatusQuery,
    salvages: bool,
    runs: Option<Runs<'a>>,
}

impl Iterator for SourceRuns<'_> {
    type Item = Result<Run>;

    fn next(&mut self) -> Option<Result<Run>> {
        let runs = match self.runs.take() {
            Some(runs) => runs,
            None => match self.disk.block_status(&self.query) {
                Ok(runs) => runs,
                Err(error) => return Some(Err(error)),
            },
        };
        let run = match self.runs.insert(runs).next()? {
            Err(_) if self.salvages => {
                self.runs = None;
                let start = self.query.offset;
                let end = (start / SALVAGE_STEP_BYTES + 1) * SALVAGE_STEP_BYTES;
                Run::of_data(start, end.min(self.disk.info().size_bytes) - start)
            }
            Err(error) => return Some(Err(error)),
            Ok(run) => run,
        };
        self.query.offset = run.end();
        Some(Ok(run))
    }
}

/// A walk along the runs.
struct Walk<'a> {
    plan: &'a Plan,
    pipeline: &'a Pipeline<Piece>,
    /// Everything before this was handed out or is pending.
    covered: u64,
    /// A range to be copied, held back because more may follow.
    pending: Range<u64>,
    /// Zeros that end within a cluster, and whether they are left alone: if data follow there, the zeros are copied
    /// with them.
    held: Vec<(Range<u64>, bool)>,
}

/// All of these return false when no more pieces are wanted.
impl Walk<'_> {
    fn data(&mut self, run: Run, control: &mut Control<'_>) -> bool {
        let Plan { alignment, piece, total, .. } = *self.plan;
        if let Some((first, _)) = self.held.first() {
            self.covered = first.start;
            self.held.clear();
        }
        let start = (run.start / alignment * alignment).max(self.covered);
        let end = run.end().next_multiple_of(alignment).min(total);
        if start > self.pending.end || self.pending.is_empty() {
            let pending = std::mem::replace(&mut self.pending, start..start);
            if !self.copy(pending, control) {
                return false;
            }
        }
        self.pending.end = self.pending.end.max(end);
        self.covered = self.pending.end;
        // Full pieces are handed out at once.
        let whole = (self.pending.end - self.pending.start) / piece * piece;
        let first = self.pending.start;
        self.pending.start += whole;
        self.copy(first..first + whole, control)
    }

    fn zero(&mut self, run: Run, control: &mut Control<'_>) -> bool {
        let Plan { alignment, total, .. } = *self.plan;
        let (start, end) = (run.start.max(self.covered), run.end());
        if start >= end {
            return true;
        }
        self.covered = end;
        let options = &self.plan.options;
        let leave = match options.top_only {
            true => !run.zero || start >= self.plan.shows_zeros_from,
            false => options.target_is_zero,
        };
        let cut = if end == total { end } else { (end / alignment * alignment).max(start) };
        if cut > start && !(self.release(control) && self.fill(start..cut, leave, control)) {
            return false;
        }
        if cut < end {
            self.held.push((cut..end, leave));
        }
        true
    }

    /// Hands out the held zeros: no data follow in their cluster.
    fn release(&mut self, control: &mut Control<'_>) -> bool {
        let held = std::mem::take(&mut self.held);
        held.into_iter().all(|(range, leave)| self.fill(range, leave, control))
    }

    fn end(&mut self, control: &mut Control<'_>) -> bool {
        let pending = std::mem::take(&mut self.pending);
        self.release(control) && self.copy(pending, control)
    }

    fn copy(&self, mut range: Range<u64>, control: &mut Control<'_>) -> bool {
        let piece = self.plan.piece;
        while !range.is_empty() {
            let end = range.end.min((range.start / piece + 1) * piece);
            self.pipeline.pass(end - range.start, control);
            if !self.pipeline.push(Piece::Copy(range.start..end), end - range.start, control) {
                return false;
            }
            range.start = end;
        }
        true
    }

    fn fill(&self, mut range: Range<u64>, leave: bool, control: &mut Control<'_>) -> bool {
        if leave {
            self.pipeline.skip(range.end - range.start);
            return true;
        }
        while !range.is_empty() {
            let end = range.end.min(range.start + ZERO_PIECE_BYTES);
            if !self.pipeline.push(Piece::Zero(range.start..end), end - range.start, control) {
                return false;
            }
            range.start = end;
        }
        true
    }
}
