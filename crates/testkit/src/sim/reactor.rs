//! A reactor whose storage completes operations in a seeded order, after seeded delays.

use super::flying::Flying;
use crate::dice::Dice;
use block::{Executor, Poller, PollerId, ReactorCtx, Result, Task, Timers, Work};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

/// After this many turns, [`SimReactor::run_until_idle`] assumes that an operation will never end.
const TURN_LIMIT: u64 = 2_000_000;
/// The most task polls in a turn.
const POLL_LIMIT: usize = 1000;

/// The world of several simulated reactors: time, and the operations in flight.
pub(crate) struct World {
    dice: RefCell<Dice>,
    now: Cell<u64>,
    /// The time of tick zero.
    start: Instant,
    flying: RefCell<Vec<Flying>>,
    reactors: RefCell<Vec<Weak<SimReactor>>>,
    inline_percent: Cell<u64>,
}

impl World {
    /// Takes an operation. Sometimes completes it at once, as an engine may do with cached data.
    pub(crate) fn take(&self, start: impl FnOnce(&mut Dice) -> Flying) {
        let mut dice = self.dice.borrow_mut();
        let mut flying = start(&mut dice);
        if !flying.is_stalled() && dice.chance(self.inline_percent.get()) {
            while flying.apply_next(&mut dice) {}
            drop(dice);
            return flying.finish();
        }
        flying.due = self.now.get() + delay(&mut dice);
        self.flying.borrow_mut().push(flying);
    }

    fn step(&self) -> bool {
        self.now.set(self.now.get() + 1);
        let mut reactors: Vec<_> = self.reactors.borrow().iter().filter_map(Weak::upgrade).collect();
        self.dice.borrow_mut().shuffle(&mut reactors);
        let mut busy = false;
        for reactor in &reactors {
            busy |= reactor.turn();
        }
        let moves = 1 + self.dice.borrow_mut().below(3);
        for _ in 0..moves {
            busy |= self.move_one(!busy);
        }
        busy
    }

    /// Moves one operation on. With `hurry`, time jumps to the next operation that can move.
    fn move_one(&self, hurry: bool) -> bool {
        let mut flying = self.flying.borrow_mut();
        if hurry {
            let next = flying.iter().filter(|flying| !flying.is_stalled()).map(|flying| flying.due).min();
            let timer = self.next_timer();
            self.now.set(self.now.get().max(next.into_iter().chain(timer).min().unwrap_or(0)));
            if timer.is_some_and(|due| due <= self.now.get()) {
                // The timer fires in the next turn.
                return true;
            }
        }
        let now = self.now.get();
        let due: Vec<usize> =
            (0..flying.len()).filter(|index| flying[*index].due <= now && !flying[*index].is_stalled()).collect();
        if due.is_empty() {
            return false;
        }
        let mut dice = self.dice.borrow_mut();
        let index = due[dice.index(due.len())];
        if flying[index].apply_next(&mut dice) && dice.chance(60) {
            flying[index].due = now + dice.below(4);
            return true;
        }
        let mut landing = flying.swap_remove(index);
        while landing.apply_next(&mut dice) {}
        drop((flying, dice));
        landing.finish();
        true
    }
}

impl World {
    /// Returns the time for timers. A tick is a microsecond; if nothing else happens, time jumps to the next timer.
    fn time(&self) -> Instant {
        self.start + Duration::from_micros(self.now.get())
    }

    /// Returns the tick at which the next timer of any reactor is due.
    fn next_timer(&self) -> Option<u64> {
        let reactors = self.reactors.borrow();
        let due = reactors.iter().filter_map(Weak::upgrade).filter_map(|reactor| reactor.timers.next_due()).min()?;
        let left = due.saturating_duration_since(self.start);
        Some(u64::try_from(left.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX))
    }
}

fn delay(dice: &mut Dice) -> u64 {
    // Sometimes one operation is later than all others. Space that was freed meanwhile must not be reused yet.
    match dice.below(64) {
        0 => dice.below(600),
        1..=4 => dice.below(60),
        5..=20 => dice.below(12),
        _ => dice.below(3),
    }
}

type NamedPoller = (PollerId, Rc<RefCell<dyn Poller>>);

/// A simulated reactor; see the module's documentation. It is its own [`ReactorCtx`].
pub struct SimReactor {
    world: Rc<World>,
    executor: Executor,
    timers: Rc<Timers>,
    pollers: RefCell<Vec<NamedPoller>>,
    next_poller: Cell<u64>,
}

impl SimReactor {
    /// Makes a reactor in a new world.
    #[must_use]
    pub fn new(seed: u64) -> Rc<Self> {
        let world = World {
            dice: RefCell::new(Dice::new(seed)),
            now: Cell::new(0),
            start: Instant::now(),
            flying: RefCell::default(),
            reactors: RefCell::default(),
            inline_percent: Cell::new(5),
        };
        Self::join(Rc::new(world))
    }

    /// Makes another reactor in the same world: stepping one steps all.
    #[must_use]
    pub fn sibling(&self) -> Rc<Self> {
        Self::join(Rc::clone(&self.world))
    }

    fn join(world: Rc<World>) -> Rc<Self> {
        let reactor = Rc::new(Self {
            world: Rc::clone(&world),
            executor: Executor::new(Box::new(|| {})),
            timers: Timers::with_virtual_time(world.start),
            pollers: RefCell::default(),
            next_poller: Cell::new(0),
        });
        world.reactors.borrow_mut().push(Rc::downgrade(&reactor));
        reactor
    }

    /// Returns the reactor's context for disks and files.
    #[must_use]
    pub fn ctx(self: &Rc<Self>) -> Rc<dyn ReactorCtx> {
        Rc::clone(self) as Rc<dyn ReactorCtx>
    }

    pub(crate) fn world(&self) -> Rc<World> {
        Rc::clone(&self.world)
    }

    /// Sets how many of a hundred operations complete within their push; 5 by default.
    pub fn complete_inline(&self, percent: u64) {
        self.world.inline_percent.set(percent);
    }

    /// Runs a turn of every reactor of the world, then moves a few operations on. Returns whether anything happened.
    pub fn step(&self) -> bool {
        self.world.step()
    }

    /// Steps until nothing happens any more. Stalled operations may be left.
    ///
    /// # Panics
    /// If that takes implausibly long: something spins.
    pub fn run_until_idle(&self) {
        for _ in 0..TURN_LIMIT {
            if !self.step() {
                return;
            }
        }
        panic!("the reactor was still busy after {TURN_LIMIT} turns");
    }

    /// Returns how many operations are in flight in the whole world, stalled ones included.
    #[must_use]
    pub fn operations_in_flight(&self) -> usize {
        self.world.flying.borrow().len()
    }

    /// Runs `future` as a task to its end.
    ///
    /// # Panics
    /// If everything is idle before it has ended.
    pub fn run<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> T {
        let result = Rc::new(RefCell::new(None));
        let target = Rc::clone(&result);
        self.executor.spawn(Task::new(async move {
            let value = future.await;
            *target.borrow_mut() = Some(value);
        }));
        loop {
            let busy = self.step();
            if let Some(value) = result.borrow_mut().take() {
                return value;
            }
            assert!(busy, "everything is idle and the task has not ended");
        }
    }

    fn turn(&self) -> bool {
        self.timers.set_now(self.world.time());
        let mut busy = self.timers.fire() > 0;
        let pollers = self.pollers.borrow().clone();
        for (id, poller) in pollers {
            if self.pollers.borrow().iter().any(|(other, _)| *other == id) {
                busy |= poller.borrow_mut().poll();
            }
        }
        busy | (self.executor.run_ready(POLL_LIMIT) > 0)
    }
}

impl ReactorCtx for SimReactor {
    fn spawn(&self, task: Task) {
        self.executor.spawn(task);
    }

    fn add_poller(&self, poller: Rc<RefCell<dyn Poller>>) -> Result<PollerId> {
        let id = PollerId(self.next_poller.replace(self.next_poller.get() + 1));
        self.pollers.borrow_mut().push((id, poller));
        Ok(id)
    }

    fn remove_poller(&self, id: PollerId) {
        let gone: Vec<_> = self.pollers.borrow_mut().extract_if(.., |(other, _)| *other == id).collect();
        drop(gone);
    }

    fn timers(&self) -> &Rc<Timers> {
        &self.timers
    }

    fn run_aside(&self, _turn: u64, work: Work) {
        work();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
