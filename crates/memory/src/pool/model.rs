//! The lock-free part under loom: all schedules and all values that the memory model lets a load return, on the
//! production types. Each rule that keeps them sound has a mutant without it, which must be caught.

use super::depot::Depot;
use super::list::List;
use super::magazine::{Magazine, Node};
use super::stack::{Rules, Sound, Stacks};
use super::sync::Ordering;
use loom::sync::Arc;
use loom::thread;

/// A context with a number: two live boxes with one number would mean that a context was given to two requests.
type Number = u32;

fn of(number: Number) -> Magazine<Number> {
    std::iter::once(Node::boxed(number)).collect()
}

fn numbers(mut magazine: Magazine<Number>) -> impl Iterator<Item = Number> {
    std::iter::from_fn(move || magazine.pop().map(|node| node.context))
}

/// One thread pops a slot while another pops two and pushes the first again: the schedule in which a head that only
/// looks the same leads to a slot that another thread holds.
fn reused_head<R: Rules + Send + Sync + 'static>() {
    let stacks = Arc::new(Stacks::<Number, R>::new(2));
    let theirs = Arc::clone(&stacks);
    let other = thread::spawn(move || {
        let first = theirs.pop_empty();
        let second = theirs.pop_empty();
        if let Some(mut claim) = first {
            theirs.swap(&mut claim, &mut of(1));
            theirs.swap(&mut claim, &mut Magazine::new());
            theirs.push_empty(claim);
        }
        second.map(|mut claim| {
            theirs.swap(&mut claim, &mut of(2));
            claim
        })
    });
    let mine = stacks.pop_empty().map(|mut claim| {
        let mut magazine = of(3);
        stacks.swap(&mut claim, &mut magazine);
        assert!(magazine.is_empty(), "a slot belongs to another thread: {magazine:?}");
        claim
    });
    let other = other.join().unwrap();
    let left = std::iter::from_fn(|| stacks.pop_empty()).take(3).count();
    let claimed = usize::from(mine.is_some()) + usize::from(other.is_some());
    assert_eq!(left + claimed, 2, "a slot was lost or exists twice");
}

/// A thread that takes a slot finds the contents that another thread left there.
fn message<R: Rules + Send + Sync + 'static>() {
    let stacks = Arc::new(Stacks::<Number, R>::new(1));
    let theirs = Arc::clone(&stacks);
    let other = thread::spawn(move || {
        assert!(theirs.give(&mut of(7)));
    });
    let mut magazine = Magazine::new();
    if stacks.take(&mut magazine) {
        assert_eq!(magazine, of(7));
    }
    other.join().unwrap();
}

struct NoTag;

impl Rules for NoTag {
    const TAG_STEP: u64 = 0;
    const PUBLISH: Ordering = Sound::PUBLISH;
    const CLAIM: Ordering = Sound::CLAIM;
}

struct Unpublished;

impl Rules for Unpublished {
    const TAG_STEP: u64 = Sound::TAG_STEP;
    const PUBLISH: Ordering = Ordering::Relaxed;
    const CLAIM: Ordering = Sound::CLAIM;
}

struct Unacquired;

impl Rules for Unacquired {
    const TAG_STEP: u64 = Sound::TAG_STEP;
    const PUBLISH: Ordering = Sound::PUBLISH;
    const CLAIM: Ordering = Ordering::Relaxed;
}

#[test]
fn a_head_that_was_used_again_is_noticed() {
    loom::model(reused_head::<Sound>);
}

#[test]
#[should_panic(expected = "a slot")]
fn a_mutant_without_tags_is_caught() {
    loom::model(reused_head::<NoTag>);
}

#[test]
fn a_magazine_arrives_as_it_was_left() {
    loom::model(message::<Sound>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_mutant_that_does_not_publish_is_caught() {
    loom::model(message::<Unpublished>);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_mutant_that_does_not_acquire_is_caught() {
    loom::model(message::<Unacquired>);
}

/// Takes a magazine and gives it away again, if there is one.
fn trade(stacks: &Stacks<Number>) {
    let mut magazine = Magazine::new();
    if stacks.take(&mut magazine) {
        assert_eq!(magazine.len(), 1);
        assert!(stacks.give(&mut magazine), "there are more slots than magazines");
    }
}

fn trading_threads(threads: usize, slots: u16) {
    let stacks = Arc::new(Stacks::<Number>::new(slots));
    let magazines: Vec<_> = (1..u32::from(slots)).collect();
    for number in &magazines {
        assert!(stacks.give(&mut of(*number)));
    }
    let others: Vec<_> = (1..threads)
        .map(|_| {
            let theirs = Arc::clone(&stacks);
            thread::spawn(move || trade(&theirs))
        })
        .collect();
    trade(&stacks);
    for other in others {
        other.join().unwrap();
    }
    assert_eq!(drained(&stacks), magazines);
}

/// All schedules would take minutes on a busy machine; known faults of such structures need two or three preemptions.
fn trading_threads_with_preemptions(threads: usize, slots: u16, preemptions: usize) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || trading_threads(threads, slots));
}

#[test]
fn two_threads_neither_lose_nor_double_a_magazine() {
    trading_threads_with_preemptions(2, 3, 4);
}

#[test]
fn three_threads_neither_lose_nor_double_a_magazine() {
    trading_threads_with_preemptions(3, 2, 2);
}

fn drained(stacks: &Stacks<Number>) -> Vec<Number> {
    let mut found = Vec::new();
    let mut magazine = Magazine::new();
    while stacks.take(&mut magazine) {
        found.extend(numbers(std::mem::take(&mut magazine)));
    }
    found.sort_unstable();
    found
}

/// The whole production path: one thread takes, the other frees what the first took, both end.
#[test]
fn a_thread_that_only_frees_feeds_one_that_only_takes() {
    loom::model(|| {
        let depot = Arc::new(Depot::<Number>::new(2));
        let mut list = List::new();
        let contexts: Vec<_> = (0..6).map(|number| take(&mut list, &depot, number)).collect();
        let theirs = Arc::clone(&depot);
        let freer = thread::spawn(move || {
            let mut list = List::new();
            for context in contexts {
                put(&mut list, &theirs, context);
            }
            theirs.note_freed(list.close(&theirs).len());
        });
        let mut held = Vec::new();
        for number in 6..8 {
            held.push(take(&mut list, &depot, number));
        }
        assert_ne!(held[0], held[1]);
        freer.join().unwrap();
        for context in held {
            put(&mut list, &depot, context);
        }
        depot.note_freed(list.close(&depot).len());
        let stats = depot.stats();
        assert_eq!(stats.in_flight, 0);
        let mut waiting = Vec::new();
        while let Some(magazine) = depot.take_any() {
            waiting.extend(numbers(magazine));
        }
        waiting.sort_unstable();
        waiting.dedup();
        assert_eq!(waiting.len() as u64, stats.total, "{waiting:?}");
    });
}

/// Takes a context; creates one with this number if there is none.
fn take(list: &mut List<Number>, depot: &Depot<Number>, number: Number) -> Box<Node<Number>> {
    if let Some(context) = list.get().or_else(|| list.get_or_trade(depot).ok()) {
        return context;
    }
    assert!(list.adopt(depot, Magazine::new()).is_empty());
    Node::boxed(number)
}

fn put(list: &mut List<Number>, depot: &Depot<Number>, context: Box<Node<Number>>) {
    if let Err(context) = list.put(context) {
        depot.note_freed(list.put_or_trade(depot, context).len());
    }
}
