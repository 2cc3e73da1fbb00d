//! Calls that go on with a reactor, or without one.

use crate::{ReactorCtx, Task, Work, block_on};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Carries work out as a task of the reactor, or at once where there is none: what [`crate::FileQueue::push`] does in files
/// whose requests are tasks.
pub fn spawn_or_block_on(ctx: Option<&Rc<dyn ReactorCtx>>, work: impl Future<Output = ()> + 'static) {
    match ctx {
        Some(ctx) => ctx.spawn(Task::new(work)),
        None => block_on(work),
    }
}

/// For the queue of a file: runs `work` beside the reactor, where files take turns, or here where there is no reactor.
/// `file` is what all queues of the file share.
pub fn run_aside_or_here<T>(ctx: Option<&Rc<dyn ReactorCtx>>, file: &Arc<T>, work: Work) {
    match ctx {
        // Its address is unlike any descriptor's number, which stands for a file of the host.
        Some(ctx) => ctx.run_aside(Arc::as_ptr(file).addr() as u64, work),
        None => work(),
    }
}
