//! Many transfers by one call: `io_submit` of Linux AIO.
//!
//! The call itself carries out transfers to and from the page cache, one after the other. Direct requests are only
//! begun, and that may wait: for space, for a lock, for a busy device. After that no thread has to wait for the device.
//! (A worker that waited for each request took four times the processor time, and a third of the rate was lost.) The
//! reactor reads the ends from a ring without a call.

use super::aio_abi::{self as abi, Context, ControlBlock, Event};
use super::call::{Action, Buffers, Call};
use super::wakeup::Wakeup;
use block::Priority;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

/// The most transfers in one call, as in a ring's batch.
pub(crate) const MOST: usize = 128;

/// A context of Linux AIO for one reactor's transfers of one kind.
pub(crate) struct IoSubmit(Context);

// SAFETY: the context is a number and a ring. Any thread may submit, by system calls. Only the reactor's thread takes
// from the ring, see `IoSubmit::take`.
unsafe impl Send for IoSubmit {}
// SAFETY: as above.
unsafe impl Sync for IoSubmit {}

impl IoSubmit {
    /// Makes a context with room for this many requests at least; calls carry out the rest. `None` if this process may
    /// not use Linux AIO, or the host's limit is reached (`/proc/sys/fs/aio-max-nr`).
    pub(crate) fn new(room: u32) -> Option<Self> {
        let context = Context::new(room).inspect_err(|error| {
            tracing::info!(%error, "Linux AIO cannot be had: each request takes a call");
        });
        context.ok().filter(Context::is_mapped).map(Self)
    }

    /// Submits reads and writes in their order, at most [`MOST`]. Each that the kernel takes gives an event with its
    /// index; `alone` is called with the position of each that it refuses. `before_call` runs before each system call.
    /// Returns how many the kernel has taken.
    ///
    /// # Safety
    /// The memory and descriptor that each call names must stay valid until its event has been taken.
    pub(crate) unsafe fn submit(
        &self,
        calls: impl Iterator<Item = (u32, Call)>,
        signal: Option<&Wakeup>,
        mut before_call: impl FnMut(),
        mut alone: impl FnMut(usize),
    ) -> usize {
        // Only the used part is written: most calls have few transfers.
        let mut blocks = [const { MaybeUninit::uninit() }; MOST];
        let mut pointers = [std::ptr::null_mut(); MOST];
        let mut count = 0;
        for (((index, call), block), pointer) in calls.zip(&mut blocks).zip(&mut pointers) {
            *pointer = block.write(control_block(u64::from(index), &call, 0, signal));
            count += 1;
        }
        let (mut at, mut taken) = (0, 0);
        while at < count {
            before_call();
            // SAFETY: the kernel copies the blocks; the rest is the caller's promise.
            match unsafe { self.0.submit(&mut pointers[at..count]) } {
                Ok(some) if some > 0 => {
                    at += some;
                    taken += some;
                }
                // The kernel refuses this transfer in this form, or takes nothing at all. A call of its own gives the
                // real error.
                _ => {
                    alone(at);
                    at += 1;
                }
            }
        }
        taken
    }

    pub(crate) fn has_events(&self) -> bool {
        self.0.has_events()
    }

    /// Takes the results of ended transfers. Only for the reactor's thread.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, i32)) {
        self.0.take(|event: Event| each(event.data as u32, event.result as i32));
    }
}

/// Sets a transfer's priority, if it has one.
pub(crate) fn set_priority(block: &mut ControlBlock, priority: Priority) {
    if priority != Priority::NONE {
        block.flags |= abi::FLAG_PRIORITY;
        block.priority = priority.ioprio();
    }
}

/// Makes the control block of one call. Its event carries `data`, and signals `signal` if there is one. `rw_flags` are
/// added to those that the action needs.
pub(crate) fn control_block(data: u64, call: &Call, rw_flags: i32, signal: Option<&Wakeup>) -> ControlBlock {
    let block = ControlBlock {
        data,
        fd: call.fd as u32,
        flags: if signal.is_some() { abi::FLAG_RESULT_FD } else { 0 },
        result_fd: signal.map_or(0, |signal| signal.fd().as_raw_fd() as u32),
        ..ControlBlock::default()
    };
    let (single, vector, action_flags) = match call.action {
        Action::Write { durable: true } => (abi::PWRITE, abi::PWRITEV, libc::RWF_DSYNC),
        Action::Write { durable: false } => (abi::PWRITE, abi::PWRITEV, 0),
        Action::Read { .. } => (abi::PREAD, abi::PREADV, 0),
        // `route` sends no other action here.
        _ => return ControlBlock { opcode: abi::FDSYNC, ..block },
    };
    let (opcode, address, count) = match call.buffers {
        Buffers::Single { ptr, length_bytes } => (single, ptr.addr(), length_bytes),
        Buffers::Vector { ptr, count } => (vector, ptr.addr(), count),
    };
    let rw_flags = rw_flags | action_flags;
    ControlBlock { opcode, buf: address as u64, count: count as u64, offset: call.offset as i64, rw_flags, ..block }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;
    const PAGES: usize = 32;

    fn calls(file: &File, data: &[u8], bad: &[usize]) -> Vec<(u32, Call)> {
        let write = |page: usize| {
            let ptr = if bad.contains(&page) { std::ptr::without_provenance_mut(8) } else { data.as_ptr().cast_mut() };
            let buffers = Buffers::Single { ptr, length_bytes: PAGE };
            let action = Action::Write { durable: false };
            (page as u32, Call { fd: file.as_raw_fd(), action, offset: (page * PAGE) as u64, buffers })
        };
        (0..PAGES).map(write).collect()
    }

    #[test]
    fn what_fails_in_a_batch_fails_alone_and_what_the_kernel_has_no_room_for_is_a_call() {
        let (file, data) = (tempfile::tempfile().unwrap(), vec![7; PAGE]);
        let Some(many) = IoSubmit::new(256) else { return };
        let submit = |to: &IoSubmit, bad: &[usize], alone: &mut Vec<usize>| {
            let mut made = 0;
            let calls = calls(&file, &data, bad).into_iter();
            // SAFETY: file and data outlive both contexts; a bad address is refused.
            let taken = unsafe { to.submit(calls, None, || made += 1, |at| alone.push(at)) };
            (taken, made)
        };
        let mut ends = Vec::new();
        // The first, one within, the last.
        for bad in [&[0, 5][..], &[PAGES - 1]] {
            let mut alone = Vec::new();
            assert_eq!((submit(&many, bad, &mut alone), alone.len()), ((PAGES, 1), 0));
            many.take(|index, result| ends.push((index, result)));
            let expected = |page| if bad.contains(&page) { -libc::EFAULT } else { PAGE as i32 };
            assert!(ends.drain(..).eq((0..PAGES).map(|page| (page as u32, expected(page)))));
        }
        let mut bytes = vec![0; PAGES * PAGE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7), "each was written in one of the rounds");

        // Nobody takes the ends, so there comes no room.
        let few = IoSubmit::new(1).unwrap();
        let (mut alone, mut taken, mut given) = (Vec::new(), 0, 0);
        for _ in 0..1000 {
            taken += submit(&few, &[], &mut alone).0;
            given += PAGES;
            if alone.len() >= PAGES {
                break;
            }
        }
        few.take(|index, _| ends.push((index, 0)));
        assert!(!ends.is_empty() && ends.len() == taken && alone.len() >= PAGES);
        assert_eq!(taken + alone.len(), given, "each once");
    }

    #[test]
    fn a_transfer_names_its_priority_to_the_kernel_where_it_has_one() {
        let buffers = Buffers::Vector { ptr: std::ptr::null(), count: 0 };
        let call = Call { fd: 0, action: Action::Write { durable: false }, offset: 0, buffers };
        for priority in [Priority::NONE, Priority::best_effort(2)] {
            let mut block = control_block(0, &call, 0, None);
            set_priority(&mut block, priority);
            let is_named = block.flags & abi::FLAG_PRIORITY != 0;
            assert_eq!((is_named, block.priority), (priority != Priority::NONE, priority.ioprio()));
        }
    }
}
