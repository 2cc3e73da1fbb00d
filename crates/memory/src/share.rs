//! Limits the mappings of each peer: a share of its own, whatever others do, and more while there is room.
//!
//! A process can have only so many mappings, and the guard against files that shrink ([`crate::fault`]) has a table of
//! fixed size. Address space is finite, too. A peer decides how it cuts its memory, and may be hostile. So its mappings
//! count in a share of its own.

use crate::fault::MAX_MAPPINGS;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The share set aside for each peer: more regions than monitors use by default, and the memory of a common guest. Both
/// are doubled, because a new table is mapped before the old one goes.
const SET_ASIDE: Amount = Amount { mappings: 32, bytes: 48 << 30 };

/// The limit of all that is set aside, and also of all that peers together take beyond their shares. The rest is for
/// files of our own.
const MOST: Amount = Amount { mappings: MAX_MAPPINGS * 7 / 16, bytes: 3 << 43 };

/// Mappings and their bytes of address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Amount {
    mappings: usize,
    bytes: u64,
}

impl Amount {
    fn plus(self, other: Self) -> Self {
        Self { mappings: self.mappings.saturating_add(other.mappings), bytes: self.bytes.saturating_add(other.bytes) }
    }

    fn minus(self, other: Self) -> Self {
        Self { mappings: self.mappings.saturating_sub(other.mappings), bytes: self.bytes.saturating_sub(other.bytes) }
    }

    fn fits(self, limit: Self) -> bool {
        self.mappings <= limit.mappings && self.bytes <= limit.bytes
    }
}

#[derive(Debug, Default)]
struct Budget {
    state: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    set_aside: Amount,
    beyond: Amount,
}

static BUDGET: Budget = Budget { state: Mutex::new(Taken { set_aside: NOTHING, beyond: NOTHING }) };
const NOTHING: Amount = Amount { mappings: 0, bytes: 0 };

impl Budget {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One peer's share, given back on drop.
#[derive(Debug)]
pub struct MappingShare {
    budget: &'static Budget,
    used: Mutex<Amount>,
}

impl MappingShare {
    /// Sets a share aside. Fails if too many shares are in use.
    pub fn new() -> io::Result<Arc<Self>> {
        Self::of(&BUDGET)
    }

    fn of(budget: &'static Budget) -> io::Result<Arc<Self>> {
        let mut taken = budget.lock();
        let set_aside = taken.set_aside.plus(SET_ASIDE);
        if !set_aside.fits(MOST) {
            let message = format!("more than {} exports at once", MOST.mappings / SET_ASIDE.mappings);
            return Err(io::Error::other(message));
        }
        taken.set_aside = set_aside;
        Ok(Arc::new(Self { budget, used: Mutex::default() }))
    }

    /// Takes a mapping of `bytes`. Fails if both the share and the common part for all peers are used up.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> io::Result<ShareOfMapping> {
        let amount = Amount { mappings: 1, bytes };
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, after) = (used.minus(SET_ASIDE), used.plus(amount).minus(SET_ASIDE));
        let mut taken = self.budget.lock();
        let beyond = taken.beyond.minus(before).plus(after);
        if after != NOTHING && !beyond.fits(MOST) {
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!(
                    "this peer has mapped {} regions of {} bytes, and all peers together too much to allow it more",
                    used.mappings, used.bytes
                ),
            ));
        }
        taken.beyond = beyond;
        *used = used.plus(amount);
        Ok(ShareOfMapping { share: Arc::clone(self), amount })
    }
}

impl Drop for MappingShare {
    fn drop(&mut self) {
        let mut taken = self.budget.lock();
        taken.set_aside = taken.set_aside.minus(SET_ASIDE);
    }
}

/// One mapping's part of a share, given back on drop.
#[derive(Debug)]
pub(crate) struct ShareOfMapping {
    share: Arc<MappingShare>,
    amount: Amount,
}

impl Drop for ShareOfMapping {
    fn drop(&mut self) {
        let mut used = self.share.used.lock().unwrap_or_else(PoisonError::into_inner);
        let before = used.minus(SET_ASIDE);
        *used = used.minus(self.amount);
        let mut taken = self.share.budget.lock();
        taken.beyond = taken.beyond.minus(before).plus(used.minus(SET_ASIDE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget() -> &'static Budget {
        Box::leak(Box::default())
    }

    fn take(share: &Arc<MappingShare>, count: usize, bytes: u64) -> Vec<ShareOfMapping> {
        std::iter::repeat_with(|| share.take(bytes)).map_while(Result::ok).take(count).collect()
    }

    #[test]
    fn a_peer_gets_what_is_set_aside_for_it_whatever_others_have_taken() {
        let budget = budget();
        let greedy: Vec<_> = (0..3).map(|_| MappingShare::of(budget).unwrap()).collect();
        for (count, bytes) in [(usize::MAX, 4096), (100, MOST.bytes / 100)] {
            let taken: Vec<_> = greedy.iter().map(|share| take(share, count, bytes)).collect();
            assert!(greedy[0].take(bytes).is_err(), "all there is beyond the shares is taken");
            let late = MappingShare::of(budget).unwrap();
            let mine = take(&late, SET_ASIDE.mappings, SET_ASIDE.bytes / 32);
            assert_eq!(mine.len(), SET_ASIDE.mappings);
            assert_eq!(late.take(bytes).unwrap_err().kind(), io::ErrorKind::OutOfMemory);
            drop(taken);
            assert!(late.take(1).is_ok(), "what was given back is there for others");
        }
        drop(greedy);
        let left = budget.lock();
        assert_eq!((left.set_aside, left.beyond), (NOTHING, NOTHING));
    }

    #[test]
    fn shares_are_set_aside_only_as_long_as_there_is_something() {
        let budget = budget();
        let shares: Vec<_> = std::iter::repeat_with(|| MappingShare::of(budget)).map_while(Result::ok).collect();
        assert!(shares.len() >= 256, "{}", shares.len());
        assert!(MappingShare::of(budget).is_err());
        drop(shares);
        assert!(MappingShare::of(budget).is_ok());
    }
}
