//! Long work on disks that guests are using: one thread a job, and a list of those that run or have ended.
//!
//! A job keeps its disk by a claim in the table ([`crate::table`]). Whoever removes the disk by force cancels the job
//! there, then waits here for its end.

use crate::change::top_of;
use crate::daemon::Daemon;
use crate::status::{JobId, JobKind, JobState, JobStatus, NodeId};
use block::{Error, ErrorKind, Result};
use image::{CopyWatch, FileName, take_back};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

/// Jobs that have ended stay listed up to this many. The oldest are forgotten first.
const ENDED_MAX: usize = 64;

/// The list of jobs.
#[derive(Default)]
pub(crate) struct Jobs {
    state: Mutex<State>,
    /// A job has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: BTreeMap<JobId, Arc<Job>>,
    next: u64,
}

struct Job {
    id: JobId,
    kind: JobKind,
    node: NodeId,
    disk: String,
    watch: Arc<CopyWatch>,
    /// Set once, under the list's lock.
    end: OnceLock<Result<()>>,
}

impl Job {
    fn runs(&self) -> bool {
        self.end.get().is_none()
    }

    fn status(&self) -> JobStatus {
        let state = match self.end.get() {
            None => JobState::Running,
            Some(Ok(())) => JobState::Done,
            Some(Err(error)) if error.kind() == ErrorKind::Cancelled => JobState::Cancelled,
            Some(Err(error)) => JobState::Failed(error.to_string()),
        };
        // In this order: the first is part of the second.
        let (done_bytes, total_bytes) = (self.watch.done_bytes(), self.watch.total_bytes());
        let (id, kind, node, disk) = (self.id, self.kind, self.node, self.disk.clone());
        JobStatus { id, kind, node, disk, state, done_bytes, total_bytes }
    }
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_id(&self) -> JobId {
        let mut state = self.lock();
        state.next += 1;
        JobId(state.next - 1)
    }

    fn find(&self, id: JobId) -> Result<Arc<Job>> {
        self.lock().jobs.get(&id).cloned().ok_or_else(|| no_job(id))
    }

    fn end(&self, job: &Job, result: Result<()>) {
        let mut state = self.lock();
        // It has no end yet: only its thread gives it one.
        let _ = job.end.set(result);
        let ended: Vec<JobId> = state.jobs.values().filter(|job| !job.runs()).map(|job| job.id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MAX)) {
            state.jobs.remove(id);
        }
        drop(state);
        self.ended.notify_all();
    }

    fn wait_while(&self, is_early: impl Fn(&State) -> bool) {
        drop(self.ended.wait_while(self.lock(), |state| is_early(state)).unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits until no job of this disk runs.
    pub(crate) fn wait_for_all_of(&self, node: NodeId) {
        self.wait_while(|state| state.jobs.values().any(|job| job.node == node && job.runs()));
    }
}

/// A job that runs. Dropped without a result, it has failed.
struct Running {
    jobs: Arc<Jobs>,
    job: Arc<Job>,
}

impl Running {
    fn end(self, result: Result<()>) {
        self.jobs.end(&self.job, result);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.job.runs() {
            let what = format!("job {} panicked: look at its disk's image with check", self.job.id);
            self.jobs.end(&self.job, Err(Error::new(ErrorKind::Io, what)));
        }
    }
}

impl Daemon {
    /// Starts to take the top layer of a disk back into the layer below, which was the top before. Guests go on meanwhile.
    /// The file that is taken off stays where it is, and is of no use to anybody when the job is done.
    ///
    /// The disk cannot be removed meanwhile, except by force: that cancels the job first.
    pub fn start_take_overlay_back(&self, node: NodeId) -> Result<JobId> {
        self.start_take_overlay_back_with(node, |_| Ok(()))
    }

    /// As [`Daemon::start_take_overlay_back`]. When the layer below holds everything and is durable, `commit` is called
    /// with its name, while guests are held: whoever keeps a record of the disks makes it durable there. If it fails, the
    /// disk keeps its layers.
    pub fn start_take_overlay_back_with(
        &self,
        node: NodeId,
        commit: impl FnOnce(Option<&FileName>) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        let (id, kind, watch) = (self.jobs.next_id(), JobKind::TakeOverlayBack, Arc::new(CopyWatch::default()));
        let claim = format!("job {id} ({kind})");
        let (work, found, image) = self.image_for(claim, node, Some(Arc::clone(&watch)))?;
        let job = Arc::new(Job { id, kind, node, disk: found.name, watch, end: OnceLock::new() });
        drop(found.disk);
        self.jobs.lock().jobs.insert(id, Arc::clone(&job));
        let (running, table) = (Running { jobs: Arc::clone(&self.jobs), job }, Arc::clone(&self.table));
        let run = move || {
            let below = image.layer_file_names().nth(1).map(|(file, _)| file);
            let result = take_back(&image, &running.job.watch, || commit(below.as_ref()));
            if result.is_ok() {
                table.has_new_top(node, top_of(&image));
            }
            // Whoever sees the end may remove the disk, and use its files.
            drop(image);
            drop(work);
            running.end(result);
        };
        match std::thread::Builder::new().name(format!("job-{id}")).spawn(run) {
            Ok(_) => Ok(id),
            Err(error) => {
                self.jobs.lock().jobs.remove(&id);
                Err(Error::io("cannot start a thread for a job", error))
            }
        }
    }

    /// The jobs that run, and the last that have ended, in the order in which they were started.
    #[must_use]
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.jobs.lock().jobs.values().map(|job| job.status()).collect()
    }

    /// Asks a job to stop, and returns at once. One that is about to be done may still be done; one that has ended stays
    /// as it is.
    pub fn cancel_job(&self, id: JobId) -> Result<()> {
        self.jobs.find(id)?.watch.cancel();
        Ok(())
    }

    /// Waits for the end of a job. Its error is the job's; one of the kind [`ErrorKind::Cancelled`] if it was cancelled.
    pub fn wait_job(&self, id: JobId) -> Result<()> {
        let job = self.jobs.find(id)?;
        self.jobs.wait_while(|_| job.runs());
        match job.end.get() {
            Some(Err(error)) => Err(Error::new(error.kind(), error.to_string())),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Takes a job that has ended off the list.
    pub fn forget_job(&self, id: JobId) -> Result<()> {
        let mut state = self.jobs.lock();
        let job = state.jobs.get(&id).ok_or_else(|| no_job(id))?;
        if job.runs() {
            let message = format!("job {id} of the disk '{}' runs: cancel it first, or wait for its end", job.disk);
            return Err(Error::new(ErrorKind::Locked, message));
        }
        state.jobs.remove(&id);
        Ok(())
    }
}

fn no_job(id: JobId) -> Error {
    Error::new(ErrorKind::BadOption, format!("there is no job {id}"))
}
