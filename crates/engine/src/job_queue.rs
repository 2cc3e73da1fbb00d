//! What waits for a worker.
//!
//! Writes to the page cache of one file go in turn: the kernel takes them one by one, and workers that waited there for
//! each other would spin, and keep the processors from reads.

use crate::inflight::{Action, Buffers};
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

/// How often, and how patiently, a call that wants to be repeated is.
const RETRIES: usize = 100;
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A request's next call, as a worker sees it.
pub(crate) struct Job {
    pub(crate) index: u32,
    pub(crate) fd: RawFd,
    /// Not while another such job on the file is carried out.
    pub(crate) in_turn: bool,
    pub(crate) action: Action,
    pub(crate) offset: u64,
    pub(crate) buffers: Buffers,
}

// SAFETY: the pointers name memory that the reactor's slab keeps alive until the job's result has come back (see the
// documentation of `threads`); a worker passes them to the kernel and to nobody else.
unsafe impl Send for Job {}

impl Job {
    pub(crate) fn run(&self) -> i32 {
        // SAFETY: the slab's request keeps the file open until the result has come back.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let mut result = 0;
        for _ in 0..RETRIES {
            // SAFETY: the slab's request keeps the memory until the result has come back.
            result = unsafe { crate::sys::run(fd, self.action, self.offset, self.buffers) };
            match -result {
                libc::EINTR => {}
                libc::EAGAIN => std::thread::sleep(RETRY_PAUSE),
                _ => return result,
            }
        }
        result
    }
}

/// Jobs of one file that go in turn.
struct Lane {
    fd: RawFd,
    jobs: VecDeque<Job>,
    /// A worker carries one of them out.
    busy: bool,
}

impl Lane {
    fn is_ready(&self) -> bool {
        !self.busy && !self.jobs.is_empty()
    }
}

/// The jobs, and the workers there are.
#[derive(Default)]
pub(crate) struct Queue {
    jobs: VecDeque<Job>,
    lanes: Vec<Lane>,
    pub(crate) idle: usize,
    pub(crate) threads: usize,
    pub(crate) stop: bool,
}

impl Queue {
    /// Room for `count` jobs of any kind, so that adding them does not allocate.
    pub(crate) fn make_room(&mut self, count: usize) {
        let Self { jobs, lanes, .. } = self;
        for list in lanes.iter_mut().map(|lane| &mut lane.jobs).chain([jobs]) {
            list.reserve(count.saturating_sub(list.len()));
        }
    }

    /// Adds a job; a file's first gets a list with room for as many as the others have.
    pub(crate) fn add(&mut self, job: Job) {
        if !job.in_turn {
            return self.jobs.push_back(job);
        }
        let fd = job.fd;
        let is_free = |lane: &Lane| !lane.busy && lane.jobs.is_empty();
        let place = self.lanes.iter().position(|lane| lane.fd == fd).or_else(|| self.lanes.iter().position(is_free));
        let place = place.unwrap_or_else(|| {
            self.lanes.push(Lane { fd, jobs: VecDeque::with_capacity(self.jobs.capacity()), busy: false });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[place];
        lane.fd = fd;
        lane.jobs.push_back(job);
    }

    /// A job that can be begun now.
    pub(crate) fn take(&mut self) -> Option<Job> {
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is_ready()) {
            lane.busy = true;
            return lane.jobs.pop_front();
        }
        self.jobs.pop_front()
    }

    /// What follows a job that went in turn on this file: nobody else is woken for it.
    pub(crate) fn next_in_turn(&mut self, fd: RawFd) -> Option<Job> {
        let lane = self.lanes.iter_mut().find(|lane| lane.fd == fd && lane.busy)?;
        let next = lane.jobs.pop_front();
        lane.busy = next.is_some();
        next
    }

    /// Jobs that can be begun now.
    pub(crate) fn ready(&self) -> usize {
        self.jobs.len() + self.lanes.iter().filter(|lane| lane.is_ready()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(index: u32, fd: RawFd, in_turn: bool) -> Job {
        let buffers = Buffers::Single { ptr: std::ptr::null_mut(), length_bytes: 0 };
        Job { index, fd, in_turn, action: Action::Sync, offset: 0, buffers }
    }

    #[test]
    fn what_goes_in_turn_waits_for_its_own_file_only_and_keeps_its_order() {
        let mut queue = Queue::default();
        for (index, fd, in_turn) in [(0, 1, true), (1, 1, true), (2, 2, true), (3, 1, false), (4, 1, true)] {
            queue.add(job(index, fd, in_turn));
        }
        assert_eq!(queue.ready(), 3);
        let taken: Vec<u32> = std::iter::from_fn(|| queue.take()).map(|job| job.index).collect();
        assert_eq!((taken, queue.ready()), (vec![0, 2, 3], 0));
        // What comes while one is carried out wakes nobody: the worker itself goes on with it.
        queue.add(job(5, 2, true));
        assert_eq!(queue.ready(), 0);
        assert_eq!(queue.next_in_turn(1).map(|job| job.index), Some(1));
        assert!(queue.take().is_none());
        assert_eq!(queue.next_in_turn(1).map(|job| job.index), Some(4));
        assert_eq!(queue.next_in_turn(2).map(|job| job.index), Some(5));
        assert!(queue.next_in_turn(1).is_none() && queue.next_in_turn(2).is_none());
        // Nobody is at it any more: the next is anybody's, also of a file that has taken the place of another.
        queue.add(job(6, 7, true));
        assert_eq!((queue.ready(), queue.lanes.len()), (1, 2));
        assert_eq!(queue.take().map(|job| job.index), Some(6));
    }
}
