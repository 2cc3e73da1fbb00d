//! Direct requests that a worker begins, and that end without it.
//!
//! To begin one may take waiting: for space, for a lock, for a busy device. What follows is the device's work, for which no
//! thread has to wait. So a worker submits what a ring has refused to Linux AIO, one request after the other, and the reactor
//! finds the ends where it finds those of workers. Each by a call that lasts until its end, and a worker each, took four
//! times the processor's time and a third of the rate.

use crate::EngineKind;
use crate::aio_abi::{self as abi, Context, ControlBlock, Event};
use crate::inflight::{Action, Buffers, Request};
use crate::job_queue::Job;
use crate::wakeup::Wakeup;
use std::os::fd::AsRawFd;

/// Whether a worker is to begin this only: direct requests of files that are left to asynchronous engines.
pub(crate) fn suits(request: &Request) -> bool {
    let (file, moves) = (&*request.target.file, matches!(request.action, Action::Read { .. } | Action::Write { .. }));
    let direct = !file.page_cached && !file.in_memory && file.engine != EngineKind::Threads;
    // Where to begin means to wait for tables, or for the end, each has a worker.
    moves && direct && file.nowait.is_allowed() && request.target.are_tables_ready()
}

/// The most that have begun and not ended; further ones are carried out by calls.
const EVENTS: u32 = 1024;

/// A reactor's requests of this kind.
pub(crate) struct Begun(Context);

// SAFETY: the context is a name and a ring. Its requests are submitted by system calls, which any thread may make; from the
// ring only the reactor's thread takes, see `Begun::take`.
unsafe impl Send for Begun {}
// SAFETY: as above.
unsafe impl Sync for Begun {}

impl Begun {
    /// `None` where this process may not use Linux AIO.
    pub(crate) fn new() -> Option<Self> {
        Context::new(EVENTS).ok().filter(Context::is_mapped).map(Self)
    }

    /// Begins a read or write. Says whether it has: then an event with its index comes.
    pub(crate) fn begin(&self, job: &Job, wakeup: &Wakeup) -> bool {
        let mut block = block_of(job, wakeup);
        // SAFETY: the kernel copies the block; the slab's request keeps the memory and the file until its result has come.
        unsafe { self.0.submit(&mut [&raw mut block]) }.is_ok_and(|taken| taken == 1)
    }

    pub(crate) fn has_events(&self) -> bool {
        self.0.has_events()
    }

    /// Takes what has ended. Only for the reactor's thread.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, i32)) {
        self.0.take(|event: Event| each(event.data as u32, event.result as i32));
    }
}

fn block_of(job: &Job, wakeup: &Wakeup) -> ControlBlock {
    let (single, vector) = match job.action {
        Action::Write { .. } => (abi::PWRITE, abi::PWRITEV),
        _ => (abi::PREAD, abi::PREADV),
    };
    let (opcode, address, count) = match job.buffers {
        Buffers::Single { ptr, length_bytes } => (single, ptr.addr(), length_bytes),
        Buffers::Vector { ptr, count } => (vector, ptr.addr(), count),
    };
    ControlBlock {
        data: u64::from(job.index),
        fd: job.fd as u32,
        opcode,
        buf: address as u64,
        count: count as u64,
        offset: job.offset as i64,
        rw_flags: if job.action == (Action::Write { durable: true }) { libc::RWF_DSYNC } else { 0 },
        flags: abi::FLAG_RESULT_FD,
        result_fd: wakeup.fd().as_raw_fd() as u32,
        ..ControlBlock::default()
    }
}
