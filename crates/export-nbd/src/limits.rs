//! What clients can make the server hold.

use nbd_wire::numbers::PAYLOAD_BYTES_MAX;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The longest data of an option that is looked at.
pub(crate) const OPTION_BYTES_MAX: u32 = 16 << 10;

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
    /// Memory for the payload of all requests, in bytes, unless servers share it ([`PayloadMemory`]).
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

/// Memory for the payload of requests, which several servers may share. Clones are the same memory.
///
/// Who has a request in hand gets more as long as its export then holds no more than what is left. So an export whose
/// clients take no replies leaves room to the others. A connection that holds nothing gets one request whatever is left.
#[derive(Debug, Clone)]
pub struct PayloadMemory(Arc<Total>);

#[derive(Debug)]
struct Total {
    used: AtomicUsize,
    max: usize,
}

impl PayloadMemory {
    /// Memory of this many bytes.
    #[must_use]
    pub fn new(total_bytes: usize) -> Self {
        Self(Arc::new(Total { used: AtomicUsize::new(0), max: total_bytes }))
    }

    /// How much is in use, in bytes.
    #[must_use]
    pub fn used_bytes(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

/// What the connections of one export hold, in bytes.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExportShare(Arc<AtomicUsize>);

/// What one connection holds.
#[derive(Debug)]
pub(crate) struct Account {
    own: Cell<usize>,
    own_max: usize,
    export: ExportShare,
    memory: PayloadMemory,
}

impl Account {
    pub(crate) fn new(limits: &Limits, memory: PayloadMemory, export: ExportShare) -> Rc<Self> {
        Rc::new(Self { own: Cell::new(0), own_max: limits.connection_bytes, export, memory })
    }

    /// Room for `bytes`, if there is any. Who holds nothing always gets it, so nobody waits for ever: who gets none holds
    /// something, and is to ask again when that has gone.
    pub(crate) fn take(self: &Rc<Self>, bytes: usize) -> Option<Grant> {
        let own = self.own.get().saturating_add(bytes);
        let export = self.export.0.load(Ordering::Relaxed).saturating_add(bytes);
        let left = self.memory.0.max.saturating_sub(self.memory.used_bytes().saturating_add(bytes));
        if self.own.get() > 0 && (own > self.own_max || export > left) {
            return None;
        }
        self.own.set(own);
        self.export.0.fetch_add(bytes, Ordering::Relaxed);
        self.memory.0.used.fetch_add(bytes, Ordering::Relaxed);
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
        let Account { own, export, memory, .. } = &*self.account;
        own.set(own.get().saturating_sub(self.bytes));
        export.0.fetch_sub(self.bytes, Ordering::Relaxed);
        memory.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_nothing_gets_room_and_who_holds_much_waits() {
        let limits = Limits { connection_bytes: 100, ..Limits::default() };
        let memory = PayloadMemory::new(300);
        let (here, there) = (ExportShare::default(), ExportShare::default());
        let of = |export: &ExportShare| Account::new(&limits, memory.clone(), export.clone());
        let (one, sibling, other) = (of(&here), of(&here), of(&there));
        let first = one.take(100);
        assert!(first.is_some() && one.take(1).is_none(), "its own part is full");
        let second = sibling.take(40);
        assert!(second.is_some() && sibling.take(20).is_none(), "its export would hold more than is left");
        let third = other.take(60);
        assert!(third.is_some() && other.take(10).is_some(), "another export finds room");
        assert!(of(&here).take(1000).is_some(), "alone, it may go beyond");
        drop((first, second, third));
        assert_eq!(memory.used_bytes(), 0);
    }
}
