//! Long work on disks in use: one thread for each job, and a list of jobs that run or have ended.
//!
//! A job keeps its disk by a claim in the table ([`crate::table`]). Whoever removes the disk by force cancels the job
//! there, then waits here for its end.
//!
//! A job whose storage hangs cannot be ended from outside: its thread waits in the kernel. If it was cancelled and
//! moves nothing for a time, it is *left*: it counts as ended, and its thread stays until the storage answers. The
//! thread keeps the right to change the disk's layers, what it has reserved in them, and their files with their locks.
//! So nothing is used by others that its last write may hit, and it ends in order when the storage answers.

use crate::change::{BaseRecord, TakenOff, top_of};
use crate::daemon::Daemon;
use crate::hang::HOPELESS_PATIENCE;
use crate::status::{JobId, JobKind, JobState, JobStatus, NodeId};
use crate::table::Table;
use block::{Error, ErrorKind, Result};
use drive::EngineOpener;
use image::{
    Aim, CopyWatch, FileName, Format, Image, ImageOptions, NewBelow, OpenedBase, compact, move_onto_or_stay,
    take_back_then,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
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
struct State {
    jobs: BTreeMap<JobId, Arc<Job>>,
    next: u64,
    /// Disks whose image is being edited, once for each edit. No job starts on them.
    edited: Vec<NodeId>,
}

struct Job {
    id: JobId,
    kind: JobKind,
    node: NodeId,
    disk: String,
    watch: Arc<CopyWatch>,
    /// Watches what the job has to finish even after a cancel.
    ending: Arc<CopyWatch>,
    /// Its claim in the table.
    work: u64,
    /// It was cancelled, and its storage did not answer.
    is_given_up: AtomicBool,
    /// A thread waits for its end: since it was cancelled, or since its disk is going.
    is_waited_for: [AtomicBool; 2],
    /// Set once, under the list's lock.
    end: OnceLock<Result<()>>,
}

impl Job {
    fn runs(&self) -> bool {
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
    fn explained(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Cancelled || !self.is_given_up.load(Ordering::Acquire) {
            return error;
        }
        let what = "cancelled, and given up because the storage does not answer";
        Error::new(ErrorKind::Cancelled, format!("{what}: {error}"))
    }

    fn status(&self) -> JobStatus {
        let state = match self.end.get() {
            None if self.watch.is_paused() => JobState::Paused,
            None => JobState::Running,
            Some(Ok(())) => JobState::Done,
            Some(Err(error)) if error.kind() == ErrorKind::Cancelled => JobState::Cancelled,
            Some(Err(error)) => JobState::Failed(error.to_string()),
        };
        // Read in this order, because the first is part of the second.
        let (done_bytes, total_bytes) = (self.watch.done_bytes(), self.watch.total_bytes());
        let (id, kind, node, disk) = (self.id, self.kind, self.node, self.disk.clone());
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
            outcome: self.watch.outcome().map(str::to_owned),
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

    /// Lists a job, unless its disk has another one or is being edited. One lock covers the question and the answer:
    /// of several callers at once, one goes on.
    fn begin(&self, job: &Arc<Job>, table: &Table) -> Result<()> {
        let mut state = self.lock();
        if table.has_left_works(job.node) {
            let what = format!(
                "the disk '{}' has a job that was given up and still waits for the storage: try again when it answers",
                job.disk
            );
            return Err(Error::new(ErrorKind::Locked, what));
        }
        if let Some(other) = state.running_on(job.node) {
            let what = format!("the disk '{}' has a job already: {other}; wait for its end, or cancel it", job.disk);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        if state.edited.contains(&job.node) {
            let what = format!("the image of the disk '{}' is being changed: try again", job.disk);
            return Err(Error::new(ErrorKind::Locked, what));
        }
        state.jobs.insert(job.id, Arc::clone(job));
        Ok(())
    }

    /// Keeps jobs away from a disk while its image is edited. Refused if the disk has a job.
    pub(crate) fn begin_edit(self: &Arc<Self>, node: NodeId, disk: &str) -> Result<Editing> {
        let mut state = self.lock();
        if let Some(job) = state.running_on(node) {
            let what = format!("the disk '{disk}' has {job}; wait for its end, or cancel it");
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

    fn running_jobs_on(&self, node: NodeId) -> Vec<Arc<Job>> {
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

    fn wait_while(&self, is_early: impl Fn(&State) -> bool) {
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
struct Running {
    jobs: Arc<Jobs>,
    job: Arc<Job>,
}

impl Running {
    fn end(self, result: Result<()>) {
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
struct JobPatience {
    jobs: Arc<Jobs>,
    table: Arc<Table>,
    job: Arc<Job>,
    limit: Duration,
    has_given_up: Arc<AtomicBool>,
    /// Its disk is going, so its end makes no difference to it.
    is_disk_going: bool,
}

impl JobPatience {
    /// Waits in a thread of its own, unless one waits already.
    fn begin(self) {
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

impl Daemon {
    fn be_patient_with(&self, job: Arc<Job>, is_disk_going: bool) {
        let (jobs, table) = (Arc::clone(&self.jobs), Arc::clone(&self.table));
        let (limit, has_given_up) = (self.config.give_up_after, Arc::clone(&self.has_given_up));
        JobPatience { jobs, table, job, limit, has_given_up, is_disk_going }.begin();
    }

    /// Limits the wait for the cancelled jobs of a disk.
    pub(crate) fn be_patient_with_jobs_of(&self, node: NodeId) {
        self.jobs.running_jobs_on(node).into_iter().for_each(|job| self.be_patient_with(job, true));
    }

    /// Starts to take the top layer of a disk back into the layer below, which was the top before. Guests go on
    /// meanwhile. The file that is taken off stays where it is. When the job is done, it is no longer needed.
    ///
    /// The disk cannot be removed meanwhile, except by force, which cancels the job first.
    pub fn start_take_overlay_back(&self, node: NodeId) -> Result<JobId> {
        self.start_take_overlay_back_with(node, |_| Ok(()))
    }

    /// As [`Daemon::start_take_overlay_back`]. When the layer below holds all data, `commit` is called, while guests go
    /// on and write to both layers. There the caller makes its record of the disks durable. If `commit` fails, the disk
    /// keeps its layers.
    pub fn start_take_overlay_back_with(
        &self,
        node: NodeId,
        commit: impl FnOnce(&TakenOff) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        let mut commit = Some(commit);
        self.start_take_layers_back_with(node, 1, None, Aim::default(), move |layers| {
            commit.take().map_or(Ok(()), |commit| commit(layers))
        })
    }

    /// As [`Daemon::start_take_overlay_back_with`], for this many layers, one after the other from the top down. While
    /// guests go on, at most `bytes_per_second` are moved, and the job keeps to `aim`. `commit` is called for each
    /// layer. If the job ends early, layers already taken off stay off.
    pub fn start_take_layers_back_with(
        &self,
        node: NodeId,
        layers: usize,
        bytes_per_second: Option<u64>,
        aim: Aim,
        mut commit: impl FnMut(&TakenOff) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        self.start_job(JobKind::TakeOverlayBack, node, bytes_per_second, move |image, watch, has_new_top| {
            watch.set_aim(aim);
            let count = image.layer_file_names().count();
            if layers != 1 && (layers == 0 || layers >= count) {
                let what = format!("the disk has {count} layers: between 1 and {} can go", count.saturating_sub(1));
                return Err(Error::new(ErrorKind::BadOption, what));
            }
            for _ in 0..layers {
                let layers = TakenOff::of(image);
                take_back_then(image, watch, || layers.as_ref().map_or(Ok(()), &mut commit), has_new_top)?;
            }
            Ok(())
        })
    }

    /// Starts to copy what lower layers hold into the top layer of a disk, which then rests on the layer `base` of its
    /// chain, or on nothing.
    pub fn start_stream_with(
        &self,
        node: NodeId,
        base: Option<&Path>,
        bytes_per_second: Option<u64>,
        record: impl BaseRecord + 'static,
    ) -> Result<JobId> {
        let (below, gone) = match base {
            None => (NewBelow::Nothing, usize::MAX),
            Some(base) => {
                let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
                let index = layer_named(&image, base).ok_or_else(|| {
                    let what = format!("'{}' is no layer below the top of the disk '{}'", base.display(), found.name);
                    Error::new(ErrorKind::BadOption, what)
                })?;
                (NewBelow::Layer(index), index - 1)
            }
        };
        self.start_move(node, below, gone, bytes_per_second, record)
    }

    fn start_move(
        &self,
        node: NodeId,
        below: NewBelow,
        gone: usize,
        bytes_per_second: Option<u64>,
        record: impl BaseRecord + 'static,
    ) -> Result<JobId> {
        self.start_job(JobKind::MoveOnto, node, bytes_per_second, move |image, watch, _| {
            let record = RefCell::new(record);
            let moved = move_onto_or_stay(
                image,
                below,
                watch,
                || record.borrow_mut().will_move(gone),
                || record.borrow_mut().stays(),
            );
            if moved.is_ok() {
                record.borrow_mut().has_moved();
            }
            moved
        })
    }

    /// As [`Daemon::start_stream_with`], for a base that may be an image outside the chain.
    pub fn start_rebase_with(
        &self,
        node: NodeId,
        base: &Path,
        format: Option<Format>,
        bytes_per_second: Option<u64>,
        record: impl BaseRecord + 'static,
    ) -> Result<JobId> {
        let (_work, found, image) = self.image_for("a look at its layers".to_owned(), node, None)?;
        if layer_named(&image, base).is_some() {
            return self.start_stream_with(node, Some(base), bytes_per_second, record);
        }
        let options = ImageOptions::new(base).with(|options| {
            options.format = format;
            options.allow_backing = self.config.allow_backing.clone();
            options.listed = self.listed_for(&found);
        });
        let opener = EngineOpener::of_disk(&found.options).with_buffers(image.buffers());
        let below = NewBelow::Base(OpenedBase::open(&options, &opener)?);
        drop((found, image));
        self.start_move(node, below, usize::MAX, bytes_per_second, record)
    }

    /// Starts to make the file of a disk's top layer shorter. Clusters at its end move down into holes while guests go
    /// on.
    pub fn start_compact(&self, node: NodeId, bytes_per_second: Option<u64>) -> Result<JobId> {
        self.start_job(JobKind::Compact, node, bytes_per_second, move |image, watch, _| {
            let compacted = compact(image, watch)?;
            watch.set_outcome(compacted.to_string());
            Ok(())
        })
    }

    /// Starts a job on a disk's image. `work_on` calls its last argument when the disk has another top.
    pub(crate) fn start_job(
        &self,
        kind: JobKind,
        node: NodeId,
        bytes_per_second: Option<u64>,
        work_on: impl FnOnce(&Image, &CopyWatch, &dyn Fn()) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        self.start_job_with_ending(kind, node, bytes_per_second, Arc::default(), work_on)
    }

    /// Like [`Daemon::start_job`], for a job that has something to finish after a cancel, which `ending` watches.
    pub(crate) fn start_job_with_ending(
        &self,
        kind: JobKind,
        node: NodeId,
        bytes_per_second: Option<u64>,
        ending: Arc<CopyWatch>,
        work_on: impl FnOnce(&Image, &CopyWatch, &dyn Fn()) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        let (id, watch) = (self.jobs.next_id(), Arc::new(CopyWatch::that_can_give_up()));
        watch.set_rate(bytes_per_second.unwrap_or(0));
        let claim = format!("job {id} ({kind})");
        let (work, found, image) = self.image_for(claim, node, Some(Arc::clone(&watch)))?;
        let job = Arc::new(Job {
            id,
            kind,
            node,
            disk: found.name,
            watch,
            ending,
            work: work.number(),
            is_given_up: AtomicBool::new(false),
            is_waited_for: <[AtomicBool; 2]>::default(),
            end: OnceLock::new(),
        });
        drop(found.disk);
        self.jobs.begin(&job, &self.table)?;
        let (running, table) = (Running { jobs: Arc::clone(&self.jobs), job }, Arc::clone(&self.table));
        let run = move || {
            let has_new_top = || table.has_new_top(node, top_of(&image));
            let result = work_on(&image, &running.job.watch, &has_new_top);
            let result = result.map_err(|error| running.job.explained(error));
            // A caller that sees the end may remove the disk and use its files.
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

    /// Pauses a job between two pieces, or lets it go on.
    pub fn pause_job(&self, id: JobId, paused: bool) -> Result<()> {
        let watch = self.running_job(id)?;
        if paused {
            watch.watch.pause()
        } else {
            watch.watch.resume()
        }
        Ok(())
    }

    /// Sets the most bytes that a job moves in a second while guests go on; 0 lifts the limit.
    pub fn set_job_rate(&self, id: JobId, bytes_per_second: u64) -> Result<()> {
        self.running_job(id)?.watch.set_rate(bytes_per_second);
        Ok(())
    }

    fn running_job(&self, id: JobId) -> Result<Arc<Job>> {
        let job = self.jobs.find(id)?;
        match job.runs() {
            true => Ok(job),
            false => Err(Error::new(ErrorKind::BadOption, format!("job {id} has ended"))),
        }
    }

    /// Returns the running jobs, and the last that have ended, in the order in which they were started.
    #[must_use]
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.jobs.lock().jobs.values().map(|job| job.status()).collect()
    }

    /// Asks a job to stop, and returns at once. A job that is nearly done may still finish; one that has ended stays as
    /// it is. A job whose storage hangs is given up after a time ([`crate::DaemonConfig::give_up_after`]), and its disk
    /// goes on.
    pub fn cancel_job(&self, id: JobId) -> Result<()> {
        let job = self.jobs.find(id)?;
        job.watch.cancel();
        if job.runs() {
            self.be_patient_with(job, false);
        }
        Ok(())
    }

    /// Waits for the end of a job, and returns the job's error. It has the kind [`ErrorKind::Cancelled`] if the job was
    /// cancelled.
    pub fn wait_job(&self, id: JobId) -> Result<()> {
        let job = self.jobs.find(id)?;
        self.jobs.wait_while(|_| job.runs());
        match job.end.get() {
            Some(Err(error)) => Err(Error::new(error.kind(), error.to_string())),
            Some(Ok(())) | None => Ok(()),
        }
    }

    /// Removes an ended job from the list.
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

/// Returns which layer below a disk's top lies in this file.
fn layer_named(image: &Image, path: &Path) -> Option<usize> {
    let canonical = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let is_it = |(own, _): &(FileName, Option<FileName>)| own.path() == Some(&*canonical);
    image.layer_file_names().enumerate().skip(1).find(|(_, names)| is_it(names)).map(|(index, _)| index)
}

fn no_job(id: JobId) -> Error {
    Error::new(ErrorKind::BadOption, format!("there is no job {id}"))
}

#[cfg(test)]
#[path = "jobs_tests.rs"]
mod tests;
