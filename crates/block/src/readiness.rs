//! Whether a watched descriptor is ready.

use std::cell::{Cell, RefCell};
use std::task::Waker;

/// What a task or poller waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Until there is something to read, or nothing more will come.
    Read,
    /// Until there is room to write, or the other end reads no more.
    Write,
}

/// Whether a watched descriptor is ready. The reactor raises it; a user whose call would block lowers it.
#[derive(Debug)]
pub struct Readiness {
    /// For reading, for writing. True until a call would block.
    pub(crate) ready: [Cell<bool>; 2],
    /// The other side sends nothing any more, or has gone.
    pub(crate) has_ended: Cell<bool>,
    pub(crate) wakers: [RefCell<Option<Waker>>; 2],
}

impl Default for Readiness {
    fn default() -> Self {
        Self { ready: [Cell::new(true), Cell::new(true)], has_ended: Cell::new(false), wakers: Default::default() }
    }
}

impl Readiness {
    /// Notes that the descriptor became ready for `interest`. For the reactor.
    pub fn raise(&self, interest: Interest) {
        self.ready[interest as usize].set(true);
        let waker = self.wakers[interest as usize].borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The reactor's part: nothing more will come from the other side. Said before it is raised for that.
    pub fn ends(&self) {
        self.has_ended.set(true);
    }
}

/// Names a watched descriptor on its reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WatchId(pub u64);
