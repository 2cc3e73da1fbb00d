//! One thread's idle contexts, in two magazines. So a thread whose requests come and go near a magazine's edge does not
//! trade for each of them.

use super::depot::Depot;
use super::magazine::{Magazine, Node};
use super::stack::Rules;

/// A thread that fills this many magazines without taking a context only frees. Reactors free in bursts too, but then
/// they take.
const FILLS_OF_A_FREER: u8 = 4;
/// After this many gifts in a row, a thread has more than its turns need.
const GIFTS_IN_A_ROW: u8 = 16;
const MAX_STRETCH: usize = 16;

/// Gives a magazine away in batches of the ordinary length, however long it is. A thread that needs one more context
/// must not take so many that the next thread finds nothing.
fn give_in_batches<T, R: Rules>(depot: &Depot<T, R>, magazine: &mut Magazine<T>) -> Magazine<T> {
    let (batch, mut freed) = (depot.batch_length(), Magazine::new());
    while !magazine.is_empty() {
        freed.append(&mut depot.give(&mut magazine.split(batch)));
    }
    freed
}

/// A thread's list. It does not hold its depot: each call that may trade gets it as an argument.
pub(super) struct List<T> {
    /// The magazine that contexts are taken from and put into.
    loaded: Magazine<T>,
    /// A second magazine, full or empty.
    reserve: Magazine<T>,
    /// How many contexts make a magazine full. Zero until the thread has joined the depot.
    batch: usize,
    /// How often the magazine filled up since the thread last took a context. A thread that only frees keeps no
    /// reserve: another thread needs it.
    fills: u8,
    /// Contexts that this thread got from the depot or the allocator, less those that went back there.
    net: i64,
    /// The outstanding contexts last reported to the depot.
    published: i64,
    /// The length of this thread's magazines, as a multiple of the ordinary length. It doubles when the thread takes
    /// back contexts that it gave away, as a reactor does that completes in bursts. A run of gifts resets it to one.
    stretch: usize,
    /// Gifts since the thread last took from the depot.
    gifts: u8,
    /// Trades since the thread last looked at the clock.
    trades: u32,
}

impl<T> List<T> {
    pub(super) const fn new() -> Self {
        Self {
            loaded: Magazine::new(),
            reserve: Magazine::new(),
            batch: 0,
            fills: FILLS_OF_A_FREER,
            net: 0,
            published: 0,
            stretch: 1,
            gifts: 0,
            trades: 0,
        }
    }

    /// Takes a context on the fast path.
    #[inline]
    pub(super) fn get(&mut self) -> Option<Box<Node<T>>> {
        self.fills = 0;
        self.loaded.pop()
    }

    /// Puts a context back on the fast path. Returns it if the magazine is full.
    #[inline]
    pub(super) fn put(&mut self, context: Box<Node<T>>) -> Result<(), Box<Node<T>>> {
        if self.loaded.len() < self.batch {
            self.loaded.push(context);
            return Ok(());
        }
        Err(context)
    }

    /// Takes a context when [`List::get`] found none: from the reserve, or else from those that other threads have
    /// given. If both are empty, returns how many spare contexts the caller should create for [`List::adopt`], besides
    /// the one that it needs.
    #[cold]
    pub(super) fn get_or_trade<R: Rules>(&mut self, depot: &Depot<T, R>) -> Result<Box<Node<T>>, usize> {
        self.join(depot);
        if !self.reserve.is_empty() {
            std::mem::swap(&mut self.loaded, &mut self.reserve);
            return self.loaded.pop().ok_or(0);
        }
        if !depot.take(&mut self.loaded) {
            return Err(depot.spares_length());
        }
        self.net += self.loaded.len() as i64;
        if std::mem::take(&mut self.gifts) > 0 {
            self.stretch = (self.stretch * 2).min(MAX_STRETCH);
        }
        self.batch = depot.stretched_length(self.stretch);
        let context = self.loaded.pop();
        self.publish(depot);
        context.ok_or(0)
    }

    /// Puts a context back when [`List::put`] found no room. Returns contexts to count as freed and drop (see
    /// [`Depot::give`]).
    #[cold]
    #[must_use]
    pub(super) fn put_or_trade<R: Rules>(&mut self, depot: &Depot<T, R>, context: Box<Node<T>>) -> Magazine<T> {
        self.join(depot);
        if self.loaded.len() < self.batch {
            self.loaded.push(context);
            return Magazine::new();
        }
        self.fills = self.fills.saturating_add(1).min(FILLS_OF_A_FREER);
        let keeps = self.fills < FILLS_OF_A_FREER;
        let freed = if keeps && self.reserve.is_empty() {
            std::mem::swap(&mut self.loaded, &mut self.reserve);
            Magazine::new()
        } else {
            self.trade_full(depot, keeps)
        };
        self.loaded.push(context);
        freed
    }

    /// Gives the reserve away, and the full magazine too if the thread keeps no reserve.
    fn trade_full<R: Rules>(&mut self, depot: &Depot<T, R>, keeps: bool) -> Magazine<T> {
        // The reserve has been idle longest: the contexts just used are the warm ones.
        let mut freed = self.give_reserve(depot);
        if keeps {
            std::mem::swap(&mut self.loaded, &mut self.reserve);
        } else {
            freed.append(&mut self.give_loaded(depot));
        }
        self.gifts += 1;
        if self.gifts >= GIFTS_IN_A_ROW {
            self.gifts = 0;
            self.stretch = 1;
        }
        self.batch = depot.stretched_length(self.stretch);
        self.publish(depot);
        freed
    }

    fn give_reserve<R: Rules>(&mut self, depot: &Depot<T, R>) -> Magazine<T> {
        if self.reserve.is_empty() {
            return Magazine::new();
        }
        self.net -= self.reserve.len() as i64;
        give_in_batches(depot, &mut self.reserve)
    }

    fn give_loaded<R: Rules>(&mut self, depot: &Depot<T, R>) -> Magazine<T> {
        self.net -= self.loaded.len() as i64;
        give_in_batches(depot, &mut self.loaded)
    }

    /// Tells the depot how many contexts are outstanding, and adapts to the present length of a magazine. Returns
    /// contexts to be dropped, as [`List::put_or_trade`] does.
    #[must_use]
    pub(super) fn settle<R: Rules>(&mut self, depot: &Depot<T, R>) -> Magazine<T> {
        if self.batch == 0 {
            return Magazine::new();
        }
        self.stretch = 1;
        let before = std::mem::replace(&mut self.batch, depot.batch_length());
        let mut freed = if self.batch < before { self.give_reserve(depot) } else { Magazine::new() };
        if self.loaded.len() > self.batch {
            freed.append(&mut self.give_loaded(depot));
        }
        self.publish(depot);
        freed
    }

    /// Counts a trade. Returns true at every `period`th.
    pub(super) fn looks_due(&mut self, period: u32) -> bool {
        self.trades = (self.trades + 1) % period;
        self.trades == 0
    }

    /// Takes in the spare contexts that the caller created. Returns contexts to be dropped, as [`List::put_or_trade`]
    /// does.
    #[must_use]
    pub(super) fn adopt<R: Rules>(&mut self, depot: &Depot<T, R>, mut spares: Magazine<T>) -> Magazine<T> {
        let created = spares.len() + 1;
        depot.note_created(created);
        self.net += created as i64;
        self.loaded.append(&mut spares);
        // Creating a context may have put others into this list, more than this thread may keep.
        let freed = if self.loaded.len() > self.batch { self.give_loaded(depot) } else { Magazine::new() };
        self.batch = depot.stretched_length(self.stretch);
        self.publish(depot);
        freed
    }

    /// Gives everything away, because the thread ends. Returns contexts to be dropped, as [`List::put_or_trade`] does.
    #[must_use]
    pub(super) fn close<R: Rules>(&mut self, depot: &Depot<T, R>) -> Magazine<T> {
        if self.batch == 0 {
            return Magazine::new();
        }
        let mut freed = self.give_reserve(depot);
        if !self.loaded.is_empty() {
            freed.append(&mut self.give_loaded(depot));
        }
        self.publish(depot);
        depot.leave();
        self.batch = 0;
        freed
    }

    fn join<R: Rules>(&mut self, depot: &Depot<T, R>) {
        if self.batch == 0 {
            depot.join();
            self.batch = depot.batch_length();
        }
    }

    fn publish<R: Rules>(&mut self, depot: &Depot<T, R>) {
        let outstanding = self.net - (self.loaded.len() + self.reserve.len()) as i64;
        depot.note_in_flight(outstanding - self.published);
        self.published = outstanding;
    }
}
