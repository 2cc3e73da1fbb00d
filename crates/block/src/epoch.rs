//! Decides when a freed host cluster may be used again: only after every operation that was resolved before the free
//! has completed, on every queue. Otherwise a write in flight would land in other data.
//!
//! Each queue is a [`Participant`] and publishes the epoch of its oldest operation in flight. Retiring a cluster
//! advances the image's epoch and notes the old one. The cluster is safe once no queue publishes that epoch or an older
//! one. An operation begun while others are in flight costs two loads; only the step from idle to busy costs a fence.

use crate::sync::{AtomicU64, Mutex, Ordering, PoisonError, fence};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

const IDLE: u64 = u64::MAX;
/// Epochs with operations in flight that a queue has room for from the beginning.
const ROOM: usize = 16;

#[derive(Debug)]
struct Published {
    /// The oldest epoch with an operation in flight, or [`IDLE`].
    oldest: AtomicU64,
}

/// The epochs of one image.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicU64,
    participants: Mutex<Vec<Weak<Published>>>,
    pins: Arc<Mutex<Pins>>,
    /// The number of calls of [`Epochs::overrule`], or [`CLOSED`].
    overruled: Arc<AtomicU64>,
}

const CLOSED: u64 = u64::MAX;

/// Epochs that something holds that is no queue, oldest first, and how many hold each.
#[derive(Debug, Default)]
struct Pins(VecDeque<(u64, usize)>);

/// A place in the epochs for a user that is no queue. It serves once, and allocates nothing. See [`Epochs::pin`].
#[derive(Debug)]
pub struct EpochPin {
    pins: Arc<Mutex<Pins>>,
    epoch: u64,
}

impl Drop for EpochPin {
    fn drop(&mut self) {
        let Pins(held) = &mut *self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(index) = held.binary_search_by_key(&self.epoch, |(epoch, _)| *epoch)
            && let Some((_, count)) = held.get_mut(index)
        {
            *count = count.saturating_sub(1);
        }
        while held.front().is_some_and(|(_, count)| *count == 0) {
            held.pop_front();
        }
    }
}

/// The promise that space is not used again while an operation is in flight. See [`Epochs::promise`].
#[derive(Debug)]
pub struct Promise {
    given: u64,
    overruled: Arc<AtomicU64>,
}

impl Promise {
    /// Whether everything that the operation has read so far is right: its space was not used again.
    pub fn is_kept(&self) -> bool {
        fence(Ordering::SeqCst);
        self.overruled.load(Ordering::SeqCst) == self.given
    }
}

impl Epochs {
    /// Adds a queue.
    pub fn join(&self) -> Participant {
        let published = Arc::new(Published { oldest: AtomicU64::new(IDLE) });
        let mut participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        participants.retain(|other| other.strong_count() > 0);
        participants.push(Arc::downgrade(&published));
        Participant { published, newest: 0, in_newest: 0, older: VecDeque::with_capacity(ROOM) }
    }

    /// Holds the current epoch until the pin is dropped. Call it before looking anything up.
    #[must_use]
    pub fn pin(&self) -> EpochPin {
        let Pins(held) = &mut *self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        // Ordered with `retire` and `is_over` by the lock: either `is_over` sees this pin, or this pin comes later, and
        // its owner sees the mapping as it is after the free. Read under the lock, so the epochs here only grow.
        let epoch = self.now.load(Ordering::SeqCst);
        match held.back_mut() {
            Some((last, count)) if *last == epoch => *count += 1,
            _ => held.push_back((epoch, 1)),
        }
        EpochPin { pins: Arc::clone(&self.pins), epoch }
    }

    /// Ends the current epoch and returns it. Call this after unpublishing a mapping. Its space may be used again once
    /// [`Epochs::is_over`] is true for the returned epoch.
    pub fn retire(&self) -> u64 {
        let epoch = self.now.fetch_add(1, Ordering::SeqCst);
        // Orders the unpublishing before the look at the queues. The other half is the fence in `Participant::begin`.
        fence(Ordering::SeqCst);
        epoch
    }

    /// Makes a promise for an operation that the closing of the image does not wait for. Call it before the operation
    /// begins. `None` if the image is closed.
    pub fn promise(&self) -> Option<Promise> {
        let given = self.overruled.load(Ordering::SeqCst);
        (given != CLOSED).then(|| Promise { given, overruled: Arc::clone(&self.overruled) })
    }

    /// Allows reusing space although operations in flight rely on it. Those operations fail.
    pub fn overrule(&self) {
        let more = |overruled: u64| Some(if overruled == CLOSED { CLOSED } else { overruled.saturating_add(1) });
        // The closure always returns a value.
        let _ = self.overruled.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        fence(Ordering::SeqCst);
    }

    /// Closes the image, because another user is going to change it. No new promise is made, and operations in flight
    /// fail.
    pub fn close(&self) {
        self.overruled.store(CLOSED, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether no operation resolved in `epoch` or before is still in flight.
    pub fn is_over(&self, epoch: u64) -> bool {
        let Pins(held) = &*self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if held.front().is_some_and(|(oldest, _)| *oldest <= epoch) {
            return false;
        }
        let participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        participants.iter().filter_map(Weak::upgrade).all(|other| other.oldest.load(Ordering::SeqCst) > epoch)
    }
}

/// Given to an operation when it begins, given back when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(u64);

/// One queue's part. If it is dropped with operations in flight, those count as ended. So a queue that goes away before
/// its operations leaves its part in their sink ([`crate::Sink::keep`]).
#[derive(Debug)]
pub struct Participant {
    published: Arc<Published>,
    /// The epoch of the newest operation, and the number of operations in flight in it.
    newest: u64,
    in_newest: usize,
    /// Older epochs with operations in flight, oldest first, and the number of operations in each.
    older: VecDeque<(u64, usize)>,
}

impl Participant {
    /// Notes that an operation begins. Call it before looking anything up for the operation.
    #[inline]
    pub fn begin(&mut self, epochs: &Epochs) -> Ticket {
        let now = epochs.now.load(Ordering::Acquire);
        if self.in_newest == 0 || self.newest != now {
            self.begin_first_of(now);
        }
        self.in_newest += 1;
        Ticket(now)
    }

    fn begin_first_of(&mut self, now: u64) {
        if self.in_newest > 0 {
            self.older.push_back((self.newest, self.in_newest));
            self.in_newest = 0;
        } else if self.older.is_empty() {
            // Sequentially consistent with `retire` and `is_over`: either the retirer sees this queue as busy, or this
            // queue sees the mapping as it is after the free. Publishing an epoch that is already over only delays
            // reuse.
            self.published.oldest.store(now, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
        self.newest = now;
    }

    /// Notes that an operation has ended: no part of it is in flight.
    #[inline]
    pub fn end(&mut self, ticket: Ticket) {
        if ticket.0 == self.newest {
            self.in_newest = self.in_newest.saturating_sub(1);
            if self.in_newest == 0 && self.older.is_empty() {
                self.published.oldest.store(IDLE, Ordering::Release);
            }
        } else {
            self.end_older(ticket);
        }
    }

    fn end_older(&mut self, ticket: Ticket) {
        if let Some((_, count)) = self.older.iter_mut().find(|(epoch, _)| *epoch == ticket.0) {
            *count = count.saturating_sub(1);
        }
        let mut moved = false;
        while self.older.front().is_some_and(|(_, count)| *count == 0) {
            self.older.pop_front();
            moved = true;
        }
        if moved {
            let newest = if self.in_newest > 0 { self.newest } else { IDLE };
            let oldest = self.older.front().map_or(newest, |(epoch, _)| *epoch);
            self.published.oldest.store(oldest, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_broken_by_whoever_does_not_wait_and_none_is_given_once_closed() {
        let epochs = Epochs::default();
        let first = epochs.promise().unwrap();
        assert!(first.is_kept());
        epochs.overrule();
        let second = epochs.promise().unwrap();
        assert!(!first.is_kept() && second.is_kept());
        epochs.close();
        epochs.overrule();
        assert!(!second.is_kept() && epochs.promise().is_none());
    }

    #[test]
    fn a_retired_epoch_is_over_only_when_every_older_operation_has_ended() {
        let epochs = Epochs::default();
        let (mut one, mut two) = (epochs.join(), epochs.join());
        let old = one.begin(&epochs);
        let newer_same_epoch = two.begin(&epochs);
        let retired = epochs.retire();
        let after = one.begin(&epochs);
        assert!(!epochs.is_over(retired));
        one.end(old);
        assert!(!epochs.is_over(retired));
        two.end(newer_same_epoch);
        assert!(epochs.is_over(retired), "an operation begun after the free does not hold it back");
        one.end(after);
    }

    #[test]
    fn a_pin_holds_its_epoch_and_all_later_ones_until_it_is_dropped() {
        let epochs = Epochs::default();
        let before = epochs.retire();
        let (first, second) = (epochs.pin(), epochs.pin());
        let retired = epochs.retire();
        let later = epochs.pin();
        let retired_later = epochs.retire();
        assert!(epochs.is_over(before) && !epochs.is_over(retired) && !epochs.is_over(retired_later));
        drop(first);
        assert!(!epochs.is_over(retired));
        drop(later);
        assert!(!epochs.is_over(retired) && !epochs.is_over(retired_later), "the second pin is older");
        drop(second);
        assert!(epochs.is_over(retired) && epochs.is_over(retired_later));
        drop(epochs.pin());
        assert!(epochs.is_over(epochs.retire()));
    }

    #[test]
    fn operations_may_end_in_any_order() {
        let epochs = Epochs::default();
        let mut queue = epochs.join();
        let first = queue.begin(&epochs);
        let retired = epochs.retire();
        let second = queue.begin(&epochs);
        let retired_later = epochs.retire();
        queue.end(second);
        assert!(!epochs.is_over(retired));
        queue.end(first);
        assert!(epochs.is_over(retired) && epochs.is_over(retired_later));
    }

    #[test]
    fn what_a_queue_publishes_is_the_oldest_epoch_that_it_has_in_flight() {
        let epochs = Epochs::default();
        let mut queue = epochs.join();
        let (mut in_flight, mut state, mut older_alone) = (Vec::new(), 1u64, 0);
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (what, which) = (state >> 60, (state >> 32) as usize);
            match what {
                0..3 => drop(epochs.retire()),
                // In turns mostly more and mostly fewer.
                3..9 if (state >> 56) % 16 < 8 || in_flight.len() < 2 => in_flight.push(queue.begin(&epochs)),
                _ if !in_flight.is_empty() => queue.end(in_flight.swap_remove(which % in_flight.len())),
                _ => {}
            }
            let oldest = in_flight.iter().map(|ticket| ticket.0).min().unwrap_or(IDLE);
            assert_eq!(queue.published.oldest.load(Ordering::SeqCst), oldest);
            older_alone += usize::from(oldest != IDLE && queue.in_newest == 0);
        }
        assert!(older_alone > 100, "{older_alone}");
    }

    #[test]
    fn a_queue_that_is_gone_holds_nothing_back() {
        let epochs = Epochs::default();
        let mut queue = epochs.join();
        queue.begin(&epochs);
        let retired = epochs.retire();
        drop(queue);
        assert!(epochs.is_over(retired));
    }
}
