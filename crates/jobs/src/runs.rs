//! Walking along the runs of a disk beside another one.

use block::{Result, Run, Runs};

/// The runs of one disk, looked at from offsets that only grow.
pub(crate) struct Cursor<'a> {
    runs: Runs<'a>,
    run: Option<Run>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(runs: Runs<'a>) -> Self {
        Self { runs, run: None }
    }

    /// Returns the run that holds `offset`; `None` behind the end of the disk.
    pub(crate) fn at(&mut self, offset: u64) -> Result<Option<Run>> {
        while self.run.is_none_or(|run| run.end() <= offset) {
            match self.runs.next() {
                Some(run) => self.run = Some(run?),
                None => return Ok(None),
            }
        }
        Ok(self.run)
    }
}
