//! Measures where an image queue's requests spend their time.

use block::{Parts, Tag};
use std::cell::{Cell, RefCell};

/// A task that takes less is timed one time in [`TIMED_EVERY`], so that the clock costs little.
const ALWAYS_TIMED_NS: u64 = 1_000_000;
const TIMED_EVERY: u32 = 8;

/// Timings of requests, shared by a queue and its tasks.
#[derive(Default)]
pub(crate) struct Timings {
    /// Never longer than its capacity: not every owner of a queue takes the timings.
    told: RefCell<Vec<(Tag, Parts)>>,
    /// Tasks since the last timed one.
    skipped: Cell<u32>,
    /// The time that the last timed task took.
    last_ns: Cell<u64>,
}

impl Timings {
    /// Makes room for the timings of so many requests.
    pub(crate) fn make_room(&self, count: usize) {
        self.told.borrow_mut().reserve(count);
    }

    /// Whether the next task has to be timed.
    pub(crate) fn is_to_be_timed(&self) -> bool {
        let skipped = self.skipped.get().saturating_add(1);
        let is_due = self.last_ns.get() == 0 || self.last_ns.get() >= ALWAYS_TIMED_NS || skipped >= TIMED_EVERY;
        self.skipped.set(if is_due { 0 } else { skipped });
        is_due
    }

    /// Notes the timings of a task that has ended.
    pub(crate) fn tell(&self, tag: Tag, parts: Parts) {
        self.last_ns.set(parts.sum_ns().max(1));
        self.note(tag, parts);
    }

    pub(crate) fn note(&self, tag: Tag, parts: Parts) {
        let mut told = self.told.borrow_mut();
        if told.len() < told.capacity() {
            told.push((tag, parts));
        }
    }

    pub(crate) fn take(&self, timings: &mut Vec<(Tag, Parts)>) {
        timings.append(&mut self.told.borrow_mut());
    }
}
