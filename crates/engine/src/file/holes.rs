//! How long a file is, and where its holes are.

use std::io;
use std::os::fd::OwnedFd;

/// The length of a file or block device, now.
pub(crate) fn length_of(fd: &OwnedFd, block_device: bool) -> io::Result<u64> {
    if block_device {
        return Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

/// Whether a hole begins at `offset`, and how many of `length` bytes are like their first. Where the file system cannot
/// tell, all is data.
pub(crate) fn hole_at(fd: &OwnedFd, block_device: bool, offset: u64, length: u64) -> io::Result<(bool, u64)> {
    match hole_before_data(fd, block_device, offset, length)? {
        Begins::Hole { length } => Ok((true, length)),
        Begins::Data => {
            let hole = rustix::fs::seek(fd, rustix::fs::SeekFrom::Hole(offset))?;
            // The file may have changed in between: something is always said.
            Ok((false, length.min(hole.saturating_sub(offset).max(1))))
        }
        Begins::Unknown => Ok((false, length)),
    }
}

/// As [`hole_at`] of a regular file, but where data end is not asked: they are told no further than to the end of their
/// granule, all of which is called data.
pub(crate) fn hole_or_granule_at(
    fd: &OwnedFd,
    offset: u64,
    length: u64,
    granule_bytes: u64,
) -> io::Result<(bool, u64)> {
    match hole_before_data(fd, false, offset, length)? {
        Begins::Hole { length } => Ok((true, length)),
        Begins::Data => {
            let inside = offset.checked_rem(granule_bytes).map_or(length, |into| granule_bytes - into);
            Ok((false, length.min(inside)))
        }
        Begins::Unknown => Ok((false, length)),
    }
}

/// What begins at an offset.
enum Begins {
    Hole {
        length: u64,
    },
    Data,
    /// Data, as far as the file system can tell.
    Unknown,
}

fn hole_before_data(fd: &OwnedFd, block_device: bool, offset: u64, length: u64) -> io::Result<Begins> {
    use rustix::io::Errno;
    if block_device || length == 0 {
        return Ok(Begins::Unknown);
    }
    match rustix::fs::seek(fd, rustix::fs::SeekFrom::Data(offset)) {
        // Nothing but a hole from here to the end of the file.
        Err(Errno::NXIO) => Ok(Begins::Hole { length }),
        Ok(data) if data > offset => Ok(Begins::Hole { length: length.min(data - offset) }),
        Ok(_) => Ok(Begins::Data),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Begins::Unknown),
        Err(errno) => Err(errno.into()),
    }
}
