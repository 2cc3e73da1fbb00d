//! Magazines waiting for a thread that needs them: a fixed table of slots, and two lock-free stacks of slot numbers.
//!
//! A slot is on the stack `full`, on the stack `empty`, or claimed by the one thread that popped it; only the claimant
//! touches its magazine. The table lives as long as the stacks, so no memory is freed that another thread may still
//! read. A stale slot number leads to an atomic link at worst. The stale link is harmless because the head carries a
//! tag that changes with every push and pop. A compare-and-swap that was prepared before such a change fails (no ABA).

use super::magazine::Magazine;
use super::sync::{AtomicU32, AtomicU64, Ordering, UnsafeCell};
use std::marker::PhantomData;

const INDEX_BITS: u32 = 16;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
/// The index that ends a list.
const NONE: u32 = INDEX_MASK as u32;

/// The rules that keep the stacks sound. Each mutant of the model checker breaks one rule.
pub(super) trait Rules {
    /// Added to a head's tag by each change. The tag has 48 bits. At ten million changes a second, it repeats only if a
    /// thread sleeps for most of a year between its load and its compare-and-swap.
    const TAG_STEP: u64;
    /// How a push publishes the slot's contents and its link.
    const PUBLISH: Ordering;
    /// How a pop claims what a push published.
    const CLAIM: Ordering;
}

/// The rules as they must be.
#[derive(Debug)]
pub(super) struct Sound;

impl Rules for Sound {
    const TAG_STEP: u64 = 1 << INDEX_BITS;
    const PUBLISH: Ordering = Ordering::Release;
    const CLAIM: Ordering = Ordering::Acquire;
}

struct Slot<T> {
    /// The slot below this one, while it is on a stack.
    next: AtomicU32,
    magazine: UnsafeCell<Magazine<T>>,
}

/// The right to touch one slot. The pop that takes its number off a stack creates it, and the push that puts the number
/// back ends it. It is not `Clone`, and there is no other way to make one.
pub(super) struct Claim(u32);

/// Different threads use the two stacks at once. Two cache lines, since the processor fetches them in pairs.
#[repr(align(128))]
struct Head(AtomicU64);

impl Head {
    fn new(index: u32) -> Self {
        Self(AtomicU64::new(u64::from(index)))
    }

    fn replace<R: Rules>(old: u64, index: u32) -> u64 {
        (old & !INDEX_MASK).wrapping_add(R::TAG_STEP) | u64::from(index)
    }

    fn pop<T, R: Rules>(&self, slots: &[Slot<T>]) -> Option<Claim> {
        let mut head = self.0.load(R::CLAIM);
        loop {
            let index = (head & INDEX_MASK) as u32;
            // The index that ends the list is outside the table.
            let slot = slots.get(index as usize)?;
            // The link is stale if others popped the slot meanwhile. Then the tag differs and the swap fails.
            let next = slot.next.load(Ordering::Relaxed);
            // Acquire pairs with the push of this slot: every later change of the head is a read-modify-write, so its
            // release sequence reaches us.
            let new = Self::replace::<R>(head, next);
            match self.0.compare_exchange_weak(head, new, R::CLAIM, R::CLAIM) {
                Ok(_) => return Some(Claim(index)),
                Err(changed) => head = changed,
            }
        }
    }

    fn push<T, R: Rules>(&self, slots: &[Slot<T>], claim: Claim) {
        let slot = &slots[claim.0 as usize];
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            slot.next.store((head & INDEX_MASK) as u32, Ordering::Relaxed);
            let new = Self::replace::<R>(head, claim.0);
            match self.0.compare_exchange_weak(head, new, R::PUBLISH, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => head = changed,
            }
        }
    }
}

/// The table and its two stacks.
pub(super) struct Stacks<T, R = Sound> {
    full: Head,
    empty: Head,
    slots: Box<[Slot<T>]>,
    rules: PhantomData<R>,
}

// SAFETY: magazines are reached only through a `Claim`, and there is one for each slot. The push that ends a claim
// releases, and the pop that begins the next one acquires. So magazines (and their contexts, which are `Send`) move
// between threads like messages.
unsafe impl<T: Send, R> Sync for Stacks<T, R> {}

impl<T, R: Rules> Stacks<T, R> {
    /// Makes a table of `count` empty slots.
    pub(super) fn new(count: u16) -> Self {
        let below = |index| if index + 1 < u32::from(count) { index + 1 } else { NONE };
        let slot = |index| Slot { next: AtomicU32::new(below(index)), magazine: UnsafeCell::new(Magazine::new()) };
        Self {
            full: Head::new(NONE),
            empty: Head::new(if count == 0 { NONE } else { 0 }),
            slots: (0..u32::from(count)).map(slot).collect(),
            rules: PhantomData,
        }
    }

    pub(super) fn pop_full(&self) -> Option<Claim> {
        self.full.pop::<T, R>(&self.slots)
    }

    pub(super) fn pop_empty(&self) -> Option<Claim> {
        self.empty.pop::<T, R>(&self.slots)
    }

    pub(super) fn push_full(&self, claim: Claim) {
        self.full.push::<T, R>(&self.slots, claim);
    }

    pub(super) fn push_empty(&self, claim: Claim) {
        self.empty.push::<T, R>(&self.slots, claim);
    }

    /// Swaps the claimed slot's magazine with `magazine`.
    pub(super) fn swap(&self, claim: &mut Claim, magazine: &mut Magazine<T>) {
        self.slots[claim.0 as usize].magazine.with_mut(|slot| {
            // SAFETY: there is one claim for each slot and we have it exclusively, so nobody else touches the magazine.
            std::mem::swap(unsafe { &mut *slot }, magazine);
        });
    }

    /// Leaves `magazine` for other threads, and replaces it by an empty one. Changes nothing and returns false if the
    /// table is full.
    pub(super) fn give(&self, magazine: &mut Magazine<T>) -> bool {
        let Some(mut claim) = self.pop_empty() else { return false };
        self.swap(&mut claim, magazine);
        self.push_full(claim);
        true
    }

    /// Replaces the empty `magazine` by one that another thread left. Changes nothing and returns false if there is
    /// none.
    pub(super) fn take(&self, magazine: &mut Magazine<T>) -> bool {
        debug_assert!(magazine.is_empty());
        let Some(mut claim) = self.pop_full() else { return false };
        self.swap(&mut claim, magazine);
        self.push_empty(claim);
        true
    }
}
