//! Events for listeners. The daemon never waits for a listener.

use crate::api::{Event, EventKind};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::broadcast;

/// Events that a slow listener may fall behind before it loses some.
const BACKLOG: usize = 256;

/// The events of a daemon.
#[derive(Debug)]
pub(crate) struct Events {
    sender: broadcast::Sender<Event>,
    next: Mutex<u64>,
}

impl Default for Events {
    fn default() -> Self {
        Self { sender: broadcast::channel(BACKLOG).0, next: Mutex::new(1) }
    }
}

impl Events {
    pub(crate) fn publish(&self, kind: EventKind, disk: Option<&str>, id: Option<u64>, message: Option<String>) {
        let disk = disk.map(str::to_owned);
        // Sent under the lock, so that listeners get rising numbers.
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Event { number: *next, time_ms: now_ms(), kind, disk, id, message };
        *next = next.saturating_add(1);
        // An error means that there are no listeners.
        let _ = self.sender.send(event);
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.sender.subscribe()
    }
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
