//! The jobs that a worker takes at one time.

use super::job::Job;
use crate::base::call::Call;
use crate::base::io_submit::MOST;
use crate::route::How;
use block::Work;
use std::collections::VecDeque;

/// A batch of this many bytes gets no further job, as with a ring's batch.
const MOST_BYTES: usize = 128 << 10;

/// A job, or several of one kind that one system call submits. It lies on its worker's stack: workers may start at any
/// time, and allocate nothing.
pub(crate) struct Batch {
    jobs: [Option<Job>; MOST],
    count: usize,
    /// A computation, in place of jobs.
    work: Option<Work>,
}

impl Default for Batch {
    fn default() -> Self {
        Self { jobs: [const { None }; MOST], count: 0, work: None }
    }
}

impl Batch {
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter().take(self.count).flatten()
    }

    /// Returns the first job; all others are of its kind.
    pub(crate) fn first(&self) -> Option<&Job> {
        self.jobs().next()
    }

    /// Returns the calls for one `io_submit`, each with the index of its request.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (u32, Call)> {
        self.jobs().map(|job| (job.index, job.call))
    }

    /// Adds a job. Returns whether the batch is full.
    pub(crate) fn add(&mut self, job: Job) -> bool {
        self.jobs[self.count] = Some(job);
        self.count += 1;
        self.count == MOST
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Makes this a batch of one job, or empty. Returns whether there is a job.
    pub(crate) fn become_one(&mut self, job: Option<Job>) -> bool {
        self.count = usize::from(job.is_some());
        self.jobs[0] = job;
        self.count > 0
    }

    /// Makes this a computation, or empty. Returns whether there is one.
    pub(crate) fn become_work(&mut self, work: Option<Work>) -> bool {
        self.become_one(None);
        self.work = work;
        self.work.is_some()
    }

    /// Takes the computation out.
    pub(crate) fn take_work(&mut self) -> Option<Work> {
        self.work.take()
    }

    /// Takes the first waiting job, and those behind it that are carried out in the same way, as far as there is room.
    /// Returns whether there is any.
    pub(crate) fn become_next(&mut self, waiting: &mut VecDeque<Job>) -> bool {
        self.become_one(waiting.pop_front());
        let Some(&Job { how, length_bytes, .. }) = self.first() else { return false };
        let mut bytes = length_bytes;
        while how != How::Call
            && self.count < MOST
            && bytes < MOST_BYTES
            && waiting.front().is_some_and(|next| next.how == how)
            && let Some(next) = waiting.pop_front()
        {
            bytes = bytes.saturating_add(next.length_bytes);
            self.add(next);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::job_queue::tests::job;

    fn lengths(waiting: &mut VecDeque<Job>) -> Vec<usize> {
        let mut batch = Batch::default();
        std::iter::from_fn(|| batch.become_next(waiting).then_some(batch.len())).collect()
    }

    #[test]
    fn a_batch_is_no_longer_than_a_rings_and_of_one_kind() {
        let jobs =
            |count, how, length_bytes| (0..count).map(move |index| Job { how, length_bytes, ..job(index, 1, true) });
        assert_eq!(lengths(&mut jobs(3, How::Call, 512).collect()), [1, 1, 1]);
        assert_eq!(lengths(&mut jobs(300, How::Batch, 512).collect()), [128, 128, 44]);
        assert_eq!(lengths(&mut jobs(70, How::Begin, 4096).collect()), [32, 32, 6]);
        assert_eq!(lengths(&mut jobs(5, How::Batch, 100 << 10).collect()), [2, 2, 1], "as a ring counts");
        assert_eq!(lengths(&mut jobs(2, How::Batch, 1 << 20).collect()), [1, 1]);
        let mixed = jobs(2, How::Batch, 512).chain(jobs(1, How::Call, 512)).chain(jobs(3, How::Begin, 512));
        assert_eq!(lengths(&mut mixed.collect()), [2, 1, 3]);
    }
}
