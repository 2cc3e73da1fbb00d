//! What clients can make the server hold.

use nbd_wire::numbers::PAYLOAD_BYTES_MAX;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Limits of a server and its connections.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Connections at once; others wait to be accepted.
    pub connections: usize,
    /// Requests of one connection whose reply has not been sent.
    pub requests: usize,
    /// The longest payload of a request, in bytes. A client that sends more is disconnected.
    pub payload_bytes: u32,
    /// Memory for the payload of one connection's requests and their answers, in bytes. A request that is alone may take
    /// more.
    pub connection_bytes: usize,
    /// As much for all connections of all servers with the same [`Total`], in bytes. Each connection has one request beyond
    /// it.
    pub total_bytes: usize,
    /// How long a client may take to choose its export.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            requests: 256,
            payload_bytes: PAYLOAD_BYTES_MAX,
            connection_bytes: 64 << 20,
            total_bytes: 256 << 20,
            handshake: Duration::from_secs(10),
        }
    }
}

/// What all connections hold, in bytes. Servers can share one.
#[derive(Debug, Default)]
pub struct Total(AtomicUsize);

impl Total {
    /// Returns how much that is now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one connection holds.
#[derive(Debug)]
pub(crate) struct Account {
    own: Cell<usize>,
    total: Arc<Total>,
    own_max: usize,
    total_max: usize,
}

impl Account {
    pub(crate) fn new(limits: &Limits, total: Arc<Total>) -> Rc<Self> {
        Rc::new(Self { own: Cell::new(0), total, own_max: limits.connection_bytes, total_max: limits.total_bytes })
    }

    /// Room for `bytes`, if there is any. Who holds nothing always gets it, so nobody waits for ever: who gets none holds
    /// something, and is to ask again when that has gone.
    pub(crate) fn take(self: &Rc<Self>, bytes: usize) -> Option<Grant> {
        let own = self.own.get().saturating_add(bytes);
        let total = self.total.0.load(Ordering::Relaxed).saturating_add(bytes);
        if self.own.get() > 0 && (own > self.own_max || total > self.total_max) {
            return None;
        }
        self.own.set(own);
        self.total.0.fetch_add(bytes, Ordering::Relaxed);
        Some(Grant { account: Rc::clone(self), bytes })
    }
}

/// Room that is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    account: Rc<Account>,
    bytes: usize,
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.account.own.set(self.account.own.get().saturating_sub(self.bytes));
        self.account.total.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_nothing_gets_room_and_who_holds_much_waits() {
        let limits = Limits { connection_bytes: 100, total_bytes: 150, ..Limits::default() };
        let total = Arc::new(Total::default());
        let (one, other) = (Account::new(&limits, Arc::clone(&total)), Account::new(&limits, total));
        let first = one.take(100);
        assert!(first.is_some() && one.take(1).is_none(), "its own part is full");
        let second = other.take(60);
        assert!(second.is_some(), "alone, it may go beyond");
        assert!(other.take(1).is_none(), "the whole is full");
        drop(first);
        assert!(other.take(40).is_some());
    }
}
