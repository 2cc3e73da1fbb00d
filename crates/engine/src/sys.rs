//! System calls on one file, made by the calling thread: what workers and blocking queues run.

use crate::inflight::{Action, Buffers};
use rustix::fs::FallocateFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// What goes beyond the limit on the size of files (`ulimit -f`) fails, and does not end the process with all its disks.
/// Whoever has set the signal to something else keeps that.
pub(crate) fn survive_file_size_limit() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // SAFETY: an all-zero `sigaction` is a valid one; the kernel reads and writes no more than that.
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGXFSZ, std::ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_DFL
        {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
    });
}

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

/// Carries out one action and returns what the kernel did: a count of bytes, or a negated error number.
///
/// # Safety
/// The memory that `buffers` names must be valid for the action's direction until this returns, and a descriptor that the
/// action names open.
pub(crate) unsafe fn run(fd: BorrowedFd<'_>, action: Action, offset: u64, buffers: Buffers) -> i32 {
    match action {
        // SAFETY: passed on to the caller.
        Action::Read { .. } => unsafe { transfer(fd, false, 0, offset, buffers) },
        Action::Write { durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: passed on to the caller.
            unsafe { transfer(fd, true, flags, offset, buffers) }
        }
        Action::Sync => result_of(rustix::fs::fdatasync(fd)),
        Action::Fallocate { mode, length } => {
            let mode = FallocateFlags::from_bits_retain(mode as u32);
            result_of(rustix::fs::fallocate(fd, mode, offset, length))
        }
        Action::DiscardBlocks { length } => discard_blocks(fd, offset, length),
        Action::Truncate => result_of(rustix::fs::ftruncate(fd, offset)),
        Action::BeginWriteback => begin_writeback(fd),
        Action::CopyFrom { from, from_offset, length } => {
            // SAFETY: passed on to the caller.
            let from = unsafe { BorrowedFd::borrow_raw(from) };
            copy_range(from, from_offset, fd, offset, length)
        }
    }
}

/// How many extents are asked for at a time.
const EXTENTS: usize = 512;
const FIEMAP_EXTENT_LAST: u32 = 1;

/// `struct fiemap_extent` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved_words: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` of `linux/fiemap.h`.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// Has the file system look some extents up, from `start` on: what it has to read for that it keeps in memory. Returns where
/// the next begin; `None` at the end, or where it cannot say.
pub(crate) fn look_up_extents(fd: BorrowedFd<'_>, start: u64) -> Option<u64> {
    /// `_IOWR('f', 11, struct fiemap)`, without the extents.
    const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
    let mut map = Fiemap {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped_extents: 0,
        extent_count: EXTENTS as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); EXTENTS],
    };
    // SAFETY: the kernel reads and writes the structure, with no more extents than it says that there is room for.
    if unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
        return None;
    }
    let found = map.extents.get(..map.mapped_extents as usize)?;
    let last = found.last().filter(|last| last.flags & FIEMAP_EXTENT_LAST == 0)?;
    last.logical.checked_add(last.length).filter(|next| *next > start)
}

/// `BLKDISCARD`: `_IO(0x12, 119)` of `linux/fs.h`, with a start and a length.
fn discard_blocks(fd: BorrowedFd<'_>, offset: u64, length: u64) -> i32 {
    const BLKDISCARD: libc::Ioctl = 0x1277;
    let range = [offset, length];
    // SAFETY: the kernel reads two words.
    match unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0.. => 0,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// It is a wish: what the kernel does not begin with now it writes with the next flush.
fn begin_writeback(fd: BorrowedFd<'_>) -> i32 {
    // SAFETY: the call takes numbers only.
    let _ = unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    0
}

/// Copies all of a range, or says why not; a part may have been copied then.
fn copy_range(from: BorrowedFd<'_>, mut from_offset: u64, to: BorrowedFd<'_>, mut offset: u64, length: u64) -> i32 {
    let end = from_offset.saturating_add(length);
    while from_offset < end {
        let left = usize::try_from(end - from_offset).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut from_offset), to, Some(&mut offset), left) {
            // The source ends before.
            Ok(0) => return -libc::EIO,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return -errno.raw_os_error(),
        }
    }
    0
}

fn result_of(result: rustix::io::Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => -errno.raw_os_error(),
    }
}

/// # Safety
/// As [`run`].
unsafe fn transfer(fd: BorrowedFd<'_>, write: bool, flags: i32, offset: u64, buffers: Buffers) -> i32 {
    let single;
    let (iovecs, count) = match buffers {
        Buffers::Single { ptr, length_bytes } => {
            single = libc::iovec { iov_base: ptr.cast(), iov_len: length_bytes };
            (&raw const single, 1)
        }
        Buffers::Vector { ptr, count } => (ptr, count as libc::c_int),
    };
    let (raw, offset) = (fd.as_fd().as_raw_fd(), offset as libc::off_t);
    // SAFETY: the caller keeps the memory valid; the list lives in `single` or is kept by the caller as well.
    let moved = unsafe {
        match (write, flags) {
            (false, _) => libc::preadv(raw, iovecs, count, offset),
            (true, 0) => libc::pwritev(raw, iovecs, count, offset),
            (true, _) => libc::pwritev2(raw, iovecs, count, offset, flags),
        }
    };
    match moved {
        0.. => moved as i32,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}
