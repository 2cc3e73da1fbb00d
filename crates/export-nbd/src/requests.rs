//! What a client has in flight.

use crate::limits::Grant;
use block::meter;
use block::{IoError, IoErrorKind};
use memory::{IoBuf, Window};
use nbd_wire::numbers::error;
use nbd_wire::request::Request;

/// What is done for a request, and what is left to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Reading; the client gets this part of the buffer.
    Read(Window),
    Write,
    Flush,
    /// With a flush behind it, if that is asked for.
    Trim {
        then_flush: bool,
    },
    Zero,
    /// Reading ahead, piece by piece.
    Cache {
        buffer: IoBuf,
        next: u64,
        end: u64,
    },
    /// On the connection's own thread.
    Status,
}

impl Work {
    /// As what it is counted.
    pub(crate) fn kind(&self) -> u64 {
        match self {
            Self::Read(_) | Self::Cache { .. } | Self::Status => meter::READ,
            Self::Write => meter::WRITE,
            Self::Flush => meter::FLUSH,
            Self::Trim { .. } => meter::DISCARD,
            Self::Zero => meter::WRITE_ZEROES,
        }
    }
}

/// A request whose reply is not made yet.
#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) request: Request,
    pub(crate) work: Work,
    pub(crate) grant: Option<Grant>,
    /// When it was taken and what it does, for those who count; zero for what is not counted.
    pub(crate) key: u64,
}

/// Requests by tag. Places are used again.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    slots: Vec<Option<Pending>>,
    free: Vec<usize>,
    live: usize,
}

impl Requests {
    pub(crate) fn len(&self) -> usize {
        self.live
    }

    pub(crate) fn put(&mut self, pending: Pending) -> u64 {
        self.live = self.live.saturating_add(1);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len().saturating_sub(1)
        });
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(pending);
        }
        index as u64
    }

    /// The key of a request.
    pub(crate) fn key(&mut self, tag: u64) -> Option<&mut u64> {
        let index = usize::try_from(tag).ok()?;
        self.slots.get_mut(index)?.as_mut().map(|pending| &mut pending.key)
    }

    /// The keys of all requests that are counted.
    pub(crate) fn keys(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().flatten().map(|pending| pending.key).filter(|key| *key != 0)
    }

    pub(crate) fn take(&mut self, tag: u64) -> Option<Pending> {
        let index = usize::try_from(tag).ok()?;
        let pending = self.slots.get_mut(index)?.take()?;
        self.free.push(index);
        self.live = self.live.saturating_sub(1);
        Some(pending)
    }
}

/// The protocol's number for an error.
pub(crate) fn error_number(failed: IoError) -> u32 {
    const ENOMEM: i32 = 12;
    match failed.kind() {
        IoErrorKind::NoSpace => error::ENOSPC,
        IoErrorKind::ReadOnly => error::EPERM,
        IoErrorKind::Unsupported => error::ENOTSUP,
        IoErrorKind::OutOfRange => error::EINVAL,
        _ if failed.errno() == ENOMEM => error::ENOMEM,
        _ => error::EIO,
    }
}
