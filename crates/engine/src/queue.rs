//! The queue of one file on one thread: turns operations into requests, the slow ones by way of tasks.

use crate::blocking;
use crate::engines::Engine;
use crate::inflight::{Action, Request};
use crate::target::{OpenFile, QueueFile};
use block::{Done, Executor, FileIo, FileOp, FileQueue, IoError, IoErrorKind, IoResult, PastEnd, Waiter};
use memory::Window;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Where requests on one file go: an engine, or the calling thread.
#[derive(Clone)]
pub(crate) struct Lane {
    engine: Option<Engine>,
    pub(crate) target: Rc<QueueFile>,
}

impl Lane {
    /// Pushes one primitive request.
    pub(crate) fn push(&self, action: Action, offset: u64, window: Window, done: Done) {
        let request =
            Request { target: Rc::clone(&self.target), action, offset, window, progress: 0, counted: false, done };
        match &self.engine {
            Some(engine) => engine.push(request),
            None => blocking::run(request),
        }
    }

    /// Pushes one and returns the future of its end.
    pub(crate) fn start(&self, action: Action, offset: u64, window: Window) -> impl Future<Output = IoResult> + use<> {
        let waiter = Waiter::new();
        self.push(action, offset, window, Done::Waiter(Rc::clone(&waiter)));
        waiter.wait()
    }
}

/// See the module.
pub(crate) struct HostQueue {
    lane: Lane,
    /// Where the engine's own tasks run; on a blocking queue, in the push itself.
    tasks: Option<Rc<Executor>>,
}

impl HostQueue {
    pub(crate) fn on_reactor(engine: Engine, target: Rc<QueueFile>, tasks: Rc<Executor>) -> Self {
        Self { lane: Lane { engine: Some(engine), target }, tasks: Some(tasks) }
    }

    pub(crate) fn blocking(file: Arc<OpenFile>) -> Self {
        Self { lane: Lane { engine: None, target: Rc::new(QueueFile::new(file, None)) }, tasks: None }
    }

    fn run_task(&self, done: Done, task: impl Future<Output = IoResult> + 'static) {
        match &self.tasks {
            Some(tasks) => tasks.spawn(Box::pin(async move { done.complete(task.await) })),
            None => done.complete(block::block_on(task)),
        }
    }
}

/// Refuses what no file can hold.
fn check_range(offset: u64, length: u64) -> IoResult {
    match offset.checked_add(length) {
        Some(end) if i64::try_from(end).is_ok() => Ok(()),
        _ => Err(IoError::new(IoErrorKind::OutOfRange)),
    }
}

impl FileQueue for HostQueue {
    fn push(&self, io: FileIo) {
        let FileIo { op, done } = io;
        let file = &*self.lane.target.file;
        if file.info.read_only
            && let Some(error) = op.refused_when_read_only()
        {
            return done.complete(Err(error));
        }
        let (offset, length) = match &op {
            FileOp::Read { offset, data, .. } | FileOp::Write { offset, data, .. } => {
                (*offset, data.length_bytes() as u64)
            }
            FileOp::Discard { offset, length } | FileOp::WriteZeroes { offset, length, .. } => (*offset, *length),
            FileOp::SetLength { length } => (0, *length),
            FileOp::Flush => (0, 0),
        };
        if let Err(error) = check_range(offset, length) {
            return done.complete(Err(error));
        }
        if length == 0 && !matches!(op, FileOp::Flush | FileOp::SetLength { .. }) {
            return done.complete(Ok(()));
        }
        match op {
            FileOp::Read { offset, data, past_end } => {
                let need_bytes = if past_end == PastEnd::Fails { data.length_bytes() } else { 0 };
                self.lane.push(Action::Read { need_bytes }, offset, data, done);
            }
            FileOp::Write { offset, data, fua } => {
                let durable = (fua || file.write_through) && !file.ignore_flush;
                self.lane.push(Action::Write { durable }, offset, data, done);
            }
            FileOp::Flush if file.ignore_flush => done.complete(Ok(())),
            FileOp::Flush => self.lane.push(Action::Sync, 0, Window::empty(), done),
            FileOp::Discard { offset, length } => {
                let lane = self.lane.clone();
                self.run_task(done, crate::zeroes::discard(lane, offset, length));
            }
            FileOp::WriteZeroes { offset, length, may_unmap } => {
                let lane = self.lane.clone();
                self.run_task(done, crate::zeroes::write_zeroes(lane, offset, length, may_unmap));
            }
            FileOp::SetLength { length } => {
                let lane = self.lane.clone();
                self.run_task(done, crate::zeroes::set_length(lane, length));
            }
        }
    }
}
