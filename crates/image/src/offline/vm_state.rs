//! Reads the state of a machine from an internal snapshot. It lies behind the disk, as QEMU's `savevm` writes it.

use crate::file_name::FileName;
use crate::guess::Format;
use crate::open::gate::Role;
use crate::open::layer::open_layer;
use block::{Error, ErrorKind, Extent, File, IoError, IoResult, MetaIo, PastEnd, Result, SECTOR_BYTES, block_on};
use format_qcow2::SnapshotName;
use memory::AlignedBuf;
use std::sync::Arc;

/// The most bytes that are read at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Gives `each` the machine's state in the snapshot `which` (an id or a name) of a qcow2 image, piece by piece, and its whole
/// length. Returns that length. Blocks.
pub fn read_vm_state(
    name: impl Into<FileName>,
    file: &Arc<dyn File>,
    which: &str,
    each: &mut dyn FnMut(&[u8], u64) -> Result<()>,
) -> Result<u64> {
    let name = name.into();
    let state = SnapshotName::StateOf(which.to_owned());
    let layer = open_layer(&name, Arc::clone(file), Format::OF_SNAPSHOTS, Role::ReadOnly, Some(&state))?;
    let io = layer.open_blocking()?;
    let snapshots = block_on(layer.mapping.snapshots(&io, &name.to_string()))?;
    let length = state.find_in(&snapshots).map_or(0, |snapshot| snapshot.vm_state_bytes);
    // Each byte of the state takes a byte in the file.
    if length > file.length_bytes()? {
        let what = format!(
            "'{name}': the snapshot '{which}' says that it keeps {length} bytes of a machine's state, which is \
                            more than the file holds"
        );
        return Err(Error::new(ErrorKind::BadImage, what));
    }
    let begin = layer.size_bytes.saturating_sub(length.next_multiple_of(SECTOR_BYTES));
    let failed = |error| layer.failed("cannot read the machine's state", error);
    let mut done = 0u64;
    while done < length {
        let wanted = length.saturating_sub(done).min(PIECE_BYTES);
        let piece = block_on(read(&layer.mapping, &io, begin.saturating_add(done), wanted)).map_err(failed)?;
        each(&piece, length)?;
        done = done.saturating_add((piece.len() as u64).max(1));
    }
    match done == length {
        true => Ok(length),
        false => Err(Error::new(ErrorKind::Io, format!("'{name}': more was read than there is"))),
    }
}

/// Reads the first part of a range.
async fn read(mapping: &crate::chain::mapping::Mapping, io: &MetaIo, offset: u64, length: u64) -> IoResult<AlignedBuf> {
    let mapped = mapping.resolve(io, offset, length).await?;
    let bytes = usize::try_from(mapped.length_bytes.min(length)).map_err(|_| IoError::EIO)?;
    match mapped.extent {
        Extent::Data { offset, .. } => io.read(offset, bytes, PastEnd::Zeros).await,
        Extent::Zero | Extent::Backing => Ok(AlignedBuf::zeroed(bytes)),
        // Nobody compresses a machine's state.
        Extent::Compressed(_) => Err(IoError::EIO),
    }
}
