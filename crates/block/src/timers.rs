//! A reactor's timers: tasks await them, pollers look at them.
//!
//! No thread and no descriptor belongs to a timer. Before it sleeps, the reactor asks when the next one is due. At the
//! beginning of each turn it fires those that are due, the earliest first. Setting a timer allocates only when more are
//! set at once than ever before.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Timers that there is room for once the first is made.
const ROOM: usize = 64;

/// The timers of one reactor.
pub struct Timers {
    /// The time, if it is not the host's.
    virtual_now: Option<Cell<Instant>>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// The due time, the number of the setting, and the timer's slot. An entry is stale if its timer was set anew or
    /// cleared since.
    heap: BinaryHeap<Reverse<(Instant, u64, usize)>>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    settings: u64,
    /// Slots that are set.
    set: usize,
}

#[derive(Default)]
struct Slot {
    /// The number of the valid setting; zero if the timer is not set.
    setting: u64,
    is_due: bool,
    waker: Option<Waker>,
}

impl Timers {
    /// Makes timers that follow the host's clock.
    #[must_use]
    pub fn new() -> Rc<Self> {
        Rc::new(Self { virtual_now: None, state: RefCell::default() })
    }

    /// Makes timers whose time passes only by [`Timers::set_now`], for simulations.
    #[must_use]
    pub fn with_virtual_time(start: Instant) -> Rc<Self> {
        Rc::new(Self { virtual_now: Some(Cell::new(start)), state: RefCell::default() })
    }

    /// Returns the time that timers go by.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.virtual_now.as_ref().map_or_else(Instant::now, Cell::get)
    }

    /// Sets the virtual time; the host's clock cannot be set.
    pub fn set_now(&self, now: Instant) {
        if let Some(virtual_now) = &self.virtual_now {
            virtual_now.set(now);
        }
    }

    /// Returns when the next timer is due; `None` if none is set. For the reactor, before it sleeps.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let state = &mut *self.state.borrow_mut();
        while let Some(Reverse((due, setting, slot))) = state.heap.peek().copied() {
            if state.counts(setting, slot) {
                return Some(due);
            }
            state.heap.pop();
        }
        None
    }

    /// Whether a timer is due and not fired yet.
    #[must_use]
    pub fn has_due(&self) -> bool {
        self.next_due().is_some_and(|due| due <= self.now())
    }

    /// Fires the timers that are due, the earliest first; those due at the same time in the order in which they were
    /// set. Returns how many. For the reactor, once a turn.
    pub fn fire(&self) -> usize {
        if self.state.borrow().set == 0 {
            return 0;
        }
        let (now, mut count) = (self.now(), 0);
        while self.next_due().is_some_and(|due| due <= now) {
            let waker = self.state.borrow_mut().fire_next();
            count += 1;
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        count
    }
}

impl State {
    fn counts(&self, setting: u64, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(|slot| slot.setting == setting)
    }

    fn fire_next(&mut self) -> Option<Waker> {
        let Reverse((_, _, index)) = self.heap.pop()?;
        let slot = self.slots.get_mut(index)?;
        (slot.setting, slot.is_due) = (0, true);
        self.set -= 1;
        slot.waker.take()
    }

    fn take_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            if self.slots.is_empty() {
                self.slots.reserve(ROOM);
                self.heap.reserve(3 * ROOM);
            }
            self.slots.push(Slot::default());
            self.free.reserve(self.slots.len());
            self.slots.len() - 1
        })
    }

    fn set(&mut self, index: usize, due: Instant) {
        self.clear(index);
        self.settings += 1;
        let Some(slot) = self.slots.get_mut(index) else { return };
        slot.setting = self.settings;
        self.set += 1;
        if self.heap.len() > 2 * self.set + ROOM {
            // More than half are stale, and would stay until they are due, perhaps for long.
            let slots = &self.slots;
            self.heap
                .retain(|Reverse((_, setting, slot))| slots.get(*slot).is_some_and(|slot| slot.setting == *setting));
        }
        self.heap.push(Reverse((due, self.settings, index)));
    }

    fn clear(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.setting != 0 {
            self.set -= 1;
        }
        (slot.setting, slot.is_due) = (0, false);
    }
}

impl fmt::Debug for Timers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timers({} set)", self.state.borrow().set)
    }
}

/// A timer on a reactor. A poller asks it when polled; the reactor polls in the turn in which the timer is due. Tasks
/// use [`Timer::wait`], or [`Sleep`].
#[derive(Debug)]
pub struct Timer {
    timers: Rc<Timers>,
    slot: usize,
}

impl Timer {
    /// Makes a timer that is not set.
    #[must_use]
    pub fn new(timers: &Rc<Timers>) -> Self {
        let slot = timers.state.borrow_mut().take_slot();
        Self { timers: Rc::clone(timers), slot }
    }

    /// Returns the present time of the timer's clock.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.timers.now()
    }

    /// Sets the timer to `due`, in place of an earlier setting. The reactor wakes up then or later, never before. The
    /// delay depends on the host and on the reactor's other work.
    pub fn set(&mut self, due: Instant) {
        self.timers.state.borrow_mut().set(self.slot, due);
    }

    /// Clears the timer: it is neither set nor due.
    pub fn clear(&mut self) {
        self.timers.state.borrow_mut().clear(self.slot);
    }

    /// Whether its time has come since it was last set.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.timers.state.borrow().slots.get(self.slot).is_some_and(|slot| slot.is_due)
    }

    /// Waits until it is due; for ever if it is not set.
    pub fn wait(&mut self) -> impl Future<Output = ()> + '_ {
        std::future::poll_fn(|context| self.poll_due(context))
    }

    fn poll_due(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.timers.state.borrow_mut();
        match state.slots.get_mut(self.slot) {
            Some(slot) if !slot.is_due => {
                slot.waker = Some(context.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(()),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let mut state = self.timers.state.borrow_mut();
        state.clear(self.slot);
        if let Some(slot) = state.slots.get_mut(self.slot) {
            slot.waker = None;
        }
        state.free.push(self.slot);
    }
}

/// A future that ends at its time.
#[derive(Debug)]
pub struct Sleep(pub(crate) Timer);

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.poll_due(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Executor, Task};
    use std::time::Duration;

    const MS: Duration = Duration::from_millis(1);

    /// Runs ready tasks at `now`.
    fn turn(timers: &Timers, executor: &Executor, now: Instant) -> usize {
        timers.set_now(now);
        let fired = timers.fire();
        executor.run_ready(100);
        fired
    }

    #[test]
    fn sleepers_wake_in_the_order_in_which_they_are_due_and_not_before() {
        let start = Instant::now();
        let timers = Timers::with_virtual_time(start);
        let executor = Executor::new(Box::new(|| {}));
        let woken = Rc::new(RefCell::new(Vec::new()));
        for (name, due) in [("c", 30), ("a", 10), ("b", 20), ("b again", 20), ("past", 0)] {
            let (woken, mut timer) = (Rc::clone(&woken), Timer::new(&timers));
            timer.set(start + due * MS);
            executor.spawn(Task::new(async move {
                timer.wait().await;
                woken.borrow_mut().push(name);
            }));
        }
        assert_eq!(turn(&timers, &executor, start), 1);
        assert_eq!(turn(&timers, &executor, start + 10 * MS - Duration::from_nanos(1)), 0);
        assert_eq!(timers.next_due(), Some(start + 10 * MS));
        assert_eq!(turn(&timers, &executor, start + 40 * MS), 4);
        assert_eq!(*woken.borrow(), ["past", "a", "b", "b again", "c"]);
        assert_eq!((timers.next_due(), executor.live()), (None, 0));
    }

    #[test]
    fn a_timer_that_was_cleared_set_anew_or_dropped_does_not_fire_at_its_old_time() {
        let start = Instant::now();
        let timers = Timers::with_virtual_time(start);
        let [mut cleared, mut later, mut earlier, mut dropped] = [(); 4].map(|()| Timer::new(&timers));
        for timer in [&mut cleared, &mut later, &mut earlier, &mut dropped] {
            timer.set(start + 10 * MS);
        }
        cleared.clear();
        later.set(start + 20 * MS);
        earlier.set(start + 5 * MS);
        drop(dropped);
        // Takes the place of the dropped one.
        let unset = Timer::new(&timers);
        assert_eq!(timers.next_due(), Some(start + 5 * MS));
        timers.set_now(start + 10 * MS);
        assert_eq!(timers.fire(), 1);
        assert_eq!((cleared.is_due(), later.is_due(), earlier.is_due(), unset.is_due()), (false, false, true, false));
        earlier.clear();
        assert!(!earlier.is_due());
        timers.set_now(start + 20 * MS);
        assert_eq!((timers.fire(), later.is_due(), timers.next_due()), (1, true, None));
    }

    #[test]
    fn timers_that_are_set_and_cleared_again_and_again_take_no_memory() {
        let start = Instant::now();
        let timers = Timers::with_virtual_time(start);
        let mut keeps = Timer::new(&timers);
        keeps.set(start + MS);
        let room = |timers: &Timers| {
            let state = timers.state.borrow();
            (state.heap.capacity(), state.slots.capacity(), state.free.capacity())
        };
        let before = room(&timers);
        for round in 0..10_000 {
            // A limit that is far, and hardly ever reached.
            let mut limit = Timer::new(&timers);
            limit.set(start + (30_000 + round % 7) * MS);
        }
        assert_eq!(room(&timers), before);
        assert_eq!(timers.next_due(), Some(start + MS));
    }
}
