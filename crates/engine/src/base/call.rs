//! One system call on one file: what it does, and how the calling thread makes it.

use memory::to_usize;
use rustix::fs::FallocateFlags;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// The most bytes that one call moves: the kernel's own limit, which is whole pages, so a cut stays aligned.
pub(crate) const MAX_CALL_BYTES: usize = 0x7fff_f000;
/// The most segments one call takes (`IOV_MAX`).
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// How often a call is repeated if the kernel cannot serve it at once, and the pause between tries.
const RETRIES: usize = 100;
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// An action of an engine on a file: a primitive step of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Fill the memory. The file must have at least `need_bytes` there; bytes behind its end read as zeros.
    Read { need_bytes: usize },
    /// Store the memory. If `durable`, the data are durable when it ends.
    Write { durable: bool },
    /// `fdatasync`.
    Sync,
    /// `fallocate` with these mode bits.
    Fallocate { mode: i32, length: u64 },
    /// `ftruncate` to the offset.
    Truncate,
    /// `BLKDISCARD` on a block device.
    DiscardBlocks { length: u64 },
    /// Make the kernel begin to write the file's dirty pages.
    BeginWriteback,
    /// `copy_file_range` of `length` bytes from `from_offset` of the descriptor `from`, which the request's owner keeps
    /// open.
    CopyFrom { from: RawFd, from_offset: u64, length: u64 },
}

impl Action {
    /// Whether it moves bytes between memory and the file.
    #[inline]
    pub(crate) fn is_transfer(self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. })
    }
}

/// The memory of one call, in the form that the kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Buffers {
    Single { ptr: *mut u8, length_bytes: usize },
    Vector { ptr: *const libc::iovec, count: usize },
}

/// One call, by numbers and raw pointers alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) fd: RawFd,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) buffers: Buffers,
}

impl Call {
    /// Makes the call and returns what the kernel did: a count of bytes, or a negated error number. A call that was
    /// interrupted, or that the kernel cannot serve at once, is repeated a limited number of times.
    ///
    /// # Safety
    /// The memory that `buffers` names must be valid for the action's direction until this returns, and the descriptors
    /// open.
    pub(crate) unsafe fn run(&self) -> i32 {
        let mut result = 0;
        for _ in 0..RETRIES {
            // SAFETY: passed on to the caller.
            result = unsafe { self.run_once() };
            match -result {
                libc::EINTR => {}
                libc::EAGAIN => std::thread::sleep(RETRY_PAUSE),
                _ => return result,
            }
        }
        result
    }

    /// # Safety
    /// As for [`Call::run`].
    unsafe fn run_once(&self) -> i32 {
        // SAFETY: the caller keeps it open.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let offset = self.offset;
        match self.action {
            // SAFETY: passed on to the caller.
            Action::Read { .. } => unsafe { transfer(fd, false, 0, offset, self.buffers) },
            Action::Write { durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                // SAFETY: passed on to the caller.
                unsafe { transfer(fd, true, flags, offset, self.buffers) }
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
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) fail instead of ending the process with all its disks. A
/// handler that is already set for the signal stays.
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

/// Calls `BLKDISCARD` (`_IO(0x12, 119)` of `linux/fs.h`), with a start and a length.
fn discard_blocks(fd: BorrowedFd<'_>, offset: u64, length: u64) -> i32 {
    const BLKDISCARD: libc::Ioctl = 0x1277;
    let range = [offset, length];
    // SAFETY: the kernel reads two words.
    match unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) } {
        0.. => 0,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Asks the kernel to begin writing. Errors are ignored: the next flush writes the rest.
fn begin_writeback(fd: BorrowedFd<'_>) -> i32 {
    // SAFETY: the call takes numbers only.
    let _ = unsafe { libc::sync_file_range(fd.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    0
}

/// Copies all of a range, or returns an error; a part may have been copied then.
fn copy_range(from: BorrowedFd<'_>, mut from_offset: u64, to: BorrowedFd<'_>, mut offset: u64, length: u64) -> i32 {
    let end = from_offset.saturating_add(length);
    while from_offset < end {
        let left = to_usize(end - from_offset);
        match rustix::fs::copy_file_range(from, Some(&mut from_offset), to, Some(&mut offset), left) {
            // The source ends within the range.
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
/// As [`Call::run`].
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
