//! What a connection shares with its server, and with whoever takes its export away.

use crate::mailbox::Mailbox;
use block::ReactorHandle;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a connection shares with its server.
pub(crate) struct Link {
    /// It is to end: requests in flight end, no others begin.
    pub(crate) closing: AtomicBool,
    /// Its requests in flight are not waited for.
    pub(crate) given_up: AtomicBool,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) reactor: Arc<dyn ReactorHandle>,
}

impl Link {
    pub(crate) fn new(reactor: Arc<dyn ReactorHandle>) -> Self {
        let (closing, given_up) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { closing, given_up, mailbox: Arc::default(), reactor }
    }

    /// Has the connection end.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        // A reactor that has ended has dropped its connections. An empty job wakes the others.
        let _ = self.reactor.run(Box::new(|_| {}));
    }
}
