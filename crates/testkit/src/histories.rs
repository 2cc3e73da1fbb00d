//! What several threads wrote to the units of a disk, and what a reader may see of it. For tests under schedules.

use block::{FileIo, FileQueue};
use shuttle::thread;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Lets others run before and after each operation on the file.
pub struct Yielding(pub Rc<dyn FileQueue>);

impl FileQueue for Yielding {
    fn push(&self, io: FileIo) {
        thread::yield_now();
        self.0.push(io);
        thread::yield_now();
    }
}

/// One change of a guest unit, and when.
struct Change {
    value: u64,
    begun: u64,
    ended: Option<u64>,
}

/// All changes, by guest unit. Zero is the value of a unit that was never written, or discarded.
#[derive(Default)]
pub struct History {
    clock: u64,
    changes: BTreeMap<u64, Vec<Change>>,
}

impl History {
    /// A moment behind all others.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A change begins. Returns its index among those of its unit.
    pub fn begin(&mut self, unit: u64, value: u64) -> usize {
        let begun = self.now();
        let changes = self.changes.entry(unit).or_default();
        changes.push(Change { value, begun, ended: None });
        changes.len() - 1
    }

    /// The change with this index has ended.
    pub fn end(&mut self, unit: u64, index: usize) {
        let ended = self.now();
        self.changes.get_mut(&unit).unwrap()[index].ended = Some(ended);
    }

    /// Whether somebody who began to look at `since` may see this: not what was replaced before.
    #[must_use]
    pub fn explains(&self, unit: u64, value: u64, since: u64) -> bool {
        let changes = self.changes.get(&unit).map_or(&[][..], Vec::as_slice);
        let outdated =
            |ended: u64| changes.iter().any(|later| later.begun > ended && later.ended.is_some_and(|end| end < since));
        let first = (value == 0).then_some(0);
        let ends = changes.iter().filter(|change| change.value == value).map(|change| change.ended);
        ends.chain(first.map(Some)).any(|ended| ended.is_none_or(|ended| !outdated(ended)))
    }

    /// Whether a power cut may leave this if the change with this index is durable. It may be that change, or one that had
    /// not ended when it began.
    #[must_use]
    pub fn may_outlive(&self, unit: u64, value: u64, index: usize) -> bool {
        let changes = &self.changes[&unit];
        let begun = changes[index].begun;
        changes.iter().any(|change| change.value == value && change.ended.is_none_or(|ended| ended > begun))
    }
}
