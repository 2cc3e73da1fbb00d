//! The length of a file, and its holes.

use std::io;
use std::os::fd::OwnedFd;

/// Returns the length of a file or block device at this moment.
pub(crate) fn length_of(fd: &OwnedFd, block_device: bool) -> io::Result<u64> {
    if block_device {
        return Ok(rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

/// Returns whether a hole begins at `offset`, and for how many of `length` bytes this holds. If the file system cannot
/// tell, all is data.
pub(crate) fn hole_at(fd: &OwnedFd, block_device: bool, offset: u64, length: u64) -> io::Result<(bool, u64)> {
    match hole_before_data(fd, block_device, offset, length)? {
        Begins::Hole { length } => Ok((true, length)),
        Begins::Data => {
            let hole = rustix::fs::seek(fd, rustix::fs::SeekFrom::Hole(offset))?;
            // The file may have changed in between: the answer covers at least one byte.
            Ok((false, length.min(hole.saturating_sub(offset).max(1))))
        }
        Begins::Unknown => Ok((false, length)),
    }
}

/// As [`hole_at`] for a regular file, but does not look for the end of data. Data count up to the end of their granule
/// and no further.
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

/// The kind of range that begins at an offset.
enum Begins {
    Hole {
        length: u64,
    },
    Data,
    /// The file system cannot tell: counts as data.
    Unknown,
}

fn hole_before_data(fd: &OwnedFd, block_device: bool, offset: u64, length: u64) -> io::Result<Begins> {
    use rustix::io::Errno;
    if block_device || length == 0 {
        return Ok(Begins::Unknown);
    }
    match rustix::fs::seek(fd, rustix::fs::SeekFrom::Data(offset)) {
        // From here to the end of the file there is only a hole.
        Err(Errno::NXIO) => Ok(Begins::Hole { length }),
        Ok(data) if data > offset => Ok(Begins::Hole { length: length.min(data - offset) }),
        Ok(_) => Ok(Begins::Data),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Begins::Unknown),
        Err(errno) => Err(errno.into()),
    }
}
