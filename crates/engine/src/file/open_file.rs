//! An open file, shared by all reactors.

use super::alignment::Alignment;
use super::extent_preload::ExtentPreload;
use super::in_place::InPlace;
use super::mapped::MappedFile;
use super::rmw_lock::RmwLock;
use super::write_behind::WriteBehind;
use crate::base::call::{Action, Call};
use crate::base::options::EngineKind;
use block::{FileInfo, IoError, IoResult, Lifetime, Topology};
use memory::BufferAccount;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// What decides who carries a file's requests out (see `route`). It does not change while the file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Never [`EngineKind::Auto`].
    pub(crate) engine: EngineKind,
    pub(crate) storage: Storage,
}

/// What lies behind a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Memory, on a host without swap: reactors carry out short requests themselves, since nothing waits.
    Memory,
    /// The page cache of a regular file.
    PageCache {
        /// It reads what it lacks while nobody waits.
        reads_later: bool,
        /// It takes writes that must not wait.
        takes_nowait_writes: bool,
        /// What `io_submit` writes to it has ended when that returns.
        writes_end_in_call: bool,
    },
    /// The page cache of a block device.
    CachedDevice,
    /// A device, past the page cache.
    Direct,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    /// Names the file among all that this process has opened.
    pub(crate) id: u64,
    pub(crate) info: FileInfo,
    /// What the device behind it says; a file says nothing.
    pub(crate) topology: Topology,
    pub(crate) lifetime: Option<Lifetime>,
    /// Holds image locks.
    pub(crate) locked: bool,
    pub(crate) traits: Traits,
    /// Another engine may take the chosen one's place.
    pub(crate) chosen_freely: bool,
    /// With io_uring: on the ring with a submission thread.
    pub(crate) sqpoll: bool,
    /// Requests that must not wait (`RWF_NOWAIT`) are not known to be refused, all of them.
    pub(crate) takes_nowait: AtomicBool,
    /// How many changes of a file in memory are in workers' hands, of all reactors. Another change would wait for them in
    /// the kernel, and so would setting the file's times.
    pub(crate) changes_by_workers: AtomicUsize,
    /// The kernel finds the end of data page by page.
    pub(crate) walks_to_holes: bool,
    /// Copies what it can of a file in memory without calls.
    pub(crate) mapped: Option<MappedFile>,
    /// Shows it where it lies, to who makes no requests.
    pub(crate) in_place: InPlace,
    pub(crate) alignment: Alignment,
    /// Every write is durable when it completes.
    pub(crate) write_through: bool,
    /// Flushes do nothing.
    pub(crate) ignore_flush: bool,
    /// Writes go through the page cache.
    pub(crate) page_cached: bool,
    /// A sync of the page cache has failed. The kernel may have dropped what it could not write and call the next sync
    /// a success, so none is believed any more until the file is opened anew.
    pub(crate) sync_lost: AtomicBool,
    /// Where the kernel is asked to write soon what it has taken.
    pub(crate) write_behind: Option<WriteBehind>,
    pub(crate) rmw_lock: Arc<RmwLock>,
    pub(crate) extents: ExtentPreload,
    /// Where buffers have to find room.
    pub(crate) buffers: BufferAccount,
    /// Offsets and lengths of `fallocate` must be multiples of this (block devices).
    pub(crate) fallocate_unit_bytes: u32,
    /// The rung of `zeroes::Ladder` that is known to work.
    pub(crate) zeroes_rung: AtomicU8,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.stamp();
        if self.locked {
            // The kernel may hold the description a little longer than the descriptor (for a request that io_uring has
            // told the end of but not yet freed), and the locks go with the description.
            super::image_lock::unlock(self.fd.as_fd());
        }
    }
}

impl OpenFile {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// The kernel has refused what must not wait for that alone: from now on workers carry all out.
    #[cold]
    pub(crate) fn nowait_was_refused(&self) {
        if self.takes_nowait.swap(false, Ordering::Relaxed) {
            let name = &self.info.name;
            tracing::warn!("'{name}' takes nothing that must not wait: from now on threads carry out its requests");
        }
    }

    /// Carries out what needs no call and returns its result; `None` where a call is needed.
    ///
    /// # Safety
    /// The memory that `call` names must be valid for the action's direction until this returns.
    pub(crate) unsafe fn without_call(&self, call: &Call) -> Option<i32> {
        let mapped = self.mapped.as_ref()?;
        let to_file = match call.action {
            Action::Read { .. } => false,
            // Guests that have every write made durable send no flush, with which the file's times would be set.
            Action::Write { durable } => (!durable).then_some(true)?,
            // There is nothing to make durable.
            Action::Sync => {
                self.stamp();
                return Some(0);
            }
            _ => return None,
        };
        // SAFETY: passed on to the caller.
        unsafe { mapped.copy(to_file, call.offset, call.buffers) }
    }

    /// Sets the file's times where the kernel has not seen what was written. While a worker changes the file this would
    /// wait for the worker: its change sets the times, and so does the next flush.
    pub(crate) fn stamp(&self) {
        if let Some(mapped) = &self.mapped
            && !self.is_changed_by_workers()
        {
            mapped.stamp(self.fd.as_fd());
        }
    }

    pub(crate) fn is_changed_by_workers(&self) -> bool {
        self.changes_by_workers.load(Ordering::Relaxed) > 0
    }

    /// The file is about to be `length_bytes` long: unless that makes it longer, nothing is copied any more.
    pub(crate) fn length_changes(&self, length_bytes: u64) {
        if length_bytes.checked_sub(1).is_none_or(|before| !self.ends_by(before)) {
            self.in_place.is_cut();
            if let Some(mapped) = &self.mapped {
                mapped.retire();
            }
        }
    }

    /// A range is about to be given back: who copied from there meanwhile would wait for the end of that.
    pub(crate) fn punch_begins(&self, offset: u64, length: u64) {
        if let Some(mapped) = &self.mapped {
            mapped.was_punched(offset, length);
        }
    }

    /// How long the file is, now.
    pub(crate) fn length_now(&self) -> IoResult<u64> {
        super::holes::length_of(&self.fd, self.info.block_device).map_err(IoError::from)
    }

    /// Whether the file ends at or before `offset`.
    pub(crate) fn ends_by(&self, offset: u64) -> bool {
        !self.length_now().is_ok_and(|length_bytes| length_bytes > offset)
    }
}
