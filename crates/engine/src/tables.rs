//! The tables by which a file system finds a file's blocks.
//!
//! ext4 reads them when it needs them, in whoever has a read or write begun, however that was asked not to wait. So a thread
//! of its own has them read when a reactor first uses the file, and until that has ended requests are carried out by
//! workers. It uses the file by a description of its own where it can, and ends early where the file is closed.

use rustix::thread::CpuSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether they were read.
#[derive(Debug)]
pub(crate) struct Tables {
    /// Nobody has asked for them yet.
    wanted: AtomicBool,
    ready: Arc<AtomicBool>,
}

impl Tables {
    /// Of a file whose reactors may have to wait for them, or of one that has none.
    pub(crate) fn new(wanted: bool) -> Self {
        Self { wanted: AtomicBool::new(wanted), ready: Arc::new(AtomicBool::new(!wanted)) }
    }

    /// Whether reactors may begin requests themselves.
    pub(crate) fn are_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    /// Has them read, for the first that asks, on these processors.
    pub(crate) fn load(&self, fd: &OwnedFd, processors: Option<CpuSet>) {
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
                // Some at a time: whoever changes the file meanwhile waits for one step at most.
                while let Some(start) = at.filter(|_| is_open()) {
                    at = crate::sys::look_up_extents(file.as_fd(), start);
                }
                // What could not be read shows in the requests that need it.
                ready.store(true, Ordering::Relaxed);
            };
            std::thread::Builder::new().name("tables".to_owned()).spawn(load)
        });
        if begun.is_err() {
            self.ready.store(true, Ordering::Relaxed);
        }
    }
}
