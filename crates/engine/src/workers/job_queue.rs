//! The jobs that wait for a worker.

use super::batch::Batch;
use super::computations::Computations;
use super::job::Job;
use super::job_list::{JobList, JobStore};
use block::Work;
use std::collections::VecDeque;
use std::os::fd::RawFd;

/// The serialized jobs of one file.
struct Lane {
    fd: RawFd,
    jobs: VecDeque<Job>,
    /// A worker is carrying out one of the jobs.
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
    /// The worker takes the next job that comes.
    Looks,
    /// The worker is about to take a job that has come: the next job needs another worker.
    HasWork,
}

/// The workers that are needed for a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The worker that spins.
    pub(crate) spinner: bool,
    /// How many idle workers to wake.
    pub(crate) to_wake: usize,
    /// How many new workers to start.
    pub(crate) to_start: usize,
}

/// The number of jobs of a kind (reads and writes, or syncs and the like) that may always run on each file. A worker is
/// started for them, however many workers wait for the storage of other files.
const LEAST_OF_A_FILE: usize = 8;
/// The most jobs beyond those, over all files. So a file that is alone gets 48 workers for its reads, for example. A
/// free worker goes to the file that has the fewest.
const MOST_BEYOND: usize = 40;

/// The jobs of a kind on one file.
#[derive(Default)]
struct Flow {
    fd: RawFd,
    /// The jobs are reads and writes. If two flows have equally many at work, the other kind goes first.
    is_transfer: bool,
    waiting: JobList,
    at_work: usize,
}

impl Flow {
    fn is_idle(&self) -> bool {
        self.at_work == 0 && self.waiting.length == 0
    }

    /// Returns how many jobs may begin whatever other files do, and how many more may if workers are free.
    fn ready(&self) -> (usize, usize) {
        let own = self.waiting.length.min(LEAST_OF_A_FILE.saturating_sub(self.at_work));
        (own, self.waiting.length - own)
    }
}

/// The jobs, and figures of the workers.
#[derive(Default)]
pub(crate) struct Queue {
    flows: Vec<Flow>,
    /// All jobs that wait in flows.
    store: JobStore,
    /// Running jobs beyond those that their files may always have.
    beyond: usize,
    /// The flow at which the search for the next job begins.
    next_flow: usize,
    lanes: Vec<Lane>,
    pub(crate) computations: Computations,
    pub(crate) idle: usize,
    pub(crate) spinner: Spinner,
    pub(crate) threads: usize,
    pub(crate) stop: bool,
}

impl Queue {
    /// Makes room for `count` jobs of any kind, so that adding them does not allocate.
    pub(crate) fn make_room(&mut self, count: usize) {
        self.store.make_room(count);
        for lane in &mut self.lanes {
            lane.jobs.reserve(count.saturating_sub(lane.jobs.len()));
        }
    }

    /// Adds a job. The first serialized job of a file makes a list with as much room as the others have.
    pub(crate) fn add(&mut self, job: Job) {
        if !job.serialized {
            let flow = self.flow_for(&job);
            return self.store.push(&mut self.flows[flow].waiting, job);
        }
        let fd = job.call.fd;
        let is_free = |lane: &Lane| !lane.busy && lane.jobs.is_empty();
        let place = self.lanes.iter().position(|lane| lane.fd == fd).or_else(|| self.lanes.iter().position(is_free));
        let place = place.unwrap_or_else(|| {
            let jobs = VecDeque::with_capacity(self.store.room());
            self.lanes.push(Lane { fd, jobs, busy: false });
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[place];
        lane.fd = fd;
        lane.jobs.push_back(job);
    }

    /// Returns the place of the job's flow, which may be new or have been another file's.
    fn flow_for(&mut self, job: &Job) -> usize {
        let place = self.flow_of(job).or_else(|| self.flows.iter().position(Flow::is_idle));
        let place = place.unwrap_or_else(|| {
            self.flows.push(Flow::default());
            self.flows.len() - 1
        });
        let flow = &mut self.flows[place];
        (flow.fd, flow.is_transfer) = (job.call.fd, job.call.action.is_transfer());
        place
    }

    fn flow_of(&self, job: &Job) -> Option<usize> {
        let (fd, is_transfer) = (job.call.fd, job.call.action.is_transfer());
        self.flows.iter().position(|flow| flow.fd == fd && flow.is_transfer == is_transfer)
    }

    /// Adds jobs, and returns the workers needed for them. New workers are counted already.
    pub(crate) fn add_batch(&mut self, batch: impl Iterator<Item = Job>, most_threads: usize) -> Wanted {
        let ready_before = self.ready();
        batch.for_each(|job| self.add(job));
        self.wanted(ready_before, most_threads)
    }

    /// As [`Queue::add_batch`], for a computation for a file.
    pub(crate) fn add_work(&mut self, file: u64, work: Work, most_threads: usize) -> Wanted {
        let ready_before = self.ready();
        self.computations.add(file, work);
        self.wanted(ready_before, most_threads)
    }

    fn wanted(&mut self, ready_before: usize, most_threads: usize) -> Wanted {
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

    /// Takes the next jobs or computation that can begin. Returns whether there was anything.
    pub(crate) fn take(&mut self, batch: &mut Batch) -> bool {
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is_ready()) {
            lane.busy = true;
            return batch.become_next(&mut lane.jobs);
        }
        batch.become_one(self.take_from_flow()) || batch.become_work(self.computations.take())
    }

    /// Takes a job of the file that has the fewest at work, among those that may begin one.
    fn take_from_flow(&mut self) -> Option<Job> {
        let (has_room, count) = (self.beyond < MOST_BEYOND, self.flows.len());
        let in_turn = (0..count).map(|step| (self.next_flow + step) % count);
        let may_begin = |flow: &Flow| {
            let (own, others) = flow.ready();
            own > 0 || (others > 0 && has_room)
        };
        let place = in_turn
            .filter(|place| may_begin(&self.flows[*place]))
            .min_by_key(|place| (self.flows[*place].at_work, self.flows[*place].is_transfer))?;
        self.next_flow = place + 1;
        let flow = &mut self.flows[place];
        self.beyond += usize::from(flow.at_work >= LEAST_OF_A_FILE);
        flow.at_work += 1;
        self.store.pop(&mut flow.waiting)
    }

    /// Notes that a job that is not serialized has ended. At most one more can begin then, and the worker itself looks
    /// for it.
    pub(crate) fn ended(&mut self, job: &Job) {
        if let Some(place) = self.flow_of(job) {
            let flow = &mut self.flows[place];
            self.beyond -= usize::from(flow.at_work > LEAST_OF_A_FILE);
            flow.at_work -= 1;
        }
    }

    /// Takes the next serialized jobs of this file: no other worker is woken for them. Returns whether there was any.
    pub(crate) fn take_next_serialized(&mut self, job: &Job, batch: &mut Batch) -> bool {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.fd == job.call.fd && lane.busy) else { return false };
        lane.busy = batch.become_next(&mut lane.jobs);
        lane.busy
    }

    /// Returns how many jobs can begin.
    pub(crate) fn ready(&self) -> usize {
        let ready = self.flows.iter().map(Flow::ready);
        let (own, others) = ready.fold((0, 0), |sum, flow| (sum.0 + flow.0, sum.1 + flow.1));
        let of_flows = own + others.min(MOST_BEYOND.saturating_sub(self.beyond));
        of_flows + self.lanes.iter().filter(|lane| lane.is_ready()).count() + self.computations.ready()
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
        // Its job may take long: others are woken for the next jobs, then started, up to the limit.
        assert_eq!(give(&mut queue, 1), (false, 1, 0));
        assert_eq!(give(&mut queue, 2), (false, 2, 1));
        assert_eq!((give(&mut queue, 5), queue.threads), ((false, 2, 1), 5));
        let mut queue = Queue { idle: 0, threads: 1, spinner: Spinner::Looks, ..Queue::default() };
        assert_eq!((give(&mut queue, 3), queue.threads), ((true, 0, 2), 3));
        let mut queue = Queue { idle: 1, threads: 2, spinner: Spinner::Looks, ..Queue::default() };
        assert_eq!((give(&mut queue, 0), queue.spinner), ((false, 0, 0), Spinner::Looks));
    }

    fn transfer(index: u32, fd: RawFd) -> Job {
        let job = job(index, fd, false);
        Job { call: Call { action: Action::Read { need_bytes: 0 }, ..job.call }, ..job }
    }

    fn sync(index: u32, fd: RawFd) -> Job {
        job(index, fd, false)
    }

    fn all(queue: &mut Queue) -> Vec<u32> {
        std::iter::from_fn(|| taken(queue)).collect()
    }

    #[test]
    fn neither_reads_and_writes_nor_all_else_take_every_worker() {
        const MOST: u32 = (LEAST_OF_A_FILE + MOST_BEYOND) as u32;
        type Make = fn(u32, RawFd) -> Job;
        for (many, other) in [(transfer as Make, sync as Make), (sync, transfer), (transfer, transfer), (sync, sync)] {
            let mut queue = Queue::default();
            let wanted = queue.add_batch((0..60).map(|index| many(index, 1)), 512);
            assert_eq!((wanted.to_start, queue.ready()), (MOST as usize, MOST as usize));
            queue.add(other(100, 2));
            let mut at_work = all(&mut queue);
            at_work.sort_unstable();
            assert!(at_work.into_iter().eq((0..MOST).chain([100])) && queue.ready() == 0);
            let wanted = queue.add_batch((101..120).map(|index| other(index, 2)), 512);
            assert_eq!(wanted.to_start, LEAST_OF_A_FILE - 1, "though as many as may be of the other are at work");
            assert_eq!(all(&mut queue), Vec::from_iter(101..108));
            // Room beyond the files' own goes to the file that has fewer.
            queue.ended(&many(0, 1));
            assert_eq!((queue.ready(), all(&mut queue)), (1, vec![108]));
            // Below that a file's own jobs follow each other.
            queue.ended(&other(100, 2));
            assert_eq!((queue.ready(), all(&mut queue)), (1, vec![109]));
        }
        let mut queue = Queue::default();
        for job in [transfer(0, 1), sync(1, 2), transfer(2, 1)] {
            queue.add(job);
        }
        assert_eq!(all(&mut queue), [1, 0, 2], "syncs go first");
    }

    #[test]
    fn however_many_files_hang_the_next_gets_its_workers() {
        let mut queue = Queue::default();
        for fd in 0..40 {
            queue.add_batch((0..60).map(|index| transfer(index, fd)), 512);
            all(&mut queue);
        }
        let wanted = queue.add_batch((0..3).map(|index| transfer(index, 40)), 512);
        assert_eq!((wanted.to_start, all(&mut queue)), (3, vec![0, 1, 2]));
    }

    #[test]
    fn random_jobs_begin_in_the_order_of_their_file_and_never_more_of_them_than_may() {
        let mut seed = 3_u64;
        let mut dice = move |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut queue = Queue::default();
        let (mut added, mut begun, mut at_work) = ([0_u32; 5], [0_u32; 5], Vec::new());
        for round in 0..20_000 {
            let fd = dice(5) as usize;
            match dice(2) {
                0 if round < 15_000 => {
                    queue.add(transfer(added[fd], fd as RawFd));
                    added[fd] += 1;
                }
                _ if at_work.is_empty() => {}
                _ => queue.ended(&transfer(0, at_work.swap_remove(dice(at_work.len() as u64) as usize))),
            }
            let ready = queue.ready();
            let mut batch = Batch::default();
            if dice(3) > 0 && queue.take(&mut batch) {
                let call = batch.first().map(|job| (job.index, job.call.fd)).unwrap();
                assert_eq!((begun[call.1 as usize], queue.ready() < ready), (call.0, true));
                begun[call.1 as usize] += 1;
                at_work.push(call.1);
            }
            let of = |fd: RawFd| at_work.iter().filter(|other| **other == fd).count();
            let beyond: usize = (0..5).map(|fd| of(fd).saturating_sub(LEAST_OF_A_FILE)).sum();
            assert!(beyond == queue.beyond && beyond <= MOST_BEYOND);
        }
        while let Some(fd) = at_work.pop() {
            queue.ended(&transfer(0, fd));
            let mut batch = Batch::default();
            while queue.take(&mut batch) {
                let call = batch.first().map(|job| (job.index, job.call.fd)).unwrap();
                begun[call.1 as usize] += 1;
                at_work.push(call.1);
            }
        }
        assert_eq!((begun, queue.ready(), queue.beyond), (added, 0, 0));
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
        // A job that comes while one is carried out wakes no worker: the same one goes on with it.
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
        // No worker is at these files any more, so any worker may take the next job, even of a file that has taken
        // another's place.
        queue.add(job(6, 7, true));
        assert_eq!((queue.ready(), queue.lanes.len()), (1, 2));
        assert_eq!(taken(&mut queue), Some(6));
    }
}
