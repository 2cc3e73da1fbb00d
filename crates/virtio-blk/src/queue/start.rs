//! Turns a request of the guest into operations of the disk.

use super::{DeviceQueue, Pending};
use crate::transport::Transport;
use block::meter;
use block::{Op, OpFlags, Priority, Tag};
use memory::Window;
use std::time::Instant;
use virtio::blk::{RangeSegment, SECTOR_SHIFT, Status};
use virtio::{DeviceRing, Request};

/// The tag of a queue's own flush. No request has it: they have the numbers of ring entries.
const FIRST_FLUSH: Tag = Tag::MAX;

impl<T: Transport, R: DeviceRing> DeviceQueue<T, R> {
    /// Begins with a flush of its own, and takes no request before its end, if the guest is in write-through and no flush
    /// has succeeded in this process. Such a guest takes all that it reads for durable. But a process that was killed may
    /// have left writes that it had not answered, and that only the host's cache has.
    pub(super) fn flushing_first(mut self) -> Self {
        let begun = self.device.durable_writes_begun();
        if self.device.write_through() && self.settled == 0 && begun > 0 {
            self.first_flush = Some((begun, Instant::now()));
            self.taking = false;
            self.stopwatch.own_flush_begins();
            self.disk.submit(FIRST_FLUSH, Op::Flush);
        }
        self
    }

    #[inline]
    pub(super) fn start(&mut self, head: u16, request: Request) {
        match request {
            Request::Read { sector, data, priority } => match self.device.offset(sector, data.length_bytes() as u64) {
                Some(offset) => {
                    self.stopwatch.moves(meter::READ, data.length_bytes());
                    self.submit(head, meter::READ, Op::Read { offset, data, priority: priority_of(priority) });
                }
                None => self.end(head, Status::IoErr),
            },
            Request::Write { sector, data, priority } => match self.device.offset(sector, data.length_bytes() as u64) {
                Some(offset) if !self.device.is_read_only() => {
                    let priority = priority_of(priority);
                    self.stopwatch.moves(meter::WRITE, data.length_bytes());
                    match self.device.write_through() {
                        false => {
                            self.submit(head, meter::WRITE, Op::Write { offset, data, flags: OpFlags::NONE, priority });
                            self.is_volatile(head);
                        }
                        true => self.start_durable_write(head, offset, data, priority),
                    }
                }
                _ => self.end(head, Status::IoErr),
            },
            Request::Flush => {
                self.device.guest_flushes();
                self.submit(head, meter::FLUSH, Op::Flush);
            }
            Request::GetId => {
                self.queue.complete_id(head, self.device.serial());
                self.ended = self.ended.saturating_add(1);
            }
            Request::Discard => {
                self.start_ranges(head, meter::DISCARD, |offset, length, _| Op::Discard { offset, length });
            }
            Request::WriteZeroes => {
                let fua = self.device.write_through();
                self.start_ranges(head, meter::WRITE_ZEROES, |offset, length, range| {
                    let may_unmap = range.flags & RangeSegment::UNMAP != 0;
                    Op::WriteZeroes { offset, length, may_unmap, flags: OpFlags::from_fua(fua) }
                });
                self.settle_ranges(head, fua);
                if !fua {
                    self.is_volatile(head);
                }
            }
            Request::SecureErase => self.start_erase(head),
            Request::GetLifetime => {
                self.queue.complete_with(head, &self.device.lifetime());
                self.ended = self.ended.saturating_add(1);
            }
            Request::Refused(status) => self.end(head, status),
        }
    }

    /// Overwrites the ranges with zeros in place, durably.
    #[cold]
    fn start_erase(&mut self, head: u16) {
        if !self.device.overwrites_in_place() {
            return self.end(head, Status::IoErr);
        }
        let zeros = self.zeros.whole();
        // No range is longer than the zeros.
        let length_of = |length: u64| usize::try_from(length).unwrap_or(usize::MAX).min(zeros.length_bytes());
        self.start_ranges(head, meter::SECURE_ERASE, |offset, length, _| {
            let data = zeros.slice(0, length_of(length));
            Op::Write { offset, data, flags: OpFlags::FUA, priority: Priority::NONE }
        });
        self.settle_ranges(head, self.device.write_through());
    }

    /// Adds the pending flush to a request whose ranges are written durably.
    fn settle_ranges(&mut self, head: u16, durable: bool) {
        let has_begun = self.pending.get(usize::from(head)).is_some_and(|pending| pending.operations > 0);
        if durable && has_begun {
            match self.owed_flush(head) {
                0 => {}
                settles => self.ends_with_flush(head, settles),
            }
        }
    }

    fn submit(&mut self, head: u16, kind: u64, op: Op) {
        if let Some(pending) = self.pending.get_mut(usize::from(head)) {
            *pending = Pending { operations: 1, key: self.stopwatch.key(kind), ..Pending::default() };
        }
        self.disk.submit(Tag::from(head), op);
    }

    #[inline]
    fn is_volatile(&mut self, head: u16) {
        if let Some(pending) = self.pending.get_mut(usize::from(head)) {
            pending.volatile = true;
        }
    }

    #[cold]
    fn start_durable_write(&mut self, head: u16, offset: u64, data: Window, priority: Priority) {
        let settles = self.owed_flush(head);
        self.submit(head, meter::WRITE, Op::Write { offset, data, flags: OpFlags::FUA, priority });
        if settles != 0 {
            self.ends_with_flush(head, settles);
        }
    }

    /// Submits a flush along with a durable write, if one is owed. The guest relies on earlier writes, of all queues,
    /// as soon as the first durable write ends. So each durable write needs a flush until one of this queue has made
    /// those earlier writes durable. Returns the value of `Device::durable_writes_begun` that it settles, or zero.
    fn owed_flush(&mut self, head: u16) -> u32 {
        let begun = self.device.durable_writes_begun();
        if begun == self.settled {
            return 0;
        }
        self.disk.submit(Tag::from(head), Op::Flush);
        begun
    }

    fn ends_with_flush(&mut self, head: u16, settles: u32) {
        if let Some(pending) = self.pending.get_mut(usize::from(head)) {
            (pending.operations, pending.settles) = (pending.operations.saturating_add(1), settles);
        }
    }

    /// Submits an operation for each range. All ranges are checked before the first begins. The request ends with the
    /// last operation.
    fn start_ranges(&mut self, head: u16, kind: u64, op: impl Fn(u64, u64, &RangeSegment) -> Op) {
        let (device, ranges) = (&self.device, self.queue.ranges(head));
        let place = |range: &RangeSegment| {
            let length = u64::from(range.sector_count).wrapping_shl(SECTOR_SHIFT);
            device.offset(range.sector, length).map(|offset| (offset, length))
        };
        if device.is_read_only() || ranges.iter().any(|range| place(range).is_none()) {
            return self.end(head, Status::IoErr);
        }
        let mut operations: u16 = 0;
        for range in ranges.iter().filter(|range| range.sector_count > 0) {
            if let Some((offset, length)) = place(range) {
                self.disk.submit(Tag::from(head), op(offset, length, range));
                operations = operations.saturating_add(1);
            }
        }
        match self.pending.get_mut(usize::from(head)) {
            Some(pending) if operations > 0 => {
                *pending = Pending { operations, key: self.stopwatch.key(kind), ..Pending::default() };
            }
            _ => self.end(head, Status::Ok),
        }
    }
}

/// Returns the priority in a request's header, as far as a guest may choose it.
#[inline]
fn priority_of(header_word: u32) -> Priority {
    match header_word {
        0 => Priority::NONE,
        word => u16::try_from(word).map_or(Priority::NONE, Priority::from_ioprio),
    }
}
