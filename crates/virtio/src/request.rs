//! From chains to block requests and back: virtio-blk on a ring, without the storage.
//!
//! A request may be split into descriptors in any way (VERSION_1 and ANY_LAYOUT). The header is the first sixteen bytes
//! that the device may read, and the status is the last byte that it may write. The data are the rest of the readable
//! or the writable bytes, depending on the request's type.

use crate::blk::{HEADER_BYTES, ID_BYTES, RANGE_SEGMENT_BYTES, RangeSegment, RequestHeader, Status, request_type};
use crate::device_ring::DeviceRing;
use crate::fault::{FaultReason, RingFault};
use crate::ring_access::ChainMemory;
use memory::{GuestMemory, Window};
use std::sync::Arc;

/// A request, checked as far as possible without the disk. [`BlkQueue::complete`] ends it.
#[derive(Debug)]
pub enum Request {
    /// Fill `data` from the disk. Its length is a multiple of the sector, and not zero.
    Read {
        /// First sector.
        sector: u64,
        /// The memory to fill.
        data: Window,
        /// The priority field of the header. Linux puts an I/O priority there.
        priority: u32,
    },
    /// Store `data`. Its length is a multiple of the sector, and not zero.
    Write {
        /// First sector.
        sector: u64,
        /// The bytes to store.
        data: Window,
        /// The priority field of the header. Linux puts an I/O priority there.
        priority: u32,
    },
    /// Make completed writes durable.
    Flush,
    /// Answer with [`BlkQueue::complete_id`].
    GetId,
    /// Drop the ranges that [`BlkQueue::ranges`] names.
    Discard,
    /// Zero the ranges that [`BlkQueue::ranges`] names.
    WriteZeroes,
    /// Make the ranges that [`BlkQueue::ranges`] names unreadable for ever.
    SecureErase,
    /// Answer with [`BlkQueue::complete_with`], with [`crate::blk::LIFETIME_BYTES`] bytes.
    GetLifetime,
    /// The request is not to be carried out. Complete it with this status.
    Refused(Status),
}

/// The kinds of requests that a queue serves beyond reads, writes, flushes and the serial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestLimits {
    /// Discards are served.
    pub discard: bool,
    /// Write-zeroes are served.
    pub write_zeroes: bool,
    /// Secure erases are served.
    pub secure_erase: bool,
    /// The wear of the storage can be asked for.
    pub lifetime: bool,
    /// Most ranges in a discard, write-zeroes or secure erase.
    pub max_ranges: u32,
    /// Most sectors in a range of a discard or write-zeroes.
    pub max_range_sectors: u32,
    /// Most sectors in a range of a secure erase.
    pub max_erase_sectors: u32,
}

impl RequestLimits {
    /// Nothing beyond reads, writes, flushes and the serial.
    pub const NONE: Self = Self {
        discard: false,
        write_zeroes: false,
        secure_erase: false,
        lifetime: false,
        max_ranges: 0,
        max_range_sectors: 0,
        max_erase_sectors: 0,
    };

    /// Adds discards and write-zeroes of at most `max_ranges` ranges, each of at most `max_range_sectors`.
    #[must_use]
    pub const fn with_ranges(mut self, max_ranges: u32, max_range_sectors: u32) -> Self {
        (self.discard, self.write_zeroes) = (true, true);
        (self.max_ranges, self.max_range_sectors) = (max_ranges, max_range_sectors);
        self
    }

    /// Adds secure erases of at most `max_ranges` ranges, each of at most `max_erase_sectors`.
    #[must_use]
    pub const fn with_erases(mut self, max_ranges: u32, max_erase_sectors: u32) -> Self {
        (self.secure_erase, self.max_ranges, self.max_erase_sectors) = (true, max_ranges, max_erase_sectors);
        self
    }

    /// Adds questions for the wear of the storage.
    #[must_use]
    pub const fn with_lifetime(mut self) -> Self {
        self.lifetime = true;
        self
    }
}

/// The state of a request in flight. Four of them share a cache line.
#[derive(Debug, Default, Clone, Copy)]
struct Context {
    /// The header's sector, to name the request if it fails.
    sector: u64,
    /// The header's type.
    kind: u32,
    /// The number of bytes for the used ring: those at the front of the writable part that are written after success.
    /// If it is one byte, that is the status, which is written after a failure as well.
    written_bytes: u32,
}

/// A ring that speaks virtio-blk.
#[derive(Debug)]
pub struct BlkQueue<R> {
    ring: R,
    chain: ChainMemory,
    contexts: Box<[Context]>,
    /// The ranges of each discard, write-zeroes or secure erase in flight, by head.
    ranges: Box<[Vec<RangeSegment>]>,
    limits: RequestLimits,
}

impl<R: DeviceRing> BlkQueue<R> {
    /// Makes a queue of requests from `ring`, whose buffers lie in `memory`.
    #[must_use]
    pub fn new(ring: R, memory: Arc<GuestMemory>, limits: RequestLimits) -> Self {
        let contexts = vec![Context::default(); usize::from(ring.size())].into_boxed_slice();
        let ranges = vec![Vec::new(); usize::from(ring.size())].into_boxed_slice();
        let chain = ChainMemory::new(memory, ring.size());
        Self { ring, chain, contexts, ranges, limits }
    }

    /// Returns the ring.
    #[must_use]
    pub fn ring(&self) -> &R {
        &self.ring
    }

    /// Returns the ring, for notifications.
    pub fn ring_mut(&mut self) -> &mut R {
        &mut self.ring
    }

    /// Returns the memory that the requests lie in.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        self.chain.memory()
    }

    /// Takes the next request and its head, which names it until [`BlkQueue::complete`]. After a fault there are no
    /// more.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<(u16, Request)>, RingFault> {
        let Some(head) = self.ring.pop(&mut self.chain)? else {
            return Ok(None);
        };
        match self.parse(head) {
            Ok(request) => Ok(Some((head, request))),
            Err(reason) => {
                self.stopped_at(head);
                Err(reason.in_chain(head))
            }
        }
    }

    /// Returns how many pieces of memory the request taken last has: its cost besides its bytes.
    #[inline]
    #[must_use]
    pub fn segment_count(&self) -> usize {
        self.chain.segment_count()
    }

    /// Stops the queue at a chain without room for header or status: the driver cannot be answered.
    #[cold]
    fn stopped_at(&mut self, head: u16) {
        self.chain.keep_nothing(head);
        self.ring.stop_at(head);
    }

    #[inline]
    fn parse(&mut self, head: u16) -> Result<Request, FaultReason> {
        let Some(header) = self.chain.copy_header::<HEADER_BYTES>() else {
            return Err(FaultReason::HeaderTooShort { readable_bytes: self.chain.readable_bytes() });
        };
        if !self.chain.keep_status(head) {
            return Err(FaultReason::NoStatusByte);
        }
        let header = RequestHeader::from_bytes(header);
        let (readable_bytes, writable_bytes) = (self.chain.readable_bytes(), self.chain.writable_bytes());
        let out_bytes = readable_bytes.saturating_sub(HEADER_BYTES as u32);
        let in_bytes = writable_bytes.saturating_sub(1);
        let reads = header.kind == request_type::IN && is_whole_sectors(in_bytes);
        if let Some(context) = self.contexts.get_mut(usize::from(head)) {
            let written_bytes = if reads { writable_bytes } else { u32::from(writable_bytes == 1) };
            *context = Context { sector: header.sector, kind: header.kind, written_bytes };
        }
        let request = match header.kind {
            request_type::IN if reads => {
                let data = self.chain.keep_writable_without_status(head);
                Request::Read { sector: header.sector, data, priority: header.priority }
            }
            request_type::OUT if is_whole_sectors(out_bytes) => {
                let data = self.chain.keep_readable(head, HEADER_BYTES as u32);
                Request::Write { sector: header.sector, data, priority: header.priority }
            }
            request_type::IN | request_type::OUT => Request::Refused(Status::IoErr),
            request_type::FLUSH | request_type::FLUSH_OUT => Request::Flush,
            request_type::GET_ID => {
                self.chain.keep_writable_without_status(head);
                Request::GetId
            }
            request_type::GET_LIFETIME if self.limits.lifetime => {
                self.chain.keep_writable_without_status(head);
                Request::GetLifetime
            }
            request_type::SECURE_ERASE if self.limits.secure_erase => {
                self.parse_ranges(head, out_bytes, 0, Request::SecureErase)
            }
            request_type::DISCARD if self.limits.discard => self.parse_ranges(head, out_bytes, 0, Request::Discard),
            request_type::WRITE_ZEROES if self.limits.write_zeroes => {
                self.parse_ranges(head, out_bytes, RangeSegment::UNMAP, Request::WriteZeroes)
            }
            _ => Request::Refused(Status::Unsupported),
        };
        Ok(request)
    }

    #[inline]
    fn set_written(&mut self, head: u16, written_bytes: u32) {
        if let Some(context) = self.contexts.get_mut(usize::from(head)) {
            context.written_bytes = written_bytes;
        }
    }

    /// Copies the ranges out of guest memory once, then checks them (5.2.6.2).
    fn parse_ranges(&mut self, head: u16, length_bytes: u32, allowed_flags: u32, served: Request) -> Request {
        let Some(ranges) = self.ranges.get_mut(usize::from(head)) else {
            return Request::Refused(Status::IoErr);
        };
        ranges.clear();
        let count = length_bytes >> RANGE_SEGMENT_BYTES.ilog2();
        let whole = length_bytes.is_multiple_of(RANGE_SEGMENT_BYTES as u32);
        if count == 0 || !whole || count > self.limits.max_ranges {
            return Request::Refused(Status::IoErr);
        }
        let data = self.chain.keep_readable(head, HEADER_BYTES as u32);
        for index in 0..count as usize {
            let mut bytes = [0; RANGE_SEGMENT_BYTES];
            data.copy_to_slice(index.saturating_mul(RANGE_SEGMENT_BYTES), &mut bytes);
            ranges.push(RangeSegment::from_bytes(bytes));
        }
        if ranges.iter().any(|range| range.flags & !allowed_flags != 0) {
            return Request::Refused(Status::Unsupported);
        }
        let limit = match served {
            Request::SecureErase => self.limits.max_erase_sectors,
            _ => self.limits.max_range_sectors,
        };
        match ranges.iter().any(|range| range.sector_count > limit) {
            true => Request::Refused(Status::IoErr),
            false => served,
        }
    }

    /// Returns the type and the first sector of a request in flight, from its header.
    #[must_use]
    pub fn kind_and_sector(&self, head: u16) -> (u32, u64) {
        self.contexts.get(usize::from(head)).map_or((0, 0), |context| (context.kind, context.sector))
    }

    /// Returns the ranges of a discard, write-zeroes or secure erase in flight.
    #[must_use]
    pub fn ranges(&self, head: u16) -> &[RangeSegment] {
        self.ranges.get(usize::from(head)).map_or(&[], Vec::as_slice)
    }

    /// Ends a request: writes its status and gives the chain back. The driver sees it with the next
    /// [`BlkQueue::publish`].
    #[inline]
    pub fn complete(&mut self, head: u16, status: Status) {
        let Some(context) = self.contexts.get(usize::from(head)) else { return };
        let written_bytes = match status {
            Status::Ok => context.written_bytes,
            Status::IoErr | Status::Unsupported => u32::from(context.written_bytes == 1),
        };
        self.chain.write_status(head, status as u8);
        self.ring.put_used(head, written_bytes);
    }

    /// Ends a [`Request::GetId`] with at most twenty bytes of `serial`, padded with zeros.
    pub fn complete_id(&mut self, head: u16, serial: &str) {
        let mut id = [0; ID_BYTES];
        for (target, byte) in id.iter_mut().zip(serial.bytes()) {
            *target = byte;
        }
        self.complete_with(head, &id);
    }

    /// Ends a request with as much of `answer` as the driver has room for.
    pub fn complete_with(&mut self, head: u16, answer: &[u8]) {
        let data = self.chain.data(head);
        let copied = data.copy_from_slice(0, answer);
        // The status directly follows only if the answer fills the buffer.
        let status = u32::from(copied == data.length_bytes());
        drop(data);
        let written = u32::try_from(copied).unwrap_or(u32::MAX).saturating_add(status);
        self.set_written(head, written);
        self.complete(head, Status::Ok);
    }

    /// Makes completed requests visible. Returns whether the driver wants to be notified. Call it once a batch.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.ring.publish()
    }
}

fn is_whole_sectors(length_bytes: u32) -> bool {
    length_bytes != 0 && length_bytes.is_multiple_of(512)
}
