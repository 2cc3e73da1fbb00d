//! Passes results from workers to the reactor.

use super::parts::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError};

/// A flag that is polled. It has a cache line of its own, so that writes to neighbouring fields do not take the line
/// away.
#[derive(Default)]
#[repr(align(64))]
struct Polled(AtomicBool);

/// Results of jobs that workers have carried out.
#[derive(Default)]
pub(super) struct Results {
    pub(super) all: Vec<(u32, i32)>,
    /// The reactor waits for more results. It does so only while it shuts down.
    pub(super) awaited: bool,
}

/// Results, and a flag that makes the reactor look for results, here and in the kernel's rings.
///
/// A worker signals after its results are there, whether it has added them or the kernel has put them into a ring. The
/// reactor clears the flag, then looks. Both change the flag by a read-modify-write. So a look after several signals
/// sees the results of all of them, not only of the last. A result that it does not see leaves the flag set.
#[derive(Default)]
pub(super) struct Mailbox {
    results: Mutex<Results>,
    signalled: Polled,
}

impl Mailbox {
    pub(super) fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the reactor to look.
    pub(super) fn signal(&self) {
        self.signalled.0.swap(true, Ordering::AcqRel);
    }

    pub(super) fn has_signal(&self) -> bool {
        self.signalled.0.load(Ordering::Acquire)
    }

    /// Whether there was a signal since the last look. The caller must look then.
    pub(super) fn take_signal(&self) -> bool {
        // Only the reactor clears the flag.
        self.signalled.0.load(Ordering::Relaxed) && self.signalled.0.swap(false, Ordering::AcqRel)
    }
}
