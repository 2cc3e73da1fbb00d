//! Long work on running disks, which calls of the control interface start and steer.

use crate::api::{CommitDisk, CompactDisk, EventKind, Job, RebaseDisk, StreamDisk};
use crate::failure::Failure;
use crate::manager::Manager;
use crate::record::{DiskRecord, RecordedDisk, recorded_name};
use block::{Error, ErrorKind, Result};
use daemon::{BaseRecord, CommitOptions, CommitRecord, JobId, NodeId, TakenOff};
use drive::absolute;
use image::{Aim, FileName};
use std::sync::Arc;
use std::time::Duration;

/// How often a thread checks whether a job keeps its time.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The default for the longest delay of a request.
const STALL_MS: u64 = 50;

/// Returns the limits of a job, with the default stall.
pub(crate) fn aim_of(within_ms: Option<u64>, stall_ms: Option<u64>) -> Aim {
    let stall = Duration::from_millis(stall_ms.unwrap_or(STALL_MS));
    Aim { within: within_ms.map(Duration::from_millis), stall: Some(stall) }
}

/// What a disk rests on, in the record, which allows the old base and the new one while it changes.
struct RecordOfBase {
    record: DiskRecord,
    /// A base outside its chain.
    base: Option<String>,
}

impl BaseRecord for RecordOfBase {
    fn will_move(&mut self, gone: usize) -> Result<()> {
        self.record.change(|disk| disk.rest_on(gone, self.base.take()))
    }

    fn has_moved(&mut self) {
        tell(&self.record, self.record.change(RecordedDisk::has_moved));
    }

    fn stays(&mut self) {
        tell(&self.record, self.record.change(RecordedDisk::stays));
    }
}

/// Which layers a disk has, in the record, while they are committed.
struct RecordOfLayers(DiskRecord);

impl CommitRecord for RecordOfLayers {
    fn takes_off(&mut self, layers: &TakenOff) -> Result<()> {
        self.0.change_if_it_can(|disk| disk.take_off(layers))
    }

    fn goes(&mut self, layer: &FileName) -> Result<()> {
        self.0.change(|disk| disk.layer_goes(layer))
    }

    fn is_gone(&mut self, layer: &FileName) {
        tell(&self.0, self.0.change(|disk| disk.layer_is_gone(layer)));
    }

    fn stays(&mut self) {
        tell(&self.0, self.0.change(RecordedDisk::stays));
    }
}

/// The next daemon looks which base the image names.
fn tell(record: &DiskRecord, noted: Result<()>) {
    if let Err(error) = noted {
        tracing::warn!(disk = %record.name, "the record does not say what the disk rests on: {error}");
    }
}

impl Manager {
    /// Starts to commit layers of a disk into the layer below them.
    pub fn commit(self: &Arc<Self>, name: &str, request: CommitDisk) -> Result<Job> {
        let node = self.node(name)?;
        let aim = aim_of(request.within_ms, request.stall_ms);
        let options = CommitOptions::default().with(|options| {
            (options.top, options.base, options.layers) = (request.top, request.base, request.layers);
            (options.bytes_per_second, options.aim) = (request.bytes_per_second, aim);
        });
        let files = self.daemon.layers_of_commit(node, &options)?;
        let files: Vec<String> = files.iter().map(recorded_name).collect();
        self.refuse_writing_below(Some(name), &files)?;
        let record = RecordOfLayers(self.record_of(name, node));
        let id = self.daemon.start_commit(node, options, record)?;
        self.tell_if_behind(name, id, aim);
        self.has_started(name, id)
    }

    /// Starts to copy the data of lower layers into the top layer of a disk.
    pub fn stream(self: &Arc<Self>, name: &str, request: &StreamDisk) -> Result<Job> {
        let node = self.node(name)?;
        let base = request.base.as_deref().map(absolute);
        let (base, rate) = (base.as_deref(), request.bytes_per_second);
        let id = self.daemon.start_stream_with(node, base, rate, self.rest_on(name, node, None))?;
        self.has_started(name, id)
    }

    /// Starts to give the top layer of a disk another backing file.
    pub fn rebase(self: &Arc<Self>, name: &str, request: &RebaseDisk) -> Result<Job> {
        let node = self.node(name)?;
        let base = absolute(&request.base);
        let format = request.format.as_deref().map(str::parse).transpose()?;
        let rest_on = self.rest_on(name, node, Some(base.to_string_lossy().into_owned()));
        let id = self.daemon.start_rebase_with(node, &base, format, request.bytes_per_second, rest_on)?;
        self.has_started(name, id)
    }

    /// Starts to make the file of a disk's top layer shorter.
    pub fn compact(self: &Arc<Self>, name: &str, request: CompactDisk) -> Result<Job> {
        let id = self.daemon.start_compact(self.node(name)?, request.bytes_per_second)?;
        self.has_started(name, id)
    }

    fn rest_on(&self, name: &str, node: NodeId, base: Option<String>) -> RecordOfBase {
        RecordOfBase { record: self.record_of(name, node), base }
    }

    /// The record of a disk, for a job that may go on after the disk was removed.
    pub(crate) fn record_of(&self, name: &str, node: NodeId) -> DiskRecord {
        DiskRecord { records: Arc::clone(&self.records), name: name.to_owned(), node }
    }

    pub(crate) fn has_started(self: &Arc<Self>, name: &str, id: JobId) -> Result<Job> {
        self.events.publish(EventKind::JobStarted, Some(name), Some(id.number()), None);
        let (manager, disk) = (Arc::downgrade(self), name.to_owned());
        let tell_end = move || {
            // A manager that ends waits for its jobs itself.
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

    /// Publishes an event when a job with a time limit slows guests down, and when it cannot keep the limit.
    pub(crate) fn tell_if_behind(self: &Arc<Self>, name: &str, id: JobId, aim: Aim) {
        let Some(within) = aim.within else { return };
        let (manager, disk) = (Arc::downgrade(self), name.to_owned());
        let tell = move || {
            let (mut was_throttled, mut was_late) = (false, false);
            while let Some(manager) = manager.upgrade() {
                let Ok(job) = manager.job(id.number()) else { return };
                let is_over = !job.state.is_under_way();
                if let Some(rounds) = job.rounds {
                    let say = |what: String| {
                        let message = format!("{what}; {} bytes are left", rounds.left_bytes);
                        manager.events.publish(EventKind::JobBehind, Some(&disk), Some(id.number()), Some(message));
                    };
                    if rounds.throttled_us > 0 && !std::mem::replace(&mut was_throttled, true) {
                        say("writes of the guest wait, so that the copy gets ahead".to_owned());
                    }
                    if rounds.late && !std::mem::replace(&mut was_late, true) {
                        say(format!("the storage is too slow to be done within {} s", within.as_secs_f64()));
                    }
                }
                drop(manager);
                if is_over {
                    return;
                }
                std::thread::sleep(LOOK_EVERY);
            }
        };
        if let Err(error) = std::thread::Builder::new().name(format!("job-{id}-watch")).spawn(tell) {
            tracing::warn!("nobody will be told whether job {id} keeps its time: {error}");
        }
    }

    /// Pauses a job, or continues it.
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
