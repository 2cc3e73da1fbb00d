//! A file in memory (tmpfs), mapped so that its data are copied without a system call.
//!
//! tmpfs refuses calls that must not wait, so neither io_uring's fast path nor batches serve it. A copy to or from a
//! mapping costs half as much as a call. But reading a hole through a mapping allocates a page, and failing to get a
//! page raises a signal instead of an error. So only pages that are known to be present are copied. System calls, which
//! are always right, do the rest:
//!
//! * One bit for each page says that it holds data and lies wholly within the file. The bits are set from the resident
//!   pages (`mincore`), once for each region of 64 pages that existed when the file was opened, and by every write.
//!   Discarding clears them.
//! * Mapping a page, and unmapping it in the end, costs as much as several calls. So a call serves a page the first
//!   time. Of the repeated requests, every [`REPEATS`]th maps its page, and the kernel maps the pages around it.
//! * If another program punches the file, a bit is wrong. That only allocates a page.
//! * Before we cut a file, its mapping is retired for good. If another program takes pages away, the mapping is
//!   poisoned and the process lives on (see `memory::fault`). The copy's result is dropped, and a call does it again.
//!   If the other program cuts the file within a page, data written behind the end in that page are lost. Image locks
//!   prevent that.
//! * The kernel does not see these writes, so the next flush, or closing the file, sets the file's times.
//!
//! A reactor that copied a swapped-out page would wait for the storage. So if the host has swap when the file is
//! opened, the file is not mapped, and workers make the calls.

mod pages;

use crate::base::call::Buffers;
use memory::{Mapping, PAGE_BYTES};
use pages::{
    PAGE, REGION_BYTES, REGION_PAGES, Region, all_regions, clear, covered_by, groups, groups_of, has, mask, set,
    touched_by, unknown_regions,
};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Of this many repeated requests one maps its page; see the module.
const REPEATS: u64 = 8;
/// The longest mapping, room to grow included.
const MAX_BYTES: u64 = 256 << 30;
/// Room that a mapping has at least for the file to grow.
const ROOM_BYTES: u64 = 32 << 30;

/// A counter that is written often, on another cache line than the fields that each copy reads.
#[derive(Default)]
#[repr(align(64))]
struct OnItsOwnLine(AtomicU64);

/// See the module.
pub(crate) struct MappedFile {
    mapping: Mapping,
    writable: bool,
    /// Whole pages in the file when it was opened.
    pages_then: u64,
    /// The mapping is not used any more.
    retired: AtomicBool,
    regions: Box<[Region]>,
    /// Requests for pages that calls have served before.
    repeats: OnItsOwnLine,
    /// Something was written through the mapping since the file's times were set.
    unstamped: AtomicBool,
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedFile({} bytes)", self.mapping.length_bytes())
    }
}

/// Whether pages of this host may be swapped out.
pub(crate) fn host_has_swap() -> bool {
    rustix::system::sysinfo().totalswap > 0
}

impl MappedFile {
    /// Maps a file of `length_bytes`. `None` if that fails, or holes cannot be told from data.
    pub(crate) fn new(fd: &OwnedFd, length_bytes: u64, writable: bool) -> Option<Self> {
        // The code below assumes that the kernel's pages have this size.
        // SAFETY: the call takes and returns numbers.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if page_bytes != PAGE_BYTES as libc::c_long {
            return None;
        }
        let wanted = length_bytes.checked_mul(2)?.max(length_bytes.checked_add(ROOM_BYTES)?);
        let mapped = wanted.min(MAX_BYTES) / REGION_BYTES * REGION_BYTES;
        if mapped < length_bytes.checked_add(PAGE)? {
            return None;
        }
        let mapping = Mapping::of_storage(fd.as_fd(), usize::try_from(mapped).ok()?, writable).ok()?;
        // Nothing is resident behind the end. But a process without permission is told that every page is.
        let mut behind = [0];
        mapping.residency((mapped - PAGE) as usize, &mut behind).ok()?;
        (behind[0] & 1 == 0).then(|| Self {
            mapping,
            writable,
            pages_then: length_bytes / PAGE,
            retired: AtomicBool::new(false),
            regions: unknown_regions(mapped / REGION_BYTES),
            repeats: OnItsOwnLine::default(),
            unstamped: AtomicBool::new(false),
        })
    }

    /// Copies to or from the file if the whole range lies in present pages. Returns the number of bytes.
    ///
    /// # Safety
    /// The memory that `buffers` names must be valid for the copy's direction until this returns.
    pub(crate) unsafe fn copy(&self, to_file: bool, offset: u64, buffers: Buffers) -> Option<i32> {
        if to_file && !self.writable {
            return None;
        }
        let single;
        let segments = match buffers {
            Buffers::Single { ptr, length_bytes } => {
                single = libc::iovec { iov_base: ptr.cast(), iov_len: length_bytes };
                std::slice::from_ref(&single)
            }
            Buffers::Vector { count: 0, .. } => return None,
            // SAFETY: the caller keeps the list.
            Buffers::Vector { ptr, count } => unsafe { std::slice::from_raw_parts(ptr, count) },
        };
        let length = segments.iter().map(|segment| segment.iov_len as u64).sum();
        if !self.holds(offset, length) {
            return None;
        }
        // SAFETY: `holds` says that the range lies in the mapping, and the caller that the segments are valid. A guest or
        // another reactor may change either meanwhile: the bytes are copied only.
        unsafe {
            let mut at = self.mapping.as_ptr().as_ptr().add(offset as usize);
            for segment in segments {
                let memory = segment.iov_base.cast::<u8>();
                let (from, to) = if to_file { (memory, at) } else { (at, memory) };
                std::ptr::copy(from.cast_const(), to, segment.iov_len);
                at = at.add(segment.iov_len);
            }
        }
        // The poison mark is read after the bytes.
        fence(Ordering::Acquire);
        if self.mapping.is_poisoned() {
            self.retire();
            return None;
        }
        if to_file {
            self.is_written_unseen();
        }
        i32::try_from(length).ok()
    }

    /// Notes a write through a mapping, which the kernel does not see. The next flush sets the file's times.
    pub(crate) fn is_written_unseen(&self) {
        // The flag is read first, so that reactors do not take the cache line from each other.
        if !self.unstamped.load(Ordering::Relaxed) {
            self.unstamped.store(true, Ordering::Relaxed);
        }
    }

    /// Whether all of a range is to be copied through the mapping.
    fn holds(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length);
        let fits = end <= self.mapping.length_bytes() as u64 && length > 0 && length <= i32::MAX as u64;
        let pages = touched_by(offset, length);
        fits && !self.retired.load(Ordering::Acquire)
            && (self.all(pages.clone(), |_, region, bits| has(&region.ready, bits)) || self.warms(pages))
    }

    /// Whether all pages of a range are known to hold data, without asking the kernel.
    pub(crate) fn has_all(&self, offset: u64, length: u64) -> bool {
        let fits = offset.saturating_add(length) <= self.mapping.length_bytes() as u64;
        let pages = touched_by(offset, length);
        fits && !self.retired.load(Ordering::Acquire) && self.all(pages, |_, region, bits| has(&region.ready, bits))
    }

    fn all(&self, pages: Range<u64>, is: impl Fn(usize, &Region, u64) -> bool) -> bool {
        all_regions(pages, |number, bits| self.regions.get(number).is_some_and(|region| is(number, region, bits)))
    }

    /// Whether these pages are to be copied from now on.
    fn warms(&self, pages: Range<u64>) -> bool {
        self.all(pages.clone(), |_, region, bits| has(&region.touched, bits))
            && self.repeats.0.fetch_add(1, Ordering::Relaxed).is_multiple_of(REPEATS)
            && self.all(pages, |number, region, bits| {
                let first = number as u64 * REGION_PAGES;
                if first < self.pages_then && region.asked.load(Ordering::Relaxed) == 0 {
                    set(&region.present, self.resident_in(first) & self.whole_then(first));
                    region.asked.store(1, Ordering::Relaxed);
                }
                let there = region.present.load(Ordering::Relaxed);
                if there & bits == bits {
                    self.map_around(first, bits);
                }
                set(&region.ready, there & groups_of(bits));
                there & bits == bits
            })
    }

    /// Makes the kernel map the groups that these pages of a region lie in, by reading. A page whose first access is a
    /// write is mapped alone.
    fn map_around(&self, first: u64, bits: u64) {
        for group in groups() {
            let page = (bits & group).trailing_zeros();
            if page < u64::BITS {
                let at = (first + u64::from(page)) * PAGE;
                // SAFETY: the page lies in the mapping; what is read is thrown away.
                let _ = unsafe { self.mapping.as_ptr().as_ptr().add(at as usize).read_volatile() };
            }
        }
    }

    /// Returns which pages of a region the file held in whole when it was opened. A write behind the end, in the last
    /// page, must make the file longer, so that page is left out.
    fn whole_then(&self, first: u64) -> u64 {
        mask(0, (self.pages_then - first - 1).min(REGION_PAGES - 1))
    }

    /// Asks the kernel which pages are resident in the region that begins at page `first`.
    #[cold]
    fn resident_in(&self, first: u64) -> u64 {
        let mut pages = [0; REGION_PAGES as usize];
        if self.mapping.residency((first * PAGE) as usize, &mut pages).is_err() {
            return 0;
        }
        (0..).zip(pages).filter(|(_, page)| page & 1 != 0).fold(0, |bits, (at, _)| bits | 1_u64 << at)
    }

    /// Notes that a call has read a range.
    pub(crate) fn was_read(&self, offset: u64, length: u64) {
        self.mark(touched_by(offset, length), |region, bits| set(&region.touched, bits));
    }

    /// Notes that a call has written a range. The pages that it covers are present, and wholly within the file.
    pub(crate) fn was_written(&self, offset: u64, length: u64) {
        self.was_read(offset, length);
        self.mark(covered_by(offset, length), |region, bits| set(&region.present, bits));
    }

    /// Notes that a range was given back, or is about to be.
    pub(crate) fn was_punched(&self, offset: u64, length: u64) {
        self.mark(covered_by(offset, length), |region, bits| {
            clear(&region.present, bits);
            clear(&region.ready, bits);
        });
    }

    fn mark(&self, pages: Range<u64>, change: impl Fn(&Region, u64)) {
        let end = pages.end.min(self.mapping.length_bytes() as u64 / PAGE);
        self.all(pages.start..end, |_, region, bits| {
            change(region, bits);
            true
        });
    }

    /// Ends all copying through the mapping.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Sets the file's times if it was written through the mapping since they were last set.
    pub(crate) fn stamp(&self, fd: BorrowedFd<'_>) {
        if self.unstamped.swap(false, Ordering::Relaxed) {
            let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
            // Errors do not matter: the data are in the file.
            let _ = rustix::fs::futimens(fd, &rustix::fs::Timestamps { last_access: now, last_modification: now });
        }
    }
}
