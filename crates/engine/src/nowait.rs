//! What a ring does with a file without waiting, and what workers of ours do instead.
//!
//! What io_uring cannot do without waiting it hands to worker threads of the kernel's. The last of them stays as long as the
//! ring, and looks around every five seconds: a daemon that was busy once would never be idle again. So a ring is given
//! only what it keeps:
//!
//! * Reads from the page cache, where the kernel reads what is missing while nobody waits.
//! * Else requests that must not wait (`RWF_NOWAIT`). Where they would have to (holes, space to be found, a device that is
//!   busy), the kernel refuses them, and a worker carries them out.
//!
//! What always waits is a worker's at once: syncs, whatever changes lengths and extents, writes through the page cache that
//! are to be durable, or where its file system takes none that must not wait.

use crate::inflight::Action;
use crate::storage;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the page cache has is copied while the reactor submits. A longer copy goes to a worker: it would hold up every other
/// disk of the reactor.
const INLINE_COPY_BYTES_MAX: usize = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct Nowait {
    /// Whether requests that must not wait are not known to be refused, all of them.
    allowed: AtomicBool,
    page_cached: bool,
    /// The page cache reads what it lacks while nobody waits.
    reads_later: bool,
    /// The page cache takes writes that must not wait.
    takes_writes: bool,
}

impl Nowait {
    pub(crate) fn of(fd: &OwnedFd, block_device: bool, page_cached: bool) -> Self {
        Self {
            allowed: AtomicBool::new(storage::takes_nowait(fd)),
            page_cached,
            reads_later: page_cached && (block_device || storage::reads_later(fd)),
            takes_writes: !page_cached || (!block_device && storage::takes_writes_without_waiting(fd)),
        }
    }

    /// Whether requests that must not wait are worth a try.
    #[inline]
    pub(crate) fn is_allowed(&self) -> bool {
        self.allowed.load(Ordering::Relaxed)
    }

    /// The file takes none of them: whether that is news.
    pub(crate) fn was_refused(&self) -> bool {
        self.allowed.swap(false, Ordering::Relaxed)
    }

    /// Whether plain writes are to be given to a ring.
    pub(crate) fn takes_writes(&self) -> bool {
        self.takes_writes
    }

    /// Whether a ring is to be given this.
    #[inline]
    pub(crate) fn suits_ring(&self, action: Action, length_bytes: usize) -> bool {
        let moves = match action {
            Action::Read { .. } => true,
            Action::Write { durable } => self.takes_writes && !(durable && self.page_cached),
            Action::Sync
            | Action::Fallocate { .. }
            | Action::Truncate
            | Action::DiscardBlocks { .. }
            | Action::BeginWriteback
            | Action::CopyFrom { .. } => false,
        };
        moves && self.is_allowed() && !(self.page_cached && length_bytes > INLINE_COPY_BYTES_MAX)
    }

    /// The `RWF_` flags for what a ring is given.
    #[inline]
    pub(crate) fn ring_flags(&self, action: Action) -> i32 {
        match action {
            Action::Write { durable: true } => libc::RWF_NOWAIT | libc::RWF_DSYNC,
            Action::Read { .. } if self.reads_later => 0,
            _ => libc::RWF_NOWAIT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowait(page_cached: bool, reads_later: bool, takes_writes: bool) -> Nowait {
        Nowait { allowed: AtomicBool::new(true), page_cached, reads_later, takes_writes }
    }

    const READ: Action = Action::Read { need_bytes: 0 };
    const WRITE: Action = Action::Write { durable: false };
    const DURABLE: Action = Action::Write { durable: true };

    #[test]
    fn a_ring_is_given_what_it_never_hands_to_a_worker_of_the_kernels() {
        let (direct, btrfs, ext4) = (nowait(false, false, true), nowait(true, true, true), nowait(true, true, false));
        let given = |to: &Nowait| [READ, WRITE, DURABLE].map(|action| to.suits_ring(action, 4096));
        assert_eq!(given(&direct), [true, true, true]);
        assert_eq!(given(&btrfs), [true, true, false]);
        assert_eq!(given(&ext4), [true, false, false]);
        for action in [Action::Sync, Action::Fallocate { mode: 0, length: 1 }, Action::Truncate, Action::BeginWriteback]
        {
            assert!(!direct.suits_ring(action, 0), "{action:?}");
        }
        assert!(direct.suits_ring(READ, INLINE_COPY_BYTES_MAX + 1));
        assert!(!btrfs.suits_ring(READ, INLINE_COPY_BYTES_MAX + 1) && btrfs.suits_ring(READ, INLINE_COPY_BYTES_MAX));
        assert!(direct.was_refused() && !direct.was_refused());
        assert_eq!(given(&direct), [false; 3]);
    }

    #[test]
    fn all_but_reads_that_the_kernel_ends_later_must_not_wait() {
        let (direct, ext4, other) = (nowait(false, false, true), nowait(true, true, false), nowait(true, false, false));
        let must_not = |of: &Nowait, action| of.ring_flags(action) & libc::RWF_NOWAIT != 0;
        assert!(!must_not(&ext4, READ) && must_not(&other, READ) && must_not(&direct, READ));
        assert!(must_not(&direct, WRITE) && must_not(&direct, DURABLE) && must_not(&ext4, WRITE));
        assert_eq!(direct.ring_flags(DURABLE) & libc::RWF_DSYNC, libc::RWF_DSYNC);
    }
}
