//! What waits for a worker.

use super::batch::Batch;
use super::job::Job;
use std::collections::VecDeque;
use std::os::fd::RawFd;

/// The serialized jobs of one file.
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

/// Whether one of the workers spins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Spinner {
    #[default]
    None,
    /// It takes any job that comes.
    Looks,
    /// A job has come, which it is about to take: the next needs another worker.
    HasWork,
}

/// Who is needed for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The one that spins.
    pub(crate) spinner: bool,
    /// Idle ones.
    pub(crate) to_wake: usize,
    /// New ones.
    pub(crate) to_start: usize,
}

/// The most jobs of a kind (reads and writes, or syncs and the like) that are carried out at once beside the serialized
/// ones. The other workers are left for the other kind: a disk whose storage is slow, or hangs, does not keep other disks
/// from their flushes, nor does a disk that flushes all the time keep others from their reads.
const MOST_OF_A_KIND: usize = 48;

/// Jobs of a kind.
#[derive(Default)]
struct Kind {
    waiting: VecDeque<Job>,
    at_work: usize,
}

impl Kind {
    fn ready(&self) -> usize {
        self.waiting.len().min(MOST_OF_A_KIND.saturating_sub(self.at_work))
    }

    fn take(&mut self) -> Option<Job> {
        let job = if self.ready() > 0 { self.waiting.pop_front() } else { None };
        self.at_work += usize::from(job.is_some());
        job
    }
}

/// The jobs, and the workers there are.
#[derive(Default)]
pub(crate) struct Queue {
    /// Syncs and the like, which go first.
    others: Kind,
    /// Reads and writes.
    transfers: Kind,
    lanes: Vec<Lane>,
    pub(crate) idle: usize,
    pub(crate) spinner: Spinner,
    pub(crate) threads: usize,
    pub(crate) stop: bool,
}

impl Queue {
    /// Room for `count` jobs of any kind, so that adding them does not allocate.
    pub(crate) fn make_room(&mut self, count: usize) {
        let Self { others, transfers, lanes, .. } = self;
        let lists = lanes.iter_mut().map(|lane| &mut lane.jobs);
        for list in lists.chain([&mut others.waiting, &mut transfers.waiting]) {
            list.reserve(count.saturating_sub(list.len()));
        }
    }

    /// Adds a job. A file's first makes a list with as much room as the others have.
    pub(crate) fn add(&mut self, job: Job) {
        if !job.serialized {
            return self.kind_of(&job).waiting.push_back(job);
        }
        let fd = job.call.fd;
        let is_free = |lane: &Lane| !lane.busy && lane.jobs.is_empty();
        let place = self.lanes.iter().position(|lane| lane.fd == fd).or_else(|| self.lanes.iter().position(is_free));
        let place = place.unwrap_or_else(|| {
            let jobs = VecDeque::with_capacity(self.others.waiting.capacity());
            self.lanes.push(Lane { fd, jobs, busy: false });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[place];
        lane.fd = fd;
        lane.jobs.push_back(job);
    }

    /// Adds jobs, and says who is needed for them. New workers are counted already.
    pub(crate) fn add_batch(&mut self, batch: impl Iterator<Item = Job>, most_threads: usize) -> Wanted {
        let ready_before = self.ready();
        batch.for_each(|job| self.add(job));
        let ready = self.ready();
        let mut to_wake = ready.saturating_sub(ready_before);
        let spinner = to_wake > 0 && self.spinner == Spinner::Looks;
        if spinner {
            self.spinner = Spinner::HasWork;
            to_wake -= 1;
        }
        let spinning = usize::from(self.spinner != Spinner::None);
        let to_start = ready.saturating_sub(self.idle + spinning).min(most_threads.saturating_sub(self.threads));
        self.threads += to_start;
        Wanted { spinner, to_wake: to_wake.min(self.idle), to_start }
    }

    /// Takes what can be begun now. Returns whether there was anything.
    pub(crate) fn take(&mut self, batch: &mut Batch) -> bool {
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is_ready()) {
            lane.busy = true;
            return batch.become_next(&mut lane.jobs);
        }
        batch.become_one(self.others.take().or_else(|| self.transfers.take()))
    }

    /// A job that was not serialized has ended. Its worker looks for the next one itself.
    pub(crate) fn ended(&mut self, job: &Job) {
        self.kind_of(job).at_work -= 1;
    }

    fn kind_of(&mut self, job: &Job) -> &mut Kind {
        if job.call.action.is_transfer() { &mut self.transfers } else { &mut self.others }
    }

    /// Takes what follows serialized jobs on this file: nobody else is woken for it. Returns whether there was any.
    pub(crate) fn take_next_serialized(&mut self, job: &Job, batch: &mut Batch) -> bool {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.fd == job.call.fd && lane.busy) else { return false };
        lane.busy = batch.become_next(&mut lane.jobs);
        lane.busy
    }

    /// Jobs that can be begun now.
    pub(crate) fn ready(&self) -> usize {
        self.others.ready() + self.transfers.ready() + self.lanes.iter().filter(|lane| lane.is_ready()).count()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::base::call::{Action, Buffers, Call};
    use crate::route::How;

    pub(crate) fn job(index: u32, fd: RawFd, serialized: bool) -> Job {
        let buffers = Buffers::Single { ptr: std::ptr::null_mut(), length_bytes: 0 };
        let call = Call { fd, action: Action::Sync, offset: 0, buffers };
        Job { index, serialized, how: How::Call, length_bytes: 0, call }
    }

    fn taken(queue: &mut Queue) -> Option<u32> {
        let mut batch = Batch::default();
        queue.take(&mut batch).then(|| batch.first().unwrap().index)
    }

    #[test]
    fn a_worker_that_spins_is_counted_upon_for_one_job_only() {
        let mut queue = Queue { idle: 2, threads: 3, spinner: Spinner::Looks, ..Queue::default() };
        let give = |queue: &mut Queue, count| {
            let wanted = queue.add_batch((0..count).map(|index| job(index, 1, false)), 5);
            (wanted.spinner, wanted.to_wake, wanted.to_start)
        };
        assert_eq!(give(&mut queue, 1), (true, 0, 0));
        // It may be long at that one: others are woken for the next, then started, up to the limit.
        assert_eq!(give(&mut queue, 1), (false, 1, 0));
        assert_eq!(give(&mut queue, 2), (false, 2, 1));
        assert_eq!((give(&mut queue, 5), queue.threads), ((false, 2, 1), 5));
        let mut queue = Queue { idle: 0, threads: 1, spinner: Spinner::Looks, ..Queue::default() };
        assert_eq!((give(&mut queue, 3), queue.threads), ((true, 0, 2), 3));
        let mut queue = Queue { idle: 1, threads: 2, spinner: Spinner::Looks, ..Queue::default() };
        assert_eq!((give(&mut queue, 0), queue.spinner), ((false, 0, 0), Spinner::Looks));
    }

    #[test]
    fn neither_reads_and_writes_nor_all_else_take_every_worker() {
        const MOST: u32 = MOST_OF_A_KIND as u32;
        let transfer = |index| {
            let job = job(index, 1, false);
            Job { call: Call { action: Action::Read { need_bytes: 0 }, ..job.call }, ..job }
        };
        let sync = |index| job(index, 2, false);
        let all = |queue: &mut Queue| std::iter::from_fn(|| taken(queue)).collect::<Vec<_>>();
        for (many, other) in [(&transfer as &dyn Fn(u32) -> Job, &sync as &dyn Fn(u32) -> Job), (&sync, &transfer)] {
            let mut queue = Queue::default();
            let wanted = queue.add_batch((0..60).map(many), 64);
            assert_eq!((wanted.to_start, queue.ready()), (MOST_OF_A_KIND, MOST_OF_A_KIND));
            queue.add(other(100));
            let mut at_work = all(&mut queue);
            at_work.sort_unstable();
            assert!(at_work.into_iter().eq((0..MOST).chain([100])) && queue.ready() == 0);
            queue.add(other(101));
            assert_eq!(all(&mut queue), [101], "though as many as may be of the one kind are at work");
            queue.ended(&many(0));
            assert_eq!((queue.ready(), all(&mut queue)), (1, vec![MOST]));
            queue.ended(&other(100));
            assert_eq!(all(&mut queue), [0; 0]);
        }
        let mut queue = Queue::default();
        for job in [transfer(0), sync(1), transfer(2)] {
            queue.add(job);
        }
        assert_eq!(all(&mut queue), [1, 0, 2], "syncs go first");
    }

    #[test]
    fn what_is_serialized_waits_for_its_own_file_only_and_keeps_its_order() {
        let mut queue = Queue::default();
        for (index, fd, serialized) in [(0, 1, true), (1, 1, true), (2, 2, true), (3, 1, false), (4, 1, true)] {
            queue.add(job(index, fd, serialized));
        }
        assert_eq!(queue.ready(), 3);
        let all: Vec<u32> = std::iter::from_fn(|| taken(&mut queue)).collect();
        assert_eq!((all, queue.ready()), (vec![0, 2, 3], 0));
        // What comes while one is carried out wakes nobody: the worker itself goes on with it.
        queue.add(job(5, 2, true));
        assert_eq!(queue.ready(), 0);
        let following = |queue: &mut Queue, fd| {
            let mut batch = Batch::default();
            queue.take_next_serialized(&job(0, fd, true), &mut batch).then(|| batch.first().unwrap().index)
        };
        assert_eq!(following(&mut queue, 1), Some(1));
        assert!(taken(&mut queue).is_none());
        assert_eq!(following(&mut queue, 1), Some(4));
        assert_eq!(following(&mut queue, 2), Some(5));
        assert_eq!((following(&mut queue, 1), following(&mut queue, 2)), (None, None));
        // Nobody is at it any more: the next is anybody's, also of a file that has taken the place of another.
        queue.add(job(6, 7, true));
        assert_eq!((queue.ready(), queue.lanes.len()), (1, 2));
        assert_eq!(taken(&mut queue), Some(6));
    }
}
