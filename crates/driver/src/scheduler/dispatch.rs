//! Sends what is queued: sorts it, merges neighbours, and shares the end of a request among its operations.

use super::{Entry, Group, GroupLimits, NONE, Scheduler};
use crate::issue::{MAX_REQUEST_BYTES, Way, copy_bounced, is_shared, issue_data};
use crate::queue::{Core, result_of};
use crate::ring::bounce_segment_bytes;
use block::{Completion, Op, OpFlags, Tag};
use memory::Window;
use virtio::blk::{Status, request_type};
use virtio::driver_ring::AddError;

/// A bit that marks the owner of a ring request that several operations share.
const GROUP: u32 = 1 << 31;
/// How often newcomers may join a waiting batch.
const JOINS_MAX: u8 = 16;

impl Core {
    /// Queues an operation. It goes out at the end of the turn.
    pub(crate) fn enqueue(&mut self, tag: Tag, op: Op) {
        let Some(index) = self.accept(tag, op) else { return };
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.arrived.push_back(index);
        }
    }

    /// Sends what is queued, as far as the ring takes it.
    #[inline]
    pub(crate) fn dispatch(&mut self) {
        if self.scheduler.as_ref().is_some_and(|scheduler| scheduler.waits()) {
            self.dispatch_queued();
        }
    }

    fn dispatch_queued(&mut self) {
        // A half-sent operation in line goes first.
        let is_stuck = self.ring.as_ref().is_some_and(|ring| ring.in_flight() == 0);
        let Some(mut scheduler) = self.scheduler.take() else { return };
        if is_stuck {
            scheduler.stopped = false;
        }
        while self.ring.is_some() && self.line.is_empty() && !scheduler.stopped {
            self.collect(&mut scheduler);
            let Some(limits) = self.group_limits() else { break };
            if scheduler.batch.is_empty() {
                let Some(index) = scheduler.arrived.pop_front() else { break };
                self.send_single(index);
                continue;
            }
            scheduler.take_neighbours(&limits);
            if let [single] = scheduler.members.as_slice() {
                self.send_single(single.index);
            } else if self.send_group(&mut scheduler).is_err() {
                scheduler.put_back();
                scheduler.stopped = true;
            }
        }
        self.scheduler = Some(scheduler);
    }

    fn group_limits(&self) -> Option<GroupLimits> {
        let ring = self.ring.as_ref()?;
        let each = bounce_segment_bytes(ring.max_segment_bytes, self.rules.block_bytes as usize);
        let bounce_bytes = each.saturating_mul(ring.max_segments.min(self.bounce.len())).min(MAX_REQUEST_BYTES);
        Some(GroupLimits { segments: ring.max_segments, bounce_bytes })
    }

    /// Moves operations that may be sorted from the front of the queue into the batch.
    fn collect(&self, scheduler: &mut Scheduler) {
        if scheduler.batch.is_empty() {
            scheduler.joins = 0;
        } else if scheduler.joins >= JOINS_MAX {
            return;
        }
        let before = scheduler.batch.len();
        while let Some(index) = scheduler.arrived.front().copied() {
            let Some(entry) = self.entry(index, scheduler.batch.len()) else { break };
            scheduler.batch.push_back(entry);
            scheduler.arrived.pop_front();
        }
        if scheduler.batch.len() > before {
            scheduler.joins = scheduler.joins.saturating_add(1);
            let sorted = scheduler.batch.make_contiguous();
            sorted.sort_unstable_by_key(|entry| (entry.write, entry.offset, entry.arrival));
        }
    }

    /// Makes the batch's entry for a plain read or write; `None` for an operation that keeps its place.
    fn entry(&self, index: u32, arrival: usize) -> Option<Entry> {
        let active = self.active.get(index as usize)?;
        let (write, offset, data, priority) = match &active.op {
            Op::Read { offset, data, priority } => (false, *offset, data, *priority),
            Op::Write { offset, data, flags, priority } if *flags == OpFlags::NONE => (true, *offset, data, *priority),
            _ => return None,
        };
        let most = self.ring.as_ref()?.max_segment_bytes as usize;
        let (mut segments, mut shared) = (0, true);
        data.for_each_segment(|segment| {
            segments += segment.length_bytes().div_ceil(most);
            shared &= is_shared(&segment, self.shared);
        });
        // The batch is no longer than the operations in flight.
        let arrival = arrival as u32;
        Some(Entry { index, write, offset, length: data.length_bytes(), segments, shared, priority, arrival })
    }

    fn send_single(&mut self, index: u32) {
        match self.issue(index) {
            true => self.end_if_nothing_was_issued(index),
            false => self.wait_in_line(index),
        }
    }

    /// Sends the members as one request. On error nothing has changed.
    fn send_group(&mut self, scheduler: &mut Scheduler) -> Result<(), AddError> {
        let Some(ring) = &mut self.ring else { return Err(AddError::Full) };
        let Some(first) = scheduler.members.first().copied() else { return Ok(()) };
        let length: usize = scheduler.members.iter().map(|entry| entry.length).sum();
        let each = bounce_segment_bytes(ring.max_segment_bytes, self.rules.block_bytes as usize).max(1);
        if !ring.has_room() || (!first.shared && ring.bounce_left() < length.div_ceil(each)) {
            return Err(AddError::Full);
        }
        let active = &self.active;
        let parts = scheduler.members.iter().filter_map(|entry| match &active.get(entry.index as usize)?.op {
            Op::Read { data, .. } | Op::Write { data, .. } => Some(data.clone()),
            _ => None,
        });
        let mut list = scheduler.spare.pop().unwrap_or_default();
        list.regather(parts);
        let data = list.whole();
        let slot = scheduler.free_groups.pop().unwrap_or(scheduler.groups.len() as u32);
        let kind = if first.write { request_type::OUT } else { request_type::IN };
        let way = Way { kind, offset: first.offset, priority: first.priority, shared: self.shared };
        let sent = issue_data(ring, &self.bounce, &self.rules, way, &data, 0, GROUP | slot);
        debug_assert!(sent.is_err() || sent == Ok(length as u64), "a group is sent whole: {sent:?} of {length}");
        if let Err(error) = sent {
            scheduler.free_groups.push(slot);
            drop(data);
            list.regather(std::iter::empty());
            scheduler.spare.push(list);
            if slot as usize == scheduler.groups.len() {
                scheduler.free_groups.pop();
            }
            return Err(error);
        }
        let mut next = NONE;
        for entry in scheduler.members.iter().rev() {
            if let Some(link) = scheduler.next.get_mut(entry.index as usize) {
                *link = next;
            }
            next = entry.index;
        }
        let group = Group { first: next, write: first.write, data: Some(data) };
        match scheduler.groups.get_mut(slot as usize) {
            Some(place) => *place = group,
            None => scheduler.groups.push(group),
        }
        Ok(())
    }

    /// Ends the operations that share a request which has ended.
    pub(crate) fn end_group(&mut self, head: u16, owner: u32, status: Status, done: &mut Vec<Completion>) {
        let Some(mut scheduler) = self.scheduler.take() else { return };
        let slot = owner & !GROUP;
        let group = scheduler.groups.get_mut(slot as usize);
        if let Some((group, data)) = group.and_then(|group| group.data.take().map(|data| (group, data))) {
            if !group.write && status == Status::Ok {
                self.copy_group(head, &data);
            }
            let (mut list, mut index) = (data.into_buf(), group.first);
            // The operations' memory is dropped before their end is visible.
            list.regather(std::iter::empty());
            scheduler.spare.push(list);
            scheduler.free_groups.push(slot);
            while let Some(next) = scheduler.next.get(index as usize).copied() {
                if let Some(active) = self.active.get_mut(index as usize) {
                    active.result = result_of(status);
                }
                self.finish(index, done);
                index = next;
            }
        }
        if let Some(ring) = &mut self.ring {
            ring.free_bounce(head);
        }
        self.scheduler = Some(scheduler);
    }

    /// Copies what a group has read into bounce buffers to its members.
    fn copy_group(&self, head: u16, data: &Window) {
        let Some((ring, part)) = self.ring.as_ref().and_then(|ring| Some((ring, ring.part(head)?))) else { return };
        let length_bytes = part.length_bytes;
        copy_bounced(&part.bounce, &self.bounce, ring.max_segment_bytes, &self.rules, |from, at, most| {
            data.copy_from(at, &from.slice(0, most.min(length_bytes - at)));
            at + most < length_bytes
        });
    }
}
