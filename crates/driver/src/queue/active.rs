//! One operation: its stages, and how its rest is issued to the ring.

use super::Core;
use crate::cache::CacheMoment;
use crate::inner::Inner;
use crate::issue::{MAX_REQUEST_BYTES, Way, issue_data, issue_range, issue_zeros, range_segment};
use crate::ring::Ring;
use block::{IoError, IoResult, Op, Tag};
use virtio::blk::{RangeSegment, RequestHeader, request_type};
use virtio::driver_ring::AddError;

/// An operation that was submitted and has not completed.
#[derive(Debug)]
pub(crate) struct Active {
    pub(super) tag: Tag,
    pub(crate) op: Op,
    /// Bytes that were issued.
    pub(super) issued: u64,
    /// Requests of it in the ring.
    pub(super) parts: u32,
    /// It waits in line to be issued further.
    pub(super) waiting: bool,
    /// It must be durable (FUA): if its data may be lost, a flush follows them.
    pub(super) fua: bool,
    pub(super) stage: Stage,
    pub(crate) result: IoResult,
    /// The cache when the data of a durable write, or a flush, were issued.
    pub(super) sent_at: CacheMoment,
}

/// Where an operation stands. The next stage begins when all requests of the one before have succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The flush before its data.
    Preflush,
    /// The operation itself.
    Data,
    /// The flush after its data, or a flush itself.
    Flush,
}

impl Core {
    /// Issues what is left of an operation. Returns false if something remains for later.
    pub(crate) fn issue(&mut self, index: u32) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        let Some(active) = self.active.get_mut(index as usize) else { return true };
        if active.stage != Stage::Data && !Self::skip_flush(active, &self.inner) {
            return Self::issue_flush(active, ring, &self.inner, index);
        }
        if active.fua && active.issued == 0 {
            active.sent_at = self.inner.cache.now();
        }
        let length = active.op.range().map_or(0, |(_, length)| length);
        loop {
            if active.issued >= length || active.result.is_err() {
                return true;
            }
            if !ring.has_room() {
                return false;
            }
            let issued = match &active.op {
                Op::Read { offset, data, priority } => {
                    let way = Way { kind: request_type::IN, offset: *offset, priority: *priority, shared: self.shared };
                    issue_data(ring, &self.bounce, &self.rules, way, data, active.issued as usize, index)
                }
                Op::Write { offset, data, priority, .. } => {
                    let way =
                        Way { kind: request_type::OUT, offset: *offset, priority: *priority, shared: self.shared };
                    issue_data(ring, &self.bounce, &self.rules, way, data, active.issued as usize, index)
                }
                Op::Discard { offset, .. } => {
                    let (most, block) = (self.rules.discard, self.rules.block_bytes);
                    let range = range_segment(offset + active.issued, length - active.issued, most, block, 0);
                    issue_range(ring, request_type::DISCARD, range, index)
                }
                Op::SecureErase { offset, .. } => {
                    let (most, block) = (self.rules.secure_erase, self.rules.block_bytes);
                    let range = range_segment(offset + active.issued, length - active.issued, most, block, 0);
                    issue_range(ring, request_type::SECURE_ERASE, range, index)
                }
                Op::WriteZeroes { offset, may_unmap, .. } if self.rules.write_zeroes.is_served() => {
                    let flags = if *may_unmap { RangeSegment::UNMAP } else { 0 };
                    let (most, block) = (self.rules.write_zeroes, self.rules.block_bytes);
                    let range = range_segment(offset + active.issued, length - active.issued, most, block, flags);
                    issue_range(ring, request_type::WRITE_ZEROES, range, index)
                }
                Op::WriteZeroes { offset, .. } => {
                    let left = usize::try_from(length - active.issued).unwrap_or(MAX_REQUEST_BYTES);
                    issue_zeros(ring, &self.bounce, &self.rules, offset + active.issued, left, index)
                }
                Op::Flush => Ok(0),
            };
            match issued {
                Ok(bytes) => {
                    active.issued += bytes;
                    active.parts += 1;
                }
                Err(AddError::Full) => return false,
                Err(AddError::TooLong { .. }) => active.result = Err(IoError::EIO),
            }
        }
    }

    /// Skips the flush before the data if another flush has left it nothing to do. The flush after durable data was
    /// found necessary when they ended, so it is never skipped.
    #[cold]
    fn skip_flush(active: &mut Active, inner: &Inner) -> bool {
        let skips = active.stage == Stage::Preflush && !inner.cache.now().needs_flush();
        if skips {
            active.stage = Stage::Data;
        }
        skips
    }

    #[cold]
    fn issue_flush(active: &mut Active, ring: &mut Ring, inner: &Inner, index: u32) -> bool {
        // A flush can settle what is owed only if no write is in flight that it does not cover.
        let is_alone = ring.in_flight() == 0 && inner.fds.len() == 1;
        ring.begin();
        let header = RequestHeader { kind: request_type::FLUSH, priority: 0, sector: 0 };
        if ring.start(header, index, 0, 0).is_err() {
            return false;
        }
        active.sent_at = if is_alone { inner.cache.now() } else { CacheMoment::default() };
        active.parts += 1;
        true
    }

    /// Moves an operation on to its next stage. Returns false if it has none.
    pub(super) fn next_stage(&mut self, index: u32) -> bool {
        let Some(active) = self.active.get_mut(index as usize).filter(|active| active.result.is_ok()) else {
            return false;
        };
        active.stage = match active.stage {
            Stage::Data if active.fua && active.sent_at.may_lose(self.inner.cache.now()) => Stage::Flush,
            Stage::Data => return false,
            Stage::Preflush => {
                self.inner.cache.flushed(active.sent_at);
                Stage::Data
            }
            Stage::Flush => {
                self.inner.cache.flushed(active.sent_at);
                return false;
            }
        };
        true
    }
}
