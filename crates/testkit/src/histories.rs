//! A history of several threads' writes to the units of a disk, and the values that a reader may see. For tests under
//! schedules.

use block::{FileIo, FileQueue};
use shuttle::thread;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A file queue that lets others run before and after each operation.
pub struct Yielding(pub Rc<dyn FileQueue>);

impl FileQueue for Yielding {
    fn push(&self, io: FileIo) {
        thread::yield_now();
        self.0.push(io);
        thread::yield_now();
    }
}

/// A change of a guest unit, and its times.
struct Change {
    value: u64,
    begun: u64,
    ended: Option<u64>,
}

/// All changes, by guest unit. Zero is the value of a unit that was never written, or was discarded.
#[derive(Default)]
pub struct History {
    clock: u64,
    changes: BTreeMap<u64, Vec<Change>>,
}

impl History {
    /// Returns a moment after all others.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Notes the start of a change. Returns its index among those of its unit.
    pub fn begin(&mut self, unit: u64, value: u64) -> usize {
        let begun = self.now();
        let changes = self.changes.entry(unit).or_default();
        changes.push(Change { value, begun, ended: None });
        changes.len() - 1
    }

    /// Notes the end of the change with this index.
    pub fn end(&mut self, unit: u64, index: usize) {
        let ended = self.now();
        self.changes.get_mut(&unit).unwrap()[index].ended = Some(ended);
    }

    /// Whether a reader that began at `since` may see this value: not if it was replaced before.
    #[must_use]
    pub fn explains(&self, unit: u64, value: u64, since: u64) -> bool {
        let changes = self.changes.get(&unit).map_or(&[][..], Vec::as_slice);
        let outdated =
            |ended: u64| changes.iter().any(|later| later.begun > ended && later.ended.is_some_and(|end| end < since));
        let first = (value == 0).then_some(0);
        let ends = changes.iter().filter(|change| change.value == value).map(|change| change.ended);
        ends.chain(first.map(Some)).any(|ended| ended.is_none_or(|ended| !outdated(ended)))
    }

    /// Whether a power cut may leave this value if the change with this index is durable. The value may be of that
    /// change, or of one that had not ended when it began.
    #[must_use]
    pub fn may_outlive(&self, unit: u64, value: u64, index: usize) -> bool {
        let changes = &self.changes[&unit];
        let begun = changes[index].begun;
        changes.iter().any(|change| change.value == value && change.ended.is_none_or(|ended| ended > begun))
    }
}
