//! Reads of compressed clusters wait for their turn.
//!
//! A cluster of two mebibytes takes a processor some milliseconds, and a guest may ask for thousands at once. Only a part
//! of them is at work. The others are a place in a line, which takes no memory for clusters and no task.

use super::Core;
use crate::chain::queue::Shared;
use crate::chain::slow_path::Slow;
use block::{Part, Parts, Priority};
use memory::Window;
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

/// The most memory that the reads at work of one queue take, unless there is only one: enough for every processor, and
/// for storage that is far away.
const AT_WORK_BYTES: usize = 64 << 20;

/// See the module.
#[derive(Default)]
pub(super) struct Unpacking {
    at_work_bytes: Rc<Cell<usize>>,
    line: VecDeque<Waiting>,
}

/// A read of a range of the disk that begins with a compressed cluster.
pub(super) struct Packed {
    pub(super) offset: u64,
    pub(super) data: Window,
    pub(super) priority: Priority,
    /// The memory that a cluster takes: as it lies in the file, and decompressed.
    pub(super) bytes: usize,
}

/// A piece of the request `index`, which counts it.
struct Waiting {
    since: Instant,
    index: usize,
    read: Packed,
    /// The chain on which the request began.
    shared: Rc<Shared>,
}

/// The part of a read at work, until it is dropped.
pub(super) struct AtWork {
    all_bytes: Rc<Cell<usize>>,
    bytes: usize,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.all_bytes.set(self.all_bytes.get().saturating_sub(self.bytes));
    }
}

impl Unpacking {
    fn has_room_for(&self, bytes: usize) -> bool {
        let at_work = self.at_work_bytes.get();
        at_work == 0 || at_work.saturating_add(bytes) <= AT_WORK_BYTES
    }

    fn begin(&self, bytes: usize) -> AtWork {
        self.at_work_bytes.set(self.at_work_bytes.get().saturating_add(bytes));
        AtWork { all_bytes: Rc::clone(&self.at_work_bytes), bytes }
    }
}

impl Core {
    /// Reads a piece of a request in a task, when its turn has come.
    pub(super) fn unpack(&mut self, index: usize, read: Packed) {
        self.count_only(index);
        let shared = Rc::clone(&self.shared);
        match self.unpacking.line.is_empty() && self.unpacking.has_room_for(read.bytes) {
            true => self.unpack_now(index, read, shared),
            false => self.unpacking.line.push_back(Waiting { since: Instant::now(), index, read, shared }),
        }
    }

    fn unpack_now(&mut self, index: usize, read: Packed, shared: Rc<Shared>) {
        let Packed { offset, data, priority, bytes } = read;
        let at_work = self.unpacking.begin(bytes);
        self.spawn_counted(index, Slow::Read { offset, data, priority }, shared, Some(at_work));
    }

    /// Lets reads begin for which there is room.
    pub(super) fn unpack_more(&mut self) {
        while self.unpacking.line.front().is_some_and(|next| self.unpacking.has_room_for(next.read.bytes)) {
            let Some(Waiting { since, index, read, shared }) = self.unpacking.line.pop_front() else { break };
            if let Some(tag) = self.slots.get(index).and_then(|slot| slot.tag) {
                self.timings.note(tag, Parts::of(Part::Queue, since.elapsed()));
            }
            self.unpack_now(index, read, shared);
        }
    }
}
