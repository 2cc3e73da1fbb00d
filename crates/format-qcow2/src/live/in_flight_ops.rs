//! Changes to metadata that are in flight, whatever became of the tasks that started them.
//!
//! A task may be dropped at any await (its reactor ends); what it pushed still happens, perhaps much later. Whoever
//! takes over first waits for it. Otherwise an old table could land on a newer one, or an old punch in new data.

use block::sync::{AtomicUsize, Ordering};
use block::{FileOp, IoResult, MetaIo, WaitList};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

/// Counts them.
#[derive(Debug, Default)]
pub(crate) struct InFlightOps {
    count: AtomicUsize,
    ended: WaitList,
}

/// One of them; kept by the operation itself.
struct Counted(Arc<InFlightOps>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.wake_all();
    }
}

impl InFlightOps {
    /// Pushes `op` now; it counts until it has ended, awaited or not.
    pub(crate) fn start(self: &Arc<Self>, io: &MetaIo, op: FileOp) -> impl Future<Output = IoResult> + use<> {
        self.count.fetch_add(1, Ordering::AcqRel);
        io.queue().start_keeping(op, Rc::new(Counted(Arc::clone(self))))
    }

    /// Waits until none is in flight.
    pub(crate) async fn over(&self) {
        self.ended.until(|| (self.count.load(Ordering::Acquire) == 0).then_some(())).await;
    }
}
