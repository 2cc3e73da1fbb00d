//! The kernel's interface to page faults that a process sees itself (`userfaultfd`), as far as armed mappings need it.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Faults of the kernel's own calls are not asked for: everybody may have that (Linux 5.11).
const USER_MODE_ONLY: libc::c_int = 1;
const API_VERSION: u64 = 0xaa;
/// A fault is a signal of the thread that made it, and nobody reads the descriptor.
const FEATURE_SIGBUS: u64 = 1 << 7;
/// Faults on pages of tmpfs that are there, or swapped out, but not mapped (Linux 5.14).
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
const CONTINUE_MODE_DONTWAKE: u64 = 1;
const CAN_CONTINUE: u64 = 1 << 7;

const UFFDIO_API: u32 = 0xc018_aa3f;
const UFFDIO_REGISTER: u32 = 0xc020_aa00;
const UFFDIO_CONTINUE: u32 = 0xc020_aa07;

/// `struct uffdio_api` of `linux/userfaultfd.h`.
#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register` there.
#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_continue` there.
#[repr(C)]
struct Continue {
    start: u64,
    length: u64,
    mode: u64,
    /// Bytes, or a negated error number.
    mapped: i64,
}

/// A descriptor for [`register`].
pub(crate) fn open() -> io::Result<OwnedFd> {
    // SAFETY: the call takes flags and returns a descriptor.
    let raw = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above just made this descriptor and nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw as RawFd) };
    let mut api = Api { version: API_VERSION, features: FEATURE_SIGBUS | FEATURE_MINOR_SHMEM, ioctls: 0 };
    // SAFETY: the kernel reads and writes one such structure.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API as _, &raw mut api) };
    if result == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// From now on a touch of a page of the range that is not mapped is a SIGBUS, unless it is a hole.
///
/// # Safety
/// The range must be a mapping of the caller's, of tmpfs, whose every user is prepared for that.
pub(crate) unsafe fn register(fd: &OwnedFd, start: usize, length_bytes: usize) -> io::Result<()> {
    let mut range = Register { start: start as u64, length: length_bytes as u64, mode: REGISTER_MODE_MINOR, ioctls: 0 };
    // SAFETY: the kernel reads and writes one such structure; for the range the caller answers.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_REGISTER as _, &raw mut range) };
    match result {
        0 if range.ioctls & CAN_CONTINUE != 0 => Ok(()),
        0 => Err(io::ErrorKind::Unsupported.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps the first pages of a registered range that the file holds, waiting for such as are swapped out. Says how many bytes
/// of it, or why it could not map the first page: `EEXIST` where that was mapped already, `EFAULT` where there is none. May be
/// called in a signal handler; then the error number is the interrupted code's.
pub(crate) fn map_pages(fd: RawFd, start: usize, length_bytes: usize) -> Result<usize, i32> {
    let mut range =
        Continue { start: start as u64, length: length_bytes as u64, mode: CONTINUE_MODE_DONTWAKE, mapped: 0 };
    // SAFETY: the kernel reads and writes one such structure, and maps pages where the process has a mapping of the file;
    // the error number is this thread's own.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let result = libc::ioctl(fd, UFFDIO_CONTINUE as _, &raw mut range);
        let error = std::mem::replace(&mut *errno, before);
        match usize::try_from(range.mapped) {
            Ok(mapped) if mapped > 0 => Ok(mapped),
            _ if result == 0 => Ok(length_bytes),
            _ => Err(error),
        }
    }
}
