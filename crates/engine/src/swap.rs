//! What of a file in memory is swapped out: a reactor that copied it would wait for the storage that it went to.
//!
//! Where the host has no swap, which one look at the clock says, nothing can be. Where it has, the mappings of such files are
//! armed (see `resident`), so that nothing need be asked. Where that cannot be had, the kernel is asked before each copy
//! (`cachestat`, which takes about half as long as reading a page) while anything is swapped out, and what waits goes to a
//! worker.

use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// For so long, in milliseconds, is believed what was found; the clock's own ticks may be as far apart.
const BELIEVED_MS: u64 = 10;

/// When the kernel was last asked, from 1.
static ASKED_MS: AtomicU64 = AtomicU64::new(0);
static FOUND: AtomicU8 = AtomicU8::new(NONE);
const NONE: u8 = 0;
const UNUSED: u8 = 1;
const IN_USE: u8 = 2;

/// What this host has to swap to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Swap {
    None,
    /// Nothing is swapped out.
    Unused,
    InUse,
}

/// What there is, and whether anything of this host is swapped out.
pub(crate) fn look() -> Swap {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let now_ms = (now.tv_sec as u64).wrapping_mul(1000).wrapping_add(now.tv_nsec as u64 / 1_000_000).max(1);
    let asked_ms = ASKED_MS.load(Ordering::Relaxed);
    if asked_ms == 0 || now_ms.wrapping_sub(asked_ms) >= BELIEVED_MS {
        let host = rustix::system::sysinfo();
        let found = match (host.totalswap, host.freeswap) {
            (0, _) => NONE,
            (total, free) if free < total => IN_USE,
            _ => UNUSED,
        };
        FOUND.store(found, Ordering::Relaxed);
        ASKED_MS.store(now_ms, Ordering::Relaxed);
    }
    match FOUND.load(Ordering::Relaxed) {
        NONE => Swap::None,
        UNUSED => Swap::Unused,
        _ => Swap::InUse,
    }
}

/// `struct cachestat_range` of `linux/mman.h`.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// `struct cachestat` of `linux/mman.h`, in pages.
#[repr(C)]
#[derive(Default)]
struct Found {
    cached: u64,
    dirty: u64,
    writeback: u64,
    /// With tmpfs: in swap. Holes are neither here nor there.
    evicted: u64,
    recently_evicted: u64,
}

/// Its number on all architectures but alpha and mips; `libc` has no name for it yet.
const SYS_CACHESTAT: libc::c_long = 451;

/// Whether something of a range of a file in memory is swapped out, as far as the kernel tells. It does not before Linux
/// 6.5, nor of a file that this process neither owns nor may write: then it may be.
pub(crate) fn may_hold(fd: &OwnedFd, offset: u64, length: u64) -> bool {
    // No length at all would mean the rest of the file.
    let range = Range { offset, length: length.max(1) };
    let mut found = Found::default();
    // SAFETY: the kernel reads one range and writes one result; both are laid out as it wants them.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const range, &raw mut found, 0) };
    result != 0 || found.evicted > 0
}
