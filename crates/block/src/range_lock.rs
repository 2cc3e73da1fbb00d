//! Exclusive use of a range of offsets by one task at a time, across threads.
//!
//! Used where two slow operations on the same place must not mix, such as read-modify-writes of a block finer than the
//! file's alignment. Waiters are served in the order in which they came. Each is woken once, because a guest may have
//! thousands of writes to one block in flight. Ranges that do not overlap never wait for each other.

use crate::sync::{Mutex, MutexGuard, PoisonError};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Ranges that there is room for from the first lock on.
const ROOM: usize = 64;

/// Ranges that are held, or waited for.
#[derive(Debug, Default)]
pub struct RangeLocks {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In the order of their tickets.
    claims: VecDeque<Claim>,
    next_ticket: u64,
    /// An empty list, kept for reuse.
    spare: Vec<Waker>,
}

#[derive(Debug)]
struct Claim {
    ticket: u64,
    range: Range<u64>,
    /// The number of earlier claims that overlap with this one. The claim is held when there are none.
    before: usize,
    /// The task that waits for this claim.
    waker: Option<Waker>,
}

impl Claim {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

impl State {
    /// Adds a claim; returns its ticket and whether it is held at once.
    fn add(&mut self, range: Range<u64>, waker: Option<&Waker>) -> (u64, bool) {
        if self.claims.capacity() == 0 {
            self.claims.reserve_exact(ROOM);
            self.spare.reserve_exact(ROOM);
        }
        let before = self.claims.iter().filter(|claim| claim.overlaps(&range)).count();
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let waker = waker.filter(|_| before > 0).cloned();
        self.claims.push_back(Claim { ticket, range, before, waker });
        (ticket, before == 0)
    }

    fn place_of(&self, ticket: u64) -> Option<usize> {
        self.claims.binary_search_by_key(&ticket, |claim| claim.ticket).ok()
    }
}

impl RangeLocks {
    /// Waits until `range` is free, then holds it until the guard is dropped. To hold several ranges at once, a task
    /// takes one range that covers them: taking them one by one can deadlock.
    pub fn lock(&self, range: Range<u64>) -> Lock<'_> {
        Lock { locks: self, range, ticket: None }
    }

    /// Holds `range` if no claim, held or waiting, overlaps with it.
    pub fn try_lock(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        let mut state = self.state();
        if state.claims.iter().any(|claim| claim.overlaps(&range)) {
            return None;
        }
        let (ticket, _) = state.add(range, None);
        Some(RangeGuard { locks: self, ticket })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up a claim, held or not. Wakes those that then hold their ranges.
    fn give_up(&self, ticket: u64) {
        let mut state = self.state();
        let Some(place) = state.place_of(ticket) else { return };
        let Some(gone) = state.claims.remove(place) else { return };
        let mut woken = std::mem::take(&mut state.spare);
        for claim in state.claims.iter_mut().skip(place).filter(|claim| claim.overlaps(&gone.range)) {
            claim.before -= 1;
            if claim.before == 0 {
                woken.extend(claim.waker.take());
            }
        }
        drop(state);
        for waker in woken.drain(..) {
            waker.wake();
        }
        let mut state = self.state();
        if state.spare.capacity() < woken.capacity() {
            state.spare = woken;
        }
    }
}

/// The future of [`RangeLocks::lock`]. Its place in the queue is that of its first poll.
#[derive(Debug)]
pub struct Lock<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
    /// The claim, until the guard takes it over.
    ticket: Option<u64>,
}

impl<'a> Future for Lock<'a> {
    type Output = RangeGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RangeGuard<'a>> {
        let locks = self.locks;
        let mut state = locks.state();
        let (ticket, is_held) = match self.ticket {
            None => state.add(self.range.clone(), Some(context.waker())),
            Some(ticket) => {
                let claim = state.place_of(ticket).and_then(|place| state.claims.get_mut(place));
                let waits = claim.filter(|claim| claim.before > 0).map(|claim| {
                    if !claim.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                        claim.waker = Some(context.waker().clone());
                    }
                });
                (ticket, waits.is_none())
            }
        };
        drop(state);
        if is_held {
            self.ticket = None;
            return Poll::Ready(RangeGuard { locks, ticket });
        }
        self.ticket = Some(ticket);
        Poll::Pending
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.locks.give_up(ticket);
        }
    }
}

/// Holds a range until it is dropped, on any thread.
#[derive(Debug)]
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    ticket: u64,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        self.locks.give_up(self.ticket);
    }
}

#[cfg(all(test, not(feature = "explore")))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[test]
    fn overlapping_ranges_exclude_each_other_and_touching_ones_do_not() {
        let locks = RangeLocks::default();
        let first = locks.try_lock(0..10).unwrap();
        assert!(locks.try_lock(9..20).is_none());
        let second = locks.try_lock(10..20).unwrap();
        drop(first);
        assert!(locks.try_lock(5..11).is_none());
        drop(second);
        assert!(locks.try_lock(5..11).is_some());
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Wakes {
        fn count(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    struct Waiting<'a> {
        lock: Pin<Box<Lock<'a>>>,
        wakes: Arc<Wakes>,
    }

    impl<'a> Waiting<'a> {
        fn new(locks: &'a RangeLocks, range: Range<u64>) -> Self {
            Self { lock: Box::pin(locks.lock(range)), wakes: Arc::default() }
        }

        fn poll(&mut self) -> Option<RangeGuard<'a>> {
            let waker = Waker::from(Arc::clone(&self.wakes));
            match self.lock.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(guard) => Some(guard),
                Poll::Pending => None,
            }
        }
    }

    #[test]
    fn thousands_that_wait_for_one_range_are_served_in_their_order_and_woken_once_each() {
        let locks = RangeLocks::default();
        let mut held = locks.try_lock(0..512);
        let mut waiting: Vec<_> = (0..8192).map(|_| Waiting::new(&locks, 0..512)).collect();
        assert!(waiting.iter_mut().all(|each| each.poll().is_none()));
        for index in 0..waiting.len() {
            drop(held.take());
            assert_eq!(waiting[index].wakes.count(), 1);
            assert!(waiting.get(index + 1).is_none_or(|next| next.wakes.count() == 0), "the next is not woken yet");
            held = waiting[index].poll();
            assert!(held.is_some());
        }
        assert!(waiting.iter().all(|each| each.wakes.count() == 1));
    }

    #[test]
    fn who_comes_later_goes_ahead_only_where_nobody_waits() {
        let locks = RangeLocks::default();
        let held = locks.try_lock(0..10).unwrap();
        let mut wide = Waiting::new(&locks, 5..100);
        assert!(wide.poll().is_none());
        assert!(locks.try_lock(50..60).is_none(), "the wide one has come first");
        assert!(locks.try_lock(100..110).is_some());
        let mut narrow = Waiting::new(&locks, 50..60);
        assert!(narrow.poll().is_none());
        drop(held);
        assert_eq!((wide.wakes.count(), narrow.wakes.count()), (1, 0));
        let guard = wide.poll().unwrap();
        assert!(narrow.poll().is_none());
        drop(guard);
        assert!(narrow.poll().is_some());
    }

    #[test]
    fn who_gives_up_waiting_or_never_looks_again_holds_up_nobody() {
        let locks = RangeLocks::default();
        for is_granted in [false, true] {
            let held = locks.try_lock(0..10).unwrap();
            let (mut leaves, mut stays) = (Waiting::new(&locks, 0..10), Waiting::new(&locks, 0..10));
            assert!(leaves.poll().is_none() && stays.poll().is_none());
            match is_granted {
                true => {
                    drop(held);
                    assert_eq!((leaves.wakes.count(), stays.wakes.count()), (1, 0));
                    drop(leaves);
                }
                false => {
                    drop(leaves);
                    assert_eq!(stays.wakes.count(), 0);
                    drop(held);
                }
            }
            assert_eq!(stays.wakes.count(), 1);
            assert!(stays.poll().is_some());
        }
        assert!(locks.state().claims.is_empty());
    }
}
