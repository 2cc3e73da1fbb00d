//! A daemon and the record of what it serves: the calls of the control interface.
//!
//! A change is answered when its record is durable. A change of the daemon that cannot be recorded is undone.

mod answers;
mod change;
mod exports;
mod held;
mod latency;
mod points;
mod reload;
mod restore;
#[cfg(test)]
mod tests;

use self::answers::{counters_of, to_disk, to_job};
use self::exports::{to_export, with_absolute_paths};
use self::held::Holding;
use self::reload::Configuration;
use crate::api::{
    AddDisk, AddExport, Counters, Disk, DiskStats, Event, EventKind, Export, FailedDisk, FailedExport, FormerTop, Job,
    Overlay, ReactorStats, Stats, TableStats,
};
use crate::events::Events;
use crate::failure::Failure;
use crate::options::Options;
use crate::record::{Record, RecordedDisk, Records, Top, whole_name};
use crate::routes::StorageCalls;
use block::{Error, ErrorKind, Result};
use daemon::{Daemon, DaemonConfig, DiskStatus, ExportId, JobId, NodeId, absolute};
use drive::DriveOptions;
use image::FileName;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::broadcast;

/// A disk that the command line or a configuration file gives.
#[derive(Debug, Clone)]
pub struct Configured {
    /// The disk and its export.
    pub drive: DriveOptions,
    /// The same as `key=value,...`. The record identifies the disk by this text, from one start to the next.
    pub text: String,
    /// Whether to serve it at the socket of its options, or beside its image.
    pub serve: bool,
    /// Its other exports. An export that names no disk belongs to this one.
    pub exports: Vec<AddExport>,
}

impl Configured {
    /// Returns the name, if the options give one.
    pub(crate) fn name(&self) -> Option<&str> {
        self.drive.disk.name.as_deref()
    }

    /// Returns its other exports; those without a disk get the disk `name`.
    pub(crate) fn exports_of(&self, name: &str) -> impl Iterator<Item = AddExport> {
        self.exports.iter().cloned().map(move |export| match export.disk.is_empty() {
            true => AddExport { disk: name.to_owned(), ..export },
            false => export,
        })
    }

    /// Returns the text by which the record identifies it.
    pub(crate) fn key(&self) -> String {
        let mut key = self.text.clone();
        if !self.serve {
            key.push_str("#no-export");
        }
        for export in &self.exports {
            key.push('#');
            key.push_str(&serde_json::to_string(export).unwrap_or_default());
        }
        key
    }
}

/// A daemon with a record of what it serves.
///
/// Any thread may make these calls, except a reactor's: they block for as long as opening, closing or growing a disk
/// takes.
pub struct Manager {
    pub(crate) daemon: Daemon,
    pub(crate) records: Arc<Records>,
    /// The request that made each export: `None` for the export of the disk's own options.
    exports: Mutex<BTreeMap<ExportId, Option<AddExport>>>,
    /// Recorded disks that could not be opened, and why.
    failed: Mutex<BTreeMap<String, String>>,
    /// Recorded exports that could not be served.
    failed_exports: Mutex<Vec<exports::NotServed>>,
    pub(crate) events: Arc<Events>,
    pub(crate) storage_calls: Arc<StorageCalls>,
    /// Tells a thread about disks that begin to hold requests.
    holds: Sender<Holding>,
    /// The configuration file, if there is one. Locked while it is read again.
    configuration: Mutex<Option<Configuration>>,
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
            failed: Mutex::default(),
            failed_exports: Mutex::default(),
            events,
            storage_calls: Arc::default(),
            configuration: Mutex::default(),
            ending: Mutex::new(false),
            asked_to_end: Condvar::new(),
        })
    }

    /// The daemon.
    #[must_use]
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Opens a disk and, unless `request` says otherwise, serves it.
    pub fn add_disk(&self, request: AddDisk) -> Result<Disk> {
        let options = absolute_file(request.options)?;
        let mut drive = options.to_drive()?;
        drive.disk.former_tops = request.former_tops.len();
        drive.disk.bases = request.bases;
        let tops = request.former_tops;
        let Some(overlay) = request.overlay else {
            let node = self.add(&drive, Some(options), request.export, None, &tops)?;
            return self.disk(&self.name_of(node)?);
        };
        let node = self.add(&drive, Some(options), false, None, &tops)?;
        let name = self.name_of(node)?;
        let put_on = self.snapshot(&[Overlay { disk: name.clone(), overlay }]);
        let served = put_on.and_then(|_| match request.export {
            true => self.export_as_added(&name, &drive),
            false => Ok(()),
        });
        if let Err(error) = served {
            self.undo_add_of(&name, node);
            return Err(error);
        }
        self.disk(&name)
    }

    /// Adds the export of the disk's own options.
    fn export_as_added(&self, name: &str, drive: &DriveOptions) -> Result<()> {
        let node = self.node(name)?;
        let id = self.daemon.add_export(node, &drive.export)?;
        let export = self.daemon.exports().into_iter().find(|export| export.id == id);
        let socket = export.map(|export| export.attachment.socket);
        self.record_of(name, node).change(|disk| {
            disk.own_export = true;
            if let Some(socket) = &socket {
                disk.options.set("socket", socket.to_string_lossy());
            }
        })?;
        lock(&self.exports).insert(id, None);
        self.events.publish(EventKind::ExportAdded, Some(name), Some(id.number()), None);
        Ok(())
    }

    fn add(
        &self,
        drive: &DriveOptions,
        options: Option<Options>,
        export: bool,
        configured: Option<&str>,
        former_tops: &[FormerTop],
    ) -> Result<NodeId> {
        let name = drive.disk.name.as_deref();
        if let Some(name) = name.filter(|name| lock(&self.failed).contains_key(*name)) {
            let message = format!("there is a disk '{name}' already, which could not be opened: remove it first");
            return Err(Error::new(ErrorKind::Locked, message));
        }
        let may_come_back = !matches!(drive.disk.file, Some(FileName::Descriptor(_)));
        if self.records.is_durable() && !may_come_back && configured.is_none() {
            let message = "a passed descriptor (fd:N) cannot be served again after a restart: name a path, \
                           or serve it without a state directory";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        let (node, own_export) = match export {
            true => self.daemon.add(drive).map(|(node, export)| (node, Some(export)))?,
            false => (self.daemon.add_disk(&drive.disk)?, None),
        };
        let name = self.name_of(node)?;
        self.records.is_of(&name, node);
        self.check_former_tops(node, drive, former_tops).inspect_err(|_| self.undo_add(node))?;
        self.listen_to_hold(node, &name);
        if let Some(mut options) = options.filter(|_| may_come_back) {
            if let Some(export) = self.daemon.exports().into_iter().find(|export| Some(export.id) == own_export) {
                // The default socket lies beside the top layer's file, which may change.
                options.set("socket", export.attachment.socket.to_string_lossy());
            }
            let mut recorded = RecordedDisk {
                name: name.clone(),
                options,
                own_export: own_export.is_some(),
                exports: Vec::new(),
                former_tops: former_tops.iter().rev().map(Top::from).collect(),
                bases: Vec::new(),
                moved_from: None,
                unfinished: None,
                unfinished_inode: None,
                leaving_tops: Vec::new(),
                last_backups: Vec::new(),
                fleeces: Vec::new(),
                kept_in: None,
                configured: configured.map(str::to_owned),
            };
            recorded.may_rest_on(&drive.disk.bases);
            self.records.change(|record| record.put(recorded)).inspect_err(|_| self.undo_add(node))?;
        }
        self.events.publish(EventKind::DiskAdded, Some(&name), None, None);
        if let Some(id) = own_export {
            lock(&self.exports).insert(id, None);
            self.events.publish(EventKind::ExportAdded, Some(&name), Some(id.number()), None);
        }
        Ok(node)
    }

    /// Refuses former tops that are not the layers below: those are open for writing now, and have not been written to.
    fn check_former_tops(&self, node: NodeId, drive: &DriveOptions, tops: &[FormerTop]) -> Result<()> {
        if tops.is_empty() {
            return Ok(());
        }
        let layers = self.daemon.layer_files(node)?;
        let below =
            layers.iter().skip(if drive.disk.snapshot { 2 } else { 1 }).map(Some).chain(std::iter::repeat(None));
        for (top, layer) in tops.iter().zip(below) {
            let top = whole_name(&top.file);
            let file = FileName::parse(&top)?;
            let canonical = file.path().and_then(|path| path.canonicalize().ok()).map_or(file.clone(), FileName::from);
            if layer.is_none_or(|layer| !layer.is_same_file(&canonical)) {
                let instead = layer.map_or_else(|| "no other layer".to_owned(), |layer| format!("'{layer}'"));
                let what = format!("'{file}' is no former top of the disk: the images name {instead} there");
                return Err(Error::new(ErrorKind::BadOption, what));
            }
        }
        Ok(())
    }

    /// Also a disk that another call removes, or the end of the daemon, leaves the record: half of what was asked for
    /// must not come back.
    fn undo_add_of(&self, name: &str, node: NodeId) {
        self.undo_add(node);
        self.forget_ended_exports();
        if let Err(error) = self.forget(name, Some(node), None) {
            tracing::error!("{error}");
        }
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
    }

    fn undo_add(&self, node: NodeId) {
        if let Err(error) = self.daemon.remove_disk(node, true) {
            tracing::error!("{error}");
        }
    }

    /// Closes a disk. A disk with exports or jobs is refused, unless `force` ends them first.
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<()> {
        let mut closed = Ok(());
        // From here on, another disk may get the name at any time.
        let mut node = self.records.node_of(name);
        let key = self.records.current().disk(name).and_then(|disk| disk.configured.clone());
        if lock(&self.failed).remove(name).is_none() {
            let served = self.node(name)?;
            node = Some(served);
            closed = self.daemon.remove_disk(served, force);
            // A disk that could not be closed is removed, too.
            if self.daemon.disk_named(name) == Some(served) {
                return closed;
            }
            let what = || format!("the disk '{name}' is removed, but could not be closed");
            closed = closed.map_err(|error| error.in_context(what()));
            self.forget_ended_exports();
        }
        self.forget(name, node, key)?;
        lock(&self.failed_exports).retain(|export| export.request.disk != name);
        self.events.publish(EventKind::DiskRemoved, Some(name), None, None);
        closed
    }

    /// Takes a disk off the record, unless the record of this name is another disk's by now. If the disk is configured,
    /// by `key`, it stays away.
    fn forget(&self, name: &str, node: Option<NodeId>, key: Option<String>) -> Result<()> {
        self.records.change(|record| {
            record.removed.extend(key.filter(|key| !record.removed.contains(key)));
            if self.records.node_of(name) == node {
                record.disks.retain(|disk| disk.name != name);
            }
        })
    }

    /// Reopens the files of a disk, because one was replaced, or changed behind the disk.
    pub fn reopen(&self, name: &str, force: bool) -> Result<Disk> {
        self.daemon.reopen(self.node(name)?, force)?;
        self.events.publish(EventKind::DiskChanged, Some(name), None, Some("its files were opened anew".to_owned()));
        self.disk(name)
    }

    /// Makes a disk larger; its guests learn the new size.
    pub fn resize(&self, name: &str, size_bytes: u64) -> Result<Disk> {
        self.daemon.resize(self.node(name)?, size_bytes)?;
        self.events.publish(EventKind::DiskResized, Some(name), None, Some(format!("{size_bytes} bytes")));
        self.disk(name)
    }

    /// Puts new, empty qcow2 layers on top of disks, all at one moment. The record names them before anything is
    /// written to them.
    pub fn snapshot(&self, overlays: &[Overlay]) -> Result<Vec<Disk>> {
        let wanted = overlays.iter().map(|overlay| Ok((overlay.disk.as_str(), absolute(&overlay.overlay))));
        let wanted = wanted.collect::<Result<Vec<(&str, PathBuf)>>>()?;
        if wanted.is_empty() {
            return Err(Error::new(ErrorKind::BadOption, "a snapshot needs at least one disk and its overlay"));
        }
        let nodes = wanted.iter().map(|(name, path)| Ok((self.node(name)?, path.as_path())));
        let nodes = nodes.collect::<Result<Vec<(NodeId, &Path)>>>()?;
        let put_on = |record: &mut Record| {
            for ((name, path), (node, _)) in wanted.iter().zip(&nodes) {
                // The call may have waited for storage longer than the disk was there.
                if self.records.node_of(name) != Some(*node) {
                    let message = format!("the disk '{name}' was removed meanwhile, and another one has its name");
                    return Err(Error::new(ErrorKind::Locked, message));
                }
                if let Some(disk) = record.disk_mut(name) {
                    disk.put_on(&path.to_string_lossy());
                }
            }
            Ok(())
        };
        // If they could not be recorded, the directory may name them all the same: it is written anew.
        let undo = |record: &mut Record| {
            for ((name, path), (node, _)) in wanted.iter().zip(&nodes) {
                let is_its = self.records.node_of(name) == Some(*node);
                let disk = record.disk_mut(name).filter(|disk| is_its && disk.has_top(&path.to_string_lossy()));
                if let Some(disk) = disk {
                    disk.undo_put_on();
                }
            }
        };
        self.daemon.put_overlays_with(&nodes, || self.records.try_change(put_on), || self.records.change(undo))?;
        let changed = |(name, path): &(&str, PathBuf)| {
            let message = format!("'{}' is the new top", path.display());
            self.events.publish(EventKind::LayersChanged, Some(name), None, Some(message));
            self.disk(name)
        };
        wanted.iter().map(changed).collect()
    }

    /// Adds an export of a disk, for a guest's monitor or for NBD clients.
    pub fn add_export(&self, request: AddExport) -> Result<Export> {
        let node = self.node(&request.disk)?;
        let request = with_absolute_paths(request);
        let id = self.begin_export(node, &request)?;
        let record = |disk: &mut RecordedDisk| {
            // An export that failed at the start is already in the record.
            disk.exports.retain(|other| *other != request);
            disk.exports.push(request.clone());
        };
        self.record_of(&request.disk, node).change(record).inspect_err(|_| {
            if let Err(error) = self.daemon.remove_export(id) {
                tracing::error!("{error}");
            }
        })?;
        let disk = request.disk.clone();
        lock(&self.failed_exports).retain(|other| other.request != request);
        lock(&self.exports).insert(id, Some(request));
        let gone = || Error::new(ErrorKind::Locked, "the export was removed meanwhile");
        let export = self.exports().into_iter().find(|export| export.id == id.number()).ok_or_else(gone)?;
        let uri = export.nbd.as_ref().map(|nbd| nbd.uri.clone());
        self.events.publish(EventKind::ExportAdded, Some(&disk), Some(id.number()), uri);
        Ok(export)
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
        let how = lock(&self.exports).get(&export.id).cloned().flatten();
        self.daemon.remove_export(export.id)?;
        lock(&self.exports).remove(&export.id);
        self.record_of(&disk, export.node).change(|disk| match &how {
            Some(how) => disk.exports.retain(|other| other != how),
            None => disk.own_export = false,
        })?;
        self.events.publish(EventKind::ExportRemoved, Some(&disk), Some(number), None);
        Ok(())
    }

    pub(crate) fn node(&self, name: &str) -> Result<NodeId> {
        let none = || Error::new(ErrorKind::BadOption, format!("there is no disk '{name}'"));
        self.daemon.disk_named(name).ok_or_else(none)
    }

    fn name_of(&self, node: NodeId) -> Result<String> {
        let status = self.daemon.disks().into_iter().find(|disk| disk.id == node);
        status.map(|disk| disk.name).ok_or_else(|| Error::new(ErrorKind::Locked, "the disk was removed meanwhile"))
    }

    /// Whether there is a disk of this name, including one that could not be opened.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.daemon.disk_named(name).is_some() || lock(&self.failed).contains_key(name)
    }

    /// Returns the disk of this name.
    pub fn disk(&self, name: &str) -> Result<Disk> {
        let none = || Error::new(ErrorKind::BadOption, format!("there is no disk '{name}'"));
        self.disks().into_iter().find(|disk| disk.name == name).ok_or_else(none)
    }

    /// Returns all served disks, in the order in which they were added.
    #[must_use]
    pub fn disks(&self) -> Vec<Disk> {
        let (record, exports) = (self.records.current(), self.exports());
        self.daemon.disks().into_iter().map(|disk| to_disk(disk, &record, &exports)).collect()
    }

    /// Returns recorded disks that could not be opened, and those that are served without one of their exports.
    #[must_use]
    pub fn failed_disks(&self) -> Vec<FailedDisk> {
        let to_failed = |(name, error): (&String, &String)| FailedDisk {
            name: name.clone(),
            error: format!("could not be opened: {error}"),
        };
        let mut failed: Vec<FailedDisk> = lock(&self.failed).iter().map(to_failed).collect();
        let without = |FailedExport { id, disk, error }| FailedDisk {
            name: disk,
            error: format!("is served, but its export {id} is not ('ctl unexport {id}' forgets it): {error}"),
        };
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
            let counters = of_disk.map(counters_of).fold(Counters::default(), Counters::plus);
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
    if let Some(path) = options.get("file").map(FileName::parse).transpose()?.as_ref().and_then(FileName::path) {
        let file = absolute(path);
        let text = file.to_str().ok_or_else(|| {
            let message = format!("the path '{}' is not UTF-8, which JSON cannot name", file.display());
            Error::new(ErrorKind::BadOption, message)
        })?;
        options.set("file", text);
    }
    if let Some(socket) = options.get("socket").map(|socket| absolute(Path::new(socket))) {
        options.set("socket", socket.to_string_lossy());
    }
    Ok(options)
}
