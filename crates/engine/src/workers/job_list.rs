//! Lists of jobs that share one store. Room for all is made once, however the jobs are spread over the lists.

use super::job::Job;

/// No job.
const NONE: u32 = u32::MAX;

/// A list: jobs are added at its end and taken from its beginning.
pub(crate) struct JobList {
    first: u32,
    last: u32,
    pub(crate) length: usize,
}

impl Default for JobList {
    fn default() -> Self {
        Self { first: NONE, last: NONE, length: 0 }
    }
}

/// The store of the jobs of all lists.
pub(crate) struct JobStore {
    /// A job, and the next place in its list or among the free places.
    places: Vec<(Option<Job>, u32)>,
    free: u32,
}

impl Default for JobStore {
    fn default() -> Self {
        Self { places: Vec::new(), free: NONE }
    }
}

impl JobStore {
    /// Makes room for `count` jobs.
    pub(crate) fn make_room(&mut self, count: usize) {
        self.places.reserve(count.saturating_sub(self.places.len()));
    }

    /// Returns how many jobs there is room for.
    pub(crate) fn room(&self) -> usize {
        self.places.capacity()
    }

    /// Adds a job at the end of `list`.
    pub(crate) fn push(&mut self, list: &mut JobList, job: Job) {
        let place = match self.free {
            NONE => {
                self.places.push((Some(job), NONE));
                (self.places.len() - 1) as u32
            }
            place => {
                self.free = std::mem::replace(&mut self.places[place as usize], (Some(job), NONE)).1;
                place
            }
        };
        match list.last {
            NONE => list.first = place,
            last => self.places[last as usize].1 = place,
        }
        list.last = place;
        list.length += 1;
    }

    /// Takes the first job of `list`.
    pub(crate) fn pop(&mut self, list: &mut JobList) -> Option<Job> {
        let place = list.first;
        let (job, next) = self.places.get_mut(place as usize)?;
        let (job, next) = (job.take(), std::mem::replace(next, self.free));
        self.free = place;
        list.first = next;
        list.length -= 1;
        if next == NONE {
            list.last = NONE;
        }
        job
    }
}
