//! The state of a budget: the bytes that each account holds, and the requests that wait.

use super::{BudgetStats, BufferUse, USES};
use std::collections::VecDeque;
use std::task::Waker;

/// A request that waits.
#[derive(Debug)]
struct Waiting {
    ticket: u64,
    bytes: usize,
    waker: Waker,
}

#[derive(Debug, Default)]
struct Account {
    is_open: bool,
    /// Bytes used of the account's own part.
    own_used: usize,
    /// Bytes used of the part that all share.
    shared_used: usize,
    /// Bytes held of each use.
    held: [usize; USES],
    waiting: [VecDeque<Waiting>; USES],
}

impl Account {
    fn waits(&self) -> bool {
        self.waiting.iter().any(|line| !line.is_empty())
    }
}

/// The state of a [`BufferBudget`](super::BufferBudget).
#[derive(Debug)]
pub(super) struct State {
    total_bytes: usize,
    shared_used: usize,
    used: usize,
    peak: usize,
    accounts: Vec<Account>,
    /// Free places in `accounts`, of closed accounts.
    free: Vec<usize>,
    open: usize,
    next_ticket: u64,
    /// Accounts with waiting requests, served in turn.
    line: VecDeque<usize>,
    woken: Vec<Waker>,
}

impl State {
    pub(super) fn new(total_bytes: usize) -> Self {
        Self {
            total_bytes,
            shared_used: 0,
            used: 0,
            peak: 0,
            accounts: Vec::new(),
            free: Vec::new(),
            open: 0,
            next_ticket: 0,
            line: VecDeque::new(),
            woken: Vec::new(),
        }
    }

    pub(super) fn stats(&self) -> BudgetStats {
        let lines = self.accounts.iter().flat_map(|account| &account.waiting);
        BudgetStats {
            total_bytes: self.total_bytes,
            used_bytes: self.used,
            peak_bytes: self.peak,
            waiting: lines.map(VecDeque::len).sum(),
        }
    }

    pub(super) fn open(&mut self) -> usize {
        self.open += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.accounts.push(Account::default());
            self.accounts.len() - 1
        });
        self.accounts[index].is_open = true;
        index
    }

    /// Closes an account that holds nothing and has no waiting requests. The parts of all others grow.
    pub(super) fn close(&mut self, index: usize) {
        self.accounts[index].is_open = false;
        self.open -= 1;
        self.free.push(index);
        self.serve_all();
    }

    /// Returns the bytes that each account has for itself.
    pub(super) fn own_bytes(&self) -> usize {
        self.total_bytes / 2 / self.open.max(1)
    }

    /// Takes `bytes` if there is room and no request of the account waits for the same use. Otherwise adds the request
    /// to the line and returns its ticket.
    pub(super) fn ask(&mut self, index: usize, purpose: BufferUse, bytes: usize, waker: &Waker) -> Option<u64> {
        if self.accounts[index].waiting[purpose as usize].is_empty() && self.take(index, purpose, bytes) {
            return None;
        }
        if !self.accounts[index].waits() {
            self.line.push_back(index);
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let waiting = Waiting { ticket, bytes, waker: waker.clone() };
        self.accounts[index].waiting[purpose as usize].push_back(waiting);
        Some(ticket)
    }

    /// Whether the request still waits. If not, it was granted.
    pub(super) fn still_waits(&mut self, index: usize, purpose: BufferUse, ticket: u64, waker: &Waker) -> bool {
        let line = &mut self.accounts[index].waiting[purpose as usize];
        let place = line.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        if let Some(waiting) = place.ok().and_then(|place| line.get_mut(place)) {
            waiting.waker.clone_from(waker);
            return true;
        }
        false
    }

    /// Removes a request whose future was dropped, perhaps after it was granted.
    pub(super) fn give_up(&mut self, index: usize, purpose: BufferUse, ticket: u64, bytes: usize) {
        let line = &mut self.accounts[index].waiting[purpose as usize];
        match line.binary_search_by_key(&ticket, |waiting| waiting.ticket) {
            Ok(place) => {
                line.remove(place);
                // The requests behind it may be smaller.
                self.serve_all();
            }
            Err(_) => self.release(index, purpose, bytes),
        }
    }

    pub(super) fn release(&mut self, index: usize, purpose: BufferUse, bytes: usize) {
        let account = &mut self.accounts[index];
        let from_shared = bytes.min(account.shared_used);
        account.shared_used -= from_shared;
        account.own_used -= bytes - from_shared;
        account.held[purpose as usize] -= bytes;
        self.shared_used -= from_shared;
        self.used -= bytes;
        self.serve_all();
    }

    /// Takes `bytes` for an account if there is room.
    fn take(&mut self, index: usize, purpose: BufferUse, bytes: usize) -> bool {
        let own_bytes = self.own_bytes();
        let account = &mut self.accounts[index];
        let from_own = bytes.min(own_bytes.saturating_sub(account.own_used));
        let from_shared = bytes - from_own;
        let shared_left = (self.total_bytes / 2).saturating_sub(self.shared_used);
        let fits = from_shared == 0 || account.shared_used + from_shared <= shared_left.saturating_sub(from_shared);
        if !fits && account.held[purpose as usize] > 0 {
            return false;
        }
        account.own_used += from_own;
        account.shared_used += from_shared;
        account.held[purpose as usize] += bytes;
        self.shared_used += from_shared;
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        true
    }

    /// Grants requests as far as there is room, one at a time, account by account.
    fn serve_all(&mut self) {
        let mut refused = 0;
        while refused < self.line.len()
            && let Some(index) = self.line.pop_front()
        {
            refused = if self.serve_one(index) { 0 } else { refused + 1 };
            if self.accounts[index].waits() {
                self.line.push_back(index);
            }
        }
    }

    /// Grants an account's first request of one use. Later uses go first, because holders of earlier ones may wait for
    /// them.
    fn serve_one(&mut self, index: usize) -> bool {
        for purpose in [BufferUse::Bounce, BufferUse::Decompress, BufferUse::Copy] {
            let first = self.accounts[index].waiting[purpose as usize].front();
            let Some(bytes) = first.map(|waiting| waiting.bytes) else { continue };
            if self.take(index, purpose, bytes) {
                let granted = self.accounts[index].waiting[purpose as usize].pop_front();
                self.woken.extend(granted.map(|waiting| waiting.waker));
                return true;
            }
        }
        false
    }

    /// Takes the wakers, to be called when the state is unlocked.
    pub(super) fn take_woken(&mut self) -> Vec<Waker> {
        if self.woken.is_empty() { Vec::new() } else { std::mem::take(&mut self.woken) }
    }

    /// Keeps an empty list to be used again.
    pub(super) fn keep_list(&mut self, list: Vec<Waker>) {
        if self.woken.capacity() < list.capacity() && self.woken.is_empty() {
            self.woken = list;
        }
    }
}
