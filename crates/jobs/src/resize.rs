//! Changing the size of a disk whose image is not in use.

use crate::Control;
use block::{Error, ErrorKind, File, FileOp, FileQueue, Result, block_on};
use image::GrowBy;
use memory::{AlignedBuf, IoBuf};
use std::ops::Range;
use std::rc::Rc;

/// How much is allocated at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Makes a raw image `size_bytes` long. The new part reads as zeros. Cuts data off only with `shrink`. The change is
/// durable when this returns. If there is no space, or the job is cancelled, the image is as it was.
pub fn resize_raw(
    file: &dyn File,
    size_bytes: u64,
    shrink: bool,
    preallocation: GrowBy,
    control: &mut Control<'_>,
) -> Result<()> {
    let name = &file.info().name;
    let bad = |what: &str| Error::new(ErrorKind::BadOption, format!("'{name}': {what}"));
    if file.info().block_device {
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': a block device cannot be resized")));
    }
    let old_bytes = file.length_bytes()?;
    if size_bytes < old_bytes && !shrink {
        return Err(bad("Use the --shrink option to perform a shrink operation."));
    }
    if size_bytes < old_bytes && preallocation != GrowBy::Nothing {
        return Err(bad("Preallocation can only be used for growing images"));
    }
    if preallocation == GrowBy::Tables {
        return Err(bad("a raw image has no metadata to preallocate; use off, falloc or full"));
    }
    let queue = file.open_blocking()?;
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot resize '{name}'"), error);
    // The size first: whatever happens afterwards, the disk is the old one or the new one.
    block_on(queue.start(FileOp::SetLength { length: size_bytes })).map_err(failed)?;
    if preallocation != GrowBy::Nothing
        && let Err(error) = fill(&queue, name, old_bytes..size_bytes, preallocation, control)
    {
        // It only reads as zeros.
        let _ = block_on(queue.start(FileOp::SetLength { length: old_bytes }));
        return Err(error);
    }
    block_on(queue.start(FileOp::Flush)).map_err(failed)
}

fn fill(
    queue: &Rc<dyn FileQueue>,
    name: &str,
    added: Range<u64>,
    preallocation: GrowBy,
    control: &mut Control<'_>,
) -> Result<()> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot make space for '{name}'"), error);
    let mut at = added.start;
    while at < added.end {
        control.check()?;
        let length = PIECE_BYTES.min(added.end - at);
        let op = match preallocation {
            GrowBy::Zeros => {
                let data = IoBuf::from_aligned(AlignedBuf::zeroed(length as usize)).whole();
                FileOp::Write { offset: at, data, fua: false }
            }
            _ => FileOp::WriteZeroes { offset: at, length, may_unmap: false },
        };
        block_on(queue.start(op)).map_err(failed)?;
        at += length;
        control.tell(at - added.start, added.end - added.start);
    }
    Ok(())
}
