use super::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

const MIB: usize = 1 << 20;

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

type Asked = Pin<Box<dyn Future<Output = BufferGrant>>>;

struct Request {
    future: Asked,
    wakes: Arc<Wakes>,
}

impl Request {
    fn new(account: &BufferAccount, purpose: BufferUse, bytes: usize) -> Self {
        Self { future: Box::pin(account.grant(purpose, bytes)), wakes: Arc::default() }
    }

    fn poll(&mut self) -> Option<BufferGrant> {
        let waker = Waker::from(Arc::clone(&self.wakes));
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(grant) => Some(grant),
            Poll::Pending => None,
        }
    }

    fn was_woken(&self) -> bool {
        self.wakes.0.load(Ordering::Relaxed) > 0
    }
}

/// Takes mebibytes until one has to wait; returns what was granted, and the one that waits.
fn fill(account: &BufferAccount) -> (Vec<BufferGrant>, Request) {
    let mut granted = Vec::new();
    loop {
        let mut next = Request::new(account, BufferUse::Bounce, MIB);
        match next.poll() {
            Some(grant) => granted.push(grant),
            None => return (granted, next),
        }
    }
}

#[test]
fn who_waits_is_served_in_the_order_of_coming_and_woken_once() {
    let budget = BufferBudget::new(16 * MIB);
    let account = budget.account();
    let (mut granted, first) = fill(&account);
    let mut waiting = VecDeque::from([first]);
    for _ in 0..100 {
        let mut next = Request::new(&account, BufferUse::Bounce, MIB);
        assert!(next.poll().is_none());
        waiting.push_back(next);
    }
    assert_eq!(budget.stats().waiting, 101);
    while let Some(mut next) = waiting.pop_front() {
        assert!(next.poll().is_none() && !next.was_woken());
        granted.pop();
        assert!(next.was_woken() && waiting.front().is_none_or(|behind| !behind.was_woken()));
        granted.push(next.poll().unwrap());
    }
    let used_bytes = granted.len() * MIB;
    let stats = BudgetStats { total_bytes: 16 * MIB, used_bytes, peak_bytes: used_bytes, waiting: 0 };
    assert_eq!(budget.stats(), stats);
    drop(granted);
    assert_eq!(budget.stats().used_bytes, 0);
}

#[test]
fn a_disk_that_gives_nothing_back_leaves_others_their_own_part_and_half_of_what_is_shared() {
    let budget = BufferBudget::new(64 * MIB);
    let (hung, other) = (budget.account(), budget.account());
    let (held, _waits) = fill(&hung);
    assert_eq!(held.len(), 16 + 16, "its own quarter, and half of the shared half");
    let (others, _waits_too) = fill(&other);
    assert_eq!(others.len(), 16 + 8);
    assert!(budget.stats().peak_bytes <= 64 * MIB);
    // However many accounts hang, each new one has its own part.
    let hung: Vec<_> = (0..30).map(|_| budget.account()).collect();
    let _held: Vec<_> = hung.iter().map(fill).collect();
    let late = budget.account();
    assert!(late.piece_bytes() >= 512 << 10);
    for _ in 0..3 {
        assert!(Request::new(&late, BufferUse::Bounce, late.piece_bytes()).poll().is_some());
    }
}

#[test]
fn a_disk_alone_has_most_of_the_budget_until_another_comes() {
    let budget = BufferBudget::new(64 * MIB);
    let first = budget.account();
    let (mut held, mut waits) = fill(&first);
    assert_eq!(held.len(), 32 + 16);
    let second = budget.account();
    let (others, mut others_wait) = fill(&second);
    assert!(others.len() >= 8, "there is room at once: {}", others.len());
    // The first gives back, the second gets it, until both have the same.
    while others_wait.poll().is_none() {
        assert!(waits.poll().is_none());
        held.pop().unwrap();
    }
    assert!(held.len() >= 24, "{}", held.len());
}

#[test]
fn a_request_above_every_limit_is_served_alone() {
    let budget = BufferBudget::new(MIB);
    let account = budget.account();
    let large = Request::new(&account, BufferUse::Decompress, 6 * MIB).poll().unwrap();
    let mut second = Request::new(&account, BufferUse::Decompress, 6 * MIB);
    assert!(second.poll().is_none());
    // Its own request does not wait behind the others of its kind.
    assert!(Request::new(&account, BufferUse::Bounce, 2 * MIB).poll().is_some());
    drop(large);
    assert!(second.was_woken() && second.poll().is_some());
    assert_eq!(BufferAccount::UNLIMITED.piece_bytes(), MIB);
    assert!(Request::new(&BufferAccount::default(), BufferUse::Copy, usize::MAX).poll().is_some());
}

#[test]
fn who_gives_up_leaves_nothing_behind() {
    let budget = BufferBudget::new(8 * MIB);
    let account = budget.account();
    let (mut held, first) = fill(&account);
    let mut second = Request::new(&account, BufferUse::Bounce, MIB);
    assert!(second.poll().is_none());
    held.pop();
    assert!(first.was_woken());
    // Granted, and dropped before it has looked.
    drop(first);
    assert!(second.was_woken());
    let mut third = Request::new(&account, BufferUse::Bounce, MIB);
    assert!(third.poll().is_none());
    drop((second, third, held, account));
    assert_eq!((budget.stats().used_bytes, budget.stats().waiting), (0, 0));
    let alone = budget.account();
    assert_eq!(fill(&alone).0.len(), 4 + 2, "parts of closed accounts are free");
}

#[test]
fn a_buffer_keeps_its_part_of_the_grant_as_long_as_it_lives() {
    let budget = BufferBudget::new(8 * MIB);
    let account = budget.account();
    let mut grant = Request::new(&account, BufferUse::Copy, 3 << 20).poll().unwrap();
    let small = grant.buffer(5000).unwrap().whole();
    let large = grant.buffer(MIB + 1).unwrap();
    assert_eq!((BufferGrant::size_of(5000), BufferGrant::size_of(MIB + 1)), (16 << 10, MIB + 1));
    drop(grant);
    assert_eq!(budget.stats().used_bytes, (16 << 10) + MIB + 1);
    let part = small.slice(1, 2);
    drop((small, large));
    assert_eq!(budget.stats().used_bytes, 16 << 10);
    drop(part);
    assert_eq!(budget.stats().used_bytes, 0);
}

/// A guest's request that takes a buffer of each use, one within the other, and gives them back together.
struct Nested {
    account: BufferAccount,
    steps: Vec<(BufferUse, usize)>,
    held: Vec<BufferGrant>,
    waits: Option<Request>,
}

impl Nested {
    /// Goes one step further. Returns whether it could.
    fn advance(&mut self) -> bool {
        if let Some(request) = &mut self.waits {
            let Some(grant) = request.poll() else { return false };
            self.held.push(grant);
        }
        self.waits = self.steps.pop().map(|(purpose, bytes)| Request::new(&self.account, purpose, bytes));
        true
    }
}

#[test]
fn requests_that_need_buffers_of_several_uses_at_once_all_end() {
    let mut seed = 7_u64;
    let mut dice = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let budget = BufferBudget::new(4 * MIB);
    let accounts: Vec<_> = (0..5).map(|_| budget.account()).collect();
    let (mut live, mut left, mut idle_rounds) = (Vec::new(), 5000, 0);
    while left > 0 || !live.is_empty() {
        while live.len() < 200 && left > 0 {
            let uses = [BufferUse::Bounce, BufferUse::Decompress, BufferUse::Copy];
            let rolled = uses.map(|each| (dice(3), (each, 4096 << dice(10))));
            let steps = rolled.into_iter().filter(|(roll, _)| *roll > 0).map(|(_, step)| step).collect();
            let account = accounts[dice(5) as usize].clone();
            live.push(Nested { account, steps, held: Vec::new(), waits: None });
            left -= 1;
        }
        let mut moved = false;
        for at in (0..live.len()).rev() {
            moved |= live[at].advance();
            if live[at].waits.is_none() {
                live.swap_remove(at);
            }
        }
        // A request may be granted after it was looked at.
        idle_rounds = if moved { 0 } else { idle_rounds + 1 };
        assert!(idle_rounds < 2, "{} requests wait for each other: {:?}", live.len(), budget.stats());
    }
    assert_eq!((budget.stats().used_bytes, budget.stats().waiting), (0, 0));
    // An account's first request of a use may be beyond its limits.
    assert!(budget.stats().peak_bytes <= 4 * MIB + 5 * 3 * 2 * MIB, "{:?}", budget.stats());
}
