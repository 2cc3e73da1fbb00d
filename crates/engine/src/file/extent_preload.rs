//! The tables by which a file system finds a file's blocks, read before they are needed.
//!
//! ext4 reads them when it needs them, in the thread that has a read or write begun, even one that must not wait. So a
//! thread of its own has them read when a reactor first uses the file; until then workers carry requests out. It uses the
//! file by a description of its own where it can, and ends early where the file is closed.

use rustix::thread::CpuSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the extents were read.
#[derive(Debug)]
pub(crate) struct ExtentPreload {
    /// Nobody has asked for them yet.
    wanted: AtomicBool,
    ready: Arc<AtomicBool>,
}

impl ExtentPreload {
    /// Of a file whose reactors may have to wait for its extents, or of one that needs no preload.
    pub(crate) fn new(wanted: bool) -> Self {
        Self { wanted: AtomicBool::new(wanted), ready: Arc::new(AtomicBool::new(!wanted)) }
    }

    /// Whether reactors may begin requests themselves.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// Has them read, for the first that asks, on these processors.
    pub(crate) fn start(&self, fd: &OwnedFd, processors: Option<CpuSet>) {
        if !self.wanted.swap(false, Ordering::Relaxed) {
            return;
        }
        let ready = Arc::clone(&self.ready);
        let reopened = File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let begun = reopened.or_else(|_| fd.try_clone().map(File::from)).and_then(|file| {
            let load = move || {
                if let Some(processors) = processors {
                    let _ = rustix::thread::sched_setaffinity(None, &processors);
                }
                let (mut at, is_open) = (Some(0), || Arc::strong_count(&ready) > 1);
                // Step by step: a change of the file waits for one step at most.
                while let Some(start) = at.filter(|_| is_open()) {
                    at = look_up_extents(file.as_fd(), start);
                }
                // An extent that could not be read shows in the requests that need it.
                ready.store(true, Ordering::Relaxed);
            };
            std::thread::Builder::new().name("tables".to_owned()).spawn(load)
        });
        if begun.is_err() {
            self.ready.store(true, Ordering::Relaxed);
        }
    }
}

/// How many extents are asked for at a time.
const EXTENTS: usize = 512;
const FIEMAP_EXTENT_LAST: u32 = 1;

/// `struct fiemap_extent` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FiemapExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved_words: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` of `linux/fiemap.h`.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FiemapExtent; EXTENTS],
}

/// Has the file system look up some extents, from `start` on. It keeps in memory what it reads for that. Returns where the
/// next begin; `None` at the end, or where it cannot say.
fn look_up_extents(fd: BorrowedFd<'_>, start: u64) -> Option<u64> {
    /// `_IOWR('f', 11, struct fiemap)`, without the extents.
    const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
    let mut map = Fiemap {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped_extents: 0,
        extent_count: EXTENTS as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); EXTENTS],
    };
    // SAFETY: the kernel reads and writes the structure, with no more extents than it says that there is room for.
    if unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } != 0 {
        return None;
    }
    let found = map.extents.get(..map.mapped_extents as usize)?;
    let last = found.last().filter(|last| last.flags & FIEMAP_EXTENT_LAST == 0)?;
    last.logical.checked_add(last.length).filter(|next| *next > start)
}
