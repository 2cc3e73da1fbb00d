//! What each queue keeps of a chain while it may have requests there, and the end of them all.

use block::WaitList;
use block::sync::{AtomicBool, Ordering};
use std::sync::Arc;

/// The end of all requests that began on a chain.
#[derive(Default)]
pub(crate) struct Over {
    done: AtomicBool,
    waiting: WaitList,
    /// The end of an earlier lease of the same chain.
    before: Option<Arc<Over>>,
}

impl Over {
    /// Returns an end that has come already.
    #[cfg(all(test, feature = "explore"))]
    pub(crate) fn past() -> Self {
        Self { done: AtomicBool::new(true), ..Self::default() }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub(crate) async fn wait(&self) {
        let mut next = Some(self);
        while let Some(over) = next {
            over.waiting.until(|| over.is_done().then_some(())).await;
            next = over.before.as_deref();
        }
    }
}

/// Kept by each queue while it may have requests on a chain. If a queue is dropped before its requests have ended, the
/// requests keep it.
pub(crate) struct Lease(Arc<Over>);

impl Lease {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Arc::default()))
    }

    /// Returns another lease of the same chain. Waiting for its end also waits for the former lease's requests.
    pub(super) fn renewed(former: &Arc<Over>) -> Arc<Self> {
        let before = Some(Arc::clone(former));
        Arc::new(Self(Arc::new(Over { before, ..Over::default() })))
    }

    pub(crate) fn over(&self) -> Arc<Over> {
        Arc::clone(&self.0)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::Release);
        self.0.waiting.wake_all();
    }
}
