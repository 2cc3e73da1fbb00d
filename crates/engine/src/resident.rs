//! A file that lies in memory, mapped: what it holds is copied without a call of the kernel.
//!
//! tmpfs refuses calls that must not wait, so it can be served neither by io_uring's fast path nor in batches; a copy to
//! or from a mapping costs half of what such a call does. But a hole that is read through a mapping becomes a page, and a
//! page that cannot be had is a signal instead of an error. So only pages that are known to be there are copied so;
//! everything else is left to calls, which are always right:
//!
//! * A bit a page says that it holds data and lies wholly within the file. It is set from what the kernel says is
//!   resident (`mincore`), once for each [`REGION_BYTES`] that was there when the file was opened, and by every write;
//!   discarding clears it.
//! * To map a page, and to unmap it in the end, costs as much as several calls. So calls serve a page the first time, and
//!   of what is asked for again, every [`REPEATS`]th is mapped, with the pages around it that the kernel maps along.
//! * A bit that is wrong because somebody else punched the file costs a page, nothing else.
//! * A file is cut by us only after its mapping was retired for good. If another program takes pages away, the mapping is
//!   poisoned instead of the process killed (see `memory::fault`): the copy is not believed, and made by a call. If it cuts
//!   the file within a page, what is written behind the end in that page is lost; image locks are there to prevent that.
//! * The kernel does not see such writes, so the file's times are set with the next flush and when it is closed.
//!
//! Where the host has something to swap to, the mapping is *armed*, once for all (`memory::Mapping::arm`): then a page that is
//! not mapped, because it went to swap since or for whatever reason, fails the copy instead of making the reactor wait, and
//! workers do what the reactor did: all calls, whole requests whose copy failed, and, beside such calls, the mapping of what
//! is there of the groups around pages that are asked for again. (They are so far off that every repeat is mapped.) Then only
//! they say what is ready. What they know may be outdated; a copy that fails, or a hole that is filled, is all that costs. Where
//! a mapping cannot be armed, what is swapped out must not get here (see `swap`).

use crate::inflight::{Action, Buffers};
use memory::{Mapping, PAGE_BYTES};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};

const PAGE: u64 = PAGE_BYTES as u64;
const REGION_PAGES: u64 = u64::BITS as u64;
const REGION_BYTES: u64 = REGION_PAGES * PAGE;

/// See the module.
const REPEATS: u64 = 8;
/// So many pages the kernel maps at a time.
const GROUP_PAGES: u32 = 16;

/// The longest file that is mapped, with its room to grow.
const MAX_BYTES: u64 = 256 << 30;
/// How much a file may grow at least.
const ROOM_BYTES: u64 = 32 << 30;

/// What is known of a run of pages, a bit a page.
#[repr(C)]
struct Region {
    /// Those that are copied through the mapping.
    ready: AtomicU64,
    /// A call has served them.
    touched: AtomicU64,
    /// They hold data and lie wholly within the file.
    present: AtomicU64,
    /// Not zero: the kernel was asked which are there.
    asked: AtomicU64,
}

/// A counter that is written often, beside what each copy reads.
#[derive(Default)]
#[repr(align(64))]
struct OnItsOwnLine(AtomicU64);

/// The states of [`Resident::arming`].
const NOT_ARMED: u8 = 0;
/// A worker has been told to.
const BEGUN: u8 = 1;
const ARMED: u8 = 2;
const CANNOT_BE: u8 = 3;

/// What a worker does for a file in memory beside its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aside {
    /// Before it: see [`Resident::arm`].
    Arm,
    /// After it: see [`Resident::map`].
    Map,
    /// Before it: see [`Resident::stamp`].
    Stamp,
}

/// See the module.
pub(crate) struct Resident {
    name: Box<str>,
    mapping: Mapping,
    arming: AtomicU8,
    writable: bool,
    /// The pages that the file had in whole when it was opened.
    pages_then: u64,
    /// From now on by calls.
    retired: AtomicBool,
    regions: Box<[Region]>,
    /// Requests so far for pages that calls have served before.
    repeats: OnItsOwnLine,
    /// Written through the mapping since the file's times were set.
    unstamped: AtomicBool,
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resident({} bytes)", self.mapping.length_bytes())
    }
}

/// Regions of which nothing is known, in memory that the allocator has not touched yet: most of it never will be.
fn regions(count: u64) -> Box<[Region]> {
    let words = vec![[0_u64; size_of::<Region>() / size_of::<u64>()]; count as usize].into_boxed_slice();
    // SAFETY: a region consists of so many atomic words, which have a word's size, alignment (on every 64-bit machine)
    // and bits; the box was just ours.
    unsafe { Box::from_raw(Box::into_raw(words) as *mut [Region]) }
}

fn has(word: &AtomicU64, bits: u64) -> bool {
    word.load(Ordering::Relaxed) & bits == bits
}

/// Sets bits; where they are set already, nothing is written, so that reactors do not take the line from each other.
fn set(word: &AtomicU64, bits: u64) {
    if !has(word, bits) {
        word.fetch_or(bits, Ordering::Relaxed);
    }
}

/// Takes bits away; as [`set`], where there are none, nothing is written, so that what nobody has touched takes no memory.
fn clear(word: &AtomicU64, bits: u64) {
    if word.load(Ordering::Relaxed) & bits != 0 {
        word.fetch_and(!bits, Ordering::Relaxed);
    }
}

/// The bits `first..=last` of a region's word.
fn mask(first: u64, last: u64) -> u64 {
    (u64::MAX << first) & (u64::MAX >> (REGION_PAGES - 1 - last))
}

/// The bits of each group of a region.
fn groups() -> impl Iterator<Item = u64> {
    let group = mask(0, u64::from(GROUP_PAGES) - 1);
    (0..u64::BITS).step_by(GROUP_PAGES as usize).map(move |first| group << first)
}

/// All bits of the groups that `bits` lie in.
fn groups_of(bits: u64) -> u64 {
    groups().filter(|group| bits & group != 0).fold(0, |all, group| all | group)
}

/// The pages that lie wholly in a range.
fn covered(offset: u64, length: u64) -> Range<u64> {
    offset.div_ceil(PAGE)..offset.saturating_add(length) / PAGE
}

/// Copies segments of memory one after the other to or from a file's place, until one fails.
///
/// # Safety
/// What `copy` asks of each range that it is given.
unsafe fn copy_segments(
    segments: &[libc::iovec],
    mut at: *mut u8,
    to_file: bool,
    copy: impl Fn(*const u8, *mut u8, usize) -> bool,
) -> bool {
    segments.iter().all(|segment| {
        let memory = segment.iov_base.cast::<u8>();
        let (from, to) = if to_file { (memory, at) } else { (at, memory) };
        at = at.wrapping_add(segment.iov_len);
        copy(from.cast_const(), to, segment.iov_len)
    })
}

/// Calls `visit` with each region's number and the bits of `pages` in it, until it says no.
fn all_regions(pages: Range<u64>, mut visit: impl FnMut(usize, u64) -> bool) -> bool {
    let mut page = pages.start;
    while page < pages.end {
        let last = (page | (REGION_PAGES - 1)).min(pages.end - 1);
        if !visit((page / REGION_PAGES) as usize, mask(page % REGION_PAGES, last % REGION_PAGES)) {
            return false;
        }
        page = last + 1;
    }
    true
}

impl Resident {
    /// Maps a file of `length_bytes`; `None` where that cannot be, or would not tell holes from data.
    pub(crate) fn new(fd: &OwnedFd, name: &str, length_bytes: u64, writable: bool) -> Option<Self> {
        // What the kernel says of its pages is taken for pages of this size.
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
        // Behind the end nothing is resident. Whoever may not know is told that everything is.
        let mut behind = [0];
        mapping.residency((mapped - PAGE) as usize, &mut behind).ok()?;
        (behind[0] & 1 == 0).then(|| Self {
            name: name.into(),
            mapping,
            arming: AtomicU8::new(NOT_ARMED),
            writable,
            pages_then: length_bytes / PAGE,
            retired: AtomicBool::new(false),
            regions: regions(mapped / REGION_BYTES),
            repeats: OnItsOwnLine::default(),
            unstamped: AtomicBool::new(false),
        })
    }

    /// Whether a page that is not there fails a copy, and is waited for by workers alone.
    pub(crate) fn is_armed(&self) -> bool {
        self.arming.load(Ordering::Acquire) == ARMED
    }

    /// Whether nobody has tried yet.
    pub(crate) fn may_be_armed(&self) -> bool {
        self.arming.load(Ordering::Relaxed) == NOT_ARMED
    }

    /// Whether it is the caller who is to see to it, of all reactors.
    pub(crate) fn begins_arming(&self) -> bool {
        self.may_be_armed()
            && self.arming.compare_exchange(NOT_ARMED, BEGUN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Arms the mapping. May wait for whoever changes the process's mappings.
    pub(crate) fn arm(&self) {
        let name = &self.name;
        let state = match self.mapping.arm() {
            Ok(()) => ARMED,
            Err(error) => {
                tracing::warn!(
                    "'{name}': the host has swap, and its mapping cannot be told of that (userfaultfd: {error}): while \
                     anything is swapped out, the kernel is asked before each copy"
                );
                CANNOT_BE
            }
        };
        self.arming.store(state, Ordering::Release);
    }

    /// Carries a read or write out, if all of it lies in pages that are there, and returns its length.
    ///
    /// # Safety
    /// The memory that `buffers` names must be valid for the action's direction until this returns.
    pub(crate) unsafe fn copy(&self, action: Action, offset: u64, buffers: Buffers) -> Option<i32> {
        let to_file = match action {
            Action::Read { .. } => false,
            // Guests that have every write made durable send no flush, with which the file's times would be set.
            Action::Write { durable } => (self.writable && !durable).then_some(true)?,
            _ => return None,
        };
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
        // SAFETY: `holds` says that the range lies in the mapping, and the caller that the segments are valid. Both may
        // be changed by others meanwhile, a guest or another reactor: the bytes are copied only.
        unsafe {
            let at = self.mapping.as_ptr().as_ptr().add(offset as usize);
            if !self.is_armed() {
                copy_segments(segments, at, to_file, |from, to, length| {
                    std::ptr::copy(from, to, length);
                    true
                });
            } else if !copy_segments(segments, at, to_file, |from, to, length| memory::try_copy(from, to, length)) {
                self.went_away(offset, length);
                return None;
            }
        }
        // The mark is looked at after the bytes.
        fence(Ordering::Acquire);
        if self.mapping.is_poisoned() {
            self.retire();
            return None;
        }
        if to_file && !self.unstamped.load(Ordering::Relaxed) {
            self.unstamped.store(true, Ordering::Relaxed);
        }
        i32::try_from(length).ok()
    }

    /// Whether all pages of a range are to be copied.
    fn holds(&self, offset: u64, length: u64) -> bool {
        let end = offset.saturating_add(length);
        let fits = end <= self.mapping.length_bytes() as u64 && length > 0 && length <= i32::MAX as u64;
        let pages = offset / PAGE..end.div_ceil(PAGE);
        fits && !self.retired.load(Ordering::Acquire)
            && (self.all(pages.clone(), |_, region, bits| has(&region.ready, bits))
                || (!self.is_armed() && self.warms(pages)))
    }

    /// Pages of a range were not there: until they are mapped again, nobody need try.
    #[cold]
    fn went_away(&self, offset: u64, length: u64) {
        self.mark(offset / PAGE..offset.saturating_add(length).div_ceil(PAGE), |region, bits| {
            clear(&region.ready, bits);
            set(&region.touched, bits);
        });
    }

    /// What a worker is to do beside a call that the reactor has left to it, of an armed file.
    pub(crate) fn aside(&self, action: Action, offset: u64, length: u64) -> Option<Aside> {
        let may_copy = match action {
            Action::Read { .. } => true,
            Action::Write { durable } => self.writable && !durable,
            Action::Sync => return Some(Aside::Stamp),
            _ => false,
        };
        let pages = offset / PAGE..offset.saturating_add(length).div_ceil(PAGE);
        let is_wanted = |number: usize, region: &Region, bits: u64| {
            let is_asked = region.asked.load(Ordering::Relaxed) != 0 || number as u64 * REGION_PAGES >= self.pages_then;
            has(&region.touched, bits) && (!is_asked || has(&region.present, bits))
        };
        let maps = may_copy && length > 0 && !self.retired.load(Ordering::Acquire) && self.all(pages, is_wanted);
        maps.then_some(Aside::Map)
    }

    /// Maps what is in memory of the groups that a range lies in, and has it copied from now on. Called by workers.
    pub(crate) fn map(&self, offset: u64, length: u64) {
        let pages = offset / PAGE..offset.saturating_add(length).div_ceil(PAGE);
        self.all(pages, |number, region, bits| {
            let first = number as u64 * REGION_PAGES;
            let resident = self.resident_in(first);
            if first < self.pages_then && region.asked.load(Ordering::Relaxed) == 0 {
                set(&region.present, resident & self.whole_then(first));
                region.asked.store(1, Ordering::Relaxed);
            }
            let there = resident & region.present.load(Ordering::Relaxed) & groups_of(bits);
            let mut wanted = there & !region.ready.load(Ordering::Relaxed);
            while wanted != 0 {
                let start = wanted.trailing_zeros();
                let count = (wanted >> start).trailing_ones();
                let skip = (first + u64::from(start)) * PAGE;
                self.mapping.map_pages(skip as usize, count as usize * PAGE_BYTES);
                wanted &= !mask(u64::from(start), u64::from(start + count - 1));
            }
            set(&region.ready, there);
            // Either this sees what is punched beside it, or that sees what became ready.
            fence(Ordering::SeqCst);
            clear(&region.ready, there & !region.present.load(Ordering::Relaxed));
            true
        });
    }

    fn all(&self, pages: Range<u64>, is: impl Fn(usize, &Region, u64) -> bool) -> bool {
        all_regions(pages, |number, bits| self.regions.get(number).is_some_and(|region| is(number, region, bits)))
    }

    /// Whether pages are to be copied from now on.
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

    /// Has the kernel map the groups that the pages of a region lie in; they are there. It does so for a read: a page that
    /// is written first is mapped alone.
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

    /// The pages of a region, one of those that the file had when it was opened, that it had in whole: what is written in
    /// the last one behind the end must make the file longer.
    fn whole_then(&self, first: u64) -> u64 {
        mask(0, (self.pages_then - first - 1).min(REGION_PAGES - 1))
    }

    /// The bits of a region that begins at page `first`, as the kernel sees it.
    #[cold]
    fn resident_in(&self, first: u64) -> u64 {
        let mut pages = [0; REGION_PAGES as usize];
        if self.mapping.residency((first * PAGE) as usize, &mut pages).is_err() {
            return 0;
        }
        (0..).zip(pages).filter(|(_, page)| page & 1 != 0).fold(0, |bits, (at, _)| bits | 1_u64 << at)
    }

    /// A range was read.
    pub(crate) fn was_read(&self, offset: u64, length: u64) {
        self.mark(offset / PAGE..offset.saturating_add(length).div_ceil(PAGE), |region, bits| {
            set(&region.touched, bits)
        });
    }

    /// A range was written: the pages that it covers are there, and wholly within the file.
    pub(crate) fn was_written(&self, offset: u64, length: u64) {
        self.was_read(offset, length);
        self.mark(covered(offset, length), |region, bits| set(&region.present, bits));
    }

    /// A range was given back.
    pub(crate) fn was_punched(&self, offset: u64, length: u64) {
        self.mark(covered(offset, length), |region, bits| {
            clear(&region.present, bits);
            // See `map`.
            fence(Ordering::SeqCst);
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

    /// Nothing is copied from now on.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
    }

    /// Whether a flush is to set the file's times.
    pub(crate) fn is_to_be_stamped(&self) -> bool {
        self.unstamped.load(Ordering::Relaxed)
    }

    /// Sets the file's times if it was written since.
    pub(crate) fn stamp(&self, fd: BorrowedFd<'_>) {
        if self.unstamped.swap(false, Ordering::Relaxed) {
            let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
            // A wish: the data are where they belong.
            let _ = rustix::fs::futimens(fd, &rustix::fs::Timestamps { last_access: now, last_modification: now });
        }
    }
}
