//! Long work on disks in use: one thread for each job, and a list of jobs that run or have ended.
//!
//! A job keeps its disk by a claim in the table ([`crate::table`]). Whoever removes the disk by force cancels the job
//! there, then waits here for its end.
//!
//! A job whose storage hangs cannot be ended from outside: its thread waits in the kernel. If it was cancelled and
//! moves nothing for a time, it is *left*: it counts as ended, and its thread stays until the storage answers. The
//! thread keeps the right to change the disk's layers, what it has reserved in them, and their files with their locks.
//! So its last write cannot hit anything that others use, and it ends in order when the storage answers.

use crate::hang::HOPELESS_PATIENCE;
use crate::state::status::{JobId, JobKind, JobState, JobStatus, NodeId};
use crate::table::Table;
use block::{Error, ErrorKind, Result};
use image::CopyWatch;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How many ended jobs stay listed. The oldest are forgotten first.
const ENDED_MAX: usize = 64;

/// The list of jobs.
#[derive(Default)]
pub(crate) struct Jobs {
    state: Mutex<State>,
    /// Notified when a job has ended.
    ended: Condvar,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) jobs: BTreeMap<JobId, Arc<Job>>,
    next: u64,
    /// Disks whose image is being edited, once for each edit. No job starts on them.
    edited: Vec<NodeId>,
}

pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) kind: JobKind,
    pub(crate) node: NodeId,
    pub(crate) disk: String,
    pub(crate) watch: Arc<CopyWatch>,
    /// Watches what the job has to finish even after a cancel.
    pub(crate) ending: Arc<CopyWatch>,
    /// Its claim in the table.
    pub(crate) work: u64,
    /// Somebody has asked it to stop.
    pub(crate) is_cancelled: AtomicBool,
    /// It was cancelled, and its storage did not answer.
    pub(crate) is_given_up: AtomicBool,
    /// A thread waits for its end: since it was cancelled, or since its disk is going.
    pub(crate) is_waited_for: [AtomicBool; 2],
    /// Set once, under the list's lock.
    pub(crate) end: OnceLock<Result<()>>,
}

impl Job {
    pub(crate) fn runs(&self) -> bool {
        self.end.get().is_none()
    }

    /// Returns a counter that grows while its storage answers.
    fn moved_bytes(&self) -> u64 {
        self.watch.done_bytes().saturating_add(self.ending.done_bytes())
    }

    /// Whether it is too late to end it.
    fn is_decided(&self) -> bool {
        self.watch.is_decided() || self.ending.is_decided()
    }

    /// Makes the error of a job that was given up one of the kind [`ErrorKind::Cancelled`].
    pub(crate) fn explained(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Cancelled || !self.is_given_up.load(Ordering::Acquire) {
            return error;
        }
        let what = "cancelled, and given up because the storage does not answer";
        Error::new(ErrorKind::Cancelled, format!("{what}: {error}"))
    }

    pub(crate) fn status(&self) -> JobStatus {
        let state = match self.end.get() {
            None if self.is_cancelled.load(Ordering::Acquire) => JobState::Cancelling,
            None if self.watch.is_paused() => JobState::Paused,
            None => JobState::Running,
            Some(Ok(())) => JobState::Done,
            Some(Err(error)) if error.kind() == ErrorKind::Cancelled => JobState::Cancelled,
            Some(Err(error)) => JobState::Failed(error.to_string()),
        };
        // Read in this order, because the first is part of the second.
        let (done_bytes, total_bytes) = (self.watch.done_bytes(), self.watch.total_bytes());
        let (id, kind, node, disk) = (self.id, self.kind, self.node, self.disk.clone());
        let outcome = [&self.watch, &self.ending].into_iter().filter_map(|watch| watch.outcome());
        JobStatus {
            id,
            kind,
            node,
            disk,
            state,
            done_bytes,
            total_bytes,
            time_left: self.watch.time_left().filter(|_| self.runs()),
            rounds: self.watch.rounds(),
            outcome: outcome.reduce(|said, more| format!("{said}; {more}")),
        }
    }
}

/// An edit of a disk's image that keeps jobs away.
pub(crate) struct Editing {
    jobs: Arc<Jobs>,
    node: NodeId,
}

impl Drop for Editing {
    fn drop(&mut self) {
        let mut state = self.jobs.lock();
        if let Some(place) = state.edited.iter().position(|node| *node == self.node) {
            state.edited.swap_remove(place);
        }
    }
}

impl State {
    /// Describes the job that runs on a disk, if any.
    fn running_on(&self, node: NodeId) -> Option<String> {
        let job = self.jobs.values().find(|job| job.node == node && job.runs())?;
        Some(format!("job {} ({})", job.id, job.kind))
    }

    /// Refuses if the disk has a job. Whoever looks at its layers asks first: the job may change them, and it is what the
    /// user has to know.
    pub(crate) fn refuse_second(&self, node: NodeId, disk: &str) -> Result<()> {
        let Some(other) = self.running_on(node) else { return Ok(()) };
        let what = format!("the disk '{disk}' has a job already: {other}; wait for its end, or cancel it");
        Err(Error::new(ErrorKind::Locked, what))
    }
}

impl Jobs {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_id(&self) -> JobId {
        let mut state = self.lock();
        state.next += 1;
        JobId(state.next - 1)
    }

    pub(crate) fn find(&self, id: JobId) -> Result<Arc<Job>> {
        self.lock().jobs.get(&id).cloned().ok_or_else(|| no_job(id))
    }

    /// Lists a job, unless its disk has another one or is being edited. One lock covers the question and the answer:
    /// of several callers at once, one goes on.
    pub(crate) fn begin(&self, job: &Arc<Job>, table: &Table) -> Result<()> {
        let mut state = self.lock();
        if table.has_left_works(job.node) {
            let what = format!(
                "the disk '{}' has a job that was given up and still waits for the storage: try again when it answers",
                job.disk
            );
            return Err(Error::new(ErrorKind::Locked, what));
        }
        state.refuse_second(job.node, &job.disk)?;
        if state.edited.contains(&job.node) {
            let what = format!("the image of the disk '{}' is being changed: try again", job.disk);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        state.jobs.insert(job.id, Arc::clone(job));
        Ok(())
    }

    /// Keeps jobs and other edits away from a disk while its image is edited. Refused if the disk has one of them.
    pub(crate) fn begin_edit(self: &Arc<Self>, node: NodeId, disk: &str) -> Result<Editing> {
        let mut state = self.lock();
        if let Some(job) = state.running_on(node) {
            let what = format!("the disk '{disk}' has {job}; wait for its end, or cancel it");
            return Err(Error::new(ErrorKind::Locked, what));
        }
        if state.edited.contains(&node) {
            let what = format!("the image of the disk '{disk}' is being changed: try again");
            return Err(Error::new(ErrorKind::Locked, what));
        }
        state.edited.push(node);
        Ok(Editing { jobs: Arc::clone(self), node })
    }

    /// Returns a counter that grows while jobs of this disk make progress.
    pub(crate) fn moved_bytes_by(&self, node: NodeId) -> impl Fn() -> u64 + Send + use<> {
        let jobs = self.running_jobs_on(node);
        move || jobs.iter().map(|job| job.moved_bytes()).fold(0, u64::saturating_add)
    }

    pub(crate) fn running_jobs_on(&self, node: NodeId) -> Vec<Arc<Job>> {
        self.lock().jobs.values().filter(|job| job.node == node && job.runs()).cloned().collect()
    }

    /// Ends a job. Returns the result unused if `is_late` forbids the end, or if the job has ended already.
    fn end(&self, job: &Job, result: Result<()>, is_late: impl FnOnce() -> bool) -> Result<(), Result<()>> {
        let mut state = self.lock();
        if is_late() {
            return Err(result);
        }
        job.end.set(result)?;
        let ended: Vec<JobId> = state.jobs.values().filter(|job| !job.runs()).map(|job| job.id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MAX)) {
            state.jobs.remove(id);
        }
        drop(state);
        self.ended.notify_all();
        Ok(())
    }

    pub(crate) fn wait_while(&self, is_early: impl Fn(&State) -> bool) {
        drop(self.ended.wait_while(self.lock(), |state| is_early(state)).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until no job of this disk runs, at most until the `limit`.
    pub(crate) fn wait_for_all_of(&self, node: NodeId, limit: Option<Duration>) {
        let is_early = |state: &State| state.jobs.values().any(|job| job.node == node && job.runs());
        match limit {
            None => self.wait_while(is_early),
            Some(limit) => drop(self.ended.wait_timeout_while(self.lock(), limit, |state| is_early(state))),
        }
    }
}

/// A running job. If this is dropped without a result, the job has failed.
pub(crate) struct Running {
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) job: Arc<Job>,
}

impl Running {
    pub(crate) fn end(self, result: Result<()>) {
        let Err(late) = self.jobs.end(&self.job, result, || false) else { return };
        let how = late.map_or_else(|error| error.to_string(), |()| "done".to_owned());
        let Job { id, disk, .. } = &*self.job;
        tracing::warn!(%disk, "the storage answers: job {id}, which was given up, has ended: {how}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.job.runs() {
            let what = format!("job {} panicked: look at its disk's image with check", self.job.id);
            // It ended meanwhile if it was left.
            let _ = self.jobs.end(&self.job, Err(Error::new(ErrorKind::Io, what)), || false);
        }
    }
}

/// The wait for the end of a cancelled job.
pub(crate) struct JobPatience {
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) table: Arc<Table>,
    pub(crate) job: Arc<Job>,
    pub(crate) limit: Duration,
    pub(crate) has_given_up: Arc<AtomicBool>,
    /// Its disk is going, so its end makes no difference to it.
    pub(crate) is_disk_going: bool,
}

impl JobPatience {
    /// Waits in a thread of its own, unless one waits already.
    pub(crate) fn begin(self) {
        let (job, which) = (Arc::clone(&self.job), usize::from(self.is_disk_going));
        let set =
            move |waits: bool| job.is_waited_for.get(which).is_some_and(|flag| flag.swap(waits, Ordering::AcqRel));
        if set(true) {
            return;
        }
        let ended = set.clone();
        let wait = move || {
            self.wait();
            ended(false);
        };
        if let Err(error) = std::thread::Builder::new().name("patience".into()).spawn(wait) {
            set(false);
            tracing::warn!("cannot start a thread: storage that hangs is waited for: {error}");
        }
    }

    fn runs_after(&self, limit: Duration) -> bool {
        drop(self.jobs.ended.wait_timeout_while(self.jobs.lock(), limit, |_| self.job.runs()));
        self.job.runs()
    }

    fn wait(&self) {
        let (id, disk) = (self.job.id, &self.job.disk);
        loop {
            let moved_bytes = self.job.moved_bytes();
            if !self.runs_after(self.limit) {
                return;
            }
            if self.job.moved_bytes() != moved_bytes {
                continue;
            }
            tracing::warn!(%disk, "job {id} does not end: its storage is given up");
            self.has_given_up.store(true, Ordering::Release);
            self.job.is_given_up.store(true, Ordering::Release);
            self.job.watch.give_up();
            if !self.runs_after(HOPELESS_PATIENCE) {
                return;
            }
            if self.job.moved_bytes() == moved_bytes {
                break;
            }
        }
        self.leave();
    }

    /// Counts the job as ended, unless it has.
    fn leave(&self) {
        let what = "what it has begun ends when the storage answers; until then the layers of the disk cannot change, and \
                    their files stay locked";
        let error = self.job.explained(Error::new(ErrorKind::Io, what));
        // A job that can no longer be cancelled ends as done when its storage answers.
        let is_late = || self.job.is_decided() && !self.is_disk_going || !self.table.leave_work(self.job.work);
        if self.jobs.end(&self.job, Err(error), is_late).is_ok() {
            let Job { id, disk, .. } = &*self.job;
            tracing::warn!(%disk, "job {id} is left: it waits for its storage, and keeps what it is writing to");
        }
    }
}

pub(crate) fn no_job(id: JobId) -> Error {
    Error::new(ErrorKind::BadOption, format!("there is no job {id}"))
}
