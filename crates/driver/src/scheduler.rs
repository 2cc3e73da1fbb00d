//! The request path: operations are queued, plugged until the reactor's turn ends, sorted, and merged with their
//! neighbours. Then they go the way of the bio path.
//!
//! Reads and writes without flags are sorted and merged among themselves, up to the device's limits for one request and
//! to a mebibyte. All other operations (a flush, a durable write, a discard) keep their place: earlier ones go out
//! before them, later ones after them.
//!
//! A batch goes out whole at the end of its turn, even if it is a single request. Only a full ring or a lack of memory
//! stops it, until something has ended. Meanwhile newcomers join the waiting operations. After a number of turns they
//! no longer may, and the waiting ones go first.

mod dispatch;

use crate::issue::MAX_REQUEST_BYTES;
use block::Priority;
use memory::{IoBuf, Window};
use std::collections::VecDeque;

/// Ends a list of members.
const NONE: u32 = u32::MAX;

/// A read or write that waits to be dispatched.
#[derive(Debug, Clone, Copy)]
struct Entry {
    index: u32,
    write: bool,
    offset: u64,
    length: usize,
    /// Segments in the ring, and whether the device shares their memory.
    segments: usize,
    shared: bool,
    priority: Priority,
    /// Order of arrival within the batch.
    arrival: u32,
}

/// Operations that were merged into one request.
#[derive(Debug)]
struct Group {
    first: u32,
    write: bool,
    /// Their data, one behind the other; `None` when the request has ended.
    data: Option<Window>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    /// Operations in order of arrival.
    arrived: VecDeque<u32>,
    /// Sorted operations; the front goes next.
    batch: VecDeque<Entry>,
    joins: u8,
    /// The ring was full, and nothing has ended since.
    stopped: bool,
    groups: Vec<Group>,
    free_groups: Vec<u32>,
    /// Lists of segments that are not in use.
    spare: Vec<IoBuf>,
    /// The next member of the same group, by operation.
    next: Vec<u32>,
    members: Vec<Entry>,
}

impl Scheduler {
    /// Makes room for `count` operations at once.
    pub(crate) fn reserve(&mut self, count: usize) {
        self.arrived.reserve(count.saturating_sub(self.arrived.len()));
        self.batch.reserve(count.saturating_sub(self.batch.len()));
        self.next.resize(count, NONE);
    }

    /// Whether something waits to be dispatched.
    pub(crate) fn waits(&self) -> bool {
        !self.arrived.is_empty() || !self.batch.is_empty()
    }

    /// Lets a stopped batch go on, because something may have ended.
    pub(crate) fn restart(&mut self) {
        self.stopped = false;
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes the members of the next request off the batch: one operation, or neighbours that fit together.
    fn take_neighbours(&mut self, limits: &GroupLimits) {
        self.members.clear();
        let Some(first) = self.batch.pop_front() else { return };
        let (mut length, mut segments) = (first.length, first.segments);
        let most_bytes = if first.shared { MAX_REQUEST_BYTES } else { limits.bounce_bytes };
        let most_segments = if first.shared { limits.segments } else { usize::MAX };
        self.members.push(first);
        while let Some(next) = self.batch.front().copied() {
            let alike = (next.write, next.shared, next.priority) == (first.write, first.shared, first.priority);
            let follows = first.offset.checked_add(length as u64) == Some(next.offset);
            let fits = length + next.length <= most_bytes && segments + next.segments <= most_segments;
            if !(alike && follows && fits) {
                return;
            }
            length += next.length;
            segments += next.segments;
            self.members.push(next);
            self.batch.pop_front();
        }
    }

    /// Puts back what [`Scheduler::take_neighbours`] took.
    fn put_back(&mut self) {
        while let Some(entry) = self.members.pop() {
            self.batch.push_front(entry);
        }
    }
}

/// How large a request can be.
struct GroupLimits {
    segments: usize,
    bounce_bytes: usize,
}
