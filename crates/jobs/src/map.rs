//! Lists the runs of a disk.

use crate::Control;
use block::{Disk, Result, Run, StatusQuery};

/// The number of runs between two checks of the caller's cancel flag.
const RUNS_PER_LOOK: usize = 256;

/// Shows every run of the disk to `visit`, in order.
pub fn map(disk: &dyn Disk, control: &mut Control<'_>, mut visit: impl FnMut(Run) -> Result<()>) -> Result<()> {
    let total = disk.info().size_bytes;
    for (index, run) in disk.block_status(&StatusQuery::all())?.enumerate() {
        let run = run?;
        visit(run)?;
        if index % RUNS_PER_LOOK == 0 {
            control.check()?;
            control.tell(run.end(), total);
        }
    }
    control.tell(total, total);
    Ok(())
}
