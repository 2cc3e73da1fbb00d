//! A daemon and the record of what it serves: the calls of the control interface.
//!
//! A change is answered when its record is durable. A change of the daemon that cannot be recorded is undone.

mod add;
mod answers;
mod away;
mod change;
mod configured;
mod exports;
mod held;
mod latency;
mod points;
mod reload;
mod restore;
#[cfg(test)]
mod tests;

pub use self::configured::Configured;

use self::answers::{counters_of, to_counters, to_disk, to_job};
use self::away::Away;
use self::exports::{refuse_number_of_passed, to_export, with_absolute_paths};
use self::held::Holding;
use self::reload::Configuration;
use crate::api::{
    AddExport, Counters, Disk, DiskStats, Event, EventKind, Export, FailedDisk, FailedExport, Job, Overlay,
    ReactorStats, Stats, TableStats,
};
use crate::events::Events;
use crate::failure::Failure;
use crate::options::Options;
use crate::record::{Record, RecordedDisk, Records, recorded_name, target_name};
use crate::storage_calls::StorageCalls;
use block::{Error, ErrorKind, Result};
use daemon::{Daemon, DaemonConfig, DiskStatus, ExportId, JobId, NodeId};
use drive::absolute;
use image::FileName;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::broadcast;

/// How many names of disks a message lists.
const NAMES_SHOWN: usize = 20;

/// A daemon with a record of what it serves.
///
/// Any thread may make these calls, except a reactor's: they block for as long as opening, closing or growing a disk
/// takes.
pub struct Manager {
    pub(crate) daemon: Daemon,
    pub(crate) records: Arc<Records>,
    /// The request that made each export: `None` for the export of the disk's own options.
    exports: Mutex<BTreeMap<ExportId, Option<AddExport>>>,
    /// Recorded disks that are not served at the moment.
    away: Away,
    /// The disks that serve drives of the command line or of the configuration file, by name.
    configured: Mutex<BTreeMap<String, NodeId>>,
    /// New drives of the configuration that the last reload could not open, and why.
    not_opened: Mutex<Vec<FailedDisk>>,
    /// Recorded exports that could not be served.
    failed_exports: Mutex<Vec<exports::NotServed>>,
    pub(crate) events: Arc<Events>,
    pub(crate) storage_calls: Arc<StorageCalls>,
    /// Tells a thread about disks that begin to hold requests.
    holds: Sender<Holding>,
    /// The configuration file, if there is one. Locked while it is read again.
    configuration: Mutex<Option<Configuration>>,
    /// Whether there is one. Known without the lock, which a reload may keep for as long as storage hangs.
    has_configuration: AtomicBool,
    /// The machine that the disks belong to.
    pub(crate) domain: OnceLock<String>,
    changes: change::Changing,
    ending: Mutex<bool>,
    asked_to_end: Condvar,
}

impl std::fmt::Debug for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manager").field("records", &self.records).finish_non_exhaustive()
    }
}

impl Manager {
    /// Starts a daemon that serves nothing yet. With a state directory, it has a record; [`Manager::restore`] brings
    /// the recorded disks back.
    pub fn start(mut config: DaemonConfig, state_directory: Option<&Path>) -> Result<Self> {
        let records = state_directory.map_or_else(|| Ok(Records::default()), Records::in_directory)?;
        // The user named these files when the disks were added, or by putting a layer on them.
        let recorded = records.current();
        config.listed.extend(recorded.disks.iter().flat_map(RecordedDisk::files).map(PathBuf::from));
        let events = Arc::default();
        Ok(Self {
            holds: held::tell_of(Arc::clone(&events))?,
            daemon: Daemon::start(config)?,
            records: Arc::new(records),
            exports: Mutex::default(),
            away: Away::default(),
            configured: Mutex::default(),
            not_opened: Mutex::default(),
            failed_exports: Mutex::default(),
            events,
            storage_calls: Arc::default(),
            configuration: Mutex::default(),
            has_configuration: AtomicBool::new(false),
            domain: OnceLock::new(),
            changes: change::Changing::default(),
            ending: Mutex::new(false),
            asked_to_end: Condvar::new(),
        })
    }

    /// The daemon.
    #[must_use]
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Names the machine that the disks belong to, for metrics. Only the first name counts.
    pub fn is_of_domain(&self, name: &str) {
        let _ = self.domain.set(name.to_owned());
    }

    /// Closes a disk, with the exports that nobody uses. A disk with guests, clients or jobs is refused, unless `force`
    /// ends them first. A disk that could not be opened is taken off the record. A configured disk stays away.
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<()> {
        let key = self.records.current().disk(name).and_then(|disk| disk.configured.clone());
        match self.daemon.disk_named(name) {
            Some(node) => {
                let key = key.filter(|_| self.record_of(name, node).check().is_ok());
                self.remove_served(name, node, force, key)
            }
            None if self.away.has_failed(name) => self.forget_failed(name, key),
            None => self.node(name).map(drop),
        }
    }

    /// Closes a disk that is open, whatever else may get its name meanwhile.
    fn remove_served(&self, name: &str, node: NodeId, force: bool, key: Option<String>) -> Result<()> {
        let closed = self.daemon.remove_disk(node, force);
        // A disk that could not be closed is removed, too.
        if self.daemon.disk_named(name) == Some(node) {
            return closed;
        }
        let what = || format!("the disk '{name}' is removed, but could not be closed");
        let closed = closed.map_err(|error| error.in_context(what()));
        self.forget_ended_exports();
        self.tell_of_fleece(name, Some(node));
        let forgotten = self.records.forget(name, Some(node), key);
        self.take_failed_exports(node);
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
        let Err(error) = forgotten else { return closed };
        // The next start serves it again. Until it is off the record, nobody may write below its layers.
        let error = error.in_context("it is closed, but stays on record until it is removed again");
        self.away.fails(name, error.to_string());
        let error = error.in_context(format!("the disk '{name}'"));
        Err(match closed {
            Ok(()) => error,
            Err(closed) => error.in_context(closed.to_string()),
        })
    }

    /// Logs what a disk leaves behind that is about to be forgotten.
    fn tell_of_fleece(&self, name: &str, node: Option<NodeId>) {
        let record = self.records.current();
        let disk = record.disk(name).filter(|_| self.records.node_of(name) == node);
        if let Some(fleece) = disk.and_then(RecordedDisk::fleece_on_top) {
            let what = "holds what its guest wrote last, and stays: 'ringdisk commit' takes it back into the image";
            tracing::warn!(disk = %name, "the disk is removed, and '{fleece}' {what}");
        }
    }

    /// Takes a disk that could not be opened off the record.
    fn forget_failed(&self, name: &str, key: Option<String>) -> Result<()> {
        let node = self.records.node_of(name);
        self.tell_of_fleece(name, node);
        self.records.forget(name, node, key)?;
        self.away.take_failed(name);
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
        Ok(())
    }

    /// Reopens the files of a disk, because one was replaced, or changed behind the disk.
    pub fn reopen(&self, name: &str, force: bool) -> Result<Disk> {
        let node = self.node(name)?;
        // Bitmaps do not note what was changed behind the disk. A backup may end meanwhile.
        let forget = || self.record_of(name, node).change(|disk| disk.last_backups.clear());
        forget()?;
        self.daemon.reopen(node, force)?;
        forget()?;
        self.events.publish(EventKind::DiskChanged, Some(name), None, Some("its files were opened anew".to_owned()));
        self.disk_of(node)
    }

    /// Makes a disk larger; its guests learn the new size.
    pub fn resize(&self, name: &str, size_bytes: u64) -> Result<Disk> {
        let node = self.node(name)?;
        self.daemon.resize(node, size_bytes)?;
        self.events.publish(EventKind::DiskResized, Some(name), None, Some(format!("{size_bytes} bytes")));
        self.disk_of(node)
    }

    /// Puts new, empty qcow2 layers on top of disks, all at one moment. The record names them before anything is
    /// written to them.
    pub fn snapshot(&self, overlays: &[Overlay]) -> Result<Vec<Disk>> {
        let wanted = |overlay: &Overlay| {
            let Overlay { disk, overlay } = overlay;
            Ok((disk.clone(), self.node(disk)?, target_name(overlay)?))
        };
        let wanted = overlays.iter().map(wanted).collect::<Result<Vec<_>>>()?;
        if wanted.is_empty() {
            return Err(Error::new(ErrorKind::BadOption, "a snapshot needs at least one disk and its overlay"));
        }
        for (index, (name, node, _)) in wanted.iter().enumerate() {
            if wanted.iter().take(index).any(|(_, other, _)| other == node) {
                return Err(Error::new(ErrorKind::BadOption, format!("the disk '{name}' is named twice")));
            }
        }
        self.put_on(&wanted)?;
        wanted.iter().map(|(_, node, _)| self.disk_of(*node)).collect()
    }

    /// Puts layers on these disks, by their names and numbers: other disks may get the names meanwhile.
    fn put_on(&self, wanted: &[(String, NodeId, FileName)]) -> Result<()> {
        let nodes: Vec<(NodeId, FileName)> = wanted.iter().map(|(_, node, file)| (*node, file.clone())).collect();
        let put_on = |record: &mut Record| {
            for (name, node, file) in wanted {
                // The call may have waited for storage longer than the disk was there.
                self.record_of(name, *node).check()?;
                if let Some(disk) = record.disk_mut(name) {
                    disk.put_on(&recorded_name(file));
                    disk.is_finished(&recorded_name(file));
                }
            }
            Ok(())
        };
        // If they could not be recorded, the directory may name them all the same: it is written anew.
        let undo = |record: &mut Record| {
            for (name, node, file) in wanted {
                let is_its = self.record_of(name, *node).check().is_ok();
                let disk = record.disk_mut(name).filter(|disk| is_its && disk.has_top(&recorded_name(file)));
                if let Some(disk) = disk {
                    disk.undo_put_on();
                }
            }
        };
        // A file that is made, and not yet a layer when the daemon is killed, is removed by the next one.
        let is_new = |file: &FileName| !file.path().is_some_and(Path::exists);
        let new = wanted.iter().filter(|(_, _, file)| is_new(file));
        let _unfinished = new.map(|(name, node, file)| self.reserve(name, *node, file)).collect::<Result<Vec<_>>>()?;
        let has_made = |node: NodeId, file: &FileName| {
            let mut its = wanted.iter().filter(|(_, other, _)| *other == node);
            its.try_for_each(|(name, node, _)| self.record_of(name, *node).has_made(file))
        };
        let commit = || self.records.try_change(put_on);
        self.daemon.put_overlays_with(&nodes, has_made, commit, || self.records.change(undo))?;
        for (name, _, file) in wanted {
            let message = format!("'{file}' is the new top");
            self.events.publish(EventKind::LayersChanged, Some(name), None, Some(message));
        }
        Ok(())
    }

    /// Adds an export of a disk, for a guest's monitor or for NBD clients.
    pub fn add_export(&self, request: AddExport) -> Result<Export> {
        let node = self.node(&request.disk)?;
        self.add_export_to(node, request)
    }

    /// As [`Manager::add_export`], to the disk of this number, whatever else may get its name meanwhile.
    fn add_export_to(&self, node: NodeId, request: AddExport) -> Result<Export> {
        let request = with_absolute_paths(request);
        if self.records.is_durable() {
            refuse_number_of_passed(&request)?;
        }
        let id = self.begin_export(node, &request)?;
        let record = |disk: &mut RecordedDisk| {
            // An export that failed at the start is already in the record.
            disk.exports.retain(|other| *other != request);
            disk.exports.push(request.clone());
        };
        self.record_of(&request.disk, node).try_change(record).inspect_err(|_| self.undo_export(id))?;
        let disk = request.disk.clone();
        lock(&self.failed_exports).retain(|other| other.node != node || other.request != request);
        lock(&self.exports).insert(id, Some(request));
        let gone = || Error::new(ErrorKind::Locked, "the export was removed meanwhile");
        let export = self.exports().into_iter().find(|export| export.id == id.number()).ok_or_else(gone)?;
        let uri = export.nbd.as_ref().map(|nbd| nbd.uri.clone());
        self.events.publish(EventKind::ExportAdded, Some(&disk), Some(id.number()), uri);
        Ok(export)
    }

    fn undo_export(&self, id: ExportId) {
        if let Err(error) = self.daemon.remove_export(id) {
            tracing::error!("{error}");
        }
    }

    /// Removes an export. The disk stays.
    pub(crate) fn remove_export(&self, number: u64) -> Result<(), Failure> {
        if let Some(disk) = self.forget_failed_export(|export| export.id == number)? {
            self.events.publish(EventKind::ExportRemoved, Some(&disk), Some(number), None);
            return Ok(());
        }
        let found = self.daemon.exports().into_iter().find(|export| export.id.number() == number);
        let export = found.ok_or_else(|| Failure::not_found(format!("there is no export {number}")))?;
        let disk = self.name_of(export.node)?;
        let not_now = || {
            let what = format!("the export {number} is being added or removed just now: try again");
            Failure::from(Error::new(ErrorKind::Locked, what))
        };
        let how = lock(&self.exports).get(&export.id).cloned().ok_or_else(not_now)?;
        // The record comes first: an export that has ended does not come back with the next start.
        self.record_of(&disk, export.node).change(|disk| match &how {
            Some(how) => disk.exports.retain(|other| other != how),
            None => disk.own_export = false,
        })?;
        self.daemon.remove_export(export.id)?;
        lock(&self.exports).remove(&export.id);
        self.events.publish(EventKind::ExportRemoved, Some(&disk), Some(number), None);
        Ok(())
    }

    pub(crate) fn node(&self, name: &str) -> Result<NodeId> {
        self.daemon.disk_named(name).ok_or_else(|| self.absence_of(name))
    }

    /// Says why a disk cannot be used now.
    fn absence_of(&self, name: &str) -> Error {
        let none = || Error::new(ErrorKind::NotFound, self.no_disk(name));
        match self.daemon.disk_named(name) {
            Some(_) => Error::new(ErrorKind::Locked, format!("the disk '{name}' is being added or removed just now")),
            None => self.away.absence(name).unwrap_or_else(none),
        }
    }

    /// Says that there is no disk of this name, and which there are.
    pub(crate) fn no_disk(&self, name: &str) -> String {
        let names: BTreeSet<String> = self.daemon.disk_names().into_iter().chain(self.away.names()).collect();
        let shown: Vec<&str> = names.iter().map(String::as_str).take(NAMES_SHOWN).collect();
        let there_are = match (shown.as_slice(), names.len().saturating_sub(shown.len())) {
            ([], _) => "there is none".to_owned(),
            ([only], _) => format!("there is only '{only}'"),
            (shown, 0) => format!("there are {}", shown.join(", ")),
            (shown, more) => format!("there are {} and {more} more", shown.join(", ")),
        };
        format!("there is no disk '{name}' ({there_are})")
    }

    fn name_of(&self, node: NodeId) -> Result<String> {
        let status = self.daemon.disks().into_iter().find(|disk| disk.id == node);
        status.map(|disk| disk.name).ok_or_else(|| Error::new(ErrorKind::Locked, "the disk was removed meanwhile"))
    }

    /// Whether there is a disk of this name, including one that could not be opened.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.daemon.disk_named(name).is_some() || self.away.refuse_name(name).is_err()
    }

    /// Returns the disk of this name.
    pub fn disk(&self, name: &str) -> Result<Disk> {
        self.disks().into_iter().find(|disk| disk.name == name).ok_or_else(|| self.absence_of(name))
    }

    /// Returns the disk of this number.
    fn disk_of(&self, node: NodeId) -> Result<Disk> {
        let status = self.daemon.disks().into_iter().find(|disk| disk.id == node);
        let gone = || Error::new(ErrorKind::Locked, "the disk was removed meanwhile");
        Ok(to_disk(status.ok_or_else(gone)?, &self.records.current(), &self.exports()))
    }

    /// Returns all served disks, in the order in which they were added.
    #[must_use]
    pub fn disks(&self) -> Vec<Disk> {
        let (record, exports) = (self.records.current(), self.exports());
        self.daemon.disks().into_iter().map(|disk| to_disk(disk, &record, &exports)).collect()
    }

    /// Returns recorded disks that could not be opened, new drives that the last reload could not open, and disks that
    /// are served without one of their exports.
    #[must_use]
    pub fn failed_disks(&self) -> Vec<FailedDisk> {
        let to_failed = |(name, error)| FailedDisk { name, error: format!("could not be opened: {error}") };
        let mut failed: Vec<FailedDisk> = self.away.failed().into_iter().map(to_failed).collect();
        let without = |FailedExport { id, disk, error }| FailedDisk {
            name: disk,
            error: format!("is served, but its export {id} is not ('ctl unexport {id}' forgets it): {error}"),
        };
        failed.extend(lock(&self.not_opened).iter().filter(|new| !self.knows(&new.name)).cloned());
        failed.extend(self.failed_exports().into_iter().map(without));
        failed
    }

    /// Returns all exports, in the order in which they were added.
    #[must_use]
    pub fn exports(&self) -> Vec<Export> {
        let names: BTreeMap<NodeId, String> =
            self.daemon.disks().into_iter().map(|disk| (disk.id, disk.name)).collect();
        let name = |node| names.get(&node).cloned().unwrap_or_default();
        self.daemon.exports().into_iter().map(|export| to_export(&export, name(export.node))).collect()
    }

    /// Returns the running jobs, and the last that have ended.
    #[must_use]
    pub fn jobs(&self) -> Vec<Job> {
        self.daemon.jobs().into_iter().map(to_job).collect()
    }

    pub(crate) fn job(&self, number: u64) -> Result<Job, Failure> {
        let found = self.jobs().into_iter().find(|job| job.id == number);
        found.ok_or_else(|| Failure::not_found(format!("there is no job {number}")))
    }

    pub(crate) fn job_id(&self, number: u64) -> Result<JobId, Failure> {
        let found = self.daemon.jobs().into_iter().find(|job| job.id.number() == number);
        found.map(|job| job.id).ok_or_else(|| Failure::not_found(format!("there is no job {number}")))
    }

    /// Asks a job to stop.
    pub(crate) fn cancel_job(&self, number: u64) -> Result<Job, Failure> {
        self.daemon.cancel_job(self.job_id(number)?)?;
        self.job(number)
    }

    /// Removes an ended job from the list.
    pub(crate) fn forget_job(&self, number: u64) -> Result<(), Failure> {
        Ok(self.daemon.forget_job(self.job_id(number)?)?)
    }

    /// Returns the figures of disks and reactors.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats_of(&self.daemon.disks())
    }

    /// As [`Manager::stats`], of these disks.
    pub(crate) fn stats_of(&self, disks: &[DiskStatus]) -> Stats {
        let latencies = self.daemon.latencies();
        let exports = self.daemon.exports();
        let disks = disks.iter().map(|disk| {
            let of_disk = exports.iter().filter(|export| export.node == disk.id);
            let connected = of_disk.clone().any(|export| export.connected);
            let counters = of_disk.map(counters_of).fold(to_counters(&disk.past), Counters::plus);
            let tables = disk.tables.as_ref().map(|tables| TableStats {
                hits: tables.hits,
                misses: tables.misses,
                evictions: tables.evictions,
                used_bytes: tables.used_bytes,
                limit_bytes: tables.limit_bytes,
            });
            let throttled = disk.throttled.as_micros();
            let throttled_us = u64::try_from(throttled).unwrap_or(u64::MAX);
            let latency = latencies.get(&disk.id);
            DiskStats {
                disk: disk.name.clone(),
                counters,
                throttled_us,
                connected,
                oldest_request_us: latency.map(|latency| latency.oldest_ns / 1000).filter(|us| *us > 0),
                latency: latency.map(latency::to_operations).unwrap_or_default(),
                tables,
            }
        });
        let reactors = self.daemon.reactors().into_iter().map(|(name, stats)| ReactorStats {
            name,
            turns: stats.turns,
            sleeps: stats.sleeps,
            system_calls: stats.system_calls,
            worker_calls: stats.worker_calls,
        });
        Stats { disks: disks.collect(), reactors: reactors.collect() }
    }

    /// Returns a receiver of all later events.
    pub(crate) fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Asks the thread in [`Manager::wait_until_asked_to_end`] to end the daemon.
    pub fn ask_to_end(&self) {
        *lock(&self.ending) = true;
        self.events.publish(EventKind::ShuttingDown, None, None, None);
        self.asked_to_end.notify_all();
    }

    /// Waits for [`Manager::ask_to_end`].
    pub fn wait_until_asked_to_end(&self) {
        let ending = lock(&self.ending);
        drop(self.asked_to_end.wait_while(ending, |ending| !*ending).unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends all disks and the daemon. The record stays: a manager with the same state directory serves them again.
    pub fn shutdown(self) -> Result<()> {
        self.daemon.shutdown()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes paths absolute: another run of the daemon may have another working directory.
fn absolute_file(mut options: Options) -> Result<Options> {
    options.make_paths_whole(absolute)?;
    // Other files name a device by its path alone.
    if let Some(path) = options.get("file").map(FileName::parse).transpose()?.as_ref().and_then(FileName::path) {
        options.set("file", path.to_string_lossy());
    }
    Ok(options)
}
