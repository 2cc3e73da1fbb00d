//! The properties of a file or block device: its kind, its alignment for direct I/O, its ability to discard.

use super::alignment::Alignment;
use block::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Stat, StatxFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The alignment that is assumed if none can be learnt: every storage takes it.
const SAFE_ALIGNMENT_BYTES: u32 = 4096;

/// The abilities of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Abilities {
    pub(crate) discard: bool,
    pub(crate) discard_zeroes: bool,
    pub(crate) fast_zeroes: bool,
    /// Offsets and lengths of `fallocate` must be multiples of this.
    pub(crate) fallocate_unit_bytes: u32,
}

/// Refuses a file of a type that cannot hold a disk. Returns whether it is a block device.
pub(crate) fn check_type(stat: &Stat, name: &str) -> Result<bool> {
    let what = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => return Ok(false),
        FileType::BlockDevice => return Ok(true),
        FileType::Directory => "a directory",
        FileType::CharacterDevice => "a character device",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        _ => "a file of an unknown type",
    };
    let message = format!("'file' driver requires '{name}' to be a regular file (or a block device), and it is {what}");
    Err(Error::new(ErrorKind::BadOption, message))
}

/// Returns the alignment that direct I/O on the file asks for; `None` if it goes through the page cache all the same.
pub(crate) fn direct_alignment(fd: &OwnedFd, block_device: bool, name: &str) -> Result<Option<Alignment>> {
    let known = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|statx| statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    if let Some(statx) = known {
        return as_told(statx.stx_dio_offset_align, statx.stx_dio_mem_align, name);
    }
    if block_device {
        let bytes = logical_block_bytes(fd).unwrap_or(SAFE_ALIGNMENT_BYTES);
        return checked(bytes, bytes, name).map(Some);
    }
    if file_system(fd) == Some(TMPFS_MAGIC) {
        return Ok(Some(Alignment::NONE));
    }
    let bytes = probe_alignment(fd);
    checked(bytes, bytes, name).map(Some)
}

/// Interprets the alignment from `statx`. Zero means that the kernel takes the flag but does no direct I/O (an
/// encrypted file, for instance).
fn as_told(offset_bytes: u32, memory_bytes: u32, name: &str) -> Result<Option<Alignment>> {
    match offset_bytes {
        0 => Ok(None),
        _ => checked(offset_bytes, memory_bytes, name).map(Some),
    }
}

fn checked(offset_bytes: u32, memory_bytes: u32, name: &str) -> Result<Alignment> {
    let memory_bytes = memory_bytes.max(1);
    let usable = |bytes: u32| bytes.is_power_of_two() && bytes <= 1 << 16;
    if usable(offset_bytes) && memory_bytes.is_power_of_two() && memory_bytes as usize <= memory::PAGE_BYTES {
        return Ok(Alignment { offset_bytes, memory_bytes });
    }
    let message = format!(
        "direct I/O on '{name}' asks for an alignment of {offset_bytes} bytes (memory: {memory_bytes}), which is not \
         supported; use cache=writeback or cache=writethrough"
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}

/// Returns the logical block size of a block device (`BLKSSZGET`).
fn logical_block_bytes(fd: &OwnedFd) -> Option<u32> {
    const BLKSSZGET: libc::Ioctl = 0x1268;
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKSSZGET, &raw mut bytes) };
    if result == 0 { u32::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()) } else { None }
}

/// Finds the smallest length at the file's start that the kernel reads directly. A short file tells nothing: at its end
/// the kernel may return before it checks the alignment.
fn probe_alignment(fd: &OwnedFd) -> u32 {
    let long_enough = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_size >= i64::from(SAFE_ALIGNMENT_BYTES));
    if !long_enough {
        return SAFE_ALIGNMENT_BYTES;
    }
    let mut buf = memory::AlignedBuf::zeroed(2 * SAFE_ALIGNMENT_BYTES as usize);
    for bytes in [512_u32, 1024, 2048] {
        // The buffer starts at one such length, so that memory at this alignment is tried as well.
        let start = bytes as usize;
        let Some(part) = buf.get_mut(start..2 * start) else { continue };
        if rustix::io::pread(fd, part, 0).is_ok() {
            return bytes;
        }
    }
    SAFE_ALIGNMENT_BYTES
}

type Magic = i64;
const TMPFS_MAGIC: Magic = 0x0102_1994;
/// tmpfs (also memfd) and ramfs.
const MEMORY_MAGICS: [Magic; 2] = [TMPFS_MAGIC, 0x8584_58f6];

/// Whether the file lies in memory.
pub(crate) fn is_in_memory(fd: &OwnedFd) -> bool {
    file_system(fd).is_some_and(|magic| MEMORY_MAGICS.contains(&magic))
}

/// Whether the end of data in the file is found page by page: tmpfs knows no extents.
pub(crate) fn walks_to_holes(fd: &OwnedFd) -> bool {
    file_system(fd) == Some(TMPFS_MAGIC)
}

/// XFS (since Linux 6.0) and btrfs (6.1). Older versions refuse each request by themselves.
const NOWAIT_MAGICS: [Magic; 2] = [0x5846_5342, 0x9123_683e];

/// Whether the page cache of the file takes writes that must not wait.
pub(crate) fn takes_writes_without_waiting(fd: &OwnedFd) -> bool {
    file_system(fd).is_some_and(|magic| NOWAIT_MAGICS.contains(&magic))
}

/// ext2, ext3 and ext4.
const EXT_MAGIC: Magic = 0xef53;

/// Whether the kernel begins a read that the page cache cannot serve without waiting, and ends it later.
pub(crate) fn reads_later(fd: &OwnedFd) -> bool {
    file_system(fd).is_some_and(|magic| magic == EXT_MAGIC || NOWAIT_MAGICS.contains(&magic))
}

/// Whether the file takes requests that must not wait. Tries a read far behind the end of any file, which reads
/// nothing.
pub(crate) fn takes_nowait(fd: &OwnedFd) -> bool {
    let (mut byte, flags) = ([0; 1], rustix::io::ReadWriteFlags::NOWAIT);
    let read = rustix::io::preadv2(fd, &mut [io::IoSliceMut::new(&mut byte)], i64::MAX as u64 - 1, flags);
    read != Err(rustix::io::Errno::OPNOTSUPP)
}

/// Whether the file system may read its own tables when a read or write begins, even one that must not wait.
/// `extent_preload` can read these tables in advance.
pub(crate) fn waits_for_tables(fd: &OwnedFd) -> bool {
    file_system(fd) == Some(EXT_MAGIC)
}

/// Whether a write by `io_submit` to the file's page cache has ended when that returns. FUSE and network file systems,
/// for instance, may only have begun it.
pub(crate) fn ends_in_call(fd: &OwnedFd) -> bool {
    file_system(fd).is_some_and(|magic| KNOWN_MAGICS.contains(&magic))
}

/// File systems that are known well: ext2/3/4, xfs, btrfs, f2fs, tmpfs.
const KNOWN_MAGICS: [Magic; 5] = [EXT_MAGIC, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, TMPFS_MAGIC];

fn file_system(fd: &OwnedFd) -> Option<Magic> {
    rustix::fs::fstatfs(fd).ok().map(|stat| stat.f_type)
}

/// Returns the abilities of a regular file.
pub(crate) fn file_abilities(fd: &OwnedFd, read_only: bool, length_bytes: u64) -> Abilities {
    let punches = match file_system(fd) {
        _ if read_only => false,
        Some(magic) if KNOWN_MAGICS.contains(&magic) => true,
        // Behind the end of the file there is nothing to lose.
        _ => {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let behind = length_bytes.next_multiple_of(u64::from(SAFE_ALIGNMENT_BYTES));
            rustix::fs::fallocate(fd.as_fd(), mode, behind, u64::from(SAFE_ALIGNMENT_BYTES)).is_ok()
        }
    };
    Abilities { discard: punches, discard_zeroes: punches, fast_zeroes: punches, fallocate_unit_bytes: 1 }
}

/// Returns the abilities of a block device, from its queue's limits.
pub(crate) fn device_abilities(fd: &OwnedFd, stat: &Stat, read_only: bool) -> Abilities {
    let limit = |name: &str| queue_limit(stat, name).is_ok_and(|value| value > 0);
    let zeroes = !read_only && limit("write_zeroes_max_bytes");
    Abilities {
        discard: !read_only && (zeroes || limit("discard_max_bytes")),
        // Only a device that can write zeros reads as zeros afterwards. A plain discard promises nothing.
        discard_zeroes: zeroes,
        fast_zeroes: zeroes,
        fallocate_unit_bytes: logical_block_bytes(fd).unwrap_or(SAFE_ALIGNMENT_BYTES),
    }
}

fn queue_limit(stat: &Stat, name: &str) -> io::Result<u64> {
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let device = format!("/sys/dev/block/{major}:{minor}");
    // A partition has the queue of its disk.
    let text = std::fs::read_to_string(format!("{device}/queue/{name}"))
        .or_else(|_| std::fs::read_to_string(format!("{device}/../queue/{name}")))?;
    text.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_takes_the_flag_but_not_direct_io_is_one_of_the_page_cache() {
        assert_eq!(as_told(0, 0, "encrypted").unwrap(), None);
        let told = Some(Alignment { offset_bytes: 512, memory_bytes: 4 });
        assert_eq!(as_told(512, 4, "plain").unwrap(), told);
    }
}
