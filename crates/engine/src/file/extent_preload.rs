//! Makes the file system read its tables of a file's extents before they are needed.
//!
//! ext4 reads these tables on demand, in the thread that begins a read or write, even one that must not wait. So when a
//! reactor first uses the file, a separate thread makes the file system read them. Until it is done, workers carry out
//! the requests. The thread has a file description of its own if possible, and ends early if the file is closed.

use rustix::thread::CpuSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a file's extents were read.
#[derive(Debug)]
pub(crate) struct ExtentPreload {
    /// The extents must be read, and that was not started yet.
    wanted: AtomicBool,
    ready: Arc<AtomicBool>,
}

impl ExtentPreload {
    /// Makes the preload of a file. `wanted` says whether reactors might otherwise wait for its extents.
    pub(crate) fn new(wanted: bool) -> Self {
        Self { wanted: AtomicBool::new(wanted), ready: Arc::new(AtomicBool::new(!wanted)) }
    }

    /// Whether reactors may begin requests themselves.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// Starts the thread on these processors, if it is wanted and was not started before.
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
                // In steps, so that a change of the file waits for one step at most.
                while let Some(start) = at.filter(|_| is_open()) {
                    at = look_up_extents(file.as_fd(), start);
                }
                // If an extent could not be read, the requests that need it will report that.
                ready.store(true, Ordering::Relaxed);
            };
            std::thread::Builder::new().name("tables".to_owned()).spawn(load)
        });
        if begun.is_err() {
            self.ready.store(true, Ordering::Relaxed);
        }
    }
}

/// Extents that are asked for at a time.
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

/// Makes the file system look up some extents from `start` on, which keeps their tables in memory. Returns where the
/// next extents begin; `None` at the end, or if the file system cannot tell.
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
