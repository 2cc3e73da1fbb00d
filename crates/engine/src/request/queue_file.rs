//! The state that one reactor keeps for an open file.

use super::group_commit::GroupCommit;
use crate::file::open_file::{OpenFile, Traits};
use crate::file::rmw_lock::Untracked;
use memory::Window;
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

/// A ring's table of registered files.
pub(crate) trait FileTable {
    /// Takes back a place that is no longer used.
    fn give_back(&self, index: u32);
}

/// A place in a ring's table of registered files; given back on drop.
pub(crate) struct FixedFile {
    table: Rc<dyn FileTable>,
    pub(crate) index: u32,
}

impl FixedFile {
    pub(crate) fn new(table: Rc<dyn FileTable>, index: u32) -> Self {
        Self { table, index }
    }
}

impl Drop for FixedFile {
    fn drop(&mut self) {
        self.table.give_back(self.index);
    }
}

impl fmt::Debug for FixedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FixedFile({})", self.index)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct QueueFile {
    pub(crate) file: Arc<OpenFile>,
    /// As [`OpenFile::traits`].
    pub(crate) traits: Traits,
    /// The file's place in the ring's table of files, if it has one.
    pub(crate) fixed: Option<FixedFile>,
    /// An empty window for requests without data: making one would allocate.
    pub(crate) no_data: Window,
    pub(crate) group_commit: Rc<GroupCommit>,
    /// Counts the changes on this thread that hold no range.
    pub(crate) untracked: Rc<Untracked>,
    /// The last answer of [`QueueFile::are_extents_ready`].
    extents_ready: Cell<bool>,
}

impl QueueFile {
    /// Makes the part that all queues of the file on this thread's reactor share.
    pub(crate) fn on_reactor(file: Arc<OpenFile>, fixed: Option<FixedFile>) -> Self {
        let untracked = Untracked::here(file.id);
        Self { fixed, untracked, ..Self::blocking(file) }
    }

    /// Makes the part of a queue that carries its requests out in the push itself.
    pub(crate) fn blocking(file: Arc<OpenFile>) -> Self {
        Self {
            traits: file.traits,
            file,
            fixed: None,
            no_data: Window::empty(),
            group_commit: Rc::default(),
            untracked: Rc::default(),
            extents_ready: Cell::default(),
        }
    }

    /// Whether the file system can find the file's blocks without reading its own tables.
    #[inline]
    pub(crate) fn are_extents_ready(&self) -> bool {
        if !self.extents_ready.get() {
            self.extents_ready.set(self.file.extents.is_ready());
        }
        self.extents_ready.get()
    }
}
