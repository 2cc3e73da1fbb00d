//! What workers give to the kernel by one call, and what ends without them.
//!
//! `io_submit` of Linux AIO carries out what moves to the page cache or from it while it runs, one after the other; direct
//! requests it only begins, and that may take waiting: for space, for a lock, for a busy device. What follows is the
//! device's work, for which no thread has to wait: each by a call that lasts until its end, and a worker each, took four
//! times the processor's time and a third of the rate. The ends lie in a ring that the reactor reads without a call: those of
//! direct requests when they come, those of the others when a worker has told, or when it looks by itself, so that no end
//! waits for a write behind it that is held up.

use crate::EngineKind;
use crate::aio_abi::{self as abi, Context, ControlBlock, Event};
use crate::group::{self, Group};
use crate::inflight::{Action, Buffers, Request};
use crate::inline::goes_in_turn;
use crate::job_queue::{How, Job};
use crate::wakeup::Wakeup;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a worker is to carry a request out, if Linux AIO can be had.
pub(crate) fn way_of(request: &Request) -> How {
    let (file, moves) = (&*request.target.file, matches!(request.action, Action::Read { .. } | Action::Write { .. }));
    let direct = !file.page_cached && !file.in_memory && file.engine != EngineKind::Threads;
    // Where to begin means to wait for tables, or for the end, each has a worker.
    if moves && direct && file.nowait.is_allowed() && request.target.are_tables_ready() {
        return How::Begin;
    }
    // What comes here of a file in memory is long, or changes its length.
    if goes_in_turn(request) && file.ends_in_call && !file.in_memory { How::Together } else { How::Call }
}

/// A reactor's requests of one kind that the kernel has.
pub(crate) struct Given(Context);

// SAFETY: the context is a name and a ring. Its requests are submitted by system calls, which any thread may make; from the
// ring only the reactor's thread takes, see `Given::take`.
unsafe impl Send for Given {}
// SAFETY: as above.
unsafe impl Sync for Given {}

impl Given {
    /// Has room for so many requests at least; what is beyond that is carried out by calls. `None` where this process may
    /// not use Linux AIO, or the host has no more of it (`/proc/sys/fs/aio-max-nr`).
    pub(crate) fn new(room: u32) -> Option<Self> {
        let context = Context::new(room).inspect_err(|error| {
            tracing::info!(%error, "Linux AIO cannot be had: workers take a call for each request");
        });
        context.ok().filter(Context::is_mapped).map(Self)
    }

    /// Gives reads and writes to the kernel, in their order; for each an event with its index comes. Those that it does not
    /// take go to `alone`. Calls are counted before they are made.
    pub(crate) fn submit(
        &self,
        group: &Group,
        signal: Option<&Wakeup>,
        calls: &AtomicU64,
        mut alone: impl FnMut(&Job),
    ) {
        let mut blocks = [ControlBlock::default(); group::MOST];
        let mut pointers = [std::ptr::null_mut(); group::MOST];
        for ((job, block), pointer) in group.jobs().zip(&mut blocks).zip(&mut pointers) {
            *block = block_of(u64::from(job.index), job, signal);
            *pointer = &raw mut *block;
        }
        let mut given = 0;
        while given < group.len() {
            calls.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the kernel copies the blocks; the slab's requests keep the memory and the files until their results
            // have come.
            match unsafe { self.0.submit(&mut pointers[given..group.len()]) } {
                Ok(taken) if taken > 0 => given += taken,
                // It is not taken so, or nothing is just now: a call of its own says what is the matter with it.
                _ => {
                    group.jobs().nth(given).into_iter().for_each(&mut alone);
                    given += 1;
                }
            }
        }
    }

    pub(crate) fn has_events(&self) -> bool {
        self.0.has_events()
    }

    /// Takes what has ended. Only for the reactor's thread.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, i32)) {
        self.0.take(|event: Event| each(event.data as u32, event.result as i32));
    }
}

/// The block of a transfer. Its event has `data`, and signals if asked to.
pub(crate) fn block_of(data: u64, transfer: &Job, signal: Option<&Wakeup>) -> ControlBlock {
    let (single, vector) = match transfer.action {
        Action::Write { .. } => (abi::PWRITE, abi::PWRITEV),
        _ => (abi::PREAD, abi::PREADV),
    };
    let (opcode, address, count) = match transfer.buffers {
        Buffers::Single { ptr, length_bytes } => (single, ptr.addr(), length_bytes),
        Buffers::Vector { ptr, count } => (vector, ptr.addr(), count),
    };
    let is_durable = transfer.action == (Action::Write { durable: true });
    ControlBlock {
        data,
        fd: transfer.fd as u32,
        opcode,
        buf: address as u64,
        count: count as u64,
        offset: transfer.offset as i64,
        rw_flags: if is_durable { libc::RWF_DSYNC } else { 0 },
        flags: if signal.is_some() { abi::FLAG_RESULT_FD } else { 0 },
        result_fd: signal.map_or(0, |signal| signal.fd().as_raw_fd() as u32),
        ..ControlBlock::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job_queue::{How, tests::job};
    use std::collections::VecDeque;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;
    /// As much as one group.
    const PAGES: usize = 32;

    fn group(file: &File, data: &[u8], bad: &[usize]) -> Group {
        let write = |page: usize| {
            let ptr = if bad.contains(&page) { std::ptr::without_provenance_mut(8) } else { data.as_ptr().cast_mut() };
            Job {
                how: How::Together,
                action: Action::Write { durable: false },
                offset: (page * PAGE) as u64,
                length_bytes: PAGE,
                buffers: Buffers::Single { ptr, length_bytes: PAGE },
                ..job(page as u32, file.as_raw_fd(), true)
            }
        };
        let mut group = Group::default();
        group.become_next(&mut (0..PAGES).map(write).collect::<VecDeque<_>>());
        assert_eq!(group.len(), PAGES);
        group
    }

    #[test]
    fn what_fails_in_a_group_fails_alone_and_what_the_kernel_has_no_room_for_is_a_call() {
        let (file, data) = (tempfile::tempfile().unwrap(), vec![7; PAGE]);
        let (Some(many), calls) = (Given::new(256), AtomicU64::new(0)) else { return };
        let mut ends = Vec::new();
        // The first, one within, the last.
        for bad in [&[0, 5][..], &[PAGES - 1]] {
            let group = group(&file, &data, bad);
            let before = calls.load(Ordering::Relaxed);
            many.submit(&group, None, &calls, |job| panic!("{} was to be given to the kernel", job.index));
            assert_eq!(calls.load(Ordering::Relaxed) - before, 1);
            many.take(|index, result| ends.push((index, result)));
            let expected = |page| if bad.contains(&page) { -libc::EFAULT } else { PAGE as i32 };
            assert!(ends.drain(..).eq((0..PAGES).map(|page| (page as u32, expected(page)))));
        }
        let mut bytes = vec![0; PAGES * PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7), "each was written in one of the rounds");

        // Nobody takes the ends, so there comes no room.
        let few = Given::new(1).unwrap();
        let (mut alone, mut given) = (Vec::new(), 0);
        for _ in 0..1000 {
            few.submit(&group(&file, &data, &[]), None, &calls, |job| alone.push(job.index));
            given += PAGES;
            if alone.len() >= PAGES {
                break;
            }
        }
        few.take(|index, _| ends.push((index, 0)));
        assert!(!ends.is_empty() && alone.len() >= PAGES);
        assert_eq!(ends.len() + alone.len(), given, "each once");
    }
}
