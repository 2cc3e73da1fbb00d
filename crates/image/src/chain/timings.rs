//! What a queue of an image knows of how its requests spend their time.

use block::{Parts, Tag};
use std::cell::{Cell, RefCell};

/// A task that takes less than this is timed one time in [`TIMED_EVERY`], so that the clock costs little.
const ALWAYS_TIMED_NS: u64 = 1_000_000;
const TIMED_EVERY: u32 = 8;

/// A queue and its tasks share it.
#[derive(Default)]
pub(crate) struct Timings {
    /// Never longer than there is room: not every owner of a queue asks for it.
    told: RefCell<Vec<(Tag, Parts)>>,
    /// Tasks that were not timed since the last that was.
    skipped: Cell<u32>,
    /// What the last took that was timed.
    last_ns: Cell<u64>,
}

impl Timings {
    /// Makes room for so many requests.
    pub(crate) fn make_room(&self, count: usize) {
        self.told.borrow_mut().reserve(count);
    }

    /// Whether the next task is to be timed.
    pub(crate) fn is_to_be_timed(&self) -> bool {
        let skipped = self.skipped.get().saturating_add(1);
        let is_due = self.last_ns.get() == 0 || self.last_ns.get() >= ALWAYS_TIMED_NS || skipped >= TIMED_EVERY;
        self.skipped.set(if is_due { 0 } else { skipped });
        is_due
    }

    /// A task that was timed has ended.
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
