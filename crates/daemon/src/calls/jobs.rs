//! Starts jobs on disks in use, pauses them, cancels them and waits for them.

use crate::daemon::Daemon;
use crate::jobs::layers::{BaseRecord, TakenOff, top_of};
use crate::jobs::list::{Job, JobPatience, Running, no_job};
use crate::state::status::{JobId, JobKind, JobStatus, NodeId};
use block::{Error, ErrorKind, Result};
use drive::EngineOpener;
use image::{
    Aim, CopyWatch, FileName, Format, Image, ImageOptions, NewBelow, OpenedBase, compact, move_onto_or_stay,
    take_back_then,
};
use std::cell::RefCell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

impl Daemon {
    fn be_patient_with(&self, job: Arc<Job>, is_disk_going: bool) {
        let (jobs, table) = (Arc::clone(&self.jobs), Arc::clone(&self.table));
        let (limit, has_given_up) = (self.config.give_up_after, Arc::clone(&self.has_given_up));
        JobPatience { jobs, table, job, limit, has_given_up, is_disk_going }.begin();
    }

    /// Limits the wait for the cancelled jobs of a disk.
    pub(crate) fn be_patient_with_jobs_of(&self, node: NodeId) {
        for job in self.jobs.running_jobs_on(node) {
            job.is_cancelled.store(true, Ordering::Release);
            self.be_patient_with(job, true);
        }
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
    /// keeps its layers. If its error is of the kind [`ErrorKind::Unsure`], it is called again, and guests write to both
    /// layers until it is known which of them the caller's record names.
    pub fn start_take_overlay_back_with(
        &self,
        node: NodeId,
        commit: impl FnMut(&TakenOff) -> Result<()> + Send + 'static,
    ) -> Result<JobId> {
        self.start_take_layers_back_with(node, 1, None, Aim::default(), commit)
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
        self.start_move(JobKind::MoveOnto, node, below, gone, bytes_per_second, record)
    }

    fn start_move(
        &self,
        kind: JobKind,
        node: NodeId,
        below: NewBelow,
        gone: usize,
        bytes_per_second: Option<u64>,
        record: impl BaseRecord + 'static,
    ) -> Result<JobId> {
        self.start_job(kind, node, bytes_per_second, move |image, watch, _| {
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
        if let Some(index) = layer_named(&image, base) {
            drop((found, image));
            let below = NewBelow::Layer(index);
            return self.start_move(JobKind::Rebase, node, below, index - 1, bytes_per_second, record);
        }
        let options = ImageOptions::new(base).with(|options| {
            options.format = format;
            options.allow_backing = self.config.allow_backing.clone();
            options.listed = self.listed_for(&found);
        });
        let opener = EngineOpener::of_disk(&found.options).with_buffers(image.buffers());
        let below = NewBelow::Base(OpenedBase::open(&options, &opener)?);
        drop((found, image));
        self.start_move(JobKind::Rebase, node, below, usize::MAX, bytes_per_second, record)
    }

    /// Starts to make the file of a disk's top layer shorter. Clusters at its end move down into holes while guests go
    /// on.
    pub fn start_compact(&self, node: NodeId, bytes_per_second: Option<u64>) -> Result<JobId> {
        self.start_job(JobKind::Compact, node, bytes_per_second, move |image, watch, _| {
            let compacted = compact(image, watch)?;
            watch.add_outcome(compacted.to_string());
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
            is_cancelled: AtomicBool::new(false),
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
        job.is_cancelled.store(true, Ordering::Release);
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

#[cfg(test)]
#[path = "jobs_tests.rs"]
mod tests;
