//! A file of our own that the handler maps if the kernel gives no private memory.
//!
//! A shared mapping of a file does not count as private memory (`RLIMIT_DATA`). As long as its pages are not touched,
//! it does not count as promised memory either. So one mapping covers all of a shrunk mapping. If the kernel then
//! refuses a page of the file, too (strict accounting, no memory), the handler maps the file's first pages there, which
//! exist from the start.
//!
//! A session that reads here may see data of another session whose memory was shrunk as well. Both are about to end,
//! and the monitors of both broke the protocol.

use crate::PAGE_BYTES;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The length of the longest possible mapping. Only the file's first pages exist.
const LENGTH_BYTES: usize = 1 << 46;

/// The pages that exist from the start.
const RESIDENT_BYTES: usize = 256 << 10;

/// The file; below zero if there is none.
static FILE: AtomicI32 = AtomicI32::new(-1);
/// The file was mapped since it was last cleared.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// Makes the file, once. Not for the handler.
pub(super) fn make() {
    let no_limit = {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes one `rlimit`.
        let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
        known && limit.rlim_cur >= LENGTH_BYTES as libc::rlim_t
    };
    if !no_limit {
        return;
    }
    // SAFETY: these calls touch no memory of ours but the name, which is a C string; the descriptor is new.
    unsafe {
        let fd = libc::memfd_create(c"ringdisk-refuge".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return;
        }
        let made = libc::ftruncate(fd, LENGTH_BYTES as libc::off_t) == 0
            && libc::fallocate(fd, 0, 0, RESIDENT_BYTES as libc::off_t) == 0;
        if made {
            FILE.store(fd, Ordering::Release);
        } else {
            libc::close(fd);
        }
    }
}

/// Frees the file's pages and forgets their contents. If `is_mapped` is true, more may be written, and the next call
/// clears the file again. Not for the handler.
pub(super) fn clear(is_mapped: impl FnOnce() -> bool) {
    let fd = FILE.load(Ordering::Acquire);
    if fd < 0 || !IS_USED.swap(false, Ordering::AcqRel) {
        return;
    }
    let zeros = [0_u8; PAGE_BYTES];
    // SAFETY: the calls change a file of our own, and read `zeros`.
    unsafe {
        let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (start, length) = (RESIDENT_BYTES as libc::off_t, (LENGTH_BYTES - RESIDENT_BYTES) as libc::off_t);
        libc::fallocate(fd, how, start, length);
        for page in 0..RESIDENT_BYTES / PAGE_BYTES {
            libc::pwrite(fd, zeros.as_ptr().cast(), PAGE_BYTES, (page * PAGE_BYTES) as libc::off_t);
        }
    }
    if is_mapped() {
        IS_USED.store(true, Ordering::Release);
    }
}

/// Puts the file over a whole registered mapping. Returns false if the kernel refuses.
pub(super) fn cover_whole(start: usize, length_bytes: usize) -> bool {
    length_bytes <= LENGTH_BYTES && map(start, length_bytes)
}

/// Puts the file's first pages over the surroundings of `address`, in a registered mapping that starts at `start` and
/// is covered by the file already. Returns false if the kernel refuses.
pub(super) fn cover_around(address: usize, start: usize, length_bytes: usize) -> bool {
    let first = start + (address - start) / RESIDENT_BYTES * RESIDENT_BYTES;
    map(first, RESIDENT_BYTES.min(start + length_bytes - first))
}

/// Puts the file's first pages over one page of a registered mapping. Returns false if the kernel refuses.
pub(super) fn cover_page(page: usize, page_bytes: usize) -> bool {
    page_bytes <= RESIDENT_BYTES && map(page, page_bytes)
}

fn map(start: usize, length_bytes: usize) -> bool {
    let fd = FILE.load(Ordering::Acquire);
    if fd < 0 {
        return false;
    }
    IS_USED.store(true, Ordering::Release);
    // SAFETY: the range is a part of one of our own mappings (it is registered, and withdrawn before it is unmapped);
    // replacing its pages keeps every address in it valid.
    let mapped = unsafe {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        libc::mmap(start as *mut libc::c_void, length_bytes, protection, flags, fd, 0)
    };
    mapped != libc::MAP_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;

    #[test]
    fn the_pages_that_exist_serve_for_any_part_of_a_mapping() {
        const LENGTH: usize = 4 * RESIDENT_BYTES + PAGE_BYTES;
        let (_fd, mapping) = Mapping::anonymous_file(c"covered", LENGTH).unwrap();
        let start = mapping.as_ptr().as_ptr().addr();
        assert!(cover_whole(start, LENGTH));
        for at in [0, RESIDENT_BYTES + 5, LENGTH - 1] {
            assert!(cover_around(start + at, start, LENGTH));
            // SAFETY: the addresses lie in the mapping.
            unsafe {
                let byte = mapping.as_ptr().as_ptr().add(at);
                byte.write_volatile(7);
                assert_eq!(byte.read_volatile(), 7);
            }
        }
        clear(|| false);
        // SAFETY: as above.
        assert_eq!(unsafe { mapping.as_ptr().as_ptr().add(RESIDENT_BYTES + 5).read_volatile() }, 0);
    }
}
