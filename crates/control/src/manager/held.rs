//! Disks that hold requests which the storage failed: the events, and the retry.

use super::Manager;
use crate::api::{Disk, EventKind};
use crate::events::Events;
use block::{Error, ErrorKind, IoError, Result};
use daemon::NodeId;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// The news that a disk has begun to hold requests.
pub(super) struct Holding {
    disk: String,
    error: IoError,
}

/// Starts a thread that publishes what it receives, so that no reactor waits for a listener. It ends with the last
/// sender.
pub(super) fn tell_of(events: Arc<Events>) -> Result<Sender<Holding>> {
    let (sender, receiver) = channel::<Holding>();
    let run = move || {
        for Holding { disk, error } in receiver {
            tracing::error!(%disk, "requests wait for 'ctl resume', because the storage failed them: {error}");
            let message = format!("{error}: requests wait for 'ctl resume {disk}'");
            events.publish(EventKind::DiskHeld, Some(&disk), None, Some(message));
        }
    };
    let thread = std::thread::Builder::new().name("held".into()).spawn(run);
    thread.map(|_| sender).map_err(|error| Error::io("cannot start a thread for events", error))
}

impl Manager {
    pub(super) fn listen_to_hold(&self, node: NodeId, name: &str) {
        // A removed disk holds no requests.
        let Ok(Some(hold)) = self.daemon.hold(node) else { return };
        let (sender, disk) = (self.holds.clone(), name.to_owned());
        hold.listen(Box::new(move |error| {
            // The thread ends with the manager; then there are no listeners.
            let _ = sender.send(Holding { disk: disk.clone(), error });
        }));
    }

    /// Retries requests that wait because the storage failed them.
    pub fn resume(&self, name: &str) -> Result<Disk> {
        let hold = self.daemon.hold(self.node(name)?)?.ok_or_else(|| {
            let message = format!("the disk '{name}' holds no requests: add it with on-error=hold or on-no-space=hold");
            Error::new(ErrorKind::Unsupported, message)
        })?;
        hold.try_again();
        self.events.publish(EventKind::DiskResumed, Some(name), None, None);
        self.disk(name)
    }
}
