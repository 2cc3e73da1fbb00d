//! Hints to a file system on how to lay out a file that is still empty.

use block::{Error, Result};
use rustix::fs::{IFlags, Mode, OFlags, ioctl_getflags, ioctl_setflags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::RDONLY, Mode::empty())
}

/// Makes the file system overwrite data in place, if it otherwise copies on write (btrfs). Works only on an empty file;
/// most file systems refuse.
pub fn disable_copy_on_write(path: &Path) -> Result<()> {
    let set = open(path).map_err(io::Error::from).and_then(|fd| disable_copy_on_write_of(&fd));
    set.map_err(|error| Error::io(format!("cannot turn copy on write off for '{}'", path.display()), error))
}

/// As [`disable_copy_on_write`], for an open file.
pub fn disable_copy_on_write_of(file: impl AsFd) -> io::Result<()> {
    Ok(ioctl_setflags(&file, ioctl_getflags(&file)? | IFlags::NOCOW)?)
}

/// `struct fsxattr` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ExtraAttributes {
    flags: u32,
    extent_bytes: u32,
    extents: u32,
    project: u32,
    copied_extent_bytes: u32,
    reserved: [u8; 8],
}

/// Makes the file system allocate space for the file in pieces of this many bytes (XFS). Works only on a file without
/// extents.
pub fn set_extent_size_hint(path: &Path, bytes: u32) -> Result<()> {
    try_extent_size_hint(path, bytes)
        .map_err(|error| Error::io(format!("cannot set the extent size hint of '{}'", path.display()), error))
}

fn try_extent_size_hint(path: &Path, bytes: u32) -> io::Result<()> {
    /// `_IOR('X', 31, struct fsxattr)` and `_IOW('X', 32, struct fsxattr)`.
    const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
    const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
    const FS_XFLAG_EXTSIZE: u32 = 0x800;
    let fd = open(path)?;
    let mut attributes = ExtraAttributes::default();
    // SAFETY: the kernel writes a `struct fsxattr`, which this is.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) })?;
    attributes.flags |= FS_XFLAG_EXTSIZE;
    attributes.extent_bytes = bytes;
    // SAFETY: the kernel reads a `struct fsxattr`, which this is.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attributes_are_as_long_as_the_kernel_takes_them() {
        // Their length is part of the calls' numbers.
        assert_eq!(size_of::<ExtraAttributes>(), 0x1c);
    }

    #[test]
    fn a_file_takes_the_hints_or_the_error_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.raw");
        for is_there in [false, true] {
            if is_there {
                std::fs::write(&path, []).unwrap();
            }
            for result in [disable_copy_on_write(&path), set_extent_size_hint(&path, 1 << 20)] {
                match result {
                    Ok(()) => assert!(is_there),
                    Err(error) => assert!(error.to_string().contains("disk.raw"), "{error}"),
                }
            }
        }
    }
}
