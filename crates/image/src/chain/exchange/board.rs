//! What a disk's queues share with those who exchange its chain: the present chain, the present order, and which queues
//! have carried it out.

use super::lease::{Lease, Over};
use crate::chain::layer::Layer;
use crate::chain::layers::Chain;
use block::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, PoisonError};
use block::{Error, ErrorKind, Result, WaitList};
use std::any::Any;
use std::sync::Arc;

/// What queues do with new requests until they get the next chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// They begin them on the chain that they have.
    No,
    /// They keep them.
    Requests,
    /// They keep them, and let go of their chain when nothing is in flight any more.
    UntilQuiet,
}

/// An order to all queues of a disk.
#[derive(Clone)]
pub(crate) enum Order {
    /// Open the files that the next chain needs and this one has not. This may fail.
    Prepare { layers: Vec<Arc<Layer>>, hold: Hold },
    /// Begin new and held requests on this chain. This cannot fail.
    Adopt(Arc<Chain>, Arc<Lease>),
    /// Go on with the present chain.
    Resume(Arc<Lease>),
}

/// Wakes the queues that wait for orders, and those who wait for the queues' answers.
#[derive(Default)]
pub(crate) struct Bell {
    number: AtomicU64,
    announced: WaitList,
    answered: WaitList,
}

/// A queue's place on the board.
#[derive(Default)]
pub(crate) struct Seat {
    answered: AtomicU64,
    error: Mutex<Option<Error>>,
    is_gone: AtomicBool,
}

struct State {
    chain: Arc<Chain>,
    /// For queues that are being opened. `None` if they may begin nothing more on this chain.
    lease: Option<Arc<Lease>>,
    over: Arc<Over>,
    number: u64,
    /// What queues have prepared for, until they are told to adopt or resume.
    pending: Option<(Vec<Arc<Layer>>, Hold)>,
    order: Option<Order>,
    seats: Vec<Arc<Seat>>,
    is_taken: bool,
    /// How many write to the top layer past the queues.
    writers: usize,
}

/// The meeting point of a disk's queues and those who exchange its chain. See the module's documentation.
pub(crate) struct Board {
    bell: Arc<Bell>,
    state: Mutex<State>,
    freed: WaitList,
    /// No guest uses the disk any more, and none will.
    is_ending: AtomicBool,
    /// Values that could not be ended cleanly, kept as long as the disk.
    kept: Mutex<Vec<Box<dyn Any + Send>>>,
    /// For tests of the tests: the queue that is late, and how many new chains it misses.
    late: (AtomicU64, AtomicU64),
    #[cfg(all(test, feature = "explore"))]
    pub(crate) mutant: crate::online::explored_tests::Mutant,
}

/// The board as seen by a queue that is being opened.
pub(crate) struct Glance {
    pub(crate) chain: Arc<Chain>,
    pub(crate) lease: Option<Arc<Lease>>,
    pub(crate) pending: Option<(Vec<Arc<Layer>>, Hold)>,
    pub(crate) number: u64,
}

impl Board {
    pub(crate) fn new(chain: Chain) -> Arc<Self> {
        let lease = Lease::new();
        let over = lease.over();
        let state = State {
            chain: Arc::new(chain),
            lease: Some(lease),
            over,
            number: 0,
            pending: None,
            order: None,
            seats: Vec::new(),
            is_taken: false,
            writers: 0,
        };
        Arc::new(Self {
            bell: Arc::default(),
            state: Mutex::new(state),
            freed: WaitList::default(),
            is_ending: AtomicBool::new(false),
            kept: Mutex::default(),
            late: (AtomicU64::new(0), AtomicU64::new(0)),
            #[cfg(all(test, feature = "explore"))]
            mutant: crate::online::explored_tests::Mutant::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the present chain.
    pub(crate) fn chain(&self) -> Arc<Chain> {
        Arc::clone(&self.lock().chain)
    }

    /// Returns the end of all requests that began on the present chain. It comes after another chain was adopted.
    pub(crate) fn over(&self) -> Arc<Over> {
        Arc::clone(&self.lock().over)
    }

    pub(crate) fn bell(&self) -> Arc<Bell> {
        Arc::clone(&self.bell)
    }
}

/// The queues' side.
impl Board {
    pub(crate) fn glance(&self) -> Glance {
        let state = self.lock();
        Glance {
            chain: Arc::clone(&state.chain),
            lease: state.lease.clone(),
            pending: state.pending.clone(),
            number: state.number,
        }
    }

    /// Takes a seat if nothing was announced since `glance`.
    pub(crate) fn join(&self, glance: &Glance) -> Option<Attendance> {
        let mut state = self.lock();
        if state.number != glance.number {
            return None;
        }
        let seat = Arc::new(Seat { answered: AtomicU64::new(glance.number), ..Seat::default() });
        state.seats.push(Arc::clone(&seat));
        Some(Attendance { seat, bell: self.bell() })
    }

    /// For tests of the tests: makes one queue stay on its chain for the next `count` chains.
    pub(crate) fn miss_chains_for_test(&self, count: u64) {
        self.late.1.store(count, Ordering::Relaxed);
    }

    /// Whether the queue on this seat is the late one.
    pub(crate) fn is_late(&self, seat: &Arc<Seat>) -> bool {
        let me = Arc::as_ptr(seat).addr() as u64;
        let takes = |count: u64| count.checked_sub(1);
        if self.late.1.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let first = self.late.0.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed);
        let is_me = first.is_ok() || first == Err(me);
        is_me && self.late.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, takes).is_ok()
    }

    /// Returns the last order and its number.
    pub(crate) fn order(&self) -> (u64, Option<Order>) {
        let state = self.lock();
        (state.number, state.order.clone())
    }
}

impl Bell {
    /// Waits until there is an order after `seen`, or the queue is gone.
    pub(crate) async fn next(&self, seen: u64, seat: &Seat) {
        let news = || self.number.load(Ordering::Acquire) != seen || seat.is_gone.load(Ordering::Acquire);
        self.announced.until(|| news().then_some(())).await;
    }

    /// Notes that the queue takes part no more.
    pub(crate) fn leave(&self, seat: &Seat) {
        seat.is_gone.store(true, Ordering::Release);
        self.answered.wake_all();
        self.announced.wake_all();
    }

    /// Notes that the queue has carried out an order, or could not.
    pub(crate) fn answer(&self, seat: &Seat, number: u64, result: Result<()>) {
        if let Err(error) = result {
            seat.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        seat.answered.store(number, Ordering::Release);
        self.answered.wake_all();
    }
}

/// A queue's membership: it takes part as long as it keeps this.
pub(crate) struct Attendance {
    pub(crate) seat: Arc<Seat>,
    bell: Arc<Bell>,
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.bell.leave(&self.seat);
    }
}

/// The side of those who exchange the chain.
impl Board {
    /// Gives the queues an order and returns its number.
    pub(crate) fn announce(&self, order: Order) -> u64 {
        let mut state = self.lock();
        // Dropped after the lock is released: its end wakes others.
        let mut former = None;
        match &order {
            Order::Prepare { layers, hold } => {
                state.pending = Some((layers.clone(), *hold));
                if *hold == Hold::UntilQuiet {
                    former = state.lease.take();
                }
            }
            Order::Adopt(chain, lease) => {
                state.pending = None;
                state.chain = Arc::clone(chain);
                state.over = lease.over();
                former = state.lease.replace(Arc::clone(lease));
            }
            Order::Resume(lease) => {
                state.pending = None;
                state.over = lease.over();
                former = state.lease.replace(Arc::clone(lease));
            }
        }
        let stale = state.order.replace(order);
        state.number = state.number.saturating_add(1);
        let number = state.number;
        self.bell.number.store(number, Ordering::Release);
        drop(state);
        drop((former, stale));
        self.bell.announced.wake_all();
        number
    }

    /// Notes that no guest uses the disk any more, and that none will.
    pub(crate) fn ends(&self) {
        self.is_ending.store(true, Ordering::Release);
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Keeps a value as long as the disk is open.
    pub(crate) fn keep(&self, value: Box<dyn Any + Send>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(value);
    }

    /// Returns a lease with which queues may go on with the present chain.
    pub(crate) fn renewed_lease(&self) -> Arc<Lease> {
        Lease::renewed(&self.lock().over)
    }

    /// Waits until all queues have carried out the order with this number. Fails with the error of a queue that could
    /// not.
    pub(crate) async fn answered(&self, number: u64) -> Result<()> {
        self.bell.answered.until(|| self.look(number)).await
    }

    fn look(&self, number: u64) -> Option<Result<()>> {
        let mut state = self.lock();
        state.seats.retain(|seat| !seat.is_gone.load(Ordering::Acquire));
        if state.seats.iter().any(|seat| seat.answered.load(Ordering::Acquire) < number) {
            return None;
        }
        let error = |seat: &Arc<Seat>| seat.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        // All are taken: one that stayed would fail a later order.
        let errors: Vec<Error> = state.seats.iter().filter_map(error).collect();
        Some(errors.into_iter().next().map_or(Ok(()), Err))
    }

    /// Takes the right to exchange the chain. Refused while somebody else has the right or writes past the queues.
    pub(crate) fn try_turn(self: &Arc<Self>) -> Result<Turn> {
        let mut state = self.lock();
        let name = state.chain.layers.first().map(|top| top.name.to_string()).unwrap_or_default();
        let busy = |what: &str| Err(Error::new(ErrorKind::Locked, format!("'{name}': {what}; try again later")));
        if state.is_taken {
            return busy("the chain of this disk is being changed by a job (see 'ringdisk ctl jobs') or another call");
        }
        if state.writers > 0 {
            return busy("a job is writing to this disk past its queues");
        }
        state.is_taken = true;
        Ok(Turn(Arc::clone(self)))
    }

    /// As `try_turn`, but waits for others, and does not look at who writes past the queues.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn {
        self.freed.until(|| (!std::mem::replace(&mut self.lock().is_taken, true)).then(|| Turn(Arc::clone(self)))).await
    }

    /// Returns the present chain to somebody who writes to its top layer past the queues. Refused during an exchange.
    pub(crate) fn pin(self: &Arc<Self>) -> Result<(Arc<Chain>, Pin)> {
        let mut state = self.lock();
        if state.is_taken {
            return Err(Error::new(ErrorKind::Locked, "the chain of this disk is being changed; try again later"));
        }
        state.writers = state.writers.saturating_add(1);
        Ok((Arc::clone(&state.chain), Pin(Arc::clone(self))))
    }
}

/// The right to exchange the chain. Dropping it gives the right back.
pub(crate) struct Turn(Arc<Board>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.lock().is_taken = false;
        self.0.freed.wake_all();
    }
}

/// Keeps the chain from being exchanged until dropped.
pub(crate) struct Pin(Arc<Board>);

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.writers = state.writers.saturating_sub(1);
    }
}
