//! A reactor's pollers.

use block::{Poller, PollerId};
use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

struct Entry {
    id: PollerId,
    poller: Rc<RefCell<dyn Poller>>,
    /// Watched by the reactor's epoll; the same descriptor as long as the poller is registered.
    wake_fd: Option<RawFd>,
    removed: bool,
}

/// The pollers, in the order in which they were added.
///
/// The list is never borrowed while a poller runs, and never gets shorter while it is walked: a poller may add and
/// remove any, itself included. Removed pollers are dropped by [`Pollers::sweep`].
#[derive(Default)]
pub(crate) struct Pollers {
    entries: RefCell<Vec<Entry>>,
    next_id: Cell<u64>,
    has_removed: Cell<bool>,
}

impl Pollers {
    /// Adds a poller and returns its name. `watch` is called with its wake descriptor.
    pub(crate) fn add<E>(
        &self,
        poller: Rc<RefCell<dyn Poller>>,
        watch: impl FnOnce(RawFd) -> Result<(), E>,
    ) -> Result<PollerId, E> {
        let wake_fd = poller.borrow().wake_fd().map(|fd| fd.as_raw_fd());
        if let Some(fd) = wake_fd {
            watch(fd)?;
        }
        let id = PollerId(self.next_id.get());
        self.next_id.set(id.0 + 1);
        self.entries.borrow_mut().push(Entry { id, poller, wake_fd, removed: false });
        Ok(id)
    }

    /// Removes a poller. Returns its wake descriptor, which is still open.
    pub(crate) fn remove(&self, id: PollerId) -> Option<RawFd> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.iter_mut().find(|entry| entry.id == id && !entry.removed)?;
        entry.removed = true;
        self.has_removed.set(true);
        entry.wake_fd.take()
    }

    /// Removes and drops all pollers.
    pub(crate) fn clear(&self) {
        for entry in &mut *self.entries.borrow_mut() {
            entry.removed = true;
        }
        self.has_removed.set(true);
        self.sweep();
    }

    /// Drops the removed pollers.
    pub(crate) fn sweep(&self) {
        while self.has_removed.replace(false) {
            let removed: Vec<_> = self.entries.borrow_mut().extract_if(.., |entry| entry.removed).collect();
            // Dropped outside the borrow: a poller's drop may remove others.
            drop(removed);
        }
    }

    /// Polls each poller once. Returns whether any did something.
    pub(crate) fn poll(&self) -> bool {
        let mut worked = false;
        self.visit(|poller| {
            worked |= poller.poll();
            false
        });
        worked
    }

    /// Arms the pollers until one has work. Returns whether one had.
    pub(crate) fn arm(&self) -> bool {
        self.visit(|poller| poller.arm())
    }

    /// Disarms all pollers.
    pub(crate) fn disarm(&self) {
        self.visit(|poller| {
            poller.disarm();
            false
        });
    }

    /// Calls `visit` for each poller until it returns true. Pollers added meanwhile wait for the next round.
    fn visit(&self, mut visit: impl FnMut(&mut dyn Poller) -> bool) -> bool {
        let count = self.entries.borrow().len();
        for index in 0..count {
            let poller = match self.entries.borrow().get(index) {
                Some(entry) if !entry.removed => Rc::clone(&entry.poller),
                _ => continue,
            };
            if visit(&mut *poller.borrow_mut()) {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Leaves {
        pollers: Rc<Pollers>,
        own: Cell<Option<PollerId>>,
        other: PollerId,
    }

    impl Poller for Leaves {
        fn poll(&mut self) -> bool {
            self.pollers.remove(self.other);
            self.own.take().map(|id| self.pollers.remove(id));
            true
        }
    }

    struct Counts(Rc<Cell<u32>>);

    impl Poller for Counts {
        fn poll(&mut self) -> bool {
            self.0.set(self.0.get() + 1);
            false
        }
    }

    #[test]
    fn a_poller_may_remove_itself_and_others_within_a_poll() {
        let pollers = Rc::new(Pollers::default());
        let polls = Rc::new(Cell::new(0));
        let watch = |_| Ok::<(), ()>(());
        let other = PollerId(1);
        let leaves = Rc::new(RefCell::new(Leaves { pollers: Rc::clone(&pollers), own: Cell::new(None), other }));
        let own = pollers.add(Rc::clone(&leaves) as _, watch).unwrap();
        leaves.borrow().own.set(Some(own));
        assert_eq!(pollers.add(Rc::new(RefCell::new(Counts(Rc::clone(&polls)))), watch), Ok(other));
        pollers.add(Rc::new(RefCell::new(Counts(Rc::clone(&polls)))), watch).unwrap();
        assert!(pollers.poll());
        assert_eq!(polls.get(), 1, "the one removed was not polled, the one behind it was");
        pollers.sweep();
        assert_eq!(Rc::strong_count(&leaves), 1);
        assert!(!pollers.poll());
        assert_eq!(polls.get(), 2);
    }
}
