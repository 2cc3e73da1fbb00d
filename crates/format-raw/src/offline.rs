//! Makes raw images and changes their sizes, while nobody uses them.

use block::{Error, ErrorKind, File, MetaIo, Result, SECTOR_BYTES};
use memory::AlignedBuf;
use std::ops::Range;

/// The most bytes that are allocated at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What added space becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSpace {
    /// A hole.
    Hole,
    /// Space that the host reserves.
    Allocated,
    /// Written zeros.
    Zeros,
}

/// Makes a raw image in an empty file, durably: all of it is a hole. A block device keeps its length, which must
/// suffice.
pub async fn create(io: &MetaIo, file: &dyn File, size_bytes: u64) -> Result<()> {
    let name = &file.info().name;
    let bad = |what: String| Error::new(ErrorKind::BadOption, format!("'{name}': {what}"));
    let length = size_bytes.checked_next_multiple_of(SECTOR_BYTES);
    let length = length.ok_or_else(|| bad(format!("{size_bytes} bytes is too large")))?;
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot create '{name}'"), error);
    if file.info().block_device {
        let device_bytes = file.length_bytes()?;
        if device_bytes < length {
            let what = format!("'{name}': the device has {device_bytes} bytes, and {length} are needed");
            return Err(Error::new(ErrorKind::Io, what));
        }
    } else {
        io.set_length(length).await.map_err(failed)?;
    }
    io.flush().await.map_err(failed)
}

/// Makes a raw image `size_bytes` long. The new part reads as zeros. Cuts data off only with `shrink`. `watch` is told
/// how many bytes are allocated and how many will be; it returns whether to go on. The change is durable when this
/// returns. If there is no space, or `watch` gives up, the image is unchanged.
pub async fn resize(
    io: &MetaIo,
    file: &dyn File,
    size_bytes: u64,
    shrink: bool,
    space: NewSpace,
    watch: &mut (dyn FnMut(u64, u64) -> bool + '_),
) -> Result<()> {
    let name = &file.info().name;
    let bad = |what: &str| Error::new(ErrorKind::BadOption, format!("'{name}': {what}"));
    let old_bytes = file.length_bytes()?;
    if file.info().block_device {
        // A server may have made its disk longer meanwhile, which the file notices here.
        if size_bytes > old_bytes && space == NewSpace::Hole && io.set_length(size_bytes).await.is_ok() {
            return Ok(());
        }
        let now_bytes = file.length_bytes()?;
        let what = match now_bytes == old_bytes {
            true => "a block device cannot be resized".to_owned(),
            false => format!("the server's disk has {now_bytes} bytes now: name that size"),
        };
        return Err(Error::new(ErrorKind::Unsupported, format!("'{name}': {what}")));
    }
    if size_bytes < old_bytes && !shrink {
        return Err(bad("Use the --shrink option to perform a shrink operation."));
    }
    if size_bytes < old_bytes && space != NewSpace::Hole {
        return Err(bad("Preallocation can only be used for growing images"));
    }
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot resize '{name}'"), error);
    // The size is set first: whatever happens afterwards, the disk has its old size or its new one.
    io.set_length(size_bytes).await.map_err(failed)?;
    if space != NewSpace::Hole
        && let Err(error) = fill(io, name, old_bytes..size_bytes, space, watch).await
    {
        // Best effort: the added space only reads as zeros.
        let _ = io.set_length(old_bytes).await;
        return Err(error);
    }
    io.flush().await.map_err(failed)
}

async fn fill(
    io: &MetaIo,
    name: &str,
    added: Range<u64>,
    space: NewSpace,
    watch: &mut (dyn FnMut(u64, u64) -> bool + '_),
) -> Result<()> {
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot make space for '{name}'"), error);
    let total = added.end.saturating_sub(added.start);
    let mut done = 0;
    while done < total {
        let (at, length) = (added.start.saturating_add(done), PIECE_BYTES.min(total.saturating_sub(done)));
        match space {
            NewSpace::Zeros => io.write(at, AlignedBuf::zeroed(usize::try_from(length).unwrap_or(0))).await,
            NewSpace::Hole | NewSpace::Allocated => io.write_zeroes(at, length, false).await,
        }
        .map_err(failed)?;
        done = done.saturating_add(length);
        if !watch(done, total) && done < total {
            return Err(Error::new(ErrorKind::Cancelled, "interrupted"));
        }
    }
    Ok(())
}
