//! Space for a whole disk in advance, as `qemu-img create -o preallocation=` makes it.

use crate::edit::EditWatch;
use crate::live::image::{OpenOptions, Qcow2};
use crate::live::write::Prepared;
use block::{Error, ErrorKind, FileInfo, FileOp, IoError, IoResult, MetaIo, Result};
use memory::IoBuf;
use std::str::FromStr;

/// How much a new image allocates in advance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// All tables, and a place for each cluster that takes no space yet.
    Metadata,
    /// As `Metadata`, and space for each cluster.
    Falloc,
    /// Space for each cluster, by writing zeros.
    Full,
}

impl FromStr for Preallocation {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "off" => Ok(Self::Off),
            "metadata" => Ok(Self::Metadata),
            "falloc" => Ok(Self::Falloc),
            "full" => Ok(Self::Full),
            _ => Err(Error::new(
                ErrorKind::BadOption,
                format!("preallocation={name}: valid are off, metadata, falloc, full"),
            )),
        }
    }
}

/// Zeros that are written at once.
const ZERO_BYTES: u64 = 1 << 20;

/// Allocates every cluster of a new image; durable when this returns. `file` describes the image's file in its present
/// state. `watch` gets bytes of the disk. If it gives up, an incomplete image is left.
pub async fn preallocate(io: &MetaIo, file: &FileInfo, mode: Preallocation, watch: &mut EditWatch<'_>) -> Result<()> {
    if mode == Preallocation::Off {
        return Ok(());
    }
    let qcow2 = Qcow2::open(io, file, OpenOptions { name: file.name.clone(), read_only: false }).await?;
    let failed = |error| Error::with_source(ErrorKind::Io, format!("cannot preallocate '{}'", file.name), error);
    if !give_places(&qcow2, io, file, mode, watch).await.map_err(failed)? {
        return Err(Error::new(ErrorKind::Io, "interrupted"));
    }
    qcow2.close(io).await.map_err(failed)?;
    qcow2.trim(io).await.map_err(failed)
}

/// Gives every cluster its place. Returns false if `watch` gave up.
async fn give_places(
    qcow2: &Qcow2,
    io: &MetaIo,
    file: &FileInfo,
    mode: Preallocation,
    watch: &mut EditWatch<'_>,
) -> IoResult<bool> {
    let size = qcow2.size_bytes();
    // A device, which a data file may be, would show its former contents.
    let stale = file.block_device || io.data().is_some();
    let mut at = 0;
    while at < size {
        let Prepared::New(mut allocation) = qcow2.prepare_write(io, at, size.saturating_sub(at)).await? else {
            return Err(IoError::EIO);
        };
        allocation.without_data = true;
        let (offset, length) = (allocation.file_offset, allocation.length_bytes);
        match mode {
            Preallocation::Full => write_zeros(io, offset, length).await?,
            Preallocation::Falloc => zero(io, offset, length, false).await?,
            Preallocation::Metadata if stale => zero(io, offset, length, true).await?,
            Preallocation::Metadata | Preallocation::Off => {}
        }
        at = allocation.guest_offset.saturating_add(length);
        qcow2.commit_write(io, allocation).await?;
        // An allocation is small, so `watch` is asked often enough.
        if !watch(at.min(size), size) {
            return Ok(false);
        }
    }
    Ok(true)
}

async fn zero(io: &MetaIo, offset: u64, length: u64, may_unmap: bool) -> IoResult {
    io.data().unwrap_or(io.queue()).start(FileOp::WriteZeroes { offset, length, may_unmap }).await
}

async fn write_zeros(io: &MetaIo, offset: u64, length: u64) -> IoResult {
    let queue = io.data().unwrap_or(io.queue());
    let mut done = 0;
    while done < length {
        let part = length.saturating_sub(done).min(ZERO_BYTES);
        let data = IoBuf::zeroed(usize::try_from(part).map_err(|_| IoError::EIO)?).whole();
        queue.start(FileOp::Write { offset: offset.saturating_add(done), data, fua: false }).await?;
        done = done.saturating_add(part);
    }
    Ok(())
}
