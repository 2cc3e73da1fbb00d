//! What requests are aimed at: an open file, shared by all reactors, and one reactor's part in it.

use crate::EngineKind;
use crate::file::mapped::MappedFile;
use crate::group_sync::GroupSync;
use crate::inflight::{Action, Buffers};
use crate::nowait::Nowait;
use crate::tables::Tables;
use crate::tracking::{Ack, Tracking};
use crate::uring::FixedFile;
use block::FileInfo;
use memory::Window;
use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

/// What direct I/O asks for; ones where the page cache serves the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    pub(crate) offset_bytes: u32,
    pub(crate) memory_bytes: u32,
}

impl Alignment {
    pub(crate) const NONE: Self = Self { offset_bytes: 1, memory_bytes: 1 };

    /// Whether nothing is asked for.
    pub(crate) fn is_none(self) -> bool {
        self.offset_bytes <= 1 && self.memory_bytes <= 1
    }
}

/// An open file.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub(crate) fd: OwnedFd,
    /// Names the file among all that this process has opened.
    pub(crate) id: u64,
    pub(crate) info: FileInfo,
    /// Holds image locks.
    pub(crate) locked: bool,
    /// Never [`EngineKind::Auto`].
    pub(crate) engine: EngineKind,
    /// Another engine may take its place.
    pub(crate) chosen_freely: bool,
    /// With io_uring: on the ring with a submission thread.
    pub(crate) sqpoll: bool,
    /// It lies in memory, on a host without swap: reactors carry out short requests themselves, since nothing waits.
    pub(crate) in_memory: bool,
    /// What workers of any reactor have to do, or do, that changes a file in memory. Whoever else changes it meanwhile, or
    /// sets its times, waits in the kernel.
    pub(crate) changes_by_workers: AtomicUsize,
    /// The kernel finds the end of data page by page.
    pub(crate) walks_to_holes: bool,
    /// Copies what it can of a file in memory without calls.
    pub(crate) mapped: Option<MappedFile>,
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
    pub(crate) tracking: Tracking,
    pub(crate) tables: Tables,
    /// Offsets and lengths of `fallocate` must be multiples of this (block devices).
    pub(crate) fallocate_unit_bytes: u32,
    pub(crate) nowait: Nowait,
    /// See `storage::ends_in_call`.
    pub(crate) ends_in_call: bool,
    /// The rung of `zeroes::Ladder` that is known to work.
    pub(crate) zeroes_rung: AtomicU8,
}

/// How much was written since the kernel was last asked to begin with it.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    bytes: AtomicU64,
    asking: AtomicBool,
}

impl WriteBehind {
    /// So much at a time.
    const STEP_BYTES: u64 = 16 << 20;

    /// Counts a write. Whether to ask the kernel now; then [`WriteBehind::asked`] is called afterwards.
    pub(crate) fn note(&self, length_bytes: usize) -> bool {
        let length = length_bytes as u64;
        let waiting = self.bytes.fetch_add(length, Ordering::Relaxed).saturating_add(length);
        let is_due = waiting >= Self::STEP_BYTES && !self.asking.swap(true, Ordering::Relaxed);
        if is_due {
            self.bytes.store(0, Ordering::Relaxed);
        }
        is_due
    }

    pub(crate) fn asked(&self) {
        self.asking.store(false, Ordering::Relaxed);
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.stamp();
        if self.locked {
            // The kernel may hold the description a little longer than the descriptor (for a request that io_uring has
            // told the end of but not yet freed), and the locks go with the description.
            crate::lock::unlock(self.fd.as_fd());
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
        if self.nowait.was_refused() {
            let name = &self.info.name;
            tracing::warn!("'{name}' takes nothing that must not wait: from now on threads carry out its requests");
        }
    }

    /// Carries out what needs no call and returns its result; `None` where a call is needed.
    ///
    /// # Safety
    /// The memory that `buffers` names must be valid for the action's direction until this returns.
    pub(crate) unsafe fn without_call(&self, action: Action, offset: u64, buffers: Buffers) -> Option<i32> {
        let mapped = self.mapped.as_ref()?;
        let to_file = match action {
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
        unsafe { mapped.copy(to_file, offset, buffers) }
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
        if let Some(mapped) = &self.mapped
            && length_bytes.checked_sub(1).is_none_or(|before| !self.ends_by(before))
        {
            mapped.retire();
        }
    }

    /// A range is about to be given back: who copied from there meanwhile would wait for the end of that.
    pub(crate) fn punch_begins(&self, offset: u64, length: u64) {
        if let Some(mapped) = &self.mapped {
            mapped.was_punched(offset, length);
        }
    }

    /// Whether the file ends at or before `offset`.
    pub(crate) fn ends_by(&self, offset: u64) -> bool {
        match crate::sys::length_of(&self.fd, self.info.block_device) {
            Ok(length_bytes) => length_bytes <= offset,
            Err(_) => true,
        }
    }
}

/// One reactor's part in an open file.
#[derive(Debug)]
pub(crate) struct QueueFile {
    pub(crate) file: Arc<OpenFile>,
    /// Its place in the ring's table of files, where it has one.
    pub(crate) fixed: Option<FixedFile>,
    /// For requests without data: making a window would allocate.
    pub(crate) no_data: Window,
    pub(crate) group_sync: GroupSync,
    /// As far as this thread knows.
    tables_ready: Cell<bool>,
    /// Untracked changes in flight; see [`Tracking`].
    changes: Cell<usize>,
    /// Given when there are none.
    acks: RefCell<Vec<Ack>>,
}

impl QueueFile {
    pub(crate) fn new(file: Arc<OpenFile>, fixed: Option<FixedFile>) -> Self {
        Self {
            file,
            fixed,
            no_data: Window::empty(),
            group_sync: GroupSync::default(),
            tables_ready: Cell::default(),
            changes: Cell::default(),
            acks: RefCell::default(),
        }
    }

    /// Whether the file system can tell where the file lies without reading its own tables.
    #[inline]
    pub(crate) fn are_tables_ready(&self) -> bool {
        if !self.tables_ready.get() {
            self.tables_ready.set(self.file.tables.are_ready());
        }
        self.tables_ready.get()
    }

    /// Whether a ring would make the reactor wait for this, or hand it to a worker of the kernel's.
    #[inline]
    pub(crate) fn goes_to_worker(&self, action: Action, length_bytes: usize) -> bool {
        !self.are_tables_ready() || !self.file.nowait.suits_ring(action, length_bytes)
    }

    pub(crate) fn change_begins(&self) {
        self.changes.set(self.changes.get() + 1);
    }

    pub(crate) fn change_ended(&self) {
        let left = self.changes.get().saturating_sub(1);
        self.changes.set(left);
        if left == 0 {
            // Outside the borrow: the last ack wakes tasks.
            let acks = self.acks.take();
            drop(acks);
        }
    }

    /// Gives `ack` as soon as no untracked change is in flight. The file is tracked: no new one begins.
    pub(crate) fn acknowledge(&self, ack: Ack) {
        if self.changes.get() > 0 {
            self.acks.borrow_mut().push(ack);
        }
    }
}
