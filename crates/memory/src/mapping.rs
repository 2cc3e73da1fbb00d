//! One shared mapping of a file: a peer's memory, or an image that lies in memory.

use crate::{PAGE_BYTES, fault};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most address space that all mappings together take: half of the smallest 64-bit address space. A peer may name a
/// length that its file does not have, and a process without address space cannot go on.
const MAX_MAPPED_BYTES: usize = 1 << 46;

static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// A part of [`MAX_MAPPED_BYTES`], given back on drop.
#[derive(Debug)]
struct Room(usize);

impl Room {
    /// Takes `bytes` if the total stays within `limit_bytes`.
    fn take(bytes: usize, limit_bytes: usize) -> io::Result<Self> {
        let sum = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit_bytes);
        match MAPPED_BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum) {
            Ok(_) => Ok(Self(bytes)),
            Err(used) => Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("{bytes} bytes more than the {used} mapped already exceed the {limit_bytes} there is room for"),
            )),
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        MAPPED_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Returns the unit in which the kernel maps `file`: huge pages are mapped and unmapped as a whole.
pub(crate) fn page_bytes_of(file: BorrowedFd<'_>) -> io::Result<usize> {
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
    const FUSE_MAGIC: i64 = 0x6573_5546;
    // SAFETY: all-zero is a valid `statfs`; the kernel writes one.
    let (result, stat) = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(file.as_raw_fd(), &raw mut stat), stat)
    };
    match result {
        0 if stat.f_type == HUGETLBFS_MAGIC => Ok((stat.f_bsize as usize).max(PAGE_BYTES)),
        // An access to such memory waits for the file system's server, which may be the peer itself.
        0 if stat.f_type == FUSE_MAGIC => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "memory on a FUSE file system is refused: its server could hold up every disk; use a memfd or tmpfs",
        )),
        0 => Ok(PAGE_BYTES),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The owner of a mapped file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    Peers,
    Ours,
}

/// A shared mapping of part of a file, read-write if it is a peer's; unmapped on drop. It is registered with [`fault`].
/// So a peer that shrinks the file poisons the mapping instead of killing the process.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    length_bytes: usize,
    /// The length with the rest of the last page.
    mapped_bytes: usize,
    guard: fault::Registration,
    writable: bool,
    _room: Room,
}

// SAFETY: the mapping is memory that another process shares. All access goes through raw copies and atomics, never
// through references. So a second thread is no different from the other process.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length_bytes` of `file` from `offset` on. The offset need not be page-aligned.
    pub fn shared(file: BorrowedFd<'_>, offset: u64, length_bytes: usize) -> io::Result<Self> {
        Self::map(file, offset, length_bytes, true, Whose::Peers)
    }

    /// Maps the first `length_bytes` of a file of our own, for reading, and for writing if `writable`. The file may be
    /// shorter; then bytes behind its end must not be touched. Fails if too little address space would be left for
    /// peers.
    pub fn of_storage(file: BorrowedFd<'_>, length_bytes: usize, writable: bool) -> io::Result<Self> {
        Self::map(file, 0, length_bytes, writable, Whose::Ours)
    }

    fn map(file: BorrowedFd<'_>, offset: u64, length_bytes: usize, writable: bool, whose: Whose) -> io::Result<Self> {
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        if length_bytes == 0 {
            return Err(invalid("a mapping needs at least one byte"));
        }
        let page_bytes = page_bytes_of(file)?;
        let mapped_bytes = length_bytes.checked_next_multiple_of(page_bytes);
        let mapped_bytes = mapped_bytes.ok_or_else(|| invalid("the mapping is longer than any address space"))?;
        let limit_bytes = if whose == Whose::Ours { MAX_MAPPED_BYTES / 2 } else { MAX_MAPPED_BYTES };
        let room = Room::take(mapped_bytes, limit_bytes)?;
        let offset = libc::off_t::try_from(offset).map_err(|_| invalid("the mapping's offset is beyond any file"))?;
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                protection,
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
        let guard = fault::register(ptr, mapped_bytes, page_bytes, whose == Whose::Ours).inspect_err(|_| {
            // SAFETY: the range was mapped above and nobody else knows it.
            unsafe { libc::munmap(ptr.as_ptr().cast(), mapped_bytes) };
        })?;
        Ok(Self { ptr, length_bytes, mapped_bytes, guard, writable, _room: room })
    }

    /// Finds which pages of a part are in memory (`mincore`): one byte for each page, odd if it is. The part starts at
    /// a page.
    pub fn residency(&self, skip_bytes: usize, pages: &mut [u8]) -> io::Result<()> {
        let fits = pages.len().checked_mul(PAGE_BYTES).and_then(|length_bytes| skip_bytes.checked_add(length_bytes));
        if fits.is_none_or(|end| end > self.mapped_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the part lies in the mapping, and the kernel writes a byte for each of its pages.
        let result = unsafe {
            let start = self.ptr.as_ptr().add(skip_bytes).cast();
            libc::mincore(start, pages.len() * PAGE_BYTES, pages.as_mut_ptr())
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Makes an anonymous memory file of `length_bytes`, and its mapping: guest memory for the driver and for tests.
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

    /// Returns where the mapping starts.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns its length in bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Whether it may be written to.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Brings its pages into memory, ready for writing (Linux 5.14). Stops at the end of the file.
    pub(crate) fn populate(&self) {
        // SAFETY: the range is mapped, and populating it changes no byte of it.
        let _ = unsafe { libc::madvise(self.ptr.as_ptr().cast(), self.mapped_bytes, libc::MADV_POPULATE_WRITE) };
    }

    /// Keeps each page in memory from its first touch on, as long as it is mapped (Linux 4.4). Takes of the limit of locked
    /// memory, as much as is mapped.
    pub(crate) fn lock_touched(&self) -> io::Result<()> {
        // SAFETY: the range is mapped, and locking it changes no byte of it.
        let result = unsafe { libc::mlock2(self.ptr.as_ptr().cast(), self.mapped_bytes, libc::MLOCK_ONFAULT) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// See [`crate::GuestMemory::fence`].
    pub(crate) fn fence(&self) -> bool {
        self.guard.fence()
    }

    /// Whether an access fell behind the end of the file, or [`crate::GuestMemory::fence`] cut it off. The contents are
    /// then zeros of our own, and the peer must be disconnected.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.guard.is_poisoned()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.withdraw();
        // SAFETY: the range was mapped by us, is unmapped once, and no IoBuf lists it any more (see `IoBuf::refill`).
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Duplicates a descriptor that another library wraps (an event descriptor, for instance). The original stays open and
/// with its owner.
pub fn duplicate_fd(wrapped: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: `fcntl` with F_DUPFD_CLOEXEC touches no memory; a number that is not open fails with EBADF.
    let raw = unsafe { libc::fcntl(wrapped.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above just made this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn address_space_is_lent_only_as_long_as_there_is_some_and_comes_back() {
        let (fd, _small) = Mapping::anonymous_file(c"sparse", 4096).unwrap();
        let map = |length_bytes| Mapping::shared(fd.as_fd(), 0, length_bytes);
        assert_eq!(map(MAX_MAPPED_BYTES).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        for _ in 0..3 {
            let half = map(MAX_MAPPED_BYTES / 2).unwrap();
            assert_eq!(map(MAX_MAPPED_BYTES / 2).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            drop(half);
        }
        assert!(map(usize::MAX).is_err());
        // Our own files leave half of it to peers.
        let ours = |length_bytes| Mapping::of_storage(fd.as_fd(), length_bytes, false);
        let most = ours(MAX_MAPPED_BYTES / 4).unwrap();
        assert_eq!(ours(MAX_MAPPED_BYTES / 2).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
        drop(most);
    }

    #[test]
    fn a_memory_file_that_the_kernel_refuses_is_an_error() {
        // Names have at most 249 bytes.
        let name = std::ffi::CString::new(vec![b'n'; 250]).unwrap();
        let refused = Mapping::anonymous_file(&name, 4096).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}
