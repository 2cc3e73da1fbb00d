//! Results on their way from workers to the reactor.

use super::parts::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError};

/// Looked at again and again: on a cache line of its own, so that writing what lies beside it does not take the line away.
#[derive(Default)]
#[repr(align(64))]
struct Polled(AtomicBool);

/// What workers have carried out.
#[derive(Default)]
pub(super) struct Results {
    pub(super) all: Vec<(u32, i32)>,
    /// The reactor waits for more. It does so only while it shuts down.
    pub(super) awaited: bool,
}

/// Results, and a flag that tells the reactor to look for them, here and in the kernel's rings.
///
/// A worker signals after its results are there, whether it has added them or the kernel has put them into a ring. The
/// reactor clears the flag, then looks. Both change the flag by a read-modify-write: so a look that follows several signals
/// sees the results of all of them, not only of the last, and what it does not see leaves the flag set.
#[derive(Default)]
pub(super) struct Mailbox {
    results: Mutex<Results>,
    signalled: Polled,
}

impl Mailbox {
    pub(super) fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reactor is to look.
    pub(super) fn signal(&self) {
        self.signalled.0.swap(true, Ordering::AcqRel);
    }

    pub(super) fn has_signal(&self) -> bool {
        self.signalled.0.load(Ordering::Acquire)
    }

    /// Whether there was a signal since the last look. Whoever asks looks now.
    pub(super) fn take_signal(&self) -> bool {
        // Only the reactor clears the flag.
        self.signalled.0.load(Ordering::Relaxed) && self.signalled.0.swap(false, Ordering::AcqRel)
    }
}
