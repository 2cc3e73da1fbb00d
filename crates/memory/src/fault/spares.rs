//! Spare mappings that the handler gives up to make room for a covering one.
//!
//! The kernel limits a process's mappings (`vm.max_map_count`) and private memory (`RLIMIT_DATA`) and, with strict
//! accounting, the memory of all processes (`vm.overcommit_memory=2`). At such a limit it refuses the mapping that
//! would cover a shrunk one. A spare takes a little of each in advance.

use crate::PAGE_BYTES;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of spares. Each makes room for the mapping that covers all of a session's memory.
const SPARES: usize = 64;

/// A page in use, which counts as memory, between two unused ones, which make it a mapping of its own.
const SPARE_BYTES: usize = 3 * PAGE_BYTES;

/// The spares' addresses; zero if there is none.
static ADDRESSES: [AtomicUsize; SPARES] = [const { AtomicUsize::new(0) }; SPARES];

/// Takes the missing spares. Not for the handler.
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

/// Gives one spare back to the kernel. Returns false if there is none left.
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
    // SAFETY: the range is a spare, which `map` made. Only the thread that took its address out of the list knows it,
    // so it is unmapped once.
    unsafe { libc::munmap(address as *mut libc::c_void, SPARE_BYTES) == 0 }
}
