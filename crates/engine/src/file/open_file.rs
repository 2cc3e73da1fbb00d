//! An open file, shared by all reactors.

use super::alignment::Alignment;
use super::extent_preload::ExtentPreload;
use super::in_place::InPlace;
use super::mapped::MappedFile;
use super::rmw_lock::RmwLock;
use super::write_behind::WriteBehind;
use crate::base::call::{Action, Call};
use crate::base::options::EngineKind;
use block::{FileInfo, IoError, IoResult, Topology};
use memory::BufferAccount;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// The properties by which `route` decides who carries out a file's requests. They never change while the file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traits {
    /// Never [`EngineKind::Auto`].
    pub(crate) engine: EngineKind,
    pub(crate) storage: Storage,
}

/// The storage behind a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Memory, on a host without swap: nothing waits, so reactors carry out short requests themselves.
    Memory,
    /// The page cache of a regular file.
    PageCache {
        /// A read of missing data is begun without waiting, and ends later.
        reads_later: bool,
        /// The page cache takes writes that must not wait.
        takes_nowait_writes: bool,
        /// A write by `io_submit` has ended when the call returns.
        writes_end_in_call: bool,
    },
    /// The page cache of a block device.
    CachedDevice,
    /// Direct I/O, past the page cache.
    Direct,
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    /// Identifies the file among all that this process has opened.
    pub(crate) id: u64,
    /// The host's device and inode numbers, read at the opening: later the storage may hang.
    pub(crate) identity: (u64, u64),
    pub(crate) info: FileInfo,
    /// The topology that the device behind the file reports; zeros for a regular file.
    pub(crate) topology: Topology,
    /// The file holds image locks.
    pub(crate) locked: bool,
    pub(crate) traits: Traits,
    /// The user left the choice open: another engine may take the chosen one's place.
    pub(crate) chosen_freely: bool,
    /// The file is not known to refuse all requests that must not wait (`RWF_NOWAIT`).
    pub(crate) takes_nowait: AtomicBool,
    /// The number of changes of a file in memory that workers are carrying out, on all reactors. Another change would
    /// wait for them in the kernel, and so would setting the file's times.
    pub(crate) changes_by_workers: AtomicUsize,
    /// Finding the end of data takes the kernel a walk over pages.
    pub(crate) walks_to_holes: bool,
    /// The mapping that copies a file in memory without system calls, where it can.
    pub(crate) mapped: Option<MappedFile>,
    /// The mapping for callers that make no requests.
    pub(crate) in_place: InPlace,
    pub(crate) alignment: Alignment,
    /// Every write is durable when it completes.
    pub(crate) write_through: bool,
    /// Flushes do nothing.
    pub(crate) ignore_flush: bool,
    /// Writes go through the page cache.
    pub(crate) page_cached: bool,
    /// A sync of the page cache has failed: the kernel may have dropped data that it could not write, and report
    /// success for the next sync. Or a ring was given up: its writes may still land on newer data. So every later sync
    /// and durable write fails until the file is opened anew.
    pub(crate) sync_lost: AtomicBool,
    /// Set if the kernel is to write data soon after it took them.
    pub(crate) write_behind: Option<WriteBehind>,
    pub(crate) rmw_lock: Arc<RmwLock>,
    pub(crate) extents: ExtentPreload,
    /// The account in which buffers find room.
    pub(crate) buffers: BufferAccount,
    /// Offsets and lengths of `fallocate` must be multiples of this (block devices).
    pub(crate) fallocate_unit_bytes: u32,
    /// The best way to zero a range that the file is not known to lack (`queue::zeroes`).
    pub(crate) zeroes_rung: AtomicU8,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.stamp();
        if self.locked {
            // The locks belong to the file description. The kernel may hold that a little longer than the descriptor,
            // for a request that io_uring has reported but not freed.
            super::image_lock::unlock(self.fd.as_fd());
        }
    }
}

impl OpenFile {
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Notes that the kernel refuses all requests that must not wait. From now on workers carry out all requests.
    #[cold]
    pub(crate) fn nowait_was_refused(&self) {
        if self.takes_nowait.swap(false, Ordering::Relaxed) {
            let name = &self.info.name;
            tracing::warn!("'{name}' takes nothing that must not wait: from now on threads carry out its requests");
        }
    }

    /// Carries out a request that needs no system call, and returns its result. `None` if a call is needed.
    ///
    /// # Safety
    /// The memory that `call` names must be valid for the action's direction until this returns.
    pub(crate) unsafe fn without_call(&self, call: &Call) -> Option<i32> {
        let mapped = self.mapped.as_ref()?;
        let to_file = match call.action {
            Action::Read { .. } => false,
            // Guests whose writes are all durable send no flush, which would set the file's times.
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

    /// Sets the file's times if the kernel has not seen the last writes. While a worker changes the file this would
    /// wait, so it is skipped: the worker's change sets the times, or the next flush does.
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

    /// Notes that the file is about to be `length_bytes` long. If that may cut it, nothing is copied any more.
    pub(crate) fn length_changes(&self, length_bytes: u64) {
        if length_bytes.checked_sub(1).is_none_or(|before| !self.ends_by(before)) {
            self.in_place.is_cut();
            if let Some(mapped) = &self.mapped {
                mapped.retire();
            }
        }
    }

    /// Notes that a range is about to be given back. A copy from it meanwhile would wait until that has ended.
    pub(crate) fn punch_begins(&self, offset: u64, length: u64) {
        if let Some(mapped) = &self.mapped {
            mapped.was_punched(offset, length);
        }
    }

    /// Returns the file's length at this moment.
    pub(crate) fn length_now(&self) -> IoResult<u64> {
        super::holes::length_of(&self.fd, self.info.block_device).map_err(IoError::from)
    }

    /// Whether the file ends at or before `offset`.
    pub(crate) fn ends_by(&self, offset: u64) -> bool {
        !self.length_now().is_ok_and(|length_bytes| length_bytes > offset)
    }
}
