//! Maps a file in memory, for callers that look at it without a request ([`block::File::map`]).
//!
//! The mapping is made on the first call, and again when the file has grown beyond it or a page of it was lost. It
//! shows the page cache, so files with direct I/O are not mapped. In a file on tmpfs, reading a hole through a mapping
//! allocates a page. So only present pages are mapped, and the others are given as zeros.

mod looking;

use memory::Mapping;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct InPlace {
    whole: Mutex<Option<Whole>>,
    /// This process has cut the file, or is about to. Its length must then be read each time.
    was_cut: AtomicBool,
}

#[derive(Debug)]
struct Whole {
    mapping: Arc<Mapping>,
    /// The file's length when it was last asked.
    known_bytes: u64,
}

impl InPlace {
    /// Notes that the file is about to become shorter.
    pub(crate) fn is_cut(&self) {
        self.was_cut.store(true, Ordering::Release);
    }
}
