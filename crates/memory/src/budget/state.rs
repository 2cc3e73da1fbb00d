//! Who has how much, and who waits.

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
    /// Of the account's own part.
    own_used: usize,
    /// Of the part that all share.
    shared_used: usize,
    /// How much is held of each use.
    held: [usize; USES],
    waiting: [VecDeque<Waiting>; USES],
}

impl Account {
    fn waits(&self) -> bool {
        self.waiting.iter().any(|line| !line.is_empty())
    }
}

/// See the module above.
#[derive(Debug)]
pub(super) struct State {
    total_bytes: usize,
    shared_used: usize,
    used: usize,
    peak: usize,
    accounts: Vec<Account>,
    /// Places of accounts that were closed.
    free: Vec<usize>,
    open: usize,
    next_ticket: u64,
    /// Accounts in which somebody waits, served in turn.
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

    /// Nobody holds or wants anything of it any more. The parts of all others grow.
    pub(super) fn close(&mut self, index: usize) {
        self.accounts[index].is_open = false;
        self.open -= 1;
        self.free.push(index);
        self.serve_all();
    }

    /// What an account has for itself.
    pub(super) fn own_bytes(&self) -> usize {
        self.total_bytes / 2 / self.open.max(1)
    }

    /// Takes `bytes` if there is room and nobody is before; otherwise the ticket with which the request waits.
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

    /// Whether it waits: who does not was granted what it asked for.
    pub(super) fn still_waits(&mut self, index: usize, purpose: BufferUse, ticket: u64, waker: &Waker) -> bool {
        let line = &mut self.accounts[index].waiting[purpose as usize];
        let place = line.binary_search_by_key(&ticket, |waiting| waiting.ticket);
        if let Some(waiting) = place.ok().and_then(|place| line.get_mut(place)) {
            waiting.waker.clone_from(waker);
            return true;
        }
        false
    }

    /// Who asked has gone, perhaps after it was granted.
    pub(super) fn give_up(&mut self, index: usize, purpose: BufferUse, ticket: u64, bytes: usize) {
        let line = &mut self.accounts[index].waiting[purpose as usize];
        match line.binary_search_by_key(&ticket, |waiting| waiting.ticket) {
            Ok(place) => {
                line.remove(place);
                // Those behind it may be shorter.
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

    /// Grants what there is room for by now, an account after the other, one request at a time.
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

    /// Grants the first request of one use. Later uses go first: others may wait for them.
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

    /// Those to be woken, when the state is not locked any more.
    pub(super) fn take_woken(&mut self) -> Vec<Waker> {
        if self.woken.is_empty() { Vec::new() } else { std::mem::take(&mut self.woken) }
    }

    /// Keeps an empty list for the next time.
    pub(super) fn keep_list(&mut self, list: Vec<Waker>) {
        if self.woken.capacity() < list.capacity() && self.woken.is_empty() {
            self.woken = list;
        }
    }
}
