//! Operations in flight, even after the tasks that started them are gone.

use crate::sync::{AtomicUsize, Ordering};
use crate::{FileOp, FileQueue, IoResult, WaitList};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Counts a format's writes of metadata and of space in flight.
///
/// A task may be dropped at any await, when its reactor ends. The writes that it pushed still happen, perhaps much
/// later. The next task waits for them first. Otherwise an old table could overwrite a newer one, or an old punch new
/// data.
#[derive(Debug, Default)]
pub struct InFlightOps {
    count: AtomicUsize,
    ended: WaitList,
}

/// Counts one operation. The operation itself keeps it.
struct Counted(Arc<InFlightOps>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.wake_all();
    }
}

impl InFlightOps {
    /// Pushes `op` now, and counts it until it has ended, whether awaited or not.
    pub fn start(self: &Arc<Self>, queue: &Rc<dyn FileQueue>, op: FileOp) -> impl Future<Output = IoResult> + use<> {
        self.count.fetch_add(1, Ordering::AcqRel);
        queue.start_keeping(op, Rc::new(Counted(Arc::clone(self))))
    }

    /// Waits until no operation is in flight.
    pub async fn over(&self) {
        self.ended.until(|| (self.count.load(Ordering::Acquire) == 0).then_some(())).await;
    }
}
