//! The tables by which a file system finds a file's blocks.
//!
//! ext4 reads them when it needs them, in whoever has a read or write begun, however that was asked not to wait. So a thread
//! of its own has them read when a reactor first uses the file, and until that has ended requests are carried out by
//! workers. It uses the file by a description of its own, so that nobody waits for it to close the file, locks and all.

use std::fs::File;
use std::os::fd::{AsFd, RawFd};
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

    /// Has them read, for the first that asks.
    pub(crate) fn load(&self, fd: RawFd) {
        if !self.wanted.swap(false, Ordering::Relaxed) {
            return;
        }
        let ready = Arc::clone(&self.ready);
        let begun = File::open(format!("/proc/self/fd/{fd}")).and_then(|file| {
            let load = move || {
                // Whatever cannot be read shows in the requests that need it.
                crate::sys::load_tables(file.as_fd());
                ready.store(true, Ordering::Relaxed);
            };
            std::thread::Builder::new().name("tables".to_owned()).spawn(load)
        });
        if begun.is_err() {
            self.ready.store(true, Ordering::Relaxed);
        }
    }
}
