//! The handle of a real reactor, over a simulated reactor. For code that hands jobs to reactors.

use super::reactor::SimReactor;
use block::{Error, ErrorKind, Job, ReactorHandle, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    static REACTORS: RefCell<BTreeMap<u64, Rc<SimReactor>>> = const { RefCell::new(BTreeMap::new()) };
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// Runs jobs on a simulated reactor at once, on the thread that made the handle. The reactor's time passes only when
/// the test steps it. So the code under test must call back when it waits, for example to report progress.
pub struct SimHandle(u64);

impl SimHandle {
    /// Makes a handle to `reactor`, for this thread.
    #[must_use]
    pub fn new(reactor: &Rc<SimReactor>) -> Arc<Self> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        REACTORS.with_borrow_mut(|reactors| reactors.insert(id, Rc::clone(reactor)));
        Arc::new(Self(id))
    }
}

impl Drop for SimHandle {
    fn drop(&mut self) {
        let gone = REACTORS.with_borrow_mut(|reactors| reactors.remove(&self.0));
        drop(gone);
    }
}

impl ReactorHandle for SimHandle {
    fn run(&self, job: Job) -> Result<()> {
        let reactor = REACTORS.with_borrow(|reactors| reactors.get(&self.0).cloned());
        let strange = || Error::new(ErrorKind::Io, "a simulated reactor is reached from its own thread only");
        job(&reactor.ok_or_else(strange)?.ctx());
        Ok(())
    }

    fn name(&self) -> &str {
        "simulated"
    }
}
