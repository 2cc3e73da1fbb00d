//! Ends a request when its operations have ended.

use super::{DeviceQueue, Pending};
use crate::transport::Transport;
use block::{Completion, IoError, IoErrorKind, IoResult, Op, Tag};
use virtio::DeviceRing;
use virtio::blk::{RangeSegment, SECTOR_SHIFT, Status, request_type};

impl<T: Transport, R: DeviceRing> DeviceQueue<T, R> {
    pub(super) fn harvest(&mut self) -> usize {
        let count = self.disk.harvest(&mut self.harvested);
        if count == 0 {
            return 0;
        }
        let pending = &mut self.pending;
        self.stopwatch.take_timings(&mut *self.disk, |head, note| {
            let pending = pending.get_mut(usize::from(head)).filter(|pending| pending.operations > 0);
            pending.into_iter().for_each(|pending| note(&mut pending.key));
        });
        let mut harvested = std::mem::take(&mut self.harvested);
        for completion in harvested.drain(..) {
            self.ended_operation(completion);
        }
        self.harvested = harvested;
        count
    }

    #[inline]
    fn ended_operation(&mut self, completion: Completion) {
        let Ok(head) = u16::try_from(completion.tag) else { return self.first_flush_ended(completion.result) };
        let Some(pending) = self.pending.get_mut(usize::from(head)) else { return };
        // Nearly all requests have one operation, which ends well and needs nothing more.
        let is_whole = pending.operations == 1 && pending.settles == 0 && pending.failed.is_none();
        let is_done = completion.result.is_ok() && !(pending.volatile && self.device.write_through());
        if !is_whole || !is_done {
            return self.ended_part(head, completion.result);
        }
        pending.operations = 0;
        let key = pending.key;
        self.stopwatch.ended(head, key);
        self.end(head, Status::Ok);
    }

    /// Ends one operation of several, one that failed, or one that a flush must follow.
    #[inline(never)]
    fn ended_part(&mut self, head: u16, result: IoResult) {
        let Some(pending) = self.pending.get_mut(usize::from(head)) else { return };
        if pending.operations == 0 {
            return;
        }
        pending.operations = pending.operations.saturating_sub(1);
        if let Err(error) = result {
            pending.failed.get_or_insert(status_of(error));
        }
        let (last, status) = (pending.operations == 0, pending.failed.unwrap_or(Status::Ok));
        let (volatile, key) = (pending.volatile, pending.key);
        if last && pending.settles != 0 && status == Status::Ok {
            self.settled = pending.settles;
            self.device.has_flushed(pending.settles);
        }
        if let Err(error) = result {
            self.log_failure(head, error);
        }
        // The cache became write-through meanwhile. Writes that end from then on must be durable.
        if last && volatile && status == Status::Ok && self.device.write_through() {
            return self.make_durable(head);
        }
        if last {
            self.stopwatch.ended(head, key);
            self.end(head, status);
        }
    }

    /// Begins to take requests after the queue's own flush. If that has failed, requests that rely on it fail, too: each
    /// durable write takes a flush along.
    #[cold]
    fn first_flush_ended(&mut self, result: IoResult) {
        let Some((begun, since)) = self.first_flush.take() else { return };
        self.stopwatch.own_flush_ended();
        let (disk, queue, seconds) = (self.device.name(), self.index, since.elapsed().as_secs());
        if seconds > 0 {
            tracing::info!(disk, queue, seconds, "the guest has waited until what was written before is durable");
        }
        match result {
            Ok(()) => {
                self.settled = begun;
                self.device.has_flushed(begun);
            }
            Err(error) => {
                if let Some(times) = self.counters.io_errors.add_to_log() {
                    tracing::warn!(disk, queue, times, errno = error.errno(), "the first flush failed: {error}");
                }
            }
        }
        // A queue that was told to stop meanwhile waits for this flush only.
        self.taking = self.on_drained.is_none();
    }

    /// Submits a flush, with which a write ends that began while the cache was write-back.
    #[cold]
    fn make_durable(&mut self, head: u16) {
        let settles = self.device.durable_writes_begun();
        if let Some(pending) = self.pending.get_mut(usize::from(head)) {
            *pending = Pending { operations: 1, settles, key: pending.key, ..Pending::default() };
        }
        self.disk.submit(Tag::from(head), Op::Flush);
    }

    /// Logs the first failure, and then each by which their number has doubled. A full disk is counted apart. An
    /// unsupported request is no failure.
    #[cold]
    fn log_failure(&self, head: u16, error: IoError) {
        let (counter, what) = match error.kind() {
            IoErrorKind::Unsupported => return,
            IoErrorKind::NoSpace => (&self.counters.no_space, "the storage is full: the guest's "),
            _ => (&self.counters.io_errors, "the guest's "),
        };
        if let Some(times) = counter.add_to_log() {
            let request = name_of(self.queue.kind_and_sector(head), self.queue.ranges(head));
            let (disk, queue) = (self.device.name(), self.index);
            tracing::warn!(disk, queue, times, errno = error.errno(), "{what}{request} failed: {error}");
        }
    }

    #[inline]
    pub(super) fn end(&mut self, head: u16, status: Status) {
        if status != Status::Ok {
            self.counters.failed.add(1);
        }
        self.queue.complete(head, status);
        self.ended = self.ended.saturating_add(1);
    }
}

/// Returns the status for an operation that failed.
fn status_of(error: IoError) -> Status {
    match error.kind() {
        IoErrorKind::Unsupported => Status::Unsupported,
        _ => Status::IoErr,
    }
}

/// Describes a request, for a person.
fn name_of((kind, sector): (u32, u64), ranges: &[RangeSegment]) -> String {
    let byte_of = |sector: u64| u128::from(sector) << SECTOR_SHIFT;
    let byte = byte_of(sector);
    // With several ranges, it is unknown which one failed.
    let places = || match ranges {
        [] => String::new(),
        [one] => format!(" at byte {}", byte_of(one.sector)),
        [first, ..] => format!(" at byte {} (the first of {} ranges)", byte_of(first.sector), ranges.len()),
    };
    match kind {
        request_type::IN => format!("read at byte {byte}"),
        request_type::OUT => format!("write at byte {byte}"),
        request_type::FLUSH | request_type::FLUSH_OUT => "flush".into(),
        request_type::DISCARD => format!("discard{}", places()),
        request_type::WRITE_ZEROES => format!("write of zeros{}", places()),
        request_type::SECURE_ERASE => format!("secure erase{}", places()),
        kind => format!("request of type {kind}"),
    }
}
