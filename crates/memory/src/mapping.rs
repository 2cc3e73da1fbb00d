//! One shared mapping of a file that a peer owns.

use crate::fault;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A shared, read-write mapping of part of a file; unmapped on drop. Registered with [`fault`], so that a peer that
/// shrinks the file poisons the mapping instead of killing the process.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    length_bytes: usize,
    guard: fault::Registration,
}

// SAFETY: the mapping is plain memory shared with another process anyway; all access to it goes through raw copies and
// atomics, never through references, so threads add nothing new.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length_bytes` of `file` from `offset` on. The offset need not be page-aligned.
    pub fn shared(file: BorrowedFd<'_>, offset: u64, length_bytes: usize) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        if length_bytes == 0 {
            return Err(invalid("a mapping needs at least one byte"));
        }
        let offset = libc::off_t::try_from(offset).map_err(|_| invalid("the mapping's offset is beyond any file"))?;
        // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                offset,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let Some(ptr) = NonNull::new(raw.cast::<u8>()) else {
            return Err(invalid("the kernel mapped address zero"));
        };
        let guard = fault::register(ptr, length_bytes)?;
        Ok(Self { ptr, length_bytes, guard })
    }

    /// A new anonymous memory file of `length_bytes`, and its mapping: guest memory for the driver and for tests.
    pub fn anonymous_file(name: &std::ffi::CStr, length_bytes: usize) -> io::Result<(OwnedFd, Self)> {
        // SAFETY: `name` is a valid C string.
        let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let file = std::fs::File::from(fd);
        file.set_len(length_bytes as u64)?;
        let fd = OwnedFd::from(file);
        let mapping = Self::shared(std::os::fd::AsFd::as_fd(&fd), 0, length_bytes)?;
        Ok((fd, mapping))
    }

    /// Where the mapping starts.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// How many bytes are mapped.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Whether an access fell behind the end of the file: the contents are then zeros of our own, and whoever shares
    /// the memory must be disconnected.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.guard.is_poisoned()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.withdraw();
        // SAFETY: the range was mapped by us, is unmapped once, and no IoBuf lists it any more (see `IoBuf::refill`).
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.length_bytes) };
    }
}

/// A duplicate, in the standard library's form, of a descriptor that some other library wraps (an event descriptor, for
/// instance). The original stays open and with its owner.
pub fn duplicate_fd(wrapped: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: `fcntl` with F_DUPFD_CLOEXEC touches no memory; a number that is not open fails with EBADF.
    let raw = unsafe { libc::fcntl(wrapped.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}
