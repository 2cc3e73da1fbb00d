//! A request, and how the kernel's results change it.

use super::queue_file::QueueFile;
use crate::base::call::{Action, Buffers, Call};
use block::{Done, IoError, IoErrorKind, IoResult, Priority};
use memory::Window;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Whether success of the action means that data are durable.
fn makes_durable(action: Action) -> bool {
    matches!(action, Action::Sync | Action::Write { durable: true })
}

/// Whether a failure with `error` means that data in the page cache may be lost.
fn loses_data(action: Action, error: IoError) -> bool {
    match action {
        Action::Sync => true,
        // Lack of space is the write's own failure: the caller knows which data were not stored. So is unreadable
        // memory, which a guest's monitor can take away at any time.
        Action::Write { durable } => durable && error.kind() == IoErrorKind::Io && error.errno() != libc::EFAULT,
        _ => false,
    }
}

/// An action that an engine carries out.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) target: Rc<QueueFile>,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) window: Window,
    /// Bytes moved so far.
    pub(crate) progress: usize,
    /// The request is counted among the file's untracked changes.
    pub(crate) counted: bool,
    /// The priority of a transfer that the kernel carries out. A worker's calls have the priority of its thread.
    pub(crate) priority: Priority,
    pub(crate) done: Done,
}

/// The meaning of a result for its request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The request is over.
    Finished(IoResult),
    /// Submit the rest.
    Again,
    /// The kernel would have to block: a worker carries out the rest.
    ToWorker,
}

const EINTR: i32 = libc::EINTR;
const EAGAIN: i32 = libc::EAGAIN;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;

impl Request {
    /// Returns the bytes that are left to move.
    pub(crate) fn left_bytes(&self) -> usize {
        self.window.length_bytes() - self.progress
    }

    /// Returns where the rest starts in the file.
    pub(crate) fn file_offset(&self) -> u64 {
        self.offset + self.progress as u64
    }

    /// Returns the call for the rest of the request, with the memory that `buffers` names.
    pub(crate) fn call(&self, buffers: Buffers) -> Call {
        Call { fd: self.target.file.raw_fd(), action: self.action, offset: self.file_offset(), buffers }
    }

    /// Whether the kernel refused a request because it must not wait, with another error than `EAGAIN`. A worker can
    /// wait.
    pub(crate) fn needs_to_wait(&self, result: i32) -> bool {
        match result.wrapping_neg() {
            // A sync may report lost data only once, so it is not repeated.
            _ if !self.action.is_transfer() => return false,
            // The file takes no `RWF_NOWAIT`: from now on workers carry out all requests.
            libc::EOPNOTSUPP => self.target.file.nowait_was_refused(),
            // A caller that can wait may get the memory. (Some kernels return this for a page cache and mean `EAGAIN`.)
            libc::ENOMEM => {}
            _ => return false,
        }
        true
    }

    /// Takes the kernel's result, a count of bytes or a negated error number. Returns what to do next.
    pub(crate) fn advance(&mut self, result: i32) -> Step {
        match result {
            _ if result == -EINTR => return Step::Again,
            _ if result == -EAGAIN => return Step::ToWorker,
            _ if result < 0 => return Step::Finished(Err(IoError::from_errno(result.wrapping_neg()))),
            _ => {}
        }
        let moved = result as usize;
        match self.action {
            Action::Fallocate { mode, length } => {
                if let Some(mapped) = self.target.file.mapped.as_ref().filter(|_| mode & PUNCH_HOLE != 0) {
                    mapped.was_punched(self.offset, length);
                }
                Step::Finished(Ok(()))
            }
            Action::Sync
            | Action::Truncate
            | Action::DiscardBlocks { .. }
            | Action::BeginWriteback
            | Action::CopyFrom { .. } => Step::Finished(Ok(())),
            Action::Read { need_bytes } => self.advance_read(moved, need_bytes),
            Action::Write { .. } => self.advance_write(moved),
        }
    }

    fn advance_read(&mut self, moved: usize, need_bytes: usize) -> Step {
        if moved > self.left_bytes() {
            return Step::Finished(Err(IoError::EIO));
        }
        if let Some(mapped) = &self.target.file.mapped {
            mapped.was_read(self.file_offset(), moved as u64);
        }
        self.progress += moved;
        if self.left_bytes() == 0 {
            return Step::Finished(Ok(()));
        }
        let unit = self.target.file.alignment.offset_bytes as usize;
        let excess = self.progress % unit.max(1);
        if moved > 0 && excess == 0 {
            return Step::Again;
        }
        // Nothing, or no whole units of direct I/O: this is the end of the file, unless the kernel merely stopped
        // within a unit. Such a unit is read again from its start.
        if moved > 0 && !self.target.file.ends_by(self.file_offset()) {
            self.progress -= excess;
            return if moved > excess { Step::Again } else { Step::ToWorker };
        }
        if self.progress < need_bytes {
            return Step::Finished(Err(IoError::EIO));
        }
        self.window.slice(self.progress, self.left_bytes()).fill(0);
        Step::Finished(Ok(()))
    }

    fn advance_write(&mut self, moved: usize) -> Step {
        if moved > self.left_bytes() {
            return Step::Finished(Err(IoError::EIO));
        }
        if let Some(mapped) = &self.target.file.mapped {
            mapped.was_written(self.file_offset(), moved as u64);
        }
        self.progress += moved;
        if self.left_bytes() == 0 {
            return Step::Finished(Ok(()));
        }
        if moved == 0 {
            // Repeating a write that moves nothing and returns no error does not help.
            return Step::Finished(Err(IoError::new(IoErrorKind::NoSpace)));
        }
        let unit = self.target.file.alignment.offset_bytes as usize;
        let excess = self.progress % unit.max(1);
        self.progress -= excess;
        if moved > excess { Step::Again } else { Step::Finished(Err(IoError::EIO)) }
    }

    /// Tells the owner, and drops the memory, the file and the sink.
    pub(crate) fn finish(self, result: IoResult) {
        let Self { target, window, done, counted, action, .. } = self;
        drop(window);
        let lost = makes_durable(action) && target.file.sync_lost.load(Ordering::Relaxed);
        // The kernel reports a page that it could not write only once, perhaps to another sync. After a ring has failed,
        // an old write may still land on this one.
        let result = if lost && result.is_ok() { Err(IoError::EIO) } else { result };
        if let Err(error) = result
            && loses_data(action, error)
            && target.file.page_cached
            && !target.file.sync_lost.swap(true, Ordering::Relaxed)
        {
            let name = &target.file.info.name;
            tracing::error!(
                "'{name}': making data durable failed ({error}); flushes fail until the file is opened anew"
            );
        }
        // Lack of space is for a write, which can be tried again. A sync that meets it has lost data of other writes.
        let has_lost = |error: &IoError| matches!(action, Action::Sync) && error.kind() == IoErrorKind::NoSpace;
        done.complete(result.map_err(|error| if has_lost(&error) { IoError::EIO } else { error }));
        if counted {
            target.untracked.change_ended();
        }
    }
}

#[cfg(test)]
#[path = "progress_tests.rs"]
mod tests;
