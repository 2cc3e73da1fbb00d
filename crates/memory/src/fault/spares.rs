//! What the handler gives up to make room for a covering page.
//!
//! The kernel limits how many mappings a process has (`vm.max_map_count`), how much private memory (`RLIMIT_DATA`), and, with
//! strict accounting, how much memory all processes have (`vm.overcommit_memory=2`). At such a limit it refuses the pages
//! that are to cover a shrunk mapping. A spare is a little of each, taken in good times.

use crate::PAGE_BYTES;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One session ends once it has touched what is gone, and a covered page takes one or two of them.
const SPARES: usize = 64;

/// A page that is in use, so that it counts, between two that are not, so that it is a mapping of its own.
const SPARE_BYTES: usize = 3 * PAGE_BYTES;

/// Their addresses; zero where there is none.
static ADDRESSES: [AtomicUsize; SPARES] = [const { AtomicUsize::new(0) }; SPARES];

/// Takes what is missing. Not for the handler.
pub(super) fn refill() {
    for spare in &ADDRESSES {
        if spare.load(Ordering::Relaxed) != 0 {
            continue;
        }
        let Some(address) = map() else { return };
        if spare.compare_exchange(0, address, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            unmap(address);
        }
    }
}

/// Gives one back to the kernel. `false` if there is none left.
pub(super) fn give_up_one() -> bool {
    let taken = ADDRESSES.iter().map(|spare| spare.swap(0, Ordering::AcqRel)).find(|address| *address != 0);
    taken.is_some_and(unmap)
}

fn map() -> Option<usize> {
    // SAFETY: a fresh mapping at an address that the kernel chooses touches no existing memory; its middle page is ours.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let start = libc::mmap(std::ptr::null_mut(), SPARE_BYTES, libc::PROT_NONE, flags, -1, 0);
        if start == libc::MAP_FAILED {
            return None;
        }
        let address = start.addr();
        let middle = start.byte_add(PAGE_BYTES);
        if libc::mprotect(middle, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE) != 0 {
            unmap(address);
            return None;
        }
        Some(address)
    }
}

fn unmap(address: usize) -> bool {
    // SAFETY: the range is a spare's, which `map` made and nobody else knows, and it is unmapped once: who has taken its
    // address out of the list.
    unsafe { libc::munmap(address as *mut libc::c_void, SPARE_BYTES) == 0 }
}
