//! A file's queue: refuses impossible ranges, and turns operations into requests. Slow operations become tasks.

use super::engines::Engine;
use super::lane::Lane;
use super::{blocking, bounce, durable, zeroes};
use crate::base::call::Action;
use crate::file::open_file::{OpenFile, Storage};
use crate::request::group_commit::DurableWrite;
use crate::request::queue_file::QueueFile;
use block::{
    CopyRange, Done, Executor, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, PastEnd, Priority, Task,
    Waiter, Work,
};
use memory::{Window, to_usize};
use std::future::Future;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// See the module.
pub(crate) struct HostQueue {
    lane: Lane,
    /// Runs the engine's own tasks. `None` on a blocking queue, which runs them in the push itself.
    tasks: Option<Rc<Executor>>,
}

impl HostQueue {
    pub(crate) fn on_reactor(engine: Engine, target: Rc<QueueFile>, tasks: Rc<Executor>) -> Self {
        Self { lane: Lane { engine: Some(engine), target, priority: Priority::NONE }, tasks: Some(tasks) }
    }

    pub(crate) fn blocking(file: Arc<OpenFile>) -> Self {
        let target = Rc::new(QueueFile::blocking(file));
        Self { lane: Lane { engine: None, target, priority: Priority::NONE }, tasks: None }
    }

    fn run_task(&self, done: Done, task: impl Future<Output = IoResult> + 'static) {
        match &self.tasks {
            Some(tasks) => tasks.spawn(Task::new(async move { done.complete(task.await) })),
            None => done.complete(blocking::wait_for(task)),
        }
    }
}

/// Refuses a range that no file can have.
fn check_range(offset: u64, length: u64) -> IoResult {
    match offset.checked_add(length) {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => Err(IoError::new(IoErrorKind::OutOfRange)),
    }
}

/// Returns the result of an operation that needs no engine.
fn decided(op: &FileOp, file: &OpenFile) -> Option<IoResult> {
    if file.info.read_only
        && let Some(error) = op.refused_when_read_only()
    {
        return Some(Err(error));
    }
    let (offset, length) = match op {
        FileOp::Read { offset, data, .. } | FileOp::Write { offset, data, .. } => (*offset, data.length_bytes() as u64),
        FileOp::Discard { offset, length } | FileOp::WriteZeroes { offset, length, .. } => (*offset, *length),
        FileOp::SetLength { length } => return check_range(0, *length).err().map(Err),
        FileOp::Flush if file.sync_lost.load(Ordering::Relaxed) => return Some(Err(IoError::EIO)),
        FileOp::Flush if file.ignore_flush => {
            file.stamp();
            return Some(Ok(()));
        }
        FileOp::Flush => return None,
    };
    match check_range(offset, length) {
        Ok(()) => (length == 0).then_some(Ok(())),
        failed => Some(failed),
    }
}

impl HostQueue {
    fn read(&self, offset: u64, data: Window, past_end: PastEnd, priority: Priority, done: Done) {
        let need_bytes = if past_end == PastEnd::Fails { data.length_bytes() } else { 0 };
        let alignment = self.lane.target.file.alignment;
        if alignment.is_none() || alignment.fits(offset, &data) {
            self.lane.push_request(Action::Read { need_bytes }, offset, data, priority, done, false);
        } else {
            self.run_task(done, bounce::read(self.lane.at(priority), offset, data, need_bytes));
        }
    }

    fn write(&self, offset: u64, data: Window, fua: bool, priority: Priority, done: Done) {
        let file = &*self.lane.target.file;
        let durable = (fua || file.write_through) && !file.ignore_flush;
        // A file in memory has nothing to make durable.
        let shares_syncs = file.page_cached && file.traits.storage != Storage::Memory;
        if durable && shares_syncs && self.tasks.is_some() {
            let counted = DurableWrite::new(&self.lane.target.group_commit);
            return self.run_task(done, durable::write(self.lane.at(priority), counted, offset, data));
        }
        if file.alignment.is_none() {
            let length_bytes = data.length_bytes();
            self.lane.push_request(Action::Write { durable }, offset, data, priority, done, false);
            return self.write_behind(length_bytes);
        }
        let untracked = self.tasks.is_some() && !file.rmw_lock.is_tracked();
        if untracked && file.alignment.fits(offset, &data) {
            // The write locks no range; see `rmw_lock`.
            self.lane.target.untracked.change_begins();
            self.lane.push_request(Action::Write { durable }, offset, data, priority, done, true);
        } else {
            self.run_task(done, bounce::write(self.lane.at(priority), offset, data, durable));
        }
    }
}

impl HostQueue {
    /// Counts written bytes, and asks the kernel to begin writing them when there are enough.
    fn write_behind(&self, length_bytes: usize) {
        let Some(behind) = &self.lane.target.file.write_behind else { return };
        let Some(tasks) = self.tasks.as_ref().filter(|_| behind.note(length_bytes)) else { return };
        let lane = self.lane.clone();
        tasks.spawn(Task::new(async move {
            // If this fails, the next flush of the file reports the error.
            let _ = lane.start(Action::BeginWriteback, 0, lane.target.no_data.clone()).await;
            if let Some(behind) = &lane.target.file.write_behind {
                behind.asked();
            }
        }));
    }
}

impl FileQueue for HostQueue {
    fn push(&self, io: FileIo) {
        let FileIo { op, priority, done } = io;
        if let Some(result) = decided(&op, &self.lane.target.file) {
            return done.complete(result);
        }
        match op {
            FileOp::Read { offset, data, past_end } => self.read(offset, data, past_end, priority, done),
            FileOp::Write { offset, data, fua } => self.write(offset, data, fua, priority, done),
            FileOp::Flush => self.lane.push(Action::Sync, 0, self.lane.target.no_data.clone(), done),
            FileOp::Discard { offset, length } => {
                self.run_task(done, zeroes::discard(self.lane.clone(), offset, length));
            }
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                self.run_task(done, zeroes::write_zeroes(self.lane.clone(), offset, length, may_unmap));
            }
            FileOp::SetLength { length } => self.run_task(done, zeroes::set_length(self.lane.clone(), length)),
        }
    }

    fn run_aside(&self, work: Work) {
        match &self.lane.engine {
            Some(engine) => engine.workers().run_aside(u64::from(self.lane.target.file.raw_fd().unsigned_abs()), work),
            None => work(),
        }
    }

    fn copy_from(&self, copy: CopyRange, done: Done) {
        let file = &*self.lane.target.file;
        // The kernel copies through the page cache, and does not make the copy durable.
        let can = file.page_cached && !file.write_through && !file.info.read_only && !file.info.block_device;
        let fits = check_range(copy.offset, copy.length_bytes).and(check_range(copy.source_offset, copy.length_bytes));
        if let Err(error) = fits {
            return done.complete(Err(error));
        }
        match can {
            true => {
                let length_bytes = to_usize(copy.length_bytes);
                self.run_task(done, copy_from(self.lane.clone(), copy));
                self.write_behind(length_bytes);
            }
            false => done.complete(Err(IoError::new(IoErrorKind::Unsupported))),
        }
    }
}

async fn copy_from(lane: Lane, copy: CopyRange) -> IoResult {
    let CopyRange { source, source_offset, offset, length_bytes } = copy;
    let Some(from) = source.copy_source().map(|fd| fd.as_raw_fd()) else {
        return Err(IoError::new(IoErrorKind::Unsupported));
    };
    // The request, not this task, keeps the source open: the task may be dropped before the kernel is done.
    let waiter = Waiter::keeping(Rc::new(source));
    let action = Action::CopyFrom { from, from_offset: source_offset, length: length_bytes };
    lane.push(action, offset, lane.target.no_data.clone(), Done::Waiter(waiter.clone()));
    Waiter::wait(&waiter).await
}
