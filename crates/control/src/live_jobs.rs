//! Long work on running disks, as calls of the control interface start and steer it.

use crate::api::{CommitDisk, EventKind, Job, RebaseDisk, StreamDisk};
use crate::failure::Failure;
use crate::manager::Manager;
use block::{Error, ErrorKind, Result};
use daemon::{JobId, absolute};
use image::FileName;
use std::sync::Arc;

impl Manager {
    /// Starts to take layers of a disk back, from the top down.
    pub fn commit(self: &Arc<Self>, name: &str, request: CommitDisk) -> Result<Job> {
        let node = self.node(name)?;
        let (records, disk) = (Arc::clone(&self.records), name.to_owned());
        let take_off = move |below: Option<&FileName>| {
            let below = below.map(ToString::to_string).unwrap_or_default();
            records.change(|record| {
                if let Some(disk) = record.disk_mut(&disk) {
                    disk.take_off(&below);
                }
            })
        };
        let id = self.daemon.start_take_layers_back_with(node, request.layers, request.bytes_per_second, take_off)?;
        self.has_started(name, id)
    }

    /// Starts to pull what lower layers hold up into the top layer of a disk.
    pub fn stream(self: &Arc<Self>, name: &str, request: &StreamDisk) -> Result<Job> {
        let node = self.node(name)?;
        let base = request.base.as_deref().map(absolute);
        let (base, rate) = (base.as_deref(), request.bytes_per_second);
        let id = self.daemon.start_stream_with(node, base, rate, self.rest_on(name, None))?;
        self.has_started(name, id)
    }

    /// Starts to let the top layer of a disk rest on another image.
    pub fn rebase(self: &Arc<Self>, name: &str, request: &RebaseDisk) -> Result<Job> {
        let node = self.node(name)?;
        let base = absolute(&request.base);
        let format = request.format.as_deref().map(str::parse).transpose()?;
        let rest_on = self.rest_on(name, Some(base.to_string_lossy().into_owned()));
        let id = self.daemon.start_rebase_with(node, &base, format, request.bytes_per_second, rest_on)?;
        self.has_started(name, id)
    }

    /// What the record says before an image names another backing file: it allows the old one and the new one.
    fn rest_on(&self, name: &str, base: Option<String>) -> impl FnOnce(usize) -> Result<()> + Send + use<> {
        let (records, disk) = (Arc::clone(&self.records), name.to_owned());
        move |gone| {
            records.change(|record| {
                if let Some(disk) = record.disk_mut(&disk) {
                    disk.rest_on(gone, base);
                }
            })
        }
    }

    pub(crate) fn has_started(self: &Arc<Self>, name: &str, id: JobId) -> Result<Job> {
        self.events.publish(EventKind::JobStarted, Some(name), Some(id.number()), None);
        let (manager, disk) = (Arc::downgrade(self), name.to_owned());
        let tell_end = move || {
            // A manager that is going waits for its jobs itself.
            let Some(manager) = manager.upgrade() else { return };
            let message = match manager.daemon.wait_job(id) {
                Ok(()) => {
                    manager.events.publish(EventKind::LayersChanged, Some(&disk), None, None);
                    None
                }
                Err(error) => Some(error.to_string()),
            };
            manager.events.publish(EventKind::JobEnded, Some(&disk), Some(id.number()), message);
        };
        if let Err(error) = std::thread::Builder::new().name(format!("job-{id}-end")).spawn(tell_end) {
            tracing::warn!("nobody will be told of the end of job {id}: {error}");
        }
        self.job(id.number()).map_err(|failure| Error::new(ErrorKind::BadOption, failure.0.message))
    }

    /// Lets a job wait, or go on.
    pub(crate) fn pause_job(&self, number: u64, paused: bool) -> Result<Job, Failure> {
        self.daemon.pause_job(self.job_id(number)?, paused)?;
        self.job(number)
    }

    /// Limits how fast a job works.
    pub(crate) fn limit_job(&self, number: u64, bytes_per_second: u64) -> Result<Job, Failure> {
        self.daemon.set_job_rate(self.job_id(number)?, bytes_per_second)?;
        self.job(number)
    }
}
