//! Walking along the runs of a disk beside another one.

use block::Result;
use image::{Extents, Run};

/// The runs of one disk, looked at from offsets that only grow.
pub(crate) struct Cursor {
    runs: Extents,
    run: Option<Run>,
}

impl Cursor {
    pub(crate) fn new(runs: Extents) -> Self {
        Self { runs, run: None }
    }

    /// The run that holds `offset`; `None` behind the end of the disk.
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
