//! A peer that shrinks its memory file ends its own session, not the daemon.
//!
//! Touching a mapping behind the end of its file raises SIGBUS. The handler looks for the address among the registered
//! mappings. If it finds one, it covers the whole mapping with anonymous zero pages (or only the one page, if the file
//! is one of our own images). It marks the mapping as poisoned and returns, so that the access completes. Sessions look
//! at the mark once a batch and hang up. Any other fault goes to the previous handler; by default the process ends.
//!
//! The kernel may refuse private memory for a whole mapping (limits of memory). Then a file of our own, which takes
//! none, covers it (`refuge`), if need be in place of a spare mapping (`spares`). The process ends only if the kernel
//! refuses even that.
//!
//! Memory that is cut off ([`crate::GuestMemory::fence`]) raises the same signal (`barrier`). There only the page that
//! was touched is covered.
//!
//! A SIGBUS that another process sends is no fault, and is ignored.

mod barrier;
mod refuge;
mod spares;

use crate::PAGE_BYTES;
use std::io;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

/// The most mappings that can be registered at once; more are refused. Half of the default limit of a Linux process.
pub const MAX_MAPPINGS: usize = 1 << 15;

/// The most pages of memory that is cut off that are covered one by one. Each takes up to two more mappings, of which the
/// process has 65530 by default.
const MOST_TOUCHED_PAGES: usize = 4096;

struct Slot {
    taken: AtomicBool,
    /// Odd while start and length change, so that the handler uses only pairs that belong together. A slot that changes
    /// while the handler runs is not the one that it looks for: a mapping that is touched stays registered.
    changes: AtomicUsize,
    /// Zero while the slot is free.
    start: AtomicUsize,
    length_bytes: AtomicUsize,
    /// The unit in which the kernel maps the file, which is the least that can be covered.
    page_bytes: AtomicUsize,
    /// Cover only the page that was touched. Nothing relies on its contents, and there may be no room for more.
    page_only: AtomicBool,
    /// Our own file covers the mapping. If a page of it is missing, the kernel has refused that page.
    on_refuge: AtomicBool,
    /// The mapping is cut off, so that calls of the kernel must go on to fail there.
    cut_off: AtomicBool,
    /// Pages that were covered since then.
    touched_pages: AtomicUsize,
    poisoned: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        changes: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        length_bytes: AtomicUsize::new(0),
        page_bytes: AtomicUsize::new(PAGE_BYTES),
        page_only: AtomicBool::new(false),
        on_refuge: AtomicBool::new(false),
        cut_off: AtomicBool::new(false),
        touched_pages: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// One more than the highest slot ever used. It bounds the handler's walk.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Memory of a peer was lost or cut off at some time. While none was, nobody looks for it.
static ANY_LOST: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// A place in the handler's table.
#[derive(Debug)]
pub struct Registration {
    index: usize,
}

/// Registers a mapping of pages of this size. The first call installs the handler.
pub(crate) fn register(
    start: NonNull<u8>,
    length_bytes: usize,
    page_bytes: usize,
    page_only: bool,
) -> io::Result<Registration> {
    INSTALL.call_once(|| {
        refuge::make();
        barrier::make();
        install_handler();
    });
    refuge::clear(lies_on_refuge);
    spares::refill();
    for (index, slot) in SLOTS.iter().enumerate() {
        if slot.taken.swap(true, Ordering::AcqRel) {
            continue;
        }
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.page_only.store(page_only, Ordering::Relaxed);
        slot.on_refuge.store(false, Ordering::Relaxed);
        slot.cut_off.store(false, Ordering::Relaxed);
        slot.touched_pages.store(0, Ordering::Relaxed);
        slot.page_bytes.store(page_bytes, Ordering::Relaxed);
        slot.set_range(start.as_ptr().addr(), length_bytes);
        USED.fetch_max(index + 1, Ordering::AcqRel);
        return Ok(Registration { index });
    }
    Err(io::Error::other(format!("more than {MAX_MAPPINGS} shared mappings at once")))
}

/// Whether our own file covers a mapping.
fn lies_on_refuge() -> bool {
    let mut used = SLOTS.iter().take(USED.load(Ordering::Acquire));
    used.any(|slot| slot.on_refuge.load(Ordering::Acquire) && slot.taken.load(Ordering::Acquire))
}

impl Slot {
    /// Sets start and length. Only the thread that has taken the slot may call it.
    fn set_range(&self, start: usize, length_bytes: usize) {
        let changes = self.changes.load(Ordering::Relaxed);
        self.changes.store(changes.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.length_bytes.store(length_bytes, Ordering::Relaxed);
        self.changes.store(changes.wrapping_add(2), Ordering::Release);
    }

    /// Returns start and length; `None` while they change, or if the slot is free.
    fn range(&self) -> Option<(usize, usize)> {
        let before = self.changes.load(Ordering::Acquire);
        let (start, length_bytes) = (self.start.load(Ordering::Relaxed), self.length_bytes.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let after = self.changes.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2) && start != 0).then_some((start, length_bytes))
    }
}

impl Registration {
    pub(crate) fn is_poisoned(&self) -> bool {
        SLOTS[self.index].poisoned.load(Ordering::Acquire)
    }

    /// Cuts the whole range off, which counts as poisoned from then on. Nothing that is written to it later reaches the
    /// peer; pages that a device has pinned are the exception. Calls of the kernel fail there (`EFAULT`). If it refuses
    /// the mapping for that, pages of our own cover the range, and such calls find zeros. Returns whether the range is
    /// cut off.
    pub(crate) fn fence(&self) -> bool {
        let slot = &SLOTS[self.index];
        slot.poison();
        slot.range().is_some_and(|(start, length_bytes)| {
            // Set before the file is mapped, so that nobody who touches it covers all of it.
            slot.cut_off.store(true, Ordering::Release);
            let put = || barrier::put(start, length_bytes);
            if put() || spares::give_up_one() && put() {
                return true;
            }
            slot.cut_off.store(false, Ordering::Release);
            cover_with_zeros(start, length_bytes) || slot.put_refuge(start, length_bytes)
        })
    }

    /// Removes the range from the table, so that the handler ignores it. Called before the range is unmapped.
    pub(crate) fn withdraw(&self) {
        let slot = &SLOTS[self.index];
        slot.set_range(0, 0);
        slot.touched_pages.store(0, Ordering::Relaxed);
        slot.taken.store(false, Ordering::Release);
    }
}

/// Whether an address lies in a peer's memory that was lost or cut off. What was read there before may be zeros of our
/// own.
pub(crate) fn is_lost(address: usize) -> bool {
    let found = slot_of(address).map(|(slot, ..)| slot);
    found.is_some_and(|slot| slot.poisoned.load(Ordering::Acquire) && !slot.page_only.load(Ordering::Relaxed))
}

/// Whether [`is_lost`] may be true of any address. Called after the reads in question.
#[inline]
pub(crate) fn any_is_lost() -> bool {
    fence(Ordering::Acquire);
    ANY_LOST.load(Ordering::Relaxed)
}

fn install_handler() {
    // SAFETY: all-zero is a valid `sigaction`; the handler only reads atomics and calls mmap, which the kernel
    // allows in a handler; `previous` is leaked on purpose, so the pointer stays valid for the handler for ever.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        let previous: &'static mut libc::sigaction = Box::leak(Box::new(std::mem::zeroed()));
        if libc::sigaction(libc::SIGBUS, &raw const action, previous) == 0 {
            PREVIOUS.store(previous, Ordering::Release);
        }
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a SA_SIGINFO handler of SIGBUS.
    let (address, code) = unsafe { ((*info).si_addr().addr(), (*info).si_code) };
    // Only signals of the kernel itself have codes above zero, and an address.
    if code <= 0 {
        return;
    }
    match slot_of(address) {
        Some((slot, start, length_bytes)) => slot.cover(address, start, length_bytes),
        None => hand_on(signal, info, context),
    }
}

/// Returns the slot whose mapping holds `address`, where that mapping starts, and its length.
fn slot_of(address: usize) -> Option<(&'static Slot, usize, usize)> {
    SLOTS[..USED.load(Ordering::Acquire)].iter().find_map(|slot| {
        let (start, length_bytes) = slot.range()?;
        (address >= start && address - start < length_bytes).then_some((slot, start, length_bytes))
    })
}

impl Slot {
    /// Marks the mapping, before its memory is replaced.
    fn poison(&self) {
        ANY_LOST.store(true, Ordering::Relaxed);
        self.poisoned.store(true, Ordering::Release);
    }

    /// Makes `address` valid in the mapping of this slot. Called by the handler: no locks, no allocation.
    fn cover(&self, address: usize, start: usize, length_bytes: usize) {
        self.poison();
        let page_bytes = self.page_bytes.load(Ordering::Relaxed);
        let page = start + (address - start) / page_bytes * page_bytes;
        let cover_page = |page, bytes| cover_with_zeros(page, bytes) || refuge::cover_page(page, bytes);
        let is_cut_off = self.cut_off.load(Ordering::Acquire) && self.may_cover_one_more();
        let is_covered = || match self.page_only.load(Ordering::Relaxed) {
            true => cover_page(page, page_bytes),
            // The pages around it are no zeros for the kernel. (The barrier has no huge pages.)
            false if is_cut_off && cover_page(address / PAGE_BYTES * PAGE_BYTES, PAGE_BYTES) => true,
            // If our file lies there already, a page of it was refused: then private memory may help, or the file's
            // first pages.
            false => {
                cover_with_zeros(start, length_bytes)
                    || self.cover_by_refuge(start, length_bytes)
                    || cover_with_zeros(page, page_bytes)
                    || self.on_refuge.load(Ordering::Acquire) && refuge::cover_around(address, start, length_bytes)
            }
        };
        // SAFETY: the calling thread's own.
        let errno = unsafe { *libc::__errno_location() };
        loop {
            if is_covered() {
                break;
            }
            if !spares::give_up_one() {
                die();
            }
        }
        // SAFETY: as above. The interrupted code may be about to read it.
        unsafe { *libc::__errno_location() = errno };
    }

    /// Counts one more page that is covered alone. Returns false if there are too many on all mappings.
    fn may_cover_one_more(&self) -> bool {
        let used = SLOTS[..USED.load(Ordering::Acquire)].iter();
        let touched: usize = used.map(|slot| slot.touched_pages.load(Ordering::Relaxed)).sum();
        self.touched_pages.fetch_add(1, Ordering::Relaxed);
        touched < MOST_TOUCHED_PAGES
    }

    /// Puts our own file over the mapping, unless it is there. Returns whether it did so.
    fn cover_by_refuge(&self, start: usize, length_bytes: usize) -> bool {
        !self.on_refuge.load(Ordering::Acquire) && self.put_refuge(start, length_bytes)
    }

    /// Puts our own file over the mapping, even if it is there already. Returns whether it is there now.
    fn put_refuge(&self, start: usize, length_bytes: usize) -> bool {
        // Set before the file is mapped, so that `clear` never misses the mapping.
        let was_there = self.on_refuge.swap(true, Ordering::AcqRel);
        let covered = refuge::cover_whole(start, length_bytes);
        if !covered && !was_there {
            self.on_refuge.store(false, Ordering::Release);
        }
        covered
    }
}

/// Puts private zero pages over a part of a registered mapping. Returns false if the kernel refuses.
fn cover_with_zeros(start: usize, length_bytes: usize) -> bool {
    // SAFETY: the range is one of our own mappings (it is registered, and withdrawn before it is unmapped); replacing
    // its pages with private zeros keeps every address in it valid.
    let covered = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            length_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    covered != libc::MAP_FAILED
}

/// Says why, and ends the process: returning would raise the same fault for ever.
fn die() -> ! {
    let message = b"ringdisk: a peer shrank its memory, and the kernel refuses even one page in its place\n";
    // SAFETY: both calls are allowed in a handler, and the message is as long as that.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::abort()
    }
}

fn hand_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: `previous` is null or the leaked action from `install_handler`; a handler that was installed with
    // SA_SIGINFO takes these three arguments; SIG_DFL is restored so that the fault ends the process when it recurs.
    unsafe {
        if !previous.is_null() && (*previous).sa_flags & libc::SA_SIGINFO != 0 && (*previous).sa_sigaction > 1 {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute((*previous).sa_sigaction);
            handler(signal, info, context);
        } else {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};

    #[test]
    fn a_shrunken_file_poisons_its_mapping_and_the_process_lives() {
        let (fd, mapping) = Mapping::anonymous_file(c"shrinks", 8192).unwrap();
        std::fs::File::from(fd).set_len(0).unwrap();
        // SAFETY: the address lies in the mapping.
        let byte = unsafe { std::ptr::read_volatile(mapping.as_ptr().as_ptr().add(5000)) };
        assert_eq!(byte, 0);
        assert!(mapping.is_poisoned());
    }

    #[test]
    fn of_our_own_files_only_the_page_that_was_touched_is_covered() {
        let (fd, theirs) = Mapping::anonymous_file(c"image", 4 * PAGE_BYTES).unwrap();
        let ours = Mapping::of_storage(fd.as_fd(), 1 << 30, true).unwrap();
        let at = |mapping: &Mapping, page: usize| mapping.as_ptr().as_ptr().wrapping_add(page * PAGE_BYTES);
        // SAFETY: all addresses lie in the mappings.
        unsafe {
            at(&theirs, 1).write_volatile(7);
            assert_eq!(at(&ours, 9).read_volatile(), 0);
            assert_eq!((at(&ours, 1).read_volatile(), ours.is_poisoned()), (7, true));
        }
        assert!(!theirs.is_poisoned());
    }

    #[test]
    fn a_part_of_a_huge_page_is_poisoned_and_unmapped_like_any_other() {
        // SAFETY: the name is a C string.
        let raw = unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB) };
        if raw < 0 {
            eprintln!("skipped: this kernel has no huge pages");
            return;
        }
        // SAFETY: the call above just made this descriptor and nobody else knows it.
        let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(raw) });
        file.set_len(1 << 21).unwrap();
        drop(Mapping::shared(file.as_fd(), 0, 4096).unwrap());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("memfd:huge"), "{maps}");
        let mapping = Mapping::shared(file.as_fd(), 0, 4096).unwrap();
        // Whether there never was a page or it is gone, the handler runs.
        file.set_len(0).unwrap();
        // SAFETY: the address lies in the mapping.
        assert_eq!(unsafe { std::ptr::read_volatile(mapping.as_ptr().as_ptr().add(100)) }, 0);
        assert!(mapping.is_poisoned());
    }

    #[test]
    fn a_range_is_believed_only_while_nobody_changes_it() {
        let (fd, mapping) = Mapping::anonymous_file(c"range", 8192).unwrap();
        let address = mapping.as_ptr().as_ptr().addr();
        let slot = slot_of(address + 8191).unwrap().0;
        assert_eq!(slot.range(), Some((address, 8192)));
        let before = slot.changes.fetch_add(1, Ordering::Relaxed);
        assert_eq!(slot.range(), None, "half changed");
        slot.set_range(address, 8192);
        assert_eq!(slot.range(), None, "the other change goes on");
        slot.changes.store(before, Ordering::Relaxed);
        assert_eq!(slot.range(), Some((address, 8192)));
        drop((mapping, fd));
        assert_ne!(slot.changes.load(Ordering::Relaxed), before, "who looked meanwhile can tell");
    }
}
