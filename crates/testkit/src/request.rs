//! Requests and replies of tests: plain data that can cross threads.

use block::{Disk, IoResult, Op, OpFlags, Priority, Tag, WriteMap};
use memory::{AlignedBuf, IoBuf, Window};
use std::sync::Arc;

/// A request of a guest.
#[derive(Debug, Clone)]
pub enum Request {
    /// Reads into memory in pieces of these lengths.
    Read {
        /// First byte.
        offset: u64,
        /// Lengths of the pieces of memory.
        pieces: Vec<usize>,
    },
    /// Writes `data` from memory in pieces.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes to write.
        data: Arc<[u8]>,
        /// Lengths of the pieces of memory; empty for one piece.
        pieces: Vec<usize>,
        /// Whether a flush comes before it, and whether it must be durable at its completion.
        flags: OpFlags,
    },
    /// Writes `data` through a map that is then committed ([`Disk::map_write`]).
    WriteByMap {
        /// First byte.
        offset: u64,
        /// The bytes to write.
        data: Arc<[u8]>,
    },
    /// Makes everything durable that completed before.
    Flush,
    /// Discards a range.
    Discard {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Zeroes a range.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Whether the space may be freed.
        may_unmap: bool,
        /// Whether a flush comes before it, and whether it must be durable at its completion.
        flags: OpFlags,
    },
}

impl Request {
    /// Makes a read into one piece of memory.
    #[must_use]
    pub fn read(offset: u64, length: usize) -> Self {
        Self::Read { offset, pieces: vec![length] }
    }

    /// Makes a volatile write from one piece of memory.
    #[must_use]
    pub fn write(offset: u64, data: impl Into<Arc<[u8]>>) -> Self {
        Self::Write { offset, data: data.into(), pieces: Vec::new(), flags: OpFlags::NONE }
    }

    /// Returns the range of the disk that it touches.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        match self {
            Self::Read { offset, pieces } => (*offset, pieces.iter().map(|piece| *piece as u64).sum()),
            Self::Write { offset, data, .. } | Self::WriteByMap { offset, data } => (*offset, data.len() as u64),
            Self::Discard { offset, length } | Self::WriteZeroes { offset, length, .. } => (*offset, *length),
            Self::Flush => (0, 0),
        }
    }

    /// Makes the map of a write by map, in the disk's space if it gives some.
    pub(crate) fn map_on(&self, disk: Option<&dyn Disk>) -> WriteMap {
        let (offset, length) = self.range();
        let given = disk.and_then(|disk| disk.map_write(offset, length as usize));
        let mut map = given.unwrap_or_else(|| WriteMap::in_memory(offset, length as usize));
        if let Self::WriteByMap { data, .. } = self {
            let put = map.write_at(0, data);
            debug_assert_eq!(put, Ok(()));
        }
        map
    }

    /// Returns the operation and its memory.
    pub(crate) fn prepare(&self) -> (Op, Vec<IoBuf>) {
        match self {
            Self::Read { offset, pieces } => {
                let (data, memory) = scattered(pieces);
                // Bytes that the read does not fill must not look like an answer.
                data.fill(0xa5);
                (Op::Read { offset: *offset, data, priority: priority_at(*offset) }, memory)
            }
            Self::Write { offset, data, pieces, flags } => {
                let whole = [data.len()];
                let (window, memory) = scattered(if pieces.is_empty() { &whole } else { pieces });
                window.copy_from_slice(0, data);
                let priority = priority_at(*offset);
                (Op::Write { offset: *offset, data: window, flags: *flags, priority }, memory)
            }
            Self::WriteByMap { offset, data } => {
                let buf = IoBuf::from_aligned(AlignedBuf::copy_of(data));
                (Op::write(*offset, buf.whole(), OpFlags::NONE), Vec::new())
            }
            Self::Flush => (Op::Flush, Vec::new()),
            Self::Discard { offset, length } => (Op::Discard { offset: *offset, length: *length }, Vec::new()),
            Self::WriteZeroes { offset, length, may_unmap, flags } => {
                let op = Op::WriteZeroes { offset: *offset, length: *length, may_unmap: *may_unmap, flags: *flags };
                (op, Vec::new())
            }
        }
    }
}

/// Gives some transfers a priority, which changes nothing that a guest can see.
fn priority_at(offset: u64) -> Priority {
    match offset / 4096 % 4 {
        0 => Priority::best_effort((offset / 16384 % 8) as u16),
        _ => Priority::NONE,
    }
}

/// Allocates memory in pieces. Some pieces after the first start at an odd address, as a guest's may.
fn scattered(pieces: &[usize]) -> (Window, Vec<IoBuf>) {
    if let [length] = pieces {
        let buf = IoBuf::zeroed(*length);
        return (buf.whole(), vec![buf]);
    }
    let skip = |index: usize| (index * 37) % 64;
    let memory: Vec<_> = pieces.iter().enumerate().map(|(i, length)| IoBuf::zeroed(length + skip(i))).collect();
    let windows = memory.iter().zip(pieces).enumerate().map(|(i, (buf, length))| buf.whole().slice(skip(i), *length));
    (IoBuf::gather(windows.collect()).whole(), memory)
}

/// Returns the bytes of a read from the memory that [`Request::prepare`] made.
pub(crate) fn gathered(request: &Request, memory: &[IoBuf]) -> Vec<u8> {
    let Request::Read { pieces, .. } = request else {
        return Vec::new();
    };
    let mut bytes = Vec::new();
    for (buf, length) in memory.iter().zip(pieces) {
        let skip = buf.length_bytes() - length;
        bytes.extend_from_slice(&buf.whole().to_vec()[skip..]);
    }
    bytes
}

/// The reply to a request.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The request's tag.
    pub tag: Tag,
    /// The result.
    pub result: IoResult,
    /// The data of a read.
    pub data: Vec<u8>,
}
