//! Transfers of a batch that one call carries out.
//!
//! `io_submit` of Linux AIO carries buffered reads and writes out while it runs, one after the other, and their ends lie in a
//! ring that is read without a call. For each it does more than a call of its own would (it counts, allocates and locks),
//! about as much as it saves. (What workers carry out so, for which the reactor does not wait, is in `given`.)

use crate::aio_abi::{Context, ControlBlock, Event};
use crate::given::block_of;
use crate::inflight::Action;
use crate::job_queue::Job;
use std::cell::{Cell, OnceCell};

/// The most transfers of one call.
const MOST: usize = 64;

/// Transfers that wait for the others of their batch.
pub(crate) struct Together {
    jobs: Vec<Job>,
    blocks: Vec<ControlBlock>,
    pointers: Vec<*mut ControlBlock>,
    /// `None` in it where the kernel gives no context, or one whose ring cannot be read.
    context: OnceCell<Option<Context>>,
}

impl Default for Together {
    fn default() -> Self {
        Self {
            jobs: Vec::with_capacity(MOST),
            blocks: Vec::with_capacity(MOST),
            pointers: Vec::with_capacity(MOST),
            context: OnceCell::new(),
        }
    }
}

impl Together {
    /// Whether it carries this out.
    pub(crate) fn takes(action: Action) -> bool {
        matches!(action, Action::Read { .. } | Action::Write { .. })
    }

    /// Takes a transfer. Returns whether no other has room.
    pub(crate) fn add(&mut self, transfer: Job) -> bool {
        self.jobs.push(transfer);
        self.jobs.len() == MOST
    }

    /// Carries out what was added, and adds the results to `done`. Returns how many calls that took.
    pub(crate) fn run(&mut self, done: &mut Vec<(u32, i32)>) -> u64 {
        let make = || Context::new(MOST as u32).ok().filter(Context::is_mapped);
        let context = if self.jobs.len() > 1 { self.context.get_or_init(make).as_ref() } else { None };
        let Some(context) = context else {
            let calls = self.jobs.len() as u64;
            done.extend(self.jobs.drain(..).map(|job| (job.index, job.run())));
            return calls;
        };
        self.blocks.clear();
        self.blocks.extend(self.jobs.iter().enumerate().map(|(place, job)| block_of(place as u64, job, None)));
        self.pointers.clear();
        self.pointers.extend(self.blocks.iter_mut().map(|block| &raw mut *block));
        let (mut calls, mut given, mut in_kernel) = (0, 0, 0);
        while given < self.jobs.len() {
            calls += 1;
            // SAFETY: the slab's requests keep the memory and the files until their results have come back, and that is
            // not before all events were taken, below.
            match unsafe { context.submit(&mut self.pointers[given..]) } {
                Ok(taken) if taken > 0 => {
                    given += taken;
                    in_kernel += taken;
                }
                // It is not taken so, or nothing is just now: a call of its own says what is the matter with it.
                _ => {
                    calls += 1;
                    done.push((self.jobs[given].index, self.jobs[given].run()));
                    given += 1;
                }
            }
        }
        let left = Cell::new(in_kernel);
        let mut each = |event: Event| {
            left.set(left.get() - 1);
            let Some(job) = self.jobs.get(event.data as usize) else { return };
            let result = event.result as i32;
            // A call of its own is repeated.
            let wants_again = result == -libc::EINTR || result == -libc::EAGAIN;
            done.push((job.index, if wants_again { job.run() } else { result }));
        };
        context.take(&mut each);
        while left.get() > 0 {
            // Files in memory have none left. Interrupted: nothing was taken.
            calls += 1;
            let _ = context.wait(1, &mut each);
        }
        self.jobs.clear();
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inflight::Buffers;
    use crate::job_queue::How;
    use memory::AlignedBuf;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;
    const PAGES: usize = MOST - 2;

    /// A file in memory of [`PAGES`] holes that cannot become longer.
    fn sealed() -> std::fs::File {
        use rustix::fs::{MemfdFlags, SealFlags};
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, (PAGES * PAGE) as u64).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        fd.into()
    }

    fn write_pages(together: &mut Together, file: &std::fs::File, data: &AlignedBuf, bad: usize) -> (u64, Vec<i32>) {
        for page in 0..MOST {
            let ptr = if page == bad { std::ptr::without_provenance_mut(8) } else { data.as_ptr().cast_mut() };
            let is_full = together.add(Job {
                index: page as u32,
                fd: file.as_raw_fd(),
                in_turn: false,
                how: How::Call,
                action: Action::Write { durable: false },
                offset: (page * PAGE) as u64,
                length_bytes: PAGE,
                buffers: Buffers::Single { ptr, length_bytes: PAGE },
            });
            assert_eq!(is_full, page == MOST - 1);
        }
        let mut done = Vec::new();
        let calls = together.run(&mut done);
        done.sort_unstable();
        assert!(done.iter().enumerate().all(|(at, (index, _))| at == *index as usize), "each once: {done:?}");
        (calls, done.into_iter().map(|(_, result)| result).collect())
    }

    #[test]
    fn what_fails_in_a_batch_fails_alone_and_without_linux_aio_each_is_a_call() {
        let data = AlignedBuf::copy_of(&[7; PAGE]);
        let refused = Together { context: OnceCell::from(None), ..Together::default() };
        for (mut together, most_calls) in [(Together::default(), 1), (refused, MOST as u64)] {
            let file = sealed();
            for round in 0..2 {
                let bad = 5 + round;
                let (calls, results) = write_pages(&mut together, &file, &data, bad);
                for (page, result) in results.into_iter().enumerate() {
                    let want = match page {
                        _ if page == bad => -libc::EFAULT,
                        PAGES.. => -libc::EPERM,
                        _ => PAGE as i32,
                    };
                    assert_eq!(result, want, "{page}");
                }
                assert!(calls == most_calls || crate::aio::probe().is_err(), "{calls} calls");
            }
            let mut bytes = vec![0; PAGES * PAGE];
            file.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 7), "each was written in one of the rounds");
        }
    }
}
