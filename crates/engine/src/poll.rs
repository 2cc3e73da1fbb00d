//! A reactor's pollers, and the rhythm of spinning and sleeping.

use block::{Poller, PollerId};
use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

struct Entry {
    id: PollerId,
    poller: Rc<RefCell<dyn Poller>>,
    /// Watched by the reactor's epoll; the same descriptor as long as the poller is registered.
    wake_fd: Option<RawFd>,
    removed: bool,
}

/// The pollers, in order of their adding.
///
/// The list is never borrowed while a poller runs, and never gets shorter while it is walked: a poller may add and
/// remove any, itself included. What was removed is dropped by [`Pollers::sweep`].
#[derive(Default)]
pub(crate) struct Pollers {
    entries: RefCell<Vec<Entry>>,
    next_id: Cell<u64>,
    has_removed: Cell<bool>,
}

impl Pollers {
    /// Adds one and returns its name; `watch` puts its wake descriptor under watch.
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

    /// Takes one out of the round; returns its wake descriptor, which is still open.
    pub(crate) fn remove(&self, id: PollerId) -> Option<RawFd> {
        let mut entries = self.entries.borrow_mut();
        let entry = entries.iter_mut().find(|entry| entry.id == id && !entry.removed)?;
        entry.removed = true;
        self.has_removed.set(true);
        entry.wake_fd.take()
    }

    /// Takes all out.
    pub(crate) fn clear(&self) {
        for entry in &mut *self.entries.borrow_mut() {
            entry.removed = true;
        }
        self.has_removed.set(true);
        self.sweep();
    }

    /// Drops those that were removed.
    pub(crate) fn sweep(&self) {
        while self.has_removed.replace(false) {
            let removed: Vec<_> = self.entries.borrow_mut().extract_if(.., |entry| entry.removed).collect();
            // Outside the borrow: a poller's drop may remove others.
            drop(removed);
        }
    }

    /// Polls each once; returns whether any did something.
    pub(crate) fn poll(&self) -> bool {
        let mut worked = false;
        self.visit(|poller| {
            worked |= poller.poll();
            false
        });
        worked
    }

    /// Arms each until one has work; returns whether one had.
    pub(crate) fn arm(&self) -> bool {
        self.visit(|poller| poller.arm())
    }

    /// Disarms each.
    pub(crate) fn disarm(&self) {
        self.visit(|poller| {
            poller.disarm();
            false
        });
    }

    /// Calls `visit` for each until it returns true. Those added meanwhile wait for the next round.
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

/// Decides when an idle reactor stops spinning.
///
/// What counts is whether spinning pays: whether work came within the limit. How long a sleep took says little, for it
/// contains the time that waking took, on both sides of a ring. So the reactor spins as long as that catches work more
/// often than not, then sleeps at once for a number of sleeps, then tries again. A reactor that nobody wakes tries
/// nothing.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: Duration,
    /// Catches less misses, weighted; at zero spinning does not pay.
    score: u32,
    /// Sleeps until spinning is tried again; zero while it is on.
    sleeps_left: u32,
    idle_since: Option<Instant>,
}

/// A catch adds one, up to here.
const SCORE_MAX: u32 = 16;
/// A miss costs this.
const MISS: u32 = 2;
/// What a try begins with: two misses end it.
const SCORE_AT_TRY: u32 = 4;
const SLEEPS_BETWEEN_TRIES: u32 = 256;

impl Pace {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, score: SCORE_AT_TRY, sleeps_left: 0, idle_since: None }
    }

    /// The turn had work.
    pub(crate) fn busy(&mut self) {
        if self.idle_since.take().is_some() && self.sleeps_left == 0 {
            self.score = (self.score + 1).min(SCORE_MAX);
        }
    }

    /// The turn had none: whether it is time to sleep.
    pub(crate) fn is_time_to_sleep(&mut self, now: Instant) -> bool {
        let since = *self.idle_since.get_or_insert(now);
        self.sleeps_left > 0 || now.saturating_duration_since(since) >= self.limit
    }

    /// The reactor has slept.
    pub(crate) fn slept(&mut self) {
        self.idle_since = None;
        if self.sleeps_left > 0 {
            self.sleeps_left -= 1;
            if self.sleeps_left == 0 {
                self.score = SCORE_AT_TRY;
            }
        } else {
            self.score = self.score.saturating_sub(MISS);
            if self.score == 0 {
                self.sleeps_left = SLEEPS_BETWEEN_TRIES;
            }
        }
    }
}

/// A pace for each thing that a reactor waits for. After it gave requests to an engine, that is the storage; after it
/// completed some, the guest. The one may be too slow for spinning and the other quick, in turns.
#[derive(Debug)]
pub(crate) struct Paces {
    storage: Pace,
    guest: Pace,
    waits_for_storage: bool,
}

impl Paces {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { storage: Pace::new(limit), guest: Pace::new(limit), waits_for_storage: false }
    }

    fn current(&mut self) -> &mut Pace {
        if self.waits_for_storage { &mut self.storage } else { &mut self.guest }
    }

    /// The turn had work; whether an engine was given requests.
    pub(crate) fn busy(&mut self, submitted: bool) {
        self.current().busy();
        self.waits_for_storage = submitted;
    }

    /// The turn had none: whether it is time to sleep.
    pub(crate) fn is_time_to_sleep(&mut self, now: Instant) -> bool {
        self.current().is_time_to_sleep(now)
    }

    /// The reactor has slept.
    pub(crate) fn slept(&mut self) {
        self.current().slept();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Idles until `pace` would sleep or `work_after` has passed; returns whether it slept.
    fn idles(pace: &mut Pace, work_after: Duration) -> bool {
        let start = Instant::now();
        let mut waited = Duration::ZERO;
        while waited < work_after {
            if pace.is_time_to_sleep(start + waited) {
                pace.slept();
                return true;
            }
            waited += Duration::from_micros(1);
        }
        pace.busy();
        false
    }

    #[test]
    fn it_spins_while_that_catches_work_and_tries_again_now_and_then() {
        let limit = Duration::from_micros(64);
        let mut pace = Pace::new(limit);
        assert!((0..1000).all(|_| !idles(&mut pace, limit / 2)), "work comes in time, again and again");
        assert!((0..100).all(|_| idles(&mut pace, limit * 2)), "work never comes in time");
        assert!(pace.is_time_to_sleep(Instant::now()), "so it does not spin at all");
        let slept = (0..1000).filter(|_| idles(&mut pace, limit / 2)).count();
        assert!((100..300).contains(&slept), "{slept} sleeps before the next try found out that it pays again");
    }

    #[test]
    fn now_and_then_a_miss_does_not_end_the_spinning() {
        let limit = Duration::from_micros(64);
        let mut pace = Pace::new(limit);
        for round in 0..1000 {
            let late = round % 4 == 0;
            assert_eq!(idles(&mut pace, if late { limit * 2 } else { limit / 2 }), late);
        }
    }

    #[test]
    fn a_slow_storage_does_not_end_the_spinning_for_a_quick_guest() {
        let limit = Duration::from_micros(64);
        let mut paces = Paces::new(limit);
        for round in 0..1000 {
            paces.busy(true);
            assert!(idles(paces.current(), limit * 2));
            paces.busy(false);
            assert!(!idles(paces.current(), limit / 2), "the guest answers in time, round {round}");
        }
        assert!(paces.storage.sleeps_left > 0, "nor does the guest keep it spinning for the storage");
    }

    #[test]
    fn a_limit_of_zero_never_spins() {
        let mut pace = Pace::new(Duration::ZERO);
        pace.slept();
        assert!(pace.is_time_to_sleep(Instant::now()));
    }

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
