//! Descriptors, mostly sockets, that tasks and pollers of a reactor wait on. See [`block::Watch`].

use block::{Error, Interest, Readiness, Result, WatchId};
use rustix::event::epoll;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;

/// Returns the events that a descriptor is watched for: changes only.
fn flags(room: bool) -> epoll::EventFlags {
    use epoll::EventFlags as Flags;
    let always = Flags::IN | Flags::RDHUP | Flags::ET;
    if room { always | Flags::OUT } else { always }
}

/// The watched descriptors of one reactor, by the number that epoll has for each. Zero is for all descriptors that are
/// watched elsewhere.
#[derive(Debug, Default)]
pub(crate) struct FdWatches {
    watches: RefCell<BTreeMap<u64, Rc<Readiness>>>,
    last_id: Cell<u64>,
    count: Cell<usize>,
}

impl FdWatches {
    pub(crate) fn add(&self, epoll: &OwnedFd, fd: BorrowedFd<'_>, readiness: &Rc<Readiness>) -> Result<WatchId> {
        let id = self.last_id.get() + 1;
        epoll::add(epoll, fd, epoll::EventData::new_u64(id), flags(false))
            .map_err(|error| Error::io("cannot watch a descriptor with epoll", error.into()))?;
        self.last_id.set(id);
        let mut watches = self.watches.borrow_mut();
        watches.insert(id, Rc::clone(readiness));
        self.count.set(watches.len());
        Ok(WatchId(id))
    }

    /// Watches for room to write as well, or no longer.
    pub(crate) fn watch_room(&self, epoll: &OwnedFd, id: WatchId, fd: BorrowedFd<'_>, wanted: bool) {
        // Changing the events of a watched descriptor allocates nothing.
        if let Err(error) = epoll::modify(epoll, fd, epoll::EventData::new_u64(id.0), flags(wanted)) {
            tracing::error!("cannot watch a descriptor for room to write: {error}");
        }
    }

    pub(crate) fn remove(&self, epoll: &OwnedFd, id: WatchId, fd: BorrowedFd<'_>) {
        let mut watches = self.watches.borrow_mut();
        if watches.remove(&id.0).is_some() {
            self.count.set(watches.len());
            let _ = epoll::delete(epoll, fd);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.get() == 0
    }

    /// Raises the readiness of an event's descriptor.
    pub(crate) fn route(&self, event: epoll::Event) {
        use epoll::EventFlags as Flags;
        let (id, flags) = (event.data.u64(), event.flags);
        if id == 0 {
            return;
        }
        let readiness = self.watches.borrow().get(&id).cloned();
        let Some(readiness) = readiness else { return };
        let ended = flags.intersects(Flags::HUP | Flags::ERR);
        if ended || flags.contains(Flags::RDHUP) {
            readiness.ends();
        }
        if ended || flags.intersects(Flags::IN | Flags::RDHUP) {
            readiness.raise(Interest::Read);
        }
        if ended || flags.contains(Flags::OUT) {
            readiness.raise(Interest::Write);
        }
    }
}
