//! A reactor that turns when the input says so.

use block::{Poller, PollerId, ReactorCtx, Task, Timers, Work};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The reactor of one queue.
#[derive(Default)]
pub(super) struct HandReactor {
    pollers: RefCell<BTreeMap<PollerId, Rc<RefCell<dyn Poller>>>>,
    /// It sleeps until its descriptor is signalled.
    sleeps: Cell<bool>,
}

impl HandReactor {
    fn each(&self, act: impl Fn(&mut dyn Poller) -> bool) -> bool {
        let pollers: Vec<_> = self.pollers.borrow().values().cloned().collect();
        pollers.iter().fold(false, |any, poller| act(&mut *poller.borrow_mut()) | any)
    }

    /// Turns, unless it sleeps and nobody has woken it. Returns whether it did.
    pub(super) fn turn(&self) -> bool {
        // A read takes the signal away. Without one it fails, because the descriptor does not block.
        let is_woken =
            |poller: &mut dyn Poller| poller.wake_fd().is_some_and(|fd| rustix::io::read(fd, &mut [0; 8]).is_ok());
        if self.sleeps.get() && !self.each(is_woken) {
            return false;
        }
        self.wake();
        self.each(|poller| poller.poll());
        true
    }

    /// Goes to sleep if there is nothing to do.
    pub(super) fn sleep(&self) {
        self.wake();
        self.sleeps.set(true);
        if self.each(|poller| poller.arm()) {
            self.wake();
        }
    }

    /// Wakes it, as its own work does.
    pub(super) fn wake(&self) {
        if self.sleeps.replace(false) {
            self.each(|poller| {
                poller.disarm();
                false
            });
        }
    }
}

impl ReactorCtx for HandReactor {
    fn spawn(&self, _: Task) {
        unimplemented!("the driver has no tasks");
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> block::Result<PollerId> {
        let mut pollers = self.pollers.borrow_mut();
        let id = PollerId(pollers.len() as u64);
        pollers.insert(id, poller);
        Ok(id)
    }

    fn remove_poller(&self, id: PollerId) {
        self.pollers.borrow_mut().remove(&id);
    }

    fn timers(&self) -> &Rc<Timers> {
        unimplemented!("the driver has no timers");
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
