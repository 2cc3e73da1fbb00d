//! A budget for the memory of requests' buffers, which all disks share.
//!
//! A guest decides how many requests need a buffer at the same time: for direct I/O at odd addresses, for
//! copy-on-write, for compressed clusters. Such a request takes a [`BufferGrant`] before its buffer. It waits in a task
//! until there is room, first come, first served. Requests without a buffer take no grant.
//!
//! Half of a budget is divided evenly among its accounts. An account's part is for that account alone, so a disk whose
//! storage hangs never takes another's. The other half is shared. An account may take from it as long as its share then
//! is no larger than the rest. So the first account leaves half of it, and there is always some room.
//!
//! A request may hold buffers of one [`BufferUse`] while it waits for one of a later use, never the other way. An
//! account that holds nothing of a use is granted one request of it, whatever its size. So nothing waits for ever,
//! because requests of the last use wait for storage only. But many accounts of a small budget may exceed it, each with
//! one request.

mod state;
#[cfg(test)]
mod tests;

use crate::pool::PooledPages;
use state::State;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// The purpose of a buffer. The holder of a buffer of an earlier use may wait for one of a later use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferUse {
    /// The surroundings of a write to a new cluster, copied from the layer below.
    Copy,
    /// A compressed cluster, and its decompressed data.
    Decompress,
    /// Memory for direct I/O in place of the guest's.
    Bounce,
}

/// The number of uses.
const USES: usize = 3;

/// The shortest and the longest piece of a request that can be split.
const PIECE_BYTES_MIN: usize = 64 << 10;
const PIECE_BYTES_MAX: usize = 1 << 20;

/// A budget, for all disks of a program. Clones are the same budget.
#[derive(Debug, Clone)]
pub struct BufferBudget {
    shared: Arc<Shared>,
}

/// The use of a budget, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BudgetStats {
    /// The budget.
    pub total_bytes: usize,
    /// The bytes that are granted at this moment.
    pub used_bytes: usize,
    /// The most bytes that were granted at once.
    pub peak_bytes: usize,
    /// Requests that wait for room at this moment.
    pub waiting: usize,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then wakes the requests that were granted.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let mut woken = state.take_woken();
        drop(state);
        if woken.is_empty() {
            return;
        }
        for waker in woken.drain(..) {
            waker.wake();
        }
        self.lock().keep_list(woken);
    }
}

impl BufferBudget {
    /// Makes a budget of `total_bytes`.
    #[must_use]
    pub fn new(total_bytes: usize) -> Self {
        Self { shared: Arc::new(Shared { state: Mutex::new(State::new(total_bytes)) }) }
    }

    /// Opens an account, one for each disk. Its part is free again when its last clone and the last buffer are gone.
    #[must_use]
    pub fn account(&self) -> BufferAccount {
        let id = self.shared.lock().open();
        BufferAccount { open: Some(Arc::new(Open { shared: Arc::clone(&self.shared), id })) }
    }

    /// Returns how much is in use.
    #[must_use]
    pub fn stats(&self) -> BudgetStats {
        self.shared.lock().stats()
    }
}

#[derive(Debug)]
struct Open {
    shared: Arc<Shared>,
    id: usize,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.shared.change(|state| state.close(self.id));
    }
}

/// A disk's part of a budget. Clones are the same account. The default is an account without limit.
#[derive(Debug, Clone, Default)]
pub struct BufferAccount {
    open: Option<Arc<Open>>,
}

impl PartialEq for BufferAccount {
    fn eq(&self, other: &Self) -> bool {
        match (&self.open, &other.open) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }
}

impl Eq for BufferAccount {}

impl BufferAccount {
    /// An account without limit.
    pub const UNLIMITED: Self = Self { open: None };

    /// Waits until there is room for `bytes`, first come first served. For buffers that are needed together, ask for
    /// the sum of [`BufferGrant::size_of`]. Waiting for one while holding another of the same use can last for ever.
    pub fn grant(&self, purpose: BufferUse, bytes: usize) -> impl Future<Output = BufferGrant> + use<> {
        Granting { account: self.clone(), purpose, bytes, ticket: None }
    }

    /// Returns the piece in which a long request should be served: a part of the account's own room, in bytes.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        let Some(open) = &self.open else { return PIECE_BYTES_MAX };
        let own = open.shared.lock().own_bytes().clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
        1 << own.ilog2()
    }
}

/// Room in a budget, for buffers or for other memory of about that size. Dropping it, on any thread, frees the room.
#[derive(Debug, Default)]
pub struct BufferGrant {
    /// The account, the use and the bytes; `None` without limit.
    held: Option<(Arc<Open>, BufferUse, usize)>,
}

impl BufferGrant {
    /// Returns how much memory a buffer of `length_bytes` takes: buffers come in a few sizes.
    #[must_use]
    pub fn size_of(length_bytes: usize) -> usize {
        PooledPages::size_of(length_bytes)
    }

    pub(crate) fn split(&mut self, bytes: usize) -> Self {
        let Some((open, purpose, held)) = &mut self.held else { return Self::default() };
        let part = bytes.min(*held);
        *held -= part;
        Self { held: Some((Arc::clone(open), *purpose, part)) }
    }
}

impl Drop for BufferGrant {
    fn drop(&mut self) {
        if let Some((open, purpose, bytes)) = self.held.take()
            && bytes > 0
        {
            open.shared.change(|state| state.release(open.id, purpose, bytes));
        }
    }
}

/// The future of [`BufferAccount::grant`]. It takes its place in the line at its first poll.
struct Granting {
    account: BufferAccount,
    purpose: BufferUse,
    bytes: usize,
    /// Its ticket while it waits.
    ticket: Option<u64>,
}

impl Future for Granting {
    type Output = BufferGrant;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BufferGrant> {
        let Some(open) = self.account.open.clone() else { return Poll::Ready(BufferGrant::default()) };
        let (purpose, bytes) = (self.purpose, self.bytes);
        let waits = {
            let mut state = open.shared.lock();
            match self.ticket {
                None => state.ask(open.id, purpose, bytes, context.waker()),
                Some(ticket) => state.still_waits(open.id, purpose, ticket, context.waker()).then_some(ticket),
            }
        };
        self.ticket = waits;
        match waits {
            Some(_) => Poll::Pending,
            None => Poll::Ready(BufferGrant { held: Some((open, purpose, bytes)) }),
        }
    }
}

impl Drop for Granting {
    fn drop(&mut self) {
        if let (Some(ticket), Some(open)) = (self.ticket, &self.account.open) {
            open.shared.change(|state| state.give_up(open.id, self.purpose, ticket, self.bytes));
        }
    }
}
