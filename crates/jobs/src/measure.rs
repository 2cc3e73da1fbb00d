//! How large a file a disk would take in another image.

use crate::Control;
use block::{Disk, Result, StatusQuery};
use image::{CreateOptions, Measure};

/// Returns the file size that a copy of `source` would have, in an image with the options `target` and the source's
/// size.
pub fn measure(source: &dyn Disk, target: &CreateOptions, control: &mut Control<'_>) -> Result<Measure> {
    let size = source.info().size_bytes;
    let Some(unit_bytes) = target.measured_unit_bytes() else { return target.measure(size) };
    // Checked before the source is read.
    target.measure(0)?;
    // Units of the new image that hold data, each counted once.
    let (mut needed, mut counted_to) = (0u64, 0u64);
    let query = StatusQuery::all().with(|query| query.granule_bytes = Some(unit_bytes));
    for run in source.block_status(&query)? {
        let run = run?;
        control.check()?;
        if run.takes_read() {
            let start = (run.start / unit_bytes * unit_bytes).max(counted_to);
            let end = run.end().next_multiple_of(unit_bytes);
            needed += end.saturating_sub(start);
            counted_to = counted_to.max(end);
        }
        control.tell(run.end(), size);
    }
    target.measure(needed)
}
