//! An empty file of our own that is mapped over memory that is cut off.
//!
//! The kernel cannot copy from or to such a mapping: its calls fail with `EFAULT` and change nothing. Private zero pages
//! would not do. A write that was given up before the kernel began it would store their zeros later, perhaps over newer
//! data.

use std::sync::atomic::{AtomicI32, Ordering};

/// The file; below zero if there is none.
static FILE: AtomicI32 = AtomicI32::new(-1);

/// Makes the file, once. It never gets any pages.
pub(super) fn make() {
    // SAFETY: these calls touch no memory of ours but the name, which is a C string; the descriptor is new.
    let fd = unsafe {
        let fd = libc::memfd_create(c"ringdisk-barrier".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        if fd >= 0 {
            libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SEAL | libc::F_SEAL_GROW);
        }
        fd
    };
    FILE.store(fd, Ordering::Release);
}

/// Puts the file over a whole registered mapping. Returns false if the kernel refuses. Then nothing has changed.
pub(super) fn put(start: usize, length_bytes: usize) -> bool {
    let fd = FILE.load(Ordering::Acquire);
    if fd < 0 {
        return false;
    }
    // SAFETY: the range is one of our own mappings (it is registered, and withdrawn before it is unmapped). A thread that
    // touches an address in it gets SIGBUS, and the handler covers the page.
    let mapped = unsafe {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        libc::mmap(start as *mut libc::c_void, length_bytes, protection, flags | libc::MAP_NORESERVE, fd, 0)
    };
    mapped != libc::MAP_FAILED
}
